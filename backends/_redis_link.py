"""A byte stream to one server: a plain non-blocking socket and ``anyio.wait_readable``, the same on asyncio and trio.

Bytes go straight between the socket and the caller's memory, many pieces in one system call. No wait is longer than the
timeout without a byte moved, and the loop gets a turn for each 256 KiB. What moves many bytes runs in a thread instead,
where the same code waits in its system calls (:meth:`Link.blocking`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import anyio
import anyio.lowlevel
from typing_extensions import Buffer

__all__ = ["Address", "ConnectionLost", "Link", "hint_of_tls"]

T = TypeVar("T")

_SLICE_BYTES = 1 << 18  # moved between two turns of the loop: about 0.1 ms
_BLOCKING_BYTES = 1 << 22  # sent in one system call that may wait
_PIECES = 1000  # memory pieces in one system call; Linux allows 1024
_BUFFER_BYTES = 1 << 16
_CLOSED = "the server closed the connection"
_TLS = "the server seems to speak TLS: the URL must begin with rediss instead of redis"
_NO_TLS = "the server does not speak TLS: the URL must begin with redis instead of rediss"
_ALERT = b"\x15\x03"  # how a TLS server that refuses begins, and no reply of Redis
_NO_RECORD = "WRONG_VERSION_NUMBER"  # what OpenSSL says of an answer that is not TLS
_SMALL_BYTES = 1 << 14  # so few bytes pass through the buffer: one system call for many values. A TLS record, too


class ConnectionLost(Exception):
    """There is no connection, in words: refused, closed, silent for too long, or not a Redis server."""


class Address(NamedTuple):
    """Where a server listens: a host and a port, or the path of a unix socket and no port."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.host if self.port is None else f"{host}:{self.port}"


