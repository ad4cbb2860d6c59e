"""vLLM's own store coordinator and worker, run on a dict of hash indices instead of a Mooncake store.

Everything is imported from the installed vLLM. Only what touches hardware or a real store is left out: the worker is
made without its constructor, which would open one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import MooncakeStoreCoordinator
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ChunkedTokenDatabase, KeyMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvpool.spec import CacheGroup, CacheSpec, Kind

__all__ = ["Oracle", "core_coordinator", "vllm_spec"]

_HEADS: dict[str, Any] = {"num_kv_heads": 8, "head_size": 64, "dtype": torch.float16}


def vllm_spec(group: CacheGroup) -> KVCacheSpec:
    """The same group as vLLM describes it."""
    size, window, chunk = group.block_size, group.window or 0, group.chunk or 0
    match group.kind:
        case Kind.FULL:
            return FullAttentionSpec(size, **_HEADS)
        case Kind.MLA:
            return MLAAttentionSpec(size, **{**_HEADS, "num_kv_heads": 1})
        case Kind.SLIDING_WINDOW:
            return SlidingWindowSpec(size, **_HEADS, sliding_window=window)
        case Kind.CHUNKED_LOCAL:
            return ChunkedLocalAttentionSpec(size, **_HEADS, attention_chunk_size=chunk)
        case Kind.MAMBA:
            return MambaSpec(size, shapes=((16,),), dtypes=(torch.float16,), mamba_cache_mode="align")


class _FakeStore:
    """Answers like Mooncake's client: one int a key."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [int(key in self.keys) for key in keys]


class Oracle:
    """What vLLM's store worker answers for one :class:`CacheSpec`."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        groups = [KVCacheGroupSpec([f"layer{i}"], vllm_spec(g), g.eagle) for i, g in enumerate(spec.groups)]
        self.coordinator = MooncakeStoreCoordinator(
            groups,
            spec.common_block,
            spec.hash_block_size,
            use_eagle=spec.use_eagle,
            retention_interval=spec.retention_interval,
            enable_partial_hash_hits=spec.partial_hits,
        )
        self.store = _FakeStore()
        self.databases = [
            ChunkedTokenDatabase(KeyMetadata("model", 0, 0, 0, 0, i), g.block_size, spec.hash_block_size)
            for i, g in enumerate(spec.groups)
        ]
        worker: Any = MooncakeStoreWorker.__new__(MooncakeStoreWorker)
        worker._capacity_only = False
        worker.coord = self.coordinator
        worker.token_dbs = self.databases
        worker._kv_cache_groups = groups
        worker.hash_block_size = spec.hash_block_size
        worker.store = self.store
        worker._record_kv_connector_operation = lambda *_args, **_kwargs: None
        worker._lookup_key_prefixes = tuple(
            db.store_layout.lookup_key_prefixes([(shard, 0, 0, 0) for shard in range(group.shards)])
            for db, group in zip(self.databases, spec.groups, strict=True)
        )
        self.worker = worker

    def store_chunk(self, group: int, shard: int, digest: bytes) -> None:
        """Put a key into the store."""
        self.store.keys.add(f"{self.worker._lookup_key_prefixes[group][shard]}@{digest.hex()}")

    def lookup(self, num_tokens: int, hashes: Sequence[bytes]) -> tuple[int, dict[int, int]]:
        """Hit length, and for each group the boundary under whose hash its last chunk is stored."""
        result = self.worker.lookup(num_tokens, hashes)
        return result.hit_length, {b.group_id: b.num_tokens for b in result.tail_key_boundaries}

    def load_mask(self, hashes: Sequence[bytes], hit_length: int) -> list[list[bool]]:
        return [list(mask) for mask in self.coordinator.load_mask([BlockHash(h) for h in hashes], hit_length)]

    def store_mask(self, *args: Any) -> list[list[bool] | None]:
        return list(self.coordinator.store_mask(*args))

    def lookup_mask(self, aligned_len: int) -> list[list[bool] | None]:
        return list(self.coordinator.lookup_mask(aligned_len))


def core_coordinator(spec: CacheSpec, cached: Sequence[tuple[int, bytes]]) -> KVCacheCoordinator:
    """The engine's own coordinator, with a real block pool in which these (group, digest) are cached."""
    groups = [KVCacheGroupSpec([f"layer{i}"], vllm_spec(g), g.eagle) for i, g in enumerate(spec.groups)]
    coordinator = get_kv_cache_coordinator(
        KVCacheConfig(len(cached) + 2, [], groups, spec.retention_interval),
        max_model_len=1 << 20,
        max_in_flight_tokens=1 << 20,
        use_eagle=spec.use_eagle,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=spec.common_block,
        hash_block_size=spec.hash_block_size,
        allow_partial_hash_hits=spec.partial_hits,
    )
    pool = coordinator.block_pool
    for (group, digest), block in zip(cached, pool.blocks[1:], strict=False):
        pool.cached_block_hash_to_block.insert(make_block_hash_with_group_id(BlockHash(digest), group), block)
    return coordinator
