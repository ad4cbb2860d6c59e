"""One connection to a Redis server: commands in a pipeline, values straight into and out of the caller's memory.

RESP2 over a plain non-blocking socket and ``anyio.wait_readable``, so one code serves asyncio and trio. A call that ends
before all its replies are read (cancelled, late, broken) leaves the connection not ``idle``; whoever holds it must then
close it, because the next reply on it would belong to another command.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeAlias

import anyio
import anyio.lowlevel
from typing_extensions import Buffer

__all__ = ["Access", "Address", "Connection", "ConnectionLost", "Reply", "ServerError", "command"]

_SLICE_BYTES = 1 << 20  # moved between two turns of the loop: about 0.2 ms
_REPLY_COST = 1 << 12  # a reply takes about as long as moving this many bytes
_PIECES = 1000  # memory pieces in one system call; Linux allows 1024
_BUFFER_BYTES = 1 << 16
_SMALL_BYTES = 1 << 14  # a value up to this size arrives in the buffer first: fewer system calls
_REPLY_BYTES = 64 << 20  # no reply but a value is ever as large


class ConnectionLost(Exception):
    """There is no connection, in words: refused, closed, silent for too long, or not a Redis server."""


class ServerError(Exception):
    """An error reply, in the server's words."""

    @property
    def code(self) -> str:
        """Its first word, such as OOM, MOVED or NOPERM."""
        return str(self).partition(" ")[0]


Reply: TypeAlias = "bytes | int | ServerError | list[Reply] | None"


