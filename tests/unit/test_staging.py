"""Staging memory: no overlap, no leak, first come first served within a priority."""

from __future__ import annotations

import gc
import math
import mmap
import weakref
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from anyio.abc import TaskGroup
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.errors import KVPoolError, LayoutError
from kvpool.staging import ALIGNMENT, Lease, Staging
from kvpool.testing.simulation import simulate

PAGE = ALIGNMENT
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


async def settle() -> None:
    """Let every task that can run come to its next wait."""
    for _ in range(10):
        await anyio.lowlevel.checkpoint()


class Asker:
    """A task that asks for a lease, tells the order in which it got it, and holds it until told to let go."""

    def __init__(self, staging: Staging, order: list[Asker], nbytes: int, priority: int = 0) -> None:
        self.staging = staging
        self.order = order
        self.nbytes = nbytes
        self.priority = priority
        self.scope: anyio.CancelScope | None = None
        self.lease: Lease | None = None
        self.error: Exception | None = None
        self.ended = False
        self.let_go = anyio.Event()

    async def run(self, deadline: float = math.inf) -> None:
        try:
            with anyio.CancelScope() as self.scope:
                async with self.staging.lease(self.nbytes, priority=self.priority, deadline=deadline) as lease:
                    self.lease = lease
                    self.order.append(self)
                    await self.let_go.wait()
        except (TimeoutError, KVPoolError) as error:
            self.error = error
        finally:
            self.ended = True


async def ask(tasks: TaskGroup, asker: Asker, deadline: float = math.inf) -> Asker:
    tasks.start_soon(asker.run, deadline)
    await settle()
    return asker


# -- a lease ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_lease_is_memory_for_rows_of_bytes() -> None:
    staging = Staging(4 * PAGE)
    assert (staging.nbytes, staging.free_bytes, staging.peak) == (4 * PAGE, 4 * PAGE, 0)
    async with staging.lease(100) as first, staging.lease(PAGE + 1) as second:
        assert (first.offset, second.offset) == (0, PAGE)
        assert staging.free_bytes == PAGE
        rows = second.rows(3, 500)
        rows[:] = np.arange(3, dtype=np.uint8)[:, None]
        buffers = second.buffers(3, 500)
        assert buffers.nbytes.tolist() == [500] * 3
        assert [bytes(buffers.views(i)[0]) for i in range(3)] == [bytes([i]) * 500 for i in range(3)]
        assert buffers.addresses[:, 0].tolist() == [rows[i].ctypes.data for i in range(3)]
        assert second.region.view[second.offset + 500] == 1
        assert not first.rows(1, 100).any()
    assert staging.free_bytes == 4 * PAGE
    assert staging.peak == 3 * PAGE


@pytest.mark.anyio
async def test_rows_that_do_not_fit_are_refused() -> None:
    staging = Staging(PAGE)
    async with staging.lease(100) as lease:
        for n, width in ((1, 101), (11, 10), (-1, 10), (10, -1)):
            for show in (lease.rows, lease.buffers):
                with pytest.raises(LayoutError, match="do not fit a lease of 100 bytes"):
                    show(n, width)
        assert lease.rows(0, 1000).shape == (0, 1000)
    with pytest.raises(LayoutError, match="released"):
        lease.rows(1, 1)


@pytest.mark.anyio
async def test_what_can_never_be_had_is_refused_at_once() -> None:
    staging = Staging(PAGE)
    async with staging.lease(PAGE):
        for nbytes in (PAGE + 1, -1, 2**62):
            with pytest.raises(LayoutError, match="cannot be had"):
                await staging.acquire(nbytes)
    for nbytes in (0, -1):
        with pytest.raises(LayoutError, match="at least one"):
            Staging(nbytes)


@pytest.mark.anyio
async def test_a_lease_of_nothing_needs_no_room() -> None:
    staging = Staging(PAGE)
    async with staging.lease(PAGE), staging.lease(0) as nothing:
        assert nothing.rows(0, 5).shape == (0, 5)
        assert len(nothing.buffers(0, 5)) == 0
    assert staging.free_bytes == PAGE


@pytest.mark.anyio
async def test_a_detached_lease_is_given_back_by_its_owner() -> None:
    staging = Staging(PAGE)
    async with staging.lease(10) as lease:
        lease.detach()
    assert staging.free_bytes == 0
    for _ in range(2):
        lease.release()
    assert staging.free_bytes == PAGE


@pytest.mark.anyio
async def test_an_error_in_the_block_gives_the_lease_back() -> None:
    staging = Staging(PAGE)
    with pytest.raises(OSError, match="broken"):
        async with staging.lease(10):
            raise OSError("broken")
    assert staging.free_bytes == PAGE


# -- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_first_come_first_served_loads_before_saves() -> None:
    staging, order = Staging(PAGE), list[Asker]()
    async with anyio.create_task_group() as tasks:
        holder = await ask(tasks, Asker(staging, order, PAGE))
        askers = [await ask(tasks, Asker(staging, order, PAGE, priority)) for priority in (1, 0, 1, 0)]
        for holding in (holder, askers[1], askers[3], askers[0], askers[2]):
            assert order[-1] is holding
            holding.let_go.set()
            await settle()
    assert staging.free_bytes == PAGE


