"""Calls to a store that must not hold anyone up, nor touch memory that is no longer theirs.

A store may ignore its deadline: a native client or a hung file system cannot be cancelled. So each call runs as a task
of the pool and owns the staging memory it was given; whoever asked waits for it until the deadline and then goes on.
Whoever is last, asker or call, lets go of the memory.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
import anyio.abc

from kvpool.deadlines import move_on_at
from kvpool.errors import StoreError
from kvpool.metrics import Counters
from kvpool.staging import Lease

__all__ = ["FailedKeys", "Outcome", "StoreCalls"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: So many calls left behind that still run mean that the store is wedged: further calls fail at once.
MAX_LEFT_BEHIND = 32


@dataclass(slots=True)
class Outcome(Generic[T]):
    """How a call ended: with ``result``, with ``error``, or ``late``: it may still run, and its result is void."""

    result: T | None = None
    error: Exception | None = None
    late: bool = False


@dataclass(slots=True)
class _Call(Generic[T]):
    lease: Lease | None
    outcome: Outcome[T] = field(default_factory=Outcome)
    done: anyio.Event = field(default_factory=anyio.Event)
    left_behind: bool = False


class StoreCalls:
    """Runs a pool's store calls in ``tasks``; used from one event loop.

    ``grace``: a store that honours deadlines answers so many seconds after one; then its call is left behind.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup, counters: Counters, *, grace: float) -> None:
        self._grace = grace
        self._tasks = tasks
        self._counters = counters
        self.left_behind = 0  #: calls that still run though nobody waits for them

    async def run(self, fn: Callable[[], Awaitable[T]], deadline: float, lease: Lease | None = None) -> Outcome[T]:
        """Await ``fn()`` until the deadline. After an outcome that is not late, ``lease`` is the caller's again.

        On a late outcome, or if the caller is cancelled, the call keeps ``lease`` and releases it when it ends.
        """
        if self.left_behind >= MAX_LEFT_BEHIND:
            return Outcome(error=StoreError(f"the store hangs: {self.left_behind} calls do not come back"))
        call: _Call[T] = _Call(lease)
        self._tasks.start_soon(self._run, call, fn, deadline)
        try:
            with move_on_at(deadline + self._grace):
                await call.done.wait()
        finally:
            if not call.done.is_set():
                call.left_behind = True
                self.left_behind += 1
                self._counters.abandoned_calls += 1
        if call.left_behind:
            return Outcome(late=True)
        if call.outcome.error is not None:
            logger.warning("store call failed: %s: %s", type(call.outcome.error).__name__, call.outcome.error)
        return call.outcome

    async def _run(self, call: _Call[T], fn: Callable[[], Awaitable[T]], deadline: float) -> None:
        call.outcome.late = True
        try:
            with move_on_at(deadline + self._grace):
                call.outcome.result = await fn()
                call.outcome.late = False
        except Exception as error:
            call.outcome.error, call.outcome.late = error, False
        finally:
            call.done.set()
            if call.left_behind:
                self.left_behind -= 1
                if call.lease is not None:
                    call.lease.release()


class FailedKeys:
    """Keys whose load failed count as absent for ``ttl`` seconds, so that no request can loop on them.

    At most ``limit`` are remembered; the oldest go first.
    """

    def __init__(self, ttl: float, limit: int = 65_536) -> None:
        self._ttl = ttl
        self._limit = limit
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, keys: Iterable[str], now: float) -> None:
        for key in keys:
            self._until[key] = now + self._ttl
            self._until.move_to_end(key)
        while len(self._until) > self._limit:
            self._until.popitem(last=False)

    def discard(self, keys: Iterable[str]) -> None:
        """These are known to be good again."""
        if self._until:
            for key in keys:
                self._until.pop(key, None)

    def among(self, keys: Sequence[str], now: float) -> list[int]:
        """The indices of those keys that count as absent now."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return [i for i, key in enumerate(keys) if key in self._until] if self._until else []
