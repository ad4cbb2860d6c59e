"""Every hash codec that ships with kvpool keeps the contract; and the suite finds codecs that do not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from typing_extensions import Buffer

from kvpool.codec import HashCodec
from kvpool.errors import HashError
from kvpool.hashes import BlockHashes
from kvpool.protocols.binary import BinaryCodec
from kvpool.testing.codecs import CodecConformance


class TestBinaryCodec(CodecConformance):
    def codec(self) -> HashCodec:
        return BinaryCodec()


class _NoLength(BinaryCodec):
    """Takes every digest for 32 bytes."""

    def encode(self, hashes: BlockHashes) -> Sequence[Buffer]:
        return (hashes.view,)

    def decode(self, frame: Buffer, *, scheme: str) -> BlockHashes:
        return BlockHashes(frame, 32, scheme=scheme)


class _Forgiving(BinaryCodec):
    """Drops what is too much instead of refusing it."""

    def decode(self, frame: Buffer, *, scheme: str) -> BlockHashes:
        view = memoryview(frame)
        hash_len = int.from_bytes(view[:2], "big")
        if not hash_len:
            raise HashError("no length")
        whole = (len(view) - 2) // hash_len * hash_len
        return BlockHashes(view[2 : 2 + whole], hash_len, scheme=scheme)


class _Raw(BinaryCodec):
    """Lets errors of its own out."""

    def decode(self, frame: Buffer, *, scheme: str) -> BlockHashes:
        if len(memoryview(frame)) < 2:
            raise IndexError(frame)
        return super().decode(frame, scheme=scheme)


class _OwnScheme(BinaryCodec):
    def decode(self, frame: Buffer, *, scheme: str) -> BlockHashes:
        return super().decode(frame, scheme="mine")


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (_NoLength, "test_what_is_encoded_comes_back"),
        (_Forgiving, "test_a_damaged_frame_is_never_taken_for_the_whole_one"),
        (_Raw, "test_any_bytes_are_hashes_or_a_hash_error"),
        (_OwnScheme, "test_the_scheme_is_checked"),
    ],
)
def test_the_suite_finds(broken: type[HashCodec], test: str) -> None:
    class Suite(CodecConformance):
        def codec(self) -> HashCodec:
            return broken()

    with pytest.raises((AssertionError, HashError, IndexError, ExceptionGroup, pytest.fail.Exception)):
        getattr(Suite(), test)()
