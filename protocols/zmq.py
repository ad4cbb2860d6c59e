"""Lookups between processes over ZeroMQ: one ROUTER serves, DEALER clients ask.

``zmq+ipc://name`` is private to this user on this host; ``zmq+ipc://`` chooses a name nobody else has, found in the
transport's ``url``. ``zmq+tcp://host:port`` is for loopback, or for anywhere with CURVE keys. Options: see
:class:`~kvpool.protocols._zmq_link.Options`.

Plain sockets without a background thread of Python: the async sides sleep on ``anyio.wait_readable``, the polled
client is driven by the calls of its owner. A ZeroMQ descriptor tells of changes, not of what is there, so every send
and every wake-up is followed by reading until nothing is left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from math import ceil
from typing import Any, ClassVar, Self

import anyio
import zmq
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from typing_extensions import Buffer

from kvpool.codec import HashCodec
from kvpool.errors import LookupTimeout, TransportClosed, TransportError
from kvpool.protocols._lifetime import Lifetime
from kvpool.protocols._lookup_handler import Handling
from kvpool.protocols._lookup_table import RequestTable
from kvpool.protocols._lookup_wire import NS, Incoming, Outcome, ServerWire
from kvpool.protocols._zmq_curve import Keys
from kvpool.protocols._zmq_link import NOBLOCK, POLLIN, POLLOUT, SNDMORE_NOBLOCK, Link, receive
from kvpool.registry import URL, create_codec
from kvpool.transport import (
    LookupClient,
    LookupHandler,
    LookupRequest,
    LookupResult,
    LookupTransport,
    PolledLookupClient,
)

__all__ = ["ZmqTransport"]

# Messages that a server reads before others get a turn of the loop.
_BURST = 16
# Tasks that wait to listen; further ones end.
_MAX_IDLE = 16


class ZmqTransport(LookupTransport):
    """One lookup channel over ZeroMQ. ``url``: where; pickles as that."""

    scheme: ClassVar[str] = "zmq+ipc"

    def __init__(self, url: URL) -> None:
        self._link = Link(url)
        self._codec = create_codec(self._link.options.codec)
        self._counts: Counter[str] = Counter()
        self.url = self._link.url

    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls(url)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def serve(self, handler: LookupHandler, *, namespace: bytes | None = None) -> AbstractAsyncContextManager[None]:
        return self._serve(handler, namespace)

    @asynccontextmanager
    async def _serve(self, handler: LookupHandler, namespace: bytes | None) -> AsyncIterator[None]:
        error: Exception | None = None
        link = self._link
        with ExitStack() as sockets:
            auth = sockets.enter_context(link.using(link.authenticator())) if link.keys else None
            router = sockets.enter_context(link.using(link.router()))
            wire = ServerWire(self._codec, namespace=namespace, counts=self._counts)
            async with anyio.create_task_group() as tasks:
                server = _Server(router, wire, Handling(handler, link.peer), link.options.max_handlers, tasks)
                tasks.start_soon(server.work)
                if auth is not None and link.keys is not None:
                    tasks.start_soon(_authenticate, auth, link.keys)
                try:
                    yield
                except Exception as raised:  # keep it out of the task group, which would wrap it
                    error = raised
                tasks.cancel_scope.cancel()
        if error is not None:
            raise error

    def client(self) -> LookupClient:
        return _Client(self._link, self._codec)

    def polled_client(self) -> PolledLookupClient:
        return _PolledClient(self._link, self._codec)

    def counts(self) -> Mapping[str, int]:
        return dict(self._counts)


class _Server:
    """Tasks that take turns at listening: who has read a request lets the next one listen, and answers right away.

    A task for each request would cost a turn of the loop and 20 us before its handler begins.
    """

    def __init__(
        self, router: zmq.Socket[bytes], wire: ServerWire, handling: Handling, max_handlers: int, tasks: TaskGroup
    ) -> None:
        self._router = router
        self._wire = wire
        self._handling = handling
        self._max_handlers = max_handlers
        self._tasks = tasks
        self._workers = 1
        self._listening = anyio.Lock(fast_acquire=True)
        self._waiting: anyio.CancelScope | None = None
        self._unbroken = 0  # messages read since others had a turn

    async def work(self) -> None:
        """Listen and answer for ever. While all tasks answer nothing is read: requests run out in the queue."""
        while self._idle < _MAX_IDLE:
            async with self._listening:
                identity, incoming = await self._next()
                if not self._idle and self._workers < self._max_handlers:
                    self._workers += 1
                    self._tasks.start_soon(self.work)
            await self._answer(identity, incoming)
        self._workers -= 1

    @property
    def _idle(self) -> int:
        """Tasks that wait to listen."""
        return self._listening.statistics().tasks_waiting

    async def _next(self) -> tuple[bytes, Incoming]:
        """The next request that is worth handling."""
        while True:
            if self._unbroken >= _BURST:  # a flood of garbage, or of lookups that are answered without waiting
                await checkpoint()
                self._unbroken = 0
            if (frames := receive(self._router)) is not None:
                self._unbroken += 1
                identity, *message = frames
                verdict = self._wire.accept(message)
                if isinstance(verdict, Incoming):
                    return bytes(identity), verdict
                if verdict is not None:
                    self._router.send_multipart([bytes(identity), verdict], NOBLOCK)
                continue
            try:
                with anyio.CancelScope() as self._waiting:
                    await anyio.wait_readable(self._router.FD)
            finally:
                self._waiting, self._unbroken = None, 0

    async def _answer(self, identity: bytes, incoming: Incoming) -> None:
        left = (incoming.deadline_ns - self._wire.clock.now()) / NS
        outcome = await self._handling.run(incoming.request, anyio.current_time() + left)
        if outcome is None:
            return
        # To a client that is gone, or takes no more, ZeroMQ drops it.
        self._router.send_multipart([identity, self._wire.reply(incoming.id, outcome)], NOBLOCK)
        if self._waiting is not None and int(self._router.get(zmq.EVENTS)) & POLLIN:
            self._waiting.cancel()  # sending has used up the signal that the listener waits for


async def _authenticate(auth: zmq.Socket[bytes], keys: Keys) -> None:
    while True:
        while (question := receive(auth)) is not None:
            auth.send_multipart(keys.authorize(question), NOBLOCK)
        await anyio.wait_readable(auth.FD)


class _Channel:
    """A DEALER and its request table: what both faces of a client share. Used from one thread."""

    def __init__(self, link: Link, codec: HashCodec) -> None:
        self.table = RequestTable(codec, peer=link.peer, max_frame_bytes=link.options.max_frame_bytes)
        self._dealer = link.dealer()
        self._link = link
        self._frame = bytearray()
        self._silent_since: float | None = None

    @property
    def fd(self) -> int:
        """Readable when :meth:`step` may find something to do."""
        return int(self._dealer.FD)

    def step(self) -> None:
        """Send and read all that can be without waiting. After this, and only then, ``fd`` tells of news."""
        while True:
            while (unsent := self.table.next_unsent()) is not None and self._send(*unsent):
                pass
            # Asked after sending, which may have taken in the signal of a reply; reading may make room to send.
            events = int(self._dealer.get(zmq.EVENTS))
            if events & POLLIN:
                if (message := receive(self._dealer)) is not None:
                    self.table.receive(message)
            elif not (events & POLLOUT and self.table.has_unsent):
                break
        if not self.table.timeouts:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = time.monotonic()

    @property
    def is_stale(self) -> bool:
        """Whether lookups have gone unanswered for too long: time for :meth:`renew`."""
        return (
            self._silent_since is not None
            and time.monotonic() - self._silent_since > self._link.options.reconnect_after_s
        )

    def renew(self) -> None:
        """Connect anew and send again what is open; changes ``fd``.

        ZeroMQ reconnects by itself, but gives up for ever on a peer that broke the protocol once (anything else that
        listens there for a moment, a refused key, a message over the limit).
        """
        self._silent_since, self.table.timeouts = None, 0
        try:
            renewed = self._link.dealer()
        except TransportError:  # out of descriptors, say; the old one may yet come back
            return
        self._link.close(self._dealer)
        self._dealer = renewed
        self.table.send_again()
        self.step()

    def _send(self, ticket: int, header: bytes, pieces: Sequence[Buffer]) -> bool:
        try:
            self._dealer.send(header, SNDMORE_NOBLOCK)
            self._dealer.send(self._join(pieces), NOBLOCK)
        except zmq.Again:  # no server is there, or it does not keep up, or it went in mid-message, which is then undone
            return False
        self.table.sent(ticket)
        return True

    def _join(self, pieces: Sequence[Buffer]) -> memoryview:
        """One frame, in memory that serves every frame: half a megabyte of fresh memory costs more than to send it."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        nbytes = sum(view.nbytes for view in views)
        if nbytes > len(self._frame):
            self._frame = bytearray(nbytes)
        frame, end = memoryview(self._frame), 0
        for view in views:
            frame[end : end + view.nbytes] = view
            end += view.nbytes
        return frame[:end]

    def sleep(self, seconds: float) -> None:
        """Block the thread until there may be something to do, at most ``seconds`` (in steps of 1 ms)."""
        seconds = min(seconds, self.table.seconds_left() or 0.0)
        self._dealer.poll(max(0, ceil(seconds * 1000)), POLLIN | (POLLOUT if self.table.has_unsent else 0))

    def close(self) -> None:
        self._link.close(self._dealer)


