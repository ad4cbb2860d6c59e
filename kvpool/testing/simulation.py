"""Runs async code in virtual time, one seed one run: hours pass in milliseconds, and a failure can be had again.

The loop is trio with a clock that jumps to the next deadline as soon as nothing can run. The order in which tasks run,
the ``random`` module and the time that blocking calls take are drawn from the seed. Real sockets and threads cannot be
simulated: calls through :class:`kvpool.threads.Threads` run inline within a virtual delay, the rest is for the test to
replace.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel

from kvpool.threads import Threads, blocking_calls

if TYPE_CHECKING:
    from trio.lowlevel import Task
    from trio.testing import MockClock

__all__ = ["Deadlock", "Simulated", "record", "simulate"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Virtual seconds that are left to clean up in, once a deadlock was found and everything has been cancelled.
_GRACE_S = 60.0
#: The longest virtual delay before, and after, the moment at which a blocking call does its work.
_CALL_DELAY_S = 0.001


class Deadlock(AssertionError):
    """The simulated code did not end; the message tells where its tasks waited."""


@dataclass(frozen=True, slots=True)
class Simulated(Generic[T]):
    """A run that ended: what was returned, virtual seconds and task switches it took, and a digest of what happened.

    ``digest`` covers each task switch with its time and each event given to :func:`record`. One seed gives one digest,
    in every process, as long as the code under test does not depend on addresses or on PYTHONHASHSEED (the order of a
    set of text).
    """

    result: T
    seconds: float
    switches: int
    digest: str


def simulate(fn: Callable[[*Ts], Awaitable[T]], *args: *Ts, seed: int, limit: float = 3600.0) -> Simulated[T]:
    """Run ``await fn(*args)`` in virtual time, with every choice drawn from ``seed``.

    Raises what ``fn`` raises, :class:`Deadlock` if it has not ended after ``limit`` virtual seconds, and RuntimeError
    if trio is missing or does not let its scheduling be seeded. Must not be called on a running event loop.
    """
    with _seeded(seed), _without_gc():
        return _Simulation[T](seed, limit).run(lambda: fn(*args))


def record(*what: object) -> None:
    """Make an event part of the running simulation's digest, by its ``repr``. Does nothing outside a simulation."""
    simulation = _running.get()
    if simulation is not None:
        simulation.record(*what)


class _Simulation(Generic[T]):
    """One run; also the trio instrument that observes it."""

    def __init__(self, seed: int, limit: float) -> None:
        from trio.testing import MockClock

        self._seed = seed
        self._limit = limit
        self._digest = hashlib.blake2b(digest_size=16)
        self._numbers: dict[Task, int] = {}  # living tasks, in the order they were born
        self._born = 0
        self._switches = 0
        self._stuck = ""
        self._given_up = False
        self._clock = MockClock(autojump_threshold=0)
        self._guard(self._clock)

    def run(self, fn: Callable[[], Awaitable[T]]) -> Simulated[T]:
        import trio

        options: dict[str, Any] = {"clock": self._clock, "instruments": [self]}
        try:
            result = anyio.run(self._main, fn, backend="trio", backend_options=options)
        except BaseException as exc:
            cause = exc.__cause__ if isinstance(exc, trio.TrioInternalError) else exc
            if self._stuck or isinstance(cause, Deadlock):
                raise Deadlock(f"simulate(seed={self._seed}): {self._stuck or cause}") from exc
            raise
        return Simulated(result, self._clock.current_time(), self._switches, self._digest.hexdigest())

    async def _main(self, fn: Callable[[], Awaitable[T]]) -> T:
        import trio

        _running.set(self)
        blocking_calls.set(_Inline(self._seed))
        with anyio.CancelScope() as root:
            trio.lowlevel.spawn_system_task(self._watch, root, trio.lowlevel.current_task())
            result = await fn()
            if not self._stuck:
                return result
        raise Deadlock(self._stuck or "the simulation was cancelled as a whole")

    async def _watch(self, root: anyio.CancelScope, main: Task) -> None:
        await anyio.sleep(self._limit)
        waits = "".join(
            f"\n  {task.name}: {_where(task)}" for task in sorted(_tree(main), key=self._numbers.__getitem__)
        )
        self._stuck = f"not done after {self._limit:g} virtual seconds; its tasks wait at{waits}"
        root.cancel()
        await anyio.sleep(_GRACE_S)
        self._stuck += "\nand cancelling them has not helped: is there a shield without a deadline?"
        self._given_up = True

    def _guard(self, clock: MockClock) -> None:
        """End the loop if tasks are left that cancelling did not reach; it would wait for them for ever."""
        ask = clock.deadline_to_sleep_time

        def deadline_to_sleep_time(deadline: float) -> float:  # asked by the loop when no task can run
            if self._given_up:
                raise Deadlock(self._stuck)
            return ask(deadline)

        clock.deadline_to_sleep_time = deadline_to_sleep_time  # type: ignore[method-assign]

    # -- what the digest is made of; the names of the first three are trio's

    def task_spawned(self, task: Task) -> None:
        self._born += 1
        self._numbers[task] = self._born

    def task_exited(self, task: Task) -> None:
        del self._numbers[task]

    def before_task_step(self, task: Task) -> None:
        self._switches += 1
        self._add("step", self._numbers[task])

    def record(self, *what: object) -> None:
        self._add("event", *what)

    def _add(self, *what: object) -> None:
        self._digest.update(repr((self._clock.current_time(), *what)).encode() + b"\n")


_running: ContextVar[_Simulation[Any] | None] = ContextVar("running simulation", default=None)


class _Inline:
    """Makes blocking calls on the loop: a call takes effect at some moment within a time that passes only virtually."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def __call__(
        self, threads: Threads, fn: Callable[..., Any], args: tuple[Any, ...], stop: Callable[[], None] | None
    ) -> Any:
        await anyio.lowlevel.checkpoint_if_cancelled()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self._random.uniform(0, _CALL_DELAY_S))
            try:
                return fn(*args)
            finally:
                await anyio.sleep(self._random.uniform(0, _CALL_DELAY_S))


def _tree(task: Task) -> Iterator[Task]:
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _tree(child)


def _where(task: Task) -> str:
    """Where a task waits: the innermost line that is neither trio's nor anyio's."""
    places = [
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in task.iter_await_frames()
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("trio", "anyio")
    ]
    return places[-1] if places else "the end of a task group"


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed trio's choice of the next task, and ``random``; both are as before afterwards.

    trio has this switch for Hypothesis only, so it is private; this is the one place that uses it.
    """
    try:
        import trio
    except ImportError as exc:
        raise RuntimeError("simulate() needs trio, which is not installed: pip install trio") from exc
    run: Any = importlib.import_module("trio._core._run")
    switch = "_ALLOW_DETERMINISTIC_SCHEDULING"
    scheduler = getattr(run, "_r", None)
    if not hasattr(run, switch) or not isinstance(scheduler, random.Random):
        raise RuntimeError(
            f"simulate() cannot seed the scheduling of trio {trio.__version__}: {switch} or _r is gone from"
            " trio._core._run; use the trio version kvpool is tested with (0.35)"
        )
    before = getattr(run, switch), scheduler.getstate(), random.getstate()
    setattr(run, switch, True)
    scheduler.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        setattr(run, switch, before[0])
        scheduler.setstate(before[1])
        random.setstate(before[2])


@contextmanager
def _without_gc() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: what it finalizes, and when, differs from run to run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
