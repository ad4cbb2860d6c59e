"""A Hypothesis state machine: random calls to a store, compared with a dict after every step."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.from_thread import start_blocking_portal
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.store import ABSENT, PRESENT, Status, Store, SupportsClear, SupportsScan
from kvpool.testing._store_suite import StoreSuite, get, put

__all__ = ["machine_for"]

T = TypeVar("T")

KEYS = ["a", "a/b", "a/b/c", "ns/0.0/" + "0f" * 32, "ns/0.1/" + "0f" * 32, "ns/1.0/" + "0f" * 32, "odd:*%41", "Z" * 300]
SIZES = [0, 1, 100, 4097]

_keys = st.lists(st.sampled_from(KEYS), max_size=6)
_value = st.builds(lambda size, fill: bytes([fill]) * size, st.sampled_from(SIZES), st.integers(0, 3))
_items = st.lists(st.tuples(st.sampled_from(KEYS), _value), max_size=6)


def machine_for(suite: StoreSuite[Any], loop: str) -> type[RuleBasedStateMachine]:
    """The machine that drives the suite's store on one event loop."""

    class StoreMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.model: dict[str, bytes] = {}
            self.stack = ExitStack()
            self.portal = self.stack.enter_context(start_blocking_portal(loop))
            self.place = self.stack.enter_context(suite.place())
            self.open()

        def open(self) -> None:
            self.store: Store = suite.store(self.place)
            self.opened: AbstractContextManager[Store] = self.portal.wrap_async_context_manager(self.store)
            self.opened.__enter__()

        def call(self, work: Coroutine[Any, Any, T]) -> T:
            async def run() -> T:
                return await work

            return self.portal.call(run)

        @rule(items=_items)
        def put(self, items: list[tuple[str, bytes]]) -> None:
            results = self.call(put(self.store, items))
            assert results.ok.all()
            for key, value in items:
                self.model.setdefault(key, value)

        @rule(items=_items, turns=st.integers(0, 6))
        def put_cancelled(self, items: list[tuple[str, bytes]], turns: int) -> None:
            async def run() -> None:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(put, self.store, items)
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()

            self.call(run())
            for key in {key for key, _ in items} - self.model.keys():
                stored = suite.raw_read(self.place, key)
                assert stored is None or (key, stored) in items
                if stored is not None:
                    self.model[key] = stored

        @rule(keys=_keys, resize=st.sampled_from([0, 0, 0, 1]))
        def get(self, keys: list[str], resize: int) -> None:
            sizes = [len(self.model.get(key, b"12")) + resize for key in keys]
            results, memory = self.call(get(self.store, keys, sizes))
            for key, status, found in zip(keys, results.status.tolist(), memory, strict=True):
                if key not in self.model:
                    assert status == Status.ABSENT
                elif resize:
                    assert status == Status.CORRUPT
                else:
                    assert (status, found) == (Status.OK, self.model[key])

        @rule(keys=_keys)
        def exists(self, keys: list[str]) -> None:
            found = self.call(self.store.exists(keys))
            assert found.tolist() == [PRESENT if key in self.model else ABSENT for key in keys]

        @rule(keys=_keys)
        def delete(self, keys: list[str]) -> None:
            results = self.call(self.store.delete(keys))
            for key, status in zip(keys, results.status.tolist(), strict=True):
                removed = self.model.pop(key, None) is not None
                assert status == (Status.OK if removed else Status.ABSENT) or keys.count(key) > 1

        @rule(key=st.sampled_from(KEYS), value=_value)
        def stored_by_another(self, key: str, value: bytes) -> None:
            if key not in self.model:
                suite.raw_write(self.place, key, value)
                self.model[key] = value

        @precondition(lambda self: isinstance(self.store, SupportsScan))
        @rule(prefix=st.sampled_from(["", "a", "a/", "ns/0.", "odd", "none"]))
        def scan(self, prefix: str) -> None:
            async def run() -> list[str]:
                assert isinstance(self.store, SupportsScan)
                return sorted([key async for key in self.store.scan(prefix)])

            assert self.call(run()) == sorted(key for key in self.model if key.startswith(prefix))

        @precondition(lambda self: isinstance(self.store, SupportsClear))
        @rule(prefix=st.sampled_from(["a/", "ns/0.", ""]))
        def clear(self, prefix: str) -> None:
            assert isinstance(self.store, SupportsClear)
            gone = [key for key in self.model if key.startswith(prefix)]
            assert self.call(self.store.clear(prefix)) == len(gone)
            for key in gone:
                del self.model[key]

        @rule()
        def reopen(self) -> None:
            self.opened.__exit__(None, None, None)
            if not self.store.capabilities.shared:
                self.model.clear()
            self.open()

        @invariant()
        def what_is_stored_is_what_was_put(self) -> None:
            for key in KEYS:
                assert suite.raw_read(self.place, key) == self.model.get(key), key

        def teardown(self) -> None:
            self.opened.__exit__(None, None, None)
            self.stack.close()

    return StoreMachine
