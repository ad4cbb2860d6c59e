"""Several engines in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path

import pytest

from kvpool.errors import KVPoolError
from kvpool.replay.engine import Job
from kvpool.replay.processes import _Queue
from kvpool.replay.report import Report
from kvpool.replay.run import run
from kvpool.replay.trace import Trace
from tests.replay.traces import made, write

PROMPTS, HITS = made(400)
TIMEOUT_S = 30.0
LISTED = sum(map(len, PROMPTS))
UNIQUE = len({block for ids in PROMPTS for block in ids})


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(Trace.load(write(tmp_path / "trace.jsonl", PROMPTS)), f"file://{tmp_path}/kv", engines=2)


def test_two_engines_lose_nothing_but_what_overlaps(job: Job, tmp_path: Path) -> None:
    report = run(job)
    assert (report.complete, report.problem, report.wrong) == (True, "", 0)
    # Each block listed was loaded, saved, or there already: another engine had saved it since the lookup.
    assert report.already_stored is not None
    assert report.verified + report.counters["saved_chunks"] + report.already_stored == LISTED
    assert 0 <= report.already_stored <= HITS - report.verified
    assert report.counters["saved_chunks"] >= UNIQUE
    assert report.verified > HITS * 0.8
    assert report.counters["lookups"] == len(PROMPTS)
    # Every block is there, and whole.
    again = run(Job(job.trace, job.store))
    assert (again.verified, again.wrong) == (LISTED, 0)
    assert not active_children()


def act_once(when: int, act: Callable[[], None]) -> Callable[[Report], None]:
    def on_outcome(report: Report) -> None:
        if report.requests == when:
            act()

    return on_outcome


def test_an_engine_that_is_killed_ends_the_replay(job: Job) -> None:
    def kill() -> None:
        pid = next(p.pid for p in active_children() if p.name == "engine 2")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    report = run(job, act_once(5, kill))
    assert not report.complete
    assert report.wrong == 0
    assert report.problem == "engine 2 ended too early (exit code -9)"
    assert not active_children()


def die_after_one_request(queue: _Queue) -> None:
    assert queue.take() == 0
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_engine_that_is_killed_leaves_a_queue_that_works() -> None:
    queue = _Queue(3)
    process = multiprocessing.get_context("spawn").Process(target=die_after_one_request, args=(queue,))
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL
    assert [queue.take() for _ in range(3)] == [1, 2, None]
    queue.close()


def test_a_closed_queue_is_empty_for_all(tmp_path: Path) -> None:
    queue = _Queue(3)
    other = os.dup(queue._file.fileno())  # as an engine has it
    queue.close()
    queue.close()
    assert os.read(other, 8) == b""
    os.close(other)


def test_engines_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    # A pipe that each process holds open: it ends when the last of them does.
    reader, writer = os.pipe()
    root, trace = tmp_path / "kv", write(tmp_path / "t", PROMPTS, every_ms=60_000)
    command = [sys.executable, "-m", "kvpool", "replay", str(trace), "--store", f"file://{root}"]
    with subprocess.Popen([*command, "--engines", "2", "--speed", "1"], stdout=writer, stderr=writer) as parent:
        os.close(writer)
        end = time.monotonic() + TIMEOUT_S
        while not list(root.glob("**/0.0")) and time.monotonic() < end:
            time.sleep(0.05)
        assert list(root.glob("**/0.0")), "the engines are at work"
        parent.kill()
    assert select.select([reader], [], [], TIMEOUT_S)[0], "an engine lives on"
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_an_interrupt_lets_both_engines_finish_what_they_do(job: Job) -> None:
    report = run(job, act_once(5, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert 5 <= report.requests < len(PROMPTS)
    assert report.problem == "interrupted"
    assert report.wrong == 0
    assert not active_children()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_problem_of_one_engine_stops_the_other(job: Job, tmp_path: Path) -> None:
    root = tmp_path / "kv"

    def replace_root() -> None:
        root.rename(tmp_path / "gone")
        root.write_text("no directory")

    report = run(job, act_once(5, replace_root))
    assert not report.complete
    assert "is a file, not a folder" in report.problem
    assert not active_children()


def test_engines_that_cannot_start_say_why(job: Job, tmp_path: Path) -> None:
    broken = Job(job.trace, "tests.replay.stores:Locked", engines=2)
    with pytest.raises(KVPoolError, match="the key is missing"):
        run(broken)
    assert not active_children()


def test_with_a_speed_both_engines_keep_to_one_clock(tmp_path: Path) -> None:
    trace = Trace.load(write(tmp_path / "t", [[1], [1], [1], [1]], every_ms=1000))
    report = run(Job(trace, f"file://{tmp_path}/kv", engines=2, speed=10.0))
    assert (report.complete, report.verified, report.wrong) == (True, 3, 0)
    assert report.seconds >= 0.3
