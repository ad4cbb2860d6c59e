"""Blocking calls: bounded, and never left behind by whoever waits for them."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import anyio.lowlevel
import pytest

from kvpool.threads import Threads, _Call

#: Seconds after which something hangs.
HANG = 20.0


class Call:
    """A blocking call that ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.over = False

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(HANG)
        self.over = True
        return "done"

    async def has_begun(self) -> None:
        with anyio.fail_after(HANG):
            while not self.begun.is_set():  # noqa: ASYNC110 - another thread sets it
                await anyio.sleep(0.001)


@pytest.mark.anyio
async def test_a_call_runs_in_another_thread() -> None:
    threads = Threads(2)
    assert await threads.run(threading.get_ident) != threading.get_ident()
    assert await threads.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 7, 0)


@pytest.mark.anyio
@pytest.mark.parametrize("n", [1, 3])
async def test_no_more_than_n_at_a_time(n: int) -> None:
    threads, lock, running, most = Threads(n), threading.Lock(), 0, 0

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(4 * n):
            tasks.start_soon(threads.run, call)
    assert 1 <= most <= n
    assert running == 0


@pytest.mark.anyio
async def test_a_cancelled_caller_waits_for_the_call() -> None:
    threads, call = Threads(1), Call()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(threads.run, call)
        await call.has_begun()
        tasks.cancel_scope.cancel()
        threading.Timer(0.02, call.go_on.set).start()
    assert call.over


@pytest.mark.anyio
async def test_a_call_that_waits_for_its_turn_can_be_cancelled_and_never_begins() -> None:
    threads, first, second = Threads(1), Call(), Call()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(threads.run, first)
        await first.has_begun()
        with anyio.move_on_after(0.02) as scope:
            await threads.run(second)
        assert scope.cancelled_caught
        first.go_on.set()
    await threads.run(int)
    assert not second.begun.is_set()


@pytest.mark.anyio
async def test_a_cancelled_caller_stops_a_call_that_can_be_stopped() -> None:
    threads, call, told, scope = Threads(1), Call(), list[str](), anyio.CancelScope()

    def stop() -> None:
        told.append("over" if call.over else "running")
        call.go_on.set()

    async def cancel() -> None:
        await call.has_begun()
        scope.cancel()

    with anyio.fail_after(HANG):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            with scope:
                await threads.run(call, stop=stop)
    assert scope.cancelled_caught
    assert told == ["running"]
    assert call.over
    assert await threads.run(int, stop=stop) == 0
    assert told == ["running"], "not told without a cancellation"


def test_plain_asyncio_cancellation_waits_for_the_call_too() -> None:
    async def main() -> None:
        threads, call = Threads(1), Call()
        task = asyncio.ensure_future(threads.run(call))
        await call.has_begun()
        other = asyncio.ensure_future(threads.run(int))
        for _ in range(5):
            task.cancel()
            await asyncio.sleep(0.005)
            assert not task.done()
            assert not other.done()  # the slot is still taken
        call.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, HANG)
        assert call.over
        assert await asyncio.wait_for(other, HANG) == 0

    asyncio.run(main())


def test_plain_asyncio_cancellation_at_any_moment_leaves_no_call_behind() -> None:
    async def main() -> None:
        threads = Threads(2)
        running = 0

        def call() -> None:
            nonlocal running
            running += 1
            time.sleep(0.0005)
            running -= 1

        async def use(turns: int) -> None:
            task = asyncio.ensure_future(threads.run(call))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=HANG)
            assert task.done()
            assert running == 0

        for turns in range(40):
            await use(turns % 10)

    asyncio.run(main())


def test_a_call_that_is_called_off_never_begins() -> None:
    ran: list[int] = []
    call = _Call(ran.append, (1,))
    assert call.over()
    with pytest.raises(RuntimeError, match="called off"):
        call()
    assert call.over()
    assert ran == []


def test_threads_may_be_built_outside_a_loop() -> None:
    threads = Threads(1)  # no loop runs here

    async def main() -> int:
        return await threads.run(int)

    assert anyio.run(main) == 0
