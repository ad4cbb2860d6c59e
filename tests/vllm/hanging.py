"""A store that never opens."""

from __future__ import annotations

from typing import Self

import anyio

from kvpool.backends.memory import MemoryStore
from kvpool.registry import URL


class HangingStore(MemoryStore):
    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls()

    async def __aenter__(self) -> Self:
        await anyio.sleep_forever()
        return self
