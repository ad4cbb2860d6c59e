"""What a shared store gives a vLLM engine, and what it costs one that finds nothing in it.

``python -m benchmarks.vllm_reuse [--store URL] [--plot FILE.svg] [--json FILE] [--tiny]`` needs vLLM.

- Reuse: engine A computes prompts of several lengths and saves them; it ends, and engine B, a new process, loads them.
  Time to first token of both; the answers must be equal. A's time is with the connector, which saves meanwhile.
- No reuse: an engine with the connector and one without take turns on prompts that nobody has seen. Processor seconds
  of the whole process, saves included, per prompt token; the ratio of each pair of turns. These compute on one
  thread, because threads that wait for each other spin, and that is no work. A third engine saves only what comes for
  the second time (``save_after_uses``). Beside it what no connector that saves can do without: one copy of the same
  bytes, and one write of each block into a file of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import bars
from benchmarks.vllm_engines import (
    Process,
    answers_differ,
    engines,
    first_tokens,
    kv_bytes_per_token,
    median_ms,
    ratio,
    turns,
)
from tests.vllm.engine import BLOCK


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    hidden: int
    layers: int
    lengths: tuple[int, ...]  #: prompt tokens
    repeats: int
    turns: int
    turn_tokens: int
    threads: int  #: on which A and B compute
    sides: tuple[str, ...]  #: engines that take turns


FULL = Size(512, 8, (1024, 2048, 4096, 8192), 3, 12, 2048, 2, ("without", "with", "sparing"))
TINY = Size(128, 2, (256, 512), 1, 2, 256, 1, ("without", "with"))


# ---- what is measured


def floor(nbytes: int, files: int, folder: str) -> float:
    """Processor seconds to copy ``nbytes`` once and to write them into so many new files."""
    source, copy = bytearray(os.urandom(nbytes)), bytearray(nbytes)
    spent = []
    for i in range(8):
        start = time.process_time()
        copy[:] = source
        step = nbytes // files
        for n in range(files):
            with open(f"{folder}/floor-{i}-{n}", "wb", buffering=0) as file:
                file.write(memoryview(copy)[n * step : (n + 1) * step])
        spent.append(time.process_time() - start)
    return statistics.median(spent)


def measure(store: str, size: Size, folder: str) -> dict[str, Any]:
    from tests.vllm.models import write_llama

    model = write_llama(Path(folder) / "model", hidden=size.hidden, layers=size.layers, heads=size.hidden // 32)
    longest, shared = max(*size.lengths, size.turn_tokens), {"store": store}
    connectors = {"without": None, "with": shared, "sparing": shared | {"tenant": "sparing", "save_after_uses": 2}}
    sides = {side: Process(model, connectors[side], longest, threads=1) for side in size.sides}
    # The engine with the connector can be A as well, if it computes on as many threads.
    a = sides["with"] if size.threads == 1 else Process(model, shared, longest, threads=size.threads)
    with engines(*{*sides.values(), a}):
        spent = turns(sides, size.turns, size.turn_tokens)
        cold = first_tokens({"cold": a}, size.lengths, size.repeats)
    with engines(Process(model, shared, longest, threads=size.threads)) as (b,):
        pool = first_tokens({"pool": b}, size.lengths, size.repeats)
    per_token = kv_bytes_per_token(model)
    least = floor(size.turn_tokens * per_token, size.turn_tokens // BLOCK, folder) / size.turn_tokens
    return {**cold, **pool, "turns": spent, "kv_bytes_per_token": per_token, "floor_cpu_s": least}


# ---- what a person sees


def report(result: dict[str, Any], size: Size) -> dict[str, dict[int, float]]:
    """Print the tables; the medians of time to first token in ms. Exits if an answer differs or was not reused."""
    medians = {side: {n: median_ms(result[side][n]) for n in size.lengths} for side in ("cold", "pool")}
    print(f"Time to first token, hidden size {size.hidden}, {size.layers} layers, fp32 (median of {size.repeats}):\n")
    print(f"{'prompt tokens':>14}{'A, cold':>12}{'B, from store':>16}{'faster':>9}{'not computed':>15}")
    for n in size.lengths:
        cold, pool = medians["cold"][n], medians["pool"][n]
        cached = min(run["cached"] for run in result["pool"][n])
        print(f"{n:>14}{cold:>9.0f} ms{pool:>13.0f} ms{cold / pool:>8.1f}x{cached:>15}")
        if answers_differ(result["cold"][n], result["pool"][n]):
            sys.exit(f"WRONG: B answers a prompt of {n} tokens otherwise than A")
        if not cached:
            sys.exit(f"WRONG: B reused nothing of a prompt of {n} tokens; can processes share the store?")
    print("\nEvery answer of B is A's.\n")
    spent = {side: 1e6 * statistics.median(turn[side] for turn in result["turns"]) for side in size.sides}
    print(f"No reuse, {size.turns} turns on prompts of {size.turn_tokens} tokens, processor time a prompt token:\n")
    print(f"{'without the connector':<40}{spent['without']:>7.1f} us")
    for side, name in (("with", "with it"), ("sparing", "with it, save_after_uses=2")):
        if side in size.sides:
            print(f"{name:<40}{spent[side]:>7.1f} us, {ratio(result['turns'], side, 'without')}")
    least = f"a copy and a write of {result['kv_bytes_per_token']} bytes"
    print(f"{least:<40}{1e6 * result['floor_cpu_s']:>7.1f} us")
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="a store that processes share (default: files in a temporary folder)")
    parser.add_argument("--plot", type=Path, help="draw the times to first token into this SVG file")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a small model and few prompts, to see that it works")
    options = parser.parse_args()
    size = TINY if options.tiny else FULL
    with tempfile.TemporaryDirectory(prefix="kvpool-vllm-") as folder:
        result = measure(options.store or f"file://{folder}/store", size, folder)
    medians = report(result, size)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    if options.plot:
        title = f"Time to first token (ms): vLLM, hidden size {size.hidden}, {size.layers} layers, fp32, CPU"
        rows = {f"{n} tokens": (medians["cold"][n], medians["pool"][n]) for n in size.lengths}
        options.plot.write_text(bars(title, ("cold: all computed", "pool: loaded from the store"), rows))


if __name__ == "__main__":
    main()
