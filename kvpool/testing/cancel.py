"""Cancels an async call at each of its awaits in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

import anyio

__all__ = ["cancel_everywhere"]

T = TypeVar("T")


class _Watched(Awaitable[T]):
    """Awaits a coroutine and calls ``at_step`` with 1, 2, ... just before each time that it waits for the loop."""

    def __init__(self, call: Coroutine[Any, Any, T], at_step: Callable[[int], None]) -> None:
        self._call = call
        self._at_step = at_step

    def __await__(self) -> Generator[Any, Any, T]:
        step = 0
        advance: Callable[[Any], Any] = self._call.send
        argument: Any = None
        while True:
            try:
                awaited = advance(argument)
            except StopIteration as end:
                result: T = end.value
                return result
            step += 1
            self._at_step(step)
            try:
                advance, argument = self._call.send, (yield awaited)
            except BaseException as error:
                advance, argument = self._call.throw, error


async def cancel_everywhere(
    make_call: Callable[[], Coroutine[Any, Any, object]],
    after: Callable[[int], Awaitable[None]],
    *,
    task_cancel: bool = False,
    max_steps: int = 1000,
) -> int:
    """Run ``make_call()`` again and again, cancelled at its 1st await, its 2nd, ... until one run has fewer awaits.

    ``after`` is awaited after each run with the number of its step, to check that nothing is broken. ``task_cancel``:
    cancel as ``asyncio.wait_for`` does, with ``Task.cancel()``, which no shield of anyio holds off; at once, and again
    when a thread that the call waits for has begun; asyncio only. Gives the number of awaits. Raises AssertionError if
    there are more than ``max_steps``.
    """
    for cancel_at in range(1, max_steps + 1):
        if task_cancel:
            await _task_cancelled(make_call(), cancel_at, 0.0003)
            await after(cancel_at)
            reached = await _task_cancelled(make_call(), cancel_at, 0)
        else:
            reached = await _scope_cancelled(make_call(), cancel_at)
        await after(cancel_at)
        if reached < cancel_at:
            return reached
    raise AssertionError(f"the call was not done after {max_steps} awaits")


async def _scope_cancelled(call: Coroutine[Any, Any, object], cancel_at: int) -> int:
    """Run a call that is cancelled at one of its awaits; how many it came to."""
    steps = 0

    def at_step(step: int) -> None:
        nonlocal steps
        steps = step
        if step == cancel_at:
            scope.cancel()

    with anyio.CancelScope() as scope:
        await _Watched(call, at_step)
    return steps


async def _task_cancelled(call: Coroutine[Any, Any, object], cancel_at: int, delay: float) -> int:
    steps = 0
    loop = asyncio.get_running_loop()

    def at_step(step: int) -> None:
        nonlocal steps
        steps = step
        if step == cancel_at and delay:
            loop.call_later(delay, task.cancel)
        elif step == cancel_at:
            task.cancel()

    async def run() -> None:
        await _Watched(call, at_step)

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return steps
