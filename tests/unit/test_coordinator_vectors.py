"""5,000 recorded answers of vLLM 0.32's own store coordinator: lookups, tail boundaries and masks, several ranks.

``tests/data/coordinator.jsonl.xz`` holds one case a line: the groups, what is stored under which hash in each shard of
each group, and what vLLM answers. kvpool answers the same, but for the three classes named below, where another answer
is right; there its answer is longer, equal to the definition, and loadable.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.coordinator import Coordinator
from kvpool.keys import KeySpace, Namespace
from kvpool.ranks import Parallel
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.tokens import ChunkedTokenDatabase
from tests.unit.search_reference import Trace, drive, everything, longest_hit

Case: TypeAlias = dict[str, Any]
DATA = Path(__file__).parents[1] / "data" / "coordinator.jsonl.xz"


@cache
def cases() -> list[Case]:
    with lzma.open(DATA, "rt") as lines:
        return [{"number": number, **json.loads(line)} for number, line in enumerate(lines)]


def spec_of(case: Case) -> CacheSpec:
    parallel = Parallel(tensor=case["tp_size"])
    return CacheSpec(
        tuple(
            CacheGroup(g["kind"], g["block_size"], window=g.get("window"), chunk=g.get("chunk")).spread(
                parallel, case["num_kv_heads"]
            )
            for g in case["groups"]
        ),
        case["hash_block_size"],
        use_eagle=case["use_eagle"],
        retention_interval=case["retention_interval"],
        partial_hits=case["partial_hash_hits"],
        parallel=parallel,
    )


def stored_of(case: Case) -> dict[int, set[int]]:
    """A chunk of a sharded group is there only when every shard is."""
    return {i: set.intersection(*map(set, shards)) for i, shards in enumerate(case["present"])}


@cache
def _searched(number: int) -> Trace:
    case = cases()[number]
    return drive(spec_of(case), case["num_tokens"], stored_of(case))


def searched(case: Case) -> Trace:
    return _searched(case["number"])


def ints(mask: npt.NDArray[np.bool_] | None) -> list[int] | None:
    return None if mask is None else mask.astype(int).tolist()


# ---- where another answer is right


def window_of_one(case: Case) -> bool:
    """vLLM's masks say that a window of 1 needs no chunk, its search wants one: whatever is stored, it never hits.

    kvpool keeps, asks for and loads the last chunk.
    """
    return any(g.get("window") == 1 for g in case["groups"])


def eagle_drops_twice(case: Case) -> bool:
    """With EAGLE and a sliding window vLLM gives up two blocks where one is computed again.

    Seen with several sliding-window groups (each drops after the others have), and with one whose stored run begins at
    the first token and is shorter than the window (it is cut to the alignment before the drop, and again after it).
    """
    return case["use_eagle"] and any(g["kind"] == "sliding_window" for g in case["groups"])


def names_above_are_forgotten(case: Case) -> bool:
    """With partial hits a dense chunk may be stored under a later hash than the one a hit ends at; it holds all that
    the hit needs. vLLM accepts it where its first search ends there, but not where the search was bounded before: by
    the last token (all of the prompt is stored), or by another group.
    """
    return case["partial_hash_hits"] and any(g["kind"] in ("full", "mla") for g in case["groups"])


CLASSES: list[Callable[[Case], bool]] = [window_of_one, eagle_drops_twice, names_above_are_forgotten]


def assert_proven(case: Case, trace: Trace) -> None:
    """A differing answer is longer, is the defined one, and every group can load it."""
    spec, stored, num_tokens = spec_of(case), stored_of(case), case["num_tokens"]
    assert trace.hit.length > case["lookup"]["hit_length"]
    assert trace.hit.length == longest_hit(spec, num_tokens, num_tokens // spec.hash_block_size, stored)
    database = ChunkedTokenDatabase(spec, KeySpace(Namespace.of({}), spec))
    for group in range(len(spec.groups)):
        assert set(database.load_chunks(group, trace.hit).hash_ids.tolist()) <= stored[group]


def differing(condition: Callable[[Case], bool]) -> list[Case]:
    found = [c for c in cases() if condition(c) and searched(c).hit.length != c["lookup"]["hit_length"]]
    for case in found:
        assert_proven(case, searched(case))
    return found


def test_there_are_5000_cases() -> None:
    assert len(cases()) == 5000


def test_hit_lengths_agree_but_for_31_cases_of_the_named_classes() -> None:
    found = differing(lambda case: True)
    assert all(any(named(case) for named in CLASSES) for case in found)
    assert len(found) == 31


def test_a_window_of_one_can_be_hit() -> None:
    assert len(differing(lambda c: window_of_one(c) and not eagle_drops_twice(c))) == 9


def test_eagle_with_sliding_windows_drops_one_block_not_two() -> None:
    found = differing(eagle_drops_twice)
    assert len(found) == 20
    assert len([c for c in found if sum(g["kind"] == "sliding_window" for g in c["groups"]) == 1]) == 5


def test_partial_hits_use_chunks_that_reach_past_their_end() -> None:
    assert len(differing(names_above_are_forgotten)) == 2


def test_tail_boundaries_agree_wherever_hit_lengths_do() -> None:
    for case in cases():
        hit = searched(case).hit
        if hit.length and hit.length == case["lookup"]["hit_length"]:
            boundaries = {str(i): tokens for i, tokens in enumerate(hit.boundaries)}
            assert boundaries == case["lookup"]["tail_key_tokens"], case["number"]


def test_load_masks_agree() -> None:
    for case in cases():
        if "load_mask" in case:
            masks = Coordinator(spec_of(case)).load_mask(case["lookup"]["hit_length"])
            assert [ints(m) for m in masks] == case["load_mask"], case["number"]


def test_store_masks_agree() -> None:
    for case in cases():
        given = case["store_mask"]
        masks = Coordinator(spec_of(case)).store_mask(
            given["aligned_len"], given["start_token"], given["num_prompt_tokens"]
        )
        for group, mask, expected in zip(case["groups"], masks, given["masks"], strict=True):
            if group.get("window") != 1:
                assert ints(mask) == expected, case["number"]


def test_lookup_masks_agree() -> None:
    for case in cases():
        masks = Coordinator(spec_of(case)).lookup_mask(case["num_tokens"])
        for group, mask, expected in zip(case["groups"], masks, case["lookup_mask"], strict=True):
            if group.get("window") != 1:
                assert ints(mask) == expected, case["number"]


def test_a_window_of_one_stores_and_asks_for_the_chunk_below_each_place() -> None:
    """Where vLLM keeps nothing, or only the block above (EAGLE), kvpool keeps what its search and vLLM's load need."""
    differ = 0
    for case in cases():
        masks = Coordinator(spec_of(case)).lookup_mask(case["num_tokens"])
        for group, mask, expected in zip(case["groups"], masks, case["lookup_mask"], strict=True):
            if group.get("window") == 1 and ints(mask) != expected:
                kept = np.array(expected, bool)
                assert mask is None or (mask | ~kept).all(), "nothing that vLLM keeps is dropped"
                assert mask is None or mask.sum() > kept.sum()
                differ += 1
    assert differ == 38


