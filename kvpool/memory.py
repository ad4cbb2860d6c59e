"""Memory as kvpool sees it: regions, many keys x many pieces, and where an engine's blocks live.

Everything here is addresses and sizes in numpy arrays; bytes are only touched by :meth:`BlockLayout.gather` and
:meth:`BlockLayout.scatter`, in C calls that release the GIL.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvpool.errors import LayoutError

__all__ = ["BlockLayout", "Buffers", "Region"]

#: What owns host memory and shows it; numpy's arrays do, but say so to type checkers from Python 3.12 only.
HostBuffer = Buffer | npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
Bytes2D = npt.NDArray[np.uint8]
Bytes3D = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Region:
    """One contiguous span of memory and what keeps it alive.

    ``address``: first byte. ``nbytes``: length. ``owner``: any object whose life keeps the span valid. ``device``:
    "cpu" for host memory; anything else is never shown as a memoryview, only staged or refused.
    """

    address: int
    nbytes: int
    owner: object = field(repr=False)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.nbytes < 0 or self.address < 0 or (self.nbytes and not self.address):
            raise LayoutError(f"region at {self.address:#x} with {self.nbytes} bytes is not a span of memory")

    @classmethod
    def of(cls, buffer: HostBuffer) -> Self:
        """The region of a writable, contiguous buffer (bytearray, mmap, numpy array). Raises LayoutError otherwise."""
        view = memoryview(cast(Buffer, buffer))
        if view.readonly or not view.c_contiguous:
            raise LayoutError("a region needs a writable, C-contiguous buffer")
        array = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
        return cls(int(array.ctypes.data) if view.nbytes else 0, view.nbytes, array)

    @cached_property
    def view(self) -> memoryview:
        """The bytes as a writable memoryview; host memory only."""
        if self.device != "cpu":
            raise LayoutError(f"memory on {self.device} cannot be shown as a memoryview; stage it")
        span = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        span._owner = self.owner  # type: ignore[attr-defined]  # a view outlives this region, so it keeps the owner, too
        return memoryview(span).cast("B")

    @cached_property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes as a writable uint8 array; host memory only."""
        return np.frombuffer(self.view, np.uint8)


