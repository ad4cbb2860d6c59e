"""Lookups within one process: the handler runs in the serving loop, nothing is encoded.

``inprocess://name`` meets the server of that name in this process; ``inprocess://`` is private to the transport object.
A client on the serving loop's own thread calls straight into it, so under a simulated clock no socket, thread or real
time is touched (poll with ``wait=0`` there). Another thread hands over through the loop's own thread-safe queue.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import ClassVar, Self

import anyio
from anyio.abc import TaskGroup

from kvpool.deadlines import running_loop
from kvpool.errors import ConfigError, LookupTimeout, TransportClosed, TransportError
from kvpool.protocols._lifetime import Lifetime
from kvpool.protocols._lookup_handler import Handling
from kvpool.protocols._lookup_wire import Fault, Outcome, foreign_namespace
from kvpool.registry import URL
from kvpool.transport import (
    MAX_TIMEOUT,
    LookupClient,
    LookupHandler,
    LookupRequest,
    LookupResult,
    LookupTransport,
    PolledLookupClient,
)

__all__ = ["InProcessTransport"]

#: The servers of this process by address.
_servers: dict[str, _Server] = {}
# The loops that would answer are gone in a forked child.
os.register_at_fork(after_in_child=_servers.clear)


class InProcessTransport(LookupTransport):
    """Both ends live in one process. ``max_handlers``: lookups handled at the same time; more wait their turn."""

    scheme: ClassVar[str] = "inprocess"

    def __init__(self, name: str = "", *, max_handlers: int = 64) -> None:
        self.address = f"inprocess://{name or secrets.token_hex(8)}"
        self._max_handlers = max_handlers

    @classmethod
    def from_url(cls, url: URL) -> Self:
        if url.port is not None or url.username or url.password or url.path.strip("/") or url.params:
            raise ConfigError(f"{url}: inprocess takes a name and nothing else, as in inprocess://name")
        return cls(url.host)

    def serve(self, handler: LookupHandler, *, namespace: bytes | None = None) -> AbstractAsyncContextManager[None]:
        return self._serve(handler, namespace)

    @asynccontextmanager
    async def _serve(self, handler: LookupHandler, namespace: bytes | None) -> AsyncIterator[None]:
        server = _Server(self.address, handler, namespace, anyio.Semaphore(self._max_handlers))
        if _servers.setdefault(self.address, server) is not server:
            raise TransportError(f"{self.address}: another server of this process holds that name")
        error: Exception | None = None
        try:
            async with server.tasks:
                try:
                    yield
                except Exception as raised:  # keep it out of the task group, which would wrap it
                    error = raised
                server.tasks.cancel_scope.cancel()
        finally:
            del _servers[self.address]
        if error is not None:
            raise error

    def client(self) -> LookupClient:
        return _Client(self.address)

    def polled_client(self) -> PolledLookupClient:
        return _PolledClient(self.address)


class _Loop:
    """The event loop of the thread that makes this, for use from any thread. ``now``: its clock."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._soon: Callable[[Callable[[], object]], object]
        self.now: Callable[[], float]
        if running_loop() == "trio":
            from trio.lowlevel import current_clock, current_trio_token

            self._soon, self.now = current_trio_token().run_sync_soon, current_clock().current_time
        else:
            from asyncio import get_running_loop

            loop = get_running_loop()
            # By default a callback runs in the caller's context, which on another thread knows of no event loop.
            self._soon, self.now = partial(loop.call_soon_threadsafe, context=copy_context()), loop.time

    def call(self, function: Callable[[], object]) -> bool:
        """Run ``function`` on the loop: at once from its own thread, else soon. False if the loop has ended."""
        if threading.get_ident() == self._thread:
            function()
            return True
        try:
            self._soon(function)
        except RuntimeError:  # trio's RunFinishedError is one as well
            return False
        return True


@dataclass(slots=True, eq=False)
class _Job:
    """One lookup in a server. ``report`` gets the outcome, once, on the serving loop."""

    request: LookupRequest
    deadline: float  #: on the serving loop's clock
    report: Callable[[Outcome], object]
    cancelled: bool = False
    scope: anyio.CancelScope | None = None

    def cancel(self) -> None:
        """On the serving loop: stop the handler."""
        self.cancelled = True
        if self.scope is not None:
            self.scope.cancel()


class _Server:
    def __init__(self, address: str, handler: LookupHandler, namespace: bytes | None, slots: anyio.Semaphore) -> None:
        self.address = address
        self.loop = _Loop()
        self.tasks: TaskGroup = anyio.create_task_group()
        self._handling = Handling(handler, address)
        self._namespace = namespace
        self._slots = slots

    def start(self, job: _Job) -> None:
        """On the serving loop: handle a lookup."""
        if _servers.get(self.address) is not self:
            job.report(self._closed())
        elif mismatch := foreign_namespace(self._namespace, job.request.namespace):
            job.report(mismatch.to_error(self.address))
        elif not job.cancelled:
            self.tasks.start_soon(self._run, job)

    async def _run(self, job: _Job) -> None:
        outcome: Outcome = self._closed()
        answer: LookupResult | Fault | None = None
        try:
            with anyio.CancelScope(deadline=job.deadline) as scope:
                job.scope = scope
                if job.cancelled:
                    scope.cancel()
                async with self._slots:
                    answer = await self._handling.run(job.request, job.deadline)
            if answer is None:
                outcome = LookupTimeout(f"{self.address}: the lookup handler ran out of time")
            else:
                outcome = answer.to_error(self.address) if isinstance(answer, Fault) else answer
        finally:
            job.scope = None
            job.report(outcome)

    def _closed(self) -> TransportError:
        return TransportError(f"{self.address}: the server was closed")


