"""Chunks, keys, addresses and ranks: the same questions to kvpool and to the installed vLLM's store connector."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    BlobBlockHashes,
    BoundaryPut,
    ReqMeta,
    chunk_hashes_for_block_size,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import _partial_tail_non_mamba_puts
from vllm.v1.core.kv_cache_utils import BlockHash

from kvpool.hashes import BlockHashes, chain_hashes, chunk_hashes
from kvpool.keys import KeySpace, Namespace
from kvpool.memory import BlockLayout, Region
from kvpool.ranks import Parallel
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.tokens import ChunkedTokenDatabase
from tests.differential.oracle import Oracle
from tests.unit.search_reference import specs

MANY = settings(max_examples=150, deadline=None)


def database(spec: CacheSpec, *layouts: BlockLayout) -> ChunkedTokenDatabase:
    return ChunkedTokenDatabase(spec, KeySpace(Namespace.of({}), spec), layouts)


@MANY
@given(st.integers(0, 40), st.sampled_from([16, 32]), st.integers(1, 8))
def test_hashes_and_chunk_hashes(count: int, hash_len: int, ratio: int) -> None:
    data = bytes(i % 251 for i in range(count * hash_len))
    ours, theirs = BlockHashes(data, hash_len, scheme="x"), BlobBlockHashes(memoryview(data), hash_len)
    assert list(ours) == [bytes(h) for h in theirs]
    chunks: Any = chunk_hashes_for_block_size(theirs, 4, 4 * ratio)
    assert list(chunk_hashes(ours, 4 * ratio, 4)) == [bytes(chunks[i]) for i in range(len(chunks))]


@MANY
@given(st.data())
def test_process_tokens(data: st.DataObject) -> None:
    hash_block, ratio, step = (data.draw(st.integers(1, n)) for n in (4, 8, 4))
    spec = CacheSpec((CacheGroup(Kind.FULL, hash_block * ratio),) * 3, hash_block)
    group, rank = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 7))
    units = data.draw(st.integers(0, 60))
    start = data.draw(st.integers(0, 70)) * hash_block
    mask = data.draw(st.none() | st.lists(st.booleans(), max_size=20))
    hashes = chain_hashes(range(units * hash_block), hash_block)
    theirs = (
        Oracle(spec)
        .databases[group]
        .process_tokens(
            units * hash_block,
            [BlockHash(h) for h in hashes],
            start,
            chunk_mask=mask,
            put_step=step,
            put_step_rank=(rank + group) % step,
        )
    )
    ours = database(spec).process_tokens(units * hash_block, hashes, start, mask, step, rank, group=group)
    assert list(ours) == [(a, b, bytes(h)) for a, b, h in theirs]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_addresses(data: st.DataObject) -> None:
    """Base addresses and strides of many regions, strides repeating."""
    regions, num_blocks = data.draw(st.sampled_from([1, 2, 96])), 20
    lengths = data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=min(regions, 3)))
    sizes = np.array([lengths[i % len(lengths)] for i in range(regions)], np.int64)
    bases = [1 << 33 | i << 16 for i in range(regions)]
    spec = CacheSpec((CacheGroup(Kind.FULL, 16),), 4)
    theirs = Oracle(spec).databases[0]
    theirs.set_kv_caches_base_addr(bases)
    theirs.set_block_len(lengths)
    layout = BlockLayout(
        tuple(Region(b, int(s) * num_blocks, None) for b, s in zip(bases, sizes, strict=True)),
        np.arange(regions),
        np.zeros(regions, np.int64),
        sizes,
        sizes,
        num_blocks,
    )
    table = data.draw(st.lists(st.integers(0, num_blocks - 1), min_size=12, max_size=12))
    ids = sorted(data.draw(st.sets(st.integers(0, 11))))
    spans = [(i * 16, (i + 1) * 16) for i in ids]
    expected: Any = theirs.store_layout.prepare_values(spans, table, [0] * len(spans))
    mine = database(spec, layout)
    assert mine.addresses(0, [table[i] for i in ids]) == (expected[0], expected[1])
    buffers = mine.span_buffers(0, spans, table)
    if ids:
        assert buffers.addresses.tolist() == expected[0]
        assert buffers.sizes.tolist() == expected[1]


@MANY
@given(specs(max_groups=3), st.integers(1, 400), st.integers(0, 400), st.booleans())
def test_partial_tails(spec: CacheSpec, prompt: int, computed: int, publish: bool) -> None:
    """Which chunks of the other groups go with a Mamba state inside a common block."""
    spec = CacheSpec(
        tuple(g for g in spec.groups if g.cacheable and g.kind is not Kind.CHUNKED_LOCAL)
        or (CacheGroup(Kind.FULL, 4),),
        spec.hash_block_size,
        spec.use_eagle,
        partial_hits=True,
    )
    if spec.alignment != spec.hash_block_size:
        return  # vLLM turns partial hits off
    oracle = Oracle(spec)
    hashes = [BlockHash(h) for h in chain_hashes(range(prompt), spec.hash_block_size)]
    tables = tuple([*range(100, 100 + 800 // g.block_size)] for g in spec.groups)
    request = ReqMeta(
        "request",
        0,
        tables,
        hashes,
        num_prompt_tokens=prompt,
        boundary_puts=[],
        completed_token_len=computed,
        publish_partial_tail=publish,
    )
    puts = _partial_tail_non_mamba_puts(oracle.coordinator, request, [g.block_size for g in spec.groups])
    last = prompt if spec.use_eagle else prompt - 1
    boundary = last // spec.hash_block_size * spec.hash_block_size - (spec.hash_block_size if spec.use_eagle else 0)
    expected = []
    for group in range(len(spec.groups)) if publish else ():
        chunks = database(spec).tail_chunks(group, boundary, computed, len(hashes))
        for chunk, end in zip(chunks.ids.tolist(), chunks.ends.tolist(), strict=True):
            expected.append(BoundaryPut(group, tables[group][chunk], end))
    assert puts == expected


@MANY
@given(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]), st.sampled_from(list(Kind))
)
def test_replicas_and_shards(tensor: int, heads: int, stages: int, kind: Kind) -> None:
    group = CacheGroup(
        kind,
        16,
        window=32 if kind is Kind.SLIDING_WINDOW else None,
        chunk=32 if kind is Kind.CHUNKED_LOCAL else None,
    )
    worker: Any = Oracle(CacheSpec((group,), 16)).worker
    for context in (1, 2):
        if tensor % context or (context > 1 and kind not in (Kind.FULL, Kind.MLA, Kind.MAMBA)):
            continue
        worker.dcp_size, worker.tp_size, worker.pcp_size, worker.pp_size = context, tensor, 1, stages
        worker.num_kv_head = heads
        worker._group_tp_replication_factors = worker._compute_group_tp_replication_factors()
        worker._init_lookup_key_prefixes()
        parallel = Parallel(tensor, stages, decode_context=context)
        spread = group.spread(parallel, heads)
        kv_heads = {Kind.MLA: 1, Kind.MAMBA: None}.get(kind, heads)
        assert worker._group_tp_replication_factors == (parallel.replicas(kv_heads),)
        assert len(worker._lookup_key_prefixes[0]) == spread.shards
        assert {parallel.shard(rank, kv_heads) for rank in parallel.ranks()} == set(range(spread.shards))
