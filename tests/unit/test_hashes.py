"""Block hashes: one flat buffer, read lazily."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import HashError
from kvpool.hashes import CHAIN_SCHEME, BlockHashes, chain_hashes, chunk_hashes


def hashes(data: bytes, hash_len: int) -> BlockHashes:
    return BlockHashes(data, hash_len, scheme="test")


class TestSequence:
    def test_length_index_and_iteration(self) -> None:
        h = hashes(b"aabbcc", 2)
        assert len(h) == 3
        assert (h[0], h[2], h[-1], h[-3]) == (b"aa", b"cc", b"cc", b"aa")
        assert list(h) == [b"aa", b"bb", b"cc"]
        assert b"bb" in h
        assert h.index(b"cc") == 2
        for outside in (3, -4):
            with pytest.raises(IndexError, match="of 3"):
                h[outside]

    def test_hash_len_0_is_empty(self) -> None:
        h = BlockHashes(scheme="test")
        assert (len(h), h.hash_len, list(h), bytes(h.view)) == (0, 0, [], b"")

    @pytest.mark.parametrize(("data", "hash_len"), [(b"aab", 2), (b"a", 0), (b"aa", -1), (b"aa", 4)])
    def test_a_ragged_buffer_is_an_error(self, data: bytes, hash_len: int) -> None:
        with pytest.raises(HashError, match="whole number"):
            hashes(data, hash_len)

    @settings(deadline=None)
    @given(st.binary(max_size=60), st.slices(30))
    def test_slices_are_views_and_equal_those_of_a_list(self, data: bytes, cut: slice) -> None:
        data = data[: len(data) // 2 * 2]
        h = hashes(data, 2)
        part = h[cut]
        assert list(part) == list(h)[cut]
        assert bytes(part.view) == b"".join(list(h)[cut])
        assert part.scheme == "test"
        if len(part):
            assert np.shares_memory(part._rows, h._rows), "no digest is copied"

    def test_nothing_is_copied_until_it_is_asked_for(self) -> None:
        memory = bytearray(b"aabb")
        h = hashes(memory, 2)  # type: ignore[arg-type]
        memory[2:4] = b"zz"  # what a caller must not do shows that these are the caller's bytes
        assert h[1] == b"zz"
        assert h.view.obj is not None
        assert h.view.readonly

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda d: np.frombuffer(d, np.uint8)])
    def test_any_buffer_will_do(self, kind: type) -> None:
        assert list(hashes(kind(b"aabb"), 2)) == [b"aa", b"bb"]

    def test_pack_gathers_in_order(self) -> None:
        h = hashes(b"aabbcc", 2)
        assert h.pack(np.array([2, 0, 2])) == b"ccaacc"
        assert h.pack(np.array([], np.intp)) == b""
        assert h[1:].pack(np.array([0])) == b"bb"
        for outside in ([3], [-1], [0, -3]):
            with pytest.raises(IndexError):
                h.pack(np.array(outside))

    def test_equality_is_of_scheme_and_digests(self) -> None:
        assert hashes(b"aabb", 2) == hashes(b"aabb", 2)
        assert hashes(b"aabb", 2) != hashes(b"aabb", 4)
        assert hashes(b"aabb", 2) != BlockHashes(b"aabb", 2, scheme="other")
        assert hashes(b"aabb", 2) != [b"aa", b"bb"]
        assert "2 x 2 bytes" in repr(hashes(b"aabb", 2))

    def test_memory_that_is_not_contiguous_is_an_error(self) -> None:
        with pytest.raises(HashError, match="not contiguous"):
            BlockHashes(memoryview(b"aabb")[::2], 1, scheme="test")
        h = hashes(b"aa", 2)
        with pytest.raises(HashError, match="not contiguous"):
            h.extend(memoryview(b"aabb")[::-1])
        assert list(h) == [b"aa"]


class TestScheme:
    @pytest.mark.parametrize(
        "scheme", ["", " ", "unchained", "unchained-xxh3", "Unchained", " unchained", "UNCHAINED x", None, 5, b"sha256"]
    )
    def test_unchained_hashes_are_refused(self, scheme: str) -> None:
        with pytest.raises(HashError, match="chain"):
            BlockHashes(b"aa", 2, scheme=scheme)


class TestGrowth:
    @settings(deadline=None)
    @given(st.lists(st.lists(st.binary(min_size=3, max_size=3), max_size=70), max_size=8), st.booleans())
    def test_grows_in_increments(self, parts: list[list[bytes]], flat: bool) -> None:
        h = BlockHashes(hash_len=3, scheme="test")
        whole: list[bytes] = []
        views = []
        for part in parts:
            h.extend(b"".join(part) if flat else iter(part))
            whole += part
            views.append((h[:], list(whole)))
        assert list(h) == whole
        assert bytes(h.view) == b"".join(whole)
        assert all(list(view) == then for view, then in views), "slices keep what they showed"

    def test_growing_a_slice_leaves_the_rest_alone(self) -> None:
        h = BlockHashes(scheme="test")
        h.extend([b"aa", b"bb"])
        part = h[:1]
        part.extend([b"xx"])
        assert (list(h), list(part)) == ([b"aa", b"bb"], [b"aa", b"xx"])

    def test_growing_leaves_the_callers_buffer_alone(self) -> None:
        memory = bytearray(b"aabb")
        h = hashes(memory, 2)  # type: ignore[arg-type]
        h.extend(b"cc")
        assert memory == b"aabb"
        assert list(h) == [b"aa", b"bb", b"cc"]

    def test_growing_one_by_one_seldom_moves_what_is_there(self) -> None:
        h = BlockHashes(hash_len=2, scheme="test")
        memories: list[object] = []
        for _ in range(5000):
            h.extend(b"aa")
            if not memories or memories[-1] is not h._rows:
                memories.append(h._rows)
        assert len(memories) <= 8, "doubling from 64"

    def test_the_first_digests_decide_the_length(self) -> None:
        h = BlockHashes(scheme="test")
        h.extend([])
        h.extend([b"abcd"])
        assert h.hash_len == 4
        for wrong in ([b"ab", b"cd"], b"abc", [b"abcd", b"abc"]):
            with pytest.raises(HashError):
                h.extend(wrong)
        assert list(h) == [b"abcd"]
        with pytest.raises(HashError):
            BlockHashes(scheme="test").extend(b"abcd")
        with pytest.raises(HashError):
            BlockHashes(scheme="test").extend([b"ab", b"abc"])


class TestChunkHashes:
    def test_a_chunk_is_named_by_its_last_sub_hash(self) -> None:
        h = hashes(b"aabbccddee", 2)
        assert list(chunk_hashes(h, 8, 4)) == [b"bb", b"dd"], "the fifth hash begins a chunk that is not whole"
        assert list(chunk_hashes(h, 20, 4)) == [b"ee"]
        assert list(chunk_hashes(h, 24, 4)) == []

    def test_one_size_at_any_ratio(self) -> None:
        h = hashes(bytes(64 * 32 * 2), 32)
        chunks = chunk_hashes(h, 256, 4)
        assert len(chunks) == 2
        assert chunks.hash_len == 32
        assert np.shares_memory(chunks._rows, h._rows)

    def test_equal_sizes_return_the_hashes_themselves(self) -> None:
        h = hashes(b"aabb", 2)
        assert chunk_hashes(h, 4, 4) is h

    @pytest.mark.parametrize(("block", "hash_block"), [(6, 4), (2, 4), (0, 4), (4, 0), (-4, 4)])
    def test_a_non_multiple_is_an_error(self, block: int, hash_block: int) -> None:
        with pytest.raises(HashError, match="not a multiple"):
            chunk_hashes(hashes(b"aabb", 2), block, hash_block)


class TestChainHashes:
    def test_each_digest_folds_in_the_one_before(self) -> None:
        h = chain_hashes([1, 2, 3, 4, 5], 2)
        assert (len(h), h.hash_len, h.scheme) == (2, 32, CHAIN_SCHEME)
        tail = np.array([3, 4], "<i8").tobytes()
        assert h[1] == hashlib.sha256(h[0] + tail).digest()
        assert h[1] != chain_hashes([9, 9, 3, 4], 2)[1], "equal blocks behind different prefixes differ"

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 2**31), max_size=40), st.integers(1, 5), st.integers(0, 40), st.binary(max_size=3))
    def test_increments_equal_the_whole(self, tokens: list[int], block: int, cut: int, seed: bytes) -> None:
        whole = chain_hashes(tokens, block, seed=seed)
        grown = chain_hashes(tokens[:cut], block, seed=seed)
        assert chain_hashes(tokens, block, seed=seed, onto=grown) is grown
        assert grown == whole

    def test_any_kind_of_token_sequence(self) -> None:
        tokens = [5, 6, 7, 8]
        expected = chain_hashes(tokens, 2)
        assert chain_hashes(np.array(tokens, np.int32), 2) == expected
        assert chain_hashes(array("q", tokens), 2) == expected
        assert chain_hashes(range(5, 9), 2) == expected

    def test_seed_block_size_and_extra_change_every_digest_they_cover(self) -> None:
        plain = chain_hashes(range(8), 2)
        for other in (chain_hashes(range(8), 2, seed=b"tenant"), chain_hashes(range(8), 4)):
            assert not set(plain) & set(other)
        image = chain_hashes(range(8), 2, extra={1: b"image"})
        assert [a == b for a, b in zip(plain, image, strict=True)] == [True, False, False, False]

    def test_ten_thousand_images_share_no_digest(self) -> None:
        digests = {chain_hashes([7, 7], 2, extra={0: i.to_bytes(4, "big")})[0] for i in range(10_000)}
        assert len(digests) == 10_000

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(HashError, match="do not fit"):
            chain_hashes([1, 2], 2, onto=chain_hashes([1, 2, 3, 4], 2))
        with pytest.raises(HashError, match="cannot continue"):
            chain_hashes([1, 2], 2, onto=BlockHashes(scheme="other"))
        with pytest.raises(HashError, match="positive"):
            chain_hashes([1, 2], 0)

    def test_hashes_of_another_length_are_not_continued(self) -> None:
        for other in (BlockHashes(b"aa", 2, scheme=CHAIN_SCHEME), BlockHashes(hash_len=16, scheme=CHAIN_SCHEME)):
            with pytest.raises(HashError, match=r"cannot continue hashes of (2|16) bytes"):
                chain_hashes([1, 2], 1, onto=other)
        empty = BlockHashes(scheme=CHAIN_SCHEME)
        assert chain_hashes([1, 2], 1, onto=empty) == chain_hashes([1, 2], 1)
        assert empty.hash_len == 32

    @pytest.mark.parametrize(
        "tokens",
        [
            [1.0, 2.0],
            np.array([1.5, 2.7]),
            np.array([True, False]),
            ["1", "2"],
            [2**64, 1],
            [-(2**63) - 1, 1],
            np.array([2**64 - 1, 1], np.uint64),
            np.array([1, 2**63], np.uint64),
            np.array([[1], [2]]),
        ],
    )
    def test_tokens_that_are_no_int64_are_refused(self, tokens: Any) -> None:
        with pytest.raises(HashError, match="int64"):
            chain_hashes(tokens, 1)

    def test_the_ends_of_int64_are_tokens(self) -> None:
        low, high = -(2**63), 2**63 - 1
        h = chain_hashes([low, high], 2)
        assert h == chain_hashes(np.array([low, high], ">i8"), 2)
        assert chain_hashes([high], 1) == chain_hashes(np.array([high], np.uint64), 1)