class Address(NamedTuple):
    """Where a server listens: a host and a port, or the path of a unix socket and no port."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.host if self.port is None else f"{host}:{self.port}"


@dataclass(frozen=True)
class Access:
    """How to talk to a server. ``timeout``: seconds without a byte moved after which it counts as lost."""

    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    timeout: float = 5.0
    tls: ssl.SSLContext | None = None
    tls_hostname: str = ""  #: the name in the server's certificate, where it is not the host's

    def greeting(self) -> Iterator[bytes]:
        """The commands that begin a connection."""
        if self.password:
            yield command("AUTH", *filter(None, (self.username, self.password)))
        if self.db:
            yield command("SELECT", self.db)

    def redact(self, error: ServerError) -> ServerError:
        """Some servers answer an AUTH that they do not know with its arguments."""
        text = str(error)
        for secret in filter(None, (self.password, self.username)):
            text = text.replace(secret, "***")
        return ServerError(text)


def command(*words: str | int | bytes) -> bytes:
    """A command as it goes over the wire."""
    texts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in texts)


class Connection:
    """Used by one task at a time. Every method raises :class:`ConnectionLost`; none waits longer than the timeout
    without a byte moved."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock = sock
        self._timeout = timeout
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._owed = 0  # replies that are still to be read
        self._work = 0

    @classmethod
    async def open(cls, address: Address, access: Access) -> Self:
        """Connect and log in. Raises ServerError too: the server refuses."""
        sock: socket.socket | None = None
        try:
            with anyio.fail_after(access.timeout):
                sock = await _connect(address, access.timeout)
                if access.tls is not None:
                    sock = access.tls.wrap_socket(
                        sock, server_hostname=access.tls_hostname or address.host, do_handshake_on_connect=False
                    )
                connection = cls(sock, access.timeout)
                if access.tls is not None:
                    await connection._attempt(sock.do_handshake)
                greeting = list(access.greeting())
                await connection.send(greeting, replies=len(greeting))
                for _ in greeting:
                    if isinstance(reply := await connection.reply(), ServerError):
                        raise access.redact(reply)
                sock = None
                return connection
        except TimeoutError:
            raise ConnectionLost(f"no connection within {access.timeout:g} s") from None
        except OSError as error:
            raise ConnectionLost(_words(error)) from error
        finally:
            if sock is not None:
                sock.close()

    @property
    def idle(self) -> bool:
        """Nothing is on its way: the next command gets the next reply."""
        return not self._owed and self._start == self._end

    def usable(self) -> bool:
        """Whether an idle connection still stands: the server has neither closed it nor said anything unasked."""
        try:
            self._sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        self._sock.close()

    # ---- commands

    async def send(self, parts: Sequence[Buffer], *, replies: int) -> None:
        """Send the parts as they are, one after another; ``replies`` is how many answers they ask for."""
        self._owed += replies
        for pieces in _slices(parts):
            if isinstance(self._sock, ssl.SSLSocket):
                pieces = [memoryview(b"".join(pieces))]
            while pieces:
                sent = await self._attempt(lambda: self._write(pieces))  # noqa: B023
                await self._turn(sent)
                _drop(pieces, sent)

    async def reply(self) -> Reply:
        """The next reply; an error that the server answers is returned, not raised."""
        reply = await self._read()
        self._owed -= 1
        return reply

    async def value(self, head: memoryview, pieces: Sequence[memoryview]) -> int | ServerError | None:
        """The next reply, which is a value: its first bytes into ``head``, the rest into ``pieces``.

        Gives its length. If that is not the length of head and pieces together, only the head is filled, as far as it
        goes, and the rest is thrown away. None: there is no value.
        """
        kind, rest = await self._line()
        if kind != b"$":
            error = await self._read_rest(kind, rest)
            self._owed -= 1
            return error if isinstance(error, ServerError) else self._strange(kind + rest)
        length = self._int(rest)
        if length >= 0:
            expected = head.nbytes + sum(piece.nbytes for piece in pieces)
            await self._into([head, *pieces] if length == expected else [head[:length]])
            await self._skip((0 if length == expected else max(0, length - head.nbytes)) + 2)
        self._owed -= 1
        return length if length >= 0 else None

    # ---- replies

    async def _read(self) -> Reply:
        return await self._read_rest(*await self._line())

    async def _read_rest(self, kind: bytes, rest: bytes) -> Reply:
        """A reply whose first line is known."""
        await self._turn(_REPLY_COST)
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError("".join(c if c.isprintable() else "?" for c in rest[:300].decode(errors="replace")))
        number = self._int(rest) if kind in (b":", b"$", b"*") else self._strange(kind + rest)
        if kind == b":":
            return number
        if number < 0:
            return None
        if number > _REPLY_BYTES:
            self._strange(kind + rest)
        if kind == b"*":
            return [await self._read() for _ in range(number)]
        text = bytearray(number)
        if number:
            await self._into([memoryview(text)])
        await self._skip(2)
        return bytes(text)

    async def _line(self) -> tuple[bytes, bytes]:
        """The first byte of the next line, and the rest of it."""
        while (end := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start == _BUFFER_BYTES:
                self._strange(bytes(self._buffer[:80]))
            await self._fill(self._end - self._start + 1)
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        return line[:1], line[1:]

    def _int(self, text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            self._strange(text)

    def _strange(self, answer: bytes) -> NoReturn:
        raise ConnectionLost(f"not a Redis server: it answered {answer[:80]!r}")

    async def _into(self, pieces: list[memoryview]) -> None:
        """Fill the (non-empty) pieces with what comes next."""
        total = sum(piece.nbytes for piece in pieces)
        if total <= _SMALL_BYTES:
            await self._fill(total)
        at = 0
        for at, piece in enumerate(pieces):
            ready = min(piece.nbytes, self._end - self._start)
            piece[:ready] = self._view[self._start : self._start + ready]
            self._start += ready
            if ready < piece.nbytes:
                pieces[at] = piece[ready:]
                break
        else:
            return
        left = pieces[at:]
        self._start = self._end = 0
        while left:
            batch = left[:_PIECES]
            del left[:_PIECES]
            while batch:
                got = await self._receive([*batch, self._view])
                wanted = sum(map(len, batch))
                self._end = max(0, got - wanted)
                _drop(batch, min(got, wanted))
...
