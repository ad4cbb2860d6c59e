"""vLLM engines in processes of their own, and what is measured on several of them in turns.

Such a process reads one line of JSON for each prompt and answers with one line.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.engine import ENVIRONMENT, prompt

__all__ = [
    "Process",
    "answers_differ",
    "engines",
    "first_tokens",
    "kv_bytes_per_token",
    "median_ms",
    "ratio",
    "say",
    "serve",
    "turns",
]

Run = dict[str, Any]  #: what an engine answers for one prompt


# ---- in the engine's process


def serve(model: str, connector: dict[str, Any] | None, longest: int, transfer: dict[str, Any] | None = None) -> None:
    """Answer prompts of up to ``longest`` tokens.

    ``connector``: kvpool's configuration, None for an engine without it. ``transfer``: vLLM's ``kv_transfer_config`` of
    an engine with another connector.
    """
    from tests.vllm.engine import Engine

    options: dict[str, Any] = {"kv_transfer_config": transfer} if transfer else {}
    per_token = kv_bytes_per_token(model)
    engine = Engine(
        Path(model),
        connector,
        kv_bytes=3 * (longest + 256) * per_token,
        max_model_len=longest + 256,
        **options,
    )
    engine.run(prompt(min(longest, 1024), seed=0), output=2)  # the first call of anything is slow
    engine.drain()
    say({})
    for line in sys.stdin:
        job = json.loads(line)
        if job["forget"]:
            engine.forget()
        before, cpu = engine.counters if connector else {}, time.process_time()
        start = time.perf_counter()
        output = engine.run(prompt(job["tokens"], seed=job["seed"]), output=1)
        seconds = time.perf_counter() - start
        engine.drain()
        cpu = time.process_time() - cpu
        grown = {k: v - before[k] for k, v in (engine.counters if connector else {}).items() if v != before[k]}
        answer = {"token": output.tokens, "logprob": output.logprobs, "cached": output.cached}
        say({"first_token_s": seconds, "cpu_s": cpu, **answer, "did": grown})
    engine.close()


def kv_bytes_per_token(model: str | Path) -> int:
    config = json.loads((Path(model) / "config.json").read_text())
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4)


def say(what: Run) -> None:
    print("SAY " + json.dumps(what), flush=True)


# ---- in the process that measures


class Process:
    """An engine in a process of its own, started at once; ``engines`` waits until it is ready.

    ``arguments``: those of :func:`serve`. ``threads``: on which it computes. ``module``: what is run instead of this
    one, with the same argument.
    """

    def __init__(
        self,
        *arguments: Any,
        threads: int,
        module: str = "benchmarks.vllm_engines",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", module, "--engine", json.dumps(arguments, default=str)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            # The number of threads counts when torch is imported, whoever does that first.
            env={**ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": str(threads), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def hear(self) -> Run:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("SAY "):
                answer: Run = json.loads(line.removeprefix("SAY "))
                return answer
        raise RuntimeError("an engine ended early:\n" + self.said()[-3000:])

    def said(self) -> str:
        """What it wrote to standard error so far."""
        self._errors.seek(0)
        return self._errors.read()

    def run(self, tokens: int, seed: int, forget: bool = False) -> Run:
        """One prompt from arrival until everything is saved. ``forget``: the engine first empties its own cache."""
        return self.ask(tokens=tokens, seed=seed, forget=forget)

    def ask(self, **job: Any) -> Run:
        """What the process makes of one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._errors.close()


@contextmanager
def engines(*processes: Process) -> Iterator[tuple[Process, ...]]:
    """Wait until all are ready; end them in any case."""
    try:
        for process in processes:
            process.hear()
        yield processes
    finally:
        for process in processes:
            process.end()


def first_tokens(
    sides: Mapping[str, Process], lengths: Sequence[int], repeats: int, rounds: int = 1
) -> dict[str, dict[int, list[Run]]]:
    """For each side and length, what ``repeats`` prompts gave. The prompts are always the same; sides take turns.

    More rounds ask the same prompts again, of engines that have forgotten them.
    """
    runs: dict[str, dict[int, list[Run]]] = {side: {n: [] for n in lengths} for side in sides}
    for n in lengths:
        for i in range(repeats * rounds):
            for side in sorted(sides, reverse=bool(i % 2)):
                runs[side][n].append(sides[side].run(n, seed=1000 * n + i % repeats, forget=i >= repeats))
    return runs


def turns(sides: Mapping[str, Process], number: int, tokens: int) -> list[dict[str, float]]:
    """Processor seconds a prompt token of each engine, turn by turn; who begins changes too."""
    spent = []
    for turn in range(number):
        order = sorted(sides, reverse=bool(turn % 2))
        done = {side: sides[side].run(tokens, seed=10**6 + turn) for side in order}
        assert not any(run["cached"] for run in done.values()), "something was reused"
        spent.append({side: run["cpu_s"] / tokens for side, run in done.items()})
    return spent


# ---- what a person sees


def median_ms(runs: Sequence[Run]) -> float:
    """The time to first token."""
    return 1000 * statistics.median(float(run["first_token_s"]) for run in runs)


def answers_differ(runs: Sequence[Run], others: Sequence[Run]) -> bool:
    """Whether tokens do, or log probabilities by more than fp32's rounding of another order of sums."""
    return any(
        one["token"] != other["token"]
        or any(abs(a - b) > 1e-3 for a, b in zip(one["logprob"], other["logprob"], strict=True))
        for one, other in zip(runs, others, strict=True)
    )


def ratio(spent: Sequence[Mapping[str, float]], side: str, base: str) -> str:
    """How much more a side spent than another one in the same turn."""
    ratios = sorted(turn[side] / turn[base] for turn in spent)
    low, middle, high = ratios[len(ratios) // 4], statistics.median(ratios), ratios[-1 - len(ratios) // 4]
    return f"ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f})"


if __name__ == "__main__":
    serve(*json.loads(sys.argv[2]))
