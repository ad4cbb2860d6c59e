"""Behind Sentinels: the master is found, a failover costs some misses, and everything heals by itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import ClassVar

import pytest

from kvpool.backends.redis import RedisStore
from kvpool.errors import StoreError
from kvpool.store import Status, Store
from kvpool.testing.stores import get, put
from tests.redis.server import fake_server
from tests.redis.test_conformance import RedisConformance
from tests.redis.topologies import Watched

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """For tests that leave its servers where they are."""
    with ExitStack() as stack:
        yield Watched(stack)


@pytest.fixture
def own_watched() -> Iterator[Watched]:
    """For a test that makes them change places."""
    with ExitStack() as stack:
        yield Watched(stack)


class TestSentinel(RedisConformance):
    open_close_cycles: ClassVar[int] = 20
    examples: ClassVar[int] = 2
    url: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _servers(self, watched: Watched) -> None:
        type(self).server, type(self).url = watched.master, watched.url

    def store(self, place: str) -> Store:
        return RedisStore(f"{self.url}?prefix={place}&max_value=16MiB")


async def test_servers_that_change_places(own_watched: Watched) -> None:
    async with RedisStore(own_watched.url) as store:
        await put(store, [("before", b"value")])
        own_watched.wait_for_replica()
        own_watched.sentinel.raw("SENTINEL", "FAILOVER", "main")
        own_watched.wait_for_failover()
        # The Sentinel would do so some seconds later, and hang up on the store, too.
        own_watched.replica.raw("REPLICAOF", "127.0.0.1", own_watched.master.port)
        results = await put(store, [("after", b"value")])
        assert results.status.tolist() == [Status.FAILED]
        assert "READONLY" in str(results.errors[0])
        assert (await put(store, [("after", b"value")])).status.tolist() == [Status.OK]
        assert own_watched.master.raw("EXISTS", "kvpool:after") == 1
        assert (await get(store, ["before"], [5]))[1] == [b"value"]
        await store.clear()


async def test_a_master_that_dies(own_watched: Watched) -> None:
    async with RedisStore(own_watched.url) as store:
        await put(store, [("before", b"value")])
        own_watched.wait_for_replica()
        own_watched.master.kill()
        results = await put(store, [("k", b"value")])
        assert results.status.tolist() == [Status.FAILED]
        assert "main of 127.0.0.1:1,127.0.0.1:" in str(results.errors[0])
        assert "Connection refused" in str(results.errors[0])
        own_watched.wait_for_failover()
        assert (await put(store, [("k", b"value")])).status.tolist() == [Status.OK]
        assert own_watched.master.raw("EXISTS", "kvpool:k") == 1
        assert (await get(store, ["before"], [5]))[1] == [b"value"]


async def check_says(url: str, said: str) -> None:
    async with RedisStore(url) as store:
        with pytest.raises(StoreError, match=said):
            await store.exists(["k"])
        results = await put(store, [("k", b"value")])
        assert results.status.tolist() == [Status.FAILED]


async def test_no_sentinel_helps(watched: Watched) -> None:
    here = f"127.0.0.1:{watched.sentinel.port}"
    await check_says(f"redis+sentinel://{here}/other", f"no Sentinel names the master: {here}: knows no 'other'")
    await check_says("redis+sentinel://127.0.0.1:1,127.0.0.1:2/main", "127.0.0.1:1: Connection refused; 127.0.0.1:2: ")
    await check_says(f"redis+sentinel://127.0.0.1:{watched.master.port}/main", "unknown command .SENTINEL")


async def test_sentinels_that_are_behind_the_times(watched: Watched) -> None:
    port = str(watched.replica.port).encode()

    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%b\r\n" % (len(port), port))

    with fake_server(answer) as url:
        await check_says(url.replace("redis", "redis+sentinel") + "/main", f"{watched.replica.port}.* is not a master")


async def test_sentinels_with_a_password(watched: Watched) -> None:
    watched.sentinel.raw("ACL", "SETUSER", "kv", "on", ">se cret", "+sentinel")
    watched.sentinel.raw("ACL", "SETUSER", "default", "resetpass", ">other")
    try:
        await check_says(watched.url, "NOAUTH")
        async with RedisStore(f"{watched.url}?sentinel_username=kv&sentinel_password=se%20cret") as store:
            assert (await put(store, [("k", b"value")])).ok.all()
        async with RedisStore(f"{watched.url}?sentinel_password=other&db=2") as store:
            assert (await put(store, [("k", b"value")])).nbytes.tolist() == [5]
            assert await store.clear() == 1
    finally:
        watched.sentinel.raw("ACL", "SETUSER", "default", "nopass")