class _PolledClient(PolledLookupClient):
    def __init__(self, link: Link, codec: HashCodec) -> None:
        self._life = Lifetime(f"{link.peer}: this client")
        self._channel = _Channel(link, codec)
        self._life.open()

    def submit(self, request: LookupRequest, *, timeout: float) -> int:
        self._life.check()
        ticket = self._channel.table.submit(request, timeout)
        self._step()
        return ticket

    def _step(self) -> None:
        self._channel.step()
        if self._channel.is_stale:
            self._channel.renew()

    def poll(self, *, wait: float = 0.0) -> Sequence[tuple[int, Outcome]]:
        self._life.check()
        table = self._channel.table
        if table.outstanding:
            self._step()
            end = time.monotonic() + wait
            while not table.has_done and table.outstanding and (left := end - time.monotonic()) > 0:
                self._channel.sleep(left)
                self._step()
        return table.take_done()

    def cancel(self, ticket: int) -> None:
        self._life.check()
        self._channel.table.cancel(ticket)

    def close(self) -> None:
        if self._life.close():
            self._channel.close()

    def counts(self) -> Mapping[str, int]:
        return dict(self._channel.table.counts)


class _Waiter:
    """Where an async lookup waits: for its outcome, or for its turn to read."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.wake = anyio.Event()


class _Client(LookupClient):
    """Without a task of its own: one of the lookups that wait reads the socket for all of them."""

    def __init__(self, link: Link, codec: HashCodec) -> None:
        self._link, self._codec = link, codec
        self._life = Lifetime(f"{link.peer}: this client")
        self._channel: _Channel
        self._waiters: dict[int, _Waiter] = {}
        self._reading: anyio.CancelScope | None = None

    async def __aenter__(self) -> Self:
        self._life.open()
        self._channel = _Channel(self._link, self._codec)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._life.close():
            return
        for waiter in self._waiters.values():
            waiter.outcome = TransportClosed(f"{self._link.peer}: this client was closed")
            waiter.wake.set()
        if self._reading is not None:
            self._reading.cancel()
        with anyio.CancelScope(shield=True):
            while self._reading is not None:  # until nothing watches the descriptor, which is about to be reused
                await checkpoint()
        self._channel.close()

    async def lookup(self, request: LookupRequest, *, deadline: float) -> LookupResult:
        self._life.check()
        table = self._channel.table
        waiter = _Waiter()
        ticket = table.submit(request, deadline - anyio.current_time())
        self._waiters[ticket] = waiter
        try:
            self._step()
            with anyio.CancelScope(deadline=deadline):
                while waiter.outcome is None:
                    if self._reading is None:
                        await self._read()
                    else:
                        waiter.wake = anyio.Event()
                        await waiter.wake.wait()
            if waiter.outcome is None:
                table.give_up(ticket)
        finally:
            del self._waiters[ticket]
            table.cancel(ticket)
            if self._reading is None:
                self._next_reader()
        if waiter.outcome is None:
            raise LookupTimeout(f"{self._link.peer}: a lookup ran out of time")
        if isinstance(waiter.outcome, TransportError):
            raise waiter.outcome
        return waiter.outcome

    async def _read(self) -> None:
        if self._channel.is_stale:
            self._channel.renew()
        else:
            try:
                with anyio.CancelScope() as self._reading:
                    await anyio.wait_readable(self._channel.fd)
            finally:
                self._reading = None
        self._step()

    def _step(self) -> None:
        self._channel.step()
        for ticket, outcome in self._channel.table.take_done():
            waiter = self._waiters[ticket]
            waiter.outcome = outcome
            waiter.wake.set()
        if self._channel.is_stale and self._reading is not None:
            self._reading.cancel()  # nobody may watch a descriptor that is about to be closed

    def _next_reader(self) -> None:
        for waiter in self._waiters.values():
            if waiter.outcome is None:
                waiter.wake.set()
                return
