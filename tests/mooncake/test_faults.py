"""What must hold whatever breaks: no crash, no hang, no wrong byte, and it heals by itself."""

from __future__ import annotations

import pytest

from tests.mooncake.faults import SCENARIOS, play

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
