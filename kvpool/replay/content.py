"""What the block of an id must hold: bytes that follow from the id alone, so that every byte can be verified.

Any two blocks differ in each 8-byte word, and the words of one block differ from each other: a block at the wrong
place, shifted, torn or mixed up with another is found, as is one flipped bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool.hashes import BlockHashes

__all__ = ["Content", "block_hashes"]

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bytes2D = npt.NDArray[np.uint8]

_SCHEME = "kvpool-replay"


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


def _mix(x: Words) -> Words:
    """Different numbers for different numbers, and alike in nothing (the finisher of splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
