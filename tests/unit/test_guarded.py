"""GuardedStore in virtual time: deadlines on any store, memory that is let go of, retries, the breaker at work."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

import anyio
import numpy as np
import pytest

from kvpool.backends._breaker import Breaker
from kvpool.backends._wrapping import GRACE_S
from kvpool.backends.guarded import MAX_LEFT_BEHIND, GuardedStore
from kvpool.backends.memory import MemoryStore
from kvpool.config import Config
from kvpool.errors import ConfigError, LayoutError, StoreClosed, StoreError
from kvpool.hashes import chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout, Buffers
from kvpool.pool import KVPool
from kvpool.registry import create_store
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Results, Status
from kvpool.testing.faults import Fault, FaultyStore
from kvpool.testing.simulation import simulate
from kvpool.testing.stores import get, put

KEYS = ["a", "b", "c"]
now = anyio.current_time


def run(fn: Callable[[], Awaitable[None]], seed: int = 1) -> None:
    simulate(fn, seed=seed)


def guarded(*faults: Fault, **options: object) -> tuple[GuardedStore, FaultyStore]:
    inner = FaultyStore(MemoryStore(), faults)
    return GuardedStore(inner, **options), inner  # type: ignore[arg-type]


def fault(kind: str, **fields: object) -> Fault:
    return Fault.model_validate({"kind": kind, **fields})


# ---- deadline


@pytest.mark.parametrize("kind", ["hang", "stuck", "deaf"])
@pytest.mark.parametrize("limit", ["deadline", "timeout"])
def test_every_call_ends_at_its_deadline(kind: str, limit: str) -> None:
    async def main() -> None:
        store, inner = guarded(timeout_s=2.0 if limit == "timeout" else 1000.0, breaker=Breaker(failures=99, window=99))
        async with store:
            await put(store, [(k, b"12") for k in KEYS])
            inner.faults = [fault(kind, seconds=300)]

            async def timed(call: Callable[[float], Awaitable[object]]) -> object:
                start = now()
                result = await call(start + 2.0 if limit == "deadline" else math.inf)
                assert 2.0 <= now() - start <= 2.0 + 2 * GRACE_S
                return result

            found = await timed(lambda d: store.exists(KEYS, deadline=d))
            assert found.tolist() == [UNKNOWN] * 3  # type: ignore[attr-defined]
            for call in (
                lambda d: store.delete(KEYS, deadline=d),
                lambda d: put(store, [(k, b"34") for k in KEYS], deadline=d),
                lambda d: store.get_into(KEYS, Buffers.of(*(bytearray(2) for _ in KEYS)), deadline=d),
            ):
                results = await timed(call)
                assert results.status.tolist() == [Status.TIMED_OUT] * 3  # type: ignore[attr-defined]
            assert store.left_behind == (4 if kind == "deaf" else 0)
            await anyio.sleep(400)
            assert store.left_behind == 0
            inner.faults = []
            assert (await get(store, KEYS, [2] * 3))[0].ok.all(), "closed again by itself"

    run(main)


class NativeStore(MemoryStore):
    """Like a client in another language: it starts late, heeds nothing, and then does what it was told."""

    seconds = 10.0

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self.seconds)
            return await super().get_into(keys, into)
        raise AssertionError("the scope is never cancelled")

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self.seconds)
            return await super().put(keys, source)
        raise AssertionError("the scope is never cancelled")


@pytest.mark.parametrize("end", ["deadline", "cancelled"])
def test_what_is_left_behind_has_memory_of_its_own(end: str) -> None:
    async def main() -> None:
        inner = NativeStore()
        async with GuardedStore(inner) as store:

            async def cut_off(call: Callable[[float], Awaitable[Results]]) -> None:
                if end == "deadline":
                    assert (await call(now() + 1)).status.tolist() == [Status.TIMED_OUT]
                else:
                    with anyio.CancelScope(deadline=now() + 1) as scope:
                        await call(math.inf)
                    assert scope.cancelled_caught
                assert store.left_behind == 1

            value = bytearray(b"good")
            await cut_off(lambda d: store.put(["k"], Buffers.of(value), deadline=d))
            value[:] = b"evil"  # the caller's memory is the caller's again
            await anyio.sleep(20)
            inner.seconds = 0
            assert (await get(store, ["k"], [4]))[1] == [b"good"]

            inner.seconds = 10
            await cut_off(lambda d: store.get_into(["k"], Buffers.of(value), deadline=d))
            await anyio.sleep(20)
            assert value == b"evil"
            assert store.left_behind == 0

    run(main)


def test_without_bounce_the_memory_is_let_go_of_first() -> None:
    async def main() -> None:
        store, inner = guarded(bounce=False)
        async with store:
            await put(store, [("k", b"12")])
            inner.faults = [fault("stuck", op="get")]
            start = now()
            assert (await get(store, ["k"], [2], deadline=start + 1))[0].status[0] == Status.TIMED_OUT
            assert now() - start <= 1 + 2 * GRACE_S
            inner.faults = [fault("deaf", op="get", seconds=10)]
            start = now()
            await get(store, ["k"], [2], deadline=start + 1)
            assert now() - start >= 10
            inner.faults = [fault("deaf", op="exists", seconds=10)]
            start = now()
            assert (await store.exists(["k"], deadline=start + 1)).tolist() == [UNKNOWN]
            assert now() - start <= 1 + 2 * GRACE_S, "no memory, no need to wait"

    run(main)


def test_without_bounce_a_call_counts_as_failed_when_it_is_overdue() -> None:
    async def main() -> None:
        store, inner = guarded(bounce=False, breaker=Breaker(failures=1, cooldown_s=5))
        async with store:
            inner.faults = [fault("deaf", op="get", seconds=100)]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(get, store, ["k"], [2])
                await anyio.sleep(31)  # timeout_s is 30
                assert (await store.exists(["k"])).tolist() == [UNKNOWN]
                assert store.counts["refused"] == 1

    run(main)


def test_in_a_pool_without_bounce_the_pool_leaves_the_call_behind() -> None:
    """The staging memory of a late load stays with its call; the load is over, and the engine's blocks are safe."""

    async def main() -> None:
        inner = NativeStore()
        inner.seconds = 0
        blocks = np.arange(256, dtype=np.uint8).reshape(4, 64)
        pool = KVPool(
            GuardedStore(inner, bounce=False),
            spec=CacheSpec((CacheGroup(Kind.FULL, 4),), 4),
            namespace=Namespace.of({"test": "guarded"}),
            layouts=[BlockLayout.of_arrays(blocks)],
            config=Config.load({"staging_bytes": 1 << 16, "batch_bytes": 1 << 12}, environ={}),
        )
        async with pool:
            part = pool.transfer(0, chain_hashes(np.arange(16), 4), np.arange(4), np.arange(4))
            assert (await pool.save([part]))[0].ok.all()
            blocks[:] = 7
            inner.seconds = 10
            start = now()
            (late,) = await pool.load([part], deadline=start + 1)
            assert late.status.tolist() == [Status.TIMED_OUT] * 4
            assert now() - start < 2
            assert pool.staging.free_bytes < pool.staging.nbytes, "the call still has its memory"
            await anyio.sleep(20)
            assert pool.staging.free_bytes == pool.staging.nbytes
            assert (blocks == 7).all()
            inner.seconds = 0
            assert (await pool.load([part]))[0].ok.all()
            assert np.array_equal(blocks.reshape(-1), np.arange(256))

    run(main)


