"""Replays over a real Redis server, which goes away in some of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.replay.engine import Job
from kvpool.replay.report import Report
from kvpool.replay.run import run
from kvpool.replay.trace import Trace
from tests.redis.server import RedisServer
from tests.replay.traces import made, write

PROMPTS, HITS = made(150)
LISTED = sum(map(len, PROMPTS))


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace.load(write(tmp_path / "trace.jsonl", PROMPTS))


def test_one_engine_hits_all_that_was_repeated_and_two_lose_only_overlaps(trace: Trace) -> None:
    with RedisServer() as server:
        one = run(Job(trace, server.url))
        assert (one.verified, one.wrong, one.complete, one.problem) == (HITS, 0, True, "")
        two = run(Job(trace, server.url, block_bytes=2000, engines=2))  # another size: another namespace
        assert (two.wrong, two.complete, two.problem) == (0, True, "")
        assert 0.8 * HITS < two.verified <= HITS
        again = run(Job(trace, server.url, block_bytes=2000))
        assert (again.verified, again.wrong) == (LISTED, 0)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_server_that_dies_is_named(trace: Trace, engines: int) -> None:
    with RedisServer() as server:
        report = run(Job(trace, server.url, engines=engines), at(20, server.kill))
    assert 20 <= report.requests < len(PROMPTS)
    assert report.wrong == 0
    assert f"redis store 127.0.0.1:{server.port}: " in report.problem


def test_a_server_that_is_full_is_named(trace: Trace) -> None:
    with RedisServer(maxmemory="4mb", maxmemory_policy="noeviction") as server:
        report = run(Job(trace, server.url, block_bytes=64 << 10))
    assert not report.complete
    assert report.wrong == 0
    assert "the store refused blocks: redis store" in report.problem


def test_a_server_that_evicts_costs_hits_and_nothing_else(trace: Trace) -> None:
    with RedisServer(maxmemory="4mb", maxmemory_policy="allkeys-lru") as server:
        report = run(Job(trace, server.url, block_bytes=16 << 10))
    assert (report.complete, report.problem, report.wrong) == (True, "", 0)
    assert 0 < report.verified < HITS


def at(requests: int, act: Callable[[], None]) -> Callable[[Report], None]:
    return lambda report: act() if report.requests == requests else None
