"""Tests of what is stored and read: values, batches, damage, scanning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.errors import LayoutError
from kvpool.memory import Buffers, Region
from kvpool.store import ABSENT, PRESENT, Status, SupportsClear, SupportsScan
from kvpool.testing._store_suite import P, StoreSuite, get, put, value_of

__all__ = ["ValueTests"]


class ValueTests(StoreSuite[P]):
    """One call after the other."""

    # ---- values

    async def test_capabilities_fit(self, at: P) -> None:
        store = self.store(at)
        assert store.capabilities.loops == self.loops
        assert isinstance(store, SupportsScan) or not store.capabilities.scan

    async def test_what_is_put_is_stored_and_read(self, at: P) -> None:
        key, value = "ns/0.0/" + "ab" * 32, value_of("x", 1000)
        async with self.store(at) as store:
            results = await put(store, [(key, value)])
            assert results.status.tolist() == [Status.OK]
            assert results.nbytes.tolist() == [1000]
            assert self.raw_read(at, key) == value
            assert (await store.exists([key])).tolist() == [PRESENT]
            results, memory = await get(store, [key], [1000])
            assert results.status.tolist() == [Status.OK]
            assert memory == [value]

    async def test_what_others_stored_is_read(self, at: P) -> None:
        async with self.store(at) as store:
            self.raw_write(at, "k", b"from elsewhere")
            assert (await store.exists(["k"])).tolist() == [PRESENT]
            assert (await get(store, ["k"], [14]))[1] == [b"from elsewhere"]

    async def test_other_handles_see_the_same_if_shared(self, at: P) -> None:
        async with self.store(at) as one:
            await put(one, [("k", b"v")])
            if one.capabilities.shared:
                async with self.store(at) as two:
                    assert (await get(two, ["k"], [1]))[1] == [b"v"]
                    assert (await two.delete(["k"])).status.tolist() == [Status.OK]
                assert (await one.exists(["k"])).tolist() == [ABSENT]

    async def test_an_existing_value_is_never_changed(self, at: P) -> None:
        async with self.store(at) as store:
            await put(store, [("k", b"first")])
            for other in (b"other", b"longer than first", b""):
                assert (await put(store, [("k", other)])).status.tolist() == [Status.OK]
                assert self.raw_read(at, "k") == b"first"

    async def test_zero_bytes(self, at: P) -> None:
        async with self.store(at) as store:
            assert (await put(store, [("empty", b""), ("full", b"x")])).ok.all()
            assert (await store.exists(["empty"])).tolist() == [PRESENT]
            results, _ = await get(store, ["full", "empty"], [1, 0])
            assert results.ok.all()

    async def test_very_large(self, at: P) -> None:
        async with self.store(at) as store:
            size = self.large(store)
            value = value_of("large", size)
            assert (await put(store, [("large", value), ("small", b"s")])).ok.all()
            results, memory = await get(store, ["small", "large"], [1, size])
            assert results.ok.all()
            assert memory[1] == value

    async def test_larger_than_allowed_is_rejected(self, at: P) -> None:
        async with self.store(at) as store:
            limit = store.capabilities.max_value_bytes
            if limit is not None:
                results = await put(store, [("a", b"1"), ("big", bytes(limit + 1)), ("b", b"2")])
                assert results.status.tolist() == [Status.OK, Status.REJECTED, Status.OK]
                assert self.raw_read(at, "big") is None

    async def test_another_length_is_corrupt_and_stays(self, at: P) -> None:
        async with self.store(at) as store:
            await put(store, [("k", b"12345")])
            for size in (0, 4, 6, 5000):
                assert (await get(store, ["k"], [size]))[0].status.tolist() == [Status.CORRUPT]
            assert (await get(store, ["k"], [5]))[1] == [b"12345"]

    async def test_scattered_pieces(self, at: P) -> None:
        """Values of many pieces in several regions, empty ones included; nothing beside them is touched."""
        rng = np.random.default_rng(7)
        count, pieces = 5, 2000
        sizes = rng.integers(0, 5, (count, pieces))
        gaps = rng.integers(1, 4, (count, pieces))
        ends = np.cumsum(gaps + sizes).reshape(count, pieces)
        offsets = ends - sizes
        source = rng.integers(0, 256, (2, int(ends[-1, -1]) + 1), np.uint8)
        target = np.full_like(source, 0xEE)
        which = rng.integers(0, 2, pieces)
        keys = [f"scattered/{i}" for i in range(count)]

        def buffers(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> Buffers:
            return Buffers(tuple(Region.of(row.data) for row in memory), which, offsets, sizes)

        async with self.store(at) as store:
            assert (await store.put(keys, buffers(source))).ok.all()
            expected = np.full_like(source, 0xEE)
            for i, key in enumerate(keys):
                parts = [source[r, o : o + s] for r, o, s in zip(which, offsets[i], sizes[i], strict=True)]
                assert self.raw_read(at, key) == np.concatenate(parts).tobytes()
                for r, o, s in zip(which, offsets[i], sizes[i], strict=True):
                    expected[r, o : o + s] = source[r, o : o + s]
            assert (await store.get_into(keys, buffers(target))).ok.all()
            assert np.array_equal(target, expected)
            joined = [bytearray(int(n)) for n in sizes.sum(axis=1)]
            assert (await store.get_into(keys, Buffers.of(*joined))).ok.all()
            assert bytes(joined[3]) == self.raw_read(at, keys[3])

    async def test_names_that_differ_are_different_keys(self, at: P) -> None:
        keys = [
            "a", "A", "a/b", "a/b/c", "a/b.", ".", "..", "../a", "../../etc/x", "/a", "a/", "a//b", "%61", "a%2Fb",
            "a:b", "a*", "a\\b", "~", "-a", "!~", "=a", "=00/a", "q" * 512, "q" * 511, "/" * 512, "d/" * 255 + "x",
            "." * 300, "%" * 512,
        ]  # fmt: skip
        async with self.store(at) as store:
            assert (await put(store, [(k, value_of(str(i), 64)) for i, k in enumerate(keys)])).ok.all()
            results, memory = await get(store, keys, [64] * len(keys))
            assert results.ok.all()
            assert memory == [value_of(str(i), 64) for i in range(len(keys))]
            assert [self.raw_read(at, k) for k in keys] == memory
            assert (await store.delete(keys[::2])).ok.all()
            assert (await store.exists(keys)).tolist() == [ABSENT if i % 2 == 0 else PRESENT for i in range(len(keys))]

    # ---- batches

    async def test_an_empty_batch_does_nothing(self, at: P) -> None:
        async with self.store(at) as store:
            assert len(await store.exists([])) == 0
            for results in (await put(store, []), (await get(store, [], []))[0], await store.delete([])):
                assert len(results) == 0

    async def test_holes_keep_their_place(self, at: P) -> None:
        keys = [f"k{i}" for i in range(50)]
        there = [i % 3 != 1 for i in range(50)]
        async with self.store(at) as store:
            await put(store, [(k, value_of(k, 100)) for k, t in zip(keys, there, strict=True) if t])
            assert (await store.exists(keys)).tolist() == [PRESENT if t else ABSENT for t in there]
            results, memory = await get(store, keys, [100] * 50)
            assert results.status.tolist() == [Status.OK if t else Status.ABSENT for t in there]
            assert all(m == value_of(k, 100) for k, m, t in zip(keys, memory, there, strict=True) if t)
            assert (await store.delete(keys)).status.tolist() == [Status.OK if t else Status.ABSENT for t in there]

    async def test_duplicates_in_a_batch(self, at: P) -> None:
        async with self.store(at) as store:
            assert (await put(store, [("k", b"one"), ("x", b"xxx"), ("k", b"two")])).ok.all()
            assert self.raw_read(at, "k") in (b"one", b"two")
            stored = self.raw_read(at, "k")
            results, memory = await get(store, ["k", "no", "k", "x", "k"], [3] * 5)
            assert results.status.tolist() == [Status.OK, Status.ABSENT, Status.OK, Status.OK, Status.OK]
            assert [memory[0], memory[2], memory[4]] == [stored] * 3
            assert (await store.exists(["k", "no", "k"])).tolist() == [PRESENT, ABSENT, PRESENT]
            assert Status.OK in (await store.delete(["k", "k"])).status.tolist()
            assert self.raw_read(at, "k") is None

    async def test_delete_then_put_stores_anew(self, at: P) -> None:
        async with self.store(at) as store:
            await put(store, [("k", b"old")])
            assert (await store.delete(["k", "gone"])).status.tolist() == [Status.OK, Status.ABSENT]
            assert self.raw_read(at, "k") is None
            await put(store, [("k", b"new!")])
            assert (await get(store, ["k"], [4]))[1] == [b"new!"]

    async def test_keys_and_buffers_must_fit(self, at: P) -> None:
        async with self.store(at) as store:
            two = Buffers.of(bytearray(1), bytearray(1))
            for call in (store.put, store.get_into):
                with pytest.raises(LayoutError):
                    await call(["only one"], two)

    # ---- damage

    async def test_damage_is_found_and_heals(self, at: P) -> None:
        async with self.store(at) as store:
            for damage in sorted(self.damages):
                keys = [f"{damage}/{i}" for i in range(3)]
                items = [(k, value_of(k, 3000)) for k in keys]
                await put(store, items)
                self.raw_damage(at, keys[1], damage)
                results, memory = await get(store, keys, [3000] * 3)
                assert results.status[1] in (Status.CORRUPT, Status.ABSENT), damage
                assert [memory[0], memory[2]] == [items[0][1], items[2][1]]
                assert results.ok.tolist() == [True, False, True]
                assert (await put(store, items)).ok.all()
                results, memory = await get(store, keys, [3000] * 3)
                assert results.ok.all(), f"{damage}: a good value could not be stored again"
                assert memory == [v for _, v in items]

    # ---- optional powers

    async def test_scan_lists_what_is_there(self, at: P) -> None:
        keys = ["a/0.0/1", "a/0.0/2", "a/1.0/1", "ab/x:y", "b", "q" * 512]
        async with self.store(at) as store:
            if isinstance(store, SupportsScan):
                assert [k async for k in store.scan()] == []
                await put(store, [(k, b"v") for k in keys])
                for prefix in ("", "a", "a/", "a/0.0/", "a/0.0/1", "ab/x:", "b", "q" * 300, "nothing"):
                    assert sorted([k async for k in store.scan(prefix)]) == [k for k in keys if k.startswith(prefix)]

    async def test_clear_removes_what_begins_so(self, at: P) -> None:
        keys = ["a/0.0/1", "a/0.0/2", "a/1.0/1", "b"]
        async with self.store(at) as store:
            if isinstance(store, SupportsClear):
                await put(store, [(k, b"v") for k in keys])
                assert await store.clear("a/0.0/") == 2
                assert (await store.exists(keys)).tolist() == [ABSENT, ABSENT, PRESENT, PRESENT]
                assert await store.clear() == 2
                assert (await put(store, [(k, b"w") for k in keys])).ok.all()
                assert [self.raw_read(at, k) for k in keys] == [b"w"] * 4