class Link:
    """Used by one task at a time. Every method that waits raises :class:`ConnectionLost`."""

    def __init__(self, sock: socket.socket, silence: float) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._silence = silence
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # what has arrived and was not asked for yet
        self._worked = 0
        self._blocks = False
        self.heard = self._tls  #: something has arrived
        # What blocks has the kernel's own time limits: with Python's it would poll before each call.
        limit = struct.pack("ll", *divmod(max(1, int(silence * 1e6)), 1_000_000))
        for option in () if self._tls else (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, limit)

    @classmethod
    async def open(cls, address: Address, silence: float, tls: ssl.SSLContext | None, tls_hostname: str) -> Self:
        """Connect. ``silence``: seconds without a byte moved that are borne. ``tls_hostname``: the name in the server's
        certificate, if it is not the host's. Raises OSError and ValueError, too; has no time limit of its own."""
        sock = await _connect(address, silence)
        try:
            if tls is None:
                return cls(sock, silence)
            name = tls_hostname or address.host
            sock = tls.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            link = cls(sock, silence)
            try:
                await link._attempt(sock.do_handshake, anyio.wait_readable)
            except ConnectionLost as error:
                if _is_plain(error):
                    raise ConnectionLost(_NO_TLS) from error.__cause__
                raise
            return link
        except BaseException:
            sock.close()
            raise

    @property
    def empty(self) -> bool:
        """Nothing has arrived that was not asked for yet."""
        return self._start == self._end

    def silent(self) -> bool:
        """The peer has neither closed the link nor said anything since the last look, as far as is known here."""
        try:
            self._sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return self.empty
        except OSError:
            pass
        return False

    def last_words(self) -> bytes:
        """The last error line, or alert of TLS, that arrived before the link broke, if there was one."""
        self._sock.setblocking(False)
        try:
            self._end += self._sock.recv_into(self._view[self._end :])
        except (ssl.SSLWantReadError, ssl.SSLEOFError):
            pass
        except ssl.SSLError as error:
            return f"-{error}".encode()
        except OSError:
            pass
        if self._buffer.startswith(_ALERT, self._start, self._end):
            return f"-{_TLS}".encode()
        lines = bytes(self._view[self._start : self._end]).split(b"\r\n")
        return next((line for line in reversed(lines) if line.startswith(b"-")), b"")

    def close(self) -> None:
        """Let go of the socket; no task may be waiting for it."""
        self._sock.close()

    def shutdown(self) -> None:
        """End both directions, from any thread: who waits in :meth:`blocking` finds the link closed."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not SSLSocket's, which forgets its session

    def blocking(self, work: Coroutine[Any, Any, T]) -> T:
        """Run what only waits for this link to its end, in this thread: system calls wait, and nothing is awaited.

        A thread that waits in the kernel receives a value in one call; a loop is told of each part that arrives. 16
        values of 1 MiB through a unix socket take 0.5 to 0.6 times as long, and the loop is free meanwhile.
        """
        self._set_blocking(True)
        try:
            work.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            work.close()
            self._set_blocking(False)
        raise AssertionError("something was awaited that is not this link")

    def _set_blocking(self, blocks: bool) -> None:
        self._blocks = blocks
        if self._tls:
            self._sock.settimeout(self._silence if blocks else 0.0)
            return
        self._sock.setblocking(blocks)

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send the parts as they are, one after the other."""
        for pieces in _slices(parts, _BLOCKING_BYTES if self._blocks else _SLICE_BYTES):
            if self._tls:  # it copies anyway, and knows no sendmsg
                pieces = [memoryview(b"".join(pieces))]
            while pieces:
                sent = await self._attempt(lambda: self._write(pieces), anyio.wait_writable)  # noqa: B023
                _drop(pieces, sent)
                await self.turn(sent)

    async def line(self) -> bytes:
        """Up to the next line end, which is left out. Lines of more than 64 KiB are no lines."""
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._buffer.startswith(_ALERT, self._start, self._end):
                raise ConnectionLost(_TLS)
            if self._end - self._start == _BUFFER_BYTES:
                raise ConnectionLost(f"a line without an end: {bytes(self._view[:80])!r}...")
            await self._fill(self._end - self._start + 1)
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line

    async def lines(self, most: int) -> list[bytes]:
        """The next lines, as many as are here, at least one and at most so many."""
        end = self._buffer.rfind(b"\r\n", self._start, self._end)
        if end < 0:
            return [await self.line()]
        lines = bytes(self._view[self._start : end]).split(b"\r\n", most)[:most]
        self._start += sum(map(len, lines)) + 2 * len(lines)
        return lines

    async def receive(self, pieces: Sequence[memoryview]) -> None:
        """Fill the pieces, none of them empty, with what comes next."""
        left = list(pieces)
        total = sum(map(len, left))
        if total <= _SMALL_BYTES:
            await self._fill(total)
        while left:
            if ready := min(len(left[0]), self._end - self._start):
                left[0][:ready] = self._view[self._start : self._start + ready]
                self._start += ready
                _drop(left, ready)
                continue
            batch = left[:_PIECES]
            if self._tls:  # it fills one piece at a time, and a record is worth more than a small piece
                batch = batch[:1] if len(left[0]) >= _SMALL_BYTES else []
            wanted = sum(map(len, batch))
            if self._blocks and wanted >= _SMALL_BYTES and not self._tls:
                got = await self._attempt(lambda: self._read(batch, socket.MSG_WAITALL), anyio.wait_readable)  # noqa: B023
                _drop(left, got)
                continue
            got = await self._attempt(lambda: self._read([*batch, self._view]), anyio.wait_readable)  # noqa: B023
            self._start, self._end = 0, max(0, got - wanted)  # the buffer was empty: it takes what is too much
            _drop(left, min(got, wanted))
            await self.turn(got)

    async def skip(self, nbytes: int) -> None:
        """Throw away what comes next."""
        while nbytes:
            if self.empty:
                await self._fill(1)
            thrown = min(nbytes, self._end - self._start)
            self._start += thrown
            nbytes -= thrown

    async def turn(self, nbytes: int) -> None:
        """After so much work: let others have the loop now and then."""
        self._worked += nbytes
        if self._worked >= _SLICE_BYTES and not self._blocks:
            self._worked = 0
            await anyio.lowlevel.checkpoint()

    async def _fill(self, nbytes: int) -> None:
        """Have at least so many bytes in the buffer."""
        if self._start + nbytes > _BUFFER_BYTES or self.empty:
            self._view[: self._end - self._start] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, self._end - self._start
        while self._end - self._start < nbytes:
            got = await self._attempt(lambda: self._read([self._view[self._end :]]), anyio.wait_readable)
            self._end += got
            await self.turn(got)

    def _read(self, pieces: list[memoryview], flags: int = 0) -> int:
        got = self._sock.recv_into(pieces[0]) if self._tls else self._sock.recvmsg_into(pieces, 0, flags)[0]
        if not got:
            raise ConnectionLost(_CLOSED)
        self.heard = True
        return got

    def _write(self, pieces: list[memoryview]) -> int:
        return self._sock.send(pieces[0]) if self._tls else self._sock.sendmsg(pieces)

    async def _attempt(self, call: Callable[[], T], wait: Callable[[socket.socket], Awaitable[None]]) -> T:
        """The result of a call on the socket, as soon as there is one. ``wait``: for what a plain socket waits."""
        while True:
            try:
                return call()
            except BlockingIOError:
                if self._blocks:
                    raise self._silent() from None
            except ssl.SSLWantReadError:
                wait = anyio.wait_readable
            except ssl.SSLWantWriteError:
                wait = anyio.wait_writable
            except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
                raise ConnectionLost(_CLOSED) from None
            except OSError as error:
                raise ConnectionLost(error.strerror or str(error)) from error
            with anyio.move_on_after(self._silence) as scope:
                await wait(self._sock)
            if scope.cancelled_caught:
                raise self._silent()

    def _silent(self) -> ConnectionLost:
        return ConnectionLost(f"the server was silent for {self._silence:g} s")


