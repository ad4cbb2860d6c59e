"""The Redis store beside redis-py, coredis and a bare blocking socket, on a real server that this script starts.

Run from the checkout: ``.venv/bin/python benchmarks/redis_store.py [--unix]``. It needs both clients: ``pip install
'redis[hiredis]' coredis``. Every way moves the same values into (or out of) the caller's memory. They take turns, so
that other load on the machine meets all of them. kvpool's figures include what only it does: checksums, digests of the
keys, put if absent.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.backends._redis_link import Address
from kvpool.backends._redis_wire import Access, Connection, command
from kvpool.backends.redis import RedisStore
from kvpool.memory import Buffers
from tests.redis.server import RedisServer

try:  # neither is needed by kvpool, so no checker should ask for them
    coredis: Any = importlib.import_module("coredis")
    redis_py: Any = importlib.import_module("redis.asyncio")
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install 'redis[hiredis]' coredis")

VALUES, VALUE_BYTES = 16, 1 << 20

#: What a lookup by script would be: all keys declared, probed 64 at a time, halved where some are there and some not.
SCRIPT = """
local found, probe = {}
probe = function(i, j)
  local n = redis.call('TOUCH', unpack(KEYS, i, j))
  if n == 0 or n == j - i + 1 then for k = i, j do found[k] = n == 0 and '0' or '1' end
  else local m = math.floor((i + j) / 2) probe(i, m) probe(m + 1, j) end
end
for i = 1, #KEYS, 64 do probe(i, math.min(i + 63, #KEYS)) end
return table.concat(found)
"""

Way = Callable[[], Awaitable[object]]


async def measure(rounds: int, before: Callable[[], object], **ways: Way) -> None:
    """Run the ways in turn and print for each its wall time and this process's CPU time, in milliseconds."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for i in range(rounds + 2):
        for name, way in ways.items():
            before()
            start, cpu = time.perf_counter(), cpu_time()
            await way()
            if i >= 2:  # warm
                times[name].append(((time.perf_counter() - start) * 1000, (cpu_time() - cpu) * 1000))
    for name, taken in times.items():
        wall = [t[0] for t in taken]
        rate = f"{VALUES * VALUE_BYTES / 1000 / min(wall):6.0f} MB/s" if "exists" not in name else ""
        print(f"  {name:28} best {min(wall):7.2f} ms  median {median(wall):7.2f} ms  "
              f"CPU {median(t[1] for t in taken):6.2f} ms  {rate}")  # fmt: skip


def cpu_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def values(server: RedisServer, rounds: int, unix: bool) -> None:
    keys = [f"ns/0.0/{os.urandom(32).hex()}" for _ in range(VALUES)]
    source = [bytearray(os.urandom(VALUE_BYTES)) for _ in keys]
    target = [bytearray(VALUE_BYTES) for _ in keys]
    names = [f"kvpool:{key}" for key in keys]
    path, port = str(server.socket), server.port
    python = redis_py.Redis(unix_socket_path=path) if unix else redis_py.Redis(port=port)
    core = coredis.Redis(unix_socket_path=path) if unix else coredis.Redis(port=port)
    raw = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    raw.connect(path if unix else ("127.0.0.1", port))

    async def kvpool_put() -> None:
        assert (await store.put(keys, Buffers.of(*source))).nbytes.all()

    async def kvpool_get() -> None:
        assert (await store.get_into(keys, Buffers.of(*target))).ok.all()

    async def python_put() -> None:
        pipe = python.pipeline(transaction=False)
        for name, value in zip(names, source, strict=True):
            pipe.set(name, bytes(40) + value, nx=True)
        assert all(await pipe.execute())

    async def python_get() -> None:
        pipe = python.pipeline(transaction=False)
        for name in names:
            pipe.get(name)
        for memory, value in zip(target, await pipe.execute(), strict=True):
            memory[:] = memoryview(value)[40:]

    async def core_put() -> None:
        async with core.pipeline(transaction=False) as pipe:
            for name, value in zip(names, source, strict=True):
                pipe.set(name, bytes(40) + value)

    async def core_get() -> None:
        async with core.pipeline(transaction=False) as pipe:
            found = [pipe.get(name) for name in names]
        for memory, value in zip(target, found, strict=True):
            memory[:] = memoryview(await value)[40:]

    async def raw_put() -> None:
        for name, value in zip(names, source, strict=True):
            raw.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name.encode(), VALUE_BYTES + 40))
            raw.sendall(bytes(40))
            raw.sendall(value)
            raw.sendall(b"\r\n")
        left = 5 * VALUES
        while left:
            left -= len(raw.recv(left))

    async def raw_get() -> None:
        raw.sendall(b"".join(command("GET", name) for name in names))
        head = memoryview(bytearray(len(f"${VALUE_BYTES + 40}\r\n") + 40))
        for memory in target:
            for part in (head, memoryview(memory), memoryview(bytearray(2))):
                while part:
                    part = part[raw.recv_into(part) :]

    async with RedisStore(url(server, unix)) as store, core:
        print(f"put {VALUES} x 1 MiB")
        puts: dict[str, Way] = {"kvpool": kvpool_put, "redis-py": python_put, "coredis": core_put, "bare": raw_put}
        await measure(rounds, lambda: server.raw("FLUSHALL"), **puts)
        await kvpool_get_check(store, keys, source)
        print(f"get {VALUES} x 1 MiB")
        gets: dict[str, Way] = {"kvpool": kvpool_get, "redis-py": python_get, "coredis": core_get, "bare": raw_get}
        await measure(rounds, lambda: [memory.__setitem__(slice(8), bytes(8)) for memory in target], **gets)
        assert target == source
    await python.aclose()
    raw.close()


