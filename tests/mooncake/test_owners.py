"""One of two owners of memory is dead or frozen, and the master does not forget it: the other one goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt
import pytest

from kvpool.backends._mooncake_client import gives_sign_of_life
from kvpool.backends.mooncake import MooncakeStore
from kvpool.memory import Buffers, Region
from kvpool.store import ABSENT, PRESENT, Results, Status
from kvpool.testing.stores import get, put
from tests.mooncake.servers import Mooncake

pytestmark = pytest.mark.anyio

Bytes2D = npt.NDArray[np.uint8]

SIZE = 4096
KEYS = [f"key{i}" for i in range(24)]
OPTIONS = "?failed_key_s=0&presence_cache_s=0"


@pytest.fixture
def mooncake() -> Iterator[Mooncake]:
    with Mooncake(owners=2, client_ttl=120) as mooncake:
        yield mooncake


@dataclass
class Halves:
    """A store, and what each owner keeps of KEYS; ``mine``: the first one's."""

    store: MooncakeStore
    mine: list[str]
    others: list[str]

    async def load(self, keys: Sequence[str], seconds: float = 30.0) -> Results:
        """Whoever is not to wait for an owner is told by the results; how long that takes is the machine's."""
        results, values = await get(self.store, keys, [SIZE] * len(keys), deadline=anyio.current_time() + seconds)
        assert all(v == value_of(k) for k, v, ok in zip(keys, values, results.ok, strict=True) if ok)
        return results

    async def until_silent(self) -> int:
        """Ask for what lies there until its owner is known to be silent; the calls that took."""
        with anyio.fail_after(60):
            for n in range(10_000):
                if self.store._watch.silent():
                    return n
                await self.load(self.mine[:2], seconds=1.0)
                await anyio.sleep(0.05)
        raise AssertionError

    async def until_back(self, keys: Sequence[str]) -> None:
        with anyio.fail_after(60):
            while not (await self.load(keys)).ok.all():  # noqa: ASYNC110
                await anyio.sleep(0.05)


def value_of(key: str) -> bytes:
    return key.encode().ljust(SIZE, b".")


@asynccontextmanager
async def halves(mooncake: Mooncake, options: str = "") -> AsyncIterator[Halves]:
    async with MooncakeStore(mooncake.url + OPTIONS + options) as store:
        assert (await put(store, [(key, value_of(key)) for key in KEYS])).ok.all()
        described = await anyio.to_thread.run_sync(
            store._link.client().native.batch_get_replica_desc, [f"kvpool:{key}" for key in KEYS]
        )
        places = [described[f"kvpool:{key}"][0].get_memory_descriptor().buffer_descriptor for key in KEYS]
        owners = [place.transport_endpoint for place in places]
        with mooncake.owners[0].frozen():
            frozen = {owner for owner in set(owners) if not await gives_sign_of_life(owner, anyio.current_time() + 0.5)}
        mine = [key for key, owner in zip(KEYS, owners, strict=True) if owner in frozen]
        assert 2 <= len(mine) < len(KEYS)
        yield Halves(store, mine, [key for key in KEYS if key not in mine])


async def test_what_a_frozen_owner_keeps_is_failed_at_once_and_the_other_goes_on(mooncake: Mooncake) -> None:
    async with halves(mooncake) as each:
        with mooncake.owners[0].frozen():
            assert await each.until_silent() < 10, "the deadline of each call was a second"
            for _ in range(30):
                lost, kept = await each.load(each.mine), await each.load(each.others)
                assert lost.status.tolist() == [Status.FAILED] * len(each.mine), "not one is waited for"
                assert "does not answer" in str(lost.errors[0])
                assert kept.ok.all()
                mixed = await each.load(KEYS)
                assert [k for k, ok in zip(KEYS, mixed.ok, strict=True) if ok] == each.others
            presence = await each.store.exists(KEYS, deadline=anyio.current_time() + 30)
            assert [k for k, p in zip(KEYS, presence, strict=True) if p == PRESENT] == each.others
            assert set(presence.tolist()) == {PRESENT, ABSENT}
            findings = await each.store.diagnose()
            assert any("does not answer" in finding.text for finding in findings)
        await each.until_back(KEYS)
        assert not each.store._watch.silent()
        assert (await each.store.exists(KEYS)).tolist() == [PRESENT] * len(KEYS)
        assert each.store._link.replaced == 0


async def test_a_killed_owner_is_not_waited_for(mooncake: Mooncake) -> None:
    async with halves(mooncake) as each:
        mooncake.owners[0].kill()
        await each.until_silent()
        for _ in range(10):
            assert set((await each.load(each.mine)).status.tolist()) == {Status.FAILED}
            assert (await each.load(each.others)).ok.all()
        await anyio.to_thread.run_sync(mooncake.owners[0].start)
        new = [(f"new{i}", value_of(f"new{i}")) for i in range(8)]
        with anyio.fail_after(60):
            while not (await put(each.store, new, deadline=anyio.current_time() + 1)).ok.all():  # noqa: ASYNC110
                await anyio.sleep(0.05)
        assert (await each.load([key for key, _ in new])).ok.all()


async def test_puts_are_not_queued_behind_one_that_hangs(mooncake: Mooncake) -> None:
    """The master goes on placing values with an owner that does not answer."""
    async with halves(mooncake) as each:
        with mooncake.owners[0].frozen():
            seen = []
            puts = each.store._link.client().puts
            waited = overtook = 0
            for n in range(60):
                new = [(f"new{n}/{i}", value_of(f"new{n}/{i}")) for i in range(8)]
                seen += (await put(each.store, new, deadline=anyio.current_time() + 0.3)).status.tolist()
                hanging = set(puts.running)
                assert (await each.load(each.others)).ok.all()
                waited += bool(hanging)
                overtook += bool(hanging & puts.running)
                await anyio.sleep(0.02)
            assert overtook > waited / 2, "loads have threads of their own"
            assert Status.REJECTED in seen
            assert set(seen) <= {Status.OK, Status.TIMED_OUT, Status.REJECTED, Status.FAILED}
            assert seen.count(Status.TIMED_OUT) < seen.count(Status.REJECTED)
        await each.until_back(KEYS)


async def test_zero_copy_waits_for_a_frozen_owner_once(mooncake: Mooncake) -> None:
    """Such a call cannot be left while it may write, so those after it must not be made."""
    ended: list[Results] = []
    memory = np.zeros((2, len(KEYS), SIZE), np.uint8)
    async with halves(mooncake, "&zero_copy=yes") as each:
        await each.store.register([Region.of(memory)])

        async def load(keys: Sequence[str], room: Bytes2D, seconds: float) -> None:
            into = Buffers.of(*(row.data for row in room[: len(keys)]))
            ended.append(await each.store.get_into(keys, into, deadline=anyio.current_time() + seconds))

        async with anyio.create_task_group() as tasks:
            with mooncake.owners[0].frozen():
                tasks.start_soon(load, each.mine, memory[0], 0.5)
                with anyio.fail_after(60):
                    while not each.store._watch.silent():  # noqa: ASYNC110
                        await anyio.sleep(0.05)
                assert not ended
                for _ in range(10):
                    await load(KEYS, memory[1], 30.0)
                    kept = [key for key, ok in zip(KEYS, ended[-1].ok, strict=True) if ok]
                    assert kept == each.others
                    assert Status.TIMED_OUT not in ended[-1].status
                assert len(ended) == 10
        assert len(ended) == 11, "the first one has waited until it could not be written any more"
        assert not memory[1, [KEYS.index(key) for key in each.mine]].any()
