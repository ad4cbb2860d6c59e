"""The lookup protocol without I/O: the messages, and the checks of a server.

Version 1. A request is two frames, a header and the codec's hashes; a reply is one frame. Numbers are big-endian.

prefix
    magic ``kvpl``, version u8, kind u8, two zero bytes, request id u64. The same in every version, so that a version
    mismatch is answered to the one who asked.
clock
    clock id 8 bytes, i64 nanoseconds on that clock.
LOOKUP
    prefix, namespace 16, epoch 16, num_tokens u64, local_tokens u64, clock (the deadline), nanoseconds left u64, codec
    name 16, hash scheme 64 (ASCII, zero-padded).
RESULT
    prefix, clock (the server's now), epoch 16, hit_length u64, max_age f64 seconds, count u16, boundaries u64 each.
FAULT
    prefix, clock (the server's now), code u16, text in UTF-8.

**Deadlines.** A deadline is absolute on a named monotonic clock, so a request that waits in the queue of a frozen
server runs out while it waits. Processes of one host share their clock. For another host the client learns the
server's clock from the first reply and names it from then on; only a request before that is granted, from its receipt,
the nanoseconds that were left when it was sent. A client never trusts the wire for time: its tickets end by its own
clock.
"""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from pathlib import Path

from typing_extensions import Buffer

from kvpool.codec import HashCodec
from kvpool.errors import HashError, ProtocolMismatch, TransportError
from kvpool.transport import MAX_TIMEOUT, LookupRequest, LookupResult

__all__ = [
    "MAX_REPLY_BYTES",
    "NS",
    "VERSION",
    "Clock",
    "Code",
    "Fault",
    "Incoming",
    "Kind",
    "Outcome",
    "Prefix",
    "ServerWire",
    "foreign_namespace",
    "host_clock",
    "pack_lookup",
    "read_prefix",
    "read_reply",
]

VERSION = 1
#: No reply is larger.
MAX_REPLY_BYTES = 64 << 10
#: Nanoseconds in a second.
NS = 1_000_000_000
_MAX_GROUPS = 1024
_MAX_TEXT_BYTES = 2048

_MAGIC = b"kvpl"
_PREFIX = struct.Struct("!4sBBxxQ")
_CLOCK = struct.Struct("!8sq")
_LOOKUP = struct.Struct("!16s16sQQ8sqQ16s64s")
_RESULT = struct.Struct("!16sQdH")
_CODE = struct.Struct("!H")


class Kind(IntEnum):
    """What a message is."""

    LOOKUP = 1
    RESULT = 2
    FAULT = 3


class Code(IntEnum):
    """Why a lookup was not answered with a result."""

    VERSION = 1  #: the two ends speak another protocol version
    NAMESPACE = 2  #: the server serves another namespace
    CODEC = 3  #: the hashes are written in another codec
    MALFORMED = 4  #: the request cannot be read
    HANDLER = 5  #: the handler failed


@dataclass(frozen=True, slots=True)
class Clock:
    """A monotonic clock. ``id``: 8 bytes, equal in two processes only if both read the same clock. ``now``: ns."""

    id: bytes
    now: Callable[[], int] = time.monotonic_ns


@cache
def host_clock() -> Clock:
    """The clock that all processes of this host share, named by boot and time namespace (Linux), else by process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        name = b"%b %d" % (boot, os.stat("/proc/self/ns/time").st_ino)
    except OSError:
        name = secrets.token_bytes(16)
    return Clock(blake2b(name, digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Fault:
    """A lookup that failed, by name."""

    code: Code
    text: str

    def to_error(self, peer: str) -> TransportError:
        """The error that the client's caller gets."""
        mismatch = self.code in (Code.VERSION, Code.NAMESPACE, Code.CODEC)
        return (ProtocolMismatch if mismatch else TransportError)(f"{peer}: {self.text}")


#: How a ticket ends.
Outcome = LookupResult | TransportError


@dataclass(frozen=True, slots=True)
class Prefix:
    """The start of every message of every version."""

    version: int
    kind: int
    id: int


def read_prefix(frames: Sequence[Buffer]) -> Prefix | None:
    """The prefix of a message, or None if it is none of this protocol's."""
    try:
        magic, version, kind, request_id = _PREFIX.unpack_from(frames[0])
    except (IndexError, struct.error):
        return None
    return Prefix(version, kind, request_id) if magic == _MAGIC else None


def _name(text: str, size: int, what: str) -> bytes:
    if not text.isascii() or not 0 < len(text) <= size:
        raise HashError(f"{what} {text!r} must be 1 to {size} ASCII characters to travel in a lookup")
    return text.encode("ascii")


def pack_lookup(
    request_id: int, request: LookupRequest, codec: HashCodec, clock_id: bytes, deadline_ns: int, left_ns: int
) -> bytes:
    """The header of a request. Raises HashError for a codec name or hash scheme that does not fit."""
    return _PREFIX.pack(_MAGIC, VERSION, Kind.LOOKUP, request_id) + _LOOKUP.pack(
        request.namespace,
        request.epoch,
        request.num_tokens,
        request.local_tokens,
        clock_id,
        deadline_ns,
        left_ns,
        _name(codec.name, 16, "codec name"),
        _name(request.hashes.scheme, 64, "hash scheme"),
    )


