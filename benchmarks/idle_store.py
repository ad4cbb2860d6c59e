"""A store for benchmarks that moves no bytes: a call takes as long as a device of fixed speed, and does nothing."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import ClassVar, Self

import anyio
import numpy as np

from kvpool.memory import Buffers
from kvpool.registry import URL
from kvpool.store import ABSENT, Capabilities, Presence, Results, Status, Store

__all__ = ["IdleStore"]


class IdleStore(Store):
    """Takes every value, holds none, and gives every value that is asked for: ``benchmarks.idle_store:IdleStore://``."""

    scheme: ClassVar[str] = "benchmarks.idle_store:IdleStore"
    capabilities = Capabilities(shared=True, scan=False)
    BYTES_PER_S = 150e6  #: of one call

    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        return np.full(len(keys), ABSENT, np.uint8)

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        return await self._move(into)

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        return await self._move(source)

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        return Results.empty(len(keys), Status.ABSENT)

    async def scan(self, prefix: str = "") -> AsyncIterator[str]:
        nothing: tuple[str, ...] = ()
        for key in nothing:
            yield key

    async def clear(self, prefix: str = "") -> int:
        return 0

    async def _move(self, memory: Buffers) -> Results:
        await anyio.sleep(float(memory.nbytes.sum()) / self.BYTES_PER_S)
        results = Results.empty(len(memory), Status.OK)
        results.nbytes[:] = memory.nbytes
        return results
