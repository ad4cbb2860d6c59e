"""What kvpool does to a vLLM engine's steps: their time with the pool at work against without.

``python -m benchmarks.vllm_step [--apart] [--runs N] [--json FILE]`` needs vLLM. One engine for each side, each in a
process of its own, take turns on the same stream of requests: two long decodes run all the time while prompts that
nobody has seen arrive. Steps are compared within a kind, decode only or with prefill, run by run.

- ``without``: no connector.
- ``saves``: with it, file store: the stream's prompts are looked up, computed and saved.
- ``full speed``: the same, and all the time the pool loads and saves other blocks of the engine as fast as it can.
- ``idle store``: as full speed, with a store that moves no bytes and takes its time: what is left is the core's.
- ``no kvpool``: no connector; another process copies memory, writes files and reads them as fast as it can, on the core
  that the pool has otherwise. What this costs belongs to the machine.

``--apart`` gives each engine's computation core 0, and all other threads (event loop, worker threads, store) core 1;
without it the engine computes on both cores and the pool takes its share of them.

Of a step's time two parts are told beside it. *Held up*: the engine's thread neither computed nor waited for a core;
there it waits for the interpreter's lock, or for a lookup's answer. *No core*: it was ready and had to wait for a core:
for other programs, and, each time it gets that lock, until its core has woken up. So run this where nothing else runs;
where something does, ``--busy`` leaves the second part out of the times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self, TypeAlias

import anyio
import numpy as np
import numpy.typing as npt

from benchmarks.vllm_engines import Process, Run, engines, say
from kvpool.hashes import BlockHashes
from kvpool.pool import KVPool, Transfer
from kvpool.vllm.messages import Job
from kvpool.vllm.service import Service

ENGINE_CORE, POOL_CORE = 0, 1
WITHOUT, SAVES, FULL, IDLE, FLOOR = SIDES = ("without", "saves", "full speed", "idle store", "no kvpool")
PROMPT, EVERY, OUTPUT = 640, 20, 4  #: tokens of a prompt that arrives, steps from one to the next, tokens it generates
KINDS = ("decode", "prefill")
QUANTILES = (50, 90, 99)
#: The pool's traffic of its own: so many jobs at a time each way, of so many blocks.
JOBS, BLOCKS = 2, 20
#: What the files of that traffic may take.
CAPACITY = "512MiB"

Ids: TypeAlias = npt.NDArray[np.intp]
Times: TypeAlias = dict[str, list[list[float]]]  #: for each kind, of each step the seconds it consists of
COMPUTED, HELD_UP, NO_CORE = range(3)


# ---- in an engine's process


def serve(model: str, store: str, apart: bool, busy: bool) -> None:
    """Run the stream for each line that asks for it; ``busy``: with traffic of the pool's own."""
    from tests.vllm.engine import Engine

    engine = Engine(Path(model), {"store": store} if store else None, kv_bytes=128 << 20)
    if apart:
        pin()
    busily = Traffic(engine) if busy else nullcontext()
    stream(engine, 2 * EVERY, seed=-1)
    say({})
    for line in sys.stdin:
        job = json.loads(line)
        before = engine.counters if store else {}
        with busily:
            start, cpu = time.perf_counter(), time.process_time()
            times = stream(engine, job["steps"], job["seed"])
            spent = {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        grown = engine.counters if store else {}
        say({"steps": times, **spent, "did": {k: v - before[k] for k, v in grown.items() if v != before[k]}})
    engine.close()


def stream(engine: Any, steps: int, seed: int) -> Times:
    """The times of the steps of two decodes of so many tokens, and of what arrives meanwhile."""
    from tests.vllm.engine import prompt

    first = 10**6 * (seed + 2)  # no prompt comes twice
    for i in range(2):
        engine.add(prompt(64, seed=first + i), output=steps)
    times: Times = {kind: [] for kind in KINDS}
    done = 0
    with Clocks() as clocks:
        while engine.scheduler.has_unfinished_requests():
            if done % EVERY == EVERY // 2 and done < steps - EVERY:
                engine.add(prompt(PROMPT, seed=first + 2 + done), output=OUTPUT)
            wall, cpu, waited = clocks.take(engine.step)
            if engine.scheduled:
                times[KINDS[engine.scheduled > 8]].append([cpu, max(0.0, wall - waited - cpu), waited])
            done += 1
    engine.drain()
    return times


class Clocks:
    """What a call takes on this thread, in seconds: time, processor time, time ready and without a core (Linux)."""

    def __enter__(self) -> Self:
        self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._schedstat)

    def take(self, call: Callable[[], object]) -> tuple[float, float, float]:
        waited, cpu, begin = self._waited(), time.thread_time(), time.perf_counter()
        call()
        end, cpu = time.perf_counter(), time.thread_time() - cpu
        return end - begin, cpu, self._waited() - waited

    def _waited(self) -> float:
        return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9


