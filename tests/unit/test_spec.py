"""What a KV cache consists of, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.errors import UnsupportedError
from kvpool.ranks import Parallel
from kvpool.spec import CacheGroup, CacheSpec, Kind

FULL = CacheGroup(Kind.FULL, 16)
WINDOW = CacheGroup(Kind.SLIDING_WINDOW, 8, window=64)
CHUNKED = CacheGroup(Kind.CHUNKED_LOCAL, 16, chunk=64)
MAMBA = CacheGroup(Kind.MAMBA, 32)


class TestAlignment:
    def test_the_least_common_multiple_of_the_blocks(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 12), CacheGroup(Kind.FULL, 8)), 4)
        assert (spec.common_block, spec.alignment, spec.align(47)) == (24, 24, 24)

    def test_partial_hits_end_on_the_hash_block(self) -> None:
        spec = CacheSpec((FULL, MAMBA), 4, partial_hits=True)
        assert (spec.common_block, spec.alignment, spec.align(31)) == (32, 4, 28)
        assert [spec.ends_inside(i) for i in (0, 1)] == [True, False]

    def test_partial_hits_stay_on_whole_blocks_of_groups_that_cannot_be_cut(self) -> None:
        assert CacheSpec((FULL, WINDOW), 4, partial_hits=True).alignment == 8

    def test_groups_that_opt_out_do_not_count(self) -> None:
        spec = CacheSpec((FULL, CacheGroup(Kind.FULL, 7, cacheable=False)), 16)
        assert (spec.common_block, spec.cached_groups) == (16, (0,))


class TestEagle:
    def test_without_flags_all_groups_are_read(self) -> None:
        spec = CacheSpec((FULL, WINDOW, MAMBA), 8, use_eagle=True)
        assert [spec.eagle_margin(i) for i in range(3)] == [16, 8, 0], "Mamba layers have no drafter"

    def test_flags_choose(self) -> None:
        spec = CacheSpec((FULL, replace(WINDOW, eagle=True)), 8, use_eagle=True)
        assert spec.eagle == (False, True)

    def test_one_flag_holds_for_all_groups_of_one_shape(self) -> None:
        spec = CacheSpec((WINDOW, replace(WINDOW, eagle=True), FULL), 8)
        assert spec.eagle == (True, True, False)

    def test_with_partial_hits_dense_groups_lose_one_hash_block(self) -> None:
        spec = CacheSpec((FULL, CacheGroup(Kind.FULL, 4)), 4, use_eagle=True, partial_hits=True)
        assert [spec.eagle_margin(i) for i in (0, 1)] == [4, 4]


class TestRefusals:
    def test_every_reason_in_one_message(self) -> None:
        with pytest.raises(UnsupportedError) as caught:
            CacheSpec(
                (
                    CacheGroup("cross_attention", 16),  # type: ignore[arg-type]
                    CacheGroup(Kind.MAMBA, 24, mamba_mode="all"),
                    CacheGroup(Kind.FULL, 10),
                    CacheGroup(Kind.SLIDING_WINDOW, 16),
                ),
                16,
                parallel=Parallel(prefill_context=2),
            )
        message = str(caught.value)
        for reason in (
            "group 0: attention kind 'cross_attention' is not supported (supported: full, mla, ",
            "group 1: Mamba mode 'all'",
            "group 2: block size 10 is not a multiple of the hash block size 16",
            "group 3: sliding_window needs a positive window, not None",
            "4 groups with prefill context parallelism 2",
        ):
            assert reason in message

    @pytest.mark.parametrize("kind", ["cross_attention", "encoder_only", "sink_full", "", None, 3])
    def test_unknown_kinds_are_denied(self, kind: object) -> None:
        with pytest.raises(UnsupportedError, match="is not supported"):
            CacheSpec((CacheGroup(kind, 16),), 16)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("groups", "options", "reason"),
        [
            ((), {}, "no group can be cached"),
            ((replace(FULL, cacheable=False),), {}, "no group can be cached"),
            ((replace(FULL, block_size=0),), {}, "block size 0 must be positive"),
            ((replace(FULL, shards=0),), {}, "at least one"),
            ((replace(FULL, window=3),), {}, "full has no window"),
            ((replace(WINDOW, chunk=3),), {}, "sliding_window has no chunk"),
            ((replace(WINDOW, window=0),), {}, "positive window"),
            ((replace(CHUNKED, chunk=None),), {}, "positive chunk"),
            ((replace(MAMBA, mamba_mode="none"),), {}, "only 'align'"),
            ((FULL, MAMBA), {"parallel": Parallel(prefill_context=2)}, "2 groups with prefill context"),
            ((WINDOW,), {"parallel": Parallel(2, decode_context=2)}, "sliding_window with decode context"),
            ((CHUNKED,), {"parallel": Parallel(2, decode_context=2)}, "chunked_local with decode context"),
            ((CHUNKED,), {"use_eagle": True}, "chunked_local with EAGLE"),
            ((FULL, WINDOW), {"retention_interval": 24}, "multiple of 16"),
            ((FULL, WINDOW), {"retention_interval": -16}, "multiple of 16"),
            ((FULL,), {"hash_block_size": 0}, "hash block size 0"),
        ],
    )
    def test_each_reason(self, groups: tuple[CacheGroup, ...], options: dict[str, object], reason: str) -> None:
        with pytest.raises(UnsupportedError, match=reason):
            CacheSpec(groups, **{"hash_block_size": 8, **options})  # type: ignore[arg-type]

    def test_decode_context_parallelism_needs_spread_groups(self) -> None:
        parallel = Parallel(4, decode_context=4)
        spread = FULL.spread(parallel, 8)
        assert CacheSpec((spread, MAMBA.spread(parallel)), 16, parallel=parallel).common_block == 64
        for wrong in (FULL, replace(FULL, shards=4, block_size=18), replace(spread, shards=1), MAMBA):
            with pytest.raises(UnsupportedError, match=r"CacheGroup\.spread"):
                CacheSpec((wrong,), 1, parallel=parallel)

    def test_prefill_context_parallelism_of_one_group_is_fine(self) -> None:
        assert CacheSpec((FULL,), 16, parallel=Parallel(prefill_context=2)).common_block == 16

    def test_kinds_may_be_given_by_name(self) -> None:
        assert CacheGroup("mla", 16).kind is Kind.MLA  # type: ignore[arg-type]
