"""From tokens to chunks to hashes, keys and memory: the chunked token database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.errors import LayoutError
from kvpool.hashes import BlockHashes
from kvpool.keys import KeySpace
from kvpool.memory import BlockLayout, Buffers
from kvpool.spec import CacheSpec

__all__ = ["ChunkedTokenDatabase", "Chunks"]

Ids = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Some chunks of one group, as columns.

    ``ids``: chunk numbers. ``ends``: tokens up to the end of each. ``hash_ids``: index of the hash that keys each.
    """

    ids: Ids
    ends: Ids
    hash_ids: Ids

    def __len__(self) -> int:
        return len(self.ids)


class ChunkedTokenDatabase:
    """Cuts a request into chunks and says what each is called and where it lies.

    ``layouts``: one for each group, where the engine's blocks live (omit on a side that moves no bytes).
    ``null_block``: the block id that stands for "no block" in a block table, if the engine has one.
    """

    def __init__(
        self,
        spec: CacheSpec,
        keyspace: KeySpace,
        layouts: Sequence[BlockLayout] = (),
        *,
        null_block: int | None = None,
    ) -> None:
        if layouts and len(layouts) != len(spec.groups):
            raise LayoutError(f"{len(layouts)} layouts for {len(spec.groups)} groups")
        self.spec = spec
        self.keyspace = keyspace
        self.layouts = tuple(layouts)
        self.null_block = null_block

    def chunks(
        self,
        token_len: int,
        num_hashes: int,
        mask_num: int = 0,
        chunk_mask: npt.ArrayLike | None = None,
        put_step: int = 1,
        put_step_rank: int = 0,
        *,
        group: int = 0,
    ) -> Chunks:
        """The chunks of the first ``token_len`` tokens that are wanted; hashes are counted, not read.

        Starts at chunk ceil(``mask_num`` / block size); ``chunk_mask[0]`` belongs to that chunk, and its length is a
        limit. A last chunk that is not whole ends at the last hash block. Striping, for puts: only chunks with
        ``id % put_step == (put_step_rank + group) % put_step``.
        """
        block, hash_block = self.spec.groups[group].block_size, self.spec.hash_block_size
        tokens = min(token_len // hash_block, num_hashes) * hash_block
        start, end = -(-max(mask_num, 0) // block), -(-tokens // block)
        if chunk_mask is None:
            ids = np.arange(start, end, dtype=np.intp)
        else:
            mask = np.asarray(chunk_mask, np.bool_)[: max(end - start, 0)]
            ids = np.flatnonzero(mask) + start
        if put_step > 1:
            ids = ids[ids % put_step == (put_step_rank + group) % put_step]
        ends = np.minimum((ids + 1) * block, tokens)
        return Chunks(ids, ends, ends // hash_block - 1)

    def process_tokens(
        self,
        token_len: int,
        hashes: Sequence[bytes],
        mask_num: int = 0,
        chunk_mask: npt.ArrayLike | None = None,
        put_step: int = 1,
        put_step_rank: int = 0,
        *,
        group: int = 0,
    ) -> Iterator[tuple[int, int, bytes]]:
        """(start, end, hash) of each wanted chunk, see :meth:`chunks`; a hash is read when its chunk is reached."""
        found = self.chunks(token_len, len(hashes), mask_num, chunk_mask, put_step, put_step_rank, group=group)
        block = self.spec.groups[group].block_size
        for chunk, end, i in zip(found.ids.tolist(), found.ends.tolist(), found.hash_ids.tolist(), strict=True):
            yield chunk * block, end, hashes[i]

    def keys(self, group: int, shard: int, hashes: BlockHashes, chunks: Chunks) -> list[str]:
        """The key of each chunk."""
        return self.keyspace.keys(group, shard, hashes, chunks.hash_ids)

    def buffers(self, group: int, block_ids: npt.ArrayLike) -> Buffers:
        """Engine memory of chunks made of blocks ``block_ids`` ([n], or [n, k] with k blocks a chunk)."""
        return self._layout(group).buffers(block_ids)

    def _layout(self, group: int) -> BlockLayout:
        if not self.layouts:
            raise LayoutError("this token database was made without layouts: it has no memory to address")
        return self.layouts[group]
