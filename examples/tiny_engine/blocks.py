"""The engine's block pool: a free list, reference counts and the engine's own prefix cache; what is left to compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

__all__ = ["BlockPool", "gaps"]


class BlockPool:
    """Hands out block ids ``0..num_blocks - 1``.

    A block whose content is named by a digest stays findable after its last user has gone, until the block is needed
    for something else: the one that was free for longest goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = dict.fromkeys(range(num_blocks))  # an ordered set, longest free first
        self._users = [0] * num_blocks
        self._digest: dict[int, bytes] = {}
        self._cached: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, cached ones included."""
        return len(self._free)

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix of ``digests``. The caller becomes a user of each."""
        found: list[int] = []
        for digest in digests:
            if (block := self._cached.get(digest)) is None:
                break
            found.append(block)
        self.pin(found)
        return found

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks; what they cached is forgotten. Raises MemoryError if there are not as many."""
        if count > len(self._free):
            raise MemoryError(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        taken = list(islice(self._free, count))
        for block in taken:
            self._forget(block)
        self.pin(taken)
        return taken

    def pin(self, blocks: Sequence[int]) -> None:
        """Become a user of blocks: they keep their content until :meth:`release`."""
        for block in blocks:
            self._free.pop(block, None)
            self._users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Stop using blocks. Later blocks of a prompt are reused first: a prefix is worth more than its end."""
        for block in reversed(blocks):
            if not self._users[block]:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Make a complete block findable. If another block holds the same content already, that one stays."""
        if block not in self._digest and digest not in self._cached:
            self._digest[block] = digest
            self._cached[digest] = block

    def clear(self) -> None:
        """Forget all cached content. Blocks in use stay with their users."""
        self._digest.clear()
        self._cached.clear()

    def _forget(self, block: int) -> None:
        if (digest := self._digest.pop(block, None)) is not None:
            del self._cached[digest]


def gaps(
    ready: npt.NDArray[np.bool_], num_tokens: int, block_size: int, chunk_tokens: int
) -> Iterator[tuple[int, int]]:
    """The token ranges (start, stop) of a prompt that must be computed, in order, each within one prefill chunk.

    ``ready``: which blocks are in place. The last token's block never is, so there is always something to compute.
    """
    start = 0
    while start < num_tokens:
        block = start // block_size
        if ready[block]:
            start += block_size
            continue
        covered = np.flatnonzero(ready[block:])
        end = (block + int(covered[0])) * block_size if len(covered) else num_tokens
        stop = min(end, num_tokens, (start // chunk_tokens + 1) * chunk_tokens)
        yield start, stop
        start = stop
