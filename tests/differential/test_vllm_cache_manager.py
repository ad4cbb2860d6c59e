"""Hits of the same prompts in vLLM's own cache manager and in kvpool, with what vLLM itself keeps of them.

No model: prompts go through the manager as its scheduler sends them, and its block pool tells what is cached. With a
drafter (EAGLE) a hit needs the block above it, so both ends must drop the same one.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvpool.spec import CacheGroup, CacheSpec, Kind
from tests.differential.oracle import vllm_spec
from tests.unit.search_reference import drive

FULL, MAMBA = CacheGroup(Kind.FULL, 8), CacheGroup(Kind.MAMBA, 8)
WINDOW = CacheGroup(Kind.SLIDING_WINDOW, 8, window=20)
SPECS = {
    "full": CacheSpec((FULL,), 8),
    "full, eagle": CacheSpec((FULL,), 8, use_eagle=True),
    "full and window": CacheSpec((FULL, WINDOW), 8),
    "full and window, sparse": CacheSpec((FULL, WINDOW), 8, retention_interval=0),
    "full and Mamba": CacheSpec((FULL, MAMBA), 8),
    "full and Mamba, sparse": CacheSpec((FULL, MAMBA), 8, retention_interval=0),
    "full and Mamba, eagle": CacheSpec((CacheGroup(Kind.FULL, 8, eagle=True), MAMBA), 8, use_eagle=True),
    "hits inside a block": CacheSpec((CacheGroup(Kind.FULL, 16), CacheGroup(Kind.MAMBA, 16)), 4, partial_hits=True),
}
_ids = itertools.count()


def cache_manager(spec: CacheSpec) -> KVCacheManager:
    groups = [KVCacheGroupSpec([f"layer{i}"], vllm_spec(g), g.eagle) for i, g in enumerate(spec.groups)]
    return KVCacheManager(
        KVCacheConfig(200, [], groups, spec.retention_interval),
        max_model_len=1024,
        scheduler_block_size=spec.common_block,
        hash_block_size=spec.hash_block_size,
        use_eagle=spec.use_eagle,
    )


def asked(tokens: list[int], spec: CacheSpec) -> Request:
    hasher = get_request_block_hasher(spec.hash_block_size, sha256)
    return Request(f"r{next(_ids)}", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)


def cached(manager: KVCacheManager, request: Request, spec: CacheSpec) -> dict[int, set[int]]:
    """For each group, the hash indices of this prompt that vLLM's block pool holds."""
    hashes = request.block_hashes
    return {
        g: {i for i, digest in enumerate(hashes) if manager.block_pool.get_cached_block(digest, [g])}
        for g in range(len(spec.groups))
    }


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_both_find_the_same_hit_in_what_vllm_keeps(spec: CacheSpec) -> None:
    init_none_hash(sha256)
    manager, source = cache_manager(spec), random.Random(1)
    shared = [[source.randrange(1000) for _ in range(120)] for _ in range(4)]
    hits = set()
    for _ in range(150):
        start = source.choice(shared)[: source.randrange(120)]
        request = asked(start + [source.randrange(1000) for _ in range(source.randrange(1, 60))], spec)
        blocks, theirs, _ = manager.get_computed_blocks(request)
        ours = drive(spec, request.num_tokens, cached(manager, request, spec)).hit
        assert ours.length == theirs
        hits.add(theirs)
        manager.new_step_starts()
        computed: Any = {"num_new_computed_tokens": theirs, "new_computed_blocks": blocks}
        done = theirs
        block, unit = spec.common_block, spec.alignment
        while done < request.num_tokens:  # prefill in chunks that end on blocks, as vLLM cuts them for states
            last = (request.num_tokens - 1) // unit * unit
            end = min((done // block + source.randrange(1, 6)) * block, last)
            end = end if end > done else request.num_tokens
            assert manager.allocate_slots(request, end - done, **computed) is not None
            request.num_computed_tokens = done = end
            computed = {}
            _, copied = manager.take_kv_cache_block_copies()  # held until the step has run
            manager.block_pool.free_blocks(copied)
            manager.new_step_starts()
        manager.free(request)
    assert len(hits) > 5, "the prompts hardly hit"