def _server_at(address: str) -> _Server:
    try:
        return _servers[address]
    except KeyError:
        raise TransportError(f"{address}: nothing serves that name in this process") from None


class _Client(LookupClient):
    def __init__(self, address: str) -> None:
        self._address = address
        self._life = Lifetime(f"{address}: this client")
        self._open: set[_Waiter] = set()
        self._loop: _Loop

    async def __aenter__(self) -> Self:
        self._life.open()
        self._loop = _Loop()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._life.close():
            for waiter in self._open:
                waiter.set(TransportClosed(f"{self._address}: this client was closed"))

    async def lookup(self, request: LookupRequest, *, deadline: float) -> LookupResult:
        self._life.check()
        server = _server_at(self._address)
        loop, waiter = self._loop, _Waiter()
        timeout = min(deadline - loop.now(), MAX_TIMEOUT)
        job = _Job(request, server.loop.now() + timeout, lambda outcome: loop.call(partial(waiter.set, outcome)))
        self._open.add(waiter)
        try:
            with anyio.CancelScope(deadline=loop.now() + timeout):
                if not server.loop.call(partial(server.start, job)):
                    raise TransportError(f"{self._address}: the serving loop has ended")
                await waiter.ready.wait()
        finally:
            self._open.discard(waiter)
            server.loop.call(job.cancel)
        if waiter.outcome is None:
            raise LookupTimeout(f"{self._address}: a lookup ran out of time")
        if isinstance(waiter.outcome, TransportError):
            raise waiter.outcome
        return waiter.outcome


@dataclass(slots=True, eq=False)
class _Waiter:
    """Where an async lookup waits for its outcome."""

    ready: anyio.Event = field(default_factory=anyio.Event)
    outcome: Outcome | None = None

    def set(self, outcome: Outcome) -> None:
        """The first outcome counts."""
        if self.outcome is None:
            self.outcome = outcome
            self.ready.set()


class _PolledClient(PolledLookupClient):
    def __init__(self, address: str) -> None:
        self._address = address
        self._life = Lifetime(f"{address}: this client")
        self._life.open()
        self._tickets = count(1)
        self._open: dict[int, tuple[_Server, _Job] | None] = {}
        self._reported: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()

    def submit(self, request: LookupRequest, *, timeout: float) -> int:
        self._life.check()
        ticket = next(self._tickets)
        self._open[ticket] = None
        try:
            server = _server_at(self._address)
            # A slice keeps what it shows while the caller's hashes grow.
            snapshot = replace(request, hashes=request.hashes[:])
            deadline = server.loop.now() + min(max(0.0, timeout), MAX_TIMEOUT)
            job = _Job(snapshot, deadline, lambda outcome: self._reported.put((ticket, outcome)))
            self._open[ticket] = server, job
            if not server.loop.call(partial(server.start, job)):
                raise TransportError(f"{self._address}: the serving loop has ended")
        except TransportError as error:
            self._reported.put((ticket, error))
        return ticket

    def poll(self, *, wait: float = 0.0) -> Sequence[tuple[int, Outcome]]:
        self._life.check()
        done = self._collect(0.0)
        end = time.monotonic() + wait
        while not done and self._open and (left := end - time.monotonic()) > 0:
            done = self._collect(left)
        return done

    def _collect(self, wait: float) -> list[tuple[int, Outcome]]:
        left = {t: e[1].deadline - e[0].loop.now() for t, e in self._open.items() if e is not None}
        done: list[tuple[int, Outcome]] = []
        try:
            ticket, outcome = self._reported.get(timeout=max(0.0, min([wait, *left.values()])))
            while True:
                if ticket in self._open:
                    del self._open[ticket]
                    done.append((ticket, outcome))
                ticket, outcome = self._reported.get_nowait()
        except queue.Empty:
            pass
        for ticket, seconds in left.items():
            if seconds <= 0 and ticket in self._open:
                self.cancel(ticket)
                done.append((ticket, LookupTimeout(f"{self._address}: a lookup ran out of time")))
        return done

    def cancel(self, ticket: int) -> None:
        self._life.check()
        if (entry := self._open.pop(ticket, None)) is not None:
            server, job = entry
            server.loop.call(job.cancel)

    def close(self) -> None:
        if self._life.close():
            for entry in self._open.values():
                if entry is not None:
                    entry[0].loop.call(entry[1].cancel)
            self._open.clear()
