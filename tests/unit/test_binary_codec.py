"""The form of the binary codec on the wire; the contract of every codec is in tests/conformance/test_codecs.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import HashError
from kvpool.hashes import BlockHashes
from kvpool.protocols import binary
from kvpool.protocols.binary import BinaryCodec

CODEC = BinaryCodec()


@given(hash_len=st.integers(1, 300), count=st.integers(0, 40))
def test_a_frame_is_a_big_endian_length_and_the_digests_back_to_back(hash_len: int, count: int) -> None:
    data = np.random.default_rng(0).bytes(hash_len * count)
    frame = b"".join(CODEC.encode(BlockHashes(data, hash_len, scheme="chained")))
    assert frame == hash_len.to_bytes(2, "big") + data


def test_decoding_reads_the_frame_in_place() -> None:
    frame = bytearray(b"\0\4" + b"abcd" * 3)
    hashes = CODEC.decode(frame, scheme="chained")
    frame[2:6] = b"wxyz"  # never done to a real frame: it shows that the digests were not copied
    assert hashes[0] == b"wxyz"


@given(st.binary(max_size=64))
def test_any_bytes_are_hashes_or_a_hash_error(frame: bytes) -> None:
    whole = len(frame) >= 2 and (
        (len(frame) - 2) % int.from_bytes(frame[:2], "big") == 0 if any(frame[:2]) else len(frame) == 2
    )
    try:
        hashes = CODEC.decode(frame, scheme="chained")
    except HashError:
        assert not whole
    else:
        assert whole
        assert b"".join(CODEC.encode(hashes)) == frame


def test_a_slice_with_a_step_is_written_digest_by_digest() -> None:
    every_other = BlockHashes(b"aabbccdd", 2, scheme="chained")[1::2]
    assert b"".join(CODEC.encode(every_other)) == b"\0\2bbdd"


def test_frames_that_are_too_large_are_refused_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = BlockHashes(b"x" * 64, 32, scheme="chained")
    frame = b"".join(CODEC.encode(hashes))
    monkeypatch.setattr(binary, "MAX_FRAME_BYTES", 65)
    with pytest.raises(HashError, match="66 bytes is over the limit of 65"):
        CODEC.encode(hashes)
    with pytest.raises(HashError, match="66 bytes is over the limit of 65"):
        CODEC.decode(frame, scheme="chained")


def test_memory_with_gaps_and_digests_beyond_u16_are_refused() -> None:
    with pytest.raises(HashError, match="one piece"):
        CODEC.decode(memoryview(b"\0\1ab")[::2], scheme="chained")
    with pytest.raises(HashError, match="65,535"):
        CODEC.encode(BlockHashes(bytes(70_000), 70_000, scheme="chained"))


def test_the_scheme_is_checked_on_the_way_in() -> None:
    with pytest.raises(HashError, match="unchained"):
        CODEC.decode(b"\0\1a", scheme="unchained")
