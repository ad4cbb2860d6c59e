"""Replays of a small trace over a real cluster; the large ones are in docs/replay.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.replay.engine import Job
from kvpool.replay.report import Report
from kvpool.replay.run import run
from kvpool.replay.trace import Trace
from tests.mooncake.servers import Mooncake
from tests.replay.traces import made, write

PROMPTS, HITS = made(150)
LISTED = sum(map(len, PROMPTS))


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace.load(write(tmp_path / "trace.jsonl", PROMPTS))


def test_one_engine_hits_all_that_was_repeated_and_two_lose_only_overlaps(trace: Trace, mooncake: Mooncake) -> None:
    one = run(Job(trace, mooncake.url))
    assert (one.verified, one.wrong, one.complete, one.problem) == (HITS, 0, True, "")
    two = run(Job(trace, mooncake.url, block_bytes=2000, engines=2))  # another size: another namespace
    assert (two.wrong, two.complete, two.problem) == (0, True, "")
    assert 0.8 * HITS < two.verified <= HITS
    assert two.already_stored is not None
    assert two.verified + two.counters["saved_chunks"] + two.already_stored >= LISTED
    again = run(Job(trace, mooncake.url, block_bytes=2000))
    assert (again.verified, again.wrong) == (LISTED, 0)


def test_a_cluster_that_is_full_is_named(trace: Trace) -> None:
    with Mooncake(memory=32 << 20) as small:
        report = run(Job(trace, small.url, block_bytes=128 << 10))
    assert not report.complete
    assert report.wrong == 0
    assert "NO_AVAILABLE_HANDLE (-200)" in report.problem


def test_a_cluster_that_evicts_in_time_costs_hits_and_nothing_else(trace: Trace) -> None:
    """Mooncake evicts behind a watermark; below the default of 0.9 there is room left for what comes meanwhile."""
    with Mooncake(memory=64 << 20, default_kv_lease_ttl="50ms", eviction_high_watermark_ratio="0.5") as small:
        report = run(Job(trace, small.url, block_bytes=128 << 10))
        assert small.master.metrics()["master_evicted_key_count"] > 0
    assert (report.complete, report.wrong) == (True, 0), report.problem
    assert 0 < report.verified <= HITS


@pytest.mark.parametrize("engines", [1, 2])
def test_a_master_that_dies_is_named(trace: Trace, engines: int) -> None:
    with Mooncake() as mooncake:
        report = run(Job(trace, mooncake.url, engines=engines), at(20, mooncake.master.kill))
        assert 20 <= report.requests < len(PROMPTS)
        assert report.wrong == 0
        assert mooncake.master.address in report.problem


def at(requests: int, act: Callable[[], None]) -> Callable[[Report], None]:
    return lambda report: act() if report.requests == requests else None
