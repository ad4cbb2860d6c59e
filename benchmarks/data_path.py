"""Moving values through the stores, against the raw client on the same buffers.

``python -m benchmarks.data_path [--json FILE] [--runs 9] [--only memory,file,redis,redis_unix]``

16 values of 1 MiB each way, in turns: with the raw client (memcpy; open, preadv or pwritev, name and close; a blocking
socket that receives into the caller's memory), through the ``Store`` with checksums off and on, and through
``KVPool.load`` and ``save`` of blocks of 32 pieces. The last is compared with the raw client on the pieces themselves.
The server is real, and started by this script. Ratios are raw time / ours: 1 is as fast.

``file_*_floor`` is the raw client in a worker thread: what nothing that keeps file calls off its event loop can beat.
``file_*_least`` is besides what a store of files must do: find each file's place, open its directory without following
links, prove its header; without deadline, cancelling and statuses.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Protocol

import anyio
import numpy as np

from kvpool.backends._file_tree import Tree
from kvpool.config import Config
from kvpool.hashes import chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout, Buffers, Region
from kvpool.pool import KVPool, Transfer
from kvpool.registry import create_store
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import Results, Store
from kvpool.threads import Threads
from tests.redis.server import RedisServer

VALUES, VALUE_BYTES, PIECES = 16, 1 << 20, 32
HEADER = bytes(40)  # of what kvpool stores; the raw client moves as many bytes
BOUND = 0.8

#: The memory of each value, in pieces.
Views = Sequence[Sequence[memoryview]]
Way = Callable[[], Awaitable[object]]


class Raw(Protocol):
    """The cheapest client that does the same."""

    def put(self, names: Sequence[str], values: Views) -> None: ...

    def get(self, names: Sequence[str], values: Views) -> None: ...

    def clear(self, names: Sequence[str]) -> None: ...


class RawMemory:
    """memcpy, in and out of memory that is fresh for each new value, as it is for a store."""

    def __init__(self) -> None:
        self._values: dict[str, np.ndarray] = {}

    def put(self, names: Sequence[str], values: Views) -> None:
        for name, pieces in zip(names, values, strict=True):
            value = self._values[name] = np.empty(VALUE_BYTES, np.uint8)
            self._copy(value, pieces, out=False)

    def get(self, names: Sequence[str], values: Views) -> None:
        for name, pieces in zip(names, values, strict=True):
            self._copy(self._values[name], pieces, out=True)

    def clear(self, names: Sequence[str]) -> None:
        for name in names:
            self._values.pop(name, None)

    @staticmethod
    def _copy(value: np.ndarray, pieces: Sequence[memoryview], *, out: bool) -> None:
        at = 0
        for piece in pieces:
            there, here = np.frombuffer(piece, np.uint8), value[at : at + len(piece)]
            np.copyto(*((there, here) if out else (here, there)))
            at += len(piece)


class RawFiles:
    """A file without a name, written and linked, or opened and read; closed."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def put(self, names: Sequence[str], values: Views) -> None:
        for name, pieces in zip(names, values, strict=True):
            fd = os.open(self._folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
            wrote = os.pwritev(fd, [HEADER, *pieces], 0)
            os.link(f"/proc/self/fd/{fd}", f"{self._folder}/{name}", src_dir_fd=0, follow_symlinks=True)
            os.close(fd)
            assert wrote == len(HEADER) + VALUE_BYTES

    def get(self, names: Sequence[str], values: Views) -> None:
        head = bytearray(len(HEADER))
        for name, pieces in zip(names, values, strict=True):
            fd = os.open(f"{self._folder}/{name}", os.O_RDONLY)
            read = os.preadv(fd, [head, *pieces], 0)
            os.close(fd)
            assert read == len(HEADER) + VALUE_BYTES

    def clear(self, names: Sequence[str]) -> None:
        for name in names:
            Path(self._folder, name).unlink(missing_ok=True)


class LeastFiles:
    """What the file store does with each file, and nothing else."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def put(self, names: Sequence[str], values: Views) -> None:
        with Tree(self._folder, create=True, checksum="none") as tree:
            for name, pieces in zip(names, values, strict=True):
                tree.write(f"bench/0.0/{name}", pieces)

    def get(self, names: Sequence[str], values: Views) -> None:
        with Tree(self._folder, checksum="none") as tree:
            for name, pieces in zip(names, values, strict=True):
                tree.read(f"bench/0.0/{name}", pieces)

    def clear(self, names: Sequence[str]) -> None:
        with Tree(self._folder) as tree:
            for name in names:
                tree.remove(f"bench/0.0/{name}")


class RawRedis:
    """A blocking socket: commands in front, replies behind, values straight from and into memory."""

    def __init__(self, server: RedisServer, unix: bool) -> None:
        self._server = server
        self._sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        self._sock.connect(str(server.socket) if unix else ("127.0.0.1", server.port))

    def put(self, names: Sequence[str], values: Views) -> None:
        for name, pieces in zip(names, values, strict=True):
            start = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name.encode(), VALUE_BYTES + len(HEADER))
            self._send([start, HEADER, *pieces, b"\r\n"])
        left = len(b"+OK\r\n") * len(names)
        while left:
            left -= len(self._sock.recv(left))

    def get(self, names: Sequence[str], values: Views) -> None:
        self._sock.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(n), n.encode()) for n in names))
        head = memoryview(bytearray(len(b"$%d\r\n" % (VALUE_BYTES + len(HEADER))) + len(HEADER)))
        for pieces in values:
            left = [head, *pieces, memoryview(bytearray(2))]
            while left:
                self._drop(left, self._sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0])

    def clear(self, names: Sequence[str]) -> None:
        self._server.raw("FLUSHALL")

    def close(self) -> None:
        self._sock.close()

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            self._drop(left, self._sock.sendmsg(left))

    @staticmethod
    def _drop(left: list[memoryview], moved: int) -> None:
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]


@contextmanager
def memory() -> Iterator[tuple[Raw, str, str]]:
    yield RawMemory(), "memory://", "checked://?store=memory://"


@contextmanager
def files() -> Iterator[tuple[Raw, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("raw", "off", "on"):
            os.mkdir(f"{folder}/{name}")
        yield RawFiles(f"{folder}/raw"), f"file://{folder}/off?checksum=none", f"file://{folder}/on"


@contextmanager
def redis(unix: bool = False) -> Iterator[tuple[Raw, str, str]]:
    with RedisServer() as server:
        raw = RawRedis(server, unix)
        url = f"redis+unix://{server.socket}" if unix else server.url
        yield raw, f"{url}?checksum=none", f"{url}?prefix=on:"
        raw.close()


#: Floors, by the name that their rows have: a client that blocks, in a worker thread.
FLOORS = {"raw thread": "floor", "least": "least"}
VALUE_SIDES = {"raw", "store off", "store on", *FLOORS}  # the others move blocks
PLACES: dict[str, Callable[[], AbstractContextManager[tuple[Raw, str, str]]]] = {
    "memory": memory,
    "file": files,
    "redis": redis,
    "redis_unix": lambda: redis(unix=True),
}


class Blocks:
    """16 blocks of a layout with 32 layers, and the same 16 hashes for each of its pools."""

    def __init__(self) -> None:
        self.layers = np.random.default_rng(1).integers(0, 256, (PIECES, 4 * VALUES, VALUE_BYTES // PIECES), np.uint8)
        self.layout = BlockLayout.of_arrays(*self.layers)
        self.ids = np.random.default_rng(2).permutation(4 * VALUES)[:VALUES]
        self.views = [self.layout.buffers(self.ids).views(i) for i in range(VALUES)]

    @asynccontextmanager
    async def pool(self, store: Store) -> AsyncIterator[tuple[KVPool, list[Transfer]]]:
        spec = CacheSpec(groups=(CacheGroup(Kind.FULL, block_size=16),), hash_block_size=16)
        pool = KVPool(store, spec=spec, namespace=Namespace.of({}), layouts=[self.layout], config=Config.load())
        async with pool:
            hashes = chain_hashes(list(range(16 * VALUES)), 16)
            yield pool, [pool.transfer(0, hashes, range(VALUES), self.ids)]


class Side:
    """One way to move the values: ``put`` and ``get``, and ``clear`` in between."""

    def __init__(self, put: Way, get: Way, clear: Way) -> None:
        self.ways = {"put": put, "get": get}
        self.clear = clear


def raw_side(raw: Raw, names: Sequence[str], values: Views) -> Side:
    async def call(way: Callable[..., None], *args: object) -> None:
        way(*args)

    put, get = (partial(call, way, names, values) for way in (raw.put, raw.get))
    return Side(put, get, partial(call, raw.clear, names))


def thread_side(raw: Raw, names: Sequence[str], values: Views) -> Side:
    threads = Threads(1)

    async def call(way: Callable[..., None], *args: object) -> None:
        await threads.run(lambda: way(*args))

    put, get = (partial(call, way, names, values) for way in (raw.put, raw.get))
    return Side(put, get, partial(call, raw.clear, names))


def store_side(store: Store, keys: Sequence[str], values: Buffers) -> Side:
    async def call(way: Callable[..., Awaitable[Results]]) -> None:
        check(await way(keys, values))

    return Side(partial(call, store.put), partial(call, store.get_into), partial(store.delete, keys))


def pool_side(pool: KVPool, parts: Sequence[Transfer]) -> Side:
    async def call(way: Callable[..., Awaitable[list[Results]]]) -> None:
        check(*await way(parts))

    part = parts[0]
    keys = pool.keyspace.keys(part.group, 0, part.hashes, np.arange(len(part)))
    return Side(partial(call, pool.save), partial(call, pool.load), partial(pool.store.delete, keys))


def turned(sides: dict[str, Side], run: int) -> list[tuple[str, Side]]:
    """All sides, in another order in each run: each finds the caches that the one before it has filled."""
    return random.Random(run).sample(list(sides.items()), len(sides))


def check(results: Results) -> None:
    assert results.ok.all(), results
    assert results.nbytes.all(), "values were there before"


async def measure(place: str, runs: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each run of each side, by operation."""
    names = [os.urandom(32).hex() for _ in range(VALUES)]
    memory = np.random.default_rng(3).integers(0, 256, (VALUES, VALUE_BYTES), np.uint8)
    buffers, blocks = Buffers.single(Region.of(memory), np.arange(VALUES) * VALUE_BYTES, VALUE_BYTES), Blocks()
    async with AsyncExitStack() as stack:
        raw, *urls = stack.enter_context(PLACES[place]())
        sides = {
            "raw": raw_side(raw, names, [[value.data] for value in memory]),
            "raw blocks": raw_side(raw, [f"{name}b" for name in names], blocks.views),
        }
        if place == "file":
            values = [[value.data] for value in memory]
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            sides["raw thread"] = thread_side(raw, [f"{name}t" for name in names], values)
            sides["least"] = thread_side(LeastFiles(folder), names, values)
        for checks, url in zip(("off", "on"), urls, strict=True):
            store = await stack.enter_async_context(create_store(url))
            sides[f"store {checks}"] = store_side(store, [f"bench/0.0/{name}" for name in names], buffers)
            pool = await stack.enter_async_context(blocks.pool(create_store(url)))
            sides[f"pool {checks}"] = pool_side(*pool)
        found = {op: {name: list[float]() for name in sides} for op in ("put", "get")}
        for run in range(-2, runs):
            for name, side in turned(sides, run):
                for each in sides.values():
                    await each.clear()
                start = time.perf_counter()
                await side.ways["put"]()
                if run >= 0:
                    found["put"][name].append(time.perf_counter() - start)
        for side in sides.values():
            await side.clear()
        for side in sides.values():
            await side.ways["put"]()
        bytes_before = [memory.copy(), blocks.layers.copy()]
        for run in range(-2, runs):
            for name, side in turned(sides, run):
                if run < 0:
                    memory[:], blocks.layers[:, blocks.ids] = 0, 0
                start = time.perf_counter()
                await side.ways["get"]()
                if run >= 0:
                    found["get"][name].append(time.perf_counter() - start)
                else:
                    moved = [np.array_equal(a, b) for a, b in zip(bytes_before, (memory, blocks.layers), strict=True)]
                    assert moved == [name in VALUE_SIDES, name not in VALUE_SIDES]
    return found


def ratios(found: dict[str, dict[str, list[float]]], place: str) -> dict[str, list[float]]:
    """Raw time / ours, of runs that followed each other, by the name of the row."""
    rows = {}
    for op, times in found.items():
        verb = {"put": "save", "get": "load"}[op]
        for checks in ("off", "on"):
            tail = "" if checks == "off" else "_checked"
            for row, ours, raw in (
                (op, f"store {checks}", "raw"),
                (verb, f"pool {checks}", "raw blocks"),
            ):
                rows[f"{place}_{row}{tail}"] = [a / b for a, b in zip(times[raw], times[ours], strict=True)]
        for side, floor in FLOORS.items():
            if side in times:
                rows[f"{place}_{op}_{floor}"] = [a / b for a, b in zip(times["raw"], times[side], strict=True)]
    return rows


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write ratios, times in ms and the bounds to this file")
    parser.add_argument("--runs", type=int, default=15, help="of each side, 7 or more")
    parser.add_argument("--only", default=",".join(PLACES), help="which stores, comma-separated")
    options = parser.parse_args()
    report: dict[str, dict[str, object]] = {"ratios": {}, "bounds": {}, "ms": {}}
    print(f"{'':28}{'ratio':>7} (min to max)")
    for place in options.only.split(","):
        found = await measure(place, max(7, options.runs))
        report["ms"][place] = {
            op: {k: [round(t * 1e3, 3) for t in v] for k, v in ts.items()} for op, ts in found.items()
        }
        for name, each in ratios(found, place).items():
            print(f"{name:28}{median(each):7.2f} ({min(each):.2f} to {max(each):.2f})")
            report["ratios"][name] = round(median(each), 3)
            if not name.endswith(("_checked", *(f"_{floor}" for floor in FLOORS.values()))):
                report["bounds"][name] = BOUND
        for op, times in found.items():
            print("   ", op, ", ".join(f"{name} {median(each) * 1e3:.2f}" for name, each in times.items()), "ms")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    anyio.run(main)
