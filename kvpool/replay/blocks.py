"""Block memory, and what the block of an id must hold: bytes that follow from the id alone, so every byte is verified.

Any two blocks differ in each 8-byte word, and the words of one block differ from each other: a block at the wrong
place, shifted, torn or mixed up with another is found, as is one flipped bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import numpy as np
import numpy.typing as npt

from kvpool.errors import KVPoolError
from kvpool.hashes import BlockHashes

__all__ = ["BlockIds", "BlockMemory", "Content", "Flags", "Ids", "block_hashes"]

Ids = npt.NDArray[np.int64]
BlockIds = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Bytes2D = npt.NDArray[np.uint8]

_SCHEME = "kvpool-replay"
_SLICE_BYTES = 4 << 20  # made or compared in one step


def block_hashes(ids: Ids) -> BlockHashes:
    """One 16-byte digest an id. In a trace an id stands for its whole prefix, as a chained digest does."""
    digests = np.stack([_mix(ids.astype(np.uint64)), _mix(~ids.astype(np.uint64))], axis=1)
    return BlockHashes(digests.tobytes(), 16, scheme=_SCHEME)


class Content:
    """The bytes of blocks of ``block_bytes``."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._table = _mix(np.arange(-(-block_bytes // 8), dtype=np.uint64))

    def of(self, ids: Ids) -> Bytes2D:
        """uint8[n, block_bytes]: what the block of each id holds."""
        seeds = _mix(ids.astype(np.uint64) + np.uint64(1 << 63))
        return (seeds[:, None] ^ self._table).view(np.uint8)[:, : self.block_bytes]


class BlockMemory:
    """The block memory of one engine. Raises KVPoolError if there is no such memory.

    ``array``: uint8[num_blocks, block_bytes].
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        try:
            self.array = np.zeros((num_blocks, block_bytes), np.uint8)
            self._content = Content(block_bytes)
        except (MemoryError, ValueError):  # numpy's ValueError: more than an address can name
            raise KVPoolError(
                f"no memory for the {num_blocks} blocks of {block_bytes} bytes of an engine; take smaller blocks"
            ) from None
        self._free = list(range(num_blocks - 1, -1, -1))
        self._freed = anyio.Event()

    async def take(self, n: int) -> BlockIds:
        """``n`` free blocks, as soon as there are so many. For one waiter at a time."""
        while len(self._free) < n:
            self._freed = anyio.Event()
            await self._freed.wait()
        return np.array([self._free.pop() for _ in range(n)], np.intp)

    def give_back(self, blocks: BlockIds) -> None:
        self._free.extend(blocks.tolist())
        self._freed.set()

    def fill(self, blocks: BlockIds, ids: Ids) -> None:
        """Compute: the blocks hold what those of ``ids`` must."""
        for part in self._slices(len(ids)):
            self.array[blocks[part]] = self._content.of(ids[part])

    def spoil(self, blocks: BlockIds, ids: Ids) -> None:
        """Make every byte wrong, so that one that is not loaded is found."""
        for part in self._slices(len(ids)):
            self.array[blocks[part]] = ~self._content.of(ids[part])

    def right(self, blocks: BlockIds, ids: Ids) -> Flags:
        """bool[n]: which blocks hold what they must, in every byte."""
        found = np.zeros(len(ids), np.bool_)
        for part in self._slices(len(ids)):
            found[part] = (self.array[blocks[part]] == self._content.of(ids[part])).all(axis=1)
        return found

    def _slices(self, n: int) -> Iterator[slice]:
        step = max(1, _SLICE_BYTES // self.array.shape[1])
        return (slice(i, i + step) for i in range(0, n, step))


def _mix(x: Words) -> Words:
    """Different numbers for different numbers, and alike in nothing (the finisher of splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
