"""What wrapper stores cost: the time of a batch on a memory store, relative to the bare store.

Run from the checkout: ``.venv/bin/python benchmarks/wrappers.py [rounds]``. The memory store does nothing but copy, so
this is the worst case. All stores take turns in each round; prints the median of all rounds' ratios.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.backends.checked import CheckedStore
from kvpool.backends.guarded import GuardedStore
from kvpool.backends.memory import MemoryStore
from kvpool.backends.tiered import TieredStore
from kvpool.memory import Buffers, Region
from kvpool.store import Store

SHAPES = {"16 x 1 MiB": (16, 1 << 20), "1,000 x 1 KiB": (1000, 1 << 10)}
STORES: dict[str, Callable[[], Store]] = {
    "bare": MemoryStore,
    "guarded, bounce=false": lambda: GuardedStore(MemoryStore(), bounce=False),
    "guarded": lambda: GuardedStore(MemoryStore()),
    "checked, checksum=none": lambda: CheckedStore(MemoryStore(), checksum="none"),
    "checked": lambda: CheckedStore(MemoryStore()),
    "tiered, all near": lambda: TieredStore(MemoryStore(), MemoryStore()),
    "tiered, nothing near": lambda: TieredStore(MemoryStore(), MemoryStore()),
}
OPS = ("exists", "put", "get")


async def measure(n: int, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median ratio by store and operation."""
    keys = [f"bench/0.0/{i:064x}" for i in range(n)]
    memory = Buffers.single(Region.of(np.ones(n * size, np.uint8)), np.arange(n) * size, size)
    took: dict[tuple[str, str], list[float]] = defaultdict(list)

    async def timed(name: str, op: str, call: Awaitable[object]) -> None:
        start = time.perf_counter()
        await call
        took[name, op].append(time.perf_counter() - start)

    async with AsyncExitStack() as stack:
        stores = {name: await stack.enter_async_context(make()) for name, make in STORES.items()}
        for _ in range(rounds):
            for name, store in stores.items():
                await store.delete(keys)
                await timed(name, "put", store.put(keys, memory))
                await timed(name, "exists", store.exists(keys))
                if name == "tiered, nothing near":
                    assert isinstance(store, TieredStore)
                    await store.near.delete(keys)
                await timed(name, "get", store.get_into(keys, memory))
    return {
        name: {
            op: statistics.median(a / b for a, b in zip(took[name, op], took["bare", op], strict=True)) for op in OPS
        }
        for name in STORES
        if name != "bare"
    }


async def main(rounds: int) -> None:
    found = {shape: await measure(n, size, rounds) for shape, (n, size) in SHAPES.items()}
    print("| | " + " | ".join(f"{shape}: {', '.join(OPS)}" for shape in SHAPES) + " |")
    print("|---|" + "---|" * len(SHAPES))
    for name in STORES:
        if name != "bare":
            cells = [", ".join(f"{found[shape][name][op]:.1f}" for op in OPS) for shape in SHAPES]
            print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 50)
