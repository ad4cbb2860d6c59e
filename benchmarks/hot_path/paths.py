"""The hot paths that run in one thread: lookups, masks, the keys of a save, addresses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import BlobBlockHashes, RankLocalStoreLayout

from benchmarks.hot_path.measure import Path
from benchmarks.hot_path.workload import DIGEST, FULL16, SCHEME, Client, FakeStore, Prompt, namespace
from kvpool.addresses import AddressRows
from kvpool.config import Config
from kvpool.coordinator import Hit
from kvpool.memory import BlockLayout, Region
from kvpool.pool import KVPool
from kvpool.protocols.binary import BinaryCodec
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.tokens import ChunkedTokenDatabase

__all__ = ["LOOKUPS", "Lookup", "address_paths", "lookup_path", "mask_paths", "save_paths"]

#: For each lookup: its bound, the layout, the share of the prompt that is stored, the share that the engine holds.
LOOKUPS = {
    "lookup_full16_hit": (8, "full16", 1.0, 0.0),
    "lookup_full16_miss": (300, "full16", 0.0, 0.0),
    "lookup_full16_local90": (30, "full16", 1.0, 0.9),
    "lookup_full16_first10": (20, "full16", 0.1, 0.0),
    "lookup_five_hit": (50, "five", 1.0, 0.0),
    "lookup_five_miss": (300, "five", 0.0, 0.0),
}


class Lookup:
    """One lookup on both sides, from the frame that came in to the answer.

    vLLM's has no word for what the engine holds itself; it asks for all.
    """

    def __init__(self, prompt: Prompt, stored: float, local: float, seconds: float) -> None:
        self.prompt, self.local_tokens = prompt, int(prompt.num_tokens * local)
        self.clients = Client(seconds), Client(seconds)
        for client in self.clients:
            client.keys = prompt.keys(int(prompt.num_tokens * stored))
        self.store = FakeStore(self.clients[1])
        self.pool: KVPool

    @asynccontextmanager
    async def open(self, config: Config | None = None) -> AsyncIterator[Lookup]:
        async with KVPool(self.store, spec=self.prompt.spec, namespace=namespace(), config=config) as self.pool:
            yield self

    def reference(self) -> Any:
        worker = self.prompt.oracle.worker
        worker.store = self.clients[0]
        return worker.lookup(self.prompt.num_tokens, BlobBlockHashes(self.prompt.frame[2:], DIGEST))

    async def ours(self) -> Hit:
        hashes = BinaryCodec().decode(self.prompt.frame, scheme=SCHEME)
        return await self.pool.lookup(hashes, self.prompt.num_tokens, local_tokens=self.local_tokens)

    def check(self, theirs: Any, ours: Hit) -> None:
        expected = theirs.hit_length if theirs.hit_length > self.local_tokens else 0
        assert ours.length == expected, (ours, theirs)
        assert not expected or ours.boundaries == tuple(b.num_tokens for b in theirs.tail_key_boundaries)

    def counts(self) -> dict[str, int]:
        """Of one lookup: keys built and waves (calls to the store)."""
        theirs, ours = self.clients
        return {
            "reference keys": theirs.asked,
            "reference waves": theirs.calls,
            "keys": ours.asked,
            "waves": ours.calls,
        }


def lookup_path(name: str, lookup: Lookup) -> Path:
    return Path(name, LOOKUPS[name][0], lookup.reference, lookup.ours, lookup.check, counts=lookup.counts)


def mask_paths(prompt: Prompt) -> Iterator[Path]:
    ours, theirs, length = prompt.coordinator, prompt.oracle.coordinator, prompt.num_tokens

    def equal(a: Any, b: Any) -> None:
        assert len(a) == len(b) == len(prompt.spec.groups)
        for mask, other in zip(a, b, strict=True):
            assert (mask is None) == (other is None)
            assert mask is None or list(mask) == other.tolist()

    yield Path(
        "load_mask_five",
        20,
        lambda: theirs.load_mask(prompt.listed, length),
        lambda: ours.load_mask(length),
        equal,
    )
    yield Path("store_mask_five", 10, lambda: theirs.store_mask(length), lambda: ours.store_mask(length), equal)


def save_paths(prompt: Prompt) -> Iterator[Path]:
    """From the span of tokens that is saved to the list of its keys.

    The masks say which chunks are worth saving, and are part of it on both sides.
    """
    database = ChunkedTokenDatabase(prompt.spec, prompt.keyspace)
    for name, start in (("save_keys_five", 0), ("save_keys_five_last256", prompt.num_tokens - 256)):

        def reference(start: int = start) -> list[str]:
            keys = []
            masks = prompt.oracle.coordinator.store_mask(prompt.num_tokens, start)
            for db, mask in zip(prompt.oracle.databases, masks, strict=True):
                for _, _, digest in db.process_tokens(prompt.num_tokens, prompt.listed, start, chunk_mask=mask):
                    keys.append(db.key_for(digest))
            return keys

        def ours(start: int = start) -> list[str]:
            return database.save_keys(prompt.hashes, start, prompt.num_tokens)

        def equal(theirs: list[str], ours: list[str]) -> None:
            assert [key.rpartition("@")[2] for key in theirs] == [key.rpartition("/")[2] for key in ours]

        count = len(ours())
        yield Path(name, 5, reference, ours, equal, counts=partial(dict, keys=count))


def address_paths(num_tokens: int, regions: int) -> Iterator[Path]:
    """The addresses and sizes of all chunks of a prompt, as nested lists of plain ints."""
    block, page = 128, 64 << 10
    count = num_tokens // block
    span = count * page
    places = tuple(Region((j + 1) * (span + 4096), span, None) for j in range(regions))
    pages = np.full(regions, page)
    layout = BlockLayout(places, np.arange(regions), np.zeros(regions, np.int64), pages, pages, count)
    table = np.random.default_rng(2).permutation(count)
    blocks = table.tolist()
    spans = [(i * block, (i + 1) * block) for i in range(count)]

    theirs = RankLocalStoreLayout(Prompt(FULL16, 16).oracle.databases[0].metadata, block, block)
    theirs.set_kv_caches_base_addr([region.address for region in places])
    theirs.set_block_len([page] * regions)
    spec = CacheSpec((CacheGroup(Kind.FULL, block),), block)
    keyspace = Prompt(spec, block).keyspace
    database = ChunkedTokenDatabase(spec, keyspace, [layout])
    chunks = database.chunks(num_tokens, count)

    def reference() -> Any:
        return theirs.prepare_values(spans, blocks, [0] * count)

    def ours() -> tuple[list[list[int]], list[list[int]]]:
        _, ids = database.blocks(0, chunks, table)
        return database.addresses(0, ids)

    def equal(theirs: Any, ours: Any) -> None:
        assert theirs[:2] == ours

    def forget() -> None:
        database._rows = (AddressRows(layout),)

    yield Path("addresses_warm", 50, reference, ours, equal)
    yield Path("addresses_cold", 1.2, reference, ours, equal, fresh=forget)
