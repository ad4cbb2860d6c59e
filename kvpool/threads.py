"""The seam for calls that block: everything that needs a thread of its own goes through :class:`Threads`.

A simulation replaces the threads by setting :data:`blocking_calls`, so that virtual time and seeds stay in charge.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

__all__ = ["Threads", "blocking_calls"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_POLL_S = 0.001


class Threads:
    """At most ``n`` blocking calls at a time, in worker threads of the running event loop.

    May be built outside a loop, and is then used from one loop only.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._slots: anyio.Semaphore | None = None
        self._unlimited: anyio.CapacityLimiter | None = None

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts, stop: Callable[[], None] | None = None) -> T:
        """Call ``fn(*args)`` in a thread and wait until it has ended, whatever happens meanwhile.

        The call may touch memory, so a cancelled caller gets control back only when the call is over (or if it had not
        begun: then it never does). So give ``fn`` work of bounded length, or ``stop``, which is called when the caller
        is cancelled, perhaps after ``fn`` has ended, and makes it end soon. Raises what ``fn`` raises.
        """
        # Unlike a CapacityLimiter it takes no turn of the loop when a slot is free.
        self._slots = self._slots or anyio.Semaphore(self.n, fast_acquire=True)
        async with self._slots:
            result: T = await blocking_calls.get()(self, fn, args, stop)
            return result

    async def _call(self, fn: Callable[..., T], args: tuple[Any, ...], stop: Callable[[], None] | None) -> T:
        self._unlimited = self._unlimited or anyio.CapacityLimiter(math.inf)
        call = _Call(fn, args)
        try:
            # The slot is held here and not by run_sync, which lets go of it too early in the case below.
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=stop is not None, limiter=self._unlimited)
        except anyio.get_cancelled_exc_class():
            # Without stop, scopes are held off until the thread is done; a plain asyncio Task.cancel() never is.
            if stop is not None:
                stop()
            while not call.over():
                try:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(_POLL_S)
                except anyio.get_cancelled_exc_class():
                    pass
            raise


class _Call(Generic[T]):
    """One call in a thread, and a way to tell from outside that it is over or will never begin."""

    def __init__(self, fn: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._fn = fn
        self._args = args
        self._claim = threading.Lock()  # who takes it first decides: the thread begins, or the call is off
        self._ended = False

    def __call__(self) -> T:
        if not self._claim.acquire(blocking=False):
            raise RuntimeError("the call was called off before it began")  # nobody is left to see this
        try:
            return self._fn(*self._args)
        finally:
            self._ended = True

    def over(self) -> bool:
        """Whether ``fn`` has ended, or now never begins."""
        if not self._ended and self._claim.acquire(blocking=False):
            self._ended = True
        return self._ended


_Seam = Callable[[Threads, Callable[..., Any], tuple[Any, ...], Callable[[], None] | None], Awaitable[Any]]

#: How ``Threads.run`` makes its calls in this context: with the Threads, the function, its arguments and ``stop``.
blocking_calls: ContextVar[_Seam] = ContextVar("blocking_calls", default=Threads._call)
