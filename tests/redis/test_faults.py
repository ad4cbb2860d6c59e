"""What goes wrong between a store and its server: each time a clear status with the server's words, and it heals."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from kvpool.backends.redis import RedisStore
from kvpool.deadlines import running_loop
from kvpool.errors import StoreClosed, StoreError
from kvpool.memory import Buffers
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Results, Status
from kvpool.testing.stores import get, put, value_of
from tests.redis.server import RedisServer, fake_server

pytestmark = pytest.mark.anyio


def words(results: Results) -> str:
    """What is said about the failures of a batch."""
    return "; ".join(map(str, results.errors.values()))


async def check_works(store: RedisStore, key: str) -> None:
    assert (await put(store, [(key, b"value")])).status.tolist() == [Status.OK]
    assert (await store.exists([key, key + "no"])).tolist() == [PRESENT, ABSENT]
    results, memory = await get(store, [key, key + "no"], [5, 5])
    assert results.status.tolist() == [Status.OK, Status.ABSENT]
    assert memory[0] == b"value"
    assert (await store.delete([key])).status.tolist() == [Status.OK]


async def check_fails(store: RedisStore, *expected: str, key: str = "k", status: Status = Status.FAILED) -> None:
    """Every operation fails with these words."""
    with pytest.raises(StoreError) as raised:
        await store.exists([key])
    said = [str(raised.value)]
    for results in (
        (await get(store, [key, key], [5, 5]))[0],
        await put(store, [(key, b"value"), (key, b"value")]),
        await store.delete([key, key]),
    ):
        assert results.status.tolist() == [status, status]
        assert 0 in results.errors
        said.append(words(results))
    with pytest.raises(StoreError) as raised:
        await store.clear()
    said.append(str(raised.value))
    for text in said:
        assert text.startswith("redis store ")
        assert all(part in text for part in expected), text


# ---- servers that go away


async def test_a_server_that_is_not_there_yet(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    server.kill()
    async with RedisStore(server.url) as store:
        assert "Connection refused; values are computed until it can be used" in caplog.text
        await check_fails(store, f"127.0.0.1:{server.port}", "Connection refused")
        server.start()
        await check_works(store, "k")


async def test_a_restart_between_calls_fails_none(server: RedisServer) -> None:
    async with RedisStore(f"redis+unix://{server.socket}") as store:
        for n in range(3):
            await put(store, [("before", b"value")])
            server.kill()
            server.start()
            assert (await store.exists(["before"])).tolist() == [ABSENT], "the server keeps nothing"
            await check_works(store, f"{n}")


async def test_a_crash_in_the_middle(server: RedisServer) -> None:
    """Some of a batch is done, the rest fails; nothing that is said to be there is wrong."""
    keys = [f"k{i}" for i in range(64)]
    items = [(key, value_of(key, 1 << 20)) for key in keys]
    async with RedisStore(f"{server.url}?timeout=10") as store:
        source = Buffers.of(*(bytearray(value) for _, value in items))
        memory = [bytearray(1 << 20) for _ in keys]
        outcome: list[Results] = []

        async def transfer(call: Callable[[list[str], Buffers], object], buffers: Buffers) -> None:
            outcome.append(await call(keys, buffers))  # type: ignore[misc]

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(transfer, store.put, source)
                while server.raw("DBSIZE") < 20:
                    await anyio.lowlevel.checkpoint()
                server.kill()
            assert set(outcome[0].status.tolist()) == {Status.OK, Status.FAILED}
            assert "the server closed the connection" in words(outcome[0])
            server.start()
            assert (await store.put(keys, source)).ok.all()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(transfer, store.get_into, Buffers.of(*memory))
                while not memory[3][-1]:
                    await anyio.lowlevel.checkpoint()
                server.kill()
        for ok, found, (_, value) in zip(outcome[1].ok.tolist(), memory, items, strict=True):
            assert not ok or found == value
        assert 3 <= outcome[1].ok.sum() < 64


async def test_a_frozen_server(server: RedisServer) -> None:
    async with RedisStore(f"redis+unix://{server.socket}?timeout=0.2") as store:
        await put(store, [("k", b"value"), ("old", b"older")])
        with server.frozen():
            await check_fails(store, "the server was silent for 0.2 s")
            big = [(f"big{i}", bytes(1 << 20)) for i in range(4)]  # more than fits into the socket
            assert set((await put(store, big)).status.tolist()) == {Status.FAILED}
        # What was asked meanwhile is answered to nobody.
        results, memory = await get(store, ["old", "k", "no"], [5, 5, 5])
        assert results.status.tolist() == [Status.OK, Status.ABSENT, Status.ABSENT], "k was deleted when it thawed"
        assert memory[0] == b"older"
        await check_works(store, "new")


async def test_a_frozen_server_and_a_deadline(server: RedisServer) -> None:
    async with RedisStore(server.url) as store:
        await put(store, [("k", b"value")])
        with server.frozen():
            soon = anyio.current_time() + 0.1
            assert (await store.exists(["k"], deadline=soon)).tolist() == [UNKNOWN]
            for results in (
                (await get(store, ["k"], [5], deadline=soon))[0],
                await put(store, [("n", b"value")], deadline=soon),
                await store.delete(["n"], deadline=soon),
            ):
                assert results.status.tolist() == [Status.TIMED_OUT]
        assert (await get(store, ["k"], [5]))[1] == [b"value"]


BIG = [(f"big{i}", bytes([i]) * (1 << 20)) for i in range(4)]  # more than fits into a socket: waited for in a thread


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
async def test_a_frozen_server_and_large_values(server: RedisServer, tcp: bool) -> None:
    keys, sizes = [key for key, _ in BIG], [1 << 20] * len(BIG)
    async with RedisStore(f"{server.url if tcp else f'redis+unix://{server.socket}'}?timeout=3600") as store:
        await put(store, BIG)
        with server.frozen(), anyio.fail_after(30):
            for new in ("a", "b"):
                soon = anyio.current_time() + 0.1
                assert not (await get(store, keys, sizes, deadline=soon))[0].ok.any()
                late = await put(store, [(new + key, value) for key, value in BIG], deadline=soon + 0.1)
                assert set(late.status.tolist()) == {Status.TIMED_OUT}
            with anyio.move_on_after(0.1) as scope:
                await get(store, keys, sizes)
            assert scope.cancelled_caught
        results, memory = await get(store, keys, sizes)
        assert results.ok.all()
        assert memory == [value for _, value in BIG]


async def test_large_values_and_a_task_that_is_cancelled_by_asyncio_alone(server: RedisServer) -> None:
    if running_loop() != "asyncio":
        return  # trio has no other way than its scopes
    keys, sizes = [key for key, _ in BIG], [1 << 20] * len(BIG)
    async with RedisStore(f"{server.url}?timeout=3600") as store:
        await put(store, BIG)
        with server.frozen(), pytest.raises(TimeoutError):
            await asyncio.wait_for(get(store, keys, sizes), 0.1)
        assert (await get(store, keys, sizes))[0].ok.all()


async def test_closing_ends_the_wait_for_large_values(server: RedisServer) -> None:
    asked: list[str] = []

    async def ask(store: RedisStore) -> None:
        asked.append("begun")
        with pytest.raises(StoreClosed):
            await put(store, BIG)
        asked.append("ended")

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            async with RedisStore(f"{server.url}?timeout=3600") as store:
                server.signal(signal.SIGSTOP)
                tasks.start_soon(ask, store)
                await anyio.sleep(0.1)
            server.signal(signal.SIGCONT)
    assert asked == ["begun", "ended"]


async def test_large_values_go_through_a_thread_and_small_ones_do_not(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    recvmsg_into = socket.socket.recvmsg_into

    class Watched(socket.socket):
        def recvmsg_into(self, *args: Any) -> Any:
            threads.append(threading.get_ident())
            return recvmsg_into(self, *args)

    monkeypatch.setattr(socket, "socket", Watched)
    async with RedisStore(server.url) as store:
        await put(store, [*BIG, ("small", b"value")])
        threads.clear()
        await get(store, ["small"], [5])
        assert set(threads) == {threading.get_ident()}
        threads.clear()
        await get(store, [key for key, _ in BIG], [1 << 20] * len(BIG))
        assert threading.get_ident() not in threads
        assert len(threads) <= 3 * len(BIG), "a value comes in one call; what is before and behind it in others"


async def test_a_frozen_server_holds_up_neither_opening_nor_closing(server: RedisServer) -> None:
    asked: list[str] = []

    async def ask(store: RedisStore) -> None:
        asked.append("begun")
        with pytest.raises(StoreClosed):
            await store.exists(["k"])
        asked.append("ended")

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks, RedisStore(f"{server.url}?timeout=3600") as store:
            server.signal(signal.SIGSTOP)
            tasks.start_soon(ask, store)
            await anyio.wait_all_tasks_blocked()
            with anyio.move_on_after(0.1):
                await RedisStore(f"{server.url}?timeout=3600").__aenter__()
                raise AssertionError("a frozen server answered")
        assert asked == ["begun", "ended"]


# ---- servers that refuse


async def test_out_of_memory(server: RedisServer) -> None:
    raw = server.raw
    raw("CONFIG", "SET", "maxmemory-policy", "noeviction")
    items = [(f"k{i}", bytes(100_000)) for i in range(64)]
    async with RedisStore(server.url) as store:
        await put(store, items[:1])
        raw("CONFIG", "SET", "maxmemory", 1)
        results = await put(store, items)
        assert set(results.status[1:].tolist()) == {Status.REJECTED}
        assert words(results).startswith(f"redis store 127.0.0.1:{server.port}: OOM command")
        assert (await store.exists(["k0", "k1"])).tolist() == [PRESENT, ABSENT]
        assert (await get(store, ["k0"], [100_000]))[0].ok.all(), "what is there can still be read"
        assert (await store.delete(["k0"])).ok.all()
        raw("CONFIG", "SET", "maxmemory", 0)
        assert (await put(store, items)).ok.all()


async def test_a_server_that_evicts(server: RedisServer) -> None:
    """OK is no proof that a value stays: what is gone is absent, and nothing else is different."""
    raw = server.raw
    raw("CONFIG", "SET", "maxmemory", 10_000_000)
    raw("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    items = [(f"k{i}", value_of(f"k{i}", 200_000)) for i in range(100)]
    keys = [key for key, _ in items]
    async with RedisStore(server.url) as store:
        assert (await put(store, items)).ok.all()
        present = await store.exists(keys)
        assert set(present.tolist()) == {ABSENT, PRESENT}
        results, memory = await get(store, keys, [200_000] * 100)
        assert set(results.status.tolist()) == {Status.OK, Status.ABSENT}
        assert all(m == v for m, (_, v), ok in zip(memory, items, results.ok.tolist(), strict=True) if ok)


async def test_a_lookup_refreshes_what_it_finds(server: RedisServer) -> None:
    server.raw("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")  # counts uses, so no test has to wait for a clock
    server.raw("CONFIG", "SET", "lfu-log-factor", 0)
    async with RedisStore(server.url) as store:
        await put(store, [("k", b"value")])
        before = server.raw("OBJECT", "FREQ", "kvpool:k")
        for _ in range(3):
            await store.exists(["k"])
        assert server.raw("OBJECT", "FREQ", "kvpool:k") >= before + 3


async def test_a_server_that_is_loading() -> None:
    ready = threading.Event()

    def answer(connection: socket.socket) -> None:
        while data := connection.recv(1 << 16):
            commands = data.count(b"\r\n*") + 1
            ok = b":0\r\n" if b"TOUCH" in data else b"$-1\r\n"
            connection.sendall((ok if ready.is_set() else b"-LOADING Redis is loading the data\r\n") * commands)

    with fake_server(answer) as url:
        async with RedisStore(url) as store:
            await check_fails(store, "LOADING Redis is loading the data")
            ready.set()
            assert (await store.exists(["k"])).tolist() == [ABSENT]
            assert (await get(store, ["k"], [5]))[0].status.tolist() == [Status.ABSENT]


async def test_no_key_is_a_failure_of_that_key(server: RedisServer) -> None:
    strange = ["\udcff", "a b", "\ud800", "", "x" * 513]
    async with RedisStore(server.url) as store:
        results = await put(store, [("good", b"value"), *((key, b"value") for key in strange)])
        assert results.status.tolist() == [Status.OK] + [Status.FAILED] * 5
        assert "'a b' is no key" in words(results)
        assert (await store.exists([*strange, "good"])).tolist() == [UNKNOWN] * 5 + [PRESENT]
        assert (await store.exists(strange)).tolist() == [UNKNOWN] * 5
        found, memory = await get(store, [*strange, "good"], [5] * 6)
        assert (found.status.tolist(), memory[5]) == ([Status.FAILED] * 5 + [Status.OK], b"value")
        assert (await store.delete([*strange, "good"])).status.tolist() == [Status.FAILED] * 5 + [Status.OK]
        server.raw("SET", b"kvpool:not a key \xff", "x")
        assert await store.clear() == 1, "what others put under the prefix goes too"


async def test_access_rights(server: RedisServer) -> None:
    """The rights that docs/redis.md names are enough; without them the server's words are passed on."""
    raw = server.raw
    url = f"redis://kv:secret@127.0.0.1:{server.port}?timeout=2"
    async with RedisStore(url) as store:
        await check_fails(store, "WRONGPASS")
        rights = ["+get", "+set", "+touch", "+unlink", "+scan"]
        raw("ACL", "SETUSER", "kv", "on", ">secret", "~kvpool:*", *rights)
        await check_works(store, "k")
        await put(store, [("x", b"value")])
        assert await store.clear() == 1
        raw("ACL", "SETUSER", "kv", "-set")
        results = await put(store, [("k", b"value")] * 3)
        assert results.status.tolist() == [Status.FAILED] * 3
        assert "NOPERM" in words(results)
        assert "set" in words(results).lower()
        raw("ACL", "SETUSER", "kv", "+set", "-touch")
        with pytest.raises(StoreError, match=r"NOPERM.*touch"):
            await store.exists(["k"])
        raw("ACL", "SETUSER", "kv", "+touch", "resetkeys", "~other:*")
        assert (await get(store, ["k"], [5]))[0].status.tolist() == [Status.FAILED]
        raw("ACL", "DELUSER", "kv")
        await check_fails(store, "WRONGPASS")


