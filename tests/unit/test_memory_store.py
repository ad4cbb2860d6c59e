"""MemoryStore beyond the contract: capacity, sharing by name, turns for the loop."""

from __future__ import annotations

import threading

import anyio
import anyio.lowlevel
import pytest

from kvpool.backends import memory
from kvpool.backends.memory import MemoryStore
from kvpool.errors import ConfigError
from kvpool.memory import Buffers
from kvpool.registry import create_store
from kvpool.store import Status
from kvpool.testing.stores import get, put

pytestmark = pytest.mark.anyio


async def keys_in(store: MemoryStore) -> set[str]:
    return {key async for key in store.scan()}


async def test_the_least_recently_used_makes_room() -> None:
    async with MemoryStore(capacity=400) as store:
        await put(store, [(k, bytes(100)) for k in "abcd"])
        await get(store, ["a"], [100])  # a load is a use
        await store.exists(["b"])  # and so is a probe: a load follows it
        await put(store, [("c", bytes(100))])  # and so is a put of what is there
        assert (await put(store, [("e", bytes(150))])).ok.all()
        assert await keys_in(store) == {"b", "c", "e"}, "d and a were used longest ago"


async def test_what_can_never_fit_is_rejected_and_evicts_nothing() -> None:
    async with MemoryStore(capacity=100) as store:
        results = await put(store, [("a", bytes(60)), ("big", bytes(101)), ("b", bytes(40))])
        assert results.status.tolist() == [Status.OK, Status.REJECTED, Status.OK]
        assert await keys_in(store) == {"a", "b"}
        assert (await put(store, [("full", bytes(100))])).ok.all()
        assert await keys_in(store) == {"full"}


async def test_capacity_is_given_back() -> None:
    async with MemoryStore(capacity=100) as store:
        for round_ in range(5):
            await put(store, [(f"{round_}", bytes(100))])
            await store.delete([f"{round_}"])
        await put(store, [("a", bytes(50)), ("b", bytes(50))])
        assert await store.clear("a") == 1
        await put(store, [("c", bytes(50))])
        assert await keys_in(store) == {"b", "c"}


async def test_one_name_is_one_pool_while_any_store_is_open() -> None:
    async with create_store("memory://shared") as one:
        async with create_store("memory://shared") as two, create_store("memory://other") as other:
            await put(one, [("k", b"v")])
            assert (await get(two, ["k"], [1]))[1] == [b"v"]
            assert (await other.exists(["k"])).tolist() == [0]
        assert (await one.exists(["k"])).tolist() == [1]
    assert "shared" not in memory._shared
    async with create_store("memory://shared") as again:
        assert (await again.exists(["k"])).tolist() == [0]


async def test_without_a_name_it_is_private() -> None:
    async with create_store("memory://") as one, create_store("memory://") as two:
        await put(one, [("k", b"v")])
        assert (await two.exists(["k"])).tolist() == [0]


async def test_one_name_with_two_capacities_is_refused() -> None:
    async with create_store("memory://bounded?capacity=1MiB") as store:
        with pytest.raises(ConfigError, match=r"open with capacity=1048576.*opened with capacity=2097152"):
            async with create_store("memory://bounded?capacity=2MiB"):
                pass
        assert (await put(store, [("k", b"v")])).ok.all()
    assert "bounded" not in memory._shared


@pytest.mark.parametrize(
    "url",
    ["memory://h:1", "memory://u@h", "memory:///path", "memory://?capacity=0", "memory://?capacty=1", "memory://?x=1"],
)
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        create_store(url)


async def test_bytes_are_copied() -> None:
    async with MemoryStore() as store:
        source = bytearray(b"before")
        await store.put(["k"], Buffers.of(source))
        source[:] = b"after!"
        target = bytearray(6)
        await store.get_into(["k"], Buffers.of(target))
        assert target == b"before"
        target[:] = b"broken"
        assert (await get(store, ["k"], [6]))[1] == [b"before"]


async def test_other_tasks_get_turns_while_much_is_moved() -> None:
    size, turns = 16 << 20, 0  # trio takes tasks in any order: one turn more or less is no news
    async with MemoryStore() as store, anyio.create_task_group() as tasks:

        async def count() -> None:
            nonlocal turns
            while True:
                await anyio.lowlevel.checkpoint()
                turns += 1

        tasks.start_soon(count)
        await put(store, [("k", bytes(size))])
        assert turns >= 6
        turns = 0
        await get(store, ["k"], [size])
        assert turns >= 6, "a turn moves 2 MiB or so"
        turns = 0
        await store.exists([str(i) for i in range(10_000)])
        assert turns >= 9
        many = [str(i) for i in range(16)]
        await put(store, [(key, bytes(1 << 20)) for key in many])
        turns = 0
        assert (await store.delete(many)).ok.all()
        assert turns >= 6, "pages are given back"
        tasks.cancel_scope.cancel()


def test_event_loops_in_several_threads_share_a_name() -> None:
    async def work(n: int) -> None:
        async with MemoryStore(name="threads", capacity=10_000) as store:
            for i in range(300):
                keys = [f"{(i + j) % 40}" for j in range(5)]
                await put(store, [(k, k.encode() * 100) for k in keys])
                results, found = await get(store, keys, [len(k) * 100 for k in keys])
                assert all(found[j] == keys[j].encode() * 100 for j in range(5) if results.ok[j])
                await store.delete(keys[:1])

    errors: list[BaseException] = []

    def run(n: int) -> None:
        try:
            anyio.run(work, n, backend=["asyncio", "trio"][n % 2])
        except BaseException as error:
            errors.append(error)

    async def main() -> None:
        async with MemoryStore(name="threads", capacity=10_000) as store:
            threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                await anyio.to_thread.run_sync(thread.join)
            pool = memory._shared["threads"]
            assert pool._nbytes == sum(v.nbytes for v in pool._values.values()) <= 10_000
            assert store is not None

    anyio.run(main)
    assert errors == []
