"""The Mooncake store's way to its client: calls that hang, clients that are replaced, masters that do not answer."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import anyio
import numpy as np
import pytest

from kvpool.backends import _mooncake_client, _mooncake_link
from kvpool.backends.mooncake import MooncakeStore
from kvpool.config import Config
from kvpool.errors import ConfigError, StoreClosed, StoreError
from kvpool.hashes import chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout, Buffers, Region
from kvpool.pool import KVPool
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Results, Status
from kvpool.testing.stores import get, put
from tests.mooncake.servers import free_port
from tests.unit.mooncake_fake import Cluster, FakeNative

pytestmark = pytest.mark.anyio

FAST = "buffer=1MiB&presence_cache_s=0&failed_key_s=0"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(_mooncake_link, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(_mooncake_link, "CLOSE_S", 0.1)
    monkeypatch.setattr(_mooncake_link, "_hung", [])
    with Cluster() as cluster:
        yield cluster


def store_of(cluster: Cluster, options: str = "", timeout_s: float = 5) -> MooncakeStore:
    return MooncakeStore(f"{cluster.url}?{FAST}{options}&timeout_s={timeout_s}", connect=cluster.connect)


async def until_ok(store: MooncakeStore, key: str = "again") -> None:
    with anyio.fail_after(30):
        while not (await put(store, [(key, b"1")], deadline=anyio.current_time() + 1)).ok.all():  # noqa: ASYNC110
            await anyio.sleep(0.01)


# ---- calls that hang


async def test_a_call_that_hangs_is_left_and_leaves_the_callers_memory_alone(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        await put(store, [("a", b"12345")])
        memory = bytearray(b"caller")[:5]
        with cluster.hanging():
            with anyio.fail_after(30):
                results = await store.get_into(["a"], Buffers.of(memory), deadline=anyio.current_time() + 0.05)
            assert results.status.tolist() == [Status.TIMED_OUT]
            assert (await store.exists(["a"])).tolist() == [PRESENT], "lookups have threads of their own"
            memory[:] = b"other"
        await anyio.sleep(0.1)
        assert memory == b"other"
        assert (await get(store, ["a"], [5]))[1] == [b"12345"]


async def test_the_memory_of_a_call_that_hangs_is_nobody_elses(cluster: Cluster) -> None:
    async with store_of(cluster, "&threads=4") as store:
        client = store._link.client()
        with cluster.hanging():
            for i in range(2):
                limit = anyio.current_time() + 0.02
                assert (await put(store, [(f"a{i}", bytes(300_000))], deadline=limit)).status[0] == Status.TIMED_OUT
            assert client.arena.free_bytes < (1 << 20) - 600_000
        with anyio.fail_after(30):
            while client.arena.free_bytes < 1 << 20:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert (await get(store, ["a0"], [300_000]))[0].ok.all(), "what was left behind has still been stored"


async def test_a_cancelled_call_is_waited_for_a_little_and_then_left(cluster: Cluster) -> None:
    async with store_of(cluster) as store:
        with cluster.hanging(), anyio.fail_after(30):
            with anyio.move_on_after(0.05) as scope:
                await put(store, [("a", b"1")])
            assert scope.cancelled_caught


async def test_a_client_that_hangs_is_replaced(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    async with store_of(cluster, "&hang_s=0.2") as store:
        hanging = store._link.client()
        cluster.go_on.clear()
        results = await put(store, [("a", b"1")], deadline=anyio.current_time() + 0.05)
        assert results.status.tolist() == [Status.TIMED_OUT]
        with anyio.fail_after(30):
            while store._link.replaced == 0 or store._link.state != "ready":
                assert (await store.exists(["a"])).tolist()[0] in (ABSENT, UNKNOWN)  # nothing is raised meanwhile
                await anyio.sleep(0.01)
        assert "a call has not come back for 0.2 s" in caplog.text
        assert store._link.client() is not hanging
        assert hanging in _mooncake_link._hung, "its threads and memory stay"
        cluster.go_on.set()
        await until_ok(store)
    assert not cluster.natives[0].closed


async def test_registered_memory_is_known_to_every_client(cluster: Cluster) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    async with store_of(cluster, "&hang_s=0.2") as store:
        buffers = Buffers.of(memory)
        await store.register(buffers.regions)
        with cluster.hanging():
            await put(store, [("a", b"1")], deadline=anyio.current_time() + 0.05)
            with anyio.fail_after(30):
                while store._link.replaced == 0 or store._link.state != "ready":  # noqa: ASYNC110
                    await anyio.sleep(0.01)
        address = buffers.regions[0].address
        assert all(native.spans[address] == 1 << 20 for native in cluster.natives)
        assert len(cluster.natives) == 2
    assert address not in cluster.natives[1].spans


async def test_memory_that_overlaps_is_registered_as_one(cluster: Cluster) -> None:
    """As the layers of one allocation, whose pages take turns."""
    memory = np.zeros(1 << 16, np.uint8)
    async with store_of(cluster) as store:
        client = store._link.client()
        layers = [Region.of(memory[at : at + 40_000]) for at in (20_000, 0, 10_000)]
        apart = Region.of(memory[60_000:])
        before = dict(cluster.natives[0].spans)
        await store.register([*layers, apart])
        await store.register(layers)  # again
        new = {a: n for a, n in cluster.natives[0].spans.items() if a not in before}
        assert sorted(new.values()) == [(1 << 16) - 60_000, 60_000]
        assert all(client.covers(region) for region in (*layers, apart))
        assert not client.covers(Region.of(memory)), "its end and its beginning are, but not by one"
        with pytest.raises(StoreError, match="could not be registered"):
            await store.register([Region.of(memory)])


async def test_an_exception_of_the_native_client_is_translated(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_of(cluster) as store:

        def fail(*_: object) -> list[int]:
            raise RuntimeError("vector::reserve")

        monkeypatch.setattr(cluster.natives[0], "batch_put_from_multi_buffers", fail)
        results = await put(store, [("a", b"1")])
        assert results.status.tolist() == [Status.FAILED]
        assert "RuntimeError: vector::reserve" in str(results.errors[0])


async def test_there_is_an_end_to_replacing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mooncake_link, "MOST_HUNG", 1)
    async with store_of(cluster, "&hang_s=0.2") as store:
        with cluster.hanging():
            await put(store, [("a", b"1")], deadline=anyio.current_time() + 0.05)
            with anyio.fail_after(30):
                while "must be restarted" not in store._link.trouble:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            results = await put(store, [("a", b"1")])
            assert "must be restarted" in str(results.errors[0])
        await until_ok(store)  # the call has come back, so its client is closed to make room
        assert cluster.natives[0].closed


async def test_stores_that_follow_each_other_share_the_limit_of_hanging_clients(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also clients that are left when their store is closed; what hangs once too often is a store without a client."""
    monkeypatch.setattr(_mooncake_link, "MOST_HUNG", 3)
    with anyio.fail_after(60):
        with cluster.hanging():
            for n in range(6):
                async with store_of(cluster) as store:
                    results = await put(store, [(f"a{n}", b"1")], deadline=anyio.current_time() + 1)
                    assert results.status.tolist() == [Status.TIMED_OUT if n < 3 else Status.FAILED]
                    assert n < 3 or "must be restarted" in str(results.errors[0])
                assert len(cluster.natives) == len(_mooncake_link._hung) == min(n + 1, 3)
        async with store_of(cluster) as store:
            await until_ok(store)
    assert len(_mooncake_link._hung) == 2
    assert [native.closed for native in cluster.natives].count(True) == 1