@dataclass(frozen=True, eq=False)
class Buffers:
    """Memory of many keys, each made of the same number of pieces, in order.

    ``regions``: the spans the pieces lie in. ``region``: intp[m], region index of piece column j.
    ``offsets``: int64[n, m], byte offset of each piece in its region. ``sizes``: int64[n, m], its length in bytes.
    A value is the concatenation of its key's pieces. ``len()`` is the number of keys, n. ``headroom``: so many bytes in
    front of the first piece of each value are free for the store to use during a call.
    """

    regions: tuple[Region, ...]
    region: npt.NDArray[np.intp]
    offsets: Int64
    sizes: Int64
    headroom: int = 0

    def __post_init__(self) -> None:
        shape = self.offsets.shape
        if len(shape) != 2 or self.sizes.shape != shape or self.region.shape != shape[1:]:
            raise LayoutError(
                f"buffers: offsets {shape}, sizes {self.sizes.shape} and region {self.region.shape} do not fit together"
            )
        if not self.offsets.size:
            return
        _check_regions("buffers", self.region, self.regions)
        limits = np.array([r.nbytes for r in self.regions], np.int64)[self.region]
        # Never offset + size: a sum that overflows would look small.
        if self.headroom and not 0 <= self.headroom <= self.offsets[:, 0].min():
            raise LayoutError(f"buffers: there are no {self.headroom} bytes in front of a value in its region")
        if self.offsets.min() < 0 or self.sizes.min() < 0 or bool((self.sizes > limits - self.offsets).any()):
            raise LayoutError("buffers: a piece lies outside its region")

    @classmethod
    def single(cls, region: Region, offsets: npt.ArrayLike, sizes: npt.ArrayLike, *, headroom: int = 0) -> Self:
        """One piece a key, all in one region. ``sizes`` may be one number for all."""
        start = np.asarray(offsets, np.int64).reshape(-1, 1)
        size = np.asarray(sizes, np.int64).reshape(-1, 1)
        if len(size) not in (1, len(start)):
            raise LayoutError(f"buffers: {len(size)} sizes do not fit {len(start)} offsets")
        size = np.broadcast_to(size, start.shape)
        return cls((region,), np.zeros(1, np.intp), start, size, headroom)

    @classmethod
    def of(cls, *values: HostBuffer) -> Self:
        """One writable buffer a key (a convenience for tests and small jobs)."""
        regions = tuple(Region.of(v) for v in values)
        n = len(regions)
        if not n:
            return cls((), np.zeros(0, np.intp), np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))
        sizes = np.zeros((n, n), np.int64)
        np.fill_diagonal(sizes, [r.nbytes for r in regions])
        return cls(regions, np.arange(n, dtype=np.intp), np.zeros((n, n), np.int64), sizes)

    def __len__(self) -> int:
        return int(self.offsets.shape[0])

    @cached_property
    def nbytes(self) -> Int64:
        """int64[n]: total bytes of each key."""
        total: Int64 = self.sizes.sum(axis=1, dtype=np.int64)
        return total

    @cached_property
    def addresses(self) -> Int64:
        """int64[n, m]: absolute address of each piece."""
        base = np.array([r.address for r in self.regions], np.int64)
        return self.offsets + base[self.region] if len(self.regions) else self.offsets

    @cached_property
    def lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes as lists of plain ints, for native clients; [n][m] each. Read, do not change."""
        return self.addresses.tolist(), self.sizes.tolist()

    def views(self, i: int) -> list[memoryview]:
        """The non-empty pieces of key ``i`` in order, writable; host memory only."""
        places = zip(self._columns, self.offsets[i].tolist(), self.sizes[i].tolist(), strict=True)
        return [region[start : start + size] for region, start, size in places if size]

    @cached_property
    def _columns(self) -> list[memoryview]:
        """The region that each column of pieces lies in."""
        return [self.regions[r].view for r in self.region.tolist()]

    def select(self, index: npt.ArrayLike) -> Buffers:
        """The buffers of some keys, by index or mask, in the order given."""
        rows = np.asarray(index)
        rows = rows if rows.dtype == np.bool_ else rows.astype(np.intp)
        return Buffers(self.regions, self.region, self.offsets[rows], self.sizes[rows], self.headroom)


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Where one group's blocks live in an engine's memory.

    Block ``b`` consists of m pieces; piece j is ``sizes[j]`` bytes at ``offsets[j] + b * strides[j]`` in
    ``regions[region[j]]``. One piece a layer is typical. Blocks are opaque bytes.
    """

    regions: tuple[Region, ...]
    region: npt.NDArray[np.intp]
    offsets: Int64
    strides: Int64
    sizes: Int64
    num_blocks: int

    def __post_init__(self) -> None:
        m = len(self.region)
        if not (len(self.offsets) == len(self.strides) == len(self.sizes) == m):
            raise LayoutError("block layout: region, offsets, strides and sizes need one entry a piece")
        if self.num_blocks < 1 or not m:
            raise LayoutError(f"block layout: {self.num_blocks} blocks of {m} pieces; it needs one of each at least")
        _check_regions("block layout", self.region, self.regions)
        for j in range(m):
            last = int(self.offsets[j] + (self.num_blocks - 1) * self.strides[j] + self.sizes[j])
            if self.offsets[j] < 0 or self.sizes[j] <= 0 or (self.num_blocks > 1 and self.strides[j] < self.sizes[j]):
                raise LayoutError(f"block layout: piece {j} overlaps its neighbour block, is empty or starts below 0")
            if last > self.regions[self.region[j]].nbytes:
                raise LayoutError(f"block layout: piece {j} of block {self.num_blocks - 1} ends outside its region")

    @classmethod
    def of_arrays(cls, *layers: npt.NDArray[np.generic]) -> Self:
        """The layout of C-contiguous arrays ``[num_blocks, ...]``, one a layer."""
        if len({a.shape[:1] for a in layers}) != 1 or not all(
            a.ndim and a.size and a.flags.c_contiguous for a in layers
        ):
            raise LayoutError("block layout: needs non-empty C-contiguous arrays with one common number of blocks")
        regions = tuple(Region.of(a.reshape(-1).view(np.uint8).data) for a in layers)
        page = np.array([a.nbytes // a.shape[0] for a in layers], np.int64)
        return cls(regions, np.arange(len(layers), dtype=np.intp), np.zeros_like(page), page, page, layers[0].shape[0])

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all pieces."""
        return int(self.sizes.sum())

    @cached_property
    def _panels(self) -> tuple[tuple[Bytes3D, slice], ...]:
        """The blocks as uint8[num_blocks, k, size], for k pieces of one size that lie evenly spaced, whatever their
        regions, and their place within a gathered block. Layers of one model are one panel as a rule."""
        ends = np.cumsum(self.sizes)
        base = np.array([r.address for r in self.regions], np.int64)[self.region] + self.offsets
        panels: list[tuple[Bytes3D, slice]] = []
        first, m = 0, len(self.region)
        while first < m:
            last, step = first, None
            while (after := last + 1) < m and (self.sizes[after], self.strides[after]) == (
                self.sizes[first],
                self.strides[first],
            ):
                distance = int(base[after] - base[last])
                if step not in (None, distance):
                    break
                last, step = after, distance
            size, stride = int(self.sizes[first]), int(self.strides[first])
            blocks: Bytes3D = np.lib.stride_tricks.as_strided(
                self.regions[self.region[first]].array[self.offsets[first] :],
                (self.num_blocks, last - first + 1, size),
                (stride, step or 0, 1),
                writeable=True,
            )
            panels.append((blocks, slice(int(ends[first]) - size, int(ends[last]))))
            first = last + 1
        return tuple(panels)

    def check(self, block_ids: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """``block_ids`` as an index array. Raises LayoutError for an id that is no block of this layout."""
        given = np.asarray(block_ids)
        if given.size and given.dtype.kind not in "iu":  # a mask or rounded numbers would name other blocks
            raise LayoutError(f"block ids must be integers, not {given.dtype}")
        ids = given.astype(np.intp)
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_blocks):
            raise LayoutError(f"block id outside 0..{self.num_blocks - 1}: {ids.min()}..{ids.max()}")
        return ids

    def buffers(self, block_ids: npt.ArrayLike) -> Buffers:
        """The engine memory of chunks. ``block_ids``: [n] or [n, k] with k blocks a chunk; pieces go block by block."""
        ids = self.check(block_ids)
        if ids.ndim not in (1, 2):
            raise LayoutError(f"block ids of shape {ids.shape}: one a chunk [n], or k a chunk [n, k]")
        ids = ids if ids.ndim == 2 else ids[:, None]
        k = ids.shape[1]
        offsets = (self.offsets + ids[:, :, None] * self.strides).reshape(len(ids), k * len(self.region))
        return Buffers(
            self.regions, np.tile(self.region, k), offsets, np.broadcast_to(np.tile(self.sizes, k), offsets.shape)
        )

    def gather(self, block_ids: npt.ArrayLike, out: Bytes2D) -> None:
        """Copy blocks out of the engine: row i of ``out`` (uint8[n, block_bytes]) becomes block ``block_ids[i]``."""
        for blocks, rows in self._spans(self._checked_rows(block_ids, out), out):
            np.copyto(rows, blocks)

    def scatter(self, block_ids: npt.ArrayLike, source: Bytes2D) -> None:
        """Copy blocks into the engine: block ``block_ids[i]`` becomes row i of ``source`` (uint8[n, block_bytes])."""
        for blocks, rows in self._spans(self._checked_rows(block_ids, source), source):
            np.copyto(blocks, rows)

    def _spans(self, ids: npt.NDArray[np.intp], rows: Bytes2D) -> Iterator[tuple[Bytes3D, Bytes3D]]:
        """Views of equal shape, of the engine's memory and of ``rows``: one pair a panel and run of adjacent blocks.

        Each pair is copied by one C call, straight from place to place: 1.0 to 1.3 times a memcpy of whole rows, where
        an index array (``blocks[ids]``) takes 2 to 3 times as long, for it copies through fresh memory.
        """
        cuts = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)] if len(ids) else []
        for panel, place in self._panels:
            gathered = rows[:, place].reshape(len(ids), *panel.shape[1:])
            # Rows that lie between the pieces look to numpy as if they overlap; it would copy through fresh memory.
            width = 1 if np.may_share_memory(panel, rows) else panel.shape[1]
            for start, end in itertools.pairwise(cuts):
                block = int(ids[start])
                for j in range(0, panel.shape[1], width):
                    yield panel[block : block + end - start, j : j + width], gathered[start:end, j : j + width]

    def _checked_rows(self, block_ids: npt.ArrayLike, rows: Bytes2D) -> npt.NDArray[np.intp]:
        ids = self.check(block_ids)
        if ids.ndim != 1 or rows.shape != (len(ids), self.block_bytes) or rows.dtype != np.uint8:
            raise LayoutError(
                f"block ids of shape {ids.shape} need rows of shape [n, {self.block_bytes}] and dtype uint8,"
                f" not {rows.shape} of {rows.dtype}"
            )
        return ids


def _check_regions(what: str, region: npt.NDArray[np.intp], regions: tuple[Region, ...]) -> None:
    if region.size and (region.min() < 0 or region.max() >= len(regions)):
        raise LayoutError(f"{what}: region index {region.min()}..{region.max()} of {len(regions)} regions")
