"""What each kind of attention needs, and which chunks are worth keeping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.attention import Mask, Reuse, needed, reachable
from kvpool.spec import CacheGroup, Kind
from tests.unit.search_reference import attended

GROUPS = [
    CacheGroup(Kind.FULL, 4),
    CacheGroup(Kind.MLA, 3),
    CacheGroup(Kind.SLIDING_WINDOW, 4, window=8),
    CacheGroup(Kind.SLIDING_WINDOW, 4, window=9),
    CacheGroup(Kind.SLIDING_WINDOW, 2, window=2),
    CacheGroup(Kind.CHUNKED_LOCAL, 4, chunk=16),
    CacheGroup(Kind.CHUNKED_LOCAL, 4, chunk=10),
]


def kept(mask: Mask | None) -> list[int]:
    assert mask is not None
    return [int(i) for i in np.flatnonzero(mask)]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_chunks_of_the_tokens_attended_to(group: CacheGroup) -> None:
    for length in range(0, 60 * group.block_size, group.block_size):
        first, end = needed(group, length)
        assert sorted({t // group.block_size for t in attended(group, length)}) == list(range(first, end))


@pytest.mark.parametrize("group", [*GROUPS, CacheGroup(Kind.MAMBA, 4)], ids=str)
def test_arrays_answer_like_numbers(group: CacheGroup) -> None:
    lengths = np.arange(group.block_size, 200, group.block_size)
    first, end = needed(group, lengths)
    assert list(zip(first.tolist(), end.tolist(), strict=True)) == [needed(group, int(n)) for n in lengths]


def test_a_dense_hit_may_end_inside_a_chunk() -> None:
    assert needed(CacheGroup(Kind.FULL, 16), 20) == (0, 2)


def test_mamba_needs_the_last_state_only() -> None:
    group = CacheGroup(Kind.MAMBA, 16)
    assert [needed(group, n) for n in (16, 48, 52)] == [(0, 1), (2, 3), (3, 4)]


def test_a_window_of_one_needs_the_chunk_below() -> None:
    assert needed(CacheGroup(Kind.SLIDING_WINDOW, 4, window=1), 16) == (3, 4)


@pytest.mark.parametrize("group", GROUPS, ids=str)
@settings(deadline=None)
@given(data=st.data())
def test_every_chunk_that_a_hit_needs_is_kept(group: CacheGroup, data: st.DataObject) -> None:
    """Dense retention, and every regular place with a retention interval."""
    common = group.block_size * data.draw(st.integers(1, 8))
    retention = data.draw(st.none() | st.integers(1, 4).map(lambda n: n * common))
    end = 20 * common // group.block_size
    mask = reachable(group, 0, end, Reuse(common, retention=retention))
    keeps = np.ones(end, np.bool_) if mask is None else mask
    for length in range(retention or common, 20 * common + 1, retention or common):
        first, stop = needed(group, length)
        assert keeps[first:stop].all()


def test_a_sliding_window_keeps_nothing_else() -> None:
    group = CacheGroup(Kind.SLIDING_WINDOW, 4, window=5)
    assert kept(reachable(group, 0, 16, Reuse(16))) == [3, 7, 11, 15]
    assert kept(reachable(group, 0, 16, Reuse(16, eagle=True))) == [3, 4, 7, 8, 11, 12, 15]
    assert kept(reachable(group, 0, 16, Reuse(16, retention=32))) == [7, 15]
    assert kept(reachable(group, 0, 16, Reuse(16, retention=0, resume_at=(37,)))) == [7]


def test_a_window_as_long_as_the_interval_keeps_all() -> None:
    assert reachable(CacheGroup(Kind.SLIDING_WINDOW, 4, window=17), 0, 16, Reuse(16)) is None


def test_mamba_keeps_a_state_an_interval_and_where_replays_resume() -> None:
    group = CacheGroup(Kind.MAMBA, 16)
    assert reachable(group, 0, 8, Reuse(16)) is None
    assert reachable(group, 0, 8, Reuse(16, retention=16)) is None
    assert kept(reachable(group, 0, 8, Reuse(16, retention=48))) == [2, 5]
    assert kept(reachable(group, 0, 8, Reuse(16, retention=0, resume_at=(70,)))) == [3]
    assert kept(reachable(group, 3, 8, Reuse(16, retention=0, resume_at=(70,)))) == [0]
    assert kept(reachable(group, 4, 8, Reuse(16, retention=0, resume_at=(70,)))) == []
