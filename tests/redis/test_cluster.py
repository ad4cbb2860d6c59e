"""In a cluster: every key on the server that has its slot, and slots and servers that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import ClassVar

import anyio
import pytest

from kvpool.backends._redis_servers import slot_of
from kvpool.backends.redis import RedisStore
from kvpool.errors import StoreError
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Status, Store
from kvpool.testing.stores import Damage, get, put, value_of
from tests.redis.server import RedisServer
from tests.redis.test_conformance import HEADER, RedisConformance, stored_form
from tests.redis.topologies import RedisCluster, begin_move, finish_move, move_slot, redis_cluster, wait_until

pytestmark = pytest.mark.anyio

KEYS = [f"k{i}" for i in range(300)]
ITEMS = [(key, value_of(key, 1000)) for key in KEYS]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Tests may move its slots and replace its servers, but leave a whole cluster behind."""
    with redis_cluster() as cluster:
        yield cluster


class TestCluster(RedisConformance):
    open_close_cycles: ClassVar[int] = 20
    examples: ClassVar[int] = 2
    cluster: ClassVar[RedisCluster]

    @pytest.fixture(autouse=True)
    def _servers(self, cluster: RedisCluster) -> None:
        type(self).cluster = cluster

    @contextmanager
    def place(self) -> Iterator[str]:
        type(self).places += 1
        prefix = f"place{self.places}:"
        yield prefix
        for node in self.cluster.nodes:
            for name in node.raw("KEYS", prefix + "*"):
                node.raw("DEL", name)

    places: ClassVar[int] = 0

    def store(self, place: str) -> Store:
        return RedisStore(f"{self.cluster.url}?prefix={place}&max_value=16MiB")

    def raw_read(self, place: str, key: str) -> bytes | None:
        found = self.cluster.owner(place + key).settled("GET", place + key)
        return None if found is None else found[HEADER:]

    def raw_write(self, place: str, key: str, value: bytes) -> None:
        self.cluster.owner(place + key).raw("SET", place + key, stored_form(key, value))

    def raw_damage(self, place: str, key: str, damage: Damage) -> None:
        name, other = place + key, place + key[:-1] + "0"
        raw = self.cluster.owner(name).raw
        raw("SET", name, self.spoilt(damage, raw("GET", name), self.cluster.owner(other).raw("GET", other)))


def test_slots_are_those_of_the_server(cluster: RedisCluster) -> None:
    names = ["", "a", "kvpool:ns/0.0/ab", "{a}b", "{}a", "{a", "}{a}", "a{b}{c}", "{{a}}", "x" * 600]
    assert [slot_of(n.encode()) for n in names] == [cluster.nodes[0].raw("CLUSTER", "KEYSLOT", n) for n in names]


async def test_keys_are_spread_and_batches_keep_their_order(cluster: RedisCluster) -> None:
    async with RedisStore(f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.nodes[1].port}") as store:
        assert (await put(store, ITEMS[::2])).ok.all()
        assert min(cluster.everywhere("DBSIZE")) >= 30
        assert (await store.exists(KEYS)).tolist() == [PRESENT, ABSENT] * 150
        results, memory = await get(store, KEYS, [1000] * 300)
        assert results.status.tolist() == [Status.OK, Status.ABSENT] * 150
        assert memory[::2] == [value for _, value in ITEMS[::2]]
        assert sorted([key async for key in store.scan("k1")]) == sorted(k for k in KEYS[::2] if k.startswith("k1"))
        assert await store.clear() == 150
        assert cluster.everywhere("DBSIZE") == [0] * len(cluster.nodes)


async def test_slots_that_have_moved(cluster: RedisCluster) -> None:
    async with RedisStore(cluster.url) as store:
        await put(store, ITEMS)
        for key in KEYS[:3]:
            source = cluster.owner(f"kvpool:{key}")
            target = next(node for node in cluster.nodes if node is not source)
            move_slot(cluster, slot_of(b"kvpool:" + key.encode()), source, target)
            results, memory = await get(store, KEYS, [1000] * 300)
            assert results.ok.all()
            assert memory == [value for _, value in ITEMS]
            assert (await store.exists(KEYS)).all()
        assert (await store.delete(KEYS)).ok.all()


