"""Commands and replies (RESP2) on one connection, many under way at a time.

A call that ends before all its replies are read (cancelled, late, broken) leaves the connection not ``idle``: the next
reply would belong to another command, so it must be closed then and never used again.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self, TypeAlias, TypeVar

import anyio
from typing_extensions import Buffer

from kvpool.backends._redis_link import Address, ConnectionLost, Link, hint_of_tls

__all__ = ["Access", "Connection", "Reply", "ServerError", "command", "encoded"]

P = TypeVar("P")
T = TypeVar("T")

_HINT_S = 1.0  # to find out why a server hung up
_COMMAND_COST = 1 << 12  # a command or a reply takes about as long as moving so many bytes
_ANSWERS = {b"+OK", b"$-1", b":0", b":1"}
_REPLY_BYTES, _REPLY_DEPTH = 64 << 20, 8  # no reply but a value is nearly as large, and none as deep


class ServerError(Exception):
    """An error reply, in the server's words."""

    @classmethod
    def of(cls, line: bytes) -> Self:
        """From the line of the reply; what cannot be printed is left out."""
        text = line[1:500].decode(errors="replace")
        return cls("".join(c if c.isprintable() else "?" for c in text))

    @property
    def code(self) -> str:
        """Its first word, such as OOM, MOVED or NOPERM."""
        return str(self).partition(" ")[0]


Reply: TypeAlias = "bytes | int | ServerError | list[Reply] | None"


@dataclass(frozen=True)
class Access:
    """How to reach and enter a server. ``timeout``: seconds without a byte moved after which it counts as lost."""

    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    timeout: float = 5.0
    tls: ssl.SSLContext | None = None
    tls_hostname: str = ""  #: the name in the server's certificate, if it is not the host's

    def greeting(self) -> Iterator[bytes]:
        """The commands that begin a connection."""
        if self.username:
            yield command("AUTH", self.username, self.password)
        elif self.password:
            yield command("AUTH", self.password)
        if self.db:
            yield command("SELECT", self.db)


def command(*words: str | int | bytes) -> bytes:
    """A command as it goes over the wire."""
    texts = [word if isinstance(word, bytes) else encoded(str(word)) for word in words]
    return b"*%d\r\n" % len(texts) + b"".join([b"$%d\r\n%b\r\n" % (len(text), text) for text in texts])


def encoded(text: str) -> bytes:
    """Text as a server has it; bytes that are no text come back as they were."""
    return text.encode(errors="surrogateescape")


