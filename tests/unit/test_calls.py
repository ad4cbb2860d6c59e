"""Store calls that end, fail, are late or are given up: who lets go of the staging memory, and what the pool hears."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import anyio
import numpy as np
import pytest

from kvpool.calls import MAX_LEFT_BEHIND, Outcome, StoreCalls, checked_presence, checked_results
from kvpool.errors import StoreClosed, StoreError
from kvpool.memory import Buffers
from kvpool.metrics import Counters
from kvpool.staging import Staging
from kvpool.store import Presence, Results, Status
from tests.unit.test_pool import Steered, engine, prompt

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("after", ["late", "cancel", "late and cancel"])
async def test_no_memory_is_lost_when_a_call_and_its_waiter_end_together(after: str) -> None:
    """A call that sleeps exactly until the moment at which its waiter gives up."""
    staging = Staging(1 << 20)
    async with anyio.create_task_group() as tasks:
        calls = StoreCalls(tasks, Counters(), grace=0.0)
        for i in range(60):
            delay = 0.01 if i % 3 else 0.01 + (i - 30) * 1e-4
            at = anyio.current_time() + 0.01

            async def store(delay: float = delay) -> int:
                await anyio.sleep(delay)
                return 1

            lease = await staging.acquire(4096)
            with anyio.CancelScope(deadline=at if "cancel" in after else float("inf")):
                outcome = await calls.run(store, at if "late" in after else at + 5, lease)
                if not outcome.late:
                    lease.release()
        await anyio.sleep(0.05)
        assert calls.left_behind == calls.left_bytes == 0
        assert staging.free_bytes == staging.nbytes
        calls.close()


async def test_a_cancellation_that_a_store_leaks_fails_that_call_alone() -> None:
    async with anyio.create_task_group() as tasks:
        calls = StoreCalls(tasks, Counters(), grace=0.1)

        async def leaks() -> int:
            raise anyio.get_cancelled_exc_class()("leaked") if _on_asyncio() else RuntimeError("trio cannot leak one")

        outcome = await calls.run(leaks, anyio.current_time() + 5)
        assert outcome.error is not None

        async def works() -> int:
            return 7

        assert (await calls.run(works, anyio.current_time() + 5)).result == 7
        calls.close()


def _on_asyncio() -> bool:
    try:
        return asyncio.get_running_loop() is not None
    except RuntimeError:
        return False


async def test_a_leaked_cancellation_does_not_end_the_pool() -> None:
    store = Steered()

    async def leaky(keys: Sequence[str]) -> None:
        if _on_asyncio():
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        raise RuntimeError("gone")

    async with engine(store) as e:
        part = e.pool.transfer(0, prompt(4), range(4), range(4))
        store.before_exists = leaky
        assert (await e.pool.lookup(prompt(4), 17)).length == 0
        assert not (await e.pool.save([part]))[0].ok.any()
        store.before_exists = None
        assert (await e.pool.save([part]))[0].ok.all()
        assert (await e.pool.lookup(prompt(4), 17)).length == 16


async def test_memory_held_by_calls_left_behind_is_bounded() -> None:
    staging = Staging(1 << 20)
    release = anyio.Event()

    async def deaf() -> int:
        with anyio.CancelScope(shield=True):
            await release.wait()
        return 1

    async with anyio.create_task_group() as tasks:
        calls = StoreCalls(tasks, Counters(), grace=0.0, max_left_bytes=staging.nbytes / 2)
        asked = 0
        while not (outcome := await _with_lease(calls, staging, deaf)).error:
            assert outcome.late
            asked += 1
            assert asked < MAX_LEFT_BEHIND
        assert staging.free_bytes > 0, "a wedged store must leave memory for the rest"
        release.set()
        await anyio.wait_all_tasks_blocked()
        assert staging.free_bytes == staging.nbytes
        calls.close()


class _Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("errors", [None, {"x": StoreError("y")}, {0: _Speechless()}, {0: "text"}])
async def test_errors_that_are_none_hurt_nobody(errors: Any) -> None:
    class Odd(Steered):
        odd = False

        async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
            if self.odd and errors and 0 in errors:
                raise _Speechless
            return await super().exists(keys, deadline=deadline)

        async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
            return Results(np.full(len(keys), Status.FAILED, np.uint8), np.zeros(len(keys), np.int64), errors)

    store = Odd()
    async with engine(store) as e:
        part = e.pool.transfer(0, prompt(4), range(4), range(4))
        await e.pool.save([part])
        store.odd = True
        assert (await e.pool.lookup(prompt(4), 17)).length in (0, 16)
        (loaded,) = await e.pool.load([part])
        assert loaded.status.tolist() == [Status.FAILED] * 4


class _NeverBegins:
    """Tasks that are cancelled before their first step."""

    def start_soon(self, *_: object) -> None:
        pass


async def test_a_call_whose_task_never_begins_ends_with_the_pool() -> None:
    staging = Staging(1 << 20)
    calls = StoreCalls(cast(Any, _NeverBegins()), Counters(), grace=0.0)
    outcomes: list[Outcome[int]] = []

    async def store() -> int:
        raise AssertionError

    async def ask() -> None:
        lease = await staging.acquire(4096)
        outcomes.append(await calls.run(store, math.inf, lease))
        lease.release()

    with anyio.fail_after(10):
        with anyio.move_on_after(0.01):
            await ask()
        assert (calls.left_behind, calls.left_bytes) == (1, 4096)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            calls.close()
        await ask()
    assert [type(outcome.error) for outcome in outcomes] == [StoreClosed] * 2
    assert (calls.left_behind, calls.left_bytes, staging.free_bytes) == (0, 0, staging.nbytes)


async def _with_lease(calls: StoreCalls, staging: Staging, fn: Callable[[], Awaitable[int]]) -> Outcome[int]:
    lease = await staging.acquire(128 << 10)
    outcome = await calls.run(fn, anyio.current_time() + 0.005, lease)
    if not outcome.late:
        lease.release()
    return outcome


async def test_results_that_contradict_themselves_are_not_believed() -> None:
    class Lying(Steered):
        async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = 0) -> Results:
            return Results(np.zeros(len(keys), np.uint8), np.array([64, 0, 10, 65], np.int64))

    async with engine(Lying()) as e:
        e.fill(9)
        before = e.blocks([11, 12, 13])
        part = e.pool.transfer(0, prompt(4), range(4), range(10, 14))
        (loaded,) = await e.pool.load([part])
        assert loaded.status.tolist() == [Status.OK, Status.CORRUPT, Status.CORRUPT, Status.CORRUPT]
        assert e.blocks([11, 12, 13]) == before


@pytest.mark.parametrize("answer", [None, 5, "x", [0, 0], np.zeros((2, 2), np.uint8), np.zeros(3, np.uint8)])
async def test_answers_of_another_form_are_failures(answer: object) -> None:
    outcome: Outcome[Any] = Outcome(result=answer)
    assert checked_presence(outcome, 2).result is None or answer is None
    assert checked_results(outcome, 2, 8, filled=True).status.tolist() == [Status.FAILED] * 2
    columns: Any = Results(cast(Any, answer), np.zeros(2, np.int64), {7: ValueError()})
    found = checked_results(Outcome(result=columns), 2, 8, filled=True)
    assert found.status.tolist() == [Status.FAILED] * 2
    whole = Results(np.zeros(2, np.uint8), np.full(2, 8, np.int64), {7: ValueError()})
    assert checked_results(Outcome(result=whole), 2, 8, filled=True).errors == {}