def pin() -> None:
    """This thread to the engine's core, all others that there are, and those that they start, to the pool's."""
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {ENGINE_CORE if thread == threading.get_native_id() else POOL_CORE})


class Traffic:
    """While it is entered, the pool loads and saves blocks of this engine, on its own loop, without a pause.

    The blocks are taken from the engine's free ones. To the connector all this is one save that takes long, of a number
    that the scheduler's half does not know.
    """

    def __init__(self, engine: Any) -> None:
        self._worker = engine.worker
        self._blocks = [np.array([b.block_id for b in engine.pool.get_new_blocks(BLOCKS)]) for _ in range(2 * JOBS)]
        self._stop = threading.Event()

    def __enter__(self) -> None:
        self._stop.clear()
        self._worker._saves[-1] = Job(-1, "traffic", b"", ())
        self._worker._portal.submit(self._run, token=("save", -1))

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        while -1 in self._worker._saves:
            self._worker._portal.wait(1.0)
            self._worker._take_in()

    async def _run(self, service: Service) -> list[Any]:
        pool = await service.pool()
        async with anyio.create_task_group() as tasks:
            for i, blocks in enumerate(self._blocks):
                tasks.start_soon(self._load if i % 2 else self._save, pool, blocks)
        return []

    async def _save(self, pool: KVPool, blocks: Ids) -> None:
        while not self._stop.is_set():
            await pool.save([_new_chunks(blocks)])

    async def _load(self, pool: KVPool, blocks: Ids) -> None:
        job = _new_chunks(blocks)
        while not self._stop.is_set():
            [results] = await pool.load([job])
            if not results.ok.all():  # never saved, or its files have had to make room
                job = _new_chunks(blocks)
                await pool.save([job])


def _new_chunks(blocks: Ids) -> Transfer:
    return Transfer(0, BlockHashes(os.urandom(32 * len(blocks)), 32, scheme="random"), blocks)


# ---- in the process that measures


def churn(folder: str, nbytes: int) -> None:
    """What the pool's traffic cannot do without, and nothing of kvpool: memory, copies, files written and read."""
    source, copy = np.random.default_rng(0).integers(0, 255, (2, BLOCKS, nbytes), np.uint8)
    while True:
        for i in range(BLOCKS):
            np.copyto(copy[i], source[i])
            name = f"{folder}/{os.getpid()}-{i}"
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.pwrite(fd, copy[i].data, 0)
            os.preadv(fd, [copy[i].data], 0)
            os.close(fd)
            np.copyto(source[i], copy[i])


@contextmanager
def churning(folder: str, nbytes: int, apart: bool) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.vllm_step", "--churn", folder, str(nbytes)]
    process = subprocess.Popen(command)
    try:
        if apart:
            os.sched_setaffinity(process.pid, {POOL_CORE})
        time.sleep(1.0)  # until it has imported what it needs
        yield
    finally:
        process.kill()
        process.wait()


