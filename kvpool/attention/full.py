"""Full attention and MLA: the next token attends to every earlier one, so a hit needs every chunk."""

from __future__ import annotations

from kvpool.attention.types import Lengths, Mask, Reuse
from kvpool.spec import CacheGroup

__all__ = ["needed", "reachable"]


def needed(group: CacheGroup, length: Lengths) -> tuple[Lengths, Lengths]:
    """All chunks up to the one that holds the last of ``length`` tokens."""
    return length * 0, -(-length // group.block_size)


def reachable(group: CacheGroup, first: int, end: int, reuse: Reuse) -> Mask | None:
    """All chunks."""
    return None
