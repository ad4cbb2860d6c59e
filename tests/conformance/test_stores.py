"""Every store and store wrapper that ships with kvpool keeps the contract, on each loop that it declares."""

from __future__ import annotations

import itertools
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, unquote

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
        file = stored_file(place, key)
        return None if file is None else file.read_bytes()[40:]

    def raw_write(self, place: Path, key: str, value: bytes) -> None:
        # The form on disk, written down a second time: a change of it must be meant.
        digest = xxhash.xxh3_128_digest(key.encode())
        head = struct.pack("<8sQQ", b"kvpool\0\1", len(value), xxhash.xxh3_64_intdigest(value)) + digest
        parts = [quote(part, safe="") for part in key.split("/")]
        *parents, name = [(p[i : i + 200], "=" * (i + 200 < len(p))) for p in parts for i in range(0, len(p), 200)]
        file = place.joinpath(*map("".join, parents), f"={digest[0]:02x}", name[0])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(head + value)

    def raw_damage(self, place: Path, key: str, damage: Damage) -> None:
        file = stored_file(place, key)
        assert file is not None
        data = bytearray(file.read_bytes())
        if damage == "truncate":
            del data[-1]
        elif damage == "flip":
            data[-7] ^= 0x10
        elif damage == "extend":
            data += b"x"
        else:
            other = stored_file(place, key[:-1] + "0")
            assert other is not None
            assert other != file
            data[:] = other.read_bytes()
        file.write_bytes(data)


def stored_file(root: Path, key: str) -> Path | None:
    """The file of a key, found by its name alone."""
    for folder, _, names in os.walk(root):
        for name in names:
            parts = [p for p in (Path(folder) / name).relative_to(root).parts if not (p[0] == "=" and len(p) == 3)]
            if unquote("/".join(parts).replace("=/", "")).replace("\0", "") == key:
                return Path(folder) / name
    return None


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
