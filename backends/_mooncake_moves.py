"""One batch of values to or from Mooncake: by which way, in whose memory, and how it is proven."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from kvpool.backends import _mooncake_batch as form
from kvpool.backends._file_format import HEADER_BYTES
from kvpool.backends._mooncake_batch import Layout
from kvpool.backends._mooncake_codes import Meaning, meaning_of
from kvpool.backends._mooncake_link import Client, Link
from kvpool.memory import Buffers
from kvpool.staging import Lease
from kvpool.threads import Threads

__all__ = ["BATCH_BYTES", "BATCH_PIECES", "BATCH_VALUES", "Moved", "Moves"]

#: What one native call moves, at most: far below Mooncake's limits on transfers in flight, and done long before a lease
#: ends.
BATCH_BYTES, BATCH_VALUES, BATCH_PIECES = 16 << 20, 256, 512
#: Bytes of a piece from which on it is cheaper to hand it over than to copy it, by protocol: docs/mooncake.md.
DIRECT_FROM = {"tcp": 256 << 10, "rdma": 8 << 10}
_INLINE_BYTES = 1 << 20  # copied on the loop; more is copied in a thread

_Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass
class Moved:
    """What became of a batch. ``codes``: one a key, None if it was late. Of a get, by index: ``wrong``: stored bytes,
    header included, where they are not what was expected. ``damaged``: what is wrong with a value, in words."""

    codes: list[int] | None = None
    wrong: dict[int, int] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)


class Moves:
    """Moves batches for one store. ``checksum``: xxh3_64 or none, of what is put."""

    def __init__(self, link: Link, *, protocol: str, zero_copy: bool, checksum: str) -> None:
        self._link = link
        self._direct_from = 0 if zero_copy else DIRECT_FROM[protocol]
        self._checksum = checksum
        self._copies = Threads(2)

    def direct(self, client: Client, buffers: Buffers) -> bool:
        """Whether these values are handed over in the pieces they lie in."""
        pieces = int(np.count_nonzero(buffers.sizes))
        return (
            bool(pieces)
            and int(buffers.nbytes.sum()) >= pieces * self._direct_from
            and buffers.sizes.shape[1] < BATCH_PIECES
            and all(client.covers(region) for region in buffers.regions)
        )

    async def get(self, client: Client, keys: Sequence[str], names: list[str], into: Buffers, deadline: float) -> Moved:
        """Fetch values and prove them. No key twice. Raises StoreError if Mooncake cannot be asked."""
        moved = Moved()
        if self.direct(client, into):
            lease = await self._lease(client, len(keys) * HEADER_BYTES, deadline)
            if lease is None:
                return moved
            heads = lease.rows(len(keys), HEADER_BYTES)
            pointers, sizes = _with_heads(lease, into)

            def get_direct() -> list[int]:
                codes = client.native.batch_get_into_multi_buffers(names, pointers, sizes)
                _prove(client, keys, names, codes, into.nbytes, heads, map(into.views, range(len(keys))), moved)
                return codes

            moved.codes = await self._link.ask(
                client, client.transfers, get_direct, len(keys), deadline, lease, through=True
            )
            if moved.codes is not None:
                lease.release()
            return moved

        layout = Layout(into.nbytes)
        lease = await self._lease(client, layout.nbytes, deadline)
        if lease is None:
            return moved
        memory = _memory(lease)
        pointers, sizes = layout.pieces(_address(lease))
        values = list(layout.values(memory))

        def get() -> list[int]:
            codes = client.native.batch_get_into_multi_buffers(names, pointers, sizes)
            heads, payloads = [head for head, _ in values], (_view(payload) for _, payload in values)
            _prove(client, keys, names, codes, into.nbytes, heads, payloads, moved)
            return codes

        moved.codes = await self._link.ask(client, client.transfers, get, len(keys), deadline, lease)
        if moved.codes is not None:
            try:
                good = [
                    i
                    for i, code in enumerate(moved.codes)
                    if code >= 0 and i not in moved.damaged and i not in moved.wrong
                ]
                await self._copy(into, lambda: form.copy_out(layout, memory, into, good))
            finally:
                lease.release()
        return moved

    async def put(
        self, client: Client, keys: Sequence[str], names: list[str], source: Buffers, deadline: float
    ) -> Moved:
        """Store values under names that are new. No key twice. Raises StoreError if Mooncake cannot be asked."""
        if self.direct(client, source):
            lease = await self._lease(client, len(keys) * HEADER_BYTES, deadline)
            if lease is None:
                return Moved()
            heads = lease.rows(len(keys), HEADER_BYTES)
            pointers, sizes = _with_heads(lease, source)

            def put_direct() -> list[int]:
                form.seal(keys, heads, map(source.views, range(len(keys))), self._checksum)
                return client.native.batch_put_from_multi_buffers(names, pointers, sizes, client.config)

            codes = await self._link.ask(client, client.transfers, put_direct, len(keys), deadline, lease, through=True)
        else:
            layout = Layout(source.nbytes)
            lease = await self._lease(client, layout.nbytes, deadline)
            if lease is None:
                return Moved()
            memory = _memory(lease)
            pointers, sizes = layout.pieces(_address(lease))
            try:
                await self._copy(source, lambda: form.copy_in(source, layout, memory))
            except BaseException:
                lease.release()
                raise

            def put() -> list[int]:
                values = list(layout.values(memory))
                form.seal(keys, (head for head, _ in values), (_view(payload) for _, payload in values), self._checksum)
                return client.native.batch_put_from_multi_buffers(names, pointers, sizes, client.config)

            codes = await self._link.ask(client, client.transfers, put, len(keys), deadline, lease)
        if codes is not None:
            lease.release()
        return Moved(codes)

    async def problem_of_length(self, client: Client, key: str, name: str, stored: int, deadline: float) -> str:
        """What is wrong with a stored value, whatever length its reader expected; empty if it is whole or unknown."""
        if stored < HEADER_BYTES:
            return f"only {stored} bytes are stored"
        if stored > client.arena.nbytes:
            return ""
        memory = np.empty(stored - HEADER_BYTES, np.uint8)
        moved = await self.get(client, [key], [name], Buffers.of(memory), deadline)
        return moved.damaged.get(0, "")

    @staticmethod
    async def _lease(client: Client, nbytes: int, deadline: float) -> Lease | None:
        try:
            return await client.arena.acquire(nbytes, deadline=deadline)
        except TimeoutError:
            return None

    async def _copy(self, buffers: Buffers, copy: Callable[[], None]) -> None:
        if int(buffers.nbytes.sum()) + 1024 * buffers.sizes.size <= _INLINE_BYTES:
            copy()
            await anyio.lowlevel.checkpoint_if_cancelled()
        else:
            await self._copies.run(copy)


def _prove(
    client: Client,
    keys: Sequence[str],
    names: Sequence[str],
    codes: list[int],
    nbytes: npt.NDArray[np.int64],
    heads: Iterable[_Bytes],
    payloads: Iterable[list[memoryview]],
    moved: Moved,
) -> None:
    """In the thread of the call: is what came what was stored? Else, is it the length that does not fit?"""
    sizes = nbytes.tolist()
    for i, (code, head, pieces) in enumerate(zip(codes, heads, payloads, strict=False)):
        wanted = HEADER_BYTES + sizes[i]
        if code < 0 and meaning_of(code) is not Meaning.MISFIT:
            continue
        if code < 0:
            code = client.native.get_size(names[i])
            if code < 0:
                codes[i] = code
            elif code != wanted:
                moved.wrong[i] = code
        elif code != wanted:
            moved.wrong[i] = code
        elif problem := form.problem_of(keys[i], head.tobytes(), pieces):
            moved.damaged[i] = problem


def _with_heads(lease: Lease, buffers: Buffers) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes with one more piece in front of each value."""
    first = _address(lease)
    pointers, sizes = buffers.lists
    return (
        [[first + i * HEADER_BYTES, *row] for i, row in enumerate(pointers)],
        [[HEADER_BYTES, *row] for row in sizes],
    )


def _view(payload: _Bytes) -> list[memoryview]:
    return [payload.data] if len(payload) else []


def _memory(lease: Lease) -> _Bytes:
    return lease.region.array[lease.offset : lease.offset + lease.nbytes]


def _address(lease: Lease) -> int:
    return lease.region.address + lease.offset
