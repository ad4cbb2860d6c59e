"""kvpool over Mooncake beside vLLM's own Mooncake connector: real engines on one master and one owner, started here.

``python -m tests.mooncake.namespace python -m benchmarks.vllm_mooncake [--only reuse|cpu] [--json FILE] [--tiny]``
needs vLLM and Mooncake.

- Reuse: engine A computes prompts of several lengths on two threads and saves them; it ends, and engine B, a new
  process, loads them, forgets, and loads them again, several times. B computes what is left, less than two blocks, on
  one thread: two that wait for each other on a busy machine cost more than all the rest. One A and one B for each
  connector; they take turns, prompt by prompt. Time to first token; every answer must be A's.
- CPU: engines without a connector and with several take turns on prompts that nobody has seen. Processor seconds of the
  whole process, Mooncake's client and all saves included, per prompt token; each computes on one thread.

vLLM's connector waits for a CUDA event before it reads a block. There is none on a CPU, where a block is complete when
the step is; in its processes, and only there, an event that has always happened stands in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

from benchmarks.vllm_engines import (
    Process,
    Run,
    answers_differ,
    engines,
    first_tokens,
    median_ms,
    ratio,
    serve,
    turns,
)
from tests.mooncake.servers import Mooncake
from tests.vllm.models import write_llama

VLLM, KVPOOL = "vLLM's connector", "kvpool"
REUSE = (VLLM, KVPOOL)
CPU = ("no connector", VLLM, KVPOOL, "kvpool, save_after_uses=2", "kvpool, files")
_ports = count(1)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    hidden: int
    layers: int
    lengths: tuple[int, ...]  #: prompt tokens
    repeats: int
    rounds: int  #: how often B is asked each prompt
    turns: int
    turn_tokens: int


FULL = Size(512, 8, (1024, 2048, 4096, 8192), 3, 3, 12, 2048)
TINY = Size(128, 2, (256, 512), 1, 1, 2, 256)


class Happened:
    """In place of ``torch.cuda.Event``."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Bench:
    """The model, the servers, and the ways to start an engine on them."""

    def __init__(self, size: Size, mooncake: Mooncake, folder: Path) -> None:
        self.size = size
        self.model = write_llama(folder / "model", hidden=size.hidden, layers=size.layers, heads=size.hidden // 32)
        self._longest = max(*size.lengths, size.turn_tokens)
        self._mooncake = mooncake
        self._folder = folder
        config = {
            "mode": "standalone-store",  # the engine lends no memory, as with kvpool
            "global_segment_size": 0,
            "local_buffer_size": 64 << 20,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": mooncake.master.address,
            "protocol": "tcp",
            "device_name": "",
        }
        # The settings of Mooncake's client that kvpool makes for itself, so that both have the same.
        self._reference_environment = {
            "MOONCAKE_CONFIG_PATH": str(folder / "mooncake.json"),
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
            "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
            "MC_LOG_LEVEL": "ERROR",
        }
        (folder / "mooncake.json").write_text(json.dumps(config))

    def start(self, side: str, threads: int) -> Process:
        """An engine of this side: what it is called in the tables."""
        arguments = (str(self.model), self._kvpool(side), self._longest)
        if side != VLLM:
            return Process(*arguments, threads=threads)
        transfer = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lookup_rpc_port": next(_ports)},  # names a socket file, no port
        }
        environment = self._reference_environment | {"VLLM_RPC_BASE_PATH": str(self._folder)}
        return Process(
            *arguments, transfer, threads=threads, module="benchmarks.vllm_mooncake", environment=environment
        )

    def _kvpool(self, side: str) -> dict[str, Any] | None:
        configurations: dict[str, dict[str, Any]] = {
            KVPOOL: {"store": self._mooncake.url},
            "kvpool, save_after_uses=2": {"store": self._mooncake.url, "tenant": "sparing", "save_after_uses": 2},
            "kvpool, files": {"store": f"file://{self._folder}/store"},
        }
        return configurations.get(side)


def reuse(bench: Bench) -> dict[str, dict[str, dict[int, list[Run]]]]:
    """For A and B, each connector and each length: what the prompts gave."""
    size = bench.size
    found = {}
    for name, threads, rounds in (("A", 2, 1), ("B", 1, size.rounds)):
        sides = {side: bench.start(side, threads) for side in REUSE}
        with engines(*sides.values()):
            found[name] = first_tokens(sides, size.lengths, size.repeats, rounds)
    return found


def cpu(bench: Bench) -> list[dict[str, float]]:
    sides = {side: bench.start(side, 1) for side in CPU}
    with engines(*sides.values()):
        return turns(sides, bench.size.turns, bench.size.turn_tokens)


# ---- what a person sees


def report_reuse(found: Mapping[str, Mapping[str, Mapping[int, list[Run]]]], size: Size) -> None:
    """Exits if an answer differs or was not reused."""
    print(f"Time to first token, hidden size {size.hidden}, {size.layers} layers, fp32 (medians, ms):\n")
    heads = ("prompt tokens", "A, vLLM", "A, kvpool", "B, vLLM", "B, kvpool", "vLLM/kvpool", "not computed")
    print("".join(f"{head:>14}" for head in heads))
    for n in size.lengths:
        times = [median_ms(found[name][side][n]) for name in "AB" for side in REUSE]
        cached = {side: min(run["cached"] for run in found["B"][side][n]) for side in REUSE}
        row = "".join(f"{time:>14.0f}" for time in times)
        print(f"{n:>14}{row}{times[2] / times[3]:>14.2f}{'/'.join(map(str, cached.values())):>14}")
        for name, side in product("AB", REUSE):
            runs = found[name][side][n]
            if answers_differ(found["A"][VLLM][n] * (len(runs) // size.repeats), runs):
                sys.exit(f"WRONG: {name} with {side} answers a prompt of {n} tokens otherwise than what was computed")
        if not all(cached.values()):
            sys.exit(f"WRONG: nothing of a prompt of {n} tokens was reused: {cached}")
    print("\nEvery answer of B is what A computed.\n")


def report_cpu(spent: list[dict[str, float]], size: Size) -> None:
    print(f"No reuse, {size.turns} turns on prompts of {size.turn_tokens} tokens, processor time a prompt token:\n")
    for side in CPU:
        line = f"{side:<30}{1e6 * statistics.median(turn[side] for turn in spent):>7.1f} us"
        print(line if side == CPU[0] else f"{line}, {ratio(spent, side, CPU[0])}")
    print(f"\n{KVPOOL} beside {VLLM}: {ratio(spent, KVPOOL, VLLM)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["reuse", "cpu"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a small model and few prompts, to see that it works")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        import torch

        torch.cuda.Event = Happened  # type: ignore[assignment, misc]
        serve(*json.loads(options.engine))
        return
    size = TINY if options.tiny else FULL
    result: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-") as folder,
        Mooncake(memory=256 << 20 if options.tiny else 4 << 30, default_kv_lease_ttl="10s", client_ttl=10) as mooncake,
    ):
        bench = Bench(size, mooncake, Path(folder))
        if options.only != "cpu":
            result["reuse"] = reuse(bench)
            report_reuse(result["reuse"], size)
        if options.only != "reuse":
            result["cpu"] = cpu(bench)
            report_cpu(result["cpu"], size)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
