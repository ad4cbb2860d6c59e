"""Calls in tasks of their own, so that one which heeds neither its deadline nor cancellation holds nobody up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
import anyio.abc

from kvpool.deadlines import move_on_at

__all__ = ["Aside"]

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Call(Generic[T]):
    scope: anyio.CancelScope
    ended: anyio.Event = field(default_factory=anyio.Event)
    answer: T | None = None
    error: Exception | None = None


class Aside:
    """An async context manager; leaving it waits for the calls that were left behind, so that none outlives it.

    ``grace_s``: how long the caller of :meth:`run` waits, once it is cancelled, for the call to end as well.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._left: set[object] = set()
        self._tasks: anyio.abc.TaskGroup

    async def __aenter__(self) -> Aside:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._tasks.cancel_scope.cancel()
        # Not told of any exception: the task group would wrap it in an ExceptionGroup.
        await self._tasks.__aexit__(None, None, None)

    def __len__(self) -> int:
        """How many calls are left behind and have not ended yet."""
        return len(self._left)

    async def run(self, fn: Callable[[], Awaitable[T]], until: float) -> T | None:
        """What ``fn`` returns or raises; None if it has not ended ``until`` then: it is cancelled, and left behind.

        If the caller is cancelled, so is the call, and control returns when it has ended, or soon anyway.
        """
        call = _Call[T](anyio.CancelScope(deadline=until))
        self._tasks.start_soon(self._run, call, fn)
        try:
            with move_on_at(until):
                await call.ended.wait()
        except BaseException:
            # Nearly every call ends at once when it is cancelled; then nothing of it happens after we have raised.
            call.scope.cancel()
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + self._grace_s):
                await call.ended.wait()
            raise
        finally:
            if not call.ended.is_set():
                self._left.add(call)
        if call.error is not None:
            raise call.error
        return call.answer

    async def _run(self, call: _Call[T], fn: Callable[[], Awaitable[T]]) -> None:
        try:
            with call.scope:
                call.answer = await fn()
        except Exception as error:
            call.error = error
        finally:
            call.ended.set()
            self._left.discard(call)
