"""What both sides are given: one long prompt, two layouts of a KV cache, and a store that costs what it is told to."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from typing import Self

import anyio
import numpy as np
from vllm.v1.core.kv_cache_utils import BlockHash

from kvpool.coordinator import Coordinator
from kvpool.hashes import BlockHashes
from kvpool.keys import KeySpace, Namespace
from kvpool.memory import Buffers
from kvpool.protocols.binary import BinaryCodec
from kvpool.registry import URL
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import Capabilities, Presence, Results, Store
from tests.differential.oracle import Oracle

__all__ = ["DIGEST", "FULL16", "SCHEME", "Client", "FakeStore", "Prompt", "five", "namespace"]

DIGEST = 32
SCHEME = "benchmark"
FULL16 = CacheSpec((CacheGroup(Kind.FULL, 16),), 16)


def _window(block: int, window: int) -> CacheGroup:
    return CacheGroup(Kind.SLIDING_WINDOW, block, window=window)


def five() -> CacheSpec:
    """Five groups, as large hybrid models have them, hashed by 4 tokens."""
    windows = _window(64, 128), _window(64, 512), _window(4, 16), _window(8, 64)
    return CacheSpec((CacheGroup(Kind.FULL, 256), *windows), 4)


def namespace() -> Namespace:
    return Namespace.of({"benchmark": "hot_path"})


class Client:
    """Takes a list of str and answers with a list of int, as Mooncake's client does.

    ``keys``: what is stored. ``seconds``: what a call takes beside.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.keys: Set[str] = frozenset()
        self.seconds = seconds
        self.calls = self.asked = 0

    def answer(self, keys: Sequence[str]) -> list[int]:
        assert type(keys) is list
        self.calls += 1
        self.asked += len(keys)
        stored = self.keys
        return [1 if key in stored else 0 for key in keys]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.answer(keys)


class FakeStore(Store):
    """The client behind the Store interface."""

    capabilities = Capabilities(shared=True)

    def __init__(self, client: Client) -> None:
        self.client = client

    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls(Client())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def exists(self, keys: Sequence[str], *, deadline: float = np.inf) -> Presence:
        if self.client.seconds:
            await anyio.sleep(self.client.seconds)
        return np.array(self.client.answer(keys), np.uint8)

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = np.inf) -> Results:
        raise NotImplementedError

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = np.inf) -> Results:
        raise NotImplementedError

    async def delete(self, keys: Sequence[str], *, deadline: float = np.inf) -> Results:
        raise NotImplementedError


class Prompt:
    """A prompt of so many tokens in one layout, and the keys under which both sides look for it."""

    def __init__(self, spec: CacheSpec, num_tokens: int) -> None:
        self.spec, self.num_tokens = spec, num_tokens
        self.num_hashes = num_tokens // spec.hash_block_size
        digests = np.random.default_rng(1).bytes(DIGEST * self.num_hashes)
        self.hashes = BlockHashes(digests, DIGEST, scheme=SCHEME)
        self.listed = [BlockHash(digest) for digest in self.hashes]  # the form in which an engine has them
        frame = b"".join(bytes(piece) for piece in BinaryCodec().encode(self.hashes))
        self.frame = memoryview(frame)
        self.oracle = Oracle(spec)
        self.coordinator = Coordinator(spec)
        self.keyspace = KeySpace(namespace(), spec)

    def keys(self, num_tokens: int) -> frozenset[str]:
        """Everything that is stored of the first ``num_tokens``, under the names of both sides."""
        found: set[str] = set()
        for probe in self.coordinator.everything(num_tokens, num_tokens // self.spec.hash_block_size):
            found.update(self.keyspace.keys(probe.group, 0, self.hashes, probe.hash_ids))
            prefix = self.oracle.worker._lookup_key_prefixes[probe.group][0]
            found.update(f"{prefix}@{self.listed[i].hex()}" for i in probe.hash_ids.tolist())
        return frozenset(found)
