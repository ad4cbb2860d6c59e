"""MooncakeStore on a fake cluster: what it makes of codes, lengths, leases, pressure and damage."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import anyio
import numpy as np
import pytest

from kvpool.backends import _mooncake_deletes
from kvpool.backends._breaker import Breaker
from kvpool.backends._mooncake_client import Connected
from kvpool.backends._mooncake_codes import Meaning, described, meaning_of
from kvpool.backends._mooncake_moves import BATCH_BYTES, BATCH_PIECES, BATCH_VALUES
from kvpool.backends.mooncake import MooncakeStore
from kvpool.config import Config
from kvpool.errors import LayoutError
from kvpool.hashes import chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout, Buffers, Region
from kvpool.pool import KVPool
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Status
from kvpool.testing.stores import get, put
from tests.unit.mooncake_fake import Cluster, FakeNative

pytestmark = pytest.mark.anyio


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def store_of(cluster: Cluster, options: str = "") -> MooncakeStore:
    return MooncakeStore(f"{cluster.url}?buffer=32MiB{options}", connect=cluster.connect)


async def test_a_value_has_a_header_that_proves_it(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        assert (await put(store, [("a", b"12345"), ("empty", b"")])).ok.all()
        assert {name: len(value) for name, value in cluster.values.items()} == {"kvpool:a": 45, "kvpool:empty": 40}
        results, memory = await get(store, ["a", "nothing", "empty"], [5, 5, 0])
        assert results.status.tolist() == [Status.OK, Status.ABSENT, Status.OK]
        assert memory[0] == b"12345"


@pytest.mark.parametrize("checksum", ["xxh3_64", "none"])
async def test_either_kind_of_header_is_read_by_all(cluster: Cluster, checksum: str) -> None:
    async with store_of(cluster, f"&checksum={checksum}") as store, store_of(cluster) as other:
        await put(store, [("a", bytes(1000))])
        assert (await get(other, ["a"], [1000]))[0].ok.all()
        cluster.values["kvpool:a"] = cluster.values["kvpool:a"][:-1] + b"x"
        assert (await get(other, ["a"], [1000]))[0].ok.all() == (checksum == "none")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (-704, Status.ABSENT),
        (-703, Status.ABSENT),
        (-702, Status.ABSENT),
        (-712, Status.ABSENT),
        (-800, Status.FAILED),
        (-600, Status.FAILED),
        (-900, Status.FAILED),
        (-707, Status.FAILED),
        (-1, Status.FAILED),
        (-4242, Status.FAILED),
    ],
)
async def test_codes_of_a_get(cluster: Cluster, code: int, status: Status) -> None:
    async with store_of(cluster) as store:
        await put(store, [("a", b"1"), ("b", b"2")])
        cluster.answer["get"] = [code] * 2
        results, _ = await get(store, ["a", "b"], [1, 1])
        assert results.status.tolist() == [status] * 2
        if status == Status.FAILED:
            assert all(described(code) in str(error) for error in results.errors.values())


async def test_a_lease_that_ended_under_way_is_tried_once_more(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        await put(store, [("a", b"1"), ("b", b"2")])
        cluster.answer["get"] = [-707]
        assert (await get(store, ["a", "b"], [1, 1]))[0].ok.all()
        assert cluster.calls["get"] == 2


async def test_every_code_has_a_name() -> None:
    assert described(-704) == "OBJECT_NOT_FOUND (-704)"
    assert described(-4242) == "unknown to kvpool (-4242)"
    assert meaning_of(8192) is meaning_of(0) is meaning_of(-705) is Meaning.OK
    assert meaning_of(-4242) is Meaning.FAILED


async def test_an_answer_that_is_none_fails(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        cluster.empty = True
        assert (await store.exists(["a", "b"])).tolist() == [UNKNOWN, UNKNOWN]
        assert (await get(store, ["a"], [1]))[0].status.tolist() == [Status.FAILED]
        assert (await put(store, [("a", b"1")])).status.tolist() == [Status.FAILED]


async def test_no_key_twice_in_a_native_call(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        results = await put(store, [("k", b"one"), ("x", b"xxx"), ("k", b"two")])
        assert results.nbytes.tolist() == [3, 3, 0]
        results, memory = await get(store, ["k", "no", "k", "x", "k"], [3] * 5)
        assert memory == [b"one", b"\xee" * 3, b"one", b"xxx", b"one"]


async def test_another_length_is_told_apart_from_a_failed_transfer(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        await put(store, [("a", b"12345")])
        for size in (0, 3, 9):
            assert (await get(store, ["a"], [size]))[0].status.tolist() == [Status.CORRUPT]
        assert (await store.exists(["a"])).tolist() == [PRESENT]
        assert (await get(store, ["a"], [5]))[1] == [b"12345"]


async def test_what_is_no_key_reaches_nobody(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        bad = ["", "white space", "\0", "é", "x" * 513]
        assert (await store.exists([*bad, "a"])).tolist() == [UNKNOWN] * 5 + [ABSENT]
        results, _ = await get(store, [*bad, "a"], [1] * 6)
        assert results.status.tolist() == [Status.FAILED] * 5 + [Status.ABSENT]
        assert all(name == "kvpool:a" for _, names, _ in cluster.batches for name in names)


async def test_memory_of_a_device_is_refused(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        device = Region(4096, 4096, None, "cuda")
        with pytest.raises(LayoutError):
            await store.put(["a"], Buffers.single(device, [0], 10))
        with pytest.raises(LayoutError):
            await store.register([device])


async def test_batches_stay_below_mooncakes_limits(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        big = Region.of(np.zeros(80 << 20, np.uint8))
        await store.register([big])
        keys = [f"k{i}" for i in range(20)]
        pieces = Buffers(
            (big,),
            np.zeros(8, np.intp),
            np.arange(160, dtype=np.int64).reshape(20, 8) << 19,
            np.full((20, 8), 1 << 19, np.int64),
        )
        assert (await store.put(keys, pieces)).ok.all()
        assert (await store.get_into(keys, pieces)).ok.all()
        assert (await put(store, [(f"small/{i}", b"x") for i in range(1000)])).ok.all()
        for _, names, sizes in cluster.batches:
            assert len(names) <= BATCH_VALUES
            assert sum(map(len, sizes)) <= BATCH_PIECES
            assert sum(map(sum, sizes)) <= BATCH_BYTES


async def test_values_that_are_gathered_travel_together_however_many_pieces_they_had(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        memory = Region.of(np.random.default_rng(2).integers(0, 256, 16 << 20, np.uint8))
        await store.register([memory])
        offsets = np.arange(20 * 64, dtype=np.int64).reshape(20, 64) << 10
        small = Buffers((memory,), np.zeros(64, np.intp), offsets, np.full((20, 64), 1 << 10, np.int64))
        keys = [f"k{i}" for i in range(20)]
        assert (await store.put(keys, small)).ok.all()
        kept = memory.array.copy()
        memory.array[:] = 0
        assert (await store.get_into(keys, small)).ok.all()
        assert np.array_equal(memory.array[: 20 << 16], kept[: 20 << 16])
        assert [len(names) for _, names, _ in cluster.batches] == [20, 20]


async def test_pieces_of_very_different_sizes_stay_below_mooncakes_limits(cluster: Cluster) -> None:
    """All together are small enough to be gathered, those of one batch are not."""
    async with store_of(cluster, "&protocol=rdma&zero_copy=no") as store:
        memory = Region.of(np.zeros(1 << 20, np.uint8))
        await store.register([memory])
        sizes = np.full((512, 4), 1, np.int64)
        sizes[:256] = 9 << 10
        keys = [f"k{i}" for i in range(512)]
        assert (await store.put(keys, Buffers((memory,), np.zeros(4, np.intp), np.zeros_like(sizes), sizes))).ok.all()
        batches = [sizes for _, _, sizes in cluster.batches]
        assert [len(sizes) for sizes in batches] == [256, 256]
        assert all(sum(map(len, sizes)) <= BATCH_PIECES and sum(map(sum, sizes)) <= BATCH_BYTES for sizes in batches)


async def test_small_pieces_are_gathered_and_large_ones_handed_over(cluster: Cluster) -> None:
    """With a header in front: one piece if gathered, one more than there were if not."""
    async with store_of(cluster) as store:
        memory = Region.of(np.random.default_rng(1).integers(0, 256, 8 << 20, np.uint8))
        other = Region.of(np.zeros(8 << 20, np.uint8))
        await store.register([memory])

        def buffers(region: Region, size: int) -> Buffers:
            return Buffers((region,), np.zeros(4, np.intp), (np.arange(4) * size)[None], np.full((1, 4), size))

        for key, region, size, wanted in (
            ("small", memory, 16 << 10, 1),
            ("large", memory, 1 << 20, 5),
            ("not registered", other, 1 << 20, 1),
        ):
            name = key.replace(" ", "-")
            assert (await store.put([name], buffers(region, size))).ok.all()
            assert len(cluster.batches[-1][2][0]) == wanted
            kept = region.array[: 4 * size].copy()
            region.array[:] = 0
            assert (await store.get_into([name], buffers(region, size))).ok.all()
            assert len(cluster.batches[-1][2][0]) == wanted
            assert np.array_equal(region.array[: 4 * size], kept)


async def test_the_header_goes_in_front_of_the_payload_where_there_is_room(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        memory = np.full(4 * 1064, 7, np.uint8)
        region = Region.of(memory)
        await store.register([region])
        room = store.capabilities.headroom
        buffers = Buffers.single(region, room + np.arange(4) * 1064, 1000, headroom=room)
        keys = ["a", "b", "c", "d"]
        assert (await store.put(keys, buffers)).ok.all()
        assert cluster.batches[-1][2] == [[1040]] * 4
        memory[:] = 9
        assert (await store.get_into(keys[::-1], buffers)).ok.all()
        rows = memory.reshape(4, 1064)
        assert (rows[:, 64:] == 7).all()
        assert (rows[:, :24] == 9).all(), "no more than the headroom is used"


async def test_a_pool_copies_values_once(cluster: Cluster) -> None:
    """Staging memory is registered and has the room, so the store copies nothing more."""
    layers = [np.full((16, 512), i, np.uint8) for i in range(2)]
    spec = CacheSpec((CacheGroup(Kind.FULL, 4),), 4)
    config = Config.load({"staging_bytes": 1 << 20, "batch_bytes": 1 << 16}, environ={})
    store, layout = store_of(cluster), BlockLayout.of_arrays(*layers)
    async with KVPool(store, spec=spec, namespace=Namespace.of({"t": 1}), layouts=[layout], config=config) as pool:
        hashes = chain_hashes(list(range(32)), 4)
        assert (await pool.save([pool.transfer(0, hashes, range(8), range(8))]))[0].ok.all()
        assert store._link.client().arena.peak <= 8192, "for the manifest only"
        for layer in layers:
            layer[8:] = 255
        assert (await pool.load([pool.transfer(0, hashes, range(8), range(8, 16))]))[0].ok.all()
        assert all((layer == layer[0, 0]).all() for layer in layers)


async def test_values_larger_than_the_stores_own_memory_are_refused(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        limit = store.capabilities.max_value_bytes
        assert limit == (32 << 20) - 40
        results = await put(store, [("a", b"1"), ("big", bytes(limit + 1))])
        assert results.status.tolist() == [Status.OK, Status.REJECTED]
        assert "buffer=" in str(results.errors[1])
        assert (await put(store, [("largest", bytes(limit))])).ok.all()
        assert (await get(store, ["largest"], [limit]))[0].ok.all()


async def test_a_full_cluster_pauses_puts_and_recovers(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        store._pressure = Breaker(failures=1, cooldown_s=1.0)  # more than two puts take on a busy machine
        cluster.room = 0
        results = await put(store, [("a", b"1")])
        assert results.status.tolist() == [Status.REJECTED]
        assert "NO_AVAILABLE_HANDLE" in str(results.errors[0])
        asked = cluster.calls["put"]
        results = await put(store, [("a", b"1")])
        assert results.status.tolist() == [Status.REJECTED]
        assert cluster.calls["put"] == asked, "it is not asked again at once"
        assert (await store.exists(["a"])).tolist() == [ABSENT], "nothing else is paused"
        cluster.room = math.inf
        with anyio.fail_after(20):
            while not (await put(store, [("a", b"1")])).ok.all():  # noqa: ASYNC110
                await anyio.sleep(0.02)


async def test_presence_is_asked_once_in_a_while(cluster: Cluster) -> None:
    async with store_of(cluster, "&presence_cache_s=60") as store:
        await put(store, [("a", b"1")])
        assert [(await store.exists(["a", "b"])).tolist() for _ in range(3)] == [[PRESENT, ABSENT]] * 3
        assert cluster.calls["exist"] == 3, "what is absent may have come"
        await store.exists(["a"])
        assert cluster.calls["exist"] == 3
        cluster.values.clear()
        await get(store, ["a"], [1])  # the load finds that it has gone
        assert (await store.exists(["a"])).tolist() == [ABSENT]
        await put(store, [("a", b"1")])
        await store.exists(["a"])
        cluster.leases.clear()
        assert (await store.delete(["a"])).ok.all()
        assert (await store.exists(["a"])).tolist() == [ABSENT]


async def test_a_key_that_failed_to_load_counts_as_absent_for_a_while(cluster: Cluster) -> None:
    async with store_of(cluster, "&presence_cache_s=0&failed_key_s=60") as store:
        await put(store, [("a", b"1")])
        cluster.answer["get"] = [-800]
        assert (await get(store, ["a"], [1]))[0].status.tolist() == [Status.FAILED]
        assert (await store.exists(["a"])).tolist() == [ABSENT]
        assert (await get(store, ["a"], [1]))[0].ok.all()
        assert (await store.exists(["a"])).tolist() == [PRESENT]


async def test_a_delete_waits_for_the_end_of_leases(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        await put(store, [("a", b"1"), ("b", b"2")])
        cluster.touch("kvpool:a")
        assert (await store.delete(["a", "b", "c"])).status.tolist() == [Status.OK, Status.OK, Status.ABSENT]
        await put(store, [("a", b"1")])
        cluster.lease_s = 1000
        cluster.touch("kvpool:a")
        results = await store.delete(["a"], deadline=anyio.current_time() + 0.1)
        assert results.status.tolist() == [Status.TIMED_OUT]


async def test_a_delete_asks_a_dead_master_once(cluster: Cluster) -> None:
    """Each call would take the master's time-out, in a thread that nobody can stop."""
    async with store_of(cluster) as store:
        cluster.answer["remove"] = [-901] * 1000
        results = await store.delete([f"k{i}" for i in range(64)])
        assert results.status.tolist() == [Status.FAILED] * 64
        assert cluster.calls["remove"] == 1


