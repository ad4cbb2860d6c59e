"""The Mooncake store beside raw calls of Mooncake's client, on a real master and owner that this script starts.

Run from the checkout: ``.venv/bin/python -m tests.mooncake.namespace .venv/bin/python benchmarks/mooncake_store.py``.
The raw client moves the same registered buffers by the same method, without headers, checksums, copies or awaits; "as
vLLM" is how vLLM's own connector calls it: every region of a chunk is one piece. "least" is the least that a store
with headers can do without blocking its loop: a thread, headers and checksums, the raw call, and nothing else. The ways
take turns, so that other load on the machine meets all of them. Printed are the best time of each, and by how much it
is faster than the first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import anyio
import numpy as np

from kvpool.backends import _mooncake_moves
from kvpool.backends._file_format import HEADER_BYTES, Checksum, damage, header
from kvpool.backends.mooncake import MooncakeStore
from kvpool.memory import Buffers, Region
from tests.mooncake.servers import Mooncake

GAP = 4096  # in front of each piece, as between the layers of an engine
Way = Callable[[str], Awaitable[None]]
_numbers = count()


class Bench:
    """The pieces of some values in one registered region, and a raw client on it."""

    def __init__(self, mooncake: Mooncake, rounds: int) -> None:
        self.mooncake = mooncake
        self.rounds = rounds
        memory = Region.of(np.random.default_rng(0).integers(0, 256, 48 << 20, np.uint8))
        self.memory = memory
        self.heads = Region(memory.address + (47 << 20), 1 << 20, memory.owner)  # behind all pieces

    def buffers(self, values: int, pieces: int, size: int) -> Buffers:
        offsets = GAP + np.arange(values * pieces, dtype=np.int64).reshape(values, pieces) * (size + GAP)
        return Buffers((self.memory,), np.zeros(pieces, np.intp), offsets, np.full_like(offsets, size))

    def store(self, options: str = "") -> MooncakeStore:
        return MooncakeStore(f"{self.mooncake.url}?{options}")

    async def compare(self, title: str, nbytes: int, puts: dict[str, Way], gets: dict[str, Way], to: str) -> None:
        """Time the ways in turn, each on keys of its own; the ratio to ``to`` is the median of those of all rounds."""
        lines = dict.fromkeys(puts, "")
        for op, ways in (("put", puts), ("get", gets)):
            times: dict[str, list[float]] = {name: [] for name in ways}
            for i in range(self.rounds + 2):
                for name in sorted(ways, key=lambda _: random.random()):
                    key = f"{name.replace(' ', '')}/{os.getpid()}/{next(_numbers) if op == 'put' else 'read'}"
                    begin = time.perf_counter()
                    await ways[name](key)
                    if i >= 2:
                        times[name].append(time.perf_counter() - begin)
                    if op == "put":
                        self.mooncake.owners[0].raw("remove_all", True)
            for name, taken in times.items():
                ratio = median(a / b for a, b in zip(times[to], taken, strict=True))
                best = min(taken)
                lines[name] += f"   {op} {best * 1e3:6.2f} ms {nbytes / best / 1e6:5.0f} MB/s  x{ratio:.2f}"
        print(f"\n{title}")
        for name, line in lines.items():
            print(f"  {name:18}{line}", flush=True)


def raw_ways(native: Any, buffers: Buffers) -> tuple[Way, Way]:
    pointers, sizes = buffers.lists
    totals = buffers.nbytes.tolist()

    async def put(key: str) -> None:
        names = [f"{key}/{i}" for i in range(len(totals))]
        assert not any(native.batch_put_from_multi_buffers(names, pointers, sizes))

    async def get(key: str) -> None:
        names = [f"{key}/{i}" for i in range(len(totals))]
        if native.batch_get_into_multi_buffers(names, pointers, sizes) != totals:
            await put(key)  # the first time

    return put, get


class Least:
    """Asyncio and one thread: headers, the raw call, checksums. No deadline, no cancelling, no status a key."""

    def __init__(self, native: Any, buffers: Buffers, heads: Region, checksum: Checksum) -> None:
        self.native = native
        self.checksum: Checksum = checksum
        self.payloads = [buffers.views(i) for i in range(len(buffers))]
        self.totals = (HEADER_BYTES + buffers.nbytes).tolist()
        pointers, sizes = buffers.lists
        if buffers.headroom:
            starts = (buffers.offsets[:, 0] - HEADER_BYTES).tolist()
            self.heads = [buffers.regions[0].view[start : start + HEADER_BYTES] for start in starts]
            self.pointers, self.sizes = [[p - HEADER_BYTES] for [p] in pointers], [[HEADER_BYTES + n] for [n] in sizes]
        else:
            starts = [HEADER_BYTES * i for i in range(len(buffers))]
            self.heads = [heads.view[start : start + HEADER_BYTES] for start in starts]
            self.pointers = [[heads.address + start, *row] for start, row in zip(starts, pointers, strict=True)]
            self.sizes = [[HEADER_BYTES, *row] for row in sizes]
        self.jobs: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], object]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def ways(self) -> tuple[Way, Way]:
        return partial(self._run, self._put), partial(self._run, self._get)

    async def _run(self, fn: Callable[[list[str]], None], key: str) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        names = [f"{key}/{i}" for i in range(len(self.totals))]
        self.jobs.put((lambda: fn(names), lambda: loop.call_soon_threadsafe(done.set_result, None)))
        await done

    def _work(self) -> None:
        while job := self.jobs.get():
            fn, tell = job
            fn()
            tell()

    def _put(self, names: list[str]) -> None:
        for name, head, pieces in zip(names, self.heads, self.payloads, strict=True):
            head[:] = header(name, pieces, self.checksum)
        assert not any(self.native.batch_put_from_multi_buffers(names, self.pointers, self.sizes))

    def _get(self, names: list[str]) -> None:
        if self.native.batch_get_into_multi_buffers(names, self.pointers, self.sizes) != self.totals:
            self._put(names)  # the first time
        for name, head, pieces, total in zip(names, self.heads, self.payloads, self.totals, strict=True):
            assert not damage(name, head.tobytes(), total, pieces)


def store_ways(store: MooncakeStore, buffers: Buffers) -> tuple[Way, Way]:
    async def put(key: str) -> None:
        assert (await store.put([f"{key}/{i}" for i in range(len(buffers))], buffers)).ok.all()

    async def get(key: str) -> None:
        if not (await store.get_into([f"{key}/{i}" for i in range(len(buffers))], buffers)).ok.all():
            await put(key)

    return put, get


async def against_raw(bench: Bench, values: int, pieces: int, size: int) -> None:
    """The store and raw calls of the same client."""
    buffers = bench.buffers(values, pieces, size)
    checksums: tuple[Checksum, Checksum] = ("xxh3_64", "none")
    for checksum in checksums:
        async with bench.store(f"checksum={checksum}") as store:
            await store.register([bench.memory])
            native = store._link.client().native
            puts, gets = {}, {}
            puts["raw"], gets["raw"] = raw_ways(native, buffers)
            kinds = {"": buffers}
            if pieces == 1:  # as in a pool's staging memory
                kinds[", headroom"] = replace(buffers, headroom=store.capabilities.headroom)
            for kind, memory in kinds.items():
                puts[f"store{kind}"], gets[f"store{kind}"] = store_ways(store, memory)
                if size >= _mooncake_moves.DIRECT_FROM["tcp"]:
                    least = Least(native, memory, bench.heads, checksum)
                    puts[f"least{kind}"], gets[f"least{kind}"] = least.ways()
            title = f"{values} values of {pieces} x {size >> 10} KiB, checksum={checksum}"
            await bench.compare(title, int(buffers.nbytes.sum()), puts, gets, "raw")


async def crossover(bench: Bench) -> None:
    """From which size of a piece on it is cheaper to hand it over than to gather it."""
    for size in (64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20):
        buffers = bench.buffers(4, 4, size)
        puts, gets = {}, {}
        async with AsyncExitStack() as stack:
            for name, limit in (("gathered", 1 << 40), ("handed over", 0)):
                store = await stack.enter_async_context(bench.store())
                await store.register([bench.memory])
                store._moves._direct_from = limit
                puts[name], gets[name] = store_ways(store, buffers)
            await bench.compare(f"4 values of 4 x {size >> 10} KiB", int(buffers.nbytes.sum()), puts, gets, "gathered")
    print(f"\nchosen: pieces of {_mooncake_moves.DIRECT_FROM} bytes and more are handed over")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", choices=["raw", "vllm", "crossover"])
    arguments = parser.parse_args()
    with Mooncake(memory=512 << 20, default_kv_lease_ttl="5s", client_ttl=30) as mooncake:
        bench = Bench(mooncake, arguments.rounds)
        if arguments.only in (None, "raw"):
            await against_raw(bench, 16, 1, 1 << 20)
            await against_raw(bench, 4, 4, 1 << 20)
        if arguments.only in (None, "vllm"):
            print("\nraw is vLLM's call pattern here:")
            await against_raw(bench, 1, 64, 16 << 10)
            await against_raw(bench, 8, 64, 16 << 10)
        if arguments.only in (None, "crossover"):
            await crossover(bench)


if __name__ == "__main__":
    anyio.run(main)
