"""Tests that need Mooncake run in a process and a network of their own (tests/mooncake/apart.py).

``mooncake`` is one master with an owner for the tests of a module that only put and get, each with keys of its own. A
test that kills, freezes or fills something starts servers for itself: tests/mooncake/servers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mooncake.apart import install
from tests.mooncake.servers import Mooncake


def pytest_configure(config: pytest.Config) -> None:
    install(config, Path(__file__).parent)


@pytest.fixture(scope="module")
def mooncake() -> Iterator[Mooncake]:
    with Mooncake(memory=256 << 20) as mooncake:
        yield mooncake
