"""Verification must be able to fail: for any byte that is wrong, and for blocks that are mixed up."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import KVPoolError
from kvpool.replay.blocks import BlockMemory, Content, block_hashes

IDS = np.array([0, 1, 2, 3, 2**63 - 1, 77], np.int64)
BLOCKS = np.array([5, 0, 3, 2, 7, 1])


@pytest.mark.parametrize("block_bytes", [8, 13, 64, 1000])
def test_every_flipped_bit_is_found(block_bytes: int) -> None:
    memory = BlockMemory(8, block_bytes)
    memory.fill(BLOCKS, IDS)
    assert memory.right(BLOCKS, IDS).all()
    for byte in range(block_bytes):
        bit = np.uint8(1 << byte % 8)
        memory.array[3, byte] ^= bit
        assert memory.right(BLOCKS, IDS).tolist() == [True, True, False, True, True, True]
        memory.array[3, byte] ^= bit


def test_a_spoilt_block_is_wrong_in_every_byte() -> None:
    memory = BlockMemory(8, 100)
    memory.spoil(BLOCKS, IDS)
    assert not memory.right(BLOCKS, IDS).any()
    assert (memory.array[BLOCKS] != Content(100).of(IDS)).all()


@given(st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=20, unique=True))
def test_two_blocks_differ_in_every_word_and_have_different_hashes(ids: list[int]) -> None:
    array = np.array(ids, np.int64)
    words = Content(64).of(array).view(np.uint64)
    for column in words.T:
        assert len(set(column.tolist())) == len(ids)
    for row in words:
        assert len(set(row.tolist())) == 8
    assert len(set(block_hashes(array))) == len(ids)


def test_content_and_hashes_follow_from_the_id_alone() -> None:
    assert (Content(24).of(IDS)[2] == Content(24).of(IDS[2:3])[0]).all()
    assert block_hashes(IDS)[4] == block_hashes(IDS[4:5])[0]
    assert (Content(16).of(IDS) == Content(24).of(IDS)[:, :16]).all()


def test_more_than_one_slice_is_filled_and_verified() -> None:
    memory = BlockMemory(40, 300_000)
    ids, blocks = np.arange(40), np.arange(40)[::-1].copy()
    memory.fill(blocks, ids)
    memory.array[blocks[39], -1] ^= 1
    memory.array[blocks[0], 0] ^= 1
    assert np.flatnonzero(~memory.right(blocks, ids)).tolist() == [0, 39]


def test_memory_that_is_not_there_is_an_error_in_words() -> None:
    with pytest.raises(KVPoolError, match="take smaller blocks"):
        BlockMemory(1 << 20, 1 << 50)


@pytest.mark.anyio
async def test_blocks_are_taken_by_one_request_at_a_time_and_waited_for() -> None:
    memory = BlockMemory(4, 8)
    first = await memory.take(3)
    got: list[int] = []

    async def second() -> None:
        got.extend((await memory.take(3)).tolist())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second)
        await anyio.wait_all_tasks_blocked()
        assert not got
        memory.give_back(first[:1])
        await anyio.wait_all_tasks_blocked()
        assert not got
        memory.give_back(first[1:2])
    assert len({*got, int(first[2])}) == 4


def test_blocks_whose_content_finds_no_memory_are_refused() -> None:
    with pytest.raises(KVPoolError, match="take smaller blocks"):
        BlockMemory(0, 1 << 50)
