"""The contract of :class:`kvpool.codec.HashCodec` as tests that a codec's author gets by subclassing one class.

::

    class TestMyCodec(CodecConformance):
        def codec(self): return MyCodec()

Needs pytest and hypothesis: ``pip install 'kvpool[testing]'``.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typing_extensions import Buffer

from kvpool.codec import HashCodec
from kvpool.errors import HashError
from kvpool.hashes import BlockHashes, chain_hashes

__all__ = ["CodecConformance"]

_SCHEME = "conformance"
# Each subclass runs the same test functions, which is meant.
_settings = settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors])


@st.composite
def _hashes(draw: st.DrawFn) -> BlockHashes:
    hash_len = draw(st.sampled_from([4, 8, 16, 20, 32, 64]))
    count = draw(st.integers(0, 12))
    return BlockHashes(draw(st.binary(min_size=hash_len * count, max_size=hash_len * count)), hash_len, scheme=_SCHEME)


class CodecConformance:
    """Subclass it in a test module, under a name that pytest collects."""

    def codec(self) -> HashCodec:
        """The codec under test."""
        raise NotImplementedError

    def frame(self, hashes: BlockHashes) -> bytes:
        """The frame that a transport would send."""
        return b"".join(self.codec().encode(hashes))

    def test_the_name_fits_a_message(self) -> None:
        name = self.codec().name
        assert name.isascii()
        assert name.isprintable()
        assert 0 < len(name) <= 16

    @_settings
    @given(hashes=_hashes())
    def test_what_is_encoded_comes_back(self, hashes: BlockHashes) -> None:
        decoded = self.codec().decode(self.frame(hashes), scheme=_SCHEME)
        assert decoded == hashes
        assert list(decoded) == list(hashes)
        assert decoded.scheme == _SCHEME
        if len(hashes):
            assert decoded.hash_len == hashes.hash_len

    @_settings
    @given(one=_hashes(), other=_hashes())
    def test_other_hashes_have_another_frame(self, one: BlockHashes, other: BlockHashes) -> None:
        if list(one) != list(other):
            assert self.frame(one) != self.frame(other)

    def test_no_hashes_at_all(self) -> None:
        assert len(self.codec().decode(self.frame(BlockHashes(scheme=_SCHEME)), scheme=_SCHEME)) == 0

    def test_a_long_prompt(self) -> None:
        hashes = chain_hashes(range(18_064), 1)
        assert self.codec().decode(self.frame(hashes), scheme=hashes.scheme) == hashes

    def test_a_view_of_other_hashes(self) -> None:
        hashes = chain_hashes(range(64), 1)
        for view in (hashes[:5], hashes[5:], hashes[3::4], hashes[60:70], hashes[7:7]):
            assert list(self.codec().decode(self.frame(view), scheme="s")) == list(view)

    def test_hashes_that_grew(self) -> None:
        hashes = BlockHashes(hash_len=8, scheme=_SCHEME)
        for i in range(100):
            hashes.extend(struct.pack("!Q", i))
        before = self.frame(hashes)
        hashes.extend(b"newcomer")
        assert list(self.codec().decode(before, scheme=_SCHEME)) == list(hashes)[:-1]

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_memory_is_read(self, kind: type[Buffer]) -> None:
        hashes = chain_hashes(range(10), 1)
        frame: Buffer = kind(self.frame(hashes))  # type: ignore[call-arg]
        assert self.codec().decode(frame, scheme=hashes.scheme) == hashes
        middle = memoryview(b"x" + bytes(frame) + b"y")[1:-1]
        assert self.codec().decode(middle, scheme=hashes.scheme) == hashes

    def test_the_scheme_is_checked(self) -> None:
        frame = self.frame(chain_hashes(range(10), 1))
        for scheme in ("", "unchained"):
            with pytest.raises(HashError):
                self.codec().decode(frame, scheme=scheme)

    @_settings
    @given(frame=st.binary(max_size=200))
    def test_any_bytes_are_hashes_or_a_hash_error(self, frame: bytes) -> None:
        self._decode_or_refuse(frame)

    @_settings
    @given(hashes=_hashes(), data=st.data())
    def test_a_damaged_frame_is_never_taken_for_the_whole_one(self, hashes: BlockHashes, data: st.DataObject) -> None:
        frame = self.frame(hashes)
        damage = data.draw(st.sampled_from(["cut", "add", "change"]))
        if damage == "cut":
            damaged = frame[: data.draw(st.integers(0, max(0, len(frame) - 1)))]
        elif damage == "add":
            damaged = frame + data.draw(st.binary(min_size=1, max_size=8))
        else:
            at = data.draw(st.integers(0, max(0, len(frame) - 1)))
            damaged = frame[:at] + data.draw(st.binary(min_size=1, max_size=1)) + frame[at + 1 :]
        decoded = self._decode_or_refuse(damaged)
        if damaged != frame and decoded is not None and len(hashes):
            assert list(decoded) != list(hashes)

    def _decode_or_refuse(self, frame: bytes) -> BlockHashes | None:
        try:
            decoded = self.codec().decode(frame, scheme=_SCHEME)
        except HashError:
            return None
        assert all(len(digest) == decoded.hash_len for digest in decoded)
        return decoded
