"""The simulator itself: virtual time, one seed one run, and no silent hang."""

from __future__ import annotations

import gc
import importlib
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import anyio
import anyio.lowlevel
import pytest

from kvpool.testing.simulation import Deadlock, Simulated, record, simulate
from kvpool.threads import Threads

ROOT = Path(__file__).parents[2]


async def crowd(n: int = 8) -> list[tuple[int, int]]:
    """Tasks that compete for locks, threads and time."""
    seen: list[tuple[int, int]] = []
    lock, threads = anyio.Lock(), Threads(2)

    async def member(i: int) -> None:
        for turn in range(5):
            async with lock:
                await anyio.lowlevel.checkpoint()
            await threads.run(seen.append, (i, turn))
            await anyio.sleep(random.choice([0.0, 0.1, 0.5]))

    async with anyio.create_task_group() as tasks:
        for i in range(n):
            tasks.start_soon(member, i)
    return seen


def test_one_seed_is_one_run() -> None:
    runs = [simulate(crowd, seed=seed) for seed in (0, 1, 2, 0, 1, 2)]
    assert runs[:3] == runs[3:]
    assert len({run.digest for run in runs}) == 3
    assert all(sorted(run.result) == [(i, turn) for i in range(8) for turn in range(5)] for run in runs)


def test_one_seed_is_one_run_in_every_process() -> None:
    code = (
        "from tests.simulation.test_simulation import crowd; from kvpool.testing.simulation import simulate;"
        "print(*(simulate(crowd, seed=seed).digest for seed in range(3)))"
    )
    out = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for _ in range(2)
    }
    assert out == {" ".join(simulate(crowd, seed=seed).digest for seed in range(3)) + "\n"}


def test_time_is_virtual_and_starts_anew() -> None:
    async def sleep(seconds: float) -> float:
        start = anyio.current_time()
        with anyio.move_on_after(seconds):
            await anyio.sleep_forever()
        return anyio.current_time() - start

    for _ in range(2):
        run: Simulated[float] = simulate(sleep, 3000.0, seed=0)
        assert run.result == pytest.approx(3000.0)
        assert run.seconds == pytest.approx(3000.0)
        assert 0 < run.switches < 100


def test_events_are_part_of_the_digest() -> None:
    async def main(what: int) -> None:
        record("event", what)

    assert simulate(main, 1, seed=0).digest == simulate(main, 1, seed=0).digest
    assert simulate(main, 1, seed=0).digest != simulate(main, 2, seed=0).digest
    record("outside a simulation: nothing happens")


def test_the_random_module_is_seeded_and_given_back() -> None:
    async def draw() -> float:
        return random.random()

    random.seed(5)
    expected = random.random()
    random.seed(5)
    assert simulate(draw, seed=1).result == simulate(draw, seed=1).result != simulate(draw, seed=2).result
    assert random.random() == expected
    assert gc.isenabled()


def test_errors_come_out_as_they_are() -> None:
    async def fail() -> NoReturn:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        simulate(fail, seed=0)


# -- blocking calls ---------------------------------------------------------------------------------------------------


def test_blocking_calls_run_inline_and_take_time() -> None:
    async def main() -> tuple[float, int]:
        threads, order = Threads(1), list[int]()
        async with anyio.create_task_group() as tasks:
            for i in range(4):
                tasks.start_soon(threads.run, order.append, i)
        with pytest.raises(ZeroDivisionError):
            await threads.run(divmod, 1, 0)
        return anyio.current_time(), len(order)

    run = simulate(main, seed=0)
    assert run.result[1] == 4
    assert 0 < run.seconds < 5 * 0.002


def test_a_cancelled_blocking_call_still_ends_first() -> None:
    async def main() -> list[str]:
        threads, seen = Threads(1), list[str]()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(threads.run, seen.append, "called")
                await anyio.sleep(1e-9)
                scope.cancel()
        seen.append("cancelled")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await threads.run(seen.append, "never begun")
        return seen

    assert simulate(main, seed=3).result == ["called", "cancelled"]


# -- what hangs -------------------------------------------------------------------------------------------------------


async def wait_for_nothing() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.Event().wait)
        await anyio.Event().wait()


async def wait_behind_a_shield() -> None:
    with anyio.CancelScope(shield=True):
        await anyio.sleep_forever()


async def go_on_behind_a_shield() -> None:
    with anyio.CancelScope(shield=True):
        for _ in range(10**9):
            await anyio.sleep(1)


async def ignore_the_cancellation() -> str:
    try:
        await anyio.sleep_forever()
    except anyio.get_cancelled_exc_class():
        pass
    return "fine"


async def fail_on_being_cancelled() -> None:
    try:
        await anyio.sleep_forever()
    finally:
        raise OSError("while cleaning up")


# Tasks behind a shield can only be torn down with the loop, which does not go quietly.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "fn",
    [
        wait_for_nothing,
        wait_behind_a_shield,
        go_on_behind_a_shield,
        ignore_the_cancellation,
        fail_on_being_cancelled,
    ],
)
def test_a_deadlock_is_reported_with_its_place(fn: Any) -> None:
    with pytest.raises(Deadlock, match=rf"seed=7.*not done after 50 virtual seconds(.|\n)*in {fn.__name__}"):
        simulate(fn, seed=7, limit=50.0)
    gc.collect()  # here, where it is expected
    assert simulate(crowd, seed=0).switches > 0  # and the next run is as good as ever


@pytest.mark.parametrize("name", ["_ALLOW_DETERMINISTIC_SCHEDULING", "_r"])
def test_a_trio_that_cannot_be_seeded_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(importlib.import_module("trio._core._run"), name)
    with pytest.raises(RuntimeError, match=f"cannot seed the scheduling of trio .*{name}"):
        simulate(crowd, seed=0)


def test_without_trio_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trio", None)
    with pytest.raises(RuntimeError, match="pip install trio"):
        simulate(crowd, seed=0)
