"""Traffic on a store while things go wrong: every value that comes back is compared, every call is noted.

A key says what its value is, so what one process puts another can check. Used by the fault tests and the soak.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import anyio
import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.errors import StoreClosed, StoreError
from kvpool.memory import Buffers
from kvpool.store import PRESENT, Status, Store

__all__ = ["ROOM", "Seen", "Traffic", "size_of", "value_of"]

Bytes = npt.NDArray[np.uint8]

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
KEYS = 6  # put in one round
OLD = 200  # keys remembered for later rounds
DEADLINE_S = 1.0  # of each call
PAUSE_S = 0.02
ROOM = 4 << 20  # bytes: all values of one call
PRESENCE = ("ABSENT", "PRESENT", "UNKNOWN")


def size_of(key: str) -> int:
    """Bytes of the value of a key, which ends in a number."""
    return SIZES[int(key[-1]) % len(SIZES)]


def value_of(key: str) -> bytearray:
    """The value of a key, the same in every process."""
    return bytearray(np.random.default_rng(xxhash.xxh3_64_intdigest(key.encode())).bytes(size_of(key)))


@dataclass
class Seen:
    """What a caller saw: keys by operation and status, the slowest call, keys whose bytes were not theirs."""

    statuses: dict[str, Counter[str]] = field(
        default_factory=lambda: {op: Counter() for op in ("put", "exists", "get")}
    )
    errors: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    rounds: int = 0
    wrong: list[str] = field(default_factory=list)


class Traffic:
    """Rounds of calls on one store. ``name`` keeps its keys apart from others'.

    ``room``: ROOM bytes that are registered with the store; values lie there, and nothing may come in between calls.
    """

    def __init__(self, store: Store, name: str = "traffic", seed: int = 0, room: Bytes | None = None) -> None:
        self.store = store
        self.seen = Seen()
        self._room = room
        self._left = (
            np.zeros(0, np.uint8) if room is None else room.copy()
        )  # what was in it when the last call had returned
        self._name = name
        self._choose = random.Random(seed)
        self._old: deque[str] = deque(maxlen=OLD)
        self._number = 0
        self._waiting: list[tuple[float, anyio.Event]] = []

    async def run(self) -> None:
        """Round after round, until it is cancelled or the store closes."""
        while True:
            begin = time.monotonic()
            try:
                good = await self.round()
            except StoreClosed:
                return
            for since, event in self._waiting if good else ():
                if begin >= since:
                    event.set()
            await anyio.sleep(PAUSE_S)

    async def recovered(self) -> float:
        """Wait, beside ``run``, for a round that begins from now on and in which all is well; how long that took."""
        begin, event = time.monotonic(), anyio.Event()
        self._waiting.append((begin, event))
        await event.wait()
        self._waiting.remove((begin, event))
        return time.monotonic() - begin

    async def round(self) -> bool:
        """Put new values, look for them and for older ones, get them all. Whether the new ones came through."""
        new = [self._new_key() for _ in range(KEYS)]
        asked = [*new, *self._choose.sample(self._old, min(KEYS, len(self._old))), f"{self._name}/never/0"]
        put, present, got = await self.put(new), await self.exists(asked), await self.get(asked)
        self._old.extend(new)
        self.seen.rounds += 1
        return all(put) and all(present[:KEYS]) and all(got[:KEYS])

    def _new_key(self) -> str:
        self._number += 1
        return f"{self._name}/{self._number}/{self._choose.randrange(len(SIZES))}"

    async def put(self, keys: Sequence[str]) -> list[bool]:
        """Which of them are stored now."""
        memory = self._memory(keys)
        for piece, key in zip(memory, keys, strict=True):
            piece[:] = value_of(key)
        with self._call() as deadline:
            results = await self.store.put(keys, Buffers.of(*memory), deadline=deadline)
        self._note("put", _names(results.status), results.errors.values())
        return list(results.ok.tolist())

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which of them are there; the last one must not be."""
        try:
            with self._call() as deadline:
                presence = await self.store.exists(keys, deadline=deadline)
        except StoreClosed:
            raise
        except StoreError as error:
            self._note("exists", ["UNKNOWN"] * len(keys), [error])
            return [False] * len(keys)
        self._note("exists", [PRESENCE[state] for state in presence.tolist()], [])
        self.seen.wrong += [keys[-1]] if presence[-1] == PRESENT else []
        return [state == PRESENT for state in presence.tolist()]

    async def get(self, keys: Sequence[str]) -> list[bool]:
        """Which of them came, and were compared."""
        memory = self._memory(keys)
        with self._call() as deadline:
            results = await self.store.get_into(keys, Buffers.of(*memory), deadline=deadline)
        self._note("get", _names(results.status), results.errors.values())
        ok: list[bool] = results.ok.tolist()
        self.seen.wrong += [
            key for key, found, good in zip(keys, memory, ok, strict=True) if good and bytes(found) != value_of(key)
        ]
        return ok

    def _memory(self, keys: Sequence[str]) -> list[memoryview]:
        """Room for the values of these keys, with zeros."""
        if self._room is None:
            return [memoryview(bytearray(size_of(key))) for key in keys]
        self.seen.wrong += [] if np.array_equal(self._room, self._left) else ["written when its call had returned"]
        self._room[:] = 0
        ends = np.cumsum([size_of(key) for key in keys]).tolist()
        return [self._room[start:end].data for start, end in pairwise([0, *ends])]

    @contextmanager
    def _call(self) -> Iterator[float]:
        begin = time.monotonic()
        try:
            yield anyio.current_time() + DEADLINE_S
        finally:
            if self._room is not None:
                self._left = self._room.copy()
        self.seen.slowest_s = max(self.seen.slowest_s, time.monotonic() - begin)

    def _note(self, op: str, statuses: Iterable[str], errors: Iterable[Exception]) -> None:
        self.seen.statuses[op].update(statuses)
        self.seen.errors.update(str(error) for error in errors)


def _names(statuses: Iterable[int]) -> list[str]:
    return [Status(status).name for status in statuses]
