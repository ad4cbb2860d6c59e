"""The examples that are scripts, run as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(examples: Path, example_environment: dict[str, str], tmp_path: Path) -> Run:
    """Runs a script in an empty directory, without a terminal."""

    def run_script(script: str, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(examples / script), *args],
            env=example_environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run_script


def test_minimal(run: Run) -> None:
    done = run("minimal.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "64 of 70 tokens are stored, 4 blocks were loaded\nequal: True\n"


def test_sync_engine(run: Run) -> None:
    done = run("sync_engine.py")
    assert (done.returncode, done.stderr) == (0, "")
    first, second, verdict = done.stdout.splitlines()
    assert first == "first engine: [0, 0, 0] of [1116, 1116, 1116] tokens loaded, all blocks free: True"
    assert second == "second engine: [1104, 1104, 1104] of [1116, 1116, 1116] tokens loaded, all blocks free: True"
    assert verdict == "answers equal: True"


def test_demo(run: Run) -> None:
    done = run("demo.py", "--tokens", "400", "--answer", "18")
    assert (done.returncode, done.stderr) == (0, "")
    out = done.stdout
    rows = {
        name: re.search(rf"^  {name} .*$", out, re.MULTILINE)
        for name in ("the same question", "a new question", "the first chat goes on", "another handbook")
    }
    for row in rows.values():
        assert row
        assert row[0].split()[-2:] == ["equal", "equal"]
    skipped = {name: int(re.search(r"(\d+) \(\d+ %\)", row[0])[1]) for name, row in rows.items() if row}  # type: ignore[index]
    assert skipped["another handbook"] == 0
    assert skipped["the same question"] > 400
    assert skipped["the first chat goes on"] > skipped["the same question"]  # the answer too
    assert "DIFFER" not in out
    assert "WRONG" not in out
    total = sum(skipped.values())
    assert re.search(rf"Process B did not compute {total} of \d+ prompt tokens", out)
    pids = re.findall(r"Process ([AB]) \(pid (\d+)\)", out)
    assert [name for name, _ in pids] == ["A", "B"]
    assert pids[0][1] != pids[1][1]
    saved = re.search(r"It saved (\d+) blocks", out)
    objects = re.search(r"^  [0-9a-f]{32} +(\d+) +", out, re.MULTILINE)
    assert saved
    assert objects
    assert int(objects[1]) >= int(saved[1]) > 25


def test_demo_fails_when_nothing_is_shared(run: Run) -> None:
    done = run("demo.py", "--tokens", "200", "--answer", "1", "--store", "memory://")
    assert done.returncode == 1
    assert "WRONG: the same question: 0 tokens were loaded" in done.stdout


def test_demo_tells_a_store_that_is_away_from_one_that_cannot_be_shared(run: Run) -> None:
    done = run("demo.py", "--tokens", "200", "--answer", "1", "--store", "redis://u:hush@127.0.0.1:1")
    assert done.returncode == 1
    assert "hush" not in done.stdout + done.stderr
    assert "WRONG: the store does not work for process A: lookup_failed 2" in done.stdout
    assert "Process B" not in done.stdout
    assert "memory://" not in done.stdout


@pytest.mark.parametrize(
    ("store", "message"),
    [("fil:///x", "unknown store 'fil'; did you mean 'file'?"), ("file://x", "such as file:///var/cache/kv")],
)
def test_demo_says_what_is_wrong_with_its_store(run: Run, store: str, message: str) -> None:
    done = run("demo.py", "--tokens", "200", "--store", store)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
