"""What a lookup costs in things that do not depend on the clock: keys, digests, waves, tasks, bytes copied, memory."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt
import pytest

from kvpool.config import Config
from kvpool.coordinator import Coordinator
from kvpool.hashes import BlockHashes
from kvpool.keys import KeySpace, Namespace
from kvpool.memory import BlockLayout, Buffers, Region
from kvpool.pool import KVPool
from kvpool.protocols._lookup_table import RequestTable
from kvpool.protocols.binary import BinaryCodec
from kvpool.registry import URL
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import Capabilities, Presence, Results, Store
from kvpool.tokens import ChunkedTokenDatabase
from kvpool.transport import LookupRequest

LONG = 289_024
NAMESPACE = Namespace.of({})


def window(block: int, tokens: int) -> CacheGroup:
    return CacheGroup(Kind.SLIDING_WINDOW, block, window=tokens)


FULL = CacheSpec((CacheGroup(Kind.FULL, 16),), 16)
SHARDED = CacheSpec((CacheGroup(Kind.FULL, 16, shards=4),), 16)
FIVE = CacheSpec((CacheGroup(Kind.FULL, 256), window(64, 128), window(64, 512), window(4, 16), window(8, 64)), 4)


class Counted(BlockHashes):
    """Counts the digests that are read."""

    __slots__ = ("read",)
    read: int

    def gather(self, indices: npt.NDArray[np.intp], start: int = 0) -> bytes:
        self.read += len(indices)
        return super().gather(indices, start)


def counted(num_hashes: int) -> Counted:
    hashes = Counted(np.random.default_rng(1).bytes(32 * num_hashes), 32, scheme="test")
    hashes.read = 0
    return hashes


class Prefix(Store):
    """Knows the keys it was given, and counts the calls."""

    capabilities = Capabilities(shared=True)

    def __init__(self, stored: Sequence[str] = ()) -> None:
        self.stored = frozenset(stored)
        self.calls = 0
        self.keys: list[str] = []

    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        self.calls += 1
        self.keys += keys
        return np.array([key in self.stored for key in keys], np.uint8)

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        raise NotImplementedError

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        raise NotImplementedError

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        raise NotImplementedError


def stored_keys(spec: CacheSpec, hashes: BlockHashes, num_tokens: int) -> list[str]:
    wanted = Coordinator(spec).everything(num_tokens, num_tokens // spec.hash_block_size)
    return KeySpace(NAMESPACE, spec).all_shards(hashes, wanted) if wanted else []


def opened(store: Store, spec: CacheSpec) -> KVPool:
    return KVPool(store, spec=spec, namespace=NAMESPACE, config=Config.load({"lookup_timeout_ms": 30_000}))


@contextmanager
def peak(limit: Callable[[], float]) -> Iterator[None]:
    """Fails if at any time more new bytes are held than ``limit()`` says afterwards."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        used = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert used <= limit(), f"{used:,} bytes"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("spec", "stored", "local", "keys", "waves"),
    [
        (FULL, LONG, 0, 18_063, 2),
        (FULL, 0, 0, 25, 1),
        (FULL, LONG, LONG * 9 // 10, 1_806, 2),
        (FULL, LONG // 10, 0, 1_859, 3),
        (SHARDED, LONG, 0, 4 * 18_063, 2),
        (FIVE, LONG, 0, 1_150, 2),
        (FIVE, 0, 0, 40, 1),
    ],
)
async def test_keys_digests_and_waves(spec: CacheSpec, stored: int, local: int, keys: int, waves: int) -> None:
    hashes = counted(LONG // spec.hash_block_size)
    store = Prefix(stored_keys(spec, hashes, stored))
    hashes.read = 0
    async with opened(store, spec) as pool:
        hit = await pool.lookup(hashes, LONG, local_tokens=local)
        assert bool(hit.length) == bool(stored)
        assert (len(store.keys), store.calls) == (keys, waves)
        assert len(set(store.keys)) == keys, "nothing is asked twice"
        assert hashes.read == keys // spec.groups[0].shards, "a digest is read once, whatever the shards"
        assert (pool.counters.probed_keys, pool.counters.probe_waves) == (keys, waves)


@pytest.mark.anyio
@pytest.mark.parametrize("num_tokens", [1_000, 10_000, 100_000, 1_000_000])
async def test_growth_with_the_prompt(num_tokens: int) -> None:
    """What finds nothing grows with the logarithm; what is found costs its chunks, and a bounded rest."""
    chunks = num_tokens // 16
    hashes = counted(chunks)
    for stored in (0, num_tokens // 2, num_tokens):
        store = Prefix(stored_keys(FULL, hashes, stored))
        async with opened(store, FULL) as pool:
            hit = await pool.lookup(hashes, num_tokens)
        assert store.calls <= 3
        run = hit.length // 16
        assert len(store.keys) <= run + 128 + chunks // 64
        if not stored:
            assert len(store.keys) <= max(64, 2 * math.log(chunks, 1.5))


@pytest.mark.anyio
async def test_memory_of_a_lookup() -> None:
    """Beside the keys: two bytes a chunk. The hashes are not copied."""
    hashes = counted(LONG // 16)
    async with opened(Prefix(), FULL) as pool:
        await pool.lookup(hashes, LONG)
        with peak(lambda: 2 * LONG // 16 + 30_000):
            await pool.lookup(hashes, LONG)
    async with opened(Prefix(stored_keys(FULL, hashes, LONG)), FULL) as pool:
        await pool.lookup(hashes, LONG)
        with peak(lambda: 450 * LONG // 16):
            await pool.lookup(hashes, LONG)


@pytest.mark.anyio
async def test_calls_of_the_store_share_a_task() -> None:
    """A task for each call would cost a third of a lookup that finds nothing."""
    hashes = counted(1_000)
    async with opened(Prefix(), FULL) as pool:
        await pool.lookup(hashes, 16_000)
        before = len(_tasks())
        for _ in range(10):
            await pool.lookup(hashes, 16_000)
            assert len(_tasks()) == before
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(pool.lookup, hashes, 16_000)
        assert len(_tasks()) <= before + 16, "idle tasks are few, however many there were at once"


@pytest.mark.anyio
async def test_a_large_job_begins_over_many_turns_of_the_loop() -> None:
    """The first steps of all its batches in one turn would hold everything else up."""
    turn, calls = 0, Counter[int]()

    class Turns(Prefix):
        async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
            calls[turn] += 1
            return Results.empty(len(keys))

    async def count() -> None:
        nonlocal turn
        while True:
            await anyio.lowlevel.checkpoint()
            turn += 1

    layout = BlockLayout.of_arrays(np.zeros((256, 1024), np.uint8))
    config = Config.load({"batch_bytes": 8192, "staging_bytes": 1 << 20})
    hashes = BlockHashes(bytes(32 * 256), 32, scheme="test")
    async with (
        KVPool(Turns(), spec=FULL, namespace=NAMESPACE, layouts=[layout], config=config) as pool,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(count)
        await pool.load([pool.transfer(0, hashes, range(256), range(256))])
        tasks.cancel_scope.cancel()
    assert sum(calls.values()) == 32
    assert max(calls.values()) <= 4


def _tasks() -> list[anyio.TaskInfo]:
    return anyio.get_running_tasks()


def test_a_frame_is_read_without_a_copy() -> None:
    hashes = counted(LONG // 16)
    codec = BinaryCodec()
    with peak(lambda: 5_000):
        pieces = codec.encode(hashes)
    frame = b"".join(bytes(piece) for piece in pieces)
    with peak(lambda: 5_000):
        assert len(codec.decode(frame, scheme="test")) == len(hashes)


def test_memory_of_lookups_in_flight_grows_with_their_number_alone() -> None:
    """1 to 512 requests of 289,024 tokens: no copy of their hashes, and nothing left when they have ended."""
    hashes = counted(LONG // 16)
    table = RequestTable(BinaryCodec(), peer="test", max_frame_bytes=1 << 30)
    request = LookupRequest(bytes(16), bytes(16), LONG, 0, hashes)
    table.cancel(table.submit(request, 10))
    for count in (1, 8, 64, 512):
        with peak(lambda count=count: 3_000 + 1_500 * count):  # type: ignore[misc]
            tickets = [table.submit(request, 10) for _ in range(count)]
        for ticket in tickets:
            table.cancel(ticket)
        assert not table.outstanding


def test_hashes_that_grow_are_not_copied_each_time() -> None:
    """A million digests, one at a time: the memory doubles now and then, so all copies together are linear."""
    hashes = BlockHashes(hash_len=32, scheme="test")
    moves, last = 0, 0
    for i in range(20_000):
        hashes.extend([i.to_bytes(32, "big")])
        at = np.frombuffer(hashes.view, np.uint8).ctypes.data
        moves, last = moves + (at != last), at
    assert moves <= 2 + math.log2(20_000)


def test_address_rows_are_made_once_and_bounded() -> None:
    regions, blocks, page = 100, 2_258, 4096
    places = tuple(Region((j + 1) << 32, blocks * page, None) for j in range(regions))
    pages = np.full(regions, page)
    layout = BlockLayout(places, np.arange(regions), np.zeros(regions, np.int64), pages, pages, blocks)
    spec = CacheSpec((CacheGroup(Kind.FULL, 128),), 128)
    database = ChunkedTokenDatabase(spec, KeySpace(NAMESPACE, spec), [layout])
    first, sizes = database.addresses(0, np.arange(blocks)[:, None])
    assert len({id(row) for row in sizes}) == 1, "one row of sizes serves all chunks"
    with peak(lambda: 40 * blocks + 100_000):  # the outer lists, the ids, and no address
        again, _ = database.addresses(0, np.arange(blocks)[:, None])
    assert all(a is b for a, b in zip(first, again, strict=True))
