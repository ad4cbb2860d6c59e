"""KVPool beyond single calls: pins, epochs, draining, admission, events."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.admission import Admission
from kvpool.backends.memory import MemoryStore
from kvpool.errors import KVPoolError, LayoutError
from kvpool.events import Event, LoadEnded, LookupEnded, ResetDone, SaveEnded
from kvpool.memory import BlockLayout, Buffers
from kvpool.pool import KVPool, Transfer
from kvpool.store import ABSENT, PRESENT, Status
from tests.unit.test_pool import BLOCK, NAMESPACE, SPEC, Steered, engine, prompt

pytestmark = pytest.mark.anyio


async def test_after_a_reset_nothing_saved_before_is_found() -> None:
    async with engine() as e:
        part = e.pool.transfer(0, prompt(4), range(4), range(4))
        await e.pool.save([part])
        assert (await e.pool.lookup(prompt(4), 17)).length == 16
        first = e.pool.reset()
        assert (await e.pool.lookup(prompt(4), 17)).length == 0
        assert e.pool.reset() != first
        await e.pool.save([part])
        assert (await e.pool.lookup(prompt(4), 17)).length == 16


async def test_engines_with_one_label_share_an_epoch() -> None:
    store = MemoryStore(name="epochs")
    async with engine(store) as a, engine(MemoryStore(name="epochs")) as b:
        a.pool.reset("v2")
        await a.pool.save([a.pool.transfer(0, prompt(4), range(4), range(4))])
        assert (await b.pool.lookup(prompt(4), 17)).length == 0
        b.pool.reset("v2")
        assert (await b.pool.lookup(prompt(4), 17)).length == 16
    async with engine(MemoryStore(name="epochs"), epoch_label="v2") as c:
        assert c.pool.keyspace.namespace.digest == a.pool.keyspace.namespace.digest


async def test_a_load_that_a_reset_overtakes_counts_for_nothing() -> None:
    store = Steered()
    async with engine(store) as e:
        part = e.pool.transfer(0, prompt(4), range(4), range(4))
        await e.pool.save([part])

        async def reset(keys: Sequence[str]) -> None:
            e.pool.reset()

        store.before_get = reset
        (loaded,) = await e.pool.load([part])
        assert set(loaded.status.tolist()) == {Status.FAILED}


async def test_drain_waits_for_saves() -> None:
    store = Steered()
    release = anyio.Event()

    async def slow(keys: Sequence[str]) -> None:
        await release.wait()

    store.before_put = slow
    async with engine(store) as e, anyio.create_task_group() as tasks:
        assert await e.pool.drain()
        tasks.start_soon(e.pool.save, [e.pool.transfer(0, prompt(4), range(4), range(4))])
        await anyio.wait_all_tasks_blocked()
        assert not await e.pool.drain(deadline=anyio.current_time() + 0.02)
        release.set()
        assert await e.pool.drain(deadline=anyio.current_time() + 10)
        assert e.pool.counters.saved_chunks == 4


async def test_close_is_idempotent_and_final() -> None:
    async with engine() as e:
        await e.pool.close()
        await e.pool.close()
        with pytest.raises(KVPoolError):
            await e.pool.lookup(prompt(1), 5)


async def test_a_save_that_copies_when_the_pool_closes_ends_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its next call to the store finds no task any more that would make it."""
    saved: list[int] = []
    copying, go_on, ended, gather = threading.Event(), threading.Event(), anyio.Event(), BlockLayout.gather

    def slow(*arguments: Any) -> None:
        copying.set()
        go_on.wait(60)
        gather(*arguments)

    async with anyio.create_task_group() as tasks, engine(save_timeout_s=60) as e:
        await e.pool.save([e.pool.transfer(0, prompt(4), range(4), range(4))])
        monkeypatch.setattr(BlockLayout, "gather", slow)

        async def save() -> None:
            (out,) = await e.pool.save([e.pool.transfer(0, prompt(4, seed=1), range(4), range(4))])
            saved.extend(out.status.tolist())
            ended.set()

        tasks.start_soon(save)
        await anyio.to_thread.run_sync(copying.wait)
        await e.pool.close()
        go_on.set()
        with anyio.move_on_after(10):
            await ended.wait()
        assert saved == [Status.FAILED] * 4
    assert not [record for record in caplog.records if record.name.startswith("kvpool")]