async def test_passwords_without_users(server: RedisServer) -> None:
    server.raw("CONFIG", "SET", "requirepass", "pass word")
    async with RedisStore(server.url) as store:
        await check_fails(store, "NOAUTH")
    async with RedisStore(f"redis://:pass%20word@127.0.0.1:{server.port}/3") as store:
        await check_works(store, "k")
        await put(store, [("k", b"value")])
        assert b"keys=1" in server.raw("INFO", "keyspace").partition(b"db3:")[2]
        server.raw("CONFIG", "SET", "requirepass", "")


async def test_more_clients_than_the_server_takes(server: RedisServer) -> None:
    server.raw("CONFIG", "SET", "maxclients", 1)
    async with RedisStore(server.url) as store:
        await check_fails(store, "max number of clients")
        server.raw("CONFIG", "SET", "maxclients", 100)
        await check_works(store, "k")


async def test_a_value_larger_than_the_server_takes(server: RedisServer) -> None:
    server.raw("CONFIG", "SET", "proto-max-bulk-len", 1 << 20)
    items = [("small", b"value"), ("large", bytes(8 << 20)), ("later", b"value")]
    async with RedisStore(server.url) as store:
        results = await put(store, items)
        assert results.status.tolist()[1:] == [Status.FAILED] * 2
        assert "invalid bulk length" in words(results)
    async with RedisStore(f"{server.url}?max_value=1MB") as store:
        results = await put(store, items)
        assert results.status.tolist() == [Status.OK, Status.REJECTED, Status.OK]
        assert "large: 8388608 bytes are more than max_value=1000000" in words(results)


