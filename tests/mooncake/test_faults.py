"""What must hold whatever breaks: no crash, no hang, no wrong byte, and it heals by itself."""

from __future__ import annotations

import pytest

from tests.mooncake.faults import SCENARIOS, play
from tests.mooncake.soak import soak

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


async def test_a_short_soak() -> None:
    """The long one is ``python -m tests.mooncake.soak 600``, see docs/mooncake.md."""
    report = await soak(15, seed=5)
    assert report.wrong == []
    assert sum(seen.statuses["get"]["OK"] for seen in report.seen) > 0
    assert report.growth.descriptors < 10
    assert report.growth.mib < 64