async def test_zero_copy_memory_is_waited_for(cluster: Cluster) -> None:
    """The pool's blocks: late or cancelled, the call ends when the native one has come back."""
    layers = [np.full((16, 4096), i, np.uint8) for i in range(2)]
    spec = CacheSpec((CacheGroup(Kind.FULL, 4),), 4)
    config = Config.load({"staging_bytes": 1 << 20, "batch_bytes": 1 << 16}, environ={})
    store = store_of(cluster, "&zero_copy=yes")
    layout = BlockLayout.of_arrays(*layers)
    async with KVPool(store, spec=spec, namespace=Namespace.of({"t": 1}), layouts=[layout], config=config) as pool:
        hashes = chain_hashes(list(range(16)), 4)
        out = pool.transfer(0, hashes, range(4), range(4))
        assert (await pool.save([out]))[0].ok.all()
        assert len(cluster.batches[0][2][0]) == 3, "the header and the two layers"
        assert pool.staging.peak == 0
        ended: list[Results] = []
        deadline = anyio.current_time() + 2

        async def load() -> None:
            back = pool.transfer(0, hashes, range(4), range(8, 12))
            ended.extend(await pool.load([back], deadline=deadline))

        async with anyio.create_task_group() as tasks:
            with cluster.hanging():
                tasks.start_soon(load)
                await anyio.sleep_until(deadline + 0.5)
                assert cluster.batches[-1][0] == "get", "it has begun"
                assert not ended
        assert ended[0].ok.all()
        assert all((layer[8:12] == layer[0, 0]).all() for layer in layers)


