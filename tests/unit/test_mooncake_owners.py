"""Which owners of memory are left alone, in virtual time; and what a store makes of it, on a made-up cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import anyio
import pytest

from kvpool.backends import _mooncake_link, _mooncake_watch
from kvpool.backends._mooncake_owners import FORGET_S, Owners, Place, Trial
from kvpool.backends.mooncake import MooncakeStore
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Status
from kvpool.testing.stores import get, put
from tests.unit.mooncake_fake import Cluster, FakeNative

A, B = "10.0.0.1:1", "10.0.0.2:1"


# ---- decisions


def known(now: float = 0.0) -> Owners:
    owners = Owners()
    owners.found([Place(A, "a0", 9), Place(A, "a1", 5), Place(B, "b0", 7)], now)
    return owners


def tried(owners: Owners, now: float, good: dict[str, bool | None]) -> list[Trial]:
    trials = owners.due(now)
    for trial in trials:
        owners.settle(trial, now, good[trial.owner])
    return trials


def test_an_owner_that_is_not_doubted_is_not_tried() -> None:
    owners = known()
    assert owners.due(0) == []
    owners.doubt()
    assert [(t.owner, t.place.name) for t in owners.due(1)] == [(A, "a1"), (B, "b0")], "with its smallest value"
    owners.doubt()
    assert owners.due(2) == [], "one trial at a time"


def test_the_one_that_fails_is_silent_until_a_trial_is_good() -> None:
    owners = known()
    owners.doubt()
    [first, second] = owners.due(0)
    assert owners.settle(first, 0, False) == "silent"
    assert owners.settle(second, 0, True) is None
    assert owners.silent(0) == {A}
    assert owners.due(0.4) == []
    [again] = owners.due(0.5)
    assert owners.silent(0.5) == {A}, "also while it is tried"
    assert owners.settle(again, 0.6, True) == "answers"
    assert owners.silent(0.6) == frozenset()


def test_trials_of_a_silent_owner_become_rare() -> None:
    owners = known()
    owners.doubt()
    now, times = 0.0, []
    while now < FORGET_S:
        times += [now] * len(tried(owners, now, {A: False, B: True}))
        now += 0.25
    gaps = [b - a for a, b in pairwise(times[1:])]
    assert gaps == sorted(gaps)
    assert gaps[0] == 0.5
    assert set(gaps[-2:]) == {2.0}


def test_a_trial_that_says_nothing_changes_nothing() -> None:
    owners = known()
    owners.doubt()
    tried(owners, 0, {A: None, B: None})
    assert owners.silent(0) == frozenset()
    owners.doubt()
    tried(owners, 1, {A: False, B: True})
    tried(owners, 2, {A: None})
    assert owners.silent(2) == {A}
    assert [t.owner for t in owners.due(2)] == [A], "it is tried again"


def test_an_owner_where_nothing_is_found_any_more_is_forgotten() -> None:
    owners = known()
    owners.doubt()
    tried(owners, 0, {A: False, B: True})
    owners.found([Place(A, "a2", 1)], FORGET_S)
    assert [t.place.name for t in owners.due(FORGET_S + 1)] == ["a2"]
    assert owners.due(2 * FORGET_S) == []
    owners = known()
    owners.doubt()
    tried(owners, 0, {A: False, B: True})
    assert owners.due(FORGET_S + 1) == []
    assert owners.silent(FORGET_S + 1) == frozenset()


def test_an_owner_that_gives_no_sign_of_life_is_told_from_one_that_only_fails() -> None:
    for mute in (False, True):
        owners = known()
        owners.doubt()
        [first, second] = owners.due(0)
        owners.settle(first, 0, False, mute=mute)
        owners.settle(second, 0, True)
        assert owners.mute(0) == mute
        [again] = owners.due(1)
        owners.settle(again, 1, True)
        assert not owners.mute(1)


# ---- a store

FAST = "buffer=1MiB&presence_cache_s=0&failed_key_s=0"
KEYS = [f"k{i}" for i in range(6)]
SIZE = 4


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name, value in {"TICK_S": 0.01, "SLOW_S": 60.0, "INQUIRY_S": 0.1, "SIGN_S": 0.2, "TRIAL_S": 0.2}.items():
        monkeypatch.setattr(_mooncake_watch, name, value)
    monkeypatch.setattr(_mooncake_link, "CLOSE_S", 0.1)
    monkeypatch.setattr(_mooncake_link, "_hung", [])
    with Cluster() as cluster:
        cluster.add_owner()
        cluster.add_owner()
        yield cluster


async def filled(store: MooncakeStore) -> None:
    """The first owner has KEYS[::2], the second KEYS[1::2]."""
    assert (await put(store, [(key, key.encode().ljust(SIZE)) for key in KEYS])).ok.all()


async def statuses(store: MooncakeStore) -> list[Status]:
    results, values = await get(store, KEYS, [SIZE] * len(KEYS), deadline=anyio.current_time() + 1)
    assert all(v == k.encode().ljust(SIZE) for k, v, ok in zip(KEYS, values, results.ok, strict=True) if ok)
    return [Status(s) for s in results.status]


async def until(store: MooncakeStore, silent: set[str]) -> None:
    with anyio.fail_after(30):
        while store._watch.silent() != silent:
            await statuses(store)
            await anyio.sleep(0.01)


def store_of(cluster: Cluster, options: str = "") -> MooncakeStore:
    return MooncakeStore(f"{cluster.url}?{FAST}{options}", connect=cluster.connect)


@pytest.mark.anyio
@pytest.mark.parametrize("mute", [True, False])
async def test_values_of_a_silent_owner_are_not_asked_for(
    cluster: Cluster, mute: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``mute`` False it gives signs of life, and its transfers fail all the same."""
    silent = cluster.owners[0]
    async with store_of(cluster) as store:
        await filled(store)
        assert await statuses(store) == [Status.OK] * 6
        assert cluster.calls["describe"] == 0, "while all is well nothing is asked"
        cluster.failing.add(silent)
        if mute:
            cluster.mute.add(silent)
        await until(store, {silent})
        cluster.batches.clear()
        assert await statuses(store) == [Status.FAILED, Status.OK] * 3
        asked = [name for _, names, _ in cluster.batches for name in names if len(names) > 1]
        assert asked == [f"kvpool:{key}" for key in KEYS[1::2]]
        assert (await store.exists(KEYS)).tolist() == [ABSENT, PRESENT] * 3
        assert any(silent in finding.text for finding in await store.diagnose())
        assert f"the owner of memory at {silent} does not answer" in caplog.text
        cluster.failing.clear()
        cluster.mute.clear()
        await until(store, set())
        assert await statuses(store) == [Status.OK] * 6
        assert (await store.exists(KEYS)).tolist() == [PRESENT] * 6


