"""CheckedStore: what is damaged, torn or another key's never comes out, and makes room for what is good."""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio
import numpy as np
import pytest

from kvpool.backends import _file_format
from kvpool.backends._file_format import Checksum
from kvpool.backends.checked import CheckedStore
from kvpool.backends.memory import MemoryStore
from kvpool.errors import ConfigError, WrongLength
from kvpool.memory import Buffers
from kvpool.registry import create_store
from kvpool.store import ABSENT, PRESENT, Capabilities, Results, Status
from kvpool.testing.faults import Fault, FaultyStore
from kvpool.testing.stores import get, put

pytestmark = pytest.mark.anyio

KEYS = [f"k{i}" for i in range(4)]
VALUES = [bytes([i]) * 100 for i in range(4)]


async def filled(inner: MemoryStore | FaultyStore, checksum: Checksum = "xxh3_64") -> CheckedStore:
    store = CheckedStore(inner, checksum=checksum)
    await store.__aenter__()
    assert (await put(store, list(zip(KEYS, VALUES, strict=True)))).ok.all()
    return store


async def raw(inner: MemoryStore, key: str, value: bytes) -> None:
    await inner.delete([key])
    await put(inner, [(key, value)])


async def test_a_stored_value_is_a_header_and_the_payload() -> None:
    inner = MemoryStore()
    await filled(inner)
    (stored,) = (await get(inner, ["k2"], [140]))[1]
    assert stored[40:] == VALUES[2]
    assert _file_format.damage("k2", stored[:40], 140, [memoryview(stored)[40:]]) == "", "as in a stored file"


@pytest.mark.parametrize("at", [0, 8, 16, 24, 40, 139])
async def test_any_flipped_bit_is_found_and_makes_room(at: int) -> None:
    inner = MemoryStore()
    store = await filled(inner)
    stored = bytearray((await get(inner, ["k1"], [140]))[1][0])
    stored[at] ^= 0x40
    await raw(inner, "k1", bytes(stored))
    results, memory = await get(store, [*KEYS, "k1"], [100] * 5)
    assert results.status.tolist() == [Status.OK, Status.CORRUPT, Status.OK, Status.OK, Status.CORRUPT]
    assert "checked MemoryStore: k1: " in str(results.errors[1])
    assert results.nbytes.tolist() == [100, 0, 100, 100, 0]
    assert [memory[i] for i in (0, 2, 3)] == [VALUES[i] for i in (0, 2, 3)]
    assert (await store.exists(["k1"])).tolist() == [ABSENT]
    assert (await put(store, [("k1", VALUES[1])])).nbytes.tolist() == [100]
    assert (await get(store, ["k1"], [100]))[1] == [VALUES[1]]


async def test_a_store_that_hands_over_wrong_bytes() -> None:
    """The fault that a checking wrapper is for: OK, and a wrong byte."""
    inner = FaultyStore(MemoryStore())
    store = await filled(inner)
    inner.faults = [Fault(kind="flip", op="get", keys="k[13]")]
    results, _ = await get(store, KEYS, [100] * 4)
    assert results.status.tolist() == [Status.OK, Status.CORRUPT, Status.OK, Status.CORRUPT]


@pytest.mark.parametrize("checksum", ["xxh3_64", "none"])
async def test_a_foreign_value_is_found(checksum: Checksum) -> None:
    inner = MemoryStore()
    store = await filled(inner, checksum)
    await raw(inner, "k0", (await get(inner, ["k3"], [140]))[1][0])
    await raw(inner, "k2", bytes(140))
    assert (await get(store, KEYS, [100] * 4))[0].ok.tolist() == [False, True, False, True]
    assert (await store.exists(KEYS)).tolist() == [ABSENT, PRESENT, ABSENT, PRESENT]


@pytest.mark.parametrize("stored", [b"", b"short", bytes(39), bytes(40), bytes(139), bytes(5000)])
async def test_a_wrong_length_is_removed_if_it_is_damage(stored: bytes) -> None:
    inner = MemoryStore()
    store = await filled(inner)
    await raw(inner, "k1", stored)
    assert (await get(store, KEYS, [100] * 4))[0].ok.tolist() == [True, False, True, True]
    assert (await store.exists(["k1"])).tolist() == [ABSENT]


async def test_a_wrong_length_stays_if_the_reader_is_wrong() -> None:
    store = await filled(MemoryStore())
    results, _ = await get(store, KEYS, [100, 99, 101, 0])
    assert results.status.tolist() == [Status.OK] + [Status.CORRUPT] * 3
    error = results.errors[2]
    assert isinstance(error, WrongLength)
    assert (error.stored, error.wanted) == (100, 101)
    assert (await get(store, KEYS, [100] * 4))[1] == VALUES


