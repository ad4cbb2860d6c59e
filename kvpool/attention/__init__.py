"""What each kind of attention needs and keeps: one small module of pure functions a kind.

Two questions decide everything:

- :func:`needed`: which chunks must be there to continue after a prefix of a given length?
- :func:`reachable`: which chunks can a later hit need, so which are worth storing and asking for?
"""

from __future__ import annotations

from typing import Final, Protocol

from kvpool.attention import chunked_local, full, mamba, sliding_window
from kvpool.attention.types import Lengths, Mask, Reuse
from kvpool.spec import CacheGroup, Kind

__all__ = ["Lengths", "Mask", "Reuse", "needed", "reachable"]


class _Rules(Protocol):
    def needed(self, group: CacheGroup, length: Lengths) -> tuple[Lengths, Lengths]: ...

    def reachable(self, group: CacheGroup, first: int, end: int, reuse: Reuse) -> Mask | None: ...


_RULES: Final[dict[Kind, _Rules]] = {
    Kind.FULL: full,
    Kind.MLA: full,
    Kind.SLIDING_WINDOW: sliding_window,
    Kind.CHUNKED_LOCAL: chunked_local,
    Kind.MAMBA: mamba,
}


def needed(group: CacheGroup, length: Lengths) -> tuple[Lengths, Lengths]:
    """The chunks (first, one past the last) that serve a hit of ``length`` tokens: an int, or an array of them."""
    return _RULES[group.kind].needed(group, length)


def reachable(group: CacheGroup, first: int, end: int, reuse: Reuse) -> Mask | None:
    """bool[end - first]: which of the chunks ``first`` to ``end`` a later hit can need; None means all of them.

    Depends on each chunk alone: the mask of a suffix is the tail of the whole mask, and grows without changing.
    """
    return _RULES[group.kind].reachable(group, first, end, reuse)
