"""The smallest use of kvpool: save the blocks of a prompt, find them again, load them into other blocks."""

from __future__ import annotations

import anyio
import numpy as np

from kvpool.hashes import chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout
from kvpool.pool import KVPool
from kvpool.spec import CacheGroup, CacheSpec, Kind

BLOCK = 16  # tokens


async def main() -> None:
    # The engine's block memory: one layer of 8 blocks. A real engine has one such array a layer.
    memory = np.random.default_rng(0).standard_normal((8, 2, BLOCK, 4, 32), dtype=np.float32)
    spec = CacheSpec(groups=(CacheGroup(Kind.FULL, block_size=BLOCK),), hash_block_size=BLOCK)
    namespace = Namespace.of({"model": "example", "dtype": "float32"})  # all that decides the bytes of a block
    prompt = list(range(70))
    hashes = chain_hashes(prompt, BLOCK)  # 4 whole blocks

    async with KVPool.open(
        "memory://", spec=spec, namespace=namespace, layouts=[BlockLayout.of_arrays(memory)]
    ) as pool:
        await pool.save([pool.transfer(0, hashes, chunk_ids=range(4), block_ids=[3, 1, 4, 5])])

        hit = await pool.lookup(hashes, num_tokens=len(prompt))
        chunks = range(hit.length // BLOCK)
        [loaded] = await pool.load([pool.transfer(0, hashes, chunks, block_ids=[0, 2, 6, 7])])

        print(f"{hit.length} of {len(prompt)} tokens are stored, {loaded.ok.sum()} blocks were loaded")
        print("equal:", np.array_equal(memory[[3, 1, 4, 5]], memory[[0, 2, 6, 7]]))


anyio.run(main)
