"""What must hold whatever breaks: no crash, no hang, no wrong byte, and it heals by itself."""

from __future__ import annotations

import signal

import anyio
import pytest

from kvpool.errors import StoreClosed
from kvpool.registry import create_store
from tests.mooncake.faults import SCENARIOS, play
from tests.mooncake.servers import Mooncake
from tests.mooncake.soak import soak
from tests.mooncake.traffic import Traffic

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return "asyncio"


@pytest.mark.parametrize("name", SCENARIOS)
async def test_it_costs_misses_and_heals(name: str) -> None:
    outcome = await play(SCENARIOS[name])
    seen = outcome.seen
    assert seen.wrong == []
    assert "CORRUPT" not in seen.statuses["get"], "what is not whole is absent"


@pytest.mark.parametrize("frozen", [False, True], ids=["well", "frozen"])
async def test_closing_during_traffic(frozen: bool) -> None:
    """Also while no owner answers, so that calls hang: they end, the memory stays theirs, and a new store works."""
    traffic: list[Traffic] = []
    with Mooncake(owners=1) as mooncake, anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            async with create_store(mooncake.url) as store:
                traffic += [Traffic(store, f"{n}") for n in range(10)]
                for each in traffic:
                    tasks.start_soon(each.run)
                await traffic[0].recovered()
                if frozen:
                    mooncake.owners[0].signal(signal.SIGSTOP)
                    await anyio.sleep(0.2)  # until all are in a call that hangs
            with pytest.raises(StoreClosed):
                await store.exists(["k"])
        mooncake.owners[0].signal(signal.SIGCONT)
        async with create_store(mooncake.url) as store, anyio.create_task_group() as tasks:
            traffic.append(Traffic(store, "again"))
            tasks.start_soon(traffic[-1].run)
            await traffic[-1].recovered()
            tasks.cancel_scope.cancel()
    assert [each.seen.wrong for each in traffic] == [[]] * 11


async def test_a_short_soak() -> None:
    """The long one is ``python -m tests.mooncake.soak 600``, see docs/performance-stores.md."""
    report = await soak(15, seed=5)
    assert report.wrong == []
    assert sum(seen.statuses["get"]["OK"] for seen in report.seen) > 0
    assert report.growth.descriptors < 10
    assert report.growth.mib < 64
