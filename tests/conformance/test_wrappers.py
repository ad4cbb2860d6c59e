"""The wrapper stores keep the contract around a memory and a file store, and around one another."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import xxhash

from kvpool.backends import memory
from kvpool.backends.checked import CheckedStore
from kvpool.backends.file import FileStore
from kvpool.backends.guarded import GuardedStore
from kvpool.backends.memory import MemoryStore
from kvpool.backends.tiered import TieredStore
from kvpool.store import Store
from kvpool.testing.stores import Damage
from tests.conformance import test_stores as plain


class _OverMemory(plain.TestMemoryStore):
    open_close_cycles: ClassVar[int] = 100
    examples: ClassVar[int] = 5


class _OverFiles(plain.TestFileStore):
    open_close_cycles: ClassVar[int] = 20
    examples: ClassVar[int] = 3


class TestGuardedMemory(_OverMemory):
    def store(self, place: str) -> Store:
        return GuardedStore(MemoryStore(name=place))


class TestGuardedFilesWithoutBounce(_OverFiles):
    def store(self, place: Path) -> Store:
        return GuardedStore(FileStore(place), bounce=False)


class TestCheckedMemory(_OverMemory):
    damages: ClassVar[frozenset[Damage]] = frozenset({"truncate", "flip", "extend", "foreign"})

    def store(self, place: str) -> Store:
        return CheckedStore(MemoryStore(name=place))

    def raw_read(self, place: str, key: str) -> bytes | None:
        value = super().raw_read(place, key)
        return None if value is None else value[40:]

    def raw_write(self, place: str, key: str, value: bytes) -> None:
        # The form, written down a second time: a change of it must be meant.
        head = struct.pack("<8sQQ", b"kvpool\0\1", len(value), xxhash.xxh3_64_intdigest(value))
        super().raw_write(place, key, head + xxhash.xxh3_128_digest(key.encode()) + value)

    def raw_damage(self, place: str, key: str, damage: Damage) -> None:
        values = memory._shared[place]._values
        data = bytearray(values[key].tobytes())
        if damage == "truncate":
            del data[-1]
        elif damage == "flip":
            data[-7] ^= 0x10
        elif damage == "extend":
            data += b"x"
        else:
            data[:] = values[key[:-1] + "0"].tobytes()
        values[key] = np.frombuffer(bytes(data), np.uint8)


class TestCheckedFilesWithoutChecksum(_OverFiles):
    def store(self, place: Path) -> Store:
        return CheckedStore(FileStore(place), checksum="none")

    def raw_read(self, place: Path, key: str) -> bytes | None:
        value = super().raw_read(place, key)
        return None if value is None else value[40:]

    def raw_write(self, place: Path, key: str, value: bytes) -> None:
        note = b"unchecked%d" % len(value)
        head = struct.pack("<8sQQ", b"kvpool\0\1", len(value), xxhash.xxh3_64_intdigest(note))
        super().raw_write(place, key, head + xxhash.xxh3_128_digest(key.encode()) + value)


class TestTieredFilesBehindMemory(_OverFiles):
    damages: ClassVar[frozenset[Damage]] = frozenset()  # the near tier still has the good value

    def store(self, place: Path) -> Store:
        return TieredStore(MemoryStore(capacity=200_000), FileStore(place))


class TestTieredMemoryBehindFiles(_OverMemory):
    root: Path

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def store(self, place: str) -> Store:
        return TieredStore(FileStore(self.root / place), MemoryStore(name=place))


class TestAllOfThemAtOnce(TestCheckedMemory):
    damages: ClassVar[frozenset[Damage]] = frozenset()

    def store(self, place: str) -> Store:
        near = CheckedStore(MemoryStore(), checksum="none")
        return TieredStore(near, GuardedStore(CheckedStore(MemoryStore(name=place))))