def read_reply(prefix: Prefix, frame: Buffer) -> tuple[LookupResult | Fault, bytes, int]:
    """What a reply says, the server's clock and its time in nanoseconds. Raises ValueError."""
    if prefix.version != VERSION:
        raise ValueError(f"version {prefix.version}")
    body = memoryview(frame)[_PREFIX.size :]
    outcome: LookupResult | Fault
    try:
        clock_id, server_ns = _CLOCK.unpack_from(body)
        body = body[_CLOCK.size :]
        if prefix.kind == Kind.FAULT:
            (code,) = _CODE.unpack_from(body)
            outcome = Fault(Code(code), str(body[_CODE.size :], "utf-8", "replace"))
        elif prefix.kind == Kind.RESULT:
            epoch, hit_length, max_age, count = _RESULT.unpack_from(body)
            outcome = LookupResult(hit_length, struct.unpack(f"!{count}Q", body[_RESULT.size :]), epoch, max_age)
        else:
            raise ValueError(f"a message of kind {prefix.kind} is no reply")
    except struct.error as error:
        raise ValueError(str(error)) from error
    return outcome, clock_id, server_ns


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request that is worth handling. ``deadline_ns`` is on the server's clock."""

    id: int
    request: LookupRequest
    deadline_ns: int


class ServerWire:
    """Reads requests and writes replies; keeps no state of any client.

    ``namespace``: the only one served, None for any. ``counts``: requests refused or dropped, by reason.
    """

    def __init__(
        self,
        codec: HashCodec,
        *,
        namespace: bytes | None = None,
        clock: Clock | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        self.codec = codec
        self.namespace = namespace
        self.clock = clock or host_clock()
        self.counts: Counter[str] = Counter() if counts is None else counts

    def accept(self, frames: Sequence[Buffer]) -> Incoming | bytes | None:
        """What to do with a message: handle it, send back this reply, or nothing at all (not ours, or expired)."""
        prefix = read_prefix(frames)
        if prefix is None or (prefix.version == VERSION and prefix.kind != Kind.LOOKUP):
            self.counts["foreign"] += 1
            return None
        if prefix.version != VERSION:
            text = f"the server speaks protocol version {VERSION}, the client version {prefix.version}"
            return self.reply(prefix.id, Fault(Code.VERSION, text))
        try:
            incoming = self._read(prefix.id, frames)
        except Exception as error:  # whatever a codec does with garbage, the service goes on
            return self.reply(prefix.id, Fault(Code.MALFORMED, f"the server cannot read the request: {error}"))
        return self.reply(prefix.id, incoming) if isinstance(incoming, Fault) else incoming

    def _read(self, request_id: int, frames: Sequence[Buffer]) -> Incoming | Fault | None:
        if len(frames) != 2 or memoryview(frames[0]).nbytes != _PREFIX.size + _LOOKUP.size:
            raise ValueError(f"{len(frames)} frames, the first of {memoryview(frames[0]).nbytes} bytes")
        namespace, epoch, num_tokens, local_tokens, clock_id, deadline_ns, left_ns, codec, scheme = _LOOKUP.unpack_from(
            frames[0], _PREFIX.size
        )
        now = self.clock.now()
        deadline_ns = min(deadline_ns if clock_id == self.clock.id else now + left_ns, now + int(MAX_TIMEOUT * NS))
        if deadline_ns <= now:
            self.counts["expired"] += 1
            return None
        if mismatch := foreign_namespace(self.namespace, namespace):
            return mismatch
        codec_name = codec.rstrip(b"\0").decode("ascii")
        if codec_name != self.codec.name:
            text = f"the server reads hashes with codec {self.codec.name!r}, the client writes {codec_name!r}"
            return Fault(Code.CODEC, text)
        hashes = self.codec.decode(frames[1], scheme=scheme.rstrip(b"\0").decode("ascii"))
        request = LookupRequest(namespace, epoch, num_tokens, local_tokens, hashes)
        return Incoming(request_id, request, deadline_ns)

    def reply(self, request_id: int, outcome: LookupResult | Fault) -> bytes:
        """The message that answers a request. ``outcome`` must have passed its check; faults are counted."""
        if isinstance(outcome, LookupResult) and len(outcome.boundaries) > _MAX_GROUPS:
            text = f"a result with {len(outcome.boundaries)} boundaries; at most {_MAX_GROUPS} fit a reply"
            outcome = Fault(Code.HANDLER, text)
        if isinstance(outcome, Fault):
            self.counts[outcome.code.name.lower()] += 1
            kind = Kind.FAULT
            body = _CODE.pack(outcome.code) + outcome.text.encode("utf-8", "replace")[:_MAX_TEXT_BYTES]
        else:
            kind = Kind.RESULT
            count = len(outcome.boundaries)
            body = _RESULT.pack(outcome.epoch, outcome.hit_length, outcome.max_age, count)
            body += struct.pack(f"!{count}Q", *outcome.boundaries)
        return _PREFIX.pack(_MAGIC, VERSION, kind, request_id) + _CLOCK.pack(self.clock.id, self.clock.now()) + body


def foreign_namespace(served: bytes | None, asked: bytes) -> Fault | None:
    """The fault of a lookup in another namespace than the one that is served."""
    if served is None or asked == served:
        return None
    text = f"the server serves namespace {served.hex()}, the client asks for {asked.hex()}"
    return Fault(Code.NAMESPACE, f"{text}: the model, cache layout or configuration of the two ends differs")
