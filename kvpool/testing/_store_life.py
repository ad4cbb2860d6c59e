"""Tests of time and life: deadlines, cancellation, closing, many calls at once."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable

import anyio
import pytest

from kvpool.errors import StoreClosed
from kvpool.memory import Buffers
from kvpool.store import UNKNOWN, Results, Status, Store
from kvpool.testing._store_suite import P, StoreSuite, get, put, value_of
from kvpool.testing.cancel import cancel_everywhere

__all__ = ["LifeTests"]

#: No call of these tests takes as long unless it hangs.
HANG_S = 60.0


class LifeTests(StoreSuite[P]):
    """Calls that are late, cancelled, cut off or many."""

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
            with anyio.fail_after(HANG_S):
                results = await put(store, items[n:], deadline=anyio.current_time() + took / 4)
            assert set(results.status.tolist()) <= {Status.OK, Status.TIMED_OUT}
            for (key, value), ok in zip(items[n:], results.ok, strict=True):
                assert self.raw_read(at, key) in ((value,) if ok else (value, None))

    async def test_cancelled_at_every_await(self, at: P) -> None:
        await self._cancelled_everywhere(at)

    async def test_task_cancelled_at_every_await(self, at: P, anyio_backend_name: str) -> None:
        """As by ``asyncio.wait_for``: anyio's shields do not hold that off."""
        if anyio_backend_name == "asyncio":
            await self._cancelled_everywhere(at, task_cancel=True)

    async def _cancelled_everywhere(self, at: P, *, task_cancel: bool = False) -> None:
        """Whole or absent, memory left alone, and the store goes on working, wherever a call is cancelled."""
        keys = [f"c/{i}" for i in range(4)]
        async with self.store(at) as store:
            size = min(self.large(store), 1 << 20)  # so much that a late writer is seen at work
            values = [value_of(k, size) for k in keys]
            memory = [bytearray(size) for _ in keys]

            async def check(step: int) -> None:
                before = [bytes(m) for m in memory]
                for _ in range(5):
                    await anyio.sleep(0.002)
                unchanged = [bytes(m) for m in memory] == before
                assert unchanged, f"memory was written after step {step} was cancelled"
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

            async def get_all() -> Results:
                for piece in memory:
                    piece[:] = bytes(size)
                return await store.get_into(keys, Buffers.of(*memory))

            for call, after in (
                (put_all, check_and_clear),
                (put_all, check),
                (get_all, check),
                (lambda: store.exists(keys), check),
                (lambda: store.delete(keys), check_and_fill),
            ):
                await cancel_everywhere(call, after, task_cancel=task_cancel)
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
            with anyio.fail_after(HANG_S):
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

            with anyio.fail_after(HANG_S):
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

            with anyio.fail_after(HANG_S):
                async with anyio.create_task_group() as tasks:
                    for n in range(40):
                        tasks.start_soon(batch, n)
