"""The contract of :class:`kvpool.store.Store` as tests that a backend's author gets by subclassing one class.

::

    class TestMyStore(StoreConformance[Path]):
        @contextmanager
        def place(self):            # a fresh, empty place for values
            with TemporaryDirectory() as root:
                yield Path(root)

        def store(self, place): return MyStore(place)
        def raw_read(self, place, key): ...
        def raw_write(self, place, key, value): ...

The raw hooks go around the store under test, so that one mistake in it cannot hide another. Needs pytest, hypothesis
and trio: ``pip install 'kvpool[testing]'``.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, Literal, TypeVar

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpool.errors import LayoutError, StoreClosed
from kvpool.memory import Buffers, Region
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Results, Status, Store, SupportsClear, SupportsScan
from kvpool.testing.cancel import cancel_everywhere

__all__ = ["Damage", "StoreConformance", "get", "put"]

P = TypeVar("P")
#: truncate: the end is missing. flip: one bit of the payload. extend: bytes too many. foreign: what is stored under
#: another key, as a whole.
Damage = Literal["truncate", "flip", "extend", "foreign"]

#: No call of these tests takes as long unless it hangs.
_HANG_S = 60.0


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


class StoreConformance(Generic[P]):
    """Subclass it in a test module, under a name that pytest collects."""

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

    def _large(self, store: Store) -> int:
        return min(self.large_bytes, store.capabilities.max_value_bytes or self.large_bytes)

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
            size = self._large(store)
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

    # ---- deadlines and cancellation

    async def test_a_passed_deadline(self, at: P) -> None:
        async with self.store(at) as store:
            await put(store, [("k", b"v")])
            late = anyio.current_time()
            assert (await store.exists(["k", "n"], deadline=late)).tolist() == [UNKNOWN, UNKNOWN]
            for results in (
                (await get(store, ["k", "n"], [1, 1], deadline=late))[0],
                await put(store, [("k", b"w"), ("n", b"w")], deadline=late),
                await store.delete(["k", "n"], deadline=late),
            ):
                assert results.status.tolist() == [Status.TIMED_OUT, Status.TIMED_OUT]
            assert self.raw_read(at, "k") in (b"v", None)

    async def test_a_deadline_in_the_middle(self, at: P) -> None:
        size, n = 1 << 16, 128
        items = [(f"{r}/{i}", value_of(f"{r}/{i}", size)) for r in range(2) for i in range(n)]
        async with self.store(at) as store:
            start = time.perf_counter()
            await put(store, items[:n])
            took = time.perf_counter() - start
            with anyio.fail_after(_HANG_S):
                results = await put(store, items[n:], deadline=anyio.current_time() + took / 4)
            assert set(results.status.tolist()) <= {Status.OK, Status.TIMED_OUT}
            for (key, value), ok in zip(items[n:], results.ok, strict=True):
                assert self.raw_read(at, key) in ((value,) if ok else (value, None))

    async def test_cancelled_at_every_await(self, at: P) -> None:
        """Whole or absent, memory left alone, and the store goes on working, wherever a call is cancelled."""
        size = 40_000
        keys = [f"c/{i}" for i in range(4)]
        values = [value_of(k, size) for k in keys]
        memory = [bytearray(size) for _ in keys]
        async with self.store(at) as store:

            async def check(step: int) -> None:
                before = [bytes(m) for m in memory]
                await anyio.sleep(0.002)
                assert [bytes(m) for m in memory] == before, f"memory was written after step {step} was cancelled"
                for key, value in zip(keys, values, strict=True):
                    assert self.raw_read(at, key) in (value, None)
                assert (await put(store, [(f"other/{step}", b"o")])).ok.all()
                assert (await get(store, [f"other/{step}"], [1]))[1] == [b"o"]

            async def check_and_clear(step: int) -> None:
                await check(step)
                await store.delete(keys)

            async def check_and_fill(step: int) -> None:
                await check(step)
                await put(store, list(zip(keys, values, strict=True)))

            async def put_all() -> Results:
                return await put(store, list(zip(keys, values, strict=True)))

            def get_all() -> Coroutine[Any, Any, Results]:
                return store.get_into(keys, Buffers.of(*memory))

            await cancel_everywhere(put_all, check_and_clear)
            await cancel_everywhere(put_all, check)
            await cancel_everywhere(get_all, check)
            await cancel_everywhere(lambda: store.exists(keys), check)
            await cancel_everywhere(lambda: store.delete(keys), check_and_fill)
            results, found = await get(store, keys, [size] * len(keys))
            assert results.ok.all()
            assert found == values

    # ---- life

    async def test_closed_stores_say_so(self, at: P) -> None:
        store = self.store(at)

        def calls() -> list[Callable[[], Awaitable[object]]]:
            return [
                lambda: store.exists(["k"]),
                lambda: store.exists([]),
                lambda: store.get_into(["k"], Buffers.of(bytearray(1))),
                lambda: store.put(["k"], Buffers.of(bytearray(1))),
                lambda: store.delete(["k"]),
            ]

        for call in calls():
            with pytest.raises(StoreClosed):
                await call()
        async with store:
            await put(store, [("k", b"v")])
        for call in calls():
            with pytest.raises(StoreClosed):
                await call()
        with pytest.raises(StoreClosed):
            await store.__aenter__()

    async def test_close_while_busy(self, at: P) -> None:
        """Calls in flight return or raise StoreClosed, and then leave the caller's memory alone."""
        size = 1 << 16
        keys = [f"busy/{i}" for i in range(8)]
        memories: list[bytearray] = []

        async def work(store: Store, n: int) -> None:
            source = Buffers.of(*(bytearray(value_of(k, size)) for k in keys))
            memory = [bytearray(size) for _ in keys]
            memories.extend(memory)
            target = Buffers.of(*memory)
            mine = [f"{k}/{n}" for k in keys]
            while True:
                try:
                    await store.put(mine, source)
                    await store.get_into(mine, target)
                    await store.exists(mine)
                    await store.delete(mine)
                except StoreClosed:
                    return

        for pause in (0.0, 0.001, 0.01, 0.03):
            with anyio.fail_after(_HANG_S):
                async with anyio.create_task_group() as tasks, self.store(at) as store:
                    for n in range(6):
                        tasks.start_soon(work, store, n)
                    await anyio.sleep(pause)
            before = [bytes(m) for m in memories]
            await anyio.sleep(0.01)
            assert [bytes(m) for m in memories] == before

    async def test_open_and_close_leave_nothing_behind(self, at: P) -> None:
        def counts() -> tuple[int, int]:
            gc.collect()
            folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
            return len(os.listdir(folder)), threading.active_count()

        async def cycle() -> None:
            async with self.store(at) as store:
                await put(store, [("k", b"v")])
                await get(store, ["k", "n"], [1, 1])

        for _ in range(min(5, self.open_close_cycles)):
            await cycle()
        before = counts()
        for _ in range(self.open_close_cycles):
            await cycle()
        after = counts()
        assert after[0] <= before[0] + 2, "descriptors leak"
        assert after[1] <= before[1] + 2, "threads leak"

    # ---- many at once

    async def test_a_reader_sees_a_whole_value_or_none(self, at: P) -> None:
        """Writers of different values under one key, on two handles if the store is shared: the first wins, whole."""
        size = 100_000
        async with self.store(at) as one, self.store(at) as other:
            handles = [one, other] if one.capabilities.shared else [one, one]
            for attempt in range(12):
                key = f"race/{attempt}"
                seen: set[bytes] = set()
                done = anyio.Event()

                async def write(n: int, key: str = key) -> None:
                    assert (await put(handles[n % 2], [(key, bytes([n + 1]) * size)])).ok.all()

                async def read(n: int, key: str = key, seen: set[bytes] = seen, done: anyio.Event = done) -> None:
                    while not done.is_set():
                        results, memory = await get(handles[n % 2], [key], [size])
                        assert results.status[0] in (Status.OK, Status.ABSENT)
                        if results.ok[0]:
                            seen.add(memory[0])

                async with anyio.create_task_group() as readers:
                    readers.start_soon(read, 0)
                    readers.start_soon(read, 1)
                    async with anyio.create_task_group() as writers:
                        for n in range(4):
                            writers.start_soon(write, n)
                    done.set()
                final = self.raw_read(at, key)
                assert final in [bytes([n + 1]) * size for n in range(4)]
                assert seen <= {final}, "a reader saw a mixed value, or the value changed"

    async def test_deleting_beside_readers_and_writers(self, at: P) -> None:
        size, key = 50_000, "churn"
        values = [bytes([n + 1]) * size for n in range(3)]
        async with self.store(at) as store:

            async def churn(n: int) -> None:
                for _ in range(15):
                    await put(store, [(key, values[n])])
                    await store.delete([key])

            async def read() -> None:
                for _ in range(30):
                    results, memory = await get(store, [key], [size])
                    assert results.status[0] in (Status.OK, Status.ABSENT)
                    assert not results.ok[0] or memory[0] in values

            with anyio.fail_after(_HANG_S):
                async with anyio.create_task_group() as tasks:
                    for n in range(3):
                        tasks.start_soon(churn, n)
                        tasks.start_soon(read)

    async def test_many_batches_at_once(self, at: P) -> None:
        async with self.store(at) as store:

            async def batch(n: int) -> None:
                keys = [f"batch/{(n + i) % 40}" for i in range(20)]
                assert (await put(store, [(k, value_of(k, 500)) for k in keys])).ok.all()
                results, memory = await get(store, keys, [500] * 20)
                assert results.ok.all()
                assert memory == [value_of(k, 500) for k in keys]

            with anyio.fail_after(_HANG_S):
                async with anyio.create_task_group() as tasks:
                    for n in range(40):
                        tasks.start_soon(batch, n)

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

    # ---- anything at all

    def test_any_sequence_of_calls_fits_the_model(self, anyio_backend: str) -> None:
        from kvpool.testing.store_machine import machine_for

        run_state_machine_as_test(
            machine_for(self, anyio_backend),
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=15,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            ),
        )
