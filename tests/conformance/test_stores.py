"""Every store and store wrapper that ships with kvpool keeps the contract, on each loop that it declares."""

from __future__ import annotations

import itertools
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import numpy as np
import pytest
import xxhash

from kvpool.backends import _file_tree, memory
from kvpool.backends.file import FileStore
from kvpool.backends.memory import MemoryStore
from kvpool.store import Store
from kvpool.testing.faults import FaultyStore
from kvpool.testing.stores import Damage, StoreConformance

_names = itertools.count()


class TestMemoryStore(StoreConformance[str]):
    @contextmanager
    def place(self) -> Iterator[str]:
        yield f"conformance-{next(_names)}"

    def store(self, place: str) -> Store:
        return MemoryStore(name=place)

    def raw_read(self, place: str, key: str) -> bytes | None:
        value = memory._shared[place]._values.get(key)
        return None if value is None else value.tobytes()

    def raw_write(self, place: str, key: str, value: bytes) -> None:
        memory._shared[place]._values[key] = np.frombuffer(value, np.uint8)


class TestFileStore(StoreConformance[Path]):
    damages: ClassVar[frozenset[Damage]] = frozenset({"truncate", "flip", "extend", "foreign"})

    @contextmanager
    def place(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as root:
            yield Path(root) / "kv"

    def store(self, place: Path) -> Store:
        return FileStore(place)

    def raw_read(self, place: Path, key: str) -> bytes | None:
        file = file_of(place, key)
        return file.read_bytes()[40:] if file.exists() else None

    def raw_write(self, place: Path, key: str, value: bytes) -> None:
        head = struct.pack("<8sQQ", b"kvpool\0\1", len(value), xxhash.xxh3_64_intdigest(value))
        file = file_of(place, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(head + xxhash.xxh3_128_digest(key.encode()) + value)

    def raw_damage(self, place: Path, key: str, damage: Damage) -> None:
        file = file_of(place, key)
        data = bytearray(file.read_bytes())
        if damage == "truncate":
            del data[-1]
        elif damage == "flip":
            data[-7] ^= 0x10
        elif damage == "extend":
            data += b"x"
        else:
            data[:] = file_of(place, key[:-1] + "0").read_bytes()
        file.write_bytes(data)


def file_of(root: Path, key: str) -> Path:
    """Where a key's file lies, written down a second time: a change of the form on disk must be meant."""
    parts = []
    for part in key.split("/"):
        text = quote(part, safe="") if part else "%00"
        text = text.replace(".", "%2E") if text.startswith(".") else text
        while len(text) > 200:
            parts.append(text[:200] + "=")
            text = text[200:]
        parts.append(text)
    return root.joinpath(*parts[:-1], f"={xxhash.xxh3_128_digest(key.encode())[0]:02x}", parts[-1])


class TestFileStoreWithNamedTemporaries(TestFileStore):
    """On file systems that have no files without a name."""

    open_close_cycles: ClassVar[int] = 50

    @pytest.fixture(autouse=True)
    def _named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_file_tree, "_O_TMPFILE", 0)


class TestFileStoreWithCapacity(TestFileStore):
    open_close_cycles: ClassVar[int] = 50
    examples: ClassVar[int] = 5

    def store(self, place: Path) -> Store:
        return FileStore(place, capacity=1 << 30)


class TestFaultyStoreWithoutFaults(TestMemoryStore):
    def store(self, place: str) -> Store:
        return FaultyStore(MemoryStore(name=place))
