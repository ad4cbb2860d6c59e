"""Chunked local attention: the next token attends to those in its own span of ``chunk`` tokens.

A hit of L tokens needs what lies between the start of L's span and L. Example, block 4, span 16, L = 24: the span is
16..31, so chunks 4 and 5. At L = 32 a new span begins and nothing is needed.
"""

from __future__ import annotations

from kvpool.attention.types import Lengths, Mask, Reuse
from kvpool.spec import CacheGroup

__all__ = ["needed", "reachable"]


def needed(group: CacheGroup, length: Lengths) -> tuple[Lengths, Lengths]:
    """The chunks of the span that ``length`` lies in, below ``length``."""
    assert group.chunk is not None
    return length // group.chunk * group.chunk // group.block_size, length // group.block_size


def reachable(group: CacheGroup, first: int, end: int, reuse: Reuse) -> Mask | None:
    """All chunks; retention applies to sliding windows and Mamba states only."""
    return None