async def test_pinned_values_survive_until_they_are_released() -> None:
    async with engine(MemoryStore(capacity=64 * 6)) as e:  # six chunks of 64 bytes (the manifest may take their place)
        kept = e.pool.transfer(0, prompt(2), range(2), range(2))
        await e.pool.save([kept])
        async with await e.pool.pin([kept], seconds=60) as pins:
            assert pins.held == 2
            for seed in range(1, 10):
                await e.pool.save([e.pool.transfer(0, prompt(2, seed), range(2), range(2))])
            assert (await e.pool.load([kept]))[0].ok.all()
        await pins.release()
        assert pins.held == 0
        for seed in range(10, 20):
            await e.pool.save([e.pool.transfer(0, prompt(2, seed), range(2), range(2))])
        assert not (await e.pool.load([kept]))[0].ok.any()


async def test_a_store_full_of_pins_rejects_and_forgets_them_in_time() -> None:
    async with MemoryStore(capacity=100) as store:
        assert (await store.put(["a"], Buffers.of(bytearray(60)))).ok.all()
        assert (await store.pin(["a", "b"], seconds=0.05)).tolist() == [PRESENT, ABSENT]
        assert (await store.put(["c"], Buffers.of(bytearray(60)))).status.tolist() == [Status.REJECTED]
        await anyio.sleep(0.06)
        assert (await store.put(["c"], Buffers.of(bytearray(60)))).ok.all()
        assert (await store.exists(["a", "c"])).tolist() == [ABSENT, PRESENT]
        await store.unpin(["a", "a", "nothing"])
        await store.pin(["c"], seconds=math.inf)
        await store.pin(["c"], seconds=math.inf)
        await store.unpin(["c"])
        assert (await store.put(["d"], Buffers.of(bytearray(60)))).status.tolist() == [Status.REJECTED]
        await store.unpin(["c"])
        assert (await store.put(["d"], Buffers.of(bytearray(60)))).ok.all()


async def test_a_store_that_cannot_pin_is_no_error() -> None:
    async with engine(Steered()) as e:
        part = e.pool.transfer(0, prompt(2), range(2), range(2))
        await e.pool.save([part])
        async with await e.pool.pin([part], seconds=1) as pins:
            assert pins.held == 0


async def test_small_hits_are_misses() -> None:
    async with engine(min_load_tokens=2 * BLOCK) as e:
        await e.pool.save([e.pool.transfer(0, prompt(4), range(4), range(4))])
        assert (await e.pool.lookup(prompt(4), 17, local_tokens=2 * BLOCK)).length == 16
        assert (await e.pool.lookup(prompt(4), 17, local_tokens=3 * BLOCK)).length == 0


async def test_what_comes_once_is_not_stored() -> None:
    async with engine(save_after_uses=2) as e:
        part = e.pool.transfer(0, prompt(4), range(4), range(4))
        (first,) = await e.pool.save([part])
        assert set(first.status.tolist()) == {Status.SKIPPED}
        longer = e.pool.transfer(0, prompt(6), range(6), range(6))
        (second,) = await e.pool.save([longer])
        assert second.status.tolist() == [Status.OK] * 4 + [Status.SKIPPED] * 2
        assert e.pool.counters.save_skipped_chunks == 6
        assert (await e.pool.lookup(prompt(6), 25)).length == 16


