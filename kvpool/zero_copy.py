"""Transfers without a copy: the store moves bytes straight between itself and the engine's registered blocks.

What staging memory makes easy has to be waited for here. The store's call is part of the job: a load that is late or
cancelled ends, and a save lets go of its blocks, only when the store has let go of the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio
import numpy as np
import numpy.typing as npt

from kvpool.addresses import AddressRows
from kvpool.calls import Outcome, checked_results
from kvpool.deadlines import move_on_at
from kvpool.errors import KVPoolError
from kvpool.memory import BlockLayout, Buffers
from kvpool.store import Results, Status, Store, SupportsRegister

__all__ = ["ZeroCopy"]

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.intp]


class ZeroCopy:
    """Hands engine blocks to ``store``. ``at_once``: calls under way at the same time, of each kind."""

    def __init__(self, store: Store, layouts: Sequence[BlockLayout], at_once: int) -> None:
        self._store = store
        self._rows = [AddressRows(layout) for layout in layouts]
        self._loads = anyio.Semaphore(at_once)
        self._saves = anyio.Semaphore(at_once)

    @classmethod
    async def of(cls, store: Store, layouts: Sequence[BlockLayout], at_once: int) -> ZeroCopy | None:
        """None if the store does not move bytes so, or cannot with this memory; the reason is logged."""
        if not (store.capabilities.zero_copy and isinstance(store, SupportsRegister) and layouts):
            return None
        regions = {(r.address, r.nbytes): r for layout in layouts for r in layout.regions}
        try:
            await store.register(list(regions.values()))
        except KVPoolError as error:
            logger.warning("values pass through staging memory, the engine's cannot be registered: %s", error)
            return None
        return cls(store, layouts, at_once)

    async def load(self, group: int, keys: Sequence[str], block_ids: Ids, deadline: float) -> Results:
        """Fill blocks ([n] or [n, k]); a block whose key is not OK is undefined."""
        buffers = self._rows[group].buffers(block_ids)
        return await self._call(self._loads, self._store.get_into, keys, buffers, deadline, filled=True)

    async def save(self, group: int, keys: Sequence[str], block_ids: Ids, deadline: float) -> Results:
        """Store blocks ([n] or [n, k])."""
        buffers = self._rows[group].buffers(block_ids)
        return await self._call(self._saves, self._store.put, keys, buffers, deadline, filled=False)

    async def _call(
        self,
        turns: anyio.Semaphore,
        call: Callable[..., Awaitable[Results]],
        keys: Sequence[str],
        buffers: Buffers,
        deadline: float,
        *,
        filled: bool,
    ) -> Results:
        """The results of a call, awaited right here; TIMED_OUT for all if there was no turn before the deadline."""
        with move_on_at(deadline) as waiting:
            await turns.acquire()
        if waiting.cancelled_caught:
            return Results.empty(len(keys), Status.TIMED_OUT)
        outcome: Outcome[Results]
        try:
            outcome = Outcome(await call(keys, buffers, deadline=deadline))
        except Exception as error:
            outcome = Outcome(error=error)
        finally:
            turns.release()
        return checked_results(outcome, len(keys), int(buffers.nbytes[0]), filled=filled)
