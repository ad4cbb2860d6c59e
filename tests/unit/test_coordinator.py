"""The hit search and the masks: what is asked, what is hit, what is loaded."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import search as search_module
from kvpool.coordinator import MAX_WAVES, Coordinator, Hit
from kvpool.errors import StoreError
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import PRESENT, UNKNOWN
from tests.unit.search_reference import (
    Stored,
    Trace,
    assert_loadable,
    drive,
    everything,
    longest_hit,
    patterns,
    specs,
)

FULL_16 = CacheSpec((CacheGroup(Kind.FULL, 16),), 16)


def window(block: int, tokens: int) -> CacheGroup:
    return CacheGroup(Kind.SLIDING_WINDOW, block, window=tokens)


#: A large model: one dense and four sparse groups.
FIVE = CacheSpec(
    (CacheGroup(Kind.FULL, 256), window(64, 128), window(64, 512), window(4, 16), window(8, 64)),
    4,
)
LONG = 289_024


@st.composite
def cases(draw: st.DrawFn) -> tuple[CacheSpec, int, dict[int, set[int]], int]:
    """A spec, a prompt length, what is stored, and what the engine holds."""
    spec = draw(specs())
    num_tokens = draw(st.integers(0, 12 * spec.common_block + 40) | st.integers(150, 12 * spec.common_block + 150))
    local = draw(st.sampled_from([0, 0, 0, num_tokens // 3, num_tokens - 1]))
    return spec, num_tokens, draw(patterns(spec, num_tokens)), max(local, 0) // spec.alignment * spec.alignment


def check(trace: Trace, spec: CacheSpec, num_tokens: int, stored: Stored, local: int) -> None:
    """Everything that holds for any search."""
    assert trace.hit.length == longest_hit(spec, num_tokens, num_tokens // spec.hash_block_size, stored, local)
    assert len(trace.waves) <= MAX_WAVES
    allowed = everything(spec, num_tokens)
    assert len(set(trace.asked)) == len(trace.asked), "nothing is asked twice"
    assert all(i in allowed[group] for group, i in trace.asked), "nothing outside the masks"
    assert_loadable(trace.hit, spec, num_tokens, stored, local)


class TestSearch:
    @settings(max_examples=400, deadline=None)
    @given(cases())
    def test_equals_the_definition(self, case: tuple[CacheSpec, int, dict[int, set[int]], int]) -> None:
        """At most six waves, no key twice or outside the masks, the defined answer, and every group can load it."""
        spec, num_tokens, stored, local = case
        check(drive(spec, num_tokens, stored, local_tokens=local), spec, num_tokens, stored, local)

    @settings(max_examples=300, deadline=None)
    @given(cases())
    def test_equals_the_definition_with_tiny_windows(
        self, case: tuple[CacheSpec, int, dict[int, set[int]], int]
    ) -> None:
        """The same with constants so small that short prompts need every wave."""
        spec, num_tokens, stored, local = case
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search_module, "_LADDER", np.array([0, 1 << 40]))
            patch.setattr(search_module, "_SAMPLES", 2)
            patch.setattr(search_module, "_SPACING", np.linspace(0.0, 1.0, 2))
            patch.setattr(search_module, "_BATCH", 1)
            patch.setattr(search_module, "_SCOUTS", 3)
            check(drive(spec, num_tokens, stored, local_tokens=local), spec, num_tokens, stored, local)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_long_prompts_need_at_most_six_waves(self, data: st.DataObject) -> None:
        spec = data.draw(st.sampled_from([FULL_16, FIVE, CacheSpec((CacheGroup(Kind.MAMBA, 64), window(16, 64)), 16)]))
        num_tokens = data.draw(st.integers(1, 60_000))
        stored = data.draw(patterns(spec, num_tokens))
        trace = drive(spec, num_tokens, stored)
        allowed = everything(spec, num_tokens)
        assert len(trace.waves) <= MAX_WAVES
        assert len(set(trace.asked)) == len(trace.asked) <= sum(map(len, allowed.values()))
        assert all(i in allowed[group] for group, i in trace.asked)

    def test_a_miss_costs_one_small_wave(self) -> None:
        trace = drive(FULL_16, LONG, {0: set()})
        assert trace.hit == Hit(0, (0,))
        assert len(trace.waves) == 1
        assert len(trace.asked) <= 64
        trace = drive(FIVE, LONG, {i: set() for i in range(5)})
        assert len(trace.waves) == 1
        assert len(trace.asked) <= 64 + (2 + 8 + 4 + 8)

    def test_a_whole_hit_takes_two_waves_and_only_the_tails_of_sparse_groups(self) -> None:
        trace = drive(FIVE, LONG, everything(FIVE, LONG))
        assert trace.hit.length == LONG - 256
        assert len(trace.waves) == 2
        assert len(trace.asked) == (LONG - 256) // 256 + (2 + 8 + 4 + 8)

    def test_a_partial_hit_asks_little_beyond_it(self) -> None:
        for tenth in range(10):
            run = (LONG // 16) * tenth // 10
            trace = drive(FULL_16, LONG, {0: set(range(run))})
            assert trace.hit.length == run * 16
            assert len(trace.waves) <= 3
            assert len(trace.asked) <= run + 200

    def test_a_hole_ends_the_run_of_a_dense_group(self) -> None:
        trace = drive(FULL_16, 1600, {0: set(range(100)) - {37}})
        assert trace.hit == Hit(37 * 16, (37 * 16,))

    def test_a_hit_never_covers_the_last_token(self) -> None:
        for num_tokens, length in ((31, 16), (32, 16), (33, 32)):
            assert drive(FULL_16, num_tokens, {0: {0, 1}}).hit.length == length

    def test_all_present_goes_on_below_the_last_token(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 32), window(8, 8)), 8)
        trace = drive(spec, 96, {0: set(range(12)), 1: {3, 7, 11}})
        assert trace.hit == Hit(64, (64, 64))

    def test_a_mamba_hit_excludes_the_last_token(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.MAMBA, 16),), 16)
        assert drive(spec, 32, {0: {0, 1}}).hit == Hit(16, (16,))
        assert drive(spec, 32, {0: {1}}).hit == Hit(0, (0,)), "the state at 32 has read the last token"

    @pytest.mark.parametrize("num_tokens", [0, 1, 15, 16])
    def test_empty_work_asks_nothing(self, num_tokens: int) -> None:
        assert drive(FULL_16, num_tokens, {0: {0}}).waves == []
        assert drive(FULL_16, 1000, {0: {0}}, num_hashes=0).waves == []
        assert drive(FULL_16, 1000, {0: {0}}, local_tokens=992).waves == []

    def test_hashes_limit_what_is_asked(self) -> None:
        trace = drive(FULL_16, 1000, {0: set(range(62))}, num_hashes=5)
        assert trace.hit.length == 80
        assert sorted(trace.asked) == [(0, i) for i in range(5)]

    def test_what_the_engine_holds_is_not_asked_for(self) -> None:
        stored = {0: set(range(100))}
        trace = drive(FULL_16, 1601, stored, local_tokens=800)
        assert trace.hit.length == 1600
        assert min(i for _, i in trace.asked) == 50
        again = drive(FULL_16, 1601, stored, local_tokens=160)
        assert min(i for _, i in again.asked) == 10, "asked again when the engine's own cache has shrunk"

    def test_a_window_is_not_asked_for_what_the_engine_holds(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 16), window(16, 65)), 16)
        trace = drive(spec, 1601, {0: set(range(100)), 1: {50}}, local_tokens=800)
        assert trace.hit == Hit(816, (816, 816)), "chunks 47 to 49 of the window are the engine's"
        assert min(i for group, i in trace.asked if group == 1) == 50

    @pytest.mark.parametrize("kind", [np.int64, np.uint32, np.uint64, np.uint8])
    def test_numpy_numbers_count_like_plain_ones(self, kind: type) -> None:
        def search(*numbers: Any) -> Hit:
            found = Coordinator(FULL_16).search(*numbers[:2], local_tokens=numbers[2])
            try:
                (probe,) = next(found)
                found.send([np.full(len(probe.hash_ids), PRESENT)])
            except StopIteration as done:
                hit: Hit = done.value
                return hit
            raise AssertionError("one wave is enough")

        for numbers in ((0, 0, 0), (0, 6, 0), (100, 6, 0), (100, 6, 17), (10, 0, 0), (100, 6, 200)):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert search(*map(kind, numbers)) == search(*numbers)

    def test_a_hit_that_adds_nothing_to_the_engines_own_is_a_miss(self) -> None:
        assert drive(FULL_16, 1601, {0: set(range(50))}, local_tokens=800).hit == Hit(0, (0,))

    def test_unknown_presence_counts_as_absent(self) -> None:
        assert drive(FULL_16, 1601, {0: set(range(50))}, absent=UNKNOWN).hit.length == 800

    def test_sparse_hits_fall_back_to_the_last_place_every_group_kept(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 16), CacheGroup(Kind.MAMBA, 16), window(16, 33)), 16)
        stored = {0: set(range(100)), 1: {80, 31, 10}, 2: {9, 10, 30, 31, 80}}
        trace = drive(spec, 1601, stored)
        assert trace.hit == Hit(32 * 16, (512, 512, 512))

    def test_the_sixth_wave_settles_whatever_is_open(self) -> None:
        """The worst case: the dense run ends in the middle, and the only state is the very first."""
        spec = CacheSpec((CacheGroup(Kind.FULL, 16), CacheGroup(Kind.MAMBA, 16)), 16)
        trace = drive(spec, LONG, {0: set(range(9_000)), 1: {0}})
        assert trace.hit == Hit(16, (16, 16))
        assert len(trace.waves) == MAX_WAVES
        assert [sum(group for group, _ in wave) for wave in trace.waves] == [
            1,
            0,
            0,
            4,
            32 + 1024,
            9_000 - 4 - 32 - 1024,
        ]
        assert drive(spec, LONG, {0: set(range(9_000)), 1: set()}).hit.length == 0

    def test_partial_hits_name_the_boundary_each_group_stored(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 16), CacheGroup(Kind.MAMBA, 16)), 4, partial_hits=True)
        # The dense chunk 16..31 is stored as far as 28; the state as of 24.
        trace = drive(spec, 64, {0: {3, 6}, 1: {3, 5}})
        assert trace.hit == Hit(24, (28, 24))
        # A chunk stored whole serves as well, and the nearest name is preferred.
        assert drive(spec, 64, {0: {3, 7}, 1: {5}}).hit == Hit(24, (32, 24))
        assert drive(spec, 64, {0: {3, 5, 6, 7}, 1: {5}}).hit == Hit(24, (24, 24))

    def test_groups_that_opt_out_have_no_say(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 3, cacheable=False), CacheGroup(Kind.FULL, 16)), 16)
        trace = drive(spec, 100, {0: set(), 1: set(range(6))})
        assert trace.hit == Hit(96, (0, 96))
        assert {group for group, _ in trace.asked} == {1}

    def test_several_groups_with_one_spec_must_all_have_it(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 16), CacheGroup(Kind.FULL, 16)), 16)
        assert drive(spec, 100, {0: set(range(6)), 1: {0, 1}}).hit == Hit(32, (32, 32))

    def test_eagle_drops_one_block_of_each_group(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 16),), 16, use_eagle=True)
        assert drive(spec, 1601, {0: set(range(50))}).hit.length == 49 * 16
        # Three windows: the block above the hit is read once, not once for each of them.
        spec = CacheSpec((CacheGroup(Kind.FULL, 16), window(16, 20), window(16, 40)), 16, use_eagle=True)
        assert drive(spec, 1601, {i: set(range(50)) for i in range(3)}).hit.length == 49 * 16

    def test_a_short_answer_of_the_store_is_an_error(self) -> None:
        search = Coordinator(FULL_16).search(1000, 62)
        next(search)
        with pytest.raises(StoreError, match=r"1 presence entries for 57 keys|1 presence entries"):
            search.send([np.ones(1, np.uint8)])


class TestMasksBeforeHashes:
    """Full 32 and sliding window 8 (window 8), hashed by 8, 96 tokens: chunks end at hashes 3, 7 and 11."""

    SPEC = CacheSpec((CacheGroup(Kind.FULL, 32), window(8, 8)), 8)

    def test_everything_is_three_hashes_a_group(self) -> None:
        assert everything(self.SPEC, 96) == {0: {3, 7, 11}, 1: {3, 7, 11}}

    @settings(deadline=None)
    @given(st.integers(0, 110), st.sets(st.integers(0, 13)), st.sets(st.integers(0, 13)))
    def test_no_search_touches_others(self, num_tokens: int, full: set[int], sliding: set[int]) -> None:
        trace = drive(self.SPEC, num_tokens, {0: full, 1: sliding})
        assert {i for _, i in trace.asked} <= {3, 7, 11}


def ints(mask: npt.NDArray[np.bool_] | None) -> list[int] | None:
    return None if mask is None else mask.astype(int).tolist()


def kept(spec: CacheSpec, prompt: int) -> dict[int, set[int]]:
    """What is stored of a prompt: all that the boundary masks keep (the store masks, and the Mamba states)."""
    coordinator, length = Coordinator(spec), spec.align(prompt)
    stored: dict[int, set[int]] = {i: set() for i in range(len(spec.groups))}
    masks = zip(coordinator.store_mask(length, 0, prompt), coordinator.boundary_mask(length, 0, prompt), strict=True)
    for i, (by_position, mask) in enumerate(masks):
        group = spec.groups[i]
        assert not group.cacheable or group.kind is Kind.MAMBA or ints(mask) == ints(by_position)
        if group.cacheable:
            chunks = np.arange(length // group.block_size)
            chunks = chunks if mask is None else chunks[mask]
            stored[i] = set(((chunks + 1) * spec.hashes_per_block(i) - 1).tolist())
    return stored


class TestMasks:
    def test_load_takes_all_of_dense_groups_and_the_tail_of_sparse_ones(self) -> None:
        spec = CacheSpec(
            (CacheGroup(Kind.FULL, 16), window(8, 9), CacheGroup(Kind.MAMBA, 16)),
            8,
        )
        assert [ints(m) for m in Coordinator(spec).load_mask(48)] == [[1, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 1]]
        chunked = CacheSpec((CacheGroup(Kind.CHUNKED_LOCAL, 8, chunk=32),), 8)
        assert [ints(m) for m in Coordinator(chunked).load_mask(48)] == [[0, 0, 0, 0, 1, 1]]

    def test_load_chunks_leave_out_what_the_engine_holds(self) -> None:
        coordinator = Coordinator(FULL_16)
        assert coordinator.load_chunks(0, 64, 32).tolist() == [2, 3]
        assert coordinator.load_chunks(0, 64, 40).tolist() == [2, 3], "a chunk held in part is loaded whole"
        assert coordinator.load_chunks(0, 64, 64).tolist() == []

    def test_mamba_states_are_never_stored_by_position(self) -> None:
        coordinator = Coordinator(CacheSpec((CacheGroup(Kind.MAMBA, 16),), 16, retention_interval=32))
        assert ints(coordinator.store_mask(96)[0]) == [0] * 6
        assert ints(coordinator.boundary_mask(96)[0]) == [0, 1, 0, 1, 0, 1]

    def test_retention_keeps_the_places_where_a_replay_resumes(self) -> None:
        def mask(retention: int | None, eagle: bool = False, prompt: int = 70) -> list[int] | None:
            spec = CacheSpec(
                (CacheGroup(Kind.FULL, 16), window(4, 5)), 4, retention_interval=retention, use_eagle=eagle
            )
            return ints(Coordinator(spec).store_mask(96, 0, prompt)[1])

        every_fourth = [0, 0, 0, 1] * 6
        assert mask(None) == every_fourth
        assert mask(0) == [0] * 15 + [1] + [0] * 8, "only the tail at 64, the last aligned place below 70"
        assert mask(48) == [0] * 11 + [1] + [0] * 3 + [1] + [0] * 7 + [1]
        # EAGLE gives up one block and reads the block above the place.
        assert mask(0, eagle=True) == [0] * 11 + [1, 1] + [0] * 11
        # An aligned prompt: its replay resumes one block lower than a longer prompt does.
        assert mask(0, eagle=True, prompt=64) == [0] * 7 + [1, 1] + [0, 0, 1, 1] + [0] * 11

    def test_retention_keeps_the_place_where_another_prompt_has_left_this_one(self) -> None:
        """A third one that shares as much resumes there."""
        spec = CacheSpec((CacheGroup(Kind.FULL, 16), window(4, 5)), 4, retention_interval=0)
        (_, alone), (_, shared) = (Coordinator(spec).store_mask(96, 0, 70, shared) for shared in (0, 40))
        assert alone is not None
        assert shared is not None
        assert alone.nonzero()[0].tolist() == [15]
        assert shared.nonzero()[0].tolist() == [7, 15], "32 is the last common block below 40"

    def test_mamba_states_have_no_drafter_so_a_replay_loses_no_block(self) -> None:
        groups = (CacheGroup(Kind.FULL, 16), CacheGroup(Kind.MAMBA, 16, eagle=True))
        for spec in (
            CacheSpec(groups, 16, retention_interval=0),
            CacheSpec(groups[1:], 16, use_eagle=True, retention_interval=0),
        ):
            assert Coordinator(spec).boundary_mask(64, 0, 70)[-1].nonzero()[0].tolist() == [3]  # type: ignore[union-attr]

    @settings(max_examples=200, deadline=None)
    @given(cases(), st.sampled_from([None, 0, 1, 2, 3]))
    def test_an_identical_replay_hits_the_best_place_whatever_the_retention(
        self, case: tuple[CacheSpec, int, dict[int, set[int]], int], retention: int | None
    ) -> None:
        spec, prompt, _, _ = case
        interval = None if retention is None else retention * spec.common_block
        spec = CacheSpec(spec.groups, spec.hash_block_size, spec.use_eagle, interval)
        stored = kept(spec, prompt)
        everywhere = {i: set(range(prompt // spec.hash_block_size)) for i in range(len(spec.groups))}
        assert drive(spec, prompt, stored).hit.length == drive(spec, prompt, everywhere).hit.length

    @settings(max_examples=200, deadline=None)
    @given(specs(), st.integers(0, 12), st.integers(0, 300), st.integers(1, 300), st.sampled_from([None, 0, 1, 3]))
    def test_a_suffix_mask_is_the_tail_of_the_whole_and_growth_changes_nothing(
        self, spec: CacheSpec, blocks: int, start: int, prompt: int, retention: int | None
    ) -> None:
        interval = None if retention is None else retention * spec.common_block
        spec = CacheSpec(spec.groups, spec.hash_block_size, spec.use_eagle, interval, spec.partial_hits)
        coordinator, length = Coordinator(spec), blocks * spec.common_block
        masks = coordinator.store_mask, coordinator.boundary_mask
        for make in masks:
            whole, longer = make(length, 0, prompt), make(length + spec.common_block, 0, prompt)
            suffix = make(length, start, prompt)
            for i, group in enumerate(spec.groups):
                end = length // group.block_size
                first = min(end, -(-start // group.block_size))
                dense = np.ones(end, np.bool_)
                mask, tail, grown = (m[i] for m in (whole, suffix, longer))
                full = dense if mask is None else mask
                assert ints(full[first:]) == ints(dense[first:] if tail is None else tail)
                assert ints(full) == ints(dense if grown is None else grown[:end])

    @settings(max_examples=200, deadline=None)
    @given(cases())
    def test_what_is_stored_by_the_masks_is_hit(self, case: tuple[CacheSpec, int, dict[int, set[int]], int]) -> None:
        """Dense retention: once a prompt is stored, a longer one with the same start hits its last aligned place."""
        spec, num_tokens, _, _ = case
        spec = CacheSpec(spec.groups, spec.hash_block_size, spec.use_eagle)
        length, stored = spec.align(num_tokens), kept(spec, num_tokens)
        lost = spec.common_block if any(spec.eagle_margin(i) for i in spec.cached_groups) else 0
        hit = drive(spec, length + 1, stored).hit.length
        assert hit == max(length - lost, 0)
