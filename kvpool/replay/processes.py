"""Engines in processes of their own: started, heard, stopped.

They share one counter, from which each takes the next request in arrival order, and each has a pipe to the parent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, TypeAlias

import anyio

from kvpool.errors import KVPoolError
from kvpool.replay.engine import Ended, Job, Outcome, run_engine

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess
    from multiprocessing.sharedctypes import Synchronized

__all__ = ["EngineProcesses", "Failed", "Message", "Ready", "first_of"]

_EXIT_S = 5.0  # for a process that has nothing left to do, or was told to end


@dataclass(frozen=True)
class Ready:
    """The store is open; the engine waits for :meth:`EngineProcesses.go`."""


@dataclass(frozen=True)
class Failed:
    """The engine cannot work, or ended on its own."""

    reason: str


Message: TypeAlias = Ready | Ended | Failed | Outcome


class EngineProcesses:
    """The processes of ``job``."""

    def __init__(self, job: Job) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._job = job
        self._taken: Synchronized[int] = self._context.Value("q", 0)
        self._all: list[SpawnProcess] = []
        self._running: dict[Connection, SpawnProcess] = {}

    def start(self) -> None:
        # An interrupt is for the parent, which tells the engines: they inherit the blocked signal and then ignore it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for number in range(1, self._job.engines + 1):
                here, there = self._context.Pipe()
                args = (self._job, self._taken, there)
                process = self._context.Process(target=_main, args=args, name=f"engine {number}", daemon=True)
                process.start()
                there.close()
                self._all.append(process)
                self._running[here] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

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
        self._taken.value = len(self._job.trace)

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
        if self._running:
            for process in self._all:
                process.terminate()
        for process in self._all:
            process.join(_EXIT_S)
            process.kill()
            process.join()


def _main(job: Job, taken: Synchronized[int], parent: Connection) -> None:
    """What an engine's process does. It ends by itself when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def take() -> int | None:
        with taken.get_lock():
            i = taken.value
            if i >= len(job.trace):
                return None
            taken.value = i + 1
            return i

    async def started() -> float:
        parent.send(Ready())
        await anyio.wait_readable(parent.fileno())
        begin: float = parent.recv()
        return anyio.current_time() + begin - time.monotonic()

    try:
        try:
            backend = job.config.event_loop
            last: Message = anyio.run(run_engine, job, take, parent.send, started, backend=backend)
        except (Exception, BaseExceptionGroup) as error:
            cause = first_of(error)
            if isinstance(cause, EOFError | BrokenPipeError | ConnectionResetError):
                return
            last = Failed(str(cause) if isinstance(cause, KVPoolError) else f"{type(cause).__name__}: {cause}")
        parent.send(last)
    except OSError:
        return


def first_of(error: BaseException) -> BaseException:
    """The first error in groups of errors, an interrupt before all others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    interrupts = error.subgroup(KeyboardInterrupt)
    return first_of((interrupts or error).exceptions[0])
