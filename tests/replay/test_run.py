"""Replays with a known answer, and replays that cannot be done."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kvpool.errors import ConfigError, KVPoolError
from kvpool.metrics import Counters
from kvpool.replay import engine
from kvpool.replay.engine import Job
from kvpool.replay.report import Report
from kvpool.replay.run import run
from kvpool.replay.trace import Trace
from tests.replay.traces import made, write

PROMPTS, HITS = made(50)
LISTED = sum(map(len, PROMPTS))
UNIQUE = len({block for ids in PROMPTS for block in ids})


@pytest.fixture(params=["asyncio", "trio"], autouse=True)
def event_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay starts its own loop, of the configured kind."""
    monkeypatch.setenv("KVPOOL_EVENT_LOOP", str(request.param))


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace.load(write(tmp_path / "trace.jsonl", PROMPTS))


def faulty(tmp_path: Path, faults: Sequence[dict[str, Any]], inner: str = "memory://") -> str:
    script = tmp_path / "faults.json"
    script.write_text(json.dumps(faults))
    return f"kvpool.testing.faults:FaultyStore?store={quote(inner, safe='')}&script={quote(str(script))}"


def check_ideal(report: Report) -> None:
    found = report.as_dict()
    assert (report.complete, report.problem, found["wrong_blocks"]) == (True, "", 0)
    assert (found["requests"], found["blocks"]) == (len(PROMPTS), LISTED)
    assert found["verified_blocks"] == HITS
    assert found["block_hit_rate"] == found["ideal_block_hit_rate"] == HITS / LISTED


@pytest.mark.parametrize("block_bytes", [1, 100, 1024, 70_000])
def test_one_engine_over_an_empty_store_hits_all_that_was_repeated(trace: Trace, block_bytes: int) -> None:
    seen: list[int] = []
    report = run(Job(trace, "memory://", block_bytes), lambda r: seen.append(r.requests))
    check_ideal(report)
    assert seen == list(range(1, len(PROMPTS) + 1))
    found = report.as_dict()
    assert found["loaded_bytes"] == HITS * block_bytes
    assert found["saved_bytes"] == UNIQUE * block_bytes
    assert found["counters"]["saved_chunks"] == UNIQUE
    assert found["already_stored_blocks"] == 0
    assert len(report.times["lookup"]) == len(PROMPTS)
    assert set(found["latency_ms"]["load"]) == {"p50", "p90", "p99", "max"}


def test_a_file_store_gives_the_same_and_keeps_it_for_the_next_replay(trace: Trace, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/kv"
    check_ideal(run(Job(trace, store)))
    again = run(Job(trace, store))
    assert (again.verified, again.wrong, again.counters["saved_chunks"]) == (LISTED, 0, 0)
    assert "held blocks of this trace before" in dict(again.rows())["block hit rate"]


def test_another_trace_or_block_size_shares_nothing(trace: Trace, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/kv"
    check_ideal(run(Job(trace, store)))
    check_ideal(run(Job(trace, store, block_bytes=512)))
    fewer = Trace.load(write(tmp_path / "fewer", PROMPTS[:-1]))
    assert run(Job(fewer, store)).verified == fewer.ideal_hits()


def test_blocks_listed_twice_in_one_request(tmp_path: Path) -> None:
    twice = Trace.load(write(tmp_path / "t", [[5, 5, 6], [5, 5, 6]]))
    report = run(Job(twice, "memory://"))
    assert (report.verified, report.wrong, report.blocks) == (3, 0, 6)


def test_requests_without_blocks(tmp_path: Path) -> None:
    report = run(Job(Trace.load(write(tmp_path / "t", [[], []])), "memory://"))
    assert (report.complete, report.hit_rate, report.blocks) == (True, 0.0, 0)


def test_with_a_speed_requests_overlap_and_nothing_is_wrong(trace: Trace) -> None:
    report = run(Job(trace, "memory://", speed=1000.0))
    assert (report.complete, report.problem, report.wrong) == (True, "", 0)
    assert report.already_stored is not None
    assert report.verified + report.counters["saved_chunks"] + report.already_stored == LISTED
    assert report.counters["saved_chunks"] >= UNIQUE
    assert 0 < report.verified <= HITS


def test_with_a_speed_requests_do_not_come_before_their_time(tmp_path: Path) -> None:
    report = run(Job(Trace.load(write(tmp_path / "t", [[1], [1], [1]], every_ms=1000)), "memory://", speed=10.0))
    assert report.seconds >= 0.2
    assert report.verified == 2


def test_a_bounded_store_keeps_its_bound(trace: Trace) -> None:
    report = run(Job(trace, "memory://?capacity=32KiB"))
    assert (report.complete, report.problem, report.wrong) == (True, "", 0)
    assert 0 < report.verified < HITS
    assert report.stored is not None
    assert 0 < report.stored <= 32
    assert dict(report.rows())["in the store"].endswith("its capacity: 32KiB")


# ---- what is wrong is found


def test_flipped_bytes_are_wrong_blocks_with_their_place(trace: Trace, tmp_path: Path) -> None:
    report = run(Job(trace, faulty(tmp_path, [{"kind": "flip", "op": "get", "times": 1}])))
    first = next(i for i, ids in enumerate(PROMPTS) if set(ids) & {b for x in PROMPTS[:i] for b in x})
    common = next(k for k, b in enumerate([*PROMPTS[first], -1]) if b not in {b for x in PROMPTS[:first] for b in x})
    assert (report.complete, report.wrong, report.verified) == (True, common, HITS - common)
    assert report.wrong_places[0] == f"line {first + 1}: the block of id {PROMPTS[first][0]}"


@pytest.mark.parametrize("store", ["Lazy", "Mixed"])
def test_blocks_that_were_not_written_or_are_another_s_are_wrong(trace: Trace, store: str) -> None:
    report = run(Job(trace, f"tests.replay.stores:{store}"))
    assert report.complete
    assert report.verified + report.wrong == HITS
    # A batch of one has no neighbour, and staging memory may still hold the very block from when it was saved.
    assert report.wrong > 0.8 * HITS
    assert len(report.wrong_places) == 5


def test_what_the_store_knows_to_be_damaged_is_a_miss(trace: Trace, tmp_path: Path) -> None:
    report = run(Job(trace, faulty(tmp_path, [{"kind": "corrupt", "op": "get", "times": 1}])))
    assert (report.complete, report.problem, report.wrong) == (True, "", 0)
    assert report.counters["load_corrupt_chunks"] > 0
    assert report.verified < HITS
    assert dict(report.rows())["damaged"].startswith(f"{report.counters['load_corrupt_chunks']} blocks")


# ---- what cannot be done


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"kind": "raise", "op": "exists"}, "a lookup failed: fault on purpose: exists"),
        ({"kind": "raise", "op": "get"}, "a load failed: fault on purpose: get"),
        ({"kind": "failed", "op": "get"}, "a load failed: fault on purpose: get of"),
        ({"kind": "raise", "op": "put", "keys": "*/0.0/*"}, "a save failed: fault on purpose: put"),
        ({"kind": "failed", "op": "put", "keys": "*/0.0/*"}, "a save failed: fault on purpose: put of"),
        ({"kind": "rejected", "op": "put", "keys": "*/0.0/*"}, "the store refused blocks"),
    ],
)
def test_a_store_that_fails_ends_the_replay_and_is_quoted(
    trace: Trace, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: dict[str, Any], problem: str
) -> None:
    report = run(Job(trace, faulty(tmp_path, [fault])))
    assert (report.complete, report.wrong) == (False, 0)
    assert pytest.approx(report.requests, abs=2) == 2
    with pytest.raises(KVPoolError, match=rf"^line {report.requests}: {problem}"):
        raise KVPoolError(report.problem)


