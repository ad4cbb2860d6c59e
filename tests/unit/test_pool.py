"""KVPool on a memory store: what is loaded, what is reported, and what happens when the store misbehaves."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio
import numpy as np
import pytest

from kvpool.config import Config
from kvpool.errors import ConfigError, KVPoolError, LayoutError
from kvpool.hashes import BlockHashes, chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout, Buffers
from kvpool.pool import KVPool, Transfer
from kvpool.registry import URL, create_store
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import UNKNOWN, Capabilities, Presence, Results, Status, Store

pytestmark = pytest.mark.anyio

BLOCK = 4
SPEC = CacheSpec((CacheGroup(Kind.FULL, BLOCK),), BLOCK)
NAMESPACE = Namespace.of({"test": "pool"})


class Steered(Store):
    """A memory store whose next answers a test decides."""

    def __init__(self) -> None:
        self.inner = create_store("memory://")
        self.capabilities: Capabilities = self.inner.capabilities
        self.before_get: Callable[[Sequence[str]], Any] | None = None
        self.before_put: Callable[[Sequence[str]], Any] | None = None
        self.before_exists: Callable[[Sequence[str]], Any] | None = None
        self.lost: set[str] = set()
        self.stored: list[str] = []
        self.exists_calls = 0

    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls()

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.inner.__aexit__(exc_type, exc, tb)

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        self.exists_calls += 1
        if self.before_exists:
            await self.before_exists(keys)
        return await self.inner.exists(keys, deadline=deadline)

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        if self.before_get:
            await self.before_get(keys)
        results = await self.inner.get_into(keys, into, deadline=deadline)
        for i, key in enumerate(keys):
            if key in self.lost:
                results.set(i, Status.ABSENT)
        return results

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        if self.before_put:
            await self.before_put(keys)
        self.stored.extend(keys)
        return await self.inner.put(keys, source, deadline=deadline)

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        return await self.inner.delete(keys, deadline=deadline)


class Engine:
    """Block memory of 2 layers x 32 blocks, and a pool on it."""

    def __init__(self, store: Store, **config: Any) -> None:
        self.layers = [np.zeros((32, 48), np.uint8), np.zeros((32, 16), np.uint8)]
        self.config = Config.load({"staging_bytes": 4096, "batch_bytes": 256, **config})
        layout = BlockLayout.of_arrays(*self.layers)
        self.pool = KVPool(store, spec=SPEC, namespace=NAMESPACE, layouts=[layout], config=self.config)

    def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for layer in self.layers:
            layer[:] = random.integers(1, 256, layer.shape, np.uint8)

    def blocks(self, ids: Sequence[int]) -> bytes:
        return b"".join(layer[i].tobytes() for i in ids for layer in self.layers)


@asynccontextmanager
async def engine(store: Store | None = None, **config: Any) -> AsyncIterator[Engine]:
    made = Engine(store or create_store("memory://"), **config)
    async with made.pool:
        yield made


def prompt(blocks: int, seed: int = 0) -> BlockHashes:
    return chain_hashes(np.arange(blocks * BLOCK) + 1000 * seed, BLOCK)


async def test_what_is_saved_is_found_and_loaded_into_other_blocks() -> None:
    async with engine() as e:
        e.fill(1)
        hashes = prompt(10)
        (saved,) = await e.pool.save([e.pool.transfer(0, hashes, range(10), range(10))])
        assert saved.ok.all()
        hit = await e.pool.lookup(hashes, 41)
        assert hit.length == 40
        before = e.blocks(range(10))
        (loaded,) = await e.pool.load([e.pool.transfer(0, hashes, range(10), range(20, 30))])
        assert loaded.ok.all()
        assert e.blocks(range(20, 30)) == before
        assert e.pool.counters.saved_chunks == e.pool.counters.loaded_chunks == 10
        assert e.pool.counters.saved_bytes == 640


async def test_a_hit_never_covers_the_last_token() -> None:
    async with engine() as e:
        hashes = prompt(10)
        await e.pool.save([e.pool.transfer(0, hashes, range(10), range(10))])
        assert (await e.pool.lookup(hashes, 40)).length == 36


async def test_chunks_of_several_engine_blocks() -> None:
    spec = CacheSpec((CacheGroup(Kind.FULL, 2 * BLOCK),), BLOCK)
    memory = np.arange(32 * 8, dtype=np.uint8).reshape(32, 8)
    async with KVPool(
        create_store("memory://"), spec=spec, namespace=NAMESPACE, layouts=[BlockLayout.of_arrays(memory)]
    ) as pool:
        hashes = prompt(4)
        await pool.save([pool.transfer(0, hashes, [0, 1], [[1, 2], [3, 4]])])
        expected = memory[[1, 2, 3, 4]].copy()
        (loaded,) = await pool.load([pool.transfer(0, hashes, [0, 1], [[10, 20], [30, 11]])])
        assert loaded.ok.all()
        assert (memory[[10, 20, 30, 11]] == expected).all()


async def test_a_block_that_is_not_proven_is_reported_and_untouched() -> None:
    store = Steered()
    async with engine(store) as e:
        e.fill(2)
        hashes = prompt(8)
        await e.pool.save([e.pool.transfer(0, hashes, range(8), range(8))])
        store.lost = set(e.pool.keyspace.keys(0, 0, hashes, np.array([3, 6])))
        hole = e.blocks([13, 16])
        (loaded,) = await e.pool.load([e.pool.transfer(0, hashes, range(8), range(10, 18))])
        assert loaded.status.tolist() == [Status.ABSENT if i in (3, 6) else Status.OK for i in range(8)]
        assert e.blocks([13, 16]) == hole
        assert e.blocks([12, 17]) == e.blocks([2, 7])


async def test_a_failed_key_counts_as_absent_for_a_while() -> None:
    store = Steered()
    async with engine(store, failed_key_ttl_s=0.2) as e:
        hashes = prompt(8)
        await e.pool.save([e.pool.transfer(0, hashes, range(8), range(8))])
        store.lost = set(e.pool.keyspace.keys(0, 0, hashes, np.array([3])))
        await e.pool.load([e.pool.transfer(0, hashes, range(8), range(10, 18))])
        assert (await e.pool.lookup(hashes, 33)).length == 3 * BLOCK
        await anyio.sleep(0.25)
        assert (await e.pool.lookup(hashes, 33)).length == 8 * BLOCK


async def test_present_chunks_are_not_put_again() -> None:
    store = Steered()
    async with engine(store) as e:
        hashes = prompt(8)
        await e.pool.save([e.pool.transfer(0, hashes, range(5), range(5))])
        (saved,) = await e.pool.save([e.pool.transfer(0, hashes, range(8), range(8))])
        assert saved.ok.all()
        blocks = [key for key in store.stored if "/manifest/" not in key]
        assert len(blocks) == len(set(blocks)) == 8
        assert e.pool.counters.save_present_chunks == 5


async def test_empty_work_completes_and_asks_nothing() -> None:
    store = Steered()
    async with engine(store) as e:
        hashes = prompt(3)
        called: list[int] = []
        assert await e.pool.save([]) == []
        assert await e.pool.load([]) == []
        (saved,) = await e.pool.save([e.pool.transfer(0, hashes, [], [])], copied=lambda: called.append(1))
        assert len(saved) == 0
        assert called == [1]
        assert (await e.pool.lookup(chain_hashes([], BLOCK), 0)).length == 0
        assert store.exists_calls == 0


async def test_a_store_that_ignores_its_deadline_cannot_hang_a_load_nor_write_late() -> None:
    store = Steered()
    release = anyio.Event()

    async def stuck(keys: Sequence[str]) -> None:
        with anyio.CancelScope(shield=True):
            await release.wait()

    async with engine(store) as e:
        e.fill(3)
        hashes = prompt(4)
        await e.pool.save([e.pool.transfer(0, hashes, range(4), range(4))])
        store.before_get = stuck
        target = e.blocks(range(10, 14))
        free = e.pool.staging.free_bytes
        part = e.pool.transfer(0, hashes, range(4), range(10, 14))
        (loaded,) = await e.pool.load([part], deadline=anyio.current_time() + 0.05)
        assert set(loaded.status.tolist()) == {Status.TIMED_OUT}
        assert e.pool.counters.abandoned_calls >= 1
        assert e.pool.staging.free_bytes < free, "a call that still runs keeps its staging memory"
        release.set()
        await anyio.wait_all_tasks_blocked()
        assert e.pool.staging.free_bytes == free
        assert e.blocks(range(10, 14)) == target


async def test_a_cancelled_load_touches_no_block() -> None:
    store = Steered()
    started, go_on = anyio.Event(), anyio.Event()

    async def slow(keys: Sequence[str]) -> None:
        started.set()
        await go_on.wait()

    async with engine(store) as e:
        e.fill(4)
        hashes = prompt(4)
        await e.pool.save([e.pool.transfer(0, hashes, range(4), range(4))])
        store.before_get = slow
        target = e.blocks(range(10, 14))
        free = e.pool.staging.free_bytes
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(e.pool.load, [e.pool.transfer(0, hashes, range(4), range(10, 14))])
            await started.wait()
            tasks.cancel_scope.cancel()
        assert e.pool.staging.free_bytes < free, "the store's call has not ended, and its memory is its own"
        go_on.set()
        with anyio.fail_after(20):
            while e.pool.staging.free_bytes < free:  # noqa: ASYNC110 - nothing tells when
                await anyio.sleep(0.001)
        assert e.blocks(range(10, 14)) == target


@pytest.mark.parametrize("fault", [RuntimeError("boom"), OSError("gone")], ids=["RuntimeError", "OSError"])
async def test_a_raising_store_is_a_miss_a_failed_load_and_a_failed_save(fault: Exception) -> None:
    store = Steered()

    async def broken(keys: Sequence[str]) -> None:
        raise fault

    async with engine(store) as e:
        hashes = prompt(4)
        part = e.pool.transfer(0, hashes, range(4), range(4))
        store.before_put = broken
        called: list[int] = []
        (saved,) = await e.pool.save([part], copied=lambda: called.append(1))
        assert set(saved.status.tolist()) == {Status.FAILED}
        assert called == [1]
        store.before_put = None
        await e.pool.save([part])
        store.before_get = broken
        (loaded,) = await e.pool.load([part])
        assert set(loaded.status.tolist()) == {Status.FAILED}
        store.before_exists = broken
        assert (await e.pool.lookup(hashes, 17)).length == 0
        assert e.pool.counters.lookup_failed == 1
        assert (await e.pool.save([part]))[0].ok.sum() == 0


async def test_a_late_lookup_is_a_miss() -> None:
    store = Steered()

    async def slow(keys: Sequence[str]) -> None:
        await anyio.sleep(5)

    async with engine(store, lookup_timeout_ms=50) as e:
        hashes = prompt(4)
        await e.pool.save([e.pool.transfer(0, hashes, range(4), range(4))])
        store.before_exists = slow
        with anyio.fail_after(2):
            assert (await e.pool.lookup(hashes, 17)).length == 0
        assert e.pool.counters.lookup_late == 1


async def test_blocks_are_released_before_a_slow_put_ends() -> None:
    store = Steered()
    release, copied = anyio.Event(), anyio.Event()

    async def slow(keys: Sequence[str]) -> None:
        await release.wait()

    store.before_put = slow
    async with engine(store) as e:
        e.fill(5)
        expected = e.blocks(range(4))
        hashes = prompt(4)
        results: list[Results] = []

        async def save() -> None:
            results.extend(await e.pool.save([e.pool.transfer(0, hashes, range(4), range(4))], copied=copied.set))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(save)
            with anyio.fail_after(5):
                await copied.wait()
            assert not results
            e.fill(6)  # the engine computes into the blocks again: what is stored must not change
            release.set()
        assert results[0].ok.all()
        (loaded,) = await e.pool.load([e.pool.transfer(0, hashes, range(4), range(20, 24))])
        assert loaded.ok.all()
        assert e.blocks(range(20, 24)) == expected


async def test_saves_behind_a_slow_store_are_dropped_and_counted() -> None:
    store = Steered()
    release = anyio.Event()

    async def slow(keys: Sequence[str]) -> None:
        await release.wait()

    store.before_put = slow
    async with engine(store, save_queue_bytes=1024) as e:
        results: list[Results] = []

        async def save(seed: int) -> None:
            hashes = prompt(8, seed)
            results.extend(await e.pool.save([e.pool.transfer(0, hashes, range(8), range(8))]))

        async with anyio.create_task_group() as tasks:
            for seed in range(6):
                tasks.start_soon(save, seed)
            await anyio.sleep(0.1)
            assert e.pool.staging.free_bytes >= 0
            release.set()
        statuses = np.concatenate([r.status for r in results])
        dropped = int((statuses == Status.REJECTED).sum())
        assert e.pool.counters.save_dropped_chunks == dropped > 0
        assert int((statuses == Status.OK).sum()) == 48 - dropped > 0


async def test_a_chunk_larger_than_the_staging_memory_is_refused_at_start() -> None:
    memory = np.zeros((4, 8192), np.uint8)
    with pytest.raises(ConfigError, match="staging_bytes"):
        KVPool(
            create_store("memory://"),
            spec=SPEC,
            namespace=NAMESPACE,
            layouts=[BlockLayout.of_arrays(memory)],
            config=Config.load({"staging_bytes": 4096, "batch_bytes": 4096}),
        )


async def test_use_outside_its_context_is_an_error_that_says_so() -> None:
    made = Engine(create_store("memory://"))
    with pytest.raises(KVPoolError, match="async with"):
        await made.pool.lookup(prompt(1), 5)
    async with made.pool:
        pass
    with pytest.raises(KVPoolError, match="async with"):
        await made.pool.load([])


async def test_a_store_of_another_loop_is_refused_by_name() -> None:
    class Elsewhere(Steered):
        def __init__(self) -> None:
            super().__init__()
            self.capabilities = Capabilities(shared=False, loops=frozenset({"curio"}))

    made = Engine(Elsewhere())
    with pytest.raises(ConfigError, match="Elsewhere runs on curio"):
        async with made.pool:
            pass


async def test_rows_and_hashes_must_fit() -> None:
    with pytest.raises(LayoutError, match="3 chunk hashes do not fit 2"):
        Transfer(0, prompt(3), np.arange(2))


async def test_a_sharded_group_is_present_only_when_every_shard_is() -> None:
    spec = CacheSpec((CacheGroup(Kind.FULL, BLOCK, shards=2),), BLOCK)
    async with KVPool(create_store("memory://"), spec=spec, namespace=NAMESPACE) as pool:
        hashes = prompt(4)
        for shard, have in ((0, 4), (1, 2)):
            keys = pool.keyspace.keys(0, shard, hashes, np.arange(have))
            await pool.store.put(keys, Buffers.of(*(bytearray(b"x") for _ in keys)))
        assert (await pool.lookup(hashes, 17)).length == 2 * BLOCK


async def test_unknown_presence_is_no_hit() -> None:
    class Doubtful(Steered):
        async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
            return np.full(len(keys), UNKNOWN, np.uint8)

    async with engine(Doubtful()) as e:
        assert (await e.pool.lookup(prompt(4), 17)).length == 0


async def test_a_store_that_ignores_cancellation_cannot_hang_a_lookup_or_a_save() -> None:
    store = Steered()
    release = anyio.Event()

    async def deaf(keys: Sequence[str]) -> None:
        with anyio.CancelScope(shield=True):
            await release.wait()

    async with engine(store, lookup_timeout_ms=30, save_timeout_s=0.03) as e:
        store.before_exists = deaf
        hashes = prompt(4)
        with anyio.fail_after(5):
            assert (await e.pool.lookup(hashes, 17)).length == 0
            (saved,) = await e.pool.save([e.pool.transfer(0, hashes, range(4), range(4))])
        assert not saved.ok.any()
        release.set()


async def test_a_wedged_store_is_not_asked_without_end() -> None:
    store = Steered()
    release = anyio.Event()

    async def deaf(keys: Sequence[str]) -> None:
        with anyio.CancelScope(shield=True):
            await release.wait()

    async with engine(store, lookup_timeout_ms=1) as e:
        store.before_exists = deaf
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(e.pool.lookup, prompt(4), 17)
        asked = store.exists_calls
        for _ in range(100):
            assert (await e.pool.lookup(prompt(4), 17)).length == 0
        assert store.exists_calls == asked, "calls pile up behind a store that does not answer"
        release.set()
        await anyio.wait_all_tasks_blocked()
        store.before_exists = None
        await e.pool.save([e.pool.transfer(0, prompt(4), range(4), range(4))])
        assert (await e.pool.lookup(prompt(4), 17, deadline=math.inf)).length >= 0
        assert store.exists_calls > asked, "it is asked again once it answers"


async def test_a_store_that_answers_for_other_keys_is_not_believed() -> None:
    class Short(Steered):
        async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
            return Results.empty(len(keys) - 1, Status.OK)

        async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
            return np.ones(max(0, len(keys) - self.short), np.uint8)

        short = 0

    store = Short()
    async with engine(store) as e:
        part = e.pool.transfer(0, prompt(4), range(4), range(4))
        (loaded,) = await e.pool.load([part])
        assert set(loaded.status.tolist()) == {Status.FAILED}
        store.short = 1
        assert (await e.pool.lookup(prompt(4, 2), 17)).length == 0
        assert not (await e.pool.save([part]))[0].ok.any()


async def test_bad_block_ids_are_named_before_anything_moves() -> None:
    store = Steered()
    async with engine(store) as e:
        for ids in ([0, 32], [-1, 3]):
            with pytest.raises(LayoutError, match="block id outside"):
                await e.pool.load([e.pool.transfer(0, prompt(2), range(2), ids)])
            with pytest.raises(LayoutError, match="block id outside"):
                await e.pool.save([e.pool.transfer(0, prompt(2), range(2), ids)])
        assert not store.stored


async def test_a_refused_save_still_lets_go_of_its_blocks() -> None:
    made = Engine(create_store("memory://"))
    called: list[int] = []
    part = Transfer(0, prompt(2), np.arange(2))
    with pytest.raises(KVPoolError, match="async with"):
        await made.pool.save([part], copied=lambda: called.append(1))
    async with made.pool:
        with pytest.raises(LayoutError):
            await made.pool.save([Transfer(0, prompt(1), np.array([99]))], copied=lambda: called.append(2))
    assert called == [1, 2]


async def test_an_exception_in_the_body_comes_out_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="mine"):
        async with engine():
            raise RuntimeError("mine")


async def test_manifests_of_epochs_that_are_over_are_not_kept_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.pool.MANIFEST_EVERY_S", 0.0)
    async with engine() as e:
        for _ in range(5):
            await e.pool.save([e.pool.transfer(0, prompt(1), [0], [0])])
            assert len(e.pool._described) == 1
            e.pool.reset()


async def test_a_manifest_says_what_a_namespace_is() -> None:
    async with engine() as e:
        await e.pool.save([e.pool.transfer(0, prompt(1), [0], [0])])
        await anyio.wait_all_tasks_blocked()
        text = bytearray(len(NAMESPACE.manifest))
        (status,) = (await e.pool.store.get_into([e.pool.keyspace.manifest_key], Buffers.of(text))).status
        assert status == Status.OK
        assert text.decode() == NAMESPACE.manifest
