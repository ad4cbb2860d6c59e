"""Threads for native calls, which may never come back: what waits for one can always go on without it.

They are daemons, so a call that hangs holds up neither the loop nor the end of the interpreter. The end waits a little
for calls under way: a thread that comes back from native code into an interpreter that is gone would abort the process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio

from kvpool.deadlines import move_on_at, running_loop
from kvpool.errors import StoreClosed

__all__ = ["NativeCall", "NativeThreads", "after_fork"]

T = TypeVar("T")

#: Seconds that a call may still take when its deadline has passed, or its caller was cancelled, before it is left.
LATE_S = 0.05
CANCELLED_S = 1.0
#: Late calls that others may run beside, for each that may run at a time. Each keeps a core busy while it waits.
LEFT = 1
#: Seconds that the end of the interpreter waits for calls under way.
_DRAIN_S = 2.0

_inside: set[NativeCall[Any]] = set()  # calls that are in native code now, of the whole process
_ending = threading.Event()


class NativeCall(Generic[T]):
    """One call in a thread. ``ended``: it has come back, and touches no memory any more."""

    def __init__(self, fn: Callable[[], T], then: Callable[[], None]) -> None:
        self.ended = anyio.Event()
        self.began = time.monotonic()
        self._fn = fn
        self._then = then
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> None:
        _inside.add(self)
        try:
            if _ending.is_set():
                raise StoreClosed("the interpreter is ending")
            self._value = self._fn()
        except BaseException as error:  # it goes to whoever waits
            self._error = error
        finally:
            _inside.discard(self)

    def finish(self) -> None:
        """On the loop, once it has come back."""
        del self._fn  # and the memory that it refers to
        self._then()
        self.ended.set()

    def result(self) -> T:
        """What the call returned, or raises what it raised. Only after it has ended."""
        if self._error is not None:
            raise self._error
        return self._value

    async def wait(self, deadline: float) -> bool:
        """Whether it has ended soon after the deadline. If the caller is cancelled, so soon after that: nearly every
        call has by then, so that nothing of it happens after this has raised."""
        try:
            with move_on_at(deadline + LATE_S):
                await self.ended.wait()
        except anyio.get_cancelled_exc_class():
            await self._linger(CANCELLED_S)
            raise
        return self.ended.is_set()

    async def wait_through(self) -> None:
        """Until it has ended, whatever happens meanwhile: it uses memory of the caller's."""
        try:
            await self.ended.wait()
        except anyio.get_cancelled_exc_class():
            while not self.ended.is_set():
                await self._linger(1.0)
            raise

    async def _linger(self, seconds: float) -> None:
        """Wait though cancelled. Scopes are held off; what a plain asyncio Task.cancel() cuts off is begun again."""
        until = anyio.current_time() + seconds
        while not self.ended.is_set() and anyio.current_time() < until:
            with contextlib.suppress(anyio.get_cancelled_exc_class()), anyio.CancelScope(shield=True, deadline=until):
                await self.ended.wait()


class NativeThreads:
    """At most ``n`` calls at a time, and some late ones (:meth:`leave`). Made and used on one running event loop."""

    def __init__(self, n: int, name: str) -> None:
        self.n = n
        self.running: set[NativeCall[Any]] = set()
        self._left: set[NativeCall[Any]] = set()
        self._name = name
        self._slots = anyio.Semaphore(n, fast_acquire=True)  # whoever gets one goes on to wait for its call
        self._queue: queue.SimpleQueue[NativeCall[Any] | None] = queue.SimpleQueue()
        self._threads = 0
        self._tell_loop = _loop_caller()

    async def start(self, fn: Callable[[], T], then: Callable[[], None] = lambda: None) -> NativeCall[T]:
        """Begin ``fn()`` in a thread as soon as one is free. ``then`` is called on the loop when it has come back.

        Who is cancelled while waiting for a thread has begun nothing, and ``then`` is never called.
        """
        await self._slots.acquire()
        call = NativeCall(fn, then)
        self.running.add(call)
        if len(self.running) > self._threads:
            self._threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._queue.put(call)
        return call

    def leave(self, call: NativeCall[Any]) -> None:
        """A call is late: another may run in its place, as long as there are not many of that kind."""
        if call in self.running and call not in self._left and len(self._left) < LEFT * self.n:
            self._left.add(call)
            self._slots.release()

    def oldest(self) -> float:
        """Seconds that the longest running call has been running; 0 if there is none."""
        return time.monotonic() - min((call.began for call in self.running), default=time.monotonic())

    def stop(self) -> None:
        """End the threads, each after its call."""
        for _ in range(self._threads):
            self._queue.put(None)
        self._threads = 0

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run()
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
                self._tell_loop(self._finish, call)
            del call

    def _finish(self, call: NativeCall[Any]) -> None:
        self.running.discard(call)
        if call in self._left:
            self._left.discard(call)
        else:
            self._slots.release()
        call.finish()


@atexit.register
def _drain() -> None:
    _ending.set()
    give_up = time.monotonic() + _DRAIN_S
    while _inside and time.monotonic() < give_up:
        time.sleep(0.005)
    if _inside:
        skip_exit_handlers()


def skip_exit_handlers() -> None:
    """Have this process end, when it does and with the status it then has, without the clean-up of native libraries.

    Mooncake's would wait for threads that hang, or that a forked child does not have.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # glibc has it; handlers run from the last to the first
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def after_fork() -> None:
    """In a forked child: the calls under way are its parent's, and so are the threads of native clients."""
    _inside.clear()
    skip_exit_handlers()


def _loop_caller() -> Callable[..., object]:
    """How another thread has something called on the running loop."""
    if running_loop() == "asyncio":
        return asyncio.get_running_loop().call_soon_threadsafe
    import trio

    return trio.lowlevel.current_trio_token().run_sync_soon
