"""How much of each running request is saved: the bookkeeping of incremental saves. Pure, no I/O.

A request's tokens fall into four kinds of ranges: saved, being saved, to be offered (computed, but neither), and not
computed yet. The *high-water mark* is the end of the saved prefix. A range that failed or was skipped goes back to "to
be offered". A request id that comes back is a new *generation*: reports of an older one are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["SaveProgress", "SaveRange"]


@dataclass(frozen=True, slots=True)
class SaveRange:
    """Tokens ``start`` to ``end`` of one request, to be saved by one rank."""

    request: str
    generation: int
    rank: int
    start: int
    end: int


@dataclass(slots=True)
class _Request:
    generation: int
    #: For each rank, disjoint ranges (start, end, saved?) in order; not saved means being saved.
    ranks: tuple[list[tuple[int, int, bool]], ...] = field(default=())


class SaveProgress:
    """Saved, pending and missing ranges of every running request, for each of ``ranks`` ranks.

    All positions are token counts; the caller aligns them to whole chunks.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._num_ranks = ranks
        self._requests: dict[str, _Request] = {}
        self._generations = 0

    def __len__(self) -> int:
        """Requests that hold state."""
        return len(self._requests)

    def begin(self, request: str, saved: int = 0) -> int:
        """A request starts or starts again; returns its new generation. Its first ``saved`` tokens need no saving.

        Raises ValueError for a negative ``saved``.
        """
        if saved < 0:
            raise ValueError(f"request {request!r} begins with {saved} saved tokens; there are at least 0")
        self._generations += 1
        start = [(0, saved, True)] if saved else []
        self._requests[request] = _Request(self._generations, tuple(list(start) for _ in range(self._num_ranks)))
        return self._generations

    def end(self, request: str) -> None:
        """The request finished, was aborted or preempted: forget it. Unknown requests are ignored."""
        self._requests.pop(request, None)

    def offer(self, request: str, end: int, rank: int = 0) -> list[SaveRange]:
        """Ranges below ``end`` that are neither saved nor being saved, oldest first; they now count as being saved.

        Raises ValueError for a rank that is not there.
        """
        if not 0 <= rank < self._num_ranks:
            raise ValueError(f"request {request!r}: rank {rank} of {self._num_ranks}")
        state = self._requests.get(request)
        if state is None:
            return []
        gaps, at = [], 0
        for start, stop, _ in [*state.ranks[rank], (end, end, True)]:
            if at < min(start, end):
                gaps.append((at, min(start, end)))
            at = max(at, stop)
        state.ranks[rank].extend((a, b, False) for a, b in gaps)
        state.ranks[rank].sort()
        return [SaveRange(request, state.generation, rank, a, b) for a, b in gaps]

    def report(self, save: SaveRange, saved: bool) -> None:
        """A range was saved; or failed or was skipped, and will be offered again. Unknown ranges are ignored."""
        state = self._requests.get(save.request)
        if state is None or state.generation != save.generation:
            return
        ranges, entry = state.ranks[save.rank], (save.start, save.end, False)
        if entry not in ranges:
            return
        ranges.remove(entry)
        if saved:
            ranges.append((save.start, save.end, True))
            ranges.sort()
            _merge(ranges)

    def mark(self, request: str, rank: int = 0) -> int:
        """The high-water mark: tokens from the first on that are saved by ``rank``; 0 for an unknown request."""
        state = self._requests.get(request)
        if state is None or not state.ranks[rank]:
            return 0
        start, end, saved = state.ranks[rank][0]
        return end if saved and start == 0 else 0

    def pin_from(self, request: str) -> int:
        """Blocks from this token on may still be read by a save or its retry, on some rank: keep them pinned."""
        return min((self.mark(request, rank) for rank in range(self._num_ranks)), default=0)


def _merge(ranges: list[tuple[int, int, bool]]) -> None:
    """Join saved neighbours, so that memory does not grow with the number of saves."""
    merged: list[tuple[int, int, bool]] = []
    for start, end, saved in ranges:
        if merged and saved and merged[-1][2] and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end, True)
        else:
            merged.append((start, end, saved))
    ranges[:] = merged
