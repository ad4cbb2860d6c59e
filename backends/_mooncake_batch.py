"""Values as Mooncake is handed them: which travel together, by which way, and how each is proven.

A value is stored as a header of 40 bytes (that of a stored file) and the payload. Where both fit into one piece of
registered memory, that is handed over as it is. Else the header is one more piece, or all is gathered in memory of the
store's own: a piece costs Mooncake about 60 us over TCP whatever its size, so small ones are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvpool.backends import _file_format as form
from kvpool.errors import StoreError
from kvpool.memory import Buffers
from kvpool.store import Results, Status

__all__ = ["Layout", "batches", "copy_in", "copy_out", "good_keys", "problem_of", "rounds", "seal"]

HEADER = form.HEADER_BYTES
_ALIGNMENT = 64

Bytes1D = npt.NDArray[np.uint8]


class Layout:
    """Where gathered values lie in one lease of memory: header and payload of each in one piece, aligned.

    ``starts``: int64[n + 1], bytes from the beginning of the lease. ``nbytes``: of all.
    """

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        rooms = -(-(sizes + HEADER) // _ALIGNMENT) * _ALIGNMENT
        self.starts: list[int] = [0, *np.cumsum(rooms).tolist()]
        self.sizes: list[int] = sizes.tolist()
        self.nbytes = self.starts[-1]

    def pieces(self, address: int) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes as Mooncake takes them."""
        return [[address + start] for start in self.starts[:-1]], [[HEADER + size] for size in self.sizes]

    def values(self, memory: Bytes1D) -> Iterator[tuple[Bytes1D, Bytes1D]]:
        """Header and payload of each."""
        for start, size in zip(self.starts, self.sizes, strict=False):
            end = start + HEADER
            yield memory[start:end], memory[end : end + size]


def good_keys(keys: Sequence[str], results: Results | None = None, store: str = "") -> list[int]:
    """The indices of what is a key by the contract. What is none is FAILED in ``results``, with the store's name."""
    if form.are_keys(keys):
        return list(range(len(keys)))
    good = []
    for i, key in enumerate(keys):
        try:
            form.check_key(key)
        except form.BadKey as error:
            if results is not None:
                results.set(i, Status.FAILED, error=StoreError(f"{store}: {error}"))
        else:
            good.append(i)
    return good


def batches(sizes: npt.NDArray[np.int64], max_bytes: int, max_values: int) -> Iterator[slice]:
    """Values that travel together: at most so many, and so many bytes, but at least one."""
    n = len(sizes)
    if 0 < n <= max_values and int(sizes.sum()) + n * (HEADER + _ALIGNMENT) <= max_bytes:
        yield slice(0, n)
        return
    ends = np.cumsum(sizes + HEADER + _ALIGNMENT)
    cuts = [0]
    while cuts[-1] < len(sizes):
        first = cuts[-1]
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + max_bytes, side="right"))
        cuts.append(min(max(last, first + 1), first + max_values))
    for first, last in pairwise(cuts):
        yield slice(first, last)


def rounds(keys: Sequence[str], rows: Iterable[int]) -> list[list[int]]:
    """The rows so that no key comes twice in a round: of equal keys in a batch Mooncake fills only one."""
    rows = list(rows)
    if len({keys[row] for row in rows}) == len(rows):
        return [rows] if rows else []
    found: list[list[int]] = []
    seen: dict[str, int] = {}
    for row in rows:
        turn = seen.get(keys[row], 0)
        seen[keys[row]] = turn + 1
        if turn == len(found):
            found.append([])
        found[turn].append(row)
    return found


def copy_in(source: Buffers, layout: Layout, memory: Bytes1D) -> None:
    """Gather the payloads."""
    values = _Pieces(source)
    for i, (_, payload) in enumerate(layout.values(memory)):
        pieces = values.of(i)
        if len(pieces) == 1:
            np.copyto(payload, pieces[0])
        elif pieces:
            np.concatenate(pieces, out=payload)


def copy_out(layout: Layout, memory: Bytes1D, target: Buffers, rows: Iterable[int]) -> None:
    """Scatter the payloads of some."""
    payloads = [payload for _, payload in layout.values(memory)]
    values = _Pieces(target)
    for i in rows:
        start = 0
        for piece in values.of(i):
            np.copyto(piece, payloads[i][start : start + len(piece)])
            start += len(piece)


def seal(
    keys: Sequence[str], heads: Iterable[memoryview], payloads: Iterable[list[memoryview]], checksum: form.Checksum
) -> None:
    """Write the headers."""
    for key, head, pieces in zip(keys, heads, payloads, strict=False):
        head[:] = form.header(key, pieces, checksum)


def problem_of(key: str, head: bytes, pieces: Sequence[memoryview]) -> str:
    """What is wrong with a value, in words; empty if it is whole. Its writer decided whether it has a checksum."""
    nbytes = sum(p.nbytes for p in pieces)
    return form.damage(key, head, HEADER + nbytes, pieces).replace("the file", "what is stored")


class _Pieces:
    """The non-empty pieces of values, as arrays."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._regions = [region.array for region in buffers.regions]
        self._columns = buffers.region.tolist()

    def of(self, i: int) -> list[Bytes1D]:
        offsets, sizes = self._buffers.offsets[i].tolist(), self._buffers.sizes[i].tolist()
        return [self._regions[r][o : o + s] for r, o, s in zip(self._columns, offsets, sizes, strict=True) if s]
