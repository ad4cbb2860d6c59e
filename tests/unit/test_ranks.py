"""Key shards, replicas and striping over ranks."""

from __future__ import annotations

import pytest

from kvpool.errors import ConfigError
from kvpool.ranks import Parallel, Rank
from kvpool.spec import CacheGroup, Kind

FULL = CacheGroup(Kind.FULL, 16)


def spread_over_4(heads: int) -> CacheGroup:
    return FULL.spread(Parallel(4), heads)


@pytest.mark.parametrize(
    ("parallel", "kind", "heads", "shards", "replicas"),
    [
        (Parallel(), Kind.FULL, 8, 1, 1),
        (Parallel(4), Kind.FULL, 8, 4, 1),
        (Parallel(8), Kind.FULL, 2, 2, 4),  # few KV heads: four ranks hold the same
        (Parallel(8), Kind.MLA, 128, 1, 8),  # the latent is the same everywhere
        (Parallel(8), Kind.MAMBA, 1, 8, 1),  # a state differs on every rank
        (Parallel(4, pipeline=2), Kind.FULL, 8, 8, 1),
        (Parallel(2, prefill_context=2), Kind.FULL, 8, 4, 1),
        (Parallel(8, decode_context=2), Kind.FULL, 2, 8, 1),  # each rank holds other tokens
    ],
)
def test_shards_and_replicas(parallel: Parallel, kind: Kind, heads: int, shards: int, replicas: int) -> None:
    group = CacheGroup(kind, 16)
    kv_heads = {Kind.MLA: 1, Kind.MAMBA: None}.get(kind, heads)
    assert group.spread(parallel, heads).shards == shards
    assert parallel.replicas(kv_heads) == replicas
    by_shard: dict[int, list[Rank]] = {}
    for rank in parallel.ranks():
        by_shard.setdefault(parallel.shard(rank, kv_heads), []).append(rank)
    assert sorted(by_shard) == list(range(shards)), "every shard has a rank that stores it"
    assert {len(ranks) for ranks in by_shard.values()} == {replicas}
    assert len(parallel.ranks()) == parallel.size


def test_every_chunk_of_a_shard_is_put_by_exactly_one_of_its_ranks() -> None:
    parallel = Parallel(8, pipeline=2)
    for group in range(3):
        for shard in range(4):
            ranks = [r for r in parallel.ranks() if parallel.shard(r, 2) == shard]
            for chunk in range(16):
                takers = []
                for rank in ranks:
                    step, phase = parallel.put_stripe(rank, 2)
                    if chunk % step == (phase + group) % step:
                        takers.append(rank)
                assert len(takers) == 1


def test_decode_context_parallelism_scales_attention_blocks_but_not_states() -> None:
    parallel = Parallel(4, decode_context=4)
    assert FULL.spread(parallel, 8).block_size == 64
    assert CacheGroup(Kind.MLA, 16).spread(parallel).block_size == 64
    assert CacheGroup(Kind.MAMBA, 64).spread(parallel).block_size == 64


def test_pipeline_stages_without_layers_of_a_group_hold_no_shard() -> None:
    parallel = Parallel(2, pipeline=4)
    assert FULL.spread(parallel, 8, stages=(1, 3)).shards == 4
    assert [parallel.shard(Rank(1, p), 8, (1, 3)) for p in (1, 3)] == [2, 3]
    with pytest.raises(ConfigError, match="stage 0 holds no layers"):
        parallel.shard(Rank(1, 0), 8, (1, 3))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor = 0"):
        Parallel(0)
    with pytest.raises(ConfigError, match="must divide"):
        Parallel(4, decode_context=3)
    with pytest.raises(ConfigError, match="evenly"):
        Parallel(6).replicas(4)
    for heads in (0, -2):
        for refused in (Parallel(4).replicas, Parallel(4).shards, spread_over_4):
            with pytest.raises(ConfigError, match=f"{heads} KV heads"):
                refused(heads)


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.SLIDING_WINDOW, Kind.CHUNKED_LOCAL])
def test_kinds_with_heads_are_not_spread_without_their_number(kind: Kind) -> None:
    group = CacheGroup(kind, 16)
    with pytest.raises(ConfigError, match="needs kv_heads"):
        group.spread(Parallel(8))
    assert CacheGroup(Kind.MLA, 16).spread(Parallel(8)).shards == 1
    assert CacheGroup(Kind.MAMBA, 16).spread(Parallel(8)).shards == 8
