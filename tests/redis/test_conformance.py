"""RedisStore keeps the contract of a store, on every kind of connection and on both loops."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import xxhash

from kvpool.backends.redis import RedisStore
from kvpool.store import Store
from kvpool.testing.stores import Damage, StoreConformance
from tests.redis.server import RedisServer

_places = itertools.count()
HEADER = 40


def stored_form(key: str, value: bytes) -> bytes:
    """The form of a value, written down a second time: a change of it must be meant."""
    head = struct.pack("<8sQQ", b"kvpool\0\1", len(value), xxhash.xxh3_64_intdigest(value))
    return head + xxhash.xxh3_128_digest(key.encode()) + value


class RedisConformance(StoreConformance[str]):
    """A place is a prefix of names on the server."""

    damages: ClassVar[frozenset[Damage]] = frozenset({"truncate", "flip", "extend", "foreign"})
    server: RedisServer

    @pytest.fixture(autouse=True)
    def _servers(self, shared_server: RedisServer) -> None:
        type(self).server = shared_server

    @contextmanager
    def place(self) -> Iterator[str]:
        prefix = f"place{next(_places)}:"
        yield prefix
        raw = self.server.raw
        if left := raw("KEYS", prefix + "*"):
            raw("DEL", *left)

    def store(self, place: str) -> Store:
        return RedisStore(f"redis+unix://{self.server.socket}?prefix={place}&max_value=16MiB")

    def raw_read(self, place: str, key: str) -> bytes | None:
        found = self.server.settled("GET", place + key)
        return None if found is None else found[HEADER:]

    def raw_write(self, place: str, key: str, value: bytes) -> None:
        self.server.raw("SET", place + key, stored_form(key, value))

    def raw_damage(self, place: str, key: str, damage: Damage) -> None:
        raw = self.server.raw
        other = raw("GET", place + key[:-1] + "0")
        raw("SET", place + key, self.spoilt(damage, raw("GET", place + key), other))

    @staticmethod
    def spoilt(damage: Damage, found: bytes, other: bytes) -> bytes:
        return {
            "truncate": found[:-1],
            "flip": found[:-7] + bytes([found[-7] ^ 0x10]) + found[-6:],
            "extend": found + b"x",
            "foreign": other,
        }[damage]


class TestUnixSocket(RedisConformance):
    pass


class TestTCP(RedisConformance):
    open_close_cycles: ClassVar[int] = 50
    examples: ClassVar[int] = 3

    def store(self, place: str) -> Store:
        return RedisStore(f"{self.server.url}?prefix={place}&max_value=16MiB")
