"""MemoryStore: values in this process's memory, bounded, least recently used first out.

``memory://`` is private to one store; all ``memory://name`` of one process share one pool, which lives as long as any
of them is open. ``capacity`` bounds the sum of value sizes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, Self, TypeAlias

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ByteSize, Field

from kvpool.backends._lifecycle import Lifecycle
from kvpool.errors import ConfigError, StoreError, WrongLength
from kvpool.memory import Buffers
from kvpool.registry import URL
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Capabilities, Presence, Results, Status, Store, check_batch

__all__ = ["MemoryStore"]

#: A stored value. Never written to again once it is in a pool, so it may be read without a lock.
Value = npt.NDArray[np.uint8]

#: What :meth:`Results.set` takes for one key.
_Outcome: TypeAlias = tuple[Status, int] | tuple[Status, int, Exception]

_TURN_BYTES = 2 << 20  # copied between two checkpoints, and one piece more: 0.1 to 0.2 ms of the loop's time
_PIECE_BYTES = 1 << 18  # copied at once
_FRESH_COST = 3  # memory that is written to for the first time takes so many times as long
_KEY_COST = 1 << 14  # a key takes about as long as copying this many bytes
_WINDOW = 1024  # keys probed under one hold of the lock


class _Options(BaseModel):
    capacity: ByteSize | None = Field(
        default=None, gt=0, description="a size above 0, such as 2GiB; unlimited without it"
    )


class _Pool:
    """The values of one name. Stores of several event loops may share it: every step holds the lock, and is short."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._nbytes = 0
        self._values: OrderedDict[str, Value] = OrderedDict()
        self._lock = threading.Lock()
        self._pins: dict[str, list[float]] = {}
        self.users = 0

    def touch(self, keys: Iterable[str]) -> list[bool]:
        """Which keys are there; those that are become the most recently used, for a load will follow."""
        with self._lock:
            return [self._touch(key) is not None for key in keys]

    def get(self, key: str) -> Value | None:
        with self._lock:
            return self._touch(key)

    def add(self, key: str, value: Value) -> bool | None:
        """Store a value that is no larger than the capacity; the oldest make room.

        True: stored. False: the key is there already. None: no room, as what is there is pinned.
        """
        with self._lock:
            if self._touch(key) is not None:
                return False
            if not self._make_room(value.nbytes):
                return None
            self._values[key] = value
            self._nbytes += value.nbytes
        return True

    def pin(self, keys: Iterable[str], until: float) -> list[bool]:
        """Like :meth:`touch`; what is there is not evicted before ``until`` on the monotonic clock."""
        with self._lock:
            found = []
            for key in keys:
                there = self._touch(key) is not None
                if there:
                    self._pins.setdefault(key, []).append(until)
                found.append(there)
            return found

    def unpin(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                if pins := self._pins.get(key):
                    pins.pop()
                    if not pins:
                        del self._pins[key]

    def _make_room(self, nbytes: int) -> bool:
        """Evict the oldest values that nobody has pinned; False, and nothing evicted, if that is not enough."""
        if self.capacity is None or self._nbytes + nbytes <= self.capacity:
            return True
        now, missing, victims = time.monotonic(), self._nbytes + nbytes - self.capacity, []
        self._pins = {key: live for key, pins in self._pins.items() if (live := [t for t in pins if t > now])}
        for key, value in self._values.items():
            if missing <= 0:
                break
            if key not in self._pins:
                victims.append(key)
                missing -= value.nbytes
        if missing > 0:
            return False
        for key in victims:
            self._nbytes -= self._values.pop(key).nbytes
        return True

    def remove(self, key: str) -> int | None:
        """The bytes that were under the key; None if it was not there."""
        with self._lock:
            self._pins.pop(key, None)
            value = self._values.pop(key, None)
            if value is None:
                return None
            self._nbytes -= value.nbytes
            return value.nbytes

    def keys(self, prefix: str) -> list[str]:
        with self._lock:
            return [key for key in self._values if key.startswith(prefix)]

    def _touch(self, key: str) -> Value | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value


_shared: dict[str, _Pool] = {}
_shared_lock = threading.Lock()


class MemoryStore(Store):
    """Keeps copies of values in this process. ``capacity``: bytes of values at most, None for no limit."""

    scheme: ClassVar[str] = "memory"
    capabilities = Capabilities(shared=False, scan=True)

    def __init__(self, *, name: str = "", capacity: int | None = None) -> None:
        self._name = name
        self._capacity = capacity
        self.capabilities = replace(self.capabilities, unlimited=capacity is None)
        self._life = Lifecycle(f"memory store {name!r}" if name else "memory store")
        self._pool = _Pool(capacity)
        self._copying = anyio.Lock(fast_acquire=True)

    @classmethod
    def from_url(cls, url: URL) -> Self:
        """``memory://[name][?capacity=2GiB]``."""
        if url.port is not None or url.username or url.path not in ("", "/"):
            raise ConfigError(f"{url}: a memory store is memory:// or memory://name, with capacity as its one option")
        return cls(name=url.host, capacity=url.options(_Options).capacity)

    async def __aenter__(self) -> Self:
        self._life.open()
        if self._name:
            with _shared_lock:
                pool = _shared.setdefault(self._name, self._pool)
                if pool.capacity != self._capacity:
                    self._life.closed = True
                    raise ConfigError(
                        f"memory store {self._name!r} is open with capacity={pool.capacity}, "
                        f"so it cannot be opened with capacity={self._capacity}"
                    )
                pool.users += 1
                self._pool = pool
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._life.closed:
            return
        await self._life.close()
        with _shared_lock:
            self._pool.users -= 1
            if self._name and not self._pool.users:
                del _shared[self._name]
        self._pool = _Pool(self._capacity)

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        found = np.full(len(keys), UNKNOWN, np.uint8)
        with self._life.call():
            turns = _Turns(self._life, deadline)
            for start in range(0, len(keys), _WINDOW):
                if not (turns.spend(_WINDOW * _KEY_COST) or await turns.next(_WINDOW * _KEY_COST)):
                    break
                there = self._pool.touch(keys[start : start + _WINDOW])
                found[start : start + len(there)] = np.where(there, PRESENT, ABSENT)
        return found

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, into)
        sizes = into.nbytes.tolist()

        async def get(i: int, turns: _Turns) -> _Outcome:
            value = self._pool.get(keys[i])
            if value is None:
                return Status.ABSENT, 0
            if value.nbytes != sizes[i]:
                return Status.CORRUPT, 0, WrongLength(value.nbytes, sizes[i])
            start = 0
            for piece in _slices(into.views(i)):
                if not (turns.spend(piece.nbytes) or await turns.next(piece.nbytes)):
                    return Status.TIMED_OUT, 0
                np.copyto(piece, value[start : start + piece.nbytes])
                start += piece.nbytes
            return Status.OK, start

        return await self._each(keys, get, deadline, self._copying)

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, source)
        sizes = source.nbytes.tolist()

        async def put(i: int, turns: _Turns) -> _Outcome:
            if self._pool.get(keys[i]) is not None:
                return Status.OK, 0
            if self._capacity is not None and sizes[i] > self._capacity:
                return Status.REJECTED, 0, self._refused(sizes[i])
            value = np.empty(sizes[i], np.uint8)
            start = 0
            for piece in _slices(source.views(i)):
                if not (turns.spend(piece.nbytes * _FRESH_COST) or await turns.next(piece.nbytes * _FRESH_COST)):
                    return Status.TIMED_OUT, 0
                np.copyto(value[start : start + piece.nbytes], piece)
                start += piece.nbytes
            stored = self._pool.add(keys[i], value)
            if stored is None:
                return Status.REJECTED, 0, self._refused(sizes[i])
            return Status.OK, start if stored else 0

        return await self._each(keys, put, deadline, self._copying)

    def _refused(self, nbytes: int) -> StoreError:
        name = f" {self._name!r}" if self._name else ""
        return StoreError(f"memory store{name}: no room for {nbytes} bytes in capacity={self._capacity}")

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        async def delete(i: int, turns: _Turns) -> _Outcome:
            nbytes = self._pool.remove(keys[i])
            turns.used(nbytes or 0)  # the kernel takes as long to take a page back as a copy of it takes
            return (Status.ABSENT if nbytes is None else Status.OK), 0

        return await self._each(keys, delete, deadline)

    async def pin(self, keys: Sequence[str], *, seconds: float, deadline: float = math.inf) -> Presence:
        """What is there stays for ``seconds``; puts that find no other room are REJECTED meanwhile."""
        with self._life.call():
            await anyio.lowlevel.checkpoint()
            return np.where(self._pool.pin(keys, time.monotonic() + seconds), PRESENT, ABSENT).astype(np.uint8)

    async def unpin(self, keys: Sequence[str]) -> None:
        """Take back one pin of each key."""
        self._life.check()
        self._pool.unpin(keys)

    async def scan(self, prefix: str = "") -> AsyncIterator[str]:
        """The keys that begin with ``prefix``, as they are when the first is asked for."""
        self._life.check()
        for key in self._pool.keys(prefix):
            yield key

    async def clear(self, prefix: str = "") -> int:
        """Remove the keys that begin with ``prefix``; the number removed."""
        removed = await self.delete(self._pool.keys(prefix))
        return int(removed.ok.sum())

    async def _each(
        self,
        keys: Sequence[str],
        step: Callable[[int, _Turns], Awaitable[_Outcome]],
        deadline: float,
        queue: anyio.Lock | None = None,
    ) -> Results:
        results = Results.empty(len(keys), Status.TIMED_OUT)
        with self._life.call():
            turns = _Turns(self._life, deadline, queue)
            for i in range(len(keys)):
                if not (turns.spend(_KEY_COST) or await turns.next(_KEY_COST)):
                    break
                results.set(i, *await step(i, turns))
        return results


