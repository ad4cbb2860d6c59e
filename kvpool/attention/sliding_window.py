"""Sliding window: the next token attends to the last ``window`` tokens, itself included.

A hit of L tokens needs the chunks that cover tokens L - window + 1 to L - 1. Example, block 4, window 8, L = 16::

    chunk     0        1        2        3
    token     0..3     4..7     8..11    12..15   | 16 = next token
    attended                     9 ............ 16      -> chunks 2 and 3
"""

from __future__ import annotations

import numpy as np

from kvpool.attention.types import Lengths, Mask, Reuse
from kvpool.spec import CacheGroup

__all__ = ["needed", "reachable", "tail_blocks"]


def tail_blocks(group: CacheGroup) -> int:
    """Chunks before the next token that its window reaches into.

    At least one: with a window of 1 nothing is attended to, yet a place to resume at must be known to be stored.
    """
    assert group.window is not None
    return max(1, -(-(group.window - 1) // group.block_size))


def needed(group: CacheGroup, length: Lengths) -> tuple[Lengths, Lengths]:
    """The tail: the last :func:`tail_blocks` chunks, or all if there are fewer."""
    end = length // group.block_size
    first = end - tail_blocks(group)
    return first * (first > 0), end


def reachable(group: CacheGroup, first: int, end: int, reuse: Reuse) -> Mask | None:
    """The tails below every place where a later request may resume; with EAGLE also the block above each."""
    block, peek = group.block_size, int(reuse.eagle)
    tail = tail_blocks(group) + peek
    per_segment = reuse.segment // block
    if reuse.segment and tail >= per_segment:
        return None
    mask = np.zeros(end - first, np.bool_)
    if reuse.segment:  # one segment's pattern over and over: a third of the time that a division of each id takes
        pattern = (np.arange(per_segment) + (first - peek)) % per_segment >= per_segment - tail
        mask = np.broadcast_to(pattern, (-(-len(mask) // per_segment), per_segment)).flatten()[: len(mask)]
        mask[: max(peek - first, 0)] = False
    if reuse.retention is not None:
        for tokens in reuse.resume_at:
            stop = tokens // reuse.common_block * reuse.common_block // block + peek
            mask[max(stop - tail - first, 0) : max(stop - first, 0)] = True
    return mask
