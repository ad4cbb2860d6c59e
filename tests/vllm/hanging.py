"""Stores that do not open: one never, one not yet, one not on every event loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

import anyio

from kvpool.backends.memory import MemoryStore
from kvpool.errors import StoreError
from kvpool.registry import URL


class HangingStore(MemoryStore):
    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls()

    async def __aenter__(self) -> Self:
        await anyio.sleep_forever()
        return self


class OnlyAsyncio(MemoryStore):
    @classmethod
    def from_url(cls, url: URL) -> Self:
        store = cls()
        store.capabilities = replace(store.capabilities, loops=frozenset({"asyncio"}))
        return store


class LateStore(MemoryStore):
    """``LateStore?there=FILE``: opens once that file is there."""

    there: Path

    @classmethod
    def from_url(cls, url: URL) -> Self:
        store = cls()
        store.there = Path(url.params["there"])
        return store

    async def __aenter__(self) -> Self:
        if not self.there.exists():
            raise StoreError(f"{self.there} is not there")
        return await super().__aenter__()
