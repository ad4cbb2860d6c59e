"""CheckedStore: proves every value that comes out of a store which has no checks of its own.

In front of each value lies a header with format, length, checksum (xxh3_64) and a digest of the key, the same as in a
stored file. A value that is not what its header says, or is another key's, is CORRUPT, and is removed so that a good
one can be stored. The header travels as one more piece of memory: the payload is not copied.

``checksum="none"`` spares the time for reading every byte, and finds wrong lengths and foreign values only. The header
says so, and every reader takes both kinds.

A checksum finds damage, not forgery: who may write to the store can make any value look right.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from kvpool.backends import _file_format as form
from kvpool.backends._file_format import Checksum
from kvpool.backends._wrapping import Turns, check_place, pass_on_powers
from kvpool.errors import StoreError, WrongLength
from kvpool.memory import Buffers, Region
from kvpool.registry import URL, create_store
from kvpool.store import Presence, Results, Status, Store, check_batch
from kvpool.threads import Threads

__all__ = ["CheckedStore"]

logger = logging.getLogger(__name__)

_TURN_BYTES = 4 << 20  # proven between two checkpoints; a checksum is several times faster than a copy
_KEY_COST = 1 << 15  # a key takes about as long as a checksum over this many bytes
_LARGE = 8 << 20  # values from here on are proven in a thread


class _Options(BaseModel):
    store: str = Field(description="the URL of the store to check")
    checksum: Checksum = Field(default="xxh3_64", description="xxh3_64 or none")


class CheckedStore(Store):
    """Checks ``inner``, which it opens and closes. Values are stored with a header, so whoever reads them must check.

    A wrong length is only found to be damage, and removed, if the inner store reports it as
    :class:`~kvpool.errors.WrongLength`; else it may as well be a question of the reader's, and the value stays.
    """

    scheme: ClassVar[str] = "checked"

    def __init__(self, inner: Store, *, checksum: Checksum = "xxh3_64") -> None:
        self.inner = inner
        self._name = f"checked {type(inner).__name__}"
        self._checksum: Checksum = checksum
        self._threads = Threads(2)
        self._describe()

    @classmethod
    def from_url(cls, url: URL) -> Self:
        """``checked://?store=URL[&checksum=xxh3_64|none]``."""
        check_place(url)
        options = url.options(_Options)
        return cls(create_store(options.store), checksum=options.checksum)

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        self._describe()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.inner.__aexit__(exc_type, exc, tb)

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        return await self.inner.exists(keys, deadline=deadline)

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, into)
        heads = np.empty((len(keys), form.HEADER_BYTES), np.uint8)
        results = await self.inner.get_into(keys, _with_heads(heads, into), deadline=deadline)
        damaged: list[int] = []
        turns = Turns(deadline, _TURN_BYTES)
        rows: list[int] = np.flatnonzero(results.ok).tolist()
        for i in rows:
            size = int(into.nbytes[i])
            if not await turns.take(_KEY_COST + size):
                results.set(i, Status.TIMED_OUT)
                continue
            results.nbytes[i] = size
            if problem := await self._problem(keys[i], heads[i].tobytes(), into.views(i)):
                results.set(i, Status.CORRUPT, error=self._error(keys[i], problem))
                damaged.append(i)
        for i, error in list(results.errors.items()):
            if isinstance(error, WrongLength):
                results.errors[i] = WrongLength(error.stored - form.HEADER_BYTES, error.wanted - form.HEADER_BYTES)
                if problem := await self._problem_of_length(keys[i], error.stored, deadline):
                    results.errors[i] = self._error(keys[i], problem)
                    damaged.append(i)
        if damaged:
            await self._remove({keys[i] for i in damaged}, deadline)
        return results

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, source)
        heads = np.empty((len(keys), form.HEADER_BYTES), np.uint8)
        turns = Turns(deadline, _TURN_BYTES)
        for i, size in enumerate(source.nbytes.tolist()):
            if not await turns.take(_KEY_COST + size):
                break  # the inner store finds, too, that it is too late
            heads[i] = np.frombuffer(await self._header(keys[i], source.views(i)), np.uint8)
        results = await self.inner.put(keys, _with_heads(heads, source), deadline=deadline)
        results.nbytes[results.nbytes > 0] -= form.HEADER_BYTES
        return results

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        return await self.inner.delete(keys, deadline=deadline)

    def _describe(self) -> None:
        """What the inner store can do is known for sure once it is open."""
        theirs = self.inner.capabilities
        largest = theirs.max_value_bytes
        self.capabilities = replace(
            theirs,
            zero_copy=False,  # the header lies in memory that is registered nowhere
            headroom=0,
            max_value_bytes=None if largest is None else max(0, largest - form.HEADER_BYTES),
        )
        pass_on_powers(self, self.inner)

    async def _header(self, key: str, pieces: Sequence[memoryview]) -> bytes:
        if self._checksum == "none" or sum(p.nbytes for p in pieces) < _LARGE:
            return form.header(key, pieces, self._checksum)
        return await self._threads.run(form.header, key, pieces)

    async def _problem(self, key: str, head: bytes, pieces: Sequence[memoryview]) -> str:
        """What is wrong with a value, in words; empty if it is whole."""
        size = sum(p.nbytes for p in pieces)
        length = form.HEADER_BYTES + size
        if size < _LARGE:
            return form.damage(key, head, length, pieces)
        return await self._threads.run(form.damage, key, head, length, pieces)

    async def _problem_of_length(self, key: str, stored: int, deadline: float) -> str:
        """Whether what is stored in another length than expected is at least whole: then the reader was wrong."""
        if stored < form.HEADER_BYTES:
            return f"only {stored} bytes are stored"
        memory = np.empty(stored, np.uint8)
        if not (await self.inner.get_into([key], Buffers.of(memory), deadline=deadline)).ok[0]:
            return ""
        payload = memory[form.HEADER_BYTES :]
        return await self._problem(key, memory[: form.HEADER_BYTES].tobytes(), [payload.data] if len(payload) else [])

    async def _remove(self, keys: Iterable[str], deadline: float) -> None:
        """Make room for good values. Best effort: the next reader tries again."""
        try:
            await self.inner.delete(sorted(keys), deadline=deadline)
        except Exception as error:
            logger.debug("%s: damaged values could not be removed: %s", self._name, error)

    def _error(self, key: str, problem: str) -> StoreError:
        return StoreError(f"{self._name}: {key[:100]}: {problem}")


def _with_heads(heads: npt.NDArray[np.uint8], buffers: Buffers) -> Buffers:
    """The same memory with one more piece in front of each value. ``heads``: uint8[n, HEADER_BYTES]."""
    n, width = heads.shape
    return Buffers(
        (Region.of(heads), *buffers.regions),
        np.concatenate((np.zeros(1, np.intp), buffers.region + 1)),
        np.hstack((np.arange(n, dtype=np.int64)[:, None] * width, buffers.offsets)),
        np.hstack((np.full((n, 1), width, np.int64), buffers.sizes)),
    )