@pytest.mark.anyio
@pytest.mark.parametrize("address", ["127.0.0.1:70000", "a-segment", ""])
async def test_an_owner_without_an_address_that_can_be_is_tried_by_its_values(cluster: Cluster, address: str) -> None:
    """Nor does it end the watch, which would end the store and the block of whoever has opened it."""
    alive = False
    async with store_of(cluster) as store:
        await filled(store)
        cluster.places.update(dict.fromkeys((f"kvpool:{key}" for key in KEYS[::2]), address))
        cluster.failing.add(address)
        await until(store, {address})
        assert await statuses(store) == [Status.FAILED, Status.OK] * 3
        cluster.failing.clear()
        await until(store, set())
        assert await statuses(store) == [Status.OK] * 6
        alive = True
    assert alive


@pytest.mark.anyio
async def test_a_trial_that_never_began_says_nothing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads are taken by trials of owners that hang, or all memory by transfers."""
    monkeypatch.setattr(_mooncake_link, "TRIAL_THREADS", 1)
    free, settled = threading.Event(), []
    settle = Owners.settle

    def noted(owners: Owners, trial: Trial, now: float, good: bool | None, *, mute: bool = False) -> Any:
        settled.append(good)
        return settle(owners, trial, now, good, mute=mute)

    monkeypatch.setattr(Owners, "settle", noted)

    async def tried_again() -> None:
        settled.clear()
        with anyio.fail_after(30):
            while len(settled) < 2:
                await statuses(store)
                await anyio.sleep(0.01)

    async with store_of(cluster) as store:
        await filled(store)
        client = store._link.client()
        call = await client.trials.start(lambda: [int(free.wait(60))])
        cluster.failing.update(cluster.owners)
        await tried_again()
        assert set(settled) == {None}
        assert not store._watch.silent()
        free.set()
        await call.wait_through()
        await until(store, set(cluster.owners))
        lease = await client.arena.acquire(client.arena.nbytes)
        await tried_again()
        lease.release()
        assert set(settled[-2:]) <= {None, False}
        assert store._watch.silent() == set(cluster.owners)


@pytest.mark.anyio
async def test_a_silent_owner_says_nothing_about_the_master(cluster: Cluster) -> None:
    """The breaker of the whole store stays closed, however many transfers are late."""
    async with store_of(cluster) as store:
        await filled(store)
        with cluster.hanging():
            for _ in range(8):
                limit = anyio.current_time() + 0.01
                results, _ = await get(store, KEYS, [SIZE] * 6, deadline=limit)
                assert set(results.status.tolist()) <= {Status.TIMED_OUT, Status.FAILED}
            assert UNKNOWN not in await store.exists(KEYS)
            assert store._link.breaker.state(anyio.current_time()) == "closed"
        await until(store, set())
        assert await statuses(store) == [Status.OK] * 6
        assert store._link.replaced == 0


@pytest.mark.anyio
async def test_a_transfer_that_takes_long_is_doubted_before_its_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_mooncake_watch, "SLOW_S", 0.1)
    silent = cluster.owners[0]
    async with store_of(cluster) as store:
        await filled(store)
        cluster.mute.add(silent)
        async with anyio.create_task_group() as tasks:
            with cluster.hanging(), anyio.fail_after(30):
                tasks.start_soon(get, store, KEYS, [SIZE] * 6)
                while silent not in store._watch.silent():  # noqa: ASYNC110
                    await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_puts_go_one_at_a_time_while_an_owner_is_silent(cluster: Cluster) -> None:
    silent = cluster.owners[0]
    async with store_of(cluster) as store:
        await filled(store)
        cluster.failing.add(silent)
        cluster.mute.add(silent)
        await until(store, {silent})
        with cluster.hanging():
            limit = anyio.current_time() + 0.05
            assert (await put(store, [("one", b"1")], deadline=limit)).status.tolist() == [Status.TIMED_OUT]
            results = await put(store, [("two", b"1")])
            assert results.status.tolist() == [Status.REJECTED]
            assert "one put at a time" in str(results.errors[0])


@pytest.mark.anyio
async def test_a_client_is_not_given_up_for_an_owner_that_is_dead(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = cluster.owners[0]
    async with store_of(cluster) as store:
        await filled(store)
        cluster.mute.add(silent)
        cluster.failing.add(silent)
        await until(store, {silent})
        monkeypatch.setattr(_mooncake_link, "FAILING_S", 0.2)
        until_then = anyio.current_time() + 1
        n = 0
        while anyio.current_time() < until_then:
            n += 1
            await put(store, [(f"new{n}/{i}", b"1") for i in range(4)])
            await anyio.sleep(0.01)
        assert store._link.replaced == 0


@pytest.mark.anyio
async def test_a_client_is_not_given_up_for_calls_that_hang_with_a_dead_owner(cluster: Cluster) -> None:
    async with store_of(cluster, "&hang_s=0.4") as store:
        await filled(store)
        silent = cluster.owners[0]
        cluster.mute.add(silent)
        with cluster.hanging():
            limit = anyio.current_time() + 0.05
            assert (await get(store, KEYS, [SIZE] * 6, deadline=limit))[0].status.tolist() == [Status.TIMED_OUT] * 6
            with anyio.fail_after(30):
                while silent not in store._watch.silent():  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            await anyio.sleep(1.0)
            assert store._link.replaced == 0
            cluster.mute.clear()
            with anyio.fail_after(30):  # it answers, and the call still hangs
                while not store._link.replaced:  # noqa: ASYNC110
                    await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_a_client_that_cannot_say_where_values_are_goes_on_as_before(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeNative, "batch_get_replica_desc")
    async with store_of(cluster) as store:
        await filled(store)
        cluster.failing.add(cluster.owners[0])
        for _ in range(5):
            assert await statuses(store) == [Status.FAILED, Status.OK] * 3
            await anyio.sleep(0.05)
        assert not store._watch.silent()
