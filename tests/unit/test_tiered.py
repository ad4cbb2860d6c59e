"""TieredStore: the near tier speeds up reads; only the shared tier says what there is; no near fault is an error."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest

from kvpool.backends.memory import MemoryStore
from kvpool.backends.tiered import TieredStore
from kvpool.errors import ConfigError, StoreClosed, StoreError
from kvpool.registry import create_store
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Results, Status, SupportsClear, SupportsScan
from kvpool.testing.faults import Fault, FaultyStore
from kvpool.testing.simulation import simulate
from kvpool.testing.stores import get, put

pytestmark = pytest.mark.anyio

KEYS = ["a", "b", "c"]
ITEMS = [(k, k.encode() * 9) for k in KEYS]
VALUES = [v for _, v in ITEMS]
KINDS = ["failed", "corrupt", "timed_out", "rejected", "absent", "hang", "raise", "stuck"]


class Tiers:
    """A tiered store whose two tiers can be made to fail; filled with ``ITEMS``."""

    def __init__(self) -> None:
        self.near = FaultyStore(MemoryStore())
        self.shared = FaultyStore(MemoryStore())
        self.store = TieredStore(self.near, self.shared)

    async def __aenter__(self) -> Tiers:
        await self.store.__aenter__()
        assert (await put(self.store, ITEMS)).ok.all()
        self.near.calls.clear()
        self.shared.calls.clear()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.store.__aexit__(None, None, None)

    async def in_near(self) -> list[int]:
        found: list[int] = (await self.near.inner.exists(KEYS)).tolist()
        return found

    async def get(self, keys: Sequence[str] = KEYS) -> tuple[list[int], list[bytes]]:
        results, memory = await get(self.store, keys, [9] * len(keys))
        return results.status.tolist(), memory


async def test_what_is_near_is_not_read_from_the_shared_tier() -> None:
    async with Tiers() as tiers:
        assert await tiers.get() == ([Status.OK] * 3, VALUES)
        assert tiers.shared.calls["get"] == 0, "a put leaves it in both tiers"
        await tiers.near.inner.delete(["b"])
        assert await tiers.get() == ([Status.OK] * 3, VALUES)
        assert (tiers.shared.calls["get"], tiers.shared.calls["get_keys"]) == (1, 1)
        assert await tiers.get() == ([Status.OK] * 3, VALUES)
        assert tiers.shared.calls["get"] == 1, "a read leaves it in the near tier"
        assert tiers.store.counts == {"near_hits": 8, "shared_hits": 1, "near_failed": 0}


async def test_only_the_shared_tier_answers_lookups() -> None:
    async with Tiers() as tiers:
        await tiers.shared.inner.delete(["b"])
        assert (await tiers.store.exists(KEYS)).tolist() == [PRESENT, ABSENT, PRESENT]
        tiers.shared.faults = [Fault(kind="failed", keys="c")]
        assert (await tiers.store.exists(KEYS)).tolist() == [PRESENT, ABSENT, UNKNOWN]
        assert tiers.near.calls["exists"] == 0


async def test_the_near_tier_never_has_what_the_shared_tier_has_not_taken() -> None:
    async with Tiers() as tiers:
        tiers.shared.faults = [Fault(kind="rejected", op="put", keys="n1"), Fault(kind="failed", op="put", keys="n2")]
        results = await put(tiers.store, [("n0", b"0"), ("n1", b"1"), ("n2", b"2")])
        assert results.status.tolist() == [Status.OK, Status.REJECTED, Status.FAILED]
        assert (await tiers.near.inner.exists(["n0", "n1", "n2"])).tolist() == [PRESENT, ABSENT, ABSENT]
        tiers.shared.faults = [Fault(kind="raise", op="put")]
        with pytest.raises(StoreError):
            await put(tiers.store, [("n3", b"3")])
        assert (await tiers.near.inner.exists(["n3"])).tolist() == [ABSENT]


async def test_a_put_of_what_another_stored_leaves_the_others_value() -> None:
    async with Tiers() as tiers:
        await put(tiers.shared.inner, [("k", b"theirs")])
        assert (await put(tiers.store, [("k", b"ours..")])).ok.all()
        for _ in range(2):
            assert (await get(tiers.store, ["k"], [6]))[1] == [b"theirs"]


async def test_deletes_go_to_both() -> None:
    async with Tiers() as tiers:
        assert (await tiers.store.delete(["a", "no"])).status.tolist() == [Status.OK, Status.ABSENT]
        assert await tiers.in_near() == [ABSENT, PRESENT, PRESENT]
        assert (await tiers.get())[0] == [Status.ABSENT, Status.OK, Status.OK]


async def test_clear_goes_to_both_and_scan_to_the_shared_tier() -> None:
    near, shared = MemoryStore(), MemoryStore()
    async with TieredStore(near, shared) as store:
        await put(store, ITEMS)
        await put(near, [("stray", b"x")])
        assert isinstance(store, SupportsClear)
        assert isinstance(store, SupportsScan)
        assert sorted([k async for k in store.scan()]) == KEYS
        assert await store.clear("a") == 1
        assert (await near.exists(KEYS)).tolist() == [ABSENT, PRESENT, PRESENT]
        assert await store.clear() == 2
        assert [k async for k in near.scan()] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_near_tier_is_no_error(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Tiers() as tiers:
            tiers.near.faults = [Fault.model_validate({"kind": kind})]
            for i in range(20):
                assert await tiers.get() == ([Status.OK] * 3, VALUES)
                assert (await put(tiers.store, [(f"n{i}", b"n")])).ok.all()
                assert (await tiers.store.delete([f"n{i}"])).ok.all()
            assert anyio.current_time() < 10, "it is left alone while it keeps failing"
            tiers.near.faults = []
            await anyio.sleep(60)
            assert await tiers.get() == ([Status.OK] * 3, VALUES)
            asked = tiers.shared.calls["get"]
            assert await tiers.get() == ([Status.OK] * 3, VALUES)
            assert tiers.shared.calls["get"] == asked, "and is used again when it answers again"

    simulate(main, seed=1)
    said = [r.getMessage() for r in caplog.records]
    if kind in ("absent", "rejected"):  # answers
        assert said == []
    elif kind == "corrupt":
        assert re.match("near tier: 3 values damaged: .* such a value is taken from the shared tier", said[0])
    else:
        assert len(said) == 2
        assert re.match("near tier: . calls failed.* the shared tier serves alone", said[0])
        assert "near tier: serves again" in said[1]


def test_a_slow_near_tier_costs_little_of_the_deadline() -> None:
    async def main() -> None:
        async with Tiers() as tiers:
            tiers.near.faults = [Fault(kind="hang")]
            start = anyio.current_time()
            results, _ = await get(tiers.store, KEYS, [9] * 3, deadline=start + 1.0)
            assert results.ok.all()
            assert anyio.current_time() - start < 0.6

    simulate(main, seed=1)


@pytest.mark.parametrize("kind", ["failed", "absent", "corrupt"])
async def test_a_failing_shared_tier_is_reported_for_what_is_not_near(kind: str) -> None:
    async with Tiers() as tiers:
        await tiers.near.inner.delete(["b"])
        tiers.shared.faults = [Fault.model_validate({"kind": kind})]
        status, memory = await tiers.get()
        assert status == [Status.OK, getattr(Status, kind.upper()), Status.OK]
        assert (memory[0], memory[2]) == (VALUES[0], VALUES[2])
        assert await tiers.in_near() == [PRESENT, ABSENT, PRESENT]


async def test_a_spoilt_near_value_is_replaced() -> None:
    async with Tiers() as tiers:
        await tiers.near.inner.delete(["b"])
        await put(tiers.near.inner, [("b", b"short")])
        assert await tiers.get() == ([Status.OK] * 3, VALUES)
        assert (await get(tiers.near.inner, ["b"], [9]))[1] == [VALUES[1]]


async def test_a_reader_that_is_wrong_spoils_nothing() -> None:
    async with Tiers() as tiers:
        assert (await get(tiers.store, ["a"], [5]))[0].status.tolist() == [Status.CORRUPT]
        assert await tiers.in_near() == [PRESENT] * 3


@pytest.mark.parametrize("seed", range(8))
def test_a_removal_beside_reads_and_puts_leaves_nothing_near(seed: int) -> None:
    """However they interleave, cancelled or not: in the end the near tier has nothing that the shared tier has not."""

    class Slow(MemoryStore):
        """Takes a while before and after it does something."""

        async def _each(self, *args: Any, **kwargs: Any) -> Results:
            await anyio.sleep(random.uniform(0, 0.02))
            results = await super()._each(*args, **kwargs)
            await anyio.sleep(random.uniform(0, 0.02))
            return results

    async def main() -> None:
        near, shared = Slow(), Slow()
        async with TieredStore(near, shared) as store:

            async def at_some_time(act: Callable[[], Awaitable[object]]) -> None:
                await anyio.sleep(random.uniform(0, 0.08))
                patience = random.choice([math.inf, math.inf, random.uniform(0, 0.1)])
                with anyio.CancelScope(deadline=anyio.current_time() + patience):
                    await act()

            for _ in range(60):
                for key in random.choices(KEYS, k=random.randint(0, 3)):
                    await near.delete([key])
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(at_some_time, lambda: put(store, ITEMS))
                    tasks.start_soon(at_some_time, lambda: get(store, KEYS, [9] * 3))
                    tasks.start_soon(at_some_time, lambda: store.delete(KEYS[:2]))
                assert not ((await near.exists(KEYS)) > await shared.exists(KEYS)).any()

    simulate(main, seed=seed)


async def test_a_near_tier_that_cannot_be_opened() -> None:
    class Away(MemoryStore):
        async def __aenter__(self) -> Away:
            raise StoreError("away")

    shared = MemoryStore()
    async with TieredStore(Away(), shared) as store:
        await put(store, ITEMS)
        assert (await get(store, KEYS, [9] * 3))[1] == VALUES
        assert (await store.delete(KEYS)).ok.all()
    with pytest.raises(StoreClosed):
        await store.exists([])
    with pytest.raises(StoreClosed):
        await shared.exists([])


async def test_a_wrong_setting_of_the_near_tier_is_an_error() -> None:
    shared = MemoryStore()
    async with MemoryStore(name="taken", capacity=1):
        with pytest.raises(ConfigError, match="capacity=1"):
            await TieredStore(MemoryStore(name="taken"), shared).__aenter__()
    with pytest.raises(StoreClosed):
        await shared.exists([])


def test_capabilities_and_powers_follow_the_shared_tier() -> None:
    class Asyncio(FaultyStore):
        def __init__(self) -> None:
            super().__init__(MemoryStore())
            self.capabilities = type(self.capabilities)(shared=True, max_value_bytes=9, loops=frozenset({"asyncio"}))

    store = TieredStore(MemoryStore(capacity=1 << 20), Asyncio())
    assert store.capabilities == Asyncio().capabilities
    assert TieredStore(MemoryStore(), Asyncio()).capabilities.unlimited, "as its near tier is"
    assert not hasattr(store, "scan")
    assert not hasattr(store, "clear")
    store = TieredStore(Asyncio(), MemoryStore())
    assert not store.capabilities.shared
    assert store.capabilities.loops == {"asyncio"}
    assert hasattr(store, "scan")
    assert not hasattr(store, "clear"), "both tiers must be able to"


def test_by_url() -> None:
    store = create_store({"url": "tiered://", "near": "memory://?capacity=1MiB", "shared": "file:///tmp/x?threads=2"})
    assert isinstance(store, TieredStore)
    assert store.capabilities.shared
    assert isinstance(create_store("tiered://?near=memory://&shared=memory://x&near_timeout_s=1"), TieredStore)
    bad: list[tuple[str | dict[str, object], str]] = [
        ("tiered://?near=memory://", "option shared is missing"),
        ("tiered://x?near=memory://&shared=memory://", "tiered://\\?option=value"),
        ({"url": "tiered://", "near": "memory://", "shared": "redis://:hunter2@h", "fill": 1}, "unknown option fill"),
        ({"url": "tiered://", "near": "memory://", "shared": "redis://:hunter2@h/x?bad=1"}, "bad"),
    ]
    for source, message in bad:
        with pytest.raises(ConfigError, match=message) as caught:
            create_store(source)
        assert "hunter2" not in repr(caught.value)
