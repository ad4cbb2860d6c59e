"""Block hashes: many fixed-size digests in one flat buffer, read without copies.

The digest of block i covers all tokens up to the end of block i, because each digest folds in the one before it
(*chaining*). Everything else in kvpool leans on that: one digest names a whole prefix, so a chunk of several hash
blocks is named by its last one. Hashes that are not chained are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, cast, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvpool.errors import HashError

__all__ = ["CHAIN_SCHEME", "UNCHAINED", "BlockHashes", "chain_hashes", "chunk_hashes"]

Rows = npt.NDArray[np.uint8]
#: Scheme of :func:`chain_hashes`.
CHAIN_SCHEME = "kvpool-sha256"
#: The scheme by which a caller admits that its hashes are not chained; refused.
UNCHAINED = "unchained"
_DIGEST = 32


class BlockHashes(Sequence[bytes]):
    """A sequence of digests over one buffer; a digest is copied only when it is asked for.

    ``data``: digests of ``hash_len`` bytes back to back; it must not change while this object lives. ``scheme`` names
    how the digests are chained (algorithm and seed, e.g. "sha256_cbor"); two ends that use different schemes never
    share keys. Slices are views. Not thread-safe while it grows.

    Raises :class:`~kvpool.errors.HashError` for a ragged or non-contiguous buffer, and for a scheme that is empty, no
    str or unchained.
    """

    __slots__ = ("_count", "_rows", "hash_len", "scheme")

    #: Bytes of one digest; 0 only while there is none.
    hash_len: int
    scheme: str

    def __init__(self, data: Buffer = b"", hash_len: int = 0, *, scheme: str) -> None:
        if not isinstance(scheme, str) or not (name := scheme.strip().casefold()) or name.startswith(UNCHAINED):
            raise HashError(
                f"hash scheme {scheme!r}: kvpool keys a prefix by one digest, so each digest must fold in the one "
                "before it; name the chained scheme, or use chain_hashes()"
            )
        self.scheme = scheme
        self.hash_len = hash_len
        self._rows = _rows(data, hash_len)
        self._count = len(self._rows)

    @classmethod
    def _of_rows(cls, rows: Rows, scheme: str) -> Self:
        made = cls.__new__(cls)
        made.scheme, made.hash_len, made._rows, made._count = scheme, rows.shape[1], rows, len(rows)
        return made

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int, /) -> bytes: ...
    @overload
    def __getitem__(self, index: slice, /) -> Self: ...
    def __getitem__(self, index: int | slice, /) -> bytes | Self:
        if isinstance(index, slice):
            return self._of_rows(self._rows[: self._count][index], self.scheme)
        i = index + self._count if index < 0 else index
        if not 0 <= i < self._count:
            raise IndexError(f"hash {index} of {self._count}")
        digest: bytes = self._rows[i].tobytes()
        return digest

    @property
    def view(self) -> memoryview:
        """All digests back to back, read-only. No copy, but for a slice with a step other than 1."""
        return np.ascontiguousarray(self._rows[: self._count]).reshape(-1).data.toreadonly()

    def pack(self, indices: npt.NDArray[np.intp]) -> bytes:
        """The digests at ``indices`` (intp[n], 0 <= i < len) back to back, in one gather. Raises IndexError."""
        if len(indices) and (least := int(indices.min())) < 0:  # take() would count it from the end
            raise IndexError(f"hash {least} of {self._count}")
        return self.gather(indices)

    def gather(self, indices: npt.NDArray[np.intp], start: int = 0) -> bytes:
        """:meth:`pack` without its check: indices below 0, counted from ``start`` >= 0, find the wrong digests."""
        return self._rows[start : self._count].take(indices, axis=0).tobytes()

    def extend(self, digests: Buffer | Iterable[bytes]) -> None:
        """Append digests: one buffer of them, or any iterable. Slices taken before keep what they show.

        The first iterable decides ``hash_len`` if it is still 0. Raises HashError for digests of another length.
        """
        try:
            flat: Buffer = memoryview(digests)  # type: ignore[arg-type]
        except TypeError:
            many = list(cast("Iterable[bytes]", digests))
            lengths = set(map(len, many))
            if not self.hash_len and len(lengths) == 1:
                self.hash_len = lengths.pop()
                self._rows = _rows(b"", self.hash_len)
            elif lengths - {self.hash_len}:
                raise HashError(
                    f"digests of {sorted(lengths)} bytes do not extend hashes of {self.hash_len} bytes"
                ) from None
            flat = b"".join(many)
        new = _rows(flat, self.hash_len)
        end = self._count + len(new)
        if not len(new):
            return
        if not self._count and isinstance(flat, bytes):  # nothing to append to: keep what was joined just now
            self._rows, self._count = new, end
            return
        if end > len(self._rows):  # always so for a buffer of the caller's, and for a slice
            grown = np.empty((max(end, 2 * self._count, 64), self.hash_len), np.uint8)  # doubling: appends stay linear
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count : end] = new
        self._count = end

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockHashes):
            return NotImplemented
        return self.scheme == other.scheme and np.array_equal(self._rows[: len(self)], other._rows[: len(other)])

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"BlockHashes({self._count} x {self.hash_len} bytes, scheme={self.scheme!r})"


def _rows(data: Buffer, hash_len: int) -> Rows:
    """The buffer as uint8[n, hash_len]."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise HashError("digests lie back to back: this memory is not contiguous; copy it first")
    flat: npt.NDArray[np.uint8] = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    if hash_len < 0 or (flat.size % hash_len if hash_len else flat.size):
        raise HashError(f"{flat.size} bytes are not a whole number of {hash_len}-byte digests")
    return flat.reshape(-1, hash_len) if hash_len else np.empty((0, 0), np.uint8)


