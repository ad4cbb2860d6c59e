"""Redis servers of their own for these tests; see tests/redis/server.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.redis.server import RedisServer


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RedisServer]:
    """One server for all tests that only put and get; each uses keys of its own."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A server for one test, which may do with it what it likes."""
    with RedisServer() as server:
        yield server
