"""All that the engine does with kvpool: say what its blocks are, look up and load, save in the background."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict

import anyio
import anyio.abc
import numpy as np
import numpy.typing as npt

from kvpool.hashes import BlockHashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout
from kvpool.pool import KVPool
from kvpool.spec import CacheGroup, CacheSpec, Kind

from .model import TILE, KVCache, Model

__all__ = ["Sharing"]


class Sharing:
    """Shares the blocks of one engine through one store. Made by :meth:`open`."""

    def __init__(self, pool: KVPool, tasks: anyio.abc.TaskGroup) -> None:
        self.pool = pool
        self._tasks = tasks
        self._saving = 0
        self._saved = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def open(cls, store: str, model: Model, memory: KVCache) -> AsyncIterator[Sharing]:
        """Connect block memory to a store, named by its URL. Leaving the context waits for the saves under way."""
        block_size = memory[0].shape[2]
        spec = CacheSpec(groups=(CacheGroup(Kind.FULL, block_size=block_size),), hash_block_size=block_size)
        namespace = Namespace.of(
            {  # everything that decides the bytes of a block
                "engine": "tiny_engine/1",
                "model": asdict(model.config),
                "weights": model.fingerprint(),
                "layout": ["layer", "block", "key/value", "slot", "kv_head", "head_dim"],
                "dtype": memory[0].dtype.str,
                "block_size": block_size,
                "tile": TILE,
            }
        )
        layout = BlockLayout.of_arrays(*memory)
        async with (
            KVPool.open(store, spec=spec, namespace=namespace, layouts=[layout]) as pool,
            anyio.create_task_group() as tasks,
        ):
            yield cls(pool, tasks)

    async def load(
        self, hashes: BlockHashes, num_tokens: int, table: Sequence[int], local: int
    ) -> npt.NDArray[np.intp]:
        """Load what the store has behind the ``local`` blocks that are in place. Returns the blocks proven loaded.

        Whatever goes wrong, a block that is not in the answer is simply still to be computed.
        """
        block_size = self.pool.spec.hash_block_size
        hit = await self.pool.lookup(hashes, num_tokens, local_tokens=local * block_size)
        wanted = np.arange(local, hit.length // block_size)
        if not len(wanted):
            return wanted
        part = self.pool.transfer(0, hashes, wanted, np.asarray(table)[wanted])
        [results] = await self.pool.load([part])
        return wanted[results.ok]

    def save(
        self, hashes: BlockHashes, new: npt.NDArray[np.intp], blocks: Sequence[int], *, let_go: Callable[[], None]
    ) -> None:
        """Save the sequence's blocks ``new``, held in ``blocks``, without waiting for it.

        ``let_go`` is called once, as soon as the blocks' memory will not be read any more.
        """
        part = self.pool.transfer(0, hashes, new, blocks)

        async def job() -> None:
            try:
                await self.pool.save([part], copied=let_go)
            finally:
                self._saving -= 1
                if not self._saving:
                    self._saved.set()
                    self._saved = anyio.Event()

        self._saving += 1
        self._tasks.start_soon(job)

    async def wait_saved(self) -> None:
        """Wait until no save is under way."""
        while self._saving:
            await self._saved.wait()
