"""The engine: one coroutine a request, paged memory, an own prefix cache, chunked prefill, greedy decoding.

The model computes in a worker thread, one call at a time, so that the event loop stays free: while one request loads
its prefix from the store, another one computes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt

from kvpool.hashes import BlockHashes, chain_hashes

from .blocks import BlockPool, gaps
from .model import KVCache, Model

if TYPE_CHECKING:
    from .sharing import Sharing

__all__ = ["Completion", "Engine"]


@dataclass(frozen=True, eq=False, slots=True)
class Completion:
    """The answer to one prompt, and what it took.

    ``tokens``: generated. ``logits``: float32[len(tokens), vocab], what each was picked from. ``local_tokens`` of the
    prompt were in the engine's own prefix cache, ``loaded_tokens`` came from the store, ``computed_tokens`` were
    computed. ``time_to_first_token``: seconds.
    """

    tokens: list[int]
    logits: npt.NDArray[np.float32]
    local_tokens: int
    loaded_tokens: int
    computed_tokens: int
    time_to_first_token: float


class Engine:
    """Runs one model over ``num_blocks`` blocks of ``block_size`` tokens; ``chunk_tokens`` is the prefill step.

    Without ``sharing`` it only knows its own prefix cache, and with ``prefix_cache=False`` not even that.
    """

    def __init__(
        self,
        model: Model,
        memory: KVCache,
        *,
        sharing: Sharing | None = None,
        prefix_cache: bool = True,
        chunk_tokens: int = 512,
    ) -> None:
        self.model = model
        self.memory = memory
        self.sharing = sharing
        self.prefix_cache = prefix_cache
        self.chunk_tokens = chunk_tokens
        self.block_size = memory[0].shape[2]
        if chunk_tokens % self.block_size:
            raise ValueError(f"chunk_tokens={chunk_tokens} must be a multiple of the block size {self.block_size}")
        self.blocks = BlockPool(memory[0].shape[0])
        self._compute = anyio.Lock()
        self._admission = anyio.Lock()
        self._freed = anyio.Event()

    async def generate(self, prompt: Sequence[int], max_new_tokens: int = 16) -> Completion:
        """Answer ``prompt`` greedily with ``max_new_tokens`` tokens.

        Waits while other requests hold the blocks it needs. Raises MemoryError if it can never fit.
        """
        started = time.perf_counter()
        sequence, logits = list(prompt), list[npt.NDArray[np.float32]]()
        hashes = chain_hashes(sequence, self.block_size)
        async with self._table(hashes, len(prompt), max_new_tokens) as (table, local):
            ready = np.arange(len(table)) < local  # the blocks whose KV is in place
            if self.sharing:
                proven = await self.sharing.load(hashes, len(prompt), table, local)
                ready[proven] = True
            loaded = int(ready.sum()) - local
            *before, final = gaps(ready, len(prompt), self.block_size, self.chunk_tokens)
            for start, stop in before:
                await self._forward(sequence, start, stop, table)
            last = await self._forward(sequence, *final, table)
            first_token = time.perf_counter() - started
            in_prompt = len(hashes)
            self._publish(hashes, table, np.flatnonzero(~ready[:in_prompt]))
            while True:
                logits.append(last)
                sequence.append(int(last.argmax()))
                if len(logits) == max_new_tokens:
                    break
                last = await self._forward(sequence, len(sequence) - 1, len(sequence), table)
            hashes = chain_hashes(sequence[:-1], self.block_size, onto=hashes)  # the last token was never run
            self._publish(hashes, table, np.arange(in_prompt, len(hashes)))
        reused = (local * self.block_size, loaded * self.block_size)
        return Completion(sequence[len(prompt) :], np.stack(logits), *reused, len(prompt) - sum(reused), first_token)

    def reset(self, poison: float = 0.0) -> None:
        """Forget the prefix cache and overwrite all block memory. No request may be running."""
        if self.blocks.num_free != self.blocks.num_blocks:
            raise RuntimeError("blocks are still in use; let every request and save end before the reset")
        self.blocks.clear()
        for layer in self.memory:
            layer.fill(poison)

    @asynccontextmanager
    async def _table(
        self, hashes: BlockHashes, num_tokens: int, max_new_tokens: int
    ) -> AsyncIterator[tuple[list[int], int]]:
        """A block table for a whole request, and how many blocks at its front are cached content.

        All blocks are taken at once, first come first served: requests that each wait for more could wait for ever.
        """
        if not num_tokens or max_new_tokens < 1:
            raise ValueError("needs a prompt and at least one token to generate")
        total = -(-(num_tokens + max_new_tokens - 1) // self.block_size)
        if total > self.blocks.num_blocks:
            raise MemoryError(f"{total} blocks are needed, the engine has {self.blocks.num_blocks}")
        usable = (num_tokens - 1) // self.block_size if self.prefix_cache else 0  # below the last token
        async with self._admission:
            while True:
                cached = self.blocks.match(hashes[i] for i in range(usable))
                if total - len(cached) <= self.blocks.num_free:
                    break
                self._free(cached)
                await self._freed.wait()
        table = cached + self.blocks.allocate(total - len(cached))
        try:
            yield table, len(cached)
        finally:
            self._free(table)

    async def _forward(
        self, tokens: Sequence[int], start: int, stop: int, table: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        async with self._compute:
            return await anyio.to_thread.run_sync(self.model.forward, tokens, start, stop, table, self.memory)

    def _publish(self, hashes: BlockHashes, table: Sequence[int], new: npt.NDArray[np.intp]) -> None:
        """Blocks ``new`` of the sequence are complete: cache them here, and save them in the background."""
        if self.prefix_cache:
            for i in range(len(hashes)):
                self.blocks.publish(table[i], hashes[i])
        if self.sharing and len(new):
            held = [table[i] for i in new]
            self.blocks.pin(held)
            self.sharing.save(hashes, new, held, let_go=lambda: self._free(held))

    def _free(self, blocks: Sequence[int]) -> None:
        self.blocks.release(blocks)
        self._freed.set()
        self._freed = anyio.Event()