# ---- masters


async def test_no_client_is_set_up_for_a_master_that_does_not_answer(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.alive = False  # it takes connections, as a frozen process does
    async with store_of(cluster, timeout_s=0.5) as store:
        assert "does not answer" in caplog.text
        assert not cluster.setups
        assert (await store.exists(["a"])).tolist() == [UNKNOWN]
        assert (await put(store, [("a", b"1")])).status.tolist() == [Status.FAILED]
        cluster.alive = True
        await until_ok(store)


async def test_nobody_listens_there(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    async with MooncakeStore("mooncake://127.0.0.1:1?timeout_s=0.5", connect=cluster.connect):
        assert "no master at 127.0.0.1:1" in caplog.text
        await anyio.sleep(2 * _mooncake_link.FIRST_PAUSE_S)
        assert caplog.text.count("no master") == 1, "said once, however often it is tried"
    assert not cluster.setups


async def test_a_master_that_keeps_failing_is_left_alone_and_asked_by_a_sign_of_life(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpool")
    async with store_of(cluster, timeout_s=0.5) as store:
        cluster.answer["exist"] = [-900] * 3
        for _ in range(3):
            assert (await store.exists(["a"])).tolist() == [UNKNOWN]
        [told] = [r for r in caplog.records if "left alone" in r.getMessage()]
        assert told.levelno == logging.INFO, "to warn is for the pool, which hears of each failure"
        cluster.alive = False
        asked, pings = cluster.calls["exist"], cluster.pings
        with anyio.fail_after(30):
            while cluster.pings == pings:
                assert (await store.exists(["a"])).tolist() == [UNKNOWN]
                await anyio.sleep(0.02)
        assert cluster.calls["exist"] == asked, "no native call, which would block, before a sign of life"
        cluster.alive = True
        with anyio.fail_after(30):
            while (await store.exists(["a"])).tolist() != [ABSENT]:  # noqa: ASYNC110
                await anyio.sleep(0.02)


async def test_a_client_that_fails_though_its_master_lives_is_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_of(cluster) as store:
        cluster.answer["exist"] = [-900] * 100
        with anyio.fail_after(30):
            while not store._link.replaced:
                await store.exists(["a"])
                await anyio.sleep(0.02)
        cluster.answer.clear()
        await until_ok(store)
        assert len(cluster.natives) == 2


async def test_a_client_whose_transfers_go_on_failing_is_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those to an owner of memory that was started again under the same name, at another port."""
    monkeypatch.setattr(_mooncake_link, "FAILING_S", 0.3)
    async with store_of(cluster) as store:
        cluster.answer["put"] = [-800] * 1000
        assert (await put(store, [("a", b"value")])).status.tolist() == [Status.FAILED]
        assert not store._link.replaced, "once is not for ever"
        with anyio.fail_after(30):
            while not store._link.replaced:
                await put(store, [("a", b"value")])
                await anyio.sleep(0.02)
        cluster.answer.clear()
        await until_ok(store)
        assert len(cluster.natives) == 2


async def test_what_cannot_be_used_here_at_all_ends_the_start(cluster: Cluster) -> None:
    def missing(*_: object) -> _mooncake_client.Connected:
        raise ConfigError("a mooncake store needs Mooncake's client")

    with pytest.raises(ConfigError, match="needs Mooncake's client"):
        async with MooncakeStore(f"{cluster.url}?{FAST}", connect=missing):
            pass


@pytest.mark.parametrize(
    ("installed", "words"),
    [(None, "pip install 'kvpool"), (SimpleNamespace(MooncakeDistributedStore=object), "0.3.11 or newer")],
)
async def test_what_has_to_be_installed_is_said(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, installed: object, words: str
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "mooncake.store", installed)
    with pytest.raises(ConfigError, match=re.escape(words)):
        async with MooncakeStore(f"{cluster.url}?{FAST}"):
            pass


@pytest.mark.parametrize("error", [MemoryError("std::bad_alloc"), RuntimeError("no")])
async def test_an_exception_of_set_up_is_translated(cluster: Cluster, error: Exception) -> None:
    def broken(*_: object) -> _mooncake_client.Connected:
        raise error

    async with MooncakeStore(f"{cluster.url}?{FAST}", connect=broken) as store:
        results = await put(store, [("a", b"1")])
    assert results.status.tolist() == [Status.FAILED]
    assert type(error).__name__ in str(results.errors[0])


async def test_no_client_is_set_up_without_its_metadata_server(cluster: Cluster) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with store_of(cluster, f"&metadata=http://{address}/metadata") as store:
        results = await put(store, [("a", b"1")])
    assert f"no metadata server at {address}" in str(results.errors[0])
    assert not cluster.setups


# ---- closing


async def test_a_client_is_used_again_by_the_next_store(cluster: Cluster) -> None:
    real = _mooncake_client.connect
    made: list[str] = []

    def set_up(settings: object, host: str) -> _mooncake_client.Connected:
        made.append(host)
        return cluster.connect(settings, host)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_mooncake_client, "_set_up", set_up)
        for option in ("prefix=a:", "checksum=none", "threads=1"):  # not the client's concern
            async with MooncakeStore(f"{cluster.url}?{FAST}&{option}", connect=real) as store:
                await put(store, [("a", b"1")])
        async with MooncakeStore(f"{cluster.url}?{FAST}&replicas=2", connect=real):
            pass
    assert made == ["127.0.0.1"] * 2
    assert not any(native.closed or native.spans for native in cluster.natives)


async def test_a_client_that_gives_memory_is_closed(cluster: Cluster) -> None:
    async with store_of(cluster, "&segment=16MiB"):
        pass
    assert cluster.natives[0].closed


async def test_memory_is_lent_once_however_often_a_client_is_replaced(cluster: Cluster) -> None:
    async with store_of(cluster, "&segment=16MiB&hang_s=0.2") as store:
        with cluster.hanging():
            await put(store, [("a", b"1")], deadline=anyio.current_time() + 0.05)
            with anyio.fail_after(30):
                while store._link.replaced == 0 or store._link.state != "ready":  # noqa: ASYNC110
                    await anyio.sleep(0.01)
    assert [int(settings.options.segment) for settings in cluster.setups] == [16 << 20, 0]


async def test_closing_while_a_call_hangs(cluster: Cluster) -> None:
    """The caller gets StoreClosed soon, and the client is never closed: that would crash the process."""
    outcome: list[BaseException] = []

    async def work(store: MooncakeStore) -> None:
        try:
            await put(store, [("a", b"1")])
        except StoreClosed as error:
            outcome.append(error)

    with cluster.hanging(), anyio.fail_after(30):
        async with anyio.create_task_group() as tasks, store_of(cluster) as store:
            tasks.start_soon(work, store)
            await anyio.sleep(0.05)
        assert len(outcome) == 1
        assert not cluster.natives[0].closed
        assert cluster.natives[0].inside == 1


async def test_a_forked_child_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_of(cluster) as store:
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(StoreClosed, match="a forked child cannot use it"):
            await store.exists(["a"], deadline=math.inf)
        monkeypatch.undo()
        assert (await store.exists(["a"])).tolist() == [ABSENT]


async def test_no_client_is_set_up_in_a_forked_child(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's set-up hangs there, with the interpreter's lock."""
    monkeypatch.setattr(_mooncake_client, "_inherited", True)
    with pytest.raises(ConfigError, match="spawn"):
        async with MooncakeStore(f"{cluster.url}?{FAST}"):
            pass


async def test_memory_that_a_new_client_cannot_register_is_copied(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = np.zeros(1 << 19, np.uint8)
    buffers = Buffers.of(memory)
    cluster.alive = False
    async with store_of(cluster, timeout_s=0.5) as store:
        await store.register(buffers.regions)  # no client yet
        whole = FakeNative.register_buffer

        def limited(native: FakeNative, pointer: int, nbytes: int) -> int:
            return -600 if nbytes == memory.nbytes else whole(native, pointer, nbytes)

        monkeypatch.setattr(FakeNative, "register_buffer", limited)
        cluster.alive = True
        await until_ok(store)
        assert "copied once more" in caplog.text
        assert (await store.put(["big"], buffers)).ok.all()
        assert cluster.batches[-1][2] == [[memory.nbytes + 40]]
        assert len(cluster.natives) == 1