async def test_any_number_of_keys_is_one_round_trip() -> None:
    """The server answers nothing before it has been asked about all keys."""
    keys = [f"k{i}" for i in range(5000)]

    def answer(connection: socket.socket) -> None:
        asked = 0
        while asked < len(keys) and (data := connection.recv(1 << 20)):
            if b"INFO" in data:
                connection.sendall(b"$-1\r\n")
                continue
            asked += data.count(b"*")
        connection.sendall(b":1\r\n:0\r\n" * (asked // 2))
        connection.recv(1)

    with fake_server(answer) as url:
        async with RedisStore(f"{url}?timeout=2") as store:
            assert (await store.exists(keys)).tolist() == [PRESENT, ABSENT] * 2500


async def test_values_expire(server: RedisServer) -> None:
    async with RedisStore(f"{server.url}?ttl=100.5") as store:
        assert store.capabilities.ttl
        await put(store, [("k", b"value")])
        assert 100_000 < server.raw("PTTL", "kvpool:k") <= 100_500
        server.raw("PEXPIRE", "kvpool:k", 1)
        while server.raw("EXISTS", "kvpool:k"):
            await anyio.lowlevel.checkpoint()
        await check_works(store, "k")
    async with RedisStore(server.url) as store:
        assert not store.capabilities.ttl
        await put(store, [("k", b"value")])
        assert server.raw("PTTL", "kvpool:k") == -1


async def test_connections_are_bounded(server: RedisServer) -> None:
    async with RedisStore(f"{server.url}?connections=3") as store:
        most = 0

        async def work(n: int) -> None:
            nonlocal most
            await put(store, [(f"{n}/{i}", bytes(10_000)) for i in range(20)])
            most = max(most, server.raw("CLIENT", "LIST").count(b" addr=127"))
            assert (await store.exists([f"{n}/{i}" for i in range(20)])).all()

        async with anyio.create_task_group() as tasks:
            for n in range(30):
                tasks.start_soon(work, n)
        assert most == 3


async def test_a_lookup_does_not_queue_behind_saves(server: RedisServer) -> None:
    async with RedisStore(f"{server.url}?connections=3") as store:
        server.raw("CLIENT", "PAUSE", 60_000, "WRITE")
        async with anyio.create_task_group() as tasks:
            for n in range(10):
                tasks.start_soon(put, store, [(f"k{n}", b"value")])
            await anyio.sleep(0.05)
            with anyio.fail_after(20):
                assert (await store.exists(["k1"])).tolist() == [ABSENT]
            server.raw("CLIENT", "UNPAUSE")
        assert (await store.exists([f"k{n}" for n in range(10)])).all()


# ---- values that are not what was stored


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda raw: raw("LPUSH", "kvpool:k", "x"), "WRONGTYPE"),
        (lambda raw: raw("SET", "kvpool:k", ""), "cut off after 0 bytes"),
        (lambda raw: raw("SET", "kvpool:k", "x" * 39), "cut off after 39 bytes"),
        (lambda raw: raw("SET", "kvpool:k", "x" * 45), "not a value of this format"),
        (lambda raw: raw("SET", "kvpool:k", "x" * 300_000), "not a value of this format"),
        (lambda raw: raw("SET", "kvpool:k", raw("GET", "kvpool:o")), "the value of another key"),
        (lambda raw: raw("APPEND", "kvpool:k", "x"), "has 46 bytes instead of 45"),
        (lambda raw: raw("SETRANGE", "kvpool:k", 44, "X"), "the checksum does not match"),
    ],
)
async def test_what_is_damaged_is_removed(server: RedisServer, spoil: Callable[[object], object], said: str) -> None:
    async with RedisStore(f"redis+unix://{server.socket}") as store:
        await put(store, [("k", b"value"), ("o", b"other")])
        if said == "WRONGTYPE":
            server.raw("DEL", "kvpool:k")
        spoil(server.raw)
        results, memory = await get(store, ["o", "k", "o"], [5, 5, 5])
        assert results.status.tolist() == [Status.OK, Status.CORRUPT, Status.OK]
        assert memory[2] == b"other"
        assert said in words(results)
        assert "k: " in words(results)
        assert server.raw("EXISTS", "kvpool:k") == 0
        await check_works(store, "k")


