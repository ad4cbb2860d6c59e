"""From a request to the jobs that move its chunks: which chunks, their hashes, the blocks that hold them. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.hashes import BlockHashes
from kvpool.keys import KeySpace, Namespace
from kvpool.progress import SaveRange
from kvpool.spec import CacheSpec
from kvpool.tokens import ChunkedTokenDatabase, Chunks
from kvpool.vllm.messages import Job, Part
from kvpool.vllm.requests import Names, RequestState

__all__ = ["Jobs"]

#: The id that stands for "no block" in a block table.
NULL_BLOCK = 0
#: For each group of a job, its chunks and one block each.
_Found: TypeAlias = Mapping[int, tuple[Chunks, npt.NDArray[np.intp]]]


class Jobs:
    """Makes jobs and numbers them. ``tables``: for each group, the request's block ids as vLLM has them."""

    def __init__(self, spec: CacheSpec, names: Names) -> None:
        self._spec = spec
        self._names = names
        # The worker makes the keys; here the database only says which chunks are wanted and which blocks hold them.
        self.database = ChunkedTokenDatabase(spec, KeySpace(Namespace.of({}), spec), null_block=NULL_BLOCK)
        self._numbers = itertools.count(1)

    def load(self, state: RequestState, start: int, end: int, tables: Sequence[list[int]]) -> Job:
        """Every block that the engine will take for computed is loaded, whether or not the hit needs it."""
        found = {}
        for g in self._spec.cached_groups:
            first = start - start % self._spec.groups[g].block_size
            wanted = self.database.chunks(end, len(state.request.block_hashes), first, group=g)
            found[g] = self.database.blocks(g, wanted, tables[g])
        return self._job(state, found)

    def save(self, state: RequestState, due: SaveRange, tables: Sequence[list[int]]) -> Job | None:
        """The chunks of a range that a later hit can use and that still have a block; None if there are none."""
        # vLLM has seen another prompt leave this one at the boundary, and keeps the place for a third.
        request = state.request
        shared = request.shared_prefix_boundary
        wanted = self.database.save_chunks(due.start, due.end, request.num_prompt_tokens, shared)
        job = self._job(state, {g: self.database.blocks(g, chunks, tables[g]) for g, chunks in wanted})
        return job if job.parts else None

    def save_states(self, state: RequestState, tokens: int, blocks: Mapping[int, int]) -> Job:
        """The Mamba states behind ``tokens`` tokens. ``blocks``: group -> the block of its state."""
        count = len(state.request.block_hashes)
        return self._job(
            state, {g: (self.database.boundary(g, tokens, count), np.array([block])) for g, block in blocks.items()}
        )

    def _job(self, state: RequestState, found: _Found) -> Job:
        hashes = state.hashes()
        parts = tuple(
            Part(
                group,
                chunks.ids,
                BlockHashes(hashes.pack(chunks.hash_ids), hashes.hash_len, scheme=self._names.scheme),
                blocks.reshape(-1),
            )
            for group, (chunks, blocks) in found.items()
            if len(chunks)
        )
        return Job(next(self._numbers), state.request.request_id, self._names.epoch, parts)