def test_a_passed_deadline_says_nothing_about_the_store() -> None:
    async def main() -> None:
        store, inner = guarded(breaker=Breaker(failures=1))
        async with store:
            for _ in range(3):
                assert (await store.exists(KEYS, deadline=now())).tolist() == [UNKNOWN] * 3
            assert inner.calls["exists"] == 0
            assert store.breaker.state(now()) == "closed"

    run(main)


def test_few_calls_are_left_behind() -> None:
    async def main() -> None:
        store, inner = guarded(fault("deaf", seconds=1e6), breaker=Breaker(failures=10**9, window=10**6))
        async with store:
            for _ in range(MAX_LEFT_BEHIND):
                await store.exists(KEYS, deadline=now() + 0.1)
            assert store.left_behind == MAX_LEFT_BEHIND
            start = now()
            results = await store.delete(KEYS, deadline=now() + 0.1)
            assert now() == start
            assert results.status.tolist() == [Status.FAILED] * 3
            assert "not asked" in str(results.errors[0])
            assert inner.calls["delete"] == 0

    simulate(main, seed=1, limit=1e7)


def test_closing_waits_for_what_was_left_behind() -> None:
    async def main() -> None:
        store, _ = guarded(fault("deaf", op="put", seconds=50))
        start = now()
        async with store:
            await put(store, [("k", b"v")], deadline=now() + 1)
        assert now() - start >= 50
        with pytest.raises(StoreClosed):
            await store.exists([])

    run(main)


def test_a_cancelled_caller_is_not_held_up() -> None:
    async def main() -> None:
        for kind in ("stuck", "deaf"):
            store, inner = guarded()
            async with store:
                inner.faults = [fault(kind, seconds=100)]
                start = now()
                with anyio.CancelScope(deadline=now() + 1) as scope:
                    await get(store, ["k"], [1])
                assert scope.cancelled_caught
                assert now() - start < (1 + GRACE_S / 2 if kind == "stuck" else 1 + 2 * GRACE_S)
                assert store.left_behind == (kind == "deaf")
                assert store.breaker.state(now()) == "closed", "the caller gave up, not the store"

    run(main)