@pytest.mark.anyio
async def test_nobody_overtakes_who_waits_for_more() -> None:
    staging, order = Staging(4 * PAGE), list[Asker]()
    async with anyio.create_task_group() as tasks:
        holder = await ask(tasks, Asker(staging, order, 3 * PAGE))
        large = await ask(tasks, Asker(staging, order, 4 * PAGE))
        small = await ask(tasks, Asker(staging, order, PAGE))
        save = await ask(tasks, Asker(staging, order, PAGE, 1))
        assert order == [holder]
        for holding in (holder, large):
            holding.let_go.set()
            await settle()
        assert order[:2] == [holder, large]
        assert small.lease is not None
        assert save.lease is not None
        assert small.lease.offset < save.lease.offset  # both at once now, the first in line first
        for holding in (small, save):
            holding.let_go.set()


@pytest.mark.anyio
@pytest.mark.parametrize("end", ["cancelled", "late"])
async def test_who_gives_up_lets_the_next_pass(end: str) -> None:
    staging, order = Staging(4 * PAGE), list[Asker]()
    async with anyio.create_task_group() as tasks:
        holder = await ask(tasks, Asker(staging, order, 3 * PAGE))
        deadline = anyio.current_time() + 0.01 if end == "late" else math.inf
        large = await ask(tasks, Asker(staging, order, 4 * PAGE), deadline)
        small = await ask(tasks, Asker(staging, order, PAGE))
        if end == "cancelled":
            assert large.scope is not None
            large.scope.cancel()
        with anyio.fail_after(20):
            while small.lease is None:  # noqa: ASYNC110 - nothing tells when
                await anyio.sleep(0.001)
        assert large.ended
        assert isinstance(large.error, TimeoutError) == (end == "late")
        for holding in (holder, small):
            holding.let_go.set()
    assert staging.free_bytes == 4 * PAGE


@pytest.mark.anyio
async def test_what_is_free_is_given_even_past_the_deadline() -> None:
    staging = Staging(2 * PAGE)
    past = anyio.current_time() - 1
    async with staging.lease(PAGE, deadline=past):
        with pytest.raises(TimeoutError, match=f"{PAGE} are free"):
            await staging.acquire(2 * PAGE, deadline=past)
    assert staging.free_bytes == 2 * PAGE


@pytest.mark.anyio
async def test_a_lease_granted_to_a_task_just_being_cancelled_is_not_lost() -> None:
    staging, order = Staging(PAGE), list[Asker]()
    async with anyio.create_task_group() as tasks:
        holder = await ask(tasks, Asker(staging, order, PAGE))
        waiting = await ask(tasks, Asker(staging, order, PAGE))
        third = await ask(tasks, Asker(staging, order, PAGE))
        assert holder.lease is not None
        assert waiting.scope is not None
        holder.lease.release()  # now it is granted to ``waiting``, which has not run yet
        waiting.scope.cancel()
        await settle()
        assert waiting.ended
        assert order[-1] is third
        for holding in (holder, third):
            holding.let_go.set()
    assert staging.free_bytes == PAGE


@pytest.mark.anyio
async def test_a_cancelled_task_does_not_get_what_is_free() -> None:
    staging = Staging(PAGE)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await staging.acquire(PAGE)
    assert scope.cancelled_caught
    assert staging.free_bytes == PAGE


# -- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_closed_staging_refuses_and_fails_those_that_wait() -> None:
    staging, order = Staging(PAGE), list[Asker]()
    async with anyio.create_task_group() as tasks:
        holder = await ask(tasks, Asker(staging, order, PAGE))
        waiting = await ask(tasks, Asker(staging, order, PAGE))
        for _ in range(2):
            staging.close()
        for nbytes in (0, 1):
            with pytest.raises(KVPoolError, match="closed"):
                await staging.acquire(nbytes)
        await settle()
        assert "closed" in str(waiting.error)
        assert holder.lease is not None
        holder.lease.rows(1, PAGE)[:] = 1  # still there
        holder.let_go.set()
    assert len(order) == 1
    assert staging.free_bytes == PAGE


@pytest.mark.anyio
@pytest.mark.parametrize("closed_first", [True, False])
async def test_the_memory_goes_with_the_last_lease_and_view(
    monkeypatch: pytest.MonkeyPatch, closed_first: bool
) -> None:
    made: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __init__(self, *_: object, **__: object) -> None:
            made.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Watched)
    staging = Staging(PAGE)
    (gone,) = made
    lease: Lease | None = await staging.acquire(10)
    assert lease is not None
    rows: Any = lease.rows(2, 5)
    if closed_first:
        staging.close()
        lease.release()
    else:
        lease.release()
        staging.close()
    del lease
    gc.collect()
    assert gone() is not None  # a view is left
    rows[:] = 3
    del rows
    gc.collect()
    assert gone() is None


