"""Staging: one bounded region of host memory that transfers lease pieces of.

Bytes on their way between a store and an engine's blocks lie here: verified here before they reach an engine, and
still here when a store call outlives the request it was made for. What is leased bounds the bytes in flight.

Used from one event loop, by its tasks; nothing here is safe to call from another thread.
"""

from __future__ import annotations

import bisect
import math
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import numpy as np

from kvpool.errors import KVPoolError, LayoutError
from kvpool.memory import Buffers, Bytes2D, Region

__all__ = ["Lease", "Staging"]

#: Leases begin and end on a page: right for direct I/O and for registering memory, and no slower to copy than less.
ALIGNMENT = 4096


class Lease:
    """``nbytes`` of staging memory at ``offset`` in ``region``, until :meth:`release`. Its content is undefined."""

    def __init__(self, staging: Staging, region: Region, offset: int, nbytes: int) -> None:
        self.region = region
        self.offset = offset
        self.nbytes = nbytes
        self.detached = False
        self._staging: Staging | None = staging

    def rows(self, n: int, width: int, headroom: int = 0) -> Bytes2D:
        """A writable uint8[n, width] view, with ``headroom`` bytes before each row; contiguous without.

        Raises LayoutError if that does not fit.
        """
        stride = self._stride(n, width, headroom)
        return self.region.array[self.offset : self.offset + n * stride].reshape(n, stride)[:, headroom:]

    def buffers(self, n: int, width: int, headroom: int = 0) -> Buffers:
        """The same rows as the memory of ``n`` keys, one piece each. Raises LayoutError if they do not fit."""
        stride = self._stride(n, width, headroom)
        starts = self.offset + headroom + np.arange(n, dtype=np.int64) * stride
        return Buffers.single(self.region, starts, width, headroom=headroom)

    def detach(self) -> None:
        """Keep the memory beyond the end of ``async with staging.lease(...)``: whoever has the lease releases it."""
        self.detached = True

    def release(self) -> None:
        """Give the memory back; nothing may touch it any more. Doing so again has no effect."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging._release(self)

    def _stride(self, n: int, width: int, headroom: int) -> int:
        if self._staging is None:
            raise LayoutError("this lease of staging memory has been released; its bytes may be another transfer's")
        stride = headroom + width
        if n < 0 or width < 0 or headroom < 0 or n * stride > self.nbytes:
            raise LayoutError(f"{n} rows of {stride} bytes do not fit a lease of {self.nbytes} bytes")
        return stride


@dataclass(eq=False, slots=True)
class _Waiter:
    nbytes: int
    priority: int
    lease: Lease | None = None
    woken: anyio.Event = field(default_factory=anyio.Event)


class Staging:
    """An arena of ``nbytes`` (rounded up to whole pages), handed out first fit, lowest offset first.

    Who finds no room waits: first come first served within a priority, a lower ``priority`` number first (loads before
    saves). Nobody overtakes, so large leases are not starved by small ones; a wait ends by its deadline.
    Raises LayoutError if ``nbytes`` is not positive, MemoryError or OSError if there is no such memory.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise LayoutError(f"staging memory of {nbytes} bytes: it needs at least one")
        self.nbytes = _aligned(nbytes)
        self.peak = 0  #: most bytes that were ever leased at once
        self._used = 0
        # Private, so that a forked child cannot write into transfers of its parent.
        arena = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._region: Region | None = Region.of(arena)
        self._free = [(0, self.nbytes)]  # (offset, bytes) of each hole, by offset, no two adjacent
        self._waiters: list[_Waiter] = []  # by priority, then arrival
        self._closed = False

    @property
    def region(self) -> Region:
        """All of the arena. Raises KVPoolError when it is closed."""
        if self._region is None:
            raise _closed()
        return self._region

    @property
    def free_bytes(self) -> int:
        """Bytes not leased. A lease may still have to wait for as much in one piece."""
        return self.nbytes - self._used

    @asynccontextmanager
    async def lease(self, nbytes: int, *, priority: int = 0, deadline: float = math.inf) -> AsyncIterator[Lease]:
        """:meth:`acquire`, released at the end of the block unless it was detached."""
        lease = await self.acquire(nbytes, priority=priority, deadline=deadline)
        try:
            yield lease
        finally:
            if not lease.detached:
                lease.release()

    async def acquire(self, nbytes: int, *, priority: int = 0, deadline: float = math.inf) -> Lease:
        """A lease of ``nbytes``; the caller releases it. What is free now is given now, even past the deadline.

        Raises LayoutError at once for more than the arena has, TimeoutError at ``deadline`` (absolute on the loop's
        clock), KVPoolError when closed.
        """
        if not 0 <= nbytes <= self.nbytes:
            raise LayoutError(f"a lease of {nbytes} bytes cannot be had from staging memory of {self.nbytes} bytes")
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._region is None or self._closed:
            raise _closed()
        if not nbytes:
            return Lease(self, self._region, 0, 0)
        waiter = _Waiter(nbytes, priority)
        bisect.insort(self._waiters, waiter, key=lambda w: w.priority)
        self._grant()
        if waiter.lease is None:
            try:
                with anyio.CancelScope(deadline=deadline):
                    await waiter.woken.wait()
            except BaseException:
                if waiter.lease is not None:
                    waiter.lease.release()
                raise
            finally:
                self._forget(waiter)
        if waiter.lease is not None:
            return waiter.lease
        if self._closed:
            raise _closed()
        raise TimeoutError(f"{nbytes} bytes of staging memory did not become free in time ({self.free_bytes} are free)")

    def close(self) -> None:
        """Refuse new leases and fail those that wait. The memory goes when the last lease, and view of it, has gone."""
        self._closed = True
        for waiter in self._waiters:
            waiter.woken.set()
        self._waiters.clear()
        self._unmap()

    def _grant(self) -> None:
        """Serve waiters in order, for as long as there is room for the first."""
        while self._waiters and not self._closed:
            offset = self._take(_aligned(self._waiters[0].nbytes))
            if offset is None:
                break
            waiter = self._waiters.pop(0)
            assert self._region is not None
            waiter.lease = Lease(self, self._region, offset, waiter.nbytes)
            waiter.woken.set()

    def _forget(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._grant()  # it may have stood in the way of others

    def _take(self, size: int) -> int | None:
        for i, (offset, room) in enumerate(self._free):
            if size <= room:
                self._free[i : i + 1] = [(offset + size, room - size)] if size < room else []
                self._used += size
                self.peak = max(self.peak, self._used)
                return offset
        return None

    def _release(self, lease: Lease) -> None:
        size = _aligned(lease.nbytes)
        self._used -= size
        if size:
            start, end = lease.offset, lease.offset + size
            i = bisect.bisect(self._free, (start, 0))
            first, last = i, i
            if i < len(self._free) and self._free[i][0] == end:
                end += self._free[i][1]
                last = i + 1
            if i > 0 and sum(self._free[i - 1]) == start:
                start = self._free[i - 1][0]
                first = i - 1
            self._free[first:last] = [(start, end - start)]
        self._grant()
        self._unmap()

    def _unmap(self) -> None:
        # Only the reference: the mapping ends with the last region, array or view that needs it, never under one.
        if self._closed and not self._used:
            self._region = None


def _closed() -> KVPoolError:
    return KVPoolError("staging memory is closed")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
