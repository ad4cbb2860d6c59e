"""Zero copy: the pool hands engine blocks to a store that can take them, and waits for it to let go of them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest

from kvpool.backends.guarded import GuardedStore
from kvpool.backends.memory import MemoryStore
from kvpool.config import Config
from kvpool.errors import KVPoolError, LayoutError, StoreError
from kvpool.hashes import BlockHashes, chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout, Buffers, Region
from kvpool.pool import KVPool, Transfer
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import Capabilities, Results, Status, Store

pytestmark = pytest.mark.anyio

BLOCK = 4
SPEC = CacheSpec((CacheGroup(Kind.FULL, BLOCK),), BLOCK)
NAMESPACE = Namespace.of({"test": "zero copy"})


class RegisteringStore(MemoryStore):
    """Moves bytes only between registered memory and itself. Like a native client it cannot be interrupted: a get or
    put lasts until it is ``let_go``, and works on the memory at its very end."""

    capabilities = Capabilities(shared=False, zero_copy=True)

    def __init__(self, refusal: KVPoolError | None = None) -> None:
        super().__init__()
        self.registered: list[Region] = []
        self.refusal = refusal
        self.holding = anyio.Event()
        self.let_go = anyio.Event()
        self.let_go.set()
        self.lost = False
        self.lists: list[tuple[list[list[int]], list[list[int]]]] = []

    async def register(self, regions: Sequence[Region]) -> None:
        if self.refusal is not None and any(r.nbytes < 1 << 20 for r in regions):  # the engine's, not staging memory
            raise self.refusal
        self.registered += regions

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        await self._hold(into)
        results = Results.empty(len(keys))
        with anyio.CancelScope(shield=True):
            results = await super().get_into(keys, into)
        if self.lost:
            results.status[:] = Status.CORRUPT
            results.nbytes[:] = 0
        await anyio.lowlevel.checkpoint_if_cancelled()
        return results

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        if len(source.regions) > 1 or any(r in self.registered for r in source.regions):
            await self._hold(source)
        return await super().put(keys, source)

    async def _hold(self, buffers: Buffers) -> None:
        assert all(region in self.registered for region in buffers.regions), "memory that was never registered"
        assert buffers.lists == (buffers.addresses.tolist(), buffers.sizes.tolist())
        self.holding.set()
        with anyio.CancelScope(shield=True):
            await self.let_go.wait()

    def hold(self) -> None:
        self.holding, self.let_go = anyio.Event(), anyio.Event()


@asynccontextmanager
async def engine(
    store: Store, **settings: object
) -> AsyncIterator[tuple[KVPool, list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]]:
    """A pool on ``store`` and the two layers of its engine, 16 blocks each."""
    rng = np.random.default_rng(1)
    layers = [rng.integers(0, 256, (16, 96), np.uint8) for _ in range(2)]
    config = Config.load({"staging_bytes": 1 << 20, "batch_bytes": 768, **settings}, environ={})
    layout = BlockLayout.of_arrays(*layers)
    async with KVPool(store, spec=SPEC, namespace=NAMESPACE, layouts=[layout], config=config) as pool:
        yield pool, layers


def hashes_of(seed: int) -> BlockHashes:
    return chain_hashes(list(range(seed, seed + 8 * BLOCK)), BLOCK)


def transfer(pool: KVPool, seed: int, blocks: Sequence[int]) -> Transfer:
    return pool.transfer(0, hashes_of(seed), range(len(blocks)), blocks)


async def test_blocks_go_straight_to_the_store_and_back() -> None:
    store = RegisteringStore()
    async with engine(store) as (pool, layers):
        staging, *engines = store.registered
        assert staging.nbytes == 1 << 20
        assert [r.nbytes for r in engines] == [16 * 96] * 2  # each once
        [saved] = await pool.save([transfer(pool, 0, range(8))])
        assert saved.ok.all()
        assert saved.nbytes.tolist() == [192] * 8
        [loaded] = await pool.load([transfer(pool, 0, range(15, 7, -1))])
        assert loaded.ok.all()
        assert all(np.array_equal(layer[:8], layer[15:7:-1]) for layer in layers)
        assert pool.staging.peak == 0


async def test_several_blocks_make_a_chunk() -> None:
    async with engine(RegisteringStore()) as (pool, layers):
        hashes = hashes_of(3)
        one = Transfer(0, pool.transfer(0, hashes, range(3), range(3)).hashes, np.array([[0, 5], [1, 7], [2, 3]]))
        other = Transfer(0, one.hashes, np.array([[8, 9], [10, 11], [12, 13]]))
        assert (await pool.save([one]))[0].ok.all()
        assert (await pool.load([other]))[0].ok.all()
        assert all(np.array_equal(layer[[0, 5, 1, 7, 2, 3]], layer[8:14]) for layer in layers)


async def test_a_load_that_is_late_ends_when_the_store_has_let_go() -> None:
    store = RegisteringStore()
    async with engine(store) as (pool, layers):
        await pool.save([transfer(pool, 0, [0])])
        store.hold()
        ended: list[Results] = []
        before = [layer[9].copy() for layer in layers]

        async def load() -> None:
            ended.extend(await pool.load([transfer(pool, 0, [9])], deadline=anyio.current_time() + 0.01))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await store.holding.wait()
            await anyio.sleep(0.4)  # longer than the deadline and the grace
            assert not ended, "reported while the store may still write"
            store.let_go.set()
        assert ended[0].ok.all()
        assert all(np.array_equal(layer[9], layer[0]) for layer in layers)
        assert not any(np.array_equal(old, layer[9]) for old, layer in zip(before, layers, strict=True))


async def test_a_cancelled_load_ends_when_the_store_has_let_go() -> None:
    store = RegisteringStore()
    async with engine(store) as (pool, layers):
        await pool.save([transfer(pool, 0, [0])])
        store.hold()
        ended = anyio.Event()

        async def load() -> None:
            try:
                await pool.load([transfer(pool, 0, [9])])
            finally:
                ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await store.holding.wait()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)
                assert not ended.is_set(), "the job ended while the store may still write"
                store.let_go.set()
        assert ended.is_set()
        after = [layer.copy() for layer in layers]
        await anyio.sleep(0.05)
        assert all(np.array_equal(old, layer) for old, layer in zip(after, layers, strict=True))


async def test_a_save_keeps_its_blocks_until_the_store_has_let_go() -> None:
    store = RegisteringStore()
    async with engine(store) as (pool, _):
        store.hold()
        copied: list[bool] = []

        async def save() -> None:
            deadline = anyio.current_time() + 0.01
            await pool.save([transfer(pool, 0, range(8))], deadline=deadline, copied=lambda: copied.append(True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save)
            await store.holding.wait()
            await anyio.sleep(0.4)
            assert not copied, "blocks were given back while the store may still read them"
            store.let_go.set()
        assert copied == [True]


async def test_what_is_not_proven_is_not_loaded_and_not_looked_up_again() -> None:
    store = RegisteringStore()
    async with engine(store) as (pool, _):
        await pool.save([transfer(pool, 0, range(8))])
        assert (await pool.lookup(hashes_of(0), 8 * BLOCK + 1)).length == 8 * BLOCK
        store.lost = True
        [loaded] = await pool.load([transfer(pool, 0, range(8, 16))])
        assert set(loaded.status.tolist()) == {Status.CORRUPT}
        assert (await pool.lookup(hashes_of(0), 8 * BLOCK + 1)).length == 0


@pytest.mark.parametrize("refusal", [StoreError("no more memory may be locked"), LayoutError("not on this device")])
async def test_memory_that_cannot_be_registered_is_staged(
    refusal: KVPoolError, caplog: pytest.LogCaptureFixture
) -> None:
    store = RegisteringStore(refusal)
    async with engine(store) as (pool, layers):
        assert str(refusal) in caplog.text
        await pool.save([transfer(pool, 0, range(8))])
        assert (await pool.load([transfer(pool, 0, range(8, 16))]))[0].ok.all()
        assert all(np.array_equal(layer[:8], layer[8:]) for layer in layers)
        assert pool.staging.peak > 0


async def test_a_guard_without_bounce_passes_it_on() -> None:
    for bounce in (False, True):
        store = RegisteringStore()
        async with engine(GuardedStore(store, bounce=bounce)) as (pool, layers):
            assert len(store.registered) == (0 if bounce else 3)
            store.registered = store.registered or [Region.of(np.zeros(1, np.uint8))]
            if not bounce:
                assert (await pool.save([transfer(pool, 0, range(8))]))[0].ok.all()
                assert (await pool.load([transfer(pool, 0, range(8, 16))]))[0].ok.all()
                assert all(np.array_equal(layer[:8], layer[8:]) for layer in layers)