async def test_a_cancelled_delete_stops(cluster: Cluster) -> None:
    removed = threading.Event()

    class Slow(FakeNative):
        def remove(self, key: str, force: bool, /) -> int:
            removed.set()
            time.sleep(0.001)
            return super().remove(key, force)

    async with MooncakeStore(cluster.url, connect=lambda *_: Connected(Slow(cluster), "config")) as store:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.delete, [f"k{i}" for i in range(10_000)])
            while not removed.is_set():  # noqa: ASYNC110
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        before = cluster.calls["remove"]
        await anyio.sleep(0.05)
        assert cluster.calls["remove"] == before < 10_000


@pytest.mark.parametrize("damage", ["flip", "foreign", "truncate", "extend", "not kvpool's", "short"])
async def test_a_damaged_value_is_removed_when_nobody_has_a_lease(cluster: Cluster, damage: str) -> None:
    async with store_of(cluster, "&presence_cache_s=0") as store:
        await put(store, [("a", b"12345"), ("b", b"other")])
        good = cluster.values["kvpool:a"]
        cluster.values["kvpool:a"] = {
            "flip": good[:-1] + b"x",
            "foreign": cluster.values["kvpool:b"],
            "truncate": good[:-1],
            "extend": good + b"x",
            "not kvpool's": b"?" * len(good),
            "short": b"tiny",
        }[damage]
        assert (await get(store, ["a", "b"], [5, 5]))[0].status.tolist() == [Status.CORRUPT, Status.OK]
        assert (await store.exists(["a", "b"])).tolist() == [ABSENT, PRESENT]
        assert (await put(store, [("c", b"3"), ("a", b"12345")])).ok.all()  # waits for the lease of the get to end
        assert (await get(store, ["a"], [5]))[1] == [b"12345"]
        assert cluster.values["kvpool:a"] == good


