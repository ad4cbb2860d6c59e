"""Runs a replay: one engine in this process, or several, each in a process of its own.

Engines take requests in arrival order, so with N engines at most N requests overlap.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from kvpool.errors import ConfigError, KVPoolError
from kvpool.registry import create_store, parse_url
from kvpool.replay.engine import Ended, Job, Outcome, run_engine
from kvpool.replay.processes import EngineProcesses, Failed, Ready, first_of
from kvpool.replay.report import Report

__all__ = ["run"]

INTERRUPTED = "interrupted"
_STOP_S = 20.0  # engines that were told to stop have this long to finish the request at hand
_POLL_S = 0.2  # how soon an interrupt is noticed


def run(job: Job, on_outcome: Callable[[Report], None] = lambda report: None) -> Report:
    """Play the whole trace. ``on_outcome`` is called after each request.

    The report says what went wrong on the way. Raises ConfigError for what cannot be run at all, KVPoolError if an
    engine cannot start. An interrupt (Ctrl-C) ends all engines and makes an incomplete report.
    """
    config = job.config
    store = create_store(config.store)
    if job.block_bytes > config.staging_bytes:
        raise ConfigError(
            f"blocks of {job.block_bytes} bytes do not fit into {config.staging_bytes} bytes of staging memory; take "
            "smaller blocks, or set KVPOOL_STAGING_BYTES"
        )
    if job.engines > 1 and not store.capabilities.shared:
        raise ConfigError(
            f"{job.engines} engines need a store that processes share, and {parse_url(job.store)} is private to one "
            f"({type(store).__name__}); use one engine, or a shared store such as file:///path"
        )
    replay = _Replay(job, on_outcome)
    cpu = _cpu_seconds()
    try:
        if job.engines > 1:
            replay.in_processes()
        else:
            replay.in_this_process()
    except KeyboardInterrupt:
        replay.report.problem = INTERRUPTED
    replay.report.cpu_seconds = _cpu_seconds() - cpu
    return replay.report


class _Replay:
    def __init__(self, job: Job, on_outcome: Callable[[Report], None]) -> None:
        self.job = job
        self.report = Report(job)
        self.on_outcome = on_outcome
        self.begin = math.nan

    def add(self, outcome: Outcome) -> None:
        self.report.add(outcome)
        self.report.seconds = time.monotonic() - self.begin
        self.on_outcome(self.report)

    def in_this_process(self) -> None:
        requests = iter(range(len(self.job.trace)))

        async def started() -> float:
            self.begin = time.monotonic()
            return anyio.current_time()

        async def main() -> None:
            self.report.end(await run_engine(self.job, lambda: next(requests, None), self.add, started))

        try:
            anyio.run(main, backend=self.job.config.event_loop)
        except BaseExceptionGroup as group:
            raise first_of(group) from None

    def in_processes(self) -> None:
        engines = EngineProcesses(self.job)
        try:
            with _on_interrupt(self.interrupt):
                engines.start()
                self.listen(engines)
        finally:
            engines.end()

    def interrupt(self, *_: object) -> None:
        """The first interrupt lets each engine finish the request at hand, the second one does not."""
        if self.report.problem:
            raise KeyboardInterrupt
        self.report.stop(INTERRUPTED)

    def listen(self, engines: EngineProcesses) -> None:
        """Hear every engine out. Once there is a problem, no engine begins another request."""
        report, opening = self.report, self.job.engines
        patience = math.inf
        while engines.running and time.monotonic() < patience:
            for message in engines.hear(_POLL_S):
                if isinstance(message, Outcome):
                    self.add(message)
                elif isinstance(message, Ended):
                    report.end(message)
                elif isinstance(message, Failed):
                    if opening:
                        raise KVPoolError(message.reason)
                    report.stop(message.reason)
                elif isinstance(message, Ready):
                    opening -= 1
                    if not opening:
                        self.begin = engines.go()
            if report.problem and patience == math.inf:
                engines.stop()
                patience = time.monotonic() + _STOP_S
            if report.problem and opening:
                return


@contextmanager
def _on_interrupt(handler: Callable[..., object]) -> Iterator[None]:
    """SIGINT is handled so, unless it is ignored, or this is not the main thread, which alone is interrupted."""
    old = signal.getsignal(signal.SIGINT)
    if old is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


def _cpu_seconds() -> float:
    """Of this process and of those that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
