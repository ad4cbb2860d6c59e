"""Values that a store keeps for a moment, so that what a lookup found is still there when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from kvpool.calls import StoreCalls, checked_presence
from kvpool.store import PRESENT, Presence, Store, SupportsPin

__all__ = ["Pins"]

RELEASE_TIMEOUT_S = 1.0


class Pins:
    """Pinned values of one store. Released once, by :meth:`release` or at the end of ``async with``, else by time."""

    def __init__(self, store: Store, calls: StoreCalls, keys: Sequence[str]) -> None:
        self._store = store
        self._calls = calls
        self._keys: Sequence[str] = keys
        self.held = 0  #: how many values are pinned

    async def take(self, seconds: float, deadline: float) -> None:
        """Pin what is there, for ``seconds`` at most."""
        store, keys = self._store, self._keys
        if not keys or not isinstance(store, SupportsPin):
            return

        async def pin() -> Presence:
            return await store.pin(keys, seconds=seconds, deadline=deadline)

        asked = await self._calls.run(pin, deadline)
        found = checked_presence(asked, len(keys)).result
        if found is not None:
            self._keys = [key for key, there in zip(keys, found.tolist(), strict=True) if there == PRESENT]
            self.held = len(self._keys)

    async def release(self) -> None:
        """Let the store evict them again. Doing so twice, or after they ran out, has no effect."""
        store = self._store
        keys: Sequence[str] = self._keys if self.held else ()
        self._keys, self.held = (), 0
        if keys and isinstance(store, SupportsPin):
            # Not waited for longer than this, and if it fails or the caller is cancelled, they run out by themselves.
            await self._calls.run(lambda: store.unpin(keys), anyio.current_time() + RELEASE_TIMEOUT_S)

    async def __aenter__(self) -> Pins:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.release()