async def hint_of_tls(address: Address, patience: float) -> str:
    """What to tell of a server that has not said a word; it is asked whether it speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is said to it
    with anyio.move_on_after(patience), contextlib.suppress(OSError, ValueError):
        try:
            (await Link.open(address, patience, context, "")).close()
            return f"; {_TLS}"
        except ConnectionLost as error:
            return f"; {_TLS}" if isinstance(error.__cause__, ssl.SSLError) and not _is_plain(error) else ""
    return ""


def _is_plain(error: ConnectionLost) -> bool:
    return isinstance(error.__cause__, ssl.SSLError) and error.__cause__.reason == _NO_RECORD


async def _connect(address: Address, patience: float) -> socket.socket:
    """A connected non-blocking socket, to the first of the host's addresses that answers. Raises OSError."""
    host, port, stream = address.host, address.port, socket.SOCK_STREAM
    places: Sequence[tuple[int, int, int, str, Any]]
    if port is None:
        places = [(socket.AF_UNIX, stream, 0, "", host)]
    else:
        try:  # a look-up costs a thread, even that of a number
            places = socket.getaddrinfo(host, port, type=stream, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            places = await anyio.getaddrinfo(host, port, type=stream)
    failed = OSError(errno.EADDRNOTAVAIL, "no address")
    for family, kind, protocol, _, place in places:
        sock = socket.socket(family, kind, protocol)
        code = errno.ETIMEDOUT
        try:
            sock.setblocking(False)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with anyio.move_on_after(patience / len(places)):  # one that never answers leaves time for the others
                while (code := sock.connect_ex(place)) == errno.EAGAIN:  # noqa: ASYNC110  a full queue of a unix socket
                    await anyio.sleep(0.001)
                if code == errno.EINPROGRESS:
                    code = errno.ETIMEDOUT
                    await anyio.wait_writable(sock)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not code:
                return sock
            failed = OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise failed


def _slices(parts: Sequence[Buffer], most: int) -> Iterator[list[memoryview]]:
    """The parts in lists of up to ``most`` bytes and a system call's number of pieces."""
    pieces: list[memoryview] = []
    room = most
    for part in parts:
        view = memoryview(part)
        while len(view):
            pieces.append(view[:room])
            view = view[room:]
            room -= len(pieces[-1])
            if not room or len(pieces) == _PIECES:
                yield pieces
                pieces, room = [], most
    if pieces:
        yield pieces


def _drop(pieces: list[memoryview], nbytes: int) -> None:
    """Take so many bytes away from the front."""
    gone = 0
    for piece in pieces:
        if len(piece) > nbytes:
            break
        nbytes -= len(piece)
        gone += 1
    del pieces[:gone]
    if nbytes:
        pieces[0] = pieces[0][nbytes:]
