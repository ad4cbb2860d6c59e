"""What handing a job to the event loop costs a synchronous engine, against anyio's blocking portal.

Run from the checkout: ``.venv/bin/python benchmarks/portal.py``. "busy" means that the engine's thread computes in pure
Python between two jobs and so competes with the loop for the interpreter. All ways take turns, so that other load on
the machine meets each. Prints microseconds (p50, and p99 in brackets); the ratios are what counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import anyio.from_thread
import anyio.lowlevel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.portal import Portal

BATCH = 32


async def job(_: object = None) -> None:
    await anyio.lowlevel.checkpoint()


class Ours:
    """The portal under test."""

    def __init__(self, backend: str, options: dict[str, Any] | None = None) -> None:
        self.name = f"Portal, {'uvloop' if options else backend}"
        self.backend, self.options = backend, options

    @contextmanager
    def running(self) -> Iterator[None]:
        with Portal(backend=self.backend, backend_options=self.options) as self.portal:
            self.submit()
            self.drain(1)
            yield

    def submit(self) -> None:
        self.portal.submit(job)

    def poll(self) -> int:
        return len(self.portal.poll())

    def drain(self, n: int) -> None:
        while n:
            self.portal.wait(1)
            n -= self.poll()


class Theirs:
    """anyio's own blocking portal; its futures stand for reports."""

    def __init__(self, backend: str) -> None:
        self.name = f"anyio blocking portal, {backend}"
        self.backend = backend

    @contextmanager
    def running(self) -> Iterator[None]:
        self.futures: list[Any] = []
        with anyio.from_thread.start_blocking_portal(self.backend) as self.portal:
            self.submit()
            self.drain(1)
            yield

    def submit(self) -> None:
        self.futures.append(self.portal.start_task_soon(job))

    def poll(self) -> int:
        before = len(self.futures)
        self.futures = [future for future in self.futures if not future.done()]
        return before - len(self.futures)

    def drain(self, n: int) -> None:
        for future in self.futures[:n]:
            future.result()
        del self.futures[:n]


def idle() -> None:
    """The engine waits for its device."""
    time.sleep(0.0005)


def busy() -> None:
    """The engine computes in pure Python."""
    end = time.perf_counter() + 0.0005
    while time.perf_counter() < end:
        sum(range(50))


def clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def measure(way: Ours | Theirs, rounds: int, between: Callable[[], None], times: dict[str, list[float]]) -> None:
    for _ in range(rounds):
        between()
        times["poll of nothing"].append(clock(way.poll))
        times["submit"].append(clock(way.submit))
        between()
        times["poll of one"].append(clock(way.poll))  # one, if the loop has had its turn
        way.drain(0 if not pending(way) else 1)

        def burst() -> None:
            for _ in range(BATCH):
                way.submit()

        times[f"submit, each of {BATCH}"].append(clock(burst) / BATCH)
        way.drain(BATCH)
        start = time.perf_counter()
        way.submit()
        if between is busy:  # the engine goes on computing, and looks from time to time
            while not way.poll():
                sum(range(50))
        else:
            way.drain(1)
        times["submit to report"].append((time.perf_counter() - start) * 1e6)


def pending(way: Ours | Theirs) -> bool:
    return bool(way.portal.outstanding or way.portal.wait(0)) if isinstance(way, Ours) else bool(way.futures)


def show(values: list[float]) -> str:
    cuts = quantiles(values, n=100)
    return f"{cuts[49]:9.2f} ({cuts[98]:9.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="jobs a turn")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()

    ways: list[Ours | Theirs] = [Ours("asyncio"), Ours("trio"), Theirs("asyncio"), Theirs("trio")]
    try:
        import uvloop  # noqa: F401
    except ImportError:
        print("uvloop is not installed: left out")
    else:
        ways.insert(1, Ours("asyncio", {"use_uvloop": True}))
    columns = ("poll of nothing", "poll of one", "submit", f"submit, each of {BATCH}", "submit to report")
    results = {(way.name, mode.__name__): {c: list[float]() for c in columns} for way in ways for mode in (idle, busy)}
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(way.running())
        for _ in range(args.turns):
            for way in ways:
                for mode in (idle, busy):
                    measure(way, args.rounds, mode, results[way.name, mode.__name__])
    for state in ("idle", "busy"):
        print(f"\nengine {state:27s}" + "".join(f"{c:>23s}" for c in columns))
        for way in ways:
            print(f"  {way.name:32s}" + "".join(f"{show(results[way.name, state][c]):>23s}" for c in columns))
    print("\nsubmit, anyio's blocking portal to Portal, p50:")
    for backend in ("asyncio", "trio"):
        for state in ("idle", "busy"):
            ours, theirs = (
                quantiles(results[name, state]["submit"], n=2)[0]
                for name in (f"Portal, {backend}", f"anyio blocking portal, {backend}")
            )
            print(f"  {backend}, engine {state}: {theirs / ours:.1f}")


if __name__ == "__main__":
    main()
