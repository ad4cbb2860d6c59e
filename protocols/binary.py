"""The hash codec of choice: the length of a digest, then the digests, and nothing else.

A frame is ``hash_len`` (u16, big-endian) followed by the raw digests back to back. How many there are follows from the
frame's length. No hashes at all are two bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import Buffer

from kvpool.codec import HashCodec
from kvpool.errors import HashError
from kvpool.hashes import BlockHashes

__all__ = ["MAX_FRAME_BYTES", "BinaryCodec"]

_HASH_LEN = struct.Struct("!H")
#: A frame larger than this is refused at both ends: 2 million digests of 32 bytes.
MAX_FRAME_BYTES = 64 << 20


class BinaryCodec(HashCodec):
    """``hash_len`` u16 big-endian, then the raw digests. Neither way copies a digest."""

    name: ClassVar[str] = "binary"

    def encode(self, hashes: BlockHashes) -> Sequence[Buffer]:
        if hashes.hash_len > 0xFFFF:
            raise HashError(f"digests of {hashes.hash_len} bytes do not fit the binary codec (at most 65,535 bytes)")
        digests = hashes.view
        _check_size(_HASH_LEN.size + digests.nbytes)
        return _HASH_LEN.pack(hashes.hash_len), digests

    def decode(self, frame: Buffer, *, scheme: str) -> BlockHashes:
        view = memoryview(frame)
        if not view.c_contiguous:
            raise HashError("a hashes frame must lie in one piece of memory")
        view = view.cast("B")
        _check_size(view.nbytes)
        if view.nbytes < _HASH_LEN.size:
            raise HashError(f"a hashes frame of {view.nbytes} bytes is too short for its digest length (2 bytes)")
        (hash_len,) = _HASH_LEN.unpack_from(view)
        return BlockHashes(view[_HASH_LEN.size :], hash_len, scheme=scheme)


def _check_size(nbytes: int) -> None:
    if nbytes > MAX_FRAME_BYTES:
        raise HashError(f"a hashes frame of {nbytes:,} bytes is over the limit of {MAX_FRAME_BYTES:,}")
