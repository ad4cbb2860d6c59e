"""What one value looks like on disk, and where it lies. Pure functions.

A file is a header of 40 bytes and the payload. The checksum in it is that of the payload, or, if the writer wanted to
spare the time for reading every byte, of a word that says so; every reader takes both.

A key becomes ``<its parts but the last>/=<hh>/<last part>`` below the root: ``hh`` fans a group's files out over 256
directories. ``=`` appears in no name made from a key, so no key's file can stand where another key's directory must.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

import xxhash

__all__ = [
    "HEADER_BYTES",
    "MAX_DEPTH",
    "BadKey",
    "Checksum",
    "Place",
    "are_keys",
    "check_key",
    "damage",
    "header",
    "key_of",
    "payload_bytes",
    "place_of",
]

#: name and format version, payload length, xxh3_64 of the payload, xxh3_128 of the key
_HEADER = struct.Struct("<8sQQ16s")
_MAGIC = b"kvpool\x00\x01"
HEADER_BYTES = _HEADER.size

#: Directories below one another, at most, on the way to a file: a key of 512 slashes, and the fan-out.
MAX_DEPTH = 513
_NAME_BYTES = 200  # longer parts are split: file systems allow 255
_VISIBLE = bytes(range(0x21, 0x7F))
_KEY = re.compile(r"[!-~]{1,512}")
_PLAIN = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}/)*[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
_FANS = [f"={i:02x}" for i in range(256)]
_FAN = re.compile(r"=[0-9a-f]{2}")


#: How the payload is proven: "none" finds wrong lengths and foreign values only.
Checksum = Literal["xxh3_64", "none"]


class BadKey(ValueError):
    """What was given is no key by the store contract."""


class Place(NamedTuple):
    """Where a key's file is, below the root: directory, fan-out directory in it, file name."""

    parent: str
    fan: str
    name: str


def check_key(key: str) -> None:
    """Raises :class:`BadKey` for what is no key by the store contract."""
    if not _KEY.fullmatch(key):
        raise BadKey(f"{key[:80]!r} is no key: 1 to 512 visible ASCII characters")


def are_keys(keys: Sequence[str]) -> bool:
    """Whether all of these are keys by the store contract; a tenth of the time of looking at each."""
    visible = not "".join(keys).encode(errors="surrogatepass").translate(None, _VISIBLE)
    lengths = set(map(len, keys))
    return visible and 0 not in lengths and max(lengths, default=0) <= 512


def place_of(key: str) -> Place:
    """The place of a key; different keys have different places. Raises :class:`BadKey`."""
    if _PLAIN.fullmatch(key) and len(key) <= 512:
        path = key
    else:
        check_key(key)
        path = "/".join(map(_quoted, key.split("/")))
    parent, _, name = path.rpartition("/")
    return Place(parent, _FANS[_digest(key)[0]], name)


def key_of(directory: str, name: str) -> str | None:
    """The key whose file this is (``directory`` is relative to the root), or None for a file of another kind."""
    parent, _, fan = directory.rpartition("/")
    if not _FAN.fullmatch(fan):
        return None
    path = (f"{parent}/{name}" if parent else name).replace("=/", "")
    key = unquote(path).replace("\0", "") if "%" in path else path
    try:
        return key if place_of(key) == (parent, fan, name) else None
    except BadKey:
        return None


def header(key: str, pieces: Sequence[memoryview], checksum: Checksum = "xxh3_64") -> bytes:
    """The header of a value made of these pieces."""
    nbytes = sum(p.nbytes for p in pieces)
    proof = _unchecked(nbytes) if checksum == "none" else _checksum(pieces)
    return _HEADER.pack(_MAGIC, nbytes, proof, _digest(key))


def payload_bytes(head: bytes | bytearray) -> int:
    """The payload length that a header claims."""
    length: int = _HEADER.unpack(head)[1]
    return length


def damage(key: str, head: bytes | bytearray, file_bytes: int, pieces: Sequence[memoryview] | None) -> str:
    """What is wrong with a file as a value of ``key``, in words; empty if it is whole.

    ``file_bytes``: the file's length. ``pieces``: the payload; without it the checksum is not looked at.
    """
    if file_bytes < HEADER_BYTES:
        return f"the file is cut off after {file_bytes} bytes"
    magic, length, checksum, digest = _HEADER.unpack(head)
    if magic != _MAGIC:
        return "the file is not a value of this format"
    if digest != _digest(key):
        return "the file holds the value of another key"
    if file_bytes != HEADER_BYTES + length:
        return f"the file has {file_bytes} bytes instead of {HEADER_BYTES + length}"
    if pieces is not None and checksum != _unchecked(length) and checksum != _checksum(pieces):
        return "the checksum does not match"
    return ""


def _digest(key: str) -> bytes:
    return xxhash.xxh3_128_digest(key.encode())


def _checksum(pieces: Sequence[memoryview]) -> int:
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    total = xxhash.xxh3_64()
    for piece in pieces:
        total.update(piece)
    return total.intdigest()


def _unchecked(nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(b"unchecked%d" % nbytes)


def _quoted(part: str) -> str:
    """A key part as one or more path components; ``=`` at the end of one joins it with the next."""
    text = quote(part or "\0", safe="")  # a path cannot hold an empty name; no key holds a NUL
    text = text.replace(".", "%2E") if text.startswith(".") else text
    return "=/".join(text[i : i + _NAME_BYTES] for i in range(0, len(text), _NAME_BYTES))