# ---- retries


@pytest.mark.parametrize("kind", ["raise", "failed"])
def test_what_failed_is_tried_again(kind: str) -> None:
    async def main() -> None:
        store, inner = guarded(retries=2)
        async with store:
            await put(store, [(k, k.encode()) for k in KEYS])
            for op in ("exists", "get", "put"):
                inner.calls.clear()
                inner.faults = [fault(kind, op=op, keys="b", times=2)]
                if op == "exists":  # of a key that is not there, too
                    assert (await store.exists([*KEYS, "no"])).tolist() == [PRESENT] * 3 + [ABSENT]
                elif op == "get":
                    results, memory = await get(store, [*KEYS, "no"], [1, 1, 1, 1])
                    assert results.status.tolist() == [Status.OK] * 3 + [Status.ABSENT]
                    assert not results.errors
                    assert memory[:3] == [b"a", b"b", b"c"]
                else:
                    assert (await put(store, [("x", b"x"), ("b", b"b")])).ok.all()
                assert inner.calls[op] == 3
                n = 4 if op != "put" else 2
                assert inner.calls[f"{op}_keys"] == (n + 1 + 1 if kind == "failed" else 3 * n), "only what failed"

    run(main)


def test_failures_that_stay_are_reported() -> None:
    async def main() -> None:
        store, inner = guarded(retries=1)
        async with store:
            await put(store, [("a", b"a")])
            inner.faults = [fault("failed", keys="b")]
            results, _ = await get(store, KEYS, [1] * 3)
            assert results.status.tolist() == [Status.OK, Status.FAILED, Status.ABSENT]
            assert list(results.errors) == [1]
            inner.faults = [fault("raise")]
            results, _ = await get(store, KEYS, [1] * 3)
            assert results.status.tolist() == [Status.FAILED] * 3
            assert "on purpose" in str(results.errors[0])
            with pytest.raises(StoreError, match="on purpose"):
                await store.exists(KEYS)

    run(main)


@pytest.mark.parametrize("kind", ["absent", "corrupt", "rejected", "timed_out"])
def test_other_outcomes_are_not_tried_again(kind: str) -> None:
    async def main() -> None:
        store, inner = guarded(fault(kind, keys="b"))
        async with store:
            await get(store, KEYS, [1] * 3)
            assert inner.calls["get"] == 1

    run(main)


def test_a_delete_is_not_tried_again() -> None:
    async def main() -> None:
        store, inner = guarded(fault("failed"))
        async with store:
            await store.delete(KEYS)
            assert inner.calls["delete"] == 1

    run(main)


def test_retries_end_at_the_deadline_and_pause_at_random() -> None:
    pauses = set()

    async def main() -> None:
        store, inner = guarded(fault("failed"), retries=10, backoff_s=0.1, breaker=Breaker(failures=99, window=99))
        async with store:
            start = now()
            assert (await get(store, KEYS, [1] * 3, deadline=start + 1))[0].status.tolist() == [Status.FAILED] * 3
            assert now() - start < 1
            assert 2 < inner.calls["get"] < 11
            pauses.add(now() - start)

    for seed in range(4):
        run(main, seed)
    assert len(pauses) == 4


def test_the_callers_mistakes_are_raised() -> None:
    async def main() -> None:
        store, inner = guarded(breaker=Breaker(failures=1))
        async with store:
            with pytest.raises(LayoutError):
                await store.put(["k"], Buffers.of(bytearray(1), bytearray(1)))
            inner.faults = [fault("failed")]
            await inner.inner.__aexit__(None, None, None)
            with pytest.raises(StoreClosed):
                await store.delete(["k"])
            assert store.breaker.state(now()) == "closed"

    run(main)


def test_whatever_a_store_raises_is_a_failed_key() -> None:
    class Broken(MemoryStore):
        async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
            raise OSError("socket gone")

        async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
            return Results.empty(len(keys) - 1)

    async def main() -> None:
        async with GuardedStore(Broken()) as store:
            results, _ = await get(store, KEYS, [1] * 3)
            assert results.status.tolist() == [Status.FAILED] * 3
            assert "socket gone" in str(results.errors[0])
            results = await store.delete(KEYS)
            assert "answered for 2 of 3 keys" in str(results.errors[0])

    run(main)


# ---- breaker