# ---- what is no Redis server


@contextmanager
def answering(text: bytes) -> Iterator[str]:
    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(text)

    with fake_server(answer) as url:
        yield url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100), "not a Redis server: it answered b'HTTP/1.1 400"),
        (b"x" * 200_000, "a line without an end"),
        (b"$99999999999999\r\n", ""),
        (b"$-2\r\n", "not a Redis server"),
        (b"$x\r\n", "not a Redis server"),
        (b"*1000000000\r\n", ""),
        (b"*1\r\n" * 100_000, "not a Redis server"),
        (b":45\r\n" + bytes(100), "not a Redis server"),
        (b":", "closed the connection"),
        (b"", "closed the connection"),
        (b"\x15\x03\x01\x00\x02\x02\x50", "the server seems to speak TLS: the URL must begin with rediss "),
    ],
)
async def test_strange_answers(text: bytes, said: str) -> None:
    with answering(text) as url, anyio.fail_after(20):
        async with RedisStore(url) as store:
            await check_fails(store, said)


@pytest.mark.parametrize("place", ["redis://" + "x" * 70, "redis://nowhere.invalid"])
async def test_addresses_that_cannot_be(place: str) -> None:
    async with RedisStore(f"{place}?timeout=20") as store:
        await check_fails(store, "redis store ")


async def test_secrets_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def echo(connection: socket.socket) -> None:
        said = connection.recv(1 << 16).split(b"\r\n")[4::2]
        connection.sendall(b"-ERR unknown command `AUTH`, with args beginning with: " + b", ".join(said) + b"\r\n")

    with fake_server(echo) as url:
        store = RedisStore(url.replace("://", "://anna:hush-hush@"))
        async with store:
            results = await put(store, [("k", b"value")])
        shown = repr(store) + repr(vars(store)) + words(results) + caplog.text
        assert "unknown command" in words(results)
        assert "hush" not in shown
