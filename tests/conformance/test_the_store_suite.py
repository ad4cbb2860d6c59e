"""The store suite finds mistakes: each broken store here fails the test that is about its mistake."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpool.backends.memory import MemoryStore
from kvpool.memory import Buffers
from kvpool.store import PRESENT, Capabilities, Results, Status, Store, check_batch
from kvpool.testing.store_machine import machine_for
from kvpool.testing.stores import StoreConformance
from tests.conformance import test_stores

_names = itertools.count()


class Overwrites(MemoryStore):
    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        await super().delete(keys)
        return await super().put(keys, source, deadline=deadline)


class Compacts(MemoryStore):
    """Puts the values that it finds at the front."""

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        found = [k for k in keys if (await super(Compacts, self).exists([k]))[0] == PRESENT]
        check_batch(keys, into)
        results = Results.empty(len(keys))
        if found:
            front = await super().get_into(found, into.select(range(len(found))), deadline=deadline)
            results.status[: len(found)], results.nbytes[: len(found)] = front.status, front.nbytes
        return results


class FillsOneOfTwins(MemoryStore):
    """Of a key that is twice in a batch, only the last place is filled."""

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        results = await super().get_into(keys, into, deadline=deadline)
        for i, key in enumerate(keys):
            if key in keys[i + 1 :]:
                for view in into.views(i):
                    view[:] = bytes(len(view))
        return results


class IgnoresDeadlines(MemoryStore):
    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        return await super().get_into(keys, into)


class WritesAfterCancel(MemoryStore):
    """A cancelled get goes on in the background."""

    async def __aenter__(self) -> WritesAfterCancel:
        await super().__aenter__()
        self.tasks = anyio.create_task_group()
        await self.tasks.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.tasks.__aexit__(None, None, None)
        await super().__aexit__(*exc)

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        done = anyio.Event()
        results: list[Results] = []

        async def get() -> None:
            await anyio.sleep(0.001)
            results.append(await super(WritesAfterCancel, self).get_into(keys, into, deadline=deadline))
            done.set()

        self.tasks.start_soon(get)
        await done.wait()
        return results[0]


class LeavesItsThread(MemoryStore):
    """Copies in a thread that goes on when the task is cancelled as asyncio itself does."""

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        def copy() -> None:
            for i in range(len(keys)):
                time.sleep(0.001)
                for view in into.views(i):
                    view[:] = b"x" * len(view)

        await anyio.to_thread.run_sync(copy)
        return await super().get_into(keys, into, deadline=deadline)


class PutsInParts(MemoryStore):
    """Stores a key's first half for a moment."""

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        for i, key in enumerate(keys):
            views = source.views(i)
            if views and (await super().exists([key]))[0] != PRESENT:
                mixed = bytearray(b"".join(views))
                mixed[len(mixed) // 2 :] = bytes(len(mixed) - len(mixed) // 2)
                await super().put([key], Buffers.of(mixed))
                await anyio.sleep(0.002)  # a moment in which a reader has its turn
                await super().delete([key])
        return await super().put(keys, source, deadline=deadline)


class HalfOnCancel(MemoryStore):
    """A cancelled put leaves what it had so far."""

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        try:
            return await super().put(keys, source, deadline=deadline)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await super().put(keys[:1], Buffers.of(bytearray(10)))
            raise


class OpensTwice(MemoryStore):
    async def __aenter__(self) -> OpensTwice:
        if self._life.closed:
            self._life._opened = False
        await super().__aenter__()
        return self


class TakesWrongSizes(MemoryStore):
    """Fills the memory with the front of a longer value."""

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        results = await super().get_into(keys, into, deadline=deadline)
        for i in range(len(keys)):
            if results.status[i] == Status.CORRUPT:
                results.set(i, Status.OK, int(into.nbytes[i]))
        return results


class LeaksFiles(MemoryStore):
    async def __aenter__(self) -> LeaksFiles:
        await super().__aenter__()
        _leaked.append(open("/dev/null"))  # noqa: SIM115, ASYNC230
        return self


class HangsOnClose(MemoryStore):
    """Calls in flight wait for ever when the store is closed."""

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        try:
            return await super().put(keys, source, deadline=deadline)
        except Exception:
            if keys[:1] and keys[0].startswith("busy/"):
                await anyio.sleep_forever()
            raise


class ClaimsTrioOnly(MemoryStore):
    capabilities = Capabilities(shared=False, scan=True, loops=frozenset({"trio"}))


_leaked: list[Any] = []
#: Tests that are about one loop only.
LOOPS = {"test_task_cancelled_at_every_await": "asyncio"}

MISTAKES: list[tuple[type[MemoryStore], str]] = [
    (Overwrites, "test_an_existing_value_is_never_changed"),
    (Compacts, "test_holes_keep_their_place"),
    (FillsOneOfTwins, "test_duplicates_in_a_batch"),
    (IgnoresDeadlines, "test_a_passed_deadline"),
    (WritesAfterCancel, "test_cancelled_at_every_await"),
    (LeavesItsThread, "test_task_cancelled_at_every_await"),
    (HalfOnCancel, "test_cancelled_at_every_await"),
    (PutsInParts, "test_a_reader_sees_a_whole_value_or_none"),
    (OpensTwice, "test_closed_stores_say_so"),
    (TakesWrongSizes, "test_another_length_is_corrupt_and_stays"),
    (LeaksFiles, "test_open_and_close_leave_nothing_behind"),
    (HangsOnClose, "test_close_while_busy"),
    (ClaimsTrioOnly, "test_capabilities_fit"),
]


CASES = [
    (broken, test, loop) for broken, test in MISTAKES for loop in ("asyncio", "trio") if loop in LOOPS.get(test, loop)
]


@pytest.mark.parametrize(("broken", "test", "loop"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_mistake_is_found(broken: type[MemoryStore], test: str, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Suite(test_stores.TestMemoryStore):
        open_close_cycles = 20

        def store(self, place: str) -> Store:
            return broken(name=place)

        @contextmanager
        def place(self) -> Iterator[str]:
            yield f"mistake-{next(_names)}"

    monkeypatch.setattr("kvpool.testing._store_life.HANG_S", 0.3)
    suite = Suite()
    with suite.place() as place, pytest.raises((AssertionError, TimeoutError, ExceptionGroup, pytest.fail.Exception)):
        anyio.run(getattr(suite, test), place, *([loop] if test in LOOPS else []), backend=loop)
    for file in _leaked:
        file.close()
    _leaked.clear()


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize("broken", [Overwrites, Compacts, TakesWrongSizes])
def test_the_model_finds_it_too(broken: type[MemoryStore], loop: str) -> None:
    class Suite(test_stores.TestMemoryStore):
        def store(self, place: str) -> Store:
            return broken(name=place)

    once = settings(max_examples=100, phases=(Phase.generate,), database=None, deadline=None)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(machine_for(Suite(), loop), settings=once)


def test_each_hook_that_is_missing_says_so() -> None:
    suite = StoreConformance[str]()
    calls: list[Callable[[], object]] = [
        suite.place,
        lambda: suite.store(""),
        lambda: suite.raw_read("", ""),
        lambda: suite.raw_write("", "", b""),
        lambda: suite.raw_damage("", "", "flip"),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError):
            call()