async def kvpool_get_check(store: RedisStore, keys: list[str], source: list[bytearray]) -> None:
    """Leave kvpool's own form behind, which every way then reads."""
    await store.clear()
    assert (await store.put(keys, Buffers.of(*source))).ok.all()


async def presence(server: RedisServer, rounds: int, count: int, unix: bool) -> None:
    keys = [f"{os.urandom(16).hex()}/0.0/{os.urandom(32).hex()}" for _ in range(count)]
    names = [f"kvpool:{key}" for key in keys]
    address = Address(str(server.socket)) if unix else Address("127.0.0.1", server.port)
    python = redis_py.Redis(unix_socket_path=str(server.socket)) if unix else redis_py.Redis(port=server.port)
    core = coredis.Redis(unix_socket_path=str(server.socket)) if unix else coredis.Redis(port=server.port)
    connection = await Connection.open(address, Access())
    sha = server.raw("SCRIPT", "LOAD", SCRIPT)

    async def kvpool() -> None:
        assert (await store.exists(keys)).tolist() == there

    async def python_exists() -> None:
        pipe = python.pipeline(transaction=False)
        for name in names:
            pipe.exists(name)
        assert await pipe.execute() == there

    async def core_exists() -> None:
        async with core.pipeline(transaction=False) as pipe:
            found = [pipe.exists([name]) for name in names]
        assert [await f for f in found] == there

    async def script() -> None:
        windows = [names[at : at + 1024] for at in range(0, count, 1024)]
        replies = await connection.ask(*(command("EVALSHA", sha, len(w), *w) for w in windows))
        assert b"".join(r for r in replies if isinstance(r, bytes)) == bytes(48 + t for t in there)

    async with RedisStore(url(server, unix)) as store, core:
        for pattern, there in {
            "the first half is there": [int(i < count // 2) for i in range(count)],
            "every other is there": [int(i % 2) for i in range(count)],
        }.items():
            server.raw("FLUSHALL")
            for name, present in zip(names, there, strict=True):
                if present:
                    server.raw("SET", name, "")
            print(f"presence of {count:,} keys, {pattern}")
            ways: dict[str, Way] = {
                "kvpool exists (TOUCH)": kvpool,
                "kvpool, script (no exists)": script,
                "redis-py exists": python_exists,
                "coredis exists": core_exists,
            }
            await measure(rounds, lambda: None, **ways)
    await python.aclose()
    connection.close()


def url(server: RedisServer, unix: bool) -> str:
    return f"redis+unix://{server.socket}" if unix else server.url


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--unix", action="store_true", help="through a unix socket instead of TCP")
    options = parser.parse_args()
    with RedisServer() as server:
        print(server.raw("INFO", "server").split(b"\r\n")[1].decode(), "unix socket" if options.unix else "TCP")
        await values(server, options.rounds, options.unix)
        for count in (1000, 18_064):
            await presence(server, max(5, options.rounds // 2), count, options.unix)


if __name__ == "__main__":
    asyncio.run(main())
