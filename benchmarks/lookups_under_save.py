"""Lookups while a large save runs, and what load and save do to the event loop.

``python -m benchmarks.lookups_under_save [--json FILE] [--rounds 5] [--only memory,file,redis]``

One pool, one event loop. A lookup of 1,024 chunks that are all there is asked again and again, first alone, then while
256 values of 1 MiB are saved, then while they are loaded. Prints p50 and p99 of the lookups, and the longest slices:
time between two turns of the loop, on the clock, and in processor time of its thread (what other load on the machine
takes away counts for the clock only).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from kvpool.config import Config
from kvpool.hashes import chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout
from kvpool.pool import KVPool
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import Status
from tests.redis.server import RedisServer

VALUES, LAYERS, LAYER_BYTES = 256, 32, 1 << 15  # 1 MiB a value
CHUNKS = 1024  # of the lookup
SPEC = CacheSpec(groups=(CacheGroup(Kind.FULL, block_size=16),), hash_block_size=16)


class Slices:
    """How long the loop ran between two looks at its files: callbacks of one turn, without the wait before them."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        selector: Any = loop._selector  # type: ignore[attr-defined]  # asyncio shows no turns
        select, self._since = selector.select, (time.perf_counter(), time.thread_time())

        def between(timeout: float | None = None) -> Any:
            wall, cpu = self._since
            self.wall.append(time.perf_counter() - wall)
            self.cpu.append(time.thread_time() - cpu)
            ready = select(timeout)
            self._since = (time.perf_counter(), time.thread_time())
            return ready

        selector.select = between
        try:
            yield
        finally:
            selector.select = select


async def measure(url: str, rounds: int) -> dict[str, dict[str, float]]:
    layers = np.random.default_rng(1).integers(0, 256, (LAYERS, VALUES, LAYER_BYTES), np.uint8)
    config = Config.load({"store": url, "lookup_timeout_ms": 10_000, "save_timeout_s": 120, "load_timeout_s": 120})
    small = np.zeros((CHUNKS, 64), np.uint8)
    report: dict[str, dict[str, float]] = {}
    async with (
        KVPool.open(
            config, spec=SPEC, namespace=Namespace.of({"lookup": 1}), layouts=[BlockLayout.of_arrays(small)]
        ) as asked,
        KVPool.open(config, spec=SPEC, namespace=Namespace.of({}), layouts=[BlockLayout.of_arrays(*layers)]) as pool,
    ):
        known = chain_hashes([7] * (16 * CHUNKS), 16)
        await asked.save([asked.transfer(0, known, range(CHUNKS), range(CHUNKS))])

        async def look(until: Callable[[], bool]) -> list[float]:
            took = []
            while not until():
                start = time.perf_counter()
                hit = await asked.lookup(known, 16 * CHUNKS)
                took.append(time.perf_counter() - start)
                assert hit.length == 16 * (CHUNKS - 1), hit
                await anyio.sleep(0.001)
            return took

        async def beside(work: Awaitable[Any]) -> tuple[list[float], Slices]:
            slices, running, took = Slices(), True, list[float]()

            async def run() -> None:
                nonlocal running
                (results,) = await work
                running = False
                assert set(results.status) == {Status.OK}, results

            async with slices.watched(), anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                took += await look(lambda: not running)
            return took, slices

        times: dict[str, list[float]] = {"alone": [], "save": [], "load": []}
        longest: dict[str, list[tuple[float, float]]] = {"save": [], "load": []}
        gc.collect()
        gc.freeze()  # as vLLM does: what was made at the start is not looked through again
        for round_ in range(rounds):
            await anyio.sleep(0.1)
            end = time.perf_counter() + 0.5
            times["alone"] += await look(lambda end=end: time.perf_counter() > end)  # type: ignore[misc]
            hashes = chain_hashes([round_] * (16 * VALUES), 16)
            parts = [pool.transfer(0, hashes, range(VALUES), range(VALUES))]
            for name, way in (("save", pool.save), ("load", pool.load)):
                took, slices = await beside(way(parts))
                times[name] += took
                longest[name].append((max(slices.wall), max(slices.cpu)))
            keys = pool.keyspace.keys(0, 0, parts[0].hashes, np.arange(VALUES))
            await pool.store.delete(keys)
    for name, took in times.items():
        report[name] = {
            "lookups": len(took),
            "p50_ms": float(np.percentile(took, 50) * 1e3),
            "p99_ms": float(np.percentile(took, 99) * 1e3),
        }
        if name in longest:
            wall, cpu = np.median(longest[name], axis=0) * 1e3
            report[name] |= {"longest_slice_ms": wall, "longest_slice_cpu_ms": cpu}
    return {name: {key: round(float(value), 2) for key, value in row.items()} for name, row in report.items()}


@contextmanager
def file() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"file://{folder}"


@contextmanager
def redis() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@contextmanager
def memory() -> Iterator[str]:
    yield "memory://lookups-under-save"


PLACES: dict[str, Callable[[], AbstractContextManager[str]]] = {"memory": memory, "file": file, "redis": redis}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(PLACES), help="which stores, comma-separated")
    options = parser.parse_args()
    report = {}
    for place in options.only.split(","):
        with PLACES[place]() as url:
            report[place] = asyncio.run(measure(url, options.rounds))
        for name, row in report[place].items():
            print(f"{place:8}{name:8}" + "  ".join(f"{key} {value:g}" for key, value in row.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
