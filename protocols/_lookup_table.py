"""The client's half of the lookup protocol without I/O: which lookups wait to be sent, are out, or are done."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from typing_extensions import Buffer

from kvpool.codec import HashCodec
from kvpool.errors import LookupTimeout, ProtocolMismatch, TransportError
from kvpool.protocols._lookup_wire import (
    NS,
    VERSION,
    Clock,
    Fault,
    Outcome,
    Prefix,
    host_clock,
    pack_lookup,
    read_prefix,
    read_reply,
)
from kvpool.transport import MAX_TIMEOUT, LookupRequest, LookupResult

__all__ = ["RequestTable"]


@dataclass(slots=True)
class _Open:
    request: LookupRequest
    deadline_ns: int


class RequestTable:
    """The lookups of one client.

    ``peer``: who is asked, for messages. ``max_frame_bytes``: a request with more bytes of hashes fails at once (a
    server drops the connection of who sends more). ``max_outstanding``: so many tickets may be open; more fail at once.

    A ticket is the request id on the wire. Ids begin at a random one and never come back, so a reply meant for an
    earlier client cannot match. ``timeouts``: tickets that ran out of time since the last message came in. ``counts``:
    replies dropped, by reason.
    """

    def __init__(
        self,
        codec: HashCodec,
        *,
        peer: str,
        max_frame_bytes: int,
        max_outstanding: int = 1024,
        clock: Clock | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.timeouts = 0
        self._codec = codec
        self._peer = peer
        self._max_frame_bytes = max_frame_bytes
        self._max_outstanding = max_outstanding
        self._clock = clock or host_clock()
        self._server_clock = (self._clock.id, 0)  # its id, and what to add to our time; never too much
        self._next_id = secrets.randbits(62) + 1
        self._open: dict[int, _Open] = {}
        self._unsent: dict[int, None] = {}  # in order
        self._deadlines: list[tuple[int, int]] = []  # a heap; holds tickets that have ended, too
        self._done: list[tuple[int, Outcome]] = []

    def submit(self, request: LookupRequest, timeout: float) -> int:
        """A new ticket, last in line to be sent. ``timeout``: seconds, cut to MAX_TIMEOUT."""
        ticket = self._next_id
        self._next_id += 1
        deadline_ns = self._clock.now() + int(min(max(0.0, timeout), MAX_TIMEOUT) * NS)
        try:
            self._check(ticket, request)
        except Exception as error:  # whatever a codec does, a lookup that cannot be sent is a miss
            self._done.append((ticket, TransportError(f"{self._peer}: the lookup cannot be sent: {error}")))
            return ticket
        # A slice keeps what it shows while the caller's hashes grow.
        self._open[ticket] = _Open(replace(request, hashes=request.hashes[:]), deadline_ns)
        self._unsent[ticket] = None
        heappush(self._deadlines, (deadline_ns, ticket))
        if len(self._deadlines) > 2 * self._max_outstanding:
            self._deadlines = [d for d in self._deadlines if d[1] in self._open]
            heapify(self._deadlines)
        return ticket

    def _check(self, ticket: int, request: LookupRequest) -> None:
        """Raise for a request that cannot be sent, now or ever."""
        if len(self._open) >= self._max_outstanding:
            raise TransportError(f"{len(self._open)} lookups are out already, the server does not keep up")
        pack_lookup(ticket, request, self._codec, *self._server_clock, 0)
        nbytes = sum(memoryview(piece).nbytes for piece in self._codec.encode(request.hashes))
        if nbytes > self._max_frame_bytes:
            limit = f"max_frame_bytes={self._max_frame_bytes:,}"
            raise TransportError(f"{nbytes:,} bytes of hashes are over {limit}; raise it at both ends")

    def next_unsent(self) -> tuple[int, bytes, Sequence[Buffer]] | None:
        """The request next in line: ticket, header frame, pieces of the hashes frame. It stays until :meth:`sent`."""
        self.expire()
        for ticket in self._unsent:
            opened = self._open[ticket]
            clock_id, offset = self._server_clock
            left_ns = max(0, opened.deadline_ns - self._clock.now())
            header = pack_lookup(ticket, opened.request, self._codec, clock_id, opened.deadline_ns + offset, left_ns)
            return ticket, header, self._codec.encode(opened.request.hashes)
        return None

    def sent(self, ticket: int) -> None:
        """The request has left, and is out of line."""
        del self._unsent[ticket]

    def send_again(self) -> None:
        """Put every open ticket in line, the oldest first: what was sent is lost. Asking twice does no harm."""
        self._unsent = dict.fromkeys(self._open)

    def receive(self, frames: Sequence[Buffer]) -> None:
        """Match a reply with its ticket. What matches none (late, cancelled, foreign) is dropped and counted."""
        self.expire()
        self.timeouts = 0
        prefix = read_prefix(frames)
        if prefix is None or len(frames) != 1:
            self.counts["foreign"] += 1
        elif prefix.id not in self._open or prefix.id in self._unsent:
            self.counts["late"] += 1
        else:
            opened = self._open.pop(prefix.id)
            self._done.append((prefix.id, self._outcome(opened, prefix, frames[0])))

    def _outcome(self, opened: _Open, prefix: Prefix, frame: Buffer) -> Outcome:
        if prefix.version != VERSION:
            text = f"the client speaks protocol version {VERSION}, the server version {prefix.version}"
            return ProtocolMismatch(f"{self._peer}: {text}")
        try:
            outcome, clock_id, server_ns = read_reply(prefix, frame)
            if isinstance(outcome, LookupResult):
                outcome.check(opened.request.num_tokens)
        except ValueError as error:
            return TransportError(f"{self._peer}: the server's reply cannot be read: {error}")
        # The server read its clock before its reply came in, so this is never ahead of the server's time.
        own = clock_id == self._clock.id
        self._server_clock = (clock_id, 0 if own else server_ns - self._clock.now())
        return outcome.to_error(self._peer) if isinstance(outcome, Fault) else outcome

    def expire(self) -> None:
        """End every ticket whose time is over."""
        now = self._clock.now()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._open):
            _, ticket = heappop(self._deadlines)
            if self._open.pop(ticket, None) is not None:
                never_sent = ticket in self._unsent
                self._unsent.pop(ticket, None)
                self.timeouts += 1
                why = "no live server took it" if never_sent else "the server did not answer"
                self._done.append((ticket, LookupTimeout(f"{self._peer}: a lookup ran out of time: {why}")))

    def cancel(self, ticket: int) -> None:
        """Forget a ticket, whatever its state."""
        self._unsent.pop(ticket, None)
        if self._open.pop(ticket, None) is None:
            self._done = [d for d in self._done if d[0] != ticket]

    def give_up(self, ticket: int) -> None:
        """Forget a ticket whose caller has seen its time run out."""
        if ticket in self._open:
            self.timeouts += 1
        self.cancel(ticket)

    def take_done(self) -> list[tuple[int, Outcome]]:
        """Tickets that ended since the last call, in the order they ended."""
        self.expire()
        done, self._done = self._done, []
        return done

    @property
    def has_done(self) -> bool:
        """Whether :meth:`take_done` has something."""
        self.expire()
        return bool(self._done)

    @property
    def has_unsent(self) -> bool:
        """Whether a request waits in line."""
        return bool(self._unsent)

    @property
    def outstanding(self) -> int:
        """Tickets that have not ended."""
        return len(self._open)

    def seconds_left(self) -> float | None:
        """Until the next ticket ends by itself; None without one."""
        self.expire()
        return (self._deadlines[0][0] - self._clock.now()) / NS if self._deadlines else None