async def test_a_wrong_length_stays_if_the_store_does_not_tell() -> None:
    class Silent(MemoryStore):
        async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
            results = await super().get_into(keys, into, deadline=deadline)
            results.errors.clear()
            return results

    inner = Silent()
    store = await filled(inner)
    await raw(inner, "k1", b"torn")
    assert (await get(store, ["k1"], [100]))[0].status.tolist() == [Status.CORRUPT]
    assert (await store.exists(["k1"])).tolist() == [PRESENT]


async def test_the_choice_of_no_checksum_is_stated_and_read_by_all() -> None:
    inner = MemoryStore()
    without = await filled(inner, "none")
    checking = CheckedStore(inner)
    assert (await put(checking, [("c", b"checked")])).ok.all()
    for reader in (without, checking):
        results, memory = await get(reader, [*KEYS, "c"], [100] * 4 + [7])
        assert results.ok.all()
        assert memory == [*VALUES, b"checked"]
    for key, found in (("k0", True), ("c", False)):
        size = 100 if key == "k0" else 7
        stored = bytearray((await get(inner, [key], [40 + size]))[1][0])
        stored[-1] ^= 1
        await raw(inner, key, bytes(stored))
        assert (await get(without, [key], [size]))[0].ok[0] == found, "a value says itself whether it is checked"


async def test_values_large_and_small_of_many_pieces() -> None:
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 256, 9 << 20, np.uint8)
    source = Buffers.of(memory[: 8 << 20], memory[8 << 20 :], bytearray())
    async with CheckedStore(MemoryStore()) as store:
        assert (await store.put(["large", "middle", "empty"], source)).nbytes.tolist() == [8 << 20, 1 << 20, 0]
        got = np.zeros_like(memory)
        pieces = Buffers.of(got[8 << 20 :], bytearray(), got[: 8 << 20])
        assert (await store.get_into(["middle", "empty", "large"], pieces)).ok.all()
        assert np.array_equal(got, memory)


async def test_what_cannot_be_removed_is_still_corrupt() -> None:
    inner = FaultyStore(MemoryStore())
    store = await filled(inner)
    inner.faults = [Fault(kind="raise", op="delete"), Fault(kind="flip", op="get", keys="k1")]
    assert (await get(store, KEYS, [100] * 4))[0].status.tolist() == [Status.OK, Status.CORRUPT, Status.OK, Status.OK]


async def test_nothing_is_proven_after_the_deadline() -> None:
    size, n = 1 << 20, 16
    source = Buffers.of(*(bytearray(size) for _ in range(n)))
    keys = [f"big{i}" for i in range(n)]

    class Slow(MemoryStore):
        """Takes all the time there is."""

        async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
            results = await super().get_into(keys, into)
            await anyio.sleep_until(deadline)
            return results

    async with CheckedStore(Slow()) as store:
        await store.put(keys, source)
        results = await store.get_into(keys, source, deadline=anyio.current_time() + 0.02)
        assert set(results.status.tolist()) == {Status.OK, Status.TIMED_OUT}
        assert not results.nbytes[~results.ok].any()


def test_capabilities_and_powers_follow_the_inner_store() -> None:
    inner = FaultyStore(MemoryStore())
    inner.capabilities = Capabilities(shared=True, zero_copy=True, max_value_bytes=1000)
    store = CheckedStore(inner)
    assert store.capabilities == Capabilities(shared=True, max_value_bytes=960)
    assert not hasattr(store, "clear")
    assert hasattr(CheckedStore(MemoryStore()), "clear")


def test_by_url() -> None:
    store = create_store("checked://?store=memory://%3Fcapacity=1MiB&checksum=none")
    assert isinstance(store, CheckedStore)
    assert isinstance(store.inner, MemoryStore)
    bad: list[tuple[str | dict[str, object], str]] = [
        ("checked://", "option store is missing"),
        ("checked:///path?store=memory://", "checked://\\?option=value"),
        ("checked://?store=memory://&checksum=md5", "checksum='md5'.*xxh3_64 or none"),
        ({"url": "checked://", "store": "redis://:hunter2@h/x?bad=1"}, "bad"),
        ({"url": "checked://", "store": "redis://:hunter2@h", "bad": 1}, "unknown option bad"),
    ]
    for source, message in bad:
        with pytest.raises(ConfigError, match=message) as caught:
            create_store(source)
        assert "hunter2" not in repr(caught.value)
