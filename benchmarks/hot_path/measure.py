"""Two sides take turns, on the same inputs in one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Path", "Row", "alternate"]


@dataclass(frozen=True)
class Path:
    """One hot path on both sides. ``check`` raises unless the two answers are equal.

    ``fresh``: calls are not repeated within a run, and this is called before each, off the clock.
    """

    name: str
    bound: float
    reference: Callable[[], Any]
    ours: Callable[[], Any]
    check: Callable[[Any, Any], None]
    fresh: Callable[[], None] | None = None
    counts: Callable[[], dict[str, int]] = dict


@dataclass(frozen=True)
class Row:
    """What was measured, in seconds a call. ``counts``: keys and waves of one call, of both sides."""

    name: str
    bound: float
    reference: list[float]
    ours: list[float]
    counts: dict[str, int]

    @property
    def ratio(self) -> float:
        return median(self.reference) / median(self.ours)

    @property
    def ratios(self) -> tuple[float, float]:
        """Smallest and largest ratio of two runs that followed each other."""
        pairs = [a / b for a, b in zip(self.reference, self.ours, strict=True)]
        return min(pairs), max(pairs)


async def alternate(path: Path, runs: int, run_s: float, clock: Callable[[], float] = time.thread_time) -> Row:
    """Run both sides in turns, ``runs`` times each after one warm-up that compares the answers.

    A run of one side lasts at least ``run_s`` seconds; short calls are repeated. All happens in one thread, which never
    waits, so its CPU time is what a clock shows on a machine that does nothing else; give ``clock`` where it waits.
    """
    if path.fresh:
        path.fresh()
    path.check(path.reference(), await _answer(path.ours))
    counts = path.counts()
    repeat = dict.fromkeys((path.reference, path.ours), 1)
    times: dict[Any, list[float]] = {side: [] for side in repeat}
    gc.collect()
    gc.freeze()  # as vLLM does in its workers: its modules are not looked through again and again
    for run in range(-1, runs):
        for side, found in times.items():
            if path.fresh:
                path.fresh()
            seconds = await _time(side, repeat[side], clock)
            if run < 0 and not path.fresh:
                repeat[side] = max(1, round(run_s / seconds))
            elif run >= 0:
                found.append(seconds)
    gc.unfreeze()
    return Row(path.name, path.bound, times[path.reference], times[path.ours], counts)


async def _answer(side: Callable[[], Any]) -> Any:
    answer = side()
    return await answer if isinstance(answer, Awaitable) else answer


async def _time(side: Callable[[], Any], repeat: int, clock: Callable[[], float]) -> float:
    """Seconds a call. The last answer is let go after the clock has stopped."""
    answer = None
    start = clock()
    for _ in range(repeat):
        answer = side()
        if isinstance(answer, Awaitable):
            answer = await answer
    seconds = clock() - start
    del answer
    return seconds / repeat