def measure(sides: Collection[str], runs: int, steps: int, apart: bool, query: str) -> dict[str, list[Run]]:
    """For each side what each run gave; sides take turns, and who begins changes."""
    from tests.vllm.models import write_llama

    found: dict[str, list[Run]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="kvpool-") as folder:
        model = write_llama(Path(folder) / "model", hidden=256, layers=4, heads=8)
        stores = {
            SAVES: f"file://{folder}/saves?{query}",
            FULL: f"file://{folder}/full?capacity={CAPACITY}&{query}",
            IDLE: "benchmarks.idle_store:IdleStore://",
        }
        threads = 1 if apart else 2
        environment = {"VLLM_CPU_OMP_THREADS_BIND": str(ENGINE_CORE)} if apart else {}
        started = {
            side: Process(
                str(model),
                stores.get(side, ""),
                apart,
                side in (FULL, IDLE),
                threads=threads,
                module="benchmarks.vllm_step",
                environment=environment,
            )
            for side in sides
        }
        with engines(*started.values()):
            for run in range(runs):
                for side in sorted(sides, reverse=bool(run % 2)):
                    if side == FLOOR:
                        with churning(folder, 128 << 10, apart):
                            found[side].append(started[side].ask(steps=steps, seed=run))
                    else:
                        found[side].append(started[side].ask(steps=steps, seed=run))
    return found


# ---- what a person sees


def report(found: Mapping[str, Sequence[Run]], busy: bool) -> None:
    """Times are medians over the runs; ratios are taken run by run, against the engine without a connector."""
    whole = [COMPUTED, HELD_UP] if busy else [COMPUTED, HELD_UP, NO_CORE]
    print(f"{'':26}{'us':>9}{'ratio':>9}{'min to max':>18}{'held up':>10}{'no core':>10}")
    for kind in KINDS:
        number = min(len(run["steps"][kind]) for run in found[WITHOUT])
        print(f"\n{kind}, {number} steps a run or more, {len(found[WITHOUT])} runs")
        for q in QUANTILES:
            base = [_at(run, kind, q, whole) for run in found[WITHOUT]]
            for side, runs in found.items():
                times = [_at(run, kind, q, whole) for run in runs]
                ratios = [time / other for time, other in zip(times, base, strict=True)]
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                line = f"  p{q} {side:<21}{statistics.median(times):>9.0f}"
                if side != WITHOUT:
                    line += f"{statistics.median(ratios):>9.3f} {spread:>17}"
                else:
                    line += " " * 27
                parts = [statistics.median(_at(run, kind, q, [part]) for run in runs) for part in (HELD_UP, NO_CORE)]
                print(line + "".join(f" {part:>9.0f}" for part in parts))
    print()
    for side, runs in found.items():
        moved = ", ".join(f"{what} {_rate(runs, f'{what}_bytes'):.0f}" for what in ("saved", "loaded"))
        cores = statistics.median(run["cpu_s"] / run["wall_s"] for run in runs)
        print(f"{side:<26}{moved} MB/s, {cores:.2f} cores busy")


def _at(run: Run, kind: str, q: float, parts: list[int]) -> float:
    """A quantile of a run's steps, of the sum of these parts, in microseconds."""
    steps: npt.NDArray[np.float64] = np.array(run["steps"][kind])
    return 1e6 * float(np.percentile(steps[:, parts].sum(axis=1), q))


def _rate(runs: Sequence[Run], counter: str) -> float:
    return statistics.median(float(run["did"].get(counter, 0) / run["wall_s"]) for run in runs) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--apart", action="store_true", help="the engine on core 0, the pool on core 1")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1200, help="of a run")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--store-options", default="", metavar="QUERY", help="of the file store, such as threads=1")
    parser.add_argument("--busy", action="store_true", help="times without what was waited for a core")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--churn", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(*json.loads(options.engine))
    elif options.churn:
        churn(options.churn[0], int(options.churn[1]))
    else:
        found = measure(
            dict.fromkeys([WITHOUT, *options.sides]), options.runs, options.steps, options.apart, options.store_options
        )
        report(found, options.busy)
        if options.json:
            options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