async def test_a_put_does_not_wait_for_ever_for_a_damaged_value(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_mooncake_deletes, "REMOVE_S", 2.0)
    async with store_of(cluster) as store:
        await put(store, [("a", b"12345")])
        cluster.values["kvpool:a"] = b"?" * 45
        cluster.lease_s = 1000
        await get(store, ["a"], [5])
        with anyio.fail_after(20):
            results = await put(store, [("a", b"12345"), ("b", b"2")], deadline=anyio.current_time() + 0.7)
            assert results.status.tolist() == [Status.TIMED_OUT, Status.OK]
            # Once it has been given up:
            assert (await put(store, [("a", b"12345")])).status.tolist() == [Status.FAILED]
        assert "could not be removed" in caplog.text
        assert (await store.exists(["a"])).tolist() == [ABSENT]


async def puts_begun(cluster: Cluster, wanted: list[list[str]]) -> None:
    """Wait until these puts, by their names, have reached Mooncake; no other may have."""
    while True:
        begun = [names for method, names, _ in cluster.batches if method == "put"]
        assert begun == wanted[: len(begun)]
        if begun == wanted:
            return
        await anyio.sleep(0.001)


async def test_a_put_waits_for_another_of_the_same_key(cluster: Cluster) -> None:
    """Mooncake says OK to the second at once, and until the first has ended a load finds nothing."""
    both: list[bool] = []

    async def put_both(store: MooncakeStore) -> None:
        both.extend((await put(store, [("a", b"value"), ("b", b"value")])).ok.tolist())

    async with store_of(cluster) as store:
        with anyio.fail_after(20), cluster.hanging():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put, store, [("a", b"value")])
                await puts_begun(cluster, [["kvpool:a"]])
                tasks.start_soon(put_both, store)
                await puts_begun(cluster, [["kvpool:a"], ["kvpool:b"]])
                await anyio.wait_all_tasks_blocked()
                cluster.go_on.set()
        assert both == [True, True]
        assert (await get(store, ["a", "b"], [5, 5]))[1] == [b"value"] * 2
