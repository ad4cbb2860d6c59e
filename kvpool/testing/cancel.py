"""Cancels an async call at each of its awaits in turn."""

from __future__ import annotations

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
    max_steps: int = 1000,
) -> int:
    """Run ``make_call()`` again and again, cancelled at its 1st await, its 2nd, ... until one run has fewer awaits.

    ``after`` is awaited after each run with the number of its step, to check that nothing is broken. Gives the number
    of awaits. Raises AssertionError if there are more than ``max_steps``.
    """
    for cancel_at in range(1, max_steps + 1):
        reached = 0
        with anyio.CancelScope() as scope:

            def at_step(step: int, cancel_at: int = cancel_at, scope: anyio.CancelScope = scope) -> None:
                nonlocal reached
                reached = step
                if step == cancel_at:
                    scope.cancel()

            await _Watched(make_call(), at_step)
        await after(cancel_at)
        if reached < cancel_at:
            return reached
    raise AssertionError(f"the call was not done after {max_steps} awaits")
