"""One call on many keys: what it asks of the servers that have them, and what has become of each key."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import anyio.lowlevel
import numpy as np

from kvpool.backends._file_format import HEADER_BYTES, BadKey, Checksum, check_key, damage, header, payload_bytes
from kvpool.backends._redis_wire import Connection, Reply, ServerError, command, encoded
from kvpool.errors import StoreError, WrongLength
from kvpool.memory import Buffers
from kvpool.store import Results, Status

__all__ = ["Batch"]

_KEYS = 512  # keys in one send: about 0.5 ms of the loop's time
_VALUES = 256  # values in one send, and their bytes: twice as many are under way
_VALUE_BYTES = 2 << 20
_STATUS = {b"+OK": int(Status.OK), b"$-1": int(Status.OK), b":1": int(Status.OK), b":0": int(Status.ABSENT)}
_OTHER = 255

Window: TypeAlias = Sequence[int]


class Batch:
    """``name``: of the store, for messages. ``prefix``: of the keys' names on the server.

    ``results``: what is TIMED_OUT is not done yet. ``moved``: keys that a server of a cluster sent elsewhere, with its
    words. Keys go by their indices. Methods that wait raise ConnectionLost and leave what was not done as it is; they
    give the refusal that a server answered, if there was one that does not concern single keys.
    """

    def __init__(self, name: str, prefix: str, keys: Sequence[str]) -> None:
        self._name = name
        self._prefix = prefix
        self.keys = keys
        self.results = Results.empty(len(keys), Status.TIMED_OUT)
        self.moved: dict[int, ServerError] = {}
        self._said: set[str] = set()

    async def wanted(self) -> Window:
        """The keys to be asked for: all, but what is no key is FAILED."""
        bad = set[int]()
        for start in range(0, len(self.keys), _KEYS):
            await anyio.lowlevel.checkpoint()
            for i, key in enumerate(self.keys[start : start + _KEYS], start):
                try:
                    check_key(key)
                except BadKey as error:
                    bad.add(i)
                    self.results.set(i, Status.FAILED, error=self._error(str(error)))
        return [i for i in range(len(self.keys)) if i not in bad] if bad else range(len(self.keys))

    async def ask(self, verb: str, connection: Connection, wanted: Window) -> ServerError | None:
        """A command that answers 1 or 0 for each key: OK or ABSENT. One round trip, however many keys."""

        async def receive(window: Window) -> ServerError | None:
            return await self._settle(connection, window)

        windows = [wanted[at : at + _KEYS] for at in range(0, len(wanted), _KEYS)]
        return await self._pipeline(windows, len(windows), lambda window: self._send(verb, connection, window), receive)

    async def get(self, into: Buffers, connection: Connection, wanted: Window) -> ServerError | None:
        """Values into the caller's memory, and proven. What is damaged is removed."""
        sizes = into.nbytes.tolist()
        damaged: list[int] = []
        head = bytearray(HEADER_BYTES)

        async def receive(window: Window) -> ServerError | None:
            refused = None
            for i in window:
                pieces = into.views(i)
                reply = await connection.value(memoryview(head), pieces)
                if reply is None:
                    self.results.set(i, Status.ABSENT)
                elif isinstance(reply, ServerError) and reply.code != "WRONGTYPE":
                    refused = self._refuse(i, reply) or refused
                elif problem := _problem(self.keys[i], reply, head, pieces):
                    self.results.set(i, Status.CORRUPT, error=self._error(f"{self.keys[i][:100]}: {problem}"))
                    damaged.append(i)
                elif (stored := payload_bytes(head)) != sizes[i]:
                    self.results.set(i, Status.CORRUPT, error=WrongLength(stored, sizes[i]))
                else:
                    self.results.set(i, Status.OK, sizes[i])
            return refused

        windows = list(_windows(wanted, sizes))
        refused = await self._pipeline(windows, 2, lambda window: self._send("GET", connection, window), receive)
        if damaged:
            await connection.ask(*(command("UNLINK", self.name_of(i)) for i in damaged))
        return refused

    async def put(
        self, source: Buffers, expiry_ms: int | None, checksum: Checksum, connection: Connection, wanted: Window
    ) -> ServerError | None:
        """Values that are not there yet, out of the caller's memory."""
        sizes = source.nbytes.tolist()
        words, tail = 4, b"\r\n$2\r\nNX\r\n"
        if expiry_ms is not None:
            words, tail = 6, tail + b"$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(expiry_ms)), expiry_ms)

        async def send(window: Window) -> None:
            parts: list[bytes | memoryview] = []
            for i in window:
                name, pieces = self.name_of(i), source.views(i)
                start = (words, len(name), name, HEADER_BYTES + sizes[i])
                parts.append(
                    b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % start + header(self.keys[i], pieces, checksum)
                )
                parts += pieces
                parts.append(tail)
            await connection.send(parts, replies=len(window))

        async def receive(window: Window) -> ServerError | None:
            return await self._settle(connection, window, sizes)

        return await self._pipeline(list(_windows(wanted, sizes)), 2, send, receive)

    def fail(self, indices: Iterable[int], error: Exception) -> None:
        """These keys, as far as they are not done, cannot be done."""
        status = Status.REJECTED if isinstance(error, ServerError) and error.code == "OOM" else Status.FAILED
        for i in indices:
            if self.results.status[i] == Status.TIMED_OUT:
                said = str(error) in self._said
                self._said.add(str(error))
                self.results.set(i, status, error=None if said else self._error(str(error)))

    def name_of(self, i: int) -> bytes:
        """What a key is called on the server."""
        return encoded(self._prefix + self.keys[i])

    async def _send(self, verb: str, connection: Connection, window: Window) -> None:
        start, prefix, more, keys = f"*2\r\n${len(verb)}\r\n{verb}\r\n$", self._prefix, len(self._prefix), self.keys
        text = "".join([f"{start}{more + len(key)}\r\n{prefix}{key}\r\n" for key in [keys[i] for i in window]])
        commands = [encoded(text)]
        if not text.isascii():  # not keys, but names that others gave: then lengths are not those of the text
            commands = [command(verb, self.name_of(i)) for i in window]
        await connection.send(commands, replies=len(window))

    async def _pipeline(
        self,
        windows: Iterable[Window],
        ahead: int,
        send: Callable[[Window], Awaitable[None]],
        receive: Callable[[Window], Awaitable[ServerError | None]],
    ) -> ServerError | None:
        """Send so many windows ahead of the replies. A refusal ends it, for it would be the same for the rest."""
        left, sent = deque(windows), deque[Window]()
        refused = None
        while left or sent:
            while left and len(sent) < ahead:
                await send(left[0])
                sent.append(left.popleft())
            refused = await receive(sent.popleft()) or refused
            while refused is not None and left:
                self.fail(left.popleft(), refused)
        return refused

    async def _settle(
        self, connection: Connection, window: Window, sizes: Sequence[int] | None = None
    ) -> ServerError | None:
        """The outcome of each key by a line of the server."""
        refused = None
        while window:
            lines = await connection.lines(len(window))
            now, window = window[: len(lines)], window[len(lines) :]
            codes = bytes([_STATUS.get(line, _OTHER) for line in lines])
            if sizes is None and _OTHER not in codes:
                place = slice(now.start, now.stop) if isinstance(now, range) else now
                self.results.status[place] = np.frombuffer(codes, np.uint8)
                continue
            for i, code, line in zip(now, codes, lines, strict=True):
                if code == _OTHER:
                    refused = self._refuse(i, ServerError.of(line)) or refused
                else:
                    self.results.set(i, Status(code), sizes[i] if sizes is not None and line == b"+OK" else 0)
        return refused

    def _refuse(self, i: int, error: ServerError) -> ServerError | None:
        if error.code == "MOVED":
            self.moved[i] = error
            return None
        self.fail([i], error)
        return error if error.code != "ASK" else None  # a slot on the move: other slots may be well

    def _error(self, text: str) -> StoreError:
        return StoreError(f"{self._name}: {text}")


def _problem(key: str, reply: Reply, head: bytearray, pieces: Sequence[memoryview]) -> str:
    """What is wrong with a stored value whatever its length, in words; empty if nothing is found."""
    if not isinstance(reply, int):
        return str(reply)
    whole = reply == HEADER_BYTES + sum(map(len, pieces))
    return damage(key, head, reply, pieces if whole else None).replace("the file", "what is stored")


def _windows(wanted: Window, sizes: Sequence[int]) -> Iterator[list[int]]:
    """The keys in lists of not too many values and bytes, but of one value at least."""
    window: list[int] = []
    room = _VALUE_BYTES
    for i in wanted:
        if window and (len(window) == _VALUES or room < sizes[i]):
            yield window
            window, room = [], _VALUE_BYTES
        window.append(i)
        room -= sizes[i]
    if window:
        yield window