class _Turns:
    """Gives the loop a turn for each slice of work; notices there that the deadline has passed or the store closed.

    ``queue``: who has the same one works in another turn: 32 calls at once hold the loop up for no longer than one.
    """

    def __init__(self, life: Lifecycle, deadline: float, queue: anyio.Lock | None = None) -> None:
        self._queue = queue or anyio.Lock(fast_acquire=True)
        self._life = life
        self._deadline = deadline
        self._left = 0

    def spend(self, nbytes: int) -> bool:
        """Before so much work: whether this turn has room for it; otherwise :meth:`next` comes first."""
        if self._left <= 0:
            return False
        self._left -= nbytes
        return True

    def used(self, nbytes: int) -> None:
        """So much work was done, whether there was room for it or not."""
        self._left -= nbytes

    async def next(self, nbytes: int) -> bool:
        """Wait for another turn, for so much work. False: the deadline has passed."""
        self._left = _TURN_BYTES - nbytes
        async with self._queue:
            await anyio.lowlevel.checkpoint()
        self._life.check()
        return anyio.current_time() < self._deadline


def _slices(pieces: Iterable[memoryview]) -> Iterator[Value]:
    """The pieces as arrays of at most ``_PIECE_BYTES``."""
    for piece in pieces:
        array = np.frombuffer(piece, np.uint8)
        if array.nbytes <= _PIECE_BYTES:
            yield array
        else:
            yield from (array[at : at + _PIECE_BYTES] for at in range(0, array.nbytes, _PIECE_BYTES))
