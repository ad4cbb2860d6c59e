"""What an author of a store writes for the suite, and what its tests share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Generic, Literal, TypeVar

import numpy as np
import pytest

from kvpool.memory import Buffers
from kvpool.store import Results, Store

__all__ = ["Damage", "P", "StoreSuite", "get", "put", "value_of"]

P = TypeVar("P")
#: truncate: the end is missing. flip: one bit of the payload. extend: bytes too many. foreign: what is stored under
#: another key, as a whole.
Damage = Literal["truncate", "flip", "extend", "foreign"]


async def put(store: Store, items: Sequence[tuple[str, bytes]], *, deadline: float = math.inf) -> Results:
    """Put small values; checks that the results are aligned."""
    source = Buffers.of(*(bytearray(value) for _, value in items))
    results = await store.put([key for key, _ in items], source, deadline=deadline)
    _check_columns(results, len(items))
    return results


async def get(
    store: Store, keys: Sequence[str], sizes: Sequence[int], *, deadline: float = math.inf
) -> tuple[Results, list[bytes]]:
    """Get values into fresh memory; checks that the results are aligned."""
    memory = [bytearray(b"\xee" * size) for size in sizes]
    results = await store.get_into(keys, Buffers.of(*memory), deadline=deadline)
    _check_columns(results, len(keys))
    assert all(results.nbytes[i] == sizes[i] for i in np.flatnonzero(results.ok))
    return results, [bytes(m) for m in memory]


def _check_columns(results: Results, n: int) -> None:
    assert results.status.shape == results.nbytes.shape == (n,)
    assert results.status.dtype == np.uint8
    assert results.nbytes.dtype == np.int64
    assert not results.nbytes[~results.ok].any(), "bytes moved for a key that is not OK"
    assert all(0 <= i < n for i in results.errors)


def value_of(key: str, size: int) -> bytes:
    """``size`` bytes that say which key they belong to."""
    name = key.encode() + b"|"
    return (name * (size // len(name) + 1))[:size]


class StoreSuite(Generic[P]):
    """What every part of the suite builds on."""

    pytestmark = pytest.mark.anyio

    #: The event loops to run on; must be what the store's capabilities declare.
    loops: ClassVar[frozenset[str]] = frozenset({"asyncio", "trio"})
    #: Damage that ``raw_damage`` can do and the store must find; none for a store that relies on a checking wrapper.
    damages: ClassVar[frozenset[Damage]] = frozenset()
    #: Size of a very large value.
    large_bytes: ClassVar[int] = 8 << 20
    #: Open and close this often, with a flat count of descriptors and threads; a slow native client may state fewer.
    open_close_cycles: ClassVar[int] = 1000
    #: Random examples of the state machine, each of up to 15 steps.
    examples: ClassVar[int] = 15

    # ---- what the author writes

    def place(self) -> AbstractContextManager[P]:
        """A fresh, empty place for values; cleaned up at its end. Several may be open at once."""
        raise NotImplementedError

    def store(self, place: P) -> Store:
        """A new closed store on this place."""
        raise NotImplementedError

    def raw_read(self, place: P, key: str) -> bytes | None:
        """The value under ``key`` without the store under test; None if there is none. A store is open meanwhile."""
        raise NotImplementedError

    def raw_write(self, place: P, key: str, value: bytes) -> None:
        """Store a value, in the store's own form, without the store under test. A store is open meanwhile."""
        raise NotImplementedError

    def raw_damage(self, place: P, key: str, damage: Damage) -> None:
        """Spoil the stored value of ``key`` in one of the ways of ``damages``."""
        raise NotImplementedError

    # ---- plumbing

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "anyio_backend" in metafunc.fixturenames:
            metafunc.parametrize("anyio_backend", sorted(self.loops))

    @pytest.fixture
    def at(self) -> Iterator[P]:
        """The place of one test."""
        with self.place() as place:
            yield place

    def large(self, store: Store) -> int:
        return min(self.large_bytes, store.capabilities.max_value_bytes or self.large_bytes)
