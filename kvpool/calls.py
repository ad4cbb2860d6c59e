"""Calls to a store that must not hold anyone up, nor touch memory that is no longer theirs.

A store may ignore its deadline: a native client or a hung file system cannot be cancelled. So each call runs as a task
of the pool and owns the staging memory it was given; whoever asked waits for it until the deadline and then goes on.
Whoever is last, asker or call, lets go of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc
import numpy as np

from kvpool.deadlines import move_on_at
from kvpool.errors import StoreClosed, StoreError
from kvpool.metrics import Counters
from kvpool.staging import Lease
from kvpool.store import Presence, Results, Status

__all__ = ["Outcome", "StoreCalls", "checked_presence", "checked_results"]

T = TypeVar("T")

#: Tasks that have ended a call and wait for the next one; further ones go.
MAX_IDLE = 16
#: So many calls left behind that still run mean that the store is wedged: further calls fail at once.
MAX_LEFT_BEHIND = 32


@dataclass(slots=True)
class Outcome(Generic[T]):
    """How a call ended: with ``result``, with ``error``, or ``late``: it may still run, and its result is void.

    An ``error`` beside a result says what is wrong with a part of it.
    """

    result: T | None = None
    error: Exception | None = None
    late: bool = False


class _Call(Generic[T]):
    """One call. ``left_behind``: bytes of the lease, once nobody waits any more."""

    __slots__ = ("done", "fn", "lease", "left_behind", "outcome", "scope")

    def __init__(self, fn: Callable[[], Awaitable[T]], lease: Lease | None) -> None:
        self.fn, self.lease = fn, lease
        self.outcome: Outcome[T] = Outcome(late=True)
        self.done = anyio.Event()
        self.scope = anyio.CancelScope()
        self.left_behind: int | None = None

    def release(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()


class StoreCalls:
    """Runs a pool's store calls in ``tasks``; used from one event loop.

    ``grace``: a store that honours deadlines answers so many seconds after one; then its call is left behind.
    ``max_left_bytes``: so much staging memory in calls left behind means that the store is wedged.
    """

    def __init__(
        self, tasks: anyio.abc.TaskGroup, counters: Counters, *, grace: float, max_left_bytes: float = math.inf
    ) -> None:
        self._grace = grace
        self._max_left_bytes = max_left_bytes
        self._tasks = tasks
        self._counters = counters
        self.left_behind = 0  #: calls that still run though nobody waits for them
        self.left_bytes = 0  #: staging memory that they hold
        self._idle: list[_Idle] = []
        self._begin: set[_Call[Any]] = set()  # calls that their task has yet to begin
        self._closed = False

    async def run(self, fn: Callable[[], Awaitable[T]], deadline: float, lease: Lease | None = None) -> Outcome[T]:
        """Await ``fn()`` until the deadline.

        If this returns an outcome that is not late, ``lease`` is the caller's again. In every other case (late, or the
        caller was cancelled) the last of both, call and caller, has released it or will.
        """
        if self._closed:
            return Outcome(error=StoreClosed("the pool is closed"))
        if self.left_behind >= MAX_LEFT_BEHIND or self.left_bytes > self._max_left_bytes:
            return Outcome(error=StoreError(f"the store hangs: {self.left_behind} calls do not come back"))
        call = _Call(fn, lease)
        self._begin.add(call)
        if self._idle:
            self._idle.pop().take(call)
        else:
            self._tasks.start_soon(self._serve, call)
        until = deadline + self._grace
        try:
            with move_on_at(until):
                await call.done.wait()
            if not call.done.is_set() or call.outcome.late:
                return Outcome(late=True)
            call.lease = None
            return call.outcome
        finally:
            if call.done.is_set():
                call.release()
            else:
                call.scope.deadline = until
                call.left_behind = lease.nbytes if lease is not None else 0
                self.left_behind += 1
                self.left_bytes += call.left_behind
                self._counters.abandoned_calls += 1

    def close(self) -> None:
        """Refuse further calls, fail those that have not begun, and let the idle tasks end; calls that run go on."""
        self._closed = True
        while self._idle:
            self._idle.pop().take(None)
        while self._begin:  # cancelled before its first step, a task could not say that its call has ended
            call = self._begin.pop()
            call.outcome = Outcome(error=StoreClosed("the pool is closed"))
            self._end(call)

    async def _serve(self, call: _Call[Any] | None) -> None:
        """Run one call after another, in the context (contextvars) of the first.

        A new task for each would cost 10 us more, a third of a call that finds nothing to do.
        """
        while call is not None:
            if call in self._begin:
                self._begin.discard(call)
                await self._run(call)
            if self._closed or len(self._idle) >= MAX_IDLE:
                return
            idle = _Idle()
            self._idle.append(idle)
            await idle.called.wait()
            call = idle.call

    async def _run(self, call: _Call[T]) -> None:
        try:
            with call.scope:
                call.outcome.result = await call.fn()
                call.outcome.late = False
        except Exception as error:
            call.outcome.error, call.outcome.late = error, False
        except anyio.get_cancelled_exc_class():
            if anyio.current_effective_deadline() == -math.inf:
                raise
            # Nobody cancelled this task: the store leaked a cancellation of its own (a cancelled future, say).
            call.outcome.error, call.outcome.late = StoreError("the store cancelled its own call"), False
        finally:
            self._end(call)

    def _end(self, call: _Call[Any]) -> None:
        """It touches no memory any more."""
        call.done.set()
        if call.left_behind is not None:
            self.left_behind -= 1
            self.left_bytes -= call.left_behind
            call.release()


class _Idle:
    """A task that waits for its next call."""

    def __init__(self) -> None:
        self.called = anyio.Event()
        self.call: _Call[Any] | None = None

    def take(self, call: _Call[Any] | None) -> None:
        self.call = call
        self.called.set()


def checked_presence(outcome: Outcome[Presence], n: int) -> Outcome[Presence]:
    """The outcome, or an error if what the store answered is no presence of ``n`` keys."""
    found = outcome.result
    if found is None or (isinstance(found, np.ndarray) and found.shape == (n,)):
        return outcome
    return Outcome(error=StoreError(f"the store answered {_shape(found)} for {n} keys"))


def checked_results(outcome: Outcome[Results], n: int, width: int, *, filled: bool) -> Results:
    """The results of a call on ``n`` values of ``width`` bytes; FAILED for all keys if they are none.

    ``filled``: an OK promises ``width`` bytes in memory; a value that claims another length is CORRUPT.
    """
    results = outcome.result
    columns = (results.status, results.nbytes) if isinstance(results, Results) else (None, None)
    if results is None or not all(isinstance(c, np.ndarray) and c.shape == (n,) for c in columns):
        failed = Results.empty(n, Status.FAILED)
        if n:
            failed.errors[0] = outcome.error or StoreError(f"the store answered {_shape(columns[0])} for {n} keys")
        return failed
    status, nbytes = np.array(results.status), np.array(results.nbytes)
    if filled:
        status[(status == Status.OK) & (nbytes != width)] = Status.CORRUPT
    told = results.errors if isinstance(results.errors, dict) else {}
    return Results(status, nbytes, {i: e for i, e in told.items() if isinstance(i, int | np.integer) and 0 <= i < n})


def _shape(answer: object) -> str:
    return f"{type(answer).__name__} of shape {getattr(answer, 'shape', '?')}"
