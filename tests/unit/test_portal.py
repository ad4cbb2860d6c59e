"""The portal: every job is reported exactly once, whatever happens, and the caller never waits for the loop."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import anyio
import anyio.lowlevel
import pytest

from kvpool import _wake
from kvpool.errors import JobCancelled, PortalClosed
from kvpool.portal import Done, Portal

#: Seconds after which something hangs; nothing here takes a fraction of it.
HANG = 20.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def portal(anyio_backend: str) -> Iterator[Portal[None]]:
    with Portal(backend=anyio_backend) as portal:
        yield portal


async def double(_: object, x: int) -> int:
    await anyio.lowlevel.checkpoint()
    return 2 * x


async def fail(_: object, error: BaseException) -> NoReturn:
    raise error


async def short(_: object) -> None:
    for _turn in range(3):
        await anyio.lowlevel.checkpoint()


async def forever(_: object) -> None:
    await anyio.sleep_forever()


class Gate:
    """A job that tells when it runs, and holds off cancellation until it is opened."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.open = threading.Event()

    async def __call__(self, _: object) -> str:
        self.running.set()
        with anyio.CancelScope(shield=True):
            while not self.open.is_set():  # noqa: ASYNC110 - another thread sets it
                await anyio.sleep(0.001)
        return "through"


def collect(portal: Portal[Any], n: int) -> list[Done]:
    """Poll until ``n`` jobs are reported."""
    reports: list[Done] = []
    end = time.monotonic() + HANG
    while len(reports) < n:
        assert time.monotonic() < end, f"{len(reports)} of {n} reports came"
        portal.wait(0.1)
        reports += portal.poll()
    assert len(reports) == n
    return reports


def run(portal: Portal[Any], fn: Any, *args: Any) -> Done:
    token = portal.submit(fn, *args)
    (done,) = collect(portal, 1)
    assert done.token == token
    return done


def nothing_more(portal: Portal[Any]) -> bool:
    return portal.outstanding == 0 and not portal.wait(0.02)


# -- jobs -------------------------------------------------------------------------------------------------------------


def test_a_job_is_reported_with_its_result(portal: Portal[None]) -> None:
    assert portal.poll() == []
    assert run(portal, double, 21)[1:] == (42, None)
    assert nothing_more(portal)


def test_a_job_that_fails_is_reported_and_disturbs_no_other(portal: Portal[None]) -> None:
    gate = Gate()
    portal.submit(gate, token="other")
    for error in (ValueError("no"), SystemExit(3), KeyboardInterrupt(), ExceptionGroup("two", [ValueError()])):
        assert run(portal, fail, error)[1:] == (None, error)
    gate.open.set()
    assert collect(portal, 1) == [("other", "through", None)]
    assert portal.error is None


def test_a_job_that_is_not_even_a_coroutine_is_reported(portal: Portal[None]) -> None:
    bad: Any = lambda _: 3  # noqa: E731
    assert isinstance(run(portal, bad).error, TypeError)
    assert isinstance(run(portal, double).error, TypeError)  # an argument short


def test_tokens_name_jobs(portal: Portal[None]) -> None:
    gate = Gate()
    assert portal.submit(gate, token=("load", 7)) == ("load", 7)
    with pytest.raises(ValueError, match="still running"):
        portal.submit(double, 1, token=("load", 7))
    gate.open.set()
    assert collect(portal, 1) == [(("load", 7), "through", None)]
    portal.submit(double, 1, token=("load", 7))
    assert collect(portal, 1) == [(("load", 7), 2, None)]


def test_given_numbers_avoid_the_callers_own(portal: Portal[None]) -> None:
    gate = Gate()
    own = [portal.submit(gate, token=n) for n in range(1, 4)]
    given = [portal.submit(gate) for _ in range(3)]
    assert len({*own, *given}) == 6
    gate.open.set()
    assert {d.token for d in collect(portal, 6)} == {*own, *given}


def test_jobs_run_at_the_same_time(portal: Portal[None]) -> None:
    gates = [Gate() for _ in range(5)]
    for gate in gates:
        portal.submit(gate)
    for gate in gates:
        assert gate.running.wait(HANG)
    gates[3].open.set()
    assert collect(portal, 1)[0].result == "through"
    for gate in gates:
        gate.open.set()
    collect(portal, 4)