def test_a_window_of_one_stores_all_that_vllm_stores_and_the_chunk_below() -> None:
    seen = differ = 0
    for case in cases():
        given = case["store_mask"]
        masks = Coordinator(spec_of(case)).store_mask(
            given["aligned_len"], given["start_token"], given["num_prompt_tokens"]
        )
        for group, mask, expected in zip(case["groups"], masks, given["masks"], strict=True):
            if group.get("window") == 1:
                seen += 1
                differ += ints(mask) != expected
                assert mask is None or (expected is not None and (mask | ~np.array(expected, bool)).all())
    assert (seen, differ) == (44, 34)


def test_mamba_states_are_saved_by_exact_block_only() -> None:
    """Agreed with vLLM: the store mask of a Mamba group is all false."""
    seen = 0
    for case in cases():
        given = case["store_mask"]
        masks = Coordinator(spec_of(case)).store_mask(given["aligned_len"], given["start_token"])
        for group, mask in zip(spec_of(case).groups, masks, strict=True):
            if group.kind is Kind.MAMBA:
                assert mask is not None
                assert not mask.any()
                seen += 1
    assert seen > 1000


def test_shards_follow_from_ranks_and_heads() -> None:
    for case in cases():
        assert [g.shards for g in spec_of(case).groups] == case["shards"], case["number"]


def test_no_search_asks_outside_the_masks_or_needs_more_than_six_waves() -> None:
    for case in cases():
        trace, allowed = searched(case), everything(spec_of(case), case["num_tokens"])
        assert len(trace.waves) <= 6, case["number"]
        assert len(set(trace.asked)) == len(trace.asked), case["number"]
        assert all(i in allowed[group] for group, i in trace.asked), case["number"]
