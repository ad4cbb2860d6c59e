"""One batch of values to or from Mooncake: by which way, in whose memory, and how it is proven."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from kvpool.backends import _mooncake_batch as form
from kvpool.backends._file_format import HEADER_BYTES, Checksum
from kvpool.backends._mooncake_batch import Layout
from kvpool.backends._mooncake_codes import Meaning, meaning_of
from kvpool.backends._mooncake_link import Client, Link
from kvpool.backends._mooncake_threads import NativeThreads
from kvpool.memory import Buffers
from kvpool.staging import Lease
from kvpool.threads import Threads

__all__ = ["BATCH_BYTES", "BATCH_PIECES", "BATCH_VALUES", "Moved", "Moves"]

#: What one native call moves, at most: far below Mooncake's limits on transfers in flight, and done long before a lease
#: ends.
BATCH_BYTES, BATCH_VALUES, BATCH_PIECES = 32 << 20, 256, 512
#: Bytes of a piece from which on handing it over is cheaper than a copy, by protocol: docs/performance-stores.md.
DIRECT_FROM = {"tcp": 256 << 10, "rdma": 8 << 10}
_INLINE_BYTES = 2 << 20  # copied on the loop; more is copied in a thread

#: In place: in the caller's memory, the header in front of the payload. In pieces: the same with the header as one more
#: piece. Gathered: in memory of the store's own.
Way: TypeAlias = Literal["in place", "in pieces", "gathered"]
_Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass
class Moved:
    """What became of a batch. ``codes``: one a key, None if it was late. Of a get, by index:

    ``whole``: values that are proven. ``wrong``: how many bytes are stored, header included, where that is not what was
    expected. ``damaged``: what is wrong with a value, in words.
    """

    codes: list[int] | None = None
    wrong: dict[int, int] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)
    whole: list[int] = field(default_factory=list)


class Moves:
    """Moves batches for one store. ``checksum``: xxh3_64 or none, of what is put."""

    def __init__(self, link: Link, *, protocol: str, zero_copy: bool, checksum: Checksum) -> None:
        self._link = link
        self._direct_from = 0 if zero_copy else DIRECT_FROM[protocol]
        self._checksum: Checksum = checksum
        self._copies = Threads(2)

    def way(self, client: Client, buffers: Buffers) -> Way:
        """How these values are handed to Mooncake."""
        if not buffers.sizes.size or not all(client.covers(region) for region in buffers.regions):
            return "gathered"
        if buffers.headroom >= HEADER_BYTES and buffers.sizes.shape[1] == 1:
            return "in place"
        fit = np.count_nonzero(buffers.sizes) + len(buffers) <= BATCH_PIECES
        return "in pieces" if fit and self._large(buffers) else "gathered"

    def most_values(self, buffers: Buffers) -> int:
        """How many of these may travel together. What is gathered is one piece each, however many it was."""
        pieces = int(buffers.sizes.shape[1])
        if not self._large(buffers) or (buffers.headroom >= HEADER_BYTES and pieces == 1):
            return BATCH_VALUES
        return max(1, min(BATCH_VALUES, BATCH_PIECES // (pieces + 1)))

    def _large(self, buffers: Buffers) -> bool:
        """Whether pieces of this size are cheaper to hand over than to copy."""
        pieces = int(np.count_nonzero(buffers.sizes))
        return pieces > 0 and int(buffers.nbytes.sum()) >= pieces * self._direct_from

    async def get(self, client: Client, keys: Sequence[str], names: list[str], into: Buffers, deadline: float) -> Moved:
        """Fetch values and prove them. No key twice. Raises StoreError if Mooncake cannot be asked."""
        moved = Moved()
        memory = await self._memory(client, into, deadline)
        if memory is None:
            return moved

        def get() -> list[int]:
            codes = client.native.batch_get_into_multi_buffers(names, memory.pointers, memory.sizes)
            _prove(client, keys, names, codes, into.nbytes, memory, moved)
            return codes

        moved.codes = await self._ask(client, client.transfers, memory, get, deadline)
        if moved.codes is not None:
            try:
                if memory.layout is not None:
                    await self._copy(into, partial(form.copy_out, memory.layout, memory.array, into, moved.whole))
            finally:
                memory.release()
        return moved

    async def put(
        self, client: Client, keys: Sequence[str], names: list[str], source: Buffers, deadline: float
    ) -> Moved:
        """Store values under names that are new. No key twice. Raises StoreError if Mooncake cannot be asked."""
        memory = await self._memory(client, source, deadline)
        if memory is None:
            return Moved()
        try:
            if memory.layout is not None:
                await self._copy(source, partial(form.copy_in, source, memory.layout, memory.array))
        except BaseException:
            memory.release()
            raise

        def put() -> list[int]:
            form.seal(keys, memory.heads, memory.payloads(), self._checksum)
            return client.native.batch_put_from_multi_buffers(names, memory.pointers, memory.sizes, client.config)

        codes = await self._ask(client, client.puts, memory, put, deadline)
        if codes is not None:
            memory.release()
        return Moved(codes)

    async def _ask(
        self, client: Client, threads: NativeThreads, memory: _Memory, fn: Callable[[], list[int]], deadline: float
    ) -> list[int] | None:
        """As :meth:`Link.ask`: if codes are returned, the lease is still to be released."""
        return await self._link.ask(
            client, threads, fn, len(memory.heads), deadline, memory.lease, through=memory.layout is None
        )

    async def _memory(self, client: Client, buffers: Buffers, deadline: float) -> _Memory | None:
        """Where header and payload of each value lie on their way; None if there was no memory in time."""
        way = self.way(client, buffers)
        if way == "in place":
            return _Memory.in_place(buffers)
        layout = Layout(buffers.nbytes) if way == "gathered" else None
        nbytes = len(buffers) * HEADER_BYTES if layout is None else layout.nbytes
        try:
            lease = await client.arena.acquire(nbytes, deadline=deadline)
        except TimeoutError:
            return None
        return _Memory.in_pieces(buffers, lease) if layout is None else _Memory.gathered(layout, lease)

    async def problem_of_length(self, client: Client, key: str, name: str, stored: int, deadline: float) -> str:
        """What is wrong with a stored value, whatever length its reader expected; empty if it is whole or unknown."""
        if stored < HEADER_BYTES:
            return f"only {stored} bytes are stored"
        if stored > client.arena.nbytes:
            return ""
        memory = np.empty(stored - HEADER_BYTES, np.uint8)
        moved = await self.get(client, [key], [name], Buffers.of(memory), deadline)
        return moved.damaged.get(0, "")

    async def _copy(self, buffers: Buffers, copy: Callable[[], None]) -> None:
        if int(buffers.nbytes.sum()) + 1024 * buffers.sizes.size <= _INLINE_BYTES:
            copy()
            await anyio.lowlevel.checkpoint_if_cancelled()
        else:
            await self._copies.run(copy)


class _Memory:
    """One batch as Mooncake takes it: addresses and sizes of the pieces of each value, its header and its payload.

    ``layout``: of values that are gathered, in ``array``; else it is the caller's memory that is used.
    """

    def __init__(
        self,
        pieces: tuple[list[list[int]], list[list[int]]],
        heads: Sequence[memoryview],
        payloads: Callable[[], Iterable[list[memoryview]]],
        lease: Lease | None = None,
    ) -> None:
        self.pointers, self.sizes = pieces
        self.heads = heads
        self.payloads = payloads
        self.lease = lease
        self.layout: Layout | None = None
        self.array: _Bytes = np.empty(0, np.uint8)

    @classmethod
    def in_place(cls, buffers: Buffers) -> _Memory:
        """The header goes in front of the payload."""
        region = buffers.regions[int(buffers.region[0])]
        first, view, sizes = region.address - HEADER_BYTES, region.view, buffers.nbytes.tolist()
        starts = buffers.offsets[:, 0].tolist()
        pieces = [[first + start] for start in starts], [[HEADER_BYTES + size] for size in sizes]
        heads = [view[start - HEADER_BYTES : start] for start in starts]
        payloads = [[view[start : start + size]] for start, size in zip(starts, sizes, strict=True)]
        return cls(pieces, heads, lambda: payloads)

    @classmethod
    def in_pieces(cls, buffers: Buffers, lease: Lease) -> _Memory:
        """The header is one more piece, in the lease."""
        first, (pointers, sizes) = _address(lease), buffers.lists
        pieces = (
            [[first + i * HEADER_BYTES, *row] for i, row in enumerate(pointers)],
            [[HEADER_BYTES, *row] for row in sizes],
        )
        heads = [head.data for head in lease.rows(len(buffers), HEADER_BYTES)]
        return cls(pieces, heads, lambda: map(buffers.views, range(len(buffers))), lease)

    @classmethod
    def gathered(cls, layout: Layout, lease: Lease) -> _Memory:
        """Header and payload are one piece, in the lease."""
        array = lease.region.array[lease.offset : lease.offset + lease.nbytes]
        values = list(layout.values(array))
        payloads = [[payload.data] if len(payload) else [] for _, payload in values]
        memory = cls(layout.pieces(_address(lease)), [head.data for head, _ in values], lambda: payloads, lease)
        memory.layout, memory.array = layout, array
        return memory

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


def _prove(
    client: Client,
    keys: Sequence[str],
    names: Sequence[str],
    codes: list[int],
    nbytes: npt.NDArray[np.int64],
    memory: _Memory,
    moved: Moved,
) -> None:
    """In the thread of the call: is what came what was stored? Else, is it the length that does not fit?"""
    values = zip(codes, nbytes.tolist(), memory.heads, memory.payloads(), strict=False)
    asking = True
    for i, (code, size, head, pieces) in enumerate(values):
        wanted = HEADER_BYTES + size
        if code == wanted:
            if problem := form.problem_of(keys[i], head.tobytes(), pieces):
                moved.damaged[i] = problem
            else:
                moved.whole.append(i)
            continue
        if asking and meaning_of(code) is Meaning.MISFIT:
            code = client.native.get_size(names[i])
            asking = meaning_of(code) is not Meaning.UNREACHABLE  # else each would wait for the master's time-out
            if code < 0:
                codes[i] = code
        if code >= 0 and code != wanted:
            moved.wrong[i] = code


def _address(lease: Lease) -> int:
    return lease.region.address + lease.offset
