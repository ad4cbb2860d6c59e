"""What kvpool costs a vLLM engine: time in the match call, engine steps with the pool active against without.

``python -m benchmarks.vllm_step [--runs N] [--apart] [--slices] [--json FILE]`` needs vLLM. It starts an engine process
after another, in turn without and with the connector, on the same stream of requests: two long decodes run all the time
while new prompts arrive, half of them with a prefix of their own kind. Almost all are computed and saved, so the
figures are those of an engine that gets little reuse. Steps are compared within a kind, decode only or with prefill.

``--apart`` gives the engine's computation core 0 and the pool (event loop, worker threads, store) core 1; without it
the engine computes on both cores and the pool takes its share of them. Apart, the time that the engine's thread waits
for its core does not count: that is other programs' doing. ``--slices`` also takes the processor time of
each callback on the event loop, in which an engine's thread may wait for the interpreter's lock; that costs a little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.vllm.engine import ENVIRONMENT

PREFIX, PROMPT, ARRIVALS, DECODE = 512, 640, 60, 1200


#: The engine's threads on one core, bound by vLLM itself.
APART = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}


def _move_pool() -> None:
    """The event loop's thread, and the worker threads that it starts from now on, to core 1."""
    (portal,) = (thread for thread in threading.enumerate() if thread.name == "kvpool-portal")
    assert portal.native_id is not None
    os.sched_setaffinity(portal.native_id, {1})


def _waited() -> float:
    """Seconds that the calling thread has been ready to run and without a core (Linux: schedstat)."""
    with open(f"/proc/self/task/{threading.get_native_id()}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def _take_slices() -> list[float]:
    """The processor time of each callback of an asyncio loop, in any thread, from now on."""
    taken: list[float] = []
    run: Any = asyncio.Handle._run

    def timed(handle: Any) -> None:
        start = time.thread_time()
        run(handle)
        taken.append(time.thread_time() - start)

    asyncio.Handle._run = timed  # type: ignore
    return taken


def measure(model: str, store: str, apart: bool, slices: bool) -> dict[str, Any]:
    """One engine, one stream of requests. Times in microseconds."""
    if apart:
        os.environ.update(APART)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from tests.vllm.engine import Engine, prompt

    # A short lookup grace and the defaults otherwise: this is what a user gets.
    engine = Engine(Path(model), {"store": store} if store else None, kv_bytes=64 << 20)
    match: list[float] = []
    if store:
        connector = engine.scheduler.connector
        original = connector.get_num_new_matched_tokens

        def timed(request: Any, local: int) -> Any:
            start = time.perf_counter()
            answer = original(request, local)
            match.append(time.perf_counter() - start)
            return answer

        connector.get_num_new_matched_tokens = timed
        if apart:
            _move_pool()
    shared = [prompt(PREFIX, seed=i) for i in range(4)]
    engine.finish([engine.add(p, output=1) for p in shared])
    engine.drain()
    engine.llm.reset_prefix_cache()
    for seed in range(2):
        engine.add(prompt(64, seed=50 + seed), output=DECODE)
    taken = _take_slices() if store and slices else []
    steps: dict[str, list[float]] = {"decode": [], "prefill": []}
    cpu = time.process_time()
    arrived = 0
    while engine.scheduler.has_unfinished_requests():
        # Every arrival is a new prompt; half begin with one of four prefixes.
        if arrived < ARRIVALS and sum(map(len, steps.values())) >= arrived * 15:
            start = shared[arrived % 4] if arrived % 2 else ()
            engine.add(prompt(PROMPT, seed=100 + arrived, start=start), output=4)
            arrived += 1
        waited, begin = _waited(), time.perf_counter()
        engine.step()
        spent = time.perf_counter() - begin
        if apart:
            spent -= _waited() - waited
        tokens = engine.scheduled
        if tokens:
            steps["decode" if tokens <= 8 else "prefill"].append(spent)
    result: dict[str, Any] = {name: {"steps": len(times), **_spread(times)} for name, times in steps.items()} | {
        "cpu_s": time.process_time() - cpu,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    if match:
        result["match"] = {"calls": len(match), **_spread(match)}
        result["counters"] = {k: v for k, v in engine.counters.items() if v}
    if taken:
        longest = round(max(taken) * 1e6, 1)
        result["slices"] = {"callbacks": len(taken), "cpu_s": sum(taken), **_spread(taken), "max": longest}
    engine.close()
    return result


def _spread(times: list[float]) -> dict[str, float]:
    micros = np.array(times) * 1e6
    return {f"p{q}": round(float(np.percentile(micros, q)), 1) for q in (50, 90, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--apart", action="store_true", help="the engine on core 0, the pool on core 1")
    parser.add_argument("--slices", action="store_true", help="also time each callback of the event loop")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "STORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        model_folder, its_store = options.child
        print("RESULT " + json.dumps(measure(model_folder, its_store, options.apart, options.slices)), flush=True)
        return
    from tests.vllm.models import write_llama

    sides: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        model = write_llama(Path(folder) / "model", hidden=256, layers=4, heads=8)
        for run in range(options.runs):
            for side, done in sides.items():
                store = f"file://{folder}/store-{run}" if side == "with" else ""
                command = [sys.executable, "-m", "benchmarks.vllm_step", "--child", str(model), store]
                command += ["--apart"] * options.apart + ["--slices"] * options.slices
                child = subprocess.run(command, capture_output=True, text=True, check=False)
                lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
                if not lines:
                    sys.exit(child.stderr[-3000:])
                done.append(json.loads(lines[-1].removeprefix("RESULT ")))
    report(sides)
    if options.json:
        options.json.write_text(json.dumps(sides, indent=1))


def report(sides: dict[str, list[dict[str, Any]]]) -> None:
    """Medians over the runs, ratios pair by pair."""
    print(f"{'':28}{'without':>12}{'with':>12}{'ratio':>9}   (median of {len(sides['with'])} runs; min..max of ratios)")
    for kind, q in [(kind, q) for kind in ("decode", "prefill") for q in ("p50", "p90", "p99")]:
        name = f"{kind} step {q}, us"
        a, b = ([run[kind][q] for run in sides[side]] for side in ("without", "with"))
        ratios = [y / x for x, y in zip(a, b, strict=True)]
        middle = statistics.median(ratios)
        print(
            f"{name:28}{statistics.median(a):12.0f}{statistics.median(b):12.0f}{middle:9.3f}"
            f"   {min(ratios):.3f}..{max(ratios):.3f}"
        )
    for q in ("p50", "p90", "p99"):
        print(f"{'match call ' + q + ', us':28}{'':12}{statistics.median(r['match'][q] for r in sides['with']):12.0f}")
    if slices := [run["slices"] for run in sides["with"] if "slices" in run]:
        p50, p99, longest = (max(run[key] for run in slices) for key in ("p50", "p99", "max"))
        print(f"callbacks on the event loop, largest of the runs: p50 {p50} us, p99 {p99} us, longest {longest} us")
    print("counters of the last run:", sides["with"][-1]["counters"])


if __name__ == "__main__":
    main()