def chunk_hashes(hashes: BlockHashes, block_size: int, hash_block_size: int) -> BlockHashes:
    """One digest a chunk of ``block_size`` tokens: the chunk's last sub-hash; chunks that are not whole have none.

    A view: digest i of the result is ``hashes[(i + 1) * block_size // hash_block_size - 1]``. Equal sizes return
    ``hashes`` itself. Raises HashError when ``block_size`` is no multiple of ``hash_block_size``.
    """
    if hash_block_size <= 0 or block_size <= 0 or block_size % hash_block_size:
        raise HashError(f"block size {block_size} is not a multiple of the hash block size {hash_block_size}")
    ratio = block_size // hash_block_size
    return hashes if ratio == 1 else hashes[ratio - 1 :: ratio]


def chain_hashes(
    tokens: Sequence[int] | npt.NDArray[np.integer],
    block: int,
    *,
    seed: bytes = b"",
    extra: Mapping[int, bytes] | None = None,
    onto: BlockHashes | None = None,
) -> BlockHashes:
    """Chained sha256 digests of every whole block of ``tokens``, for engines that have no block hashes of their own.

    ``seed``: whatever else decides the bytes of every block (tenant salt, adapter fingerprint). ``extra``: by block
    index, what a block holds besides its token ids (image digests). ``onto``: the hashes of a shorter prefix of the
    same tokens, made with the same seed; only what is missing is computed and appended to it.

    Digest i = sha256(digest i-1, the block's tokens as little-endian int64, extra); the first parent is a digest of
    seed and block size. sha256 because a collision would hand one prompt another prompt's bytes.

    Raises HashError for tokens that are not integers within int64, and for an ``onto`` that does not fit.
    """
    if block <= 0:
        raise HashError(f"hash block size {block} must be positive")
    hashes = BlockHashes(hash_len=_DIGEST, scheme=CHAIN_SCHEME) if onto is None else onto
    if hashes.scheme != CHAIN_SCHEME:
        raise HashError(f"cannot continue hashes of scheme {hashes.scheme!r} with {CHAIN_SCHEME!r}")
    if hashes.hash_len != _DIGEST and (len(hashes) or hashes.hash_len):
        raise HashError(f"cannot continue hashes of {hashes.hash_len} bytes with digests of {_DIGEST}")
    start, end = len(hashes), len(tokens) // block
    if start > end:
        raise HashError(f"{start} hashes do not fit {len(tokens)} tokens in blocks of {block}")
    data = memoryview(_token_bytes(tokens[start * block : end * block]))
    digest = hashes[-1] if start else hashlib.sha256(b"kvpool chain 1\0%d\0" % block + seed).digest()
    fresh = []
    for i in range(end - start):
        state = hashlib.sha256(digest)
        state.update(data[i * block * 8 : (i + 1) * block * 8])
        if extra and (more := extra.get(start + i)):
            state.update(more)
        digest = state.digest()
        fresh.append(digest)
    hashes.extend(fresh)
    return hashes


def _token_bytes(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Tokens as little-endian int64. Never a cast that changes one: two prompts would share a digest."""
    ids = np.asarray(tokens)
    if not ids.size:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise HashError(f"tokens must be one row of integers within int64, not {ids.dtype} of shape {ids.shape}")
    if ids.dtype.kind == "u" and int(ids.max()) > np.iinfo(np.int64).max:
        raise HashError(f"token {int(ids.max())} does not fit into int64")
    return ids.astype("<i8").tobytes()