@given(st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=20), st.integers(1, 4))
def test_admission_against_a_count(batches: list[list[int]], uses: int) -> None:
    admission, seen = Admission(uses), dict.fromkeys(range(21), 0)
    for batch in batches:
        admitted = admission.admit([i.to_bytes(32, "little") for i in batch])
        for i, ok in zip(batch, admitted.tolist(), strict=True):
            seen[i] += 1
            assert ok == (seen[i] >= uses)


def test_admission_forgets_the_oldest() -> None:
    admission = Admission(2, remembered=3)
    digests = [bytes([i]) * 32 for i in range(5)]
    assert not admission.admit(digests).any()
    assert admission.admit(digests[2:]).all()
    assert not admission.admit(digests[:1]).any()


async def test_every_end_is_told_and_a_bad_listener_changes_nothing() -> None:
    told: list[Event] = []

    def listen(event: Event) -> None:
        told.append(event)
        raise RuntimeError("a bug in the listener")

    store = Steered()
    async with engine(store) as e:
        pool = KVPool(
            e.pool.store, spec=SPEC, namespace=NAMESPACE, layouts=e.pool.layouts, config=e.config, listener=listen
        )
        pool.store = MemoryStore()
        async with pool:
            part = pool.transfer(0, prompt(4), range(4), range(4))
            await pool.lookup(prompt(4), 17)
            await pool.save([part])
            await pool.save([part])
            await pool.lookup(prompt(4), 17)
            await pool.load([part])
            epoch = pool.reset()
    lookups = [t for t in told if isinstance(t, LookupEnded)]
    assert [(t.outcome, t.hit_tokens, t.num_tokens) for t in lookups] == [("miss", 0, 17), ("hit", 16, 17)]
    saves = [t for t in told if isinstance(t, SaveEnded)]
    assert [(t.saved, t.present, t.nbytes) for t in saves] == [(4, 0, 256), (0, 4, 0)]
    (load,) = [t for t in told if isinstance(t, LoadEnded)]
    assert (load.loaded, load.missing, load.nbytes) == (4, 0, 256)
    assert told[-1] == ResetDone(epoch)
    assert min(lookups[0].seconds, saves[0].seconds, load.seconds) >= 0


async def test_a_late_lookup_is_told_as_late() -> None:
    told: list[Event] = []
    store = Steered()

    async def slow(keys: Sequence[str]) -> None:
        await anyio.sleep(5)

    store.before_exists = slow
    async with KVPool(store, spec=SPEC, namespace=NAMESPACE, listener=told.append) as pool:
        await pool.lookup(prompt(4), 17, deadline=anyio.current_time() + 0.01)
    assert [t.outcome for t in told if isinstance(t, LookupEnded)] == ["late"]


async def test_what_does_not_exist_is_refused_by_name() -> None:
    async with engine() as e:
        pool = e.pool
        part = pool.transfer(0, prompt(4), range(4), range(4))
        for ids in ([4], [-1]):
            with pytest.raises(LayoutError, match=f"chunks {ids[0]} to {ids[0]} of a prompt that has 4 whole ones"):
                pool.transfer(0, prompt(4), ids, [0])
        for group in (len(SPEC.groups), -1):
            with pytest.raises(LayoutError, match=f"group {group} does not exist: the spec has {len(SPEC.groups)}"):
                pool.transfer(group, prompt(4), [0], [0])
            wrong = Transfer(group, part.hashes, part.block_ids)
            copied: list[bool] = []
            for call in (pool.load([wrong]), pool.save([wrong], copied=lambda: copied.append(True))):  # noqa: B023
                with pytest.raises(LayoutError, match=f"group {group} does not exist"):
                    await call
            assert copied == [True]
            with pytest.raises(LayoutError, match=f"group {group} does not exist"):
                await pool.pin([wrong], seconds=1)
        with pytest.raises(LayoutError, match=r"write \[transfer\]"):
            await pool.load(part)  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match=r"layouts=\[layout\]"):
            KVPool(MemoryStore(), spec=SPEC, namespace=NAMESPACE, layouts=pool.layouts[0])  # type: ignore[arg-type]
