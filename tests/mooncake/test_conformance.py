"""MooncakeStore keeps the contract of a store, with a real master and owner, on both loops."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import xxhash

from kvpool.backends.mooncake import MooncakeStore
from kvpool.store import Store
from kvpool.testing.stores import Damage, StoreConformance
from tests.mooncake.servers import Mooncake

_places = itertools.count()
HEADER = 40


def stored_form(key: str, value: bytes) -> bytes:
    """The form of a value, written down a second time: a change of it must be meant."""
    head = struct.pack("<8sQQ", b"kvpool\0\1", len(value), xxhash.xxh3_64_intdigest(value))
    return head + xxhash.xxh3_128_digest(key.encode()) + value


@pytest.fixture(scope="module")
def short_leases() -> Iterator[Mooncake]:
    """Raw reads take leases, too, and nothing is removed before they have ended."""
    with Mooncake(memory=256 << 20, default_kv_lease_ttl="400ms") as mooncake:
        yield mooncake


class TestMooncake(StoreConformance[str]):
    """A place is a prefix of keys."""

    damages: ClassVar[frozenset[Damage]] = frozenset({"truncate", "flip", "extend", "foreign"})
    open_close_cycles: ClassVar[int] = 50
    examples: ClassVar[int] = 5
    mooncake: Mooncake

    @pytest.fixture(autouse=True)
    def _servers(self, short_leases: Mooncake) -> None:
        type(self).mooncake = short_leases

    @contextmanager
    def place(self) -> Iterator[str]:
        prefix = f"place{next(_places)}:"
        yield prefix
        self._raw("remove_by_regex", f"^{prefix}", True)

    def store(self, place: str) -> Store:
        return MooncakeStore(f"{self.mooncake.url}?prefix={place}&buffer=32MiB")

    def raw_read(self, place: str, key: str) -> bytes | None:
        found = self.mooncake.owners[0].value(place + key)
        return None if found is None else found[HEADER:]

    def raw_write(self, place: str, key: str, value: bytes) -> None:
        assert self._raw("put", place + key, stored_form(key, value)) == 0

    def raw_damage(self, place: str, key: str, damage: Damage) -> None:
        owner = self.mooncake.owners[0]
        found, other = owner.value(place + key) or b"", owner.value(place + key[:-1] + "0") or b""
        spoilt = {
            "truncate": found[:-1],
            "flip": found[:-7] + bytes([found[-7] ^ 0x10]) + found[-6:],
            "extend": found + b"x",
            "foreign": other,
        }[damage]
        assert self._raw("remove", place + key, True) == 0
        assert self._raw("put", place + key, spoilt) == 0

    def _raw(self, method: str, *args: object) -> Any:
        return self.mooncake.owners[0].raw(method, *args)