@pytest.mark.parametrize(("kind", "op"), [("stuck", "exists"), ("hang", "exists"), ("hang", "get"), ("hang", "put")])
def test_a_store_that_does_not_answer_ends_the_replay(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, op: str
) -> None:
    for name, value in (("LOOKUP_TIMEOUT_MS", "50"), ("LOAD_TIMEOUT_S", "0.05"), ("SAVE_TIMEOUT_S", "0.05")):
        monkeypatch.setenv(f"KVPOOL_{name}", value)
    report = run(Job(trace, faulty(tmp_path, [{"kind": kind, "op": op}])))
    assert not report.complete
    assert " late" in report.problem


def test_with_a_speed_late_answers_are_counted_until_there_are_too_many(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_LOOKUP_TIMEOUT_MS", "20")
    hang: dict[str, Any] = {"kind": "stuck", "op": "exists", "times": 3}
    some = run(Job(trace, faulty(tmp_path, [hang]), speed=20.0))
    assert (some.complete, some.problem, some.wrong) == (True, "", 0)
    assert some.counters["lookup_late"] >= 1
    monkeypatch.setattr(engine, "_LATE_IN_A_ROW", 10)
    hang["times"] = 10_000
    monkeypatch.setenv("KVPOOL_SAVE_TIMEOUT_S", "0.1")
    gone = run(Job(trace, faulty(tmp_path, [hang]), speed=20.0))
    assert not gone.complete
    assert "10 requests in a row were late" in gone.problem


def test_a_full_disk_is_named(trace: Trace, tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, old[1]))  # a file cannot grow beyond that
    try:
        report = run(Job(trace, f"file://{tmp_path}/kv", block_bytes=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not report.complete
    assert f"the store refused blocks: file store {tmp_path}/kv: " in report.problem
    assert "File too large" in report.problem


def test_a_directory_that_goes_away_is_named(trace: Trace, tmp_path: Path) -> None:
    root = tmp_path / "kv"

    def replace_root(report: Report) -> None:
        if report.requests == 10:
            root.rename(tmp_path / "gone")
            root.write_text("no directory")

    report = run(Job(trace, f"file://{root}"), replace_root)
    assert 10 <= report.requests < len(PROMPTS)
    assert "is a file, not a folder" in report.problem


def test_an_interrupt_leaves_a_report_of_what_was_done(trace: Trace, tmp_path: Path) -> None:
    def interrupt(report: Report) -> None:
        if report.requests == 10:
            os.kill(os.getpid(), signal.SIGINT)

    report = run(Job(trace, f"file://{tmp_path}/kv"), interrupt)
    assert 10 <= report.requests < len(PROMPTS)
    assert report.problem == "interrupted"


def test_a_private_store_is_refused_for_several_engines(trace: Trace, tmp_path: Path) -> None:
    for store in ("memory://", faulty(tmp_path, [])):
        with pytest.raises(ConfigError, match=r"2 engines need a store that processes share, and .* is private to one"):
            run(Job(trace, store, engines=2))


def test_counters_that_decide_exist() -> None:
    names = {field.name for field in fields(Counters)}
    assert names >= {*engine._FAILED, *engine._LATE}
