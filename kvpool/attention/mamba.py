"""Mamba, mode "align": the state after the last token stands for the whole prefix; one chunk is one state."""

from __future__ import annotations

import numpy as np

from kvpool.attention.types import Lengths, Mask, Reuse
from kvpool.spec import CacheGroup

__all__ = ["needed", "reachable"]


def needed(group: CacheGroup, length: Lengths) -> tuple[Lengths, Lengths]:
    """The state at exactly ``length`` tokens: the last chunk, whole or not."""
    end = -(-length // group.block_size)
    return end - 1, end


def reachable(group: CacheGroup, first: int, end: int, reuse: Reuse) -> Mask | None:
    """The states at the places where a later request may resume. No drafter reads them, so EAGLE adds none."""
    if reuse.retention is None:
        return None
    block, per_segment = group.block_size, reuse.retention // group.block_size
    if per_segment == 1:
        return None
    ids = np.arange(first, end)
    mask = (ids + 1) % per_segment == 0 if per_segment else np.zeros(len(ids), np.bool_)
    for tokens in reuse.resume_at:
        state = tokens // reuse.common_block * reuse.common_block // block - 1
        if first <= state < end:
            mask[state - first] = True
    return mask