# -- random use against a model ---------------------------------------------------------------------------------------

actions = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 6 * PAGE), st.integers(0, 1)),
    st.tuples(st.just("let go"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
)


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE)


class Model:
    """Which pages are taken, and who must be served next."""

    def __init__(self, npages: int) -> None:
        self.taken = [False] * npages
        self.waiting: list[Asker] = []
        self.holding: dict[Asker, int] = {}

    def ask(self, asker: Asker) -> None:
        if not asker.nbytes:
            self.holding[asker] = 0
            return
        self.waiting.append(asker)
        self.waiting.sort(key=lambda a: a.priority)
        self.serve()

    def leave(self, asker: Asker) -> None:
        if asker in self.waiting:
            self.waiting.remove(asker)
        elif asker in self.holding:
            self.mark(asker, False)
            del self.holding[asker]
        self.serve()

    def serve(self) -> None:
        while self.waiting:
            need = pages(self.waiting[0].nbytes)
            starts = [i for i in range(len(self.taken) - need + 1) if not any(self.taken[i : i + need])]
            if not starts:
                return
            asker = self.waiting.pop(0)
            self.holding[asker] = starts[0]
            self.mark(asker, True)

    def mark(self, asker: Asker, taken: bool) -> None:
        start, need = self.holding[asker], pages(asker.nbytes)
        self.taken[start : start + need] = [taken] * need


@relaxed
@given(st.lists(actions, max_size=60), st.integers(0, 2**32))
def test_random_use_agrees_with_the_model(steps: list[tuple[str, int, int]], seed: int) -> None:
    async def main() -> None:
        staging, order, model = Staging(6 * PAGE), list[Asker](), Model(6)
        askers: list[Asker] = []

        def check() -> None:
            for asker in askers:
                assert (asker.lease is not None and not asker.ended) == (asker in model.holding)
                if asker in model.holding and asker.lease is not None:
                    assert asker.lease.offset == model.holding[asker] * PAGE
            assert staging.free_bytes == model.taken.count(False) * PAGE

        async with anyio.create_task_group() as tasks:
            for what, number, priority in steps:
                if what == "ask":
                    asker = Asker(staging, order, number, priority)
                    askers.append(asker)
                    model.ask(asker)
                    await ask(tasks, asker)
                elif askers:
                    asker = askers[number % len(askers)]
                    if what == "cancel":
                        assert asker.scope is not None
                        asker.scope.cancel()
                        model.leave(asker)
                    elif asker in model.holding:
                        asker.let_go.set()
                        model.leave(asker)
                    await settle()
                check()
            tasks.cancel_scope.cancel()
        assert staging.free_bytes == staging.nbytes
        assert await staging.acquire(staging.nbytes)  # whole again

    simulate(main, seed=seed)


@relaxed
@given(st.integers(0, 2**32))
def test_bytes_of_one_lease_are_never_anothers(seed: int) -> None:
    """Many tasks that wait, are late, are cancelled and write all over their leases, in an order from the seed."""

    async def worker(staging: Staging, rng: np.random.Generator, mark: int) -> None:
        for _ in range(6):
            nbytes = int(rng.integers(0, staging.nbytes // 2))
            with anyio.move_on_after(rng.exponential(2)):
                try:
                    lease = await staging.acquire(
                        nbytes, priority=int(rng.integers(2)), deadline=anyio.current_time() + rng.exponential(3)
                    )
                except TimeoutError:
                    continue
                try:
                    lease.rows(1, nbytes)[:] = mark
                    await anyio.sleep(rng.exponential(1))
                    assert (lease.rows(1, nbytes) == mark).all()
                finally:
                    lease.release()

    async def main() -> None:
        staging = Staging(16 * PAGE)
        async with anyio.create_task_group() as tasks:
            for mark in range(1, 13):
                tasks.start_soon(worker, staging, np.random.default_rng([seed, mark]), mark)
        assert staging.free_bytes == staging.nbytes
        assert 0 < staging.peak <= staging.nbytes

    simulate(main, seed=seed)


@pytest.mark.anyio
async def test_rows_can_have_room_in_front() -> None:
    async with Staging(1 << 16).lease(3 * (64 + 1000)) as lease:
        lease.rows(3, 1064)[:] = 7
        rows, buffers = lease.rows(3, 1000, headroom=64), lease.buffers(3, 1000, headroom=64)
        rows[:] = 9
        assert lease.rows(3, 1064)[:, :64].tolist() == [[7] * 64] * 3
        assert [bytes(view) for i in range(3) for view in buffers.views(i)] == [b"\x09" * 1000] * 3
        assert buffers.headroom == buffers.select([1]).headroom == 64
        for bad in ((3, 1001, 64), (4, 1000, 64), (3, 1000, -1)):
            with pytest.raises(LayoutError):
                lease.rows(*bad)
            with pytest.raises(LayoutError):
                lease.buffers(*bad)