def test_many_threads_may_submit(portal: Portal[None]) -> None:
    def submit(k: int) -> None:
        for i in range(200):
            portal.submit(double, i, token=(k, i))

    threads = [threading.Thread(target=submit, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    reports = collect(portal, 800)
    assert {d.token: d.result for d in reports} == {(k, i): 2 * i for k in range(4) for i in range(200)}
    for thread in threads:
        thread.join()
    assert nothing_more(portal)


def test_no_wake_is_lost_when_the_loop_falls_asleep(portal: Portal[None]) -> None:
    for i in range(300):
        portal.submit(double, i)
        if i % 3:
            time.sleep(0.0001 * (i % 5))
        collect(portal, 1)


def test_many_jobs_wake_a_busy_loop_once_at_most(portal: Portal[None], monkeypatch: pytest.MonkeyPatch) -> None:
    running, free = threading.Event(), threading.Event()

    async def block(_: None) -> None:
        running.set()
        free.wait(HANG)

    portal.submit(block)
    assert running.wait(HANG)
    wakes: list[int] = []
    write = _wake._write

    def count(fd: int) -> None:
        wakes.append(fd)
        write(fd)

    monkeypatch.setattr(_wake, "_write", count)
    for i in range(100):
        portal.submit(double, i)
    assert len(wakes) <= 1
    free.set()
    collect(portal, 101)


def test_the_plain_system_calls_do_as_well(anyio_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wake, "_write", _wake._os_write)
    monkeypatch.setattr(_wake, "_drain", _wake._os_drain)
    with Portal(backend=anyio_backend) as portal:
        for i in range(20):
            assert run(portal, double, i).result == 2 * i


def test_wait_tells_whether_there_is_something(portal: Portal[None]) -> None:
    assert not portal.wait(0)
    assert not portal.wait(0.01)
    gate = Gate()
    portal.submit(gate)
    threading.Timer(0.02, gate.open.set).start()
    assert portal.wait(HANG)
    assert portal.wait(HANG)  # not polled yet
    collect(portal, 1)


@pytest.mark.anyio
async def test_a_ring_at_any_moment_is_heard() -> None:
    wake = _wake.Wake()
    rung = False

    def ring() -> bool:
        nonlocal rung
        rung = True
        wake.ring()
        return False

    with anyio.fail_after(HANG):
        await wake.sleep(unless=lambda: True)  # news from just before
        await wake.sleep(unless=ring)  # and from just after the look
        threading.Timer(0.01, ring).start()
        rung = False
        await wake.sleep(unless=lambda: rung)
    assert rung
    wake.close()
    wake.ring()


# -- cancelling -------------------------------------------------------------------------------------------------------


def test_a_cancelled_job_is_reported_once(portal: Portal[None]) -> None:
    for started in (False, True):
        token = portal.submit(forever)
        if started:
            run(portal, double, 1)  # the loop has come past the job
        for _ in range(2):
            portal.cancel(token)
        (done,) = collect(portal, 1)
        assert done.token == token
        assert isinstance(done.error, JobCancelled)
    portal.cancel("never heard of")
    assert nothing_more(portal)


def test_a_cancelled_job_that_ends_all_the_same_keeps_its_result(portal: Portal[None]) -> None:
    gate = Gate()
    token = portal.submit(gate)
    assert gate.running.wait(HANG)
    portal.cancel(token)
    assert not portal.wait(0.02)  # it may still touch memory, so it is not reported
    gate.open.set()
    assert collect(portal, 1) == [(token, "through", None)]


def test_a_job_that_fails_on_being_cancelled_is_reported_with_that(portal: Portal[None]) -> None:
    async def job(_: None) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("while cleaning up")

    token = portal.submit(job)
    run(portal, double, 1)
    portal.cancel(token)
    assert isinstance(collect(portal, 1)[0].error, OSError)


def test_a_leaked_cancellation_is_the_jobs_own_failure() -> None:
    async def leak(_: None) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async def native(_: None) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anyio.sleep(1)

    with Portal(backend="asyncio") as portal:
        for job in (leak, native):
            assert isinstance(run(portal, job).error, JobCancelled)
        assert run(portal, double, 1).result == 2


# -- closing ----------------------------------------------------------------------------------------------------------


def test_close_reports_what_is_outstanding(anyio_backend: str) -> None:
    portal = Portal(backend=anyio_backend)
    tokens = [portal.submit(forever) for _ in range(100)]
    assert portal.close(HANG)
    reports = portal.poll()
    assert Counter(d.token for d in reports) == Counter(tokens)
    assert all(isinstance(d.error, PortalClosed) for d in reports)
    assert portal.error is None
    assert nothing_more(portal)


def test_close_is_idempotent_and_later_jobs_are_reported(anyio_backend: str) -> None:
    for use in (True, False):
        portal = Portal(backend=anyio_backend)
        if use:
            run(portal, double, 1)
        for _ in range(2):
            assert portal.close(HANG)
        assert isinstance(run(portal, double, 1).error, PortalClosed)
        portal.start()
        portal.cancel("any")
        assert nothing_more(portal)


def test_close_is_bounded_and_a_stuck_job_is_reported_when_it_has_let_go(anyio_backend: str) -> None:
    portal = Portal(backend=anyio_backend)
    gate, token = Gate(), "stuck"
    portal.submit(gate, token=token)
    portal.submit(forever, token="other")
    assert gate.running.wait(HANG)
    assert not portal.close(0.05)
    assert [d.token for d in collect(portal, 1)] == ["other"]
    assert portal.outstanding == 1
    assert isinstance(run_dead(portal).error, PortalClosed)
    assert not portal.close(0)
    gate.open.set()
    assert portal.close(HANG)
    assert [d.token for d in portal.poll()] == [token]
    assert nothing_more(portal)


def run_dead(portal: Portal[Any]) -> Done:
    """Submit to a portal that is closing; the report is there at once."""
    portal.submit(double, 1, token="late")
    (done,) = portal.poll()
    assert done.token == "late"
    return done


def test_a_job_may_close_the_portal(anyio_backend: str) -> None:
    portal = Portal(backend=anyio_backend)

    async def close(_: None) -> bool:
        return portal.close(HANG)

    assert run(portal, close).result is False
    assert portal.close(HANG)


def test_descriptors_and_threads_are_given_back(anyio_backend: str) -> None:
    def cycle() -> tuple[int, int]:
        with Portal(backend=anyio_backend) as portal:
            run(portal, double, 1)
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    cycle()
    counts = {cycle() for _ in range(20)}
    assert len(counts) == 1


def test_random_use_from_many_threads_reports_each_job_once(anyio_backend: str) -> None:
    for seed in range(8):
        portal = Portal(backend=anyio_backend)
        submitted: list[list[Any]] = [[] for _ in range(4)]

        def use(
            k: int, portal: Portal[None] = portal, submitted: list[list[Any]] = submitted, seed: int = seed
        ) -> None:
            rng = random.Random(f"{seed}/{k}")
            for i in range(60):
                token = (k, i)
                submitted[k].append(token)
                fn: Any = rng.choice([forever, short])
                portal.submit(fn, token=token)
                if rng.random() < 0.6:
                    portal.cancel(submitted[k][rng.randrange(i + 1)])

        threads = [threading.Thread(target=use, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(random.Random(seed).uniform(0, 0.02))
        reports = portal.poll()
        assert portal.close(HANG)
        for thread in threads:
            thread.join()
        reports += portal.poll()
        assert Counter(d.token for d in reports) == Counter(t for s in submitted for t in s)


# -- the lifespan -----------------------------------------------------------------------------------------------------


class Lifespan:
    """Notes what happens to it, and can misbehave at each stage."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.enter: Callable[[], Any] = anyio.lowlevel.checkpoint
        self.leave: Callable[[], Any] = anyio.lowlevel.checkpoint
        self.crash = threading.Event()
        self.entering = threading.Event()
        self.entered = threading.Event()
        self.leaving = threading.Event()

    def __call__(self) -> AbstractAsyncContextManager[Lifespan]:
        return self.run()

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Lifespan]:
        self.events.append("enter")
        self.entering.set()
        await self.enter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.background)
            try:
                yield self
            finally:
                self.leaving.set()
                self.events.append("leave")
                await self.leave()
                self.events.append("left")
                tasks.cancel_scope.cancel()

    async def background(self) -> None:
        self.entered.set()
        while not self.crash.is_set():  # noqa: ASYNC110 - another thread sets it
            await anyio.sleep(0.001)
        raise ConnectionError("the store went away")


async def hang() -> None:
    await anyio.sleep_forever()


async def note(value: Lifespan, what: str) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        value.events.append(what)


def test_jobs_run_within_the_lifespan(anyio_backend: str) -> None:
    span = Lifespan()
    portal = Portal(span, backend=anyio_backend)
    assert span.events == []

    async def job(value: Lifespan) -> bool:
        return value is span

    assert run(portal, job).result is True
    portal.submit(note, "job ended")
    run(portal, job)
    assert portal.close(HANG)
    assert span.events == ["enter", "job ended", "leave", "left"]
    assert portal.error is None


def test_start_enters_the_lifespan_before_any_job(anyio_backend: str) -> None:
    span = Lifespan()
    with Portal(span, backend=anyio_backend) as portal:
        portal.start()
        assert span.entered.wait(HANG)
    assert span.events == ["enter", "leave", "left"]


async def refuse() -> None:
    raise ConnectionError("no store there")


def test_a_lifespan_that_cannot_start_fails_every_job_once(anyio_backend: str) -> None:
    span = Lifespan()
    span.enter = refuse
    with Portal(span, backend=anyio_backend) as portal:
        tokens = [portal.submit(double, i) for i in range(100)]
        reports = collect(portal, 100)
        assert Counter(d.token for d in reports) == Counter(tokens)
        assert isinstance(portal.error, ConnectionError)
        assert all(d.error is portal.error for d in reports)
        assert run(portal, double, 1).error is portal.error
        assert nothing_more(portal)


def test_a_lifespan_that_fails_later_fails_running_and_later_jobs_once(anyio_backend: str) -> None:
    span = Lifespan()
    gate = Gate()
    with Portal(span, backend=anyio_backend) as portal:
        running = [portal.submit(forever), portal.submit(gate), portal.submit(note, "job ended")]
        assert gate.running.wait(HANG)
        span.crash.set()
        while not span.leaving.is_set():
            gate.open.set()
            time.sleep(0.001)
        reports = collect(portal, 3)
        assert {d.token for d in reports} == set(running)
        late = [portal.submit(double, i) for i in range(3)]
        assert {d.token for d in collect(portal, 3)} == set(late)
        assert isinstance(portal.error, ExceptionGroup)
        assert portal.error.subgroup(ConnectionError) is not None
        assert all(d.error is portal.error or d.result == "through" for d in reports)
        assert nothing_more(portal)


def test_jobs_that_come_while_a_failed_lifespan_is_left_are_reported(anyio_backend: str) -> None:
    span = Lifespan()
    held = Gate()

    async def leave() -> None:
        await held(None)

    span.leave = leave
    with Portal(span, backend=anyio_backend) as portal:
        portal.start()
        assert span.entered.wait(HANG)
        span.crash.set()
        assert held.running.wait(HANG)
        tokens = {portal.submit(double, i) for i in range(3)}
        cancelled = portal.submit(double, 9)
        portal.cancel(cancelled)
        held.open.set()
        reports = {d.token: d.error for d in collect(portal, 4)}
        assert set(reports) == {*tokens, cancelled}
        assert all(reports[t] is portal.error for t in tokens)


def test_a_lifespan_that_ends_by_itself_is_a_failure(anyio_backend: str) -> None:
    @asynccontextmanager
    async def quits() -> AsyncIterator[None]:
        with anyio.CancelScope() as scope:
            scope.cancel()
            yield

    with Portal(quits, backend=anyio_backend) as portal:
        assert isinstance(run(portal, forever).error, PortalClosed)
        assert "ended by itself" in str(portal.error)


def test_close_interrupts_a_lifespan_that_never_gets_started(anyio_backend: str) -> None:
    span = Lifespan()
    span.enter = hang
    portal = Portal(span, backend=anyio_backend)
    first, second = portal.submit(double, 1), portal.submit(double, 2)
    assert span.entering.wait(HANG)
    portal.cancel(first)
    (done,) = collect(portal, 1)
    assert done.token == first
    assert isinstance(done.error, JobCancelled)
    assert portal.close(HANG)
    (done,) = portal.poll()
    assert done.token == second
    assert isinstance(done.error, PortalClosed)
    assert span.events == ["enter"]


def test_a_job_cancelled_before_the_lifespan_stands_never_runs(anyio_backend: str) -> None:
    span, opening, ran = Lifespan(), Gate(), list[str]()

    async def enter() -> None:
        await opening(None)

    async def job(_: Lifespan, name: str) -> None:
        await anyio.lowlevel.checkpoint()
        ran.append(name)

    span.enter = enter
    with Portal(span, backend=anyio_backend) as portal:
        tokens = [portal.submit(job, name) for name in ("first", "second", "third")]
        assert opening.running.wait(HANG)
        for token in (portal.submit(job, "behind them"), tokens[1]):  # then the loop has seen all
            portal.cancel(token)
            assert [d.token for d in collect(portal, 1)] == [token]
        opening.open.set()
        assert {d.token for d in collect(portal, 2)} == {tokens[0], tokens[2]}
        assert nothing_more(portal)
    assert sorted(ran) == ["first", "third"]


def test_close_cuts_a_lifespan_short_that_cannot_be_left(anyio_backend: str) -> None:
    span = Lifespan()
    span.leave = hang
    portal = Portal(span, backend=anyio_backend)
    token = portal.submit(forever)
    assert span.entered.wait(HANG)
    assert not portal.close(0.1)
    assert portal.close(HANG)
    assert span.events == ["enter", "leave"]
    assert [d.token for d in portal.poll()] == [token]


def test_calling_close_again_does_not_cut_the_exit_short(anyio_backend: str) -> None:
    span = Lifespan()
    held = Gate()

    async def leave() -> None:
        held.running.set()
        while not held.open.is_set():  # noqa: ASYNC110 - another thread sets it
            await anyio.sleep(0.001)

    span.leave = leave
    portal = Portal(span, backend=anyio_backend)
    portal.start()
    assert span.entered.wait(HANG)
    closers = [threading.Thread(target=portal.close, args=(HANG,)) for _ in range(3)]
    for closer in closers:
        closer.start()
    assert held.running.wait(HANG)
    portal.cancel(portal.submit(double, 1))
    time.sleep(0.02)
    held.open.set()
    for closer in closers:
        closer.join(HANG)
    assert span.events == ["enter", "leave", "left"]


def test_a_loop_that_does_not_exist_fails_every_job() -> None:
    with Portal(backend="no such loop") as portal:
        assert isinstance(run(portal, double, 1).error, LookupError)
        assert run(portal, double, 1).error is portal.error


def test_a_thread_that_cannot_start_fails_every_job(monkeypatch: pytest.MonkeyPatch, anyio_backend: str) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    portal = Portal(backend=anyio_backend)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        portal.submit(double, 1, token="t")
    assert [(d.token, d.error) for d in portal.poll()] == [("t", portal.error)]
    assert isinstance(portal.error, RuntimeError)
    assert portal.close(HANG)


# -- processes --------------------------------------------------------------------------------------------------------


def script(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter; raises if it hangs."""
    head = """
        import os, sys, time, threading
        import anyio, anyio.to_thread
        from contextlib import asynccontextmanager
        from kvpool.errors import PortalClosed
        from kvpool.portal import Portal

        async def double(_, x): return 2 * x
        async def forever(_): await anyio.sleep_forever()
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )


def test_a_forked_child_is_told_and_may_have_its_own(anyio_backend: str) -> None:
    code = """
        portal = Portal(backend=sys.argv[1])
        portal.submit(forever, token="parent's")
        portal.submit(double, 1)
        assert portal.wait(20)
        if os.fork() == 0:
            refused = 0
            for use in ("start()", "poll()", "submit(double, 1)", "cancel(1)", "wait(0)"):
                try:
                    eval("portal." + use)
                except PortalClosed as error:
                    refused += "forked child" in str(error)
            assert portal.close(0)
            with Portal(backend=sys.argv[1]) as own:
                own.submit(double, 4)
                assert own.wait(20)
                (done,) = own.poll()
            print("child", refused, done.result, flush=True)
            os._exit(0)
        os.wait()
        print("parent", [d.result for d in portal.poll()], portal.close(20), [d.token for d in portal.poll()])
    """
    done = script(code, anyio_backend)
    assert done.stdout.splitlines() == ["child 5 8", 'parent [2] True ["parent\'s"]'], done.stderr


@pytest.mark.parametrize("state", ["idle", "running", "stuck in a thread", "stuck on the loop", "failed"])
def test_a_forgotten_portal_does_not_hold_the_exit_up(anyio_backend: str, state: str) -> None:
    code = """
        state = sys.argv[2]
        on = threading.Event()

        @asynccontextmanager
        async def span():
            if state == "failed":
                raise OSError
            yield
            await anyio.sleep(0.001)
            print("left", flush=True)

        async def thread(_): await anyio.to_thread.run_sync(lambda: (on.set(), time.sleep(3600)))
        async def loop(_): on.set(); time.sleep(3600)

        portal = Portal(span, backend=sys.argv[1])
        portal.submit(double, 1)
        assert portal.wait(20)
        if state == "running":
            portal.submit(forever)
        if state.startswith("stuck"):
            portal.submit(thread if state.endswith("thread") else loop)
            assert on.wait(20)
        print("end", flush=True)
    """
    done = script(code, anyio_backend, state)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == (["end", "left"] if state in ("idle", "running") else ["end"]), done.stderr
    assert done.stderr == ""