async def test_a_slot_on_the_move(cluster: RedisCluster) -> None:
    """Its keys are misses meanwhile, with the server's words; all others are as ever."""
    async with RedisStore(cluster.url) as store:
        await put(store, ITEMS)
        key = KEYS[7]
        slot = slot_of(b"kvpool:" + key.encode())
        others = [k for k in KEYS if slot_of(b"kvpool:" + k.encode()) != slot]
        source = cluster.owner(f"kvpool:{key}")
        target = next(node for node in cluster.nodes if node is not source)
        source.raw("DEL", f"kvpool:{key}")
        begin_move(slot, source, target)
        results, _ = await get(store, [key, *others], [1000] * (1 + len(others)))
        assert results.status.tolist() == [Status.FAILED] + [Status.OK] * len(others)
        assert f"ASK {slot} 127.0.0.1:{target.port}" in str(results.errors[0])
        assert (await store.exists([key, *others])).tolist() == [UNKNOWN] + [PRESENT] * len(others)
        assert (await put(store, [(key, b"value")])).status.tolist() == [Status.FAILED]
        finish_move(cluster, slot, source, target)
        assert (await put(store, [(key, b"value")])).status.tolist() == [Status.OK]
        assert (await get(store, [key], [5]))[1] == [b"value"]
        await store.clear()


async def test_a_server_that_dies_and_is_replaced(cluster: RedisCluster) -> None:
    victim, *_ = cluster.nodes
    replica = cluster.stack.enter_context(
        RedisServer(cluster_enabled="yes", cluster_node_timeout=5000, repl_diskless_sync_delay=0)
    )
    replica.raw("CLUSTER", "MEET", "127.0.0.1", victim.port, victim.port + 10_000)
    victim_id = victim.raw("CLUSTER", "MYID")
    wait_until(lambda: victim_id in replica.raw("CLUSTER", "NODES"), "the replica knows its master")
    replica.raw("CLUSTER", "REPLICATE", victim_id)
    wait_until(lambda: b"master_link_status:up" in replica.raw("INFO", "replication"), "the replica follows")
    wait_until(lambda: all(b" slave " in nodes for nodes in cluster.everywhere("CLUSTER", "NODES")), "all know it")
    # It hears of the others from its master alone: if that dies first, it serves its slots and never joins them.
    wait_until(lambda: b"cluster_state:ok" in replica.raw("CLUSTER", "INFO"), "it knows all who have slots")
    async with RedisStore(f"{cluster.url}?timeout=2") as store:
        await put(store, ITEMS)
        wait_until(lambda: replica.raw("DBSIZE") == victim.raw("DBSIZE"), "the replica has everything")
        gone = [cluster.owner(f"kvpool:{key}") is victim for key in KEYS]
        victim.kill()
        cluster.nodes[:1] = []
        results, _ = await get(store, KEYS, [1000] * 300)
        assert results.status.tolist() == [Status.FAILED if g else Status.OK for g in gone]
        assert (await store.exists(KEYS)).tolist() == [UNKNOWN if g else PRESENT for g in gone]
        replica.raw("CLUSTER", "FAILOVER", "TAKEOVER")
        cluster.nodes.append(replica)
        with anyio.fail_after(30):
            while not (results := (await get(store, KEYS, [1000] * 300))[0]).ok.all():
                assert set(results.status.tolist()) <= {Status.OK, Status.FAILED}
                await anyio.sleep(0.01)
        assert (await store.exists(KEYS)).all()
        assert await store.clear() == 300
    cluster.everywhere("CLUSTER", "FORGET", victim_id)
    cluster.wait()


async def test_the_wrong_kind_of_url(cluster: RedisCluster, shared_server: RedisServer) -> None:
    async with RedisStore(cluster.nodes[0].url) as store:
        results = await put(store, ITEMS)
        assert set(results.status.tolist()) == {Status.OK, Status.FAILED}
        assert "the URL must begin with redis+cluster://" in str(next(iter(results.errors.values())))
    async with RedisStore(shared_server.url.replace("redis:", "redis+cluster:")) as store:
        with pytest.raises(StoreError, match="cluster support disabled"):
            await store.exists(["k"])
    async with RedisStore(cluster.url) as store:
        assert await store.clear() > 0


async def test_a_cluster_that_is_not_formed() -> None:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(cluster_enabled="yes"))
        async with RedisStore(server.url.replace("redis:", "redis+cluster:")) as store:
            results, _ = await get(store, ["k"], [1])
            assert results.status.tolist() == [Status.FAILED]
            assert "CLUSTERDOWN Hash slot not served" in str(results.errors[0])
