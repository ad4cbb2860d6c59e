"""The same questions to kvpool and to the installed vLLM: its store's coordinator, and the engine's own.

Where kvpool answers otherwise on purpose is said in :mod:`tests.unit.test_coordinator_vectors`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvpool.attention import Reuse, reachable
from kvpool.coordinator import Coordinator
from kvpool.hashes import chain_hashes
from kvpool.spec import CacheGroup, CacheSpec, Kind
from tests.differential.oracle import Oracle, core_coordinator, vllm_spec
from tests.unit.search_reference import assert_loadable, drive, longest_hit, patterns, specs

MANY = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def ints(mask: npt.NDArray[np.bool_] | list[bool] | None) -> list[int] | None:
    return None if mask is None else np.asarray(mask).astype(int).tolist()


@st.composite
def questions(draw: st.DrawFn, *, chunked: bool = True) -> tuple[CacheSpec, int, dict[int, set[int]]]:
    """A spec that vLLM takes too, a prompt length and what is stored."""
    spec = draw(specs(max_groups=3))
    assume(all(g.cacheable and g.window != 1 for g in spec.groups))
    # vLLM takes partial hits only if chunks of other kinds than full attention and Mamba are one hash block.
    assume(not spec.partial_hits or spec.alignment == spec.hash_block_size)
    if any(g.kind is Kind.CHUNKED_LOCAL for g in spec.groups):
        # ... and chunked local attention only with one block size for all, spans of whole blocks and no partial hits.
        # Where a hit ends at the start of a span, its store worker demands a chunk that nobody needs.
        assume(chunked and not spec.partial_hits and {g.block_size for g in spec.groups} == {spec.common_block})
        assume(all(g.chunk is None or g.chunk % g.block_size == 0 for g in spec.groups))
    num_tokens = draw(st.integers(spec.hash_block_size, 8 * spec.common_block + 20))
    return spec, num_tokens, draw(patterns(spec, num_tokens))


@MANY
@given(questions(chunked=False))
def test_lookups_agree_with_the_store_coordinator(case: tuple[CacheSpec, int, dict[int, set[int]]]) -> None:
    spec, num_tokens, stored = case
    hashes = chain_hashes(range(num_tokens), spec.hash_block_size)
    oracle = Oracle(spec)
    for group, ids in stored.items():
        for i in ids:
            oracle.store_chunk(group, 0, hashes[i])
    theirs, boundaries = oracle.lookup(num_tokens, hashes)
    ours = drive(spec, num_tokens, stored).hit
    assert_loadable(ours, spec, num_tokens, stored, 0)
    miscounts_drops = any(spec.eagle) and any(g.kind is Kind.SLIDING_WINDOW for g in spec.groups)
    names_above = any(spec.ends_inside(i) for i in range(len(spec.groups)))
    if ours.length != theirs:
        assert miscounts_drops or names_above
        assert ours.length > theirs or miscounts_drops
        assert ours.length == longest_hit(spec, num_tokens, len(hashes), stored)
    elif ours.length:
        assert ours.boundaries == tuple(boundaries[i] for i in range(len(spec.groups)))
        masks = Coordinator(spec).load_mask(theirs)
        assert [ints(m) for m in masks] == [ints(m) for m in oracle.load_mask(hashes, theirs)]


def sliding(block: int, tokens: int) -> CacheGroup:
    return CacheGroup(Kind.SLIDING_WINDOW, block, window=tokens)


@pytest.mark.parametrize(
    ("spec", "num_tokens", "stored", "ours", "theirs"),
    [
        pytest.param(
            CacheSpec((CacheGroup(Kind.FULL, 16), sliding(8, 48)), 8, use_eagle=True),
            62,
            {0: {1, 3, 5}, 1: set(range(7))},
            32,
            16,
            id="eagle drops twice",
        ),
        pytest.param(
            CacheSpec((sliding(8, 9), CacheGroup(Kind.MAMBA, 8)), 8, use_eagle=True),
            64,
            {0: {0, 1, 2, 3, 6, 7}, 1: {0, 1, 2, 3}},
            24,
            32,
            id="eagle drops none",
        ),
        pytest.param(
            CacheSpec((CacheGroup(Kind.FULL, 8), sliding(8, 1)), 8),
            62,
            {0: {0, 1, 2}, 1: {2}},
            24,
            0,
            id="a window of one never hits",
        ),
        pytest.param(
            CacheSpec((CacheGroup(Kind.FULL, 8), CacheGroup(Kind.MAMBA, 8)), 4, partial_hits=True),
            16,
            {0: {1, 3}, 1: {0, 1, 2, 3}},
            12,
            8,
            id="later names are forgotten",
        ),
    ],
)
def test_the_documented_differences(
    spec: CacheSpec, num_tokens: int, stored: dict[int, set[int]], ours: int, theirs: int
) -> None:
    """The examples of docs/hit-search.md."""
    hashes, oracle = chain_hashes(range(num_tokens), spec.hash_block_size), Oracle(spec)
    for group, ids in stored.items():
        for i in ids:
            oracle.store_chunk(group, 0, hashes[i])
    hit = drive(spec, num_tokens, stored).hit
    assert (hit.length, oracle.lookup(num_tokens, hashes)[0]) == (ours, theirs)
    assert hit.length == longest_hit(spec, num_tokens, len(hashes), stored)
    assert_loadable(hit, spec, num_tokens, stored, 0)


@MANY
@given(questions(), st.sampled_from([None, 0, 1, 2, 5]), st.integers(0, 200), st.integers(1, 300))
def test_masks_agree_with_the_store_coordinator(
    case: tuple[CacheSpec, int, dict[int, set[int]]], retention: int | None, start: int, prompt: int
) -> None:
    spec, num_tokens, _ = case
    interval = None if retention is None else retention * spec.common_block
    spec = CacheSpec(spec.groups, spec.hash_block_size, spec.use_eagle, interval, spec.partial_hits)
    coordinator, oracle, length = Coordinator(spec), Oracle(spec), spec.align(num_tokens)
    # With a drafter of Mamba groups alone vLLM keeps the places of a replay one block too low, see below.
    replays = [] if no_drafter_reads(spec) else [(length, start, prompt), (length, 0, prompt)]
    for args in (*replays, (length, start, None)):
        assert [ints(m) for m in coordinator.store_mask(*args)] == [ints(m) for m in oracle.store_mask(*args)]
    assert [ints(m) for m in coordinator.lookup_mask(length)] == [ints(m) for m in oracle.lookup_mask(length)]


def no_drafter_reads(spec: CacheSpec) -> bool:
    """EAGLE is on, but only for Mamba groups, which no drafter reads: no hit loses a block."""
    return any(spec.eagle) and not any(spec.eagle_margin(i) for i in range(len(spec.groups)))


def test_a_replay_with_a_drafter_of_mamba_groups_alone_resumes_where_its_hit_ends() -> None:
    """vLLM keeps the tail one block lower, where a replay resumes only if a drafter reads on; its search does not."""
    groups = (CacheGroup(Kind.FULL, 16), sliding(16, 17), CacheGroup(Kind.MAMBA, 16, eagle=True))
    spec = CacheSpec(groups, 16, retention_interval=0)
    assert no_drafter_reads(spec)
    assert ints(Coordinator(spec).store_mask(64, 0, 70)[1]) == [0, 0, 0, 1]
    assert ints(Oracle(spec).store_mask(64, 0, 70)[1]) == [0, 0, 1, 0]
    stored = {0: {0, 1, 2, 3}, 1: {2, 3}, 2: {2, 3}}
    hashes, oracle = chain_hashes(range(70), 16), Oracle(spec)
    for group, ids in stored.items():
        for i in ids:
            oracle.store_chunk(group, 0, hashes[i])
    assert drive(spec, 70, stored).hit.length == oracle.lookup(70, hashes)[0] == 64


@MANY
@given(questions())
def test_lookups_agree_with_the_engines_own_prefix_cache(case: tuple[CacheSpec, int, dict[int, set[int]]]) -> None:
    """The coordinator by which the engine finds hits in its own memory, with a real block pool."""
    spec, num_tokens, stored = case
    miscounts_drops = any(spec.eagle) and any(g.kind is Kind.SLIDING_WINDOW for g in spec.groups)
    assume(not miscounts_drops)
    assume(not spec.partial_hits)  # needs Mamba groups whose block is not a hash block; see the store coordinator
    if len(spec.groups) == 1:
        assume(spec.groups[0].block_size == spec.hash_block_size)
        assume(not any(spec.eagle))  # with one group the engine does not read the block above the last token
    if any(spec.eagle):  # the engine may also read a block that no aligned lookup covers
        num_tokens = num_tokens // spec.common_block * spec.common_block
        assume(num_tokens)
    hashes = chain_hashes(range(num_tokens), spec.hash_block_size)
    stored = {g: {i for i in ids if i < len(hashes)} for g, ids in stored.items()}
    core = core_coordinator(spec, [(g, hashes[i]) for g, ids in stored.items() for i in ids])
    blocks, length, *_ = core.find_longest_cache_hit([BlockHash(h) for h in hashes], num_tokens - 1)
    hit = drive(spec, num_tokens, stored).hit
    assert hit.length == length
    if length and not any(spec.eagle):
        masks = [[not b.is_null for b in group] for group in blocks]
        assert [ints(m) for m in Coordinator(spec).load_mask(length)] == [ints(m) for m in masks]


@MANY
@given(st.data())
def test_reachable_chunks_agree_with_the_managers(data: st.DataObject) -> None:
    """Which chunks later hits can use, kind by kind, Mamba states included."""
    block = data.draw(st.sampled_from([1, 2, 4]))
    kind = data.draw(st.sampled_from([Kind.FULL, Kind.MLA, Kind.SLIDING_WINDOW, Kind.MAMBA]))
    group = CacheGroup(
        kind, block, window=data.draw(st.integers(2, 8 * block)) if kind is Kind.SLIDING_WINDOW else None
    )
    common = block * data.draw(st.integers(1, 6))
    retention = data.draw(st.sampled_from([None, 0, 1, 2, 3]))
    interval = None if retention is None else retention * common
    first = data.draw(st.integers(0, 30))
    end = first + data.draw(st.integers(0, 40))
    places = tuple(data.draw(st.lists(st.integers(0, 80 * block), max_size=3)))
    eagle = data.draw(st.booleans())
    manager: Any = KVCacheSpecRegistry.get_manager_class(vllm_spec(group))
    theirs = manager.reachable_block_mask(
        start_block=first,
        end_block=end,
        alignment_tokens=common,
        kv_cache_spec=vllm_spec(group),
        use_eagle=eagle,
        retention_interval=interval,
        reachable_boundaries=places,
    )
    assert ints(reachable(group, first, end, Reuse(common, eagle, interval, places))) == ints(theirs)