def test_an_open_breaker_answers_at_once_and_closes_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvpool")

    async def main() -> None:
        store, inner = guarded(retries=0, breaker=Breaker(failures=3, cooldown_s=1, max_cooldown_s=4))
        async with store:
            await put(store, [(k, b"1") for k in KEYS])
            inner.faults = [fault("hang")]
            for _ in range(3):
                await store.exists(KEYS, deadline=now() + 0.2)
            asked, start = inner.calls.total(), now()
            assert (await store.exists(KEYS)).tolist() == [UNKNOWN] * 3
            for results in (
                await put(store, [("n", b"n")]),
                (await get(store, ["a"], [1]))[0],
                await store.delete(["a"]),
            ):
                assert results.status.tolist() == [Status.FAILED]
                assert "not asked" in str(results.errors[0])
            assert (now(), inner.calls.total()) == (start, asked)
            await anyio.sleep(1)
            await store.exists(KEYS, deadline=now() + 0.2)
            assert inner.calls.total() > asked, "a probe"
            inner.faults = []
            await anyio.sleep(1.9)
            assert (await store.exists(KEYS)).tolist() == [UNKNOWN] * 3, "twice the pause"
            await anyio.sleep(0.2)
            assert (await store.exists(KEYS)).tolist() == [PRESENT] * 3
            assert (await get(store, KEYS, [1] * 3))[0].ok.all()

    run(main)
    said = [r.getMessage() for r in caplog.records if "guarded FaultyStore" in r.getMessage()]
    assert len(said) == 2
    assert "3 calls failed in" in said[0]
    assert "left alone" in said[0]
    assert "serves again" in said[1]


def test_failed_keys_in_a_living_store_do_not_open_it() -> None:
    async def main() -> None:
        store, inner = guarded(fault("failed", keys="b"), fault("rejected", keys="c"), retries=0)
        async with store:
            for _ in range(50):
                await put(store, [(k, b"1") for k in KEYS])
                await get(store, KEYS, [1] * 3)
                await store.exists(["nothing"])
            assert store.counts["refused"] == 0
            assert inner.calls.total() > 0

    run(main)


def test_many_callers_and_a_store_that_comes_and_goes() -> None:
    """Whatever happens, each call ends in time, tells the truth, and in the end all is well again."""

    async def main() -> None:
        store, inner = guarded(breaker=Breaker(failures=3, cooldown_s=0.5, max_cooldown_s=2))
        async with store:
            await put(store, [(k, k.encode() * 9) for k in KEYS])

            over = anyio.Event()

            async def work(n: int) -> None:
                for i in itertools.count():
                    if over.is_set():
                        break
                    start = now()
                    results, memory = await get(store, KEYS, [9] * 3, deadline=start + 0.5)
                    assert now() - start <= 0.5 + 2 * GRACE_S
                    for k, ok, value in zip(KEYS, results.ok, memory, strict=True):
                        assert value == (k.encode() * 9 if ok else b"\xee" * 9)
                    await anyio.sleep(0.05 * (1 + n + i % 5))

            async def trouble() -> None:
                for kind in ("hang", "raise", "deaf", "failed", "stuck", "delay"):
                    inner.faults = [fault(kind, seconds=1.0)]
                    await anyio.sleep(1.5)
                    inner.faults = []
                    await anyio.sleep(2.5)
                over.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(trouble)
                for n in range(8):
                    tasks.start_soon(work, n)
            await anyio.sleep(3)
            assert (await get(store, KEYS, [9] * 3))[0].ok.all()
            assert store.left_behind == 0
            assert store.counts["late"] > 0
            assert store.counts["retry"] > 0
            assert store.counts["refused"] > 0

    for seed in range(3):
        run(main, seed)


# ---- set-up


def test_by_url() -> None:
    secret = "hunter2"
    store = create_store("guarded://?store=memory://?capacity=1MiB&timeout_s=1.5&bounce=false&failures=7")
    assert isinstance(store, GuardedStore)
    assert isinstance(store.inner, MemoryStore)
    assert create_store({"url": "guarded://", "store": "memory://", "retries": 0}).capabilities.scan
    for url, message in [
        ("guarded://", "option store is missing"),
        ("guarded://host?store=memory://", "guarded://\\?option=value"),
        ("guarded://?store=memory://&timeout_s=0", "timeout_s='0'.*seconds above 0"),
        ("guarded://?store=memory://&retry=1", "unknown option retry='1'; did you mean 'retries'"),
        ("guarded://?store=memry://", "unknown store 'memry'"),
        (f"guarded://?store=file%3A//u%3A{secret}%40h/x&ratio=2", "ratio='2'"),
        (f"guarded://?store=file%3A//u%3A{secret}%40h/x", "a file store is"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            create_store(url)
        assert secret not in str(caught.value)
        assert secret not in repr(caught.value)


def test_only_the_powers_of_the_inner_store() -> None:
    plain = GuardedStore(FaultyStore(MemoryStore()))
    assert not hasattr(plain, "scan")
    assert not hasattr(plain, "clear")
    assert not plain.capabilities.scan