class Connection:
    """Used by one task at a time. Methods that wait raise ConnectionLost; ``send`` and ``ask`` raise ServerError if the
    server hung up and said why."""

    def __init__(self, link: Link, address: Address) -> None:
        self._link = link
        self._address = address
        self._owed = 0  # replies that are still to be read

    @classmethod
    async def open(cls, address: Address, access: Access) -> Self:
        """Connect and log in. Raises ServerError too: the server refuses."""
        try:
            with anyio.fail_after(access.timeout):
                link = await Link.open(address, access.timeout, access.tls, access.tls_hostname)
                try:
                    connection = cls(link, address)
                    for reply in await connection.ask(*access.greeting()):
                        if isinstance(reply, ServerError):
                            # What does not know AUTH may answer with the words after it.
                            text = str(reply).partition(", with args")[0]
                            raise ServerError(text.replace(access.password, "***") if access.password else text)
                        if reply != b"OK":
                            raise ConnectionLost("not a Redis server: it does not answer OK to AUTH or SELECT")
                except BaseException:
                    link.close()
                    raise
                return connection
        except TimeoutError:
            hint = "; does it speak TLS? (redis:// is without)" if access.tls is not None else ""
            raise ConnectionLost(f"no connection within {access.timeout:g} s{hint}") from None
        except OSError as error:
            raise ConnectionLost(error.strerror or str(error)) from error
        except ValueError as error:  # a name that cannot be one, by the rules of DNS
            raise ConnectionLost(str(error)) from error

    @property
    def idle(self) -> bool:
        """Nothing is on its way: the next command gets the next reply."""
        return not self._owed and self._link.empty

    def fresh(self) -> bool:
        """Whether an idle connection still stands, as far as is known here."""
        return self._link.silent()

    def blocking(self, work: Callable[[Connection, P], Coroutine[Any, Any, T]], part: P) -> T:
        """``await work(connection, part)``, which only waits for this connection, in this thread."""
        return self._link.blocking(work(self, part))

    def shutdown(self) -> None:
        """Hang up from any thread, so that who waits in :meth:`blocking` ends."""
        self._link.shutdown()

    def close(self) -> None:
        """Hang up. What the server has received whole, it still does."""
        self._link.close()

    async def send(self, parts: Sequence[Buffer], *, replies: int) -> None:
        """Send commands, in any pieces; ``replies`` is how many commands they are."""
        self._owed += replies
        try:
            await self._link.send(parts)
        except ConnectionLost:
            if words := self._link.last_words():  # why the server hung up while it was sent something
                raise ServerError.of(words) from None
            raise
        await self._link.turn(replies * _COMMAND_COST)

    async def ask(self, *commands: bytes) -> list[Reply]:
        """Send commands and read their replies; an error that the server answers is returned, not raised."""
        replies: list[Reply] = []
        try:
            await self.send(commands, replies=len(commands))
            for _ in commands:
                replies.append(await self._read(await self._link.line()))
                self._owed -= 1
        except ConnectionLost as error:
            if replies and isinstance(why := replies[-1], ServerError):
                raise why from None
            if self._link.heard or self._address.port is None:
                raise
            raise ConnectionLost(f"{error}{await hint_of_tls(self._address, _HINT_S)}") from error
        return replies

    async def lines(self, most: int) -> list[bytes]:
        """The next replies, as many as are here, at least one and at most so many; each is OK, "there is none", 0, 1 or
        an error, as it came over the wire."""
        lines = await self._link.lines(most)
        for line in lines:
            if line not in _ANSWERS and line[:1] != b"-":
                _strange(line)
        self._owed -= len(lines)
        await self._link.turn(len(lines) * _COMMAND_COST)
        return lines

    async def value(self, head: memoryview, pieces: Sequence[memoryview]) -> int | ServerError | None:
        """The next reply, to a GET: the first bytes of the value go into ``head``, the rest into ``pieces``.

        Gives its length, None if there is no value, or the error. If the length is not that of head and pieces
        together, only the head is filled, as far as it goes, and the rest is thrown away.
        """
        reply: int | ServerError | None
        line = await self._link.line()
        if line == b"$-1":
            reply = None
        elif line[:1] == b"-":
            reply = ServerError.of(line)
        else:
            reply, payload = _length(line), sum(map(len, pieces))
            if reply != len(head) + payload:
                head, pieces, payload = head[:reply], (), 0
            await self._link.receive([head, *pieces] if reply else [])
            await self._link.skip(reply - len(head) - payload + 2)
        await self._link.turn(_COMMAND_COST)
        self._owed -= 1
        return reply

    async def _read(self, line: bytes, depth: int = 0) -> Reply:
        """The reply that begins with this line."""
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return ServerError.of(line)
        if kind == b":":
            return _number(line)
        if line in (b"$-1", b"*-1"):
            return None
        if kind == b"*" and depth < _REPLY_DEPTH:
            return [await self._read(await self._link.line(), depth + 1) for _ in range(_number(line))]
        length = _length(line)
        if length > _REPLY_BYTES:
            _strange(line)
        text = bytearray(length)
        await self._link.receive([memoryview(text)] if length else [])
        await self._link.skip(2)
        return bytes(text)


def _length(line: bytes) -> int:
    length = _number(line)
    if line[:1] != b"$" or length < 0:
        _strange(line)
    return length


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        _strange(line)


def _strange(line: bytes) -> NoReturn:
    raise ConnectionLost(f"not a Redis server: it answered {line[:80]!r}")
