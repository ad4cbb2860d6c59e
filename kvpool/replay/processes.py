"""Engines in processes of their own: started, heard, stopped.

They share one queue, from which each takes the next request in arrival order, and each has a pipe to the parent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import anyio

from kvpool.errors import KVPoolError
from kvpool.replay.engine import Ended, Job, Outcome, run_engine

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

__all__ = ["EngineProcesses", "Failed", "Message", "Ready", "first_of"]

_EXIT_S = 5.0  # for a process that has nothing left to do, or was told to end
_ORPHAN_S = 1.0  # how soon an engine notices that its parent is gone, if its pipe does not tell


@dataclass(frozen=True)
class Ready:
    """The store is open; the engine waits for :meth:`EngineProcesses.go`."""


@dataclass(frozen=True)
class Failed:
    """The engine cannot work, or ended on its own."""

    reason: str


Message: TypeAlias = Ready | Ended | Failed | Outcome


class _Queue:
    """The numbers 0 to n - 1, each for one of the processes that share it, in order.

    An open file whose position, which the kernel keeps for all who inherit it, is the counter: a process that is killed
    at any point leaves no lock behind.
    """

    def __init__(self, n: int) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 close() closes it
        self._file.write(b"".join(i.to_bytes(8, "little") for i in range(n)))
        self._file.seek(0)

    def take(self) -> int | None:
        """The next number, None if there is none. Does not wait."""
        number = os.read(self._file.fileno(), 8)
        return int.from_bytes(number, "little") if number else None

    def close(self) -> None:
        """Nobody gets another number."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()

    def __reduce__(self) -> tuple[Callable[[Any], _Queue], tuple[Any]]:
        return _inherited, (DupFd(self._file.fileno()),)


def _inherited(descriptor: Any) -> _Queue:
    queue = _Queue.__new__(_Queue)
    queue._file = os.fdopen(descriptor.detach(), "rb", buffering=0)
    return queue


class EngineProcesses:
    """The processes of ``job``."""

    def __init__(self, job: Job) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._job = job
        self._queue = _Queue(len(job.trace))
        self._all: list[SpawnProcess] = []
        self._running: dict[Connection, SpawnProcess] = {}

    def start(self) -> None:
        """Raises KVPoolError if this machine does not let so many processes start."""
        # An interrupt is for the parent, which tells the engines: they inherit the blocked signal and then ignore it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for number in range(1, self._job.engines + 1):
                self._start(f"engine {number}")
        except OSError as error:
            raise KVPoolError(
                f"engine {len(self._all) + 1} of {self._job.engines} cannot be started: {error.strerror or error}; "
                "take fewer engines, or raise the limits of this shell (ulimit -n: open files, ulimit -u: processes)"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _start(self, name: str) -> None:
        here, there = self._context.Pipe()
        with there:
            process = self._context.Process(target=_main, args=(self._job, self._queue, there), name=name, daemon=True)
            process.start()
        self._all.append(process)
        self._running[here] = process

    @property
    def running(self) -> bool:
        return bool(self._running)

    def go(self) -> float:
        """Every engine is ready: the trace begins now, at the time returned (``time.monotonic()``)."""
        now = time.monotonic()
        for connection in self._running:
            with contextlib.suppress(OSError):  # it has just died, which hear() will tell
                connection.send(now)
        return now

    def stop(self) -> None:
        """No engine begins another request."""
        self._queue.close()

    def hear(self, timeout: float) -> Iterator[Message]:
        """What the engines say within ``timeout`` seconds. The last word of each is Ended or Failed."""
        for connection in wait(list(self._running), timeout):
            assert isinstance(connection, Connection)
            try:
                message: Message = connection.recv()
            except (EOFError, OSError):
                process = self._running[connection]
                process.join(_EXIT_S)
                message = Failed(f"{process.name} ended too early (exit code {process.exitcode})")
            if isinstance(message, Ended | Failed):
                del self._running[connection]
                connection.close()
            yield message

    def end(self) -> None:
        """No process is left."""
        self._queue.close()
        if self._running:
            for process in self._all:
                process.terminate()
        for process in self._all:
            process.join(_EXIT_S)
            process.kill()
            process.join()


def _main(job: Job, queue: _Queue, parent: Connection) -> None:
    """What an engine's process does. It ends by itself when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    async def started() -> float:
        parent.send(Ready())
        await anyio.wait_readable(parent.fileno())
        begin: float = parent.recv()
        return anyio.current_time() + begin - time.monotonic()

    async def play() -> Message | None:
        """The last word; None if there is nobody to hear it."""
        last: Message | None = None
        async with anyio.create_task_group() as tasks:

            async def leave() -> None:
                await _orphaned()
                tasks.cancel_scope.cancel()

            tasks.start_soon(leave)
            last = await run_engine(job, queue.take, parent.send, started)
            tasks.cancel_scope.cancel()
        return last

    try:
        try:
            last = anyio.run(play, backend=job.config.event_loop)
        except (Exception, BaseExceptionGroup) as error:
            cause = first_of(error)
            if isinstance(cause, EOFError | BrokenPipeError | ConnectionResetError):
                return
            last = Failed(str(cause) if isinstance(cause, KVPoolError) else f"{type(cause).__name__}: {cause}")
        if last is not None:
            parent.send(last)
    except OSError:
        return


async def _orphaned() -> None:
    """Wait until the parent is gone, even if it was killed. What then does not end soon, such as a call that hangs, is
    cut off."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while os.getppid() == parent.pid:
        with anyio.move_on_after(_ORPHAN_S):
            await anyio.wait_readable(parent.sentinel)  # the end of a pipe whose other end the parent has
            break
    end = threading.Timer(_EXIT_S, os._exit, (1,))
    end.daemon = True
    end.start()


def first_of(error: BaseException) -> BaseException:
    """The first error in groups of errors, an interrupt before all others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    interrupts = error.subgroup(KeyboardInterrupt)
    return first_of((interrupts or error).exceptions[0])
