"""The ground that the other tests stand on: a network, servers and a pytest of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.mooncake.namespace import INSIDE
from tests.mooncake.servers import Mooncake

ROOT = Path(__file__).parents[2]
MAY = subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0


def test_there_is_only_a_loopback_interface() -> None:
    assert os.environ[INSIDE] == "1"
    if MAY:
        routes = Path("/proc/net/route").read_text().splitlines()[1:]
        assert routes == [], "nothing outside can be reached"
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()[:2]).close()


def test_a_value_stays_with_its_owner_when_the_master_is_frozen_and_goes_when_it_is_killed() -> None:
    with Mooncake() as mooncake:
        [owner] = mooncake.owners
        assert owner.raw("put", "key", b"value") == 0
        with mooncake.master.frozen():
            pass
        assert owner.raw("get", "key") == b"value"
        assert mooncake.master.metrics()["master_total_capacity_bytes"] == owner.memory
        mooncake.master.kill()
        mooncake.master.start()
        other = mooncake.add_owner()
        assert other.raw("get", "key") == b""


CASES = """
import ctypes, os, time
import pytest

@pytest.fixture(scope="module")
def numbers():
    return []

def test_good(numbers):
    numbers.append(1)

def test_bad():
    print("said before")
    assert os.getpid() == 0, "a reason"

def test_same_process(numbers):
    assert numbers == [1]

def test_crash():
    ctypes.string_at(0)

@pytest.mark.parametrize("word", ["a b", "x/y[z]"])
def test_after_the_crash(numbers, word):
    assert numbers == [], "another process"

@pytest.mark.timeout(1)
def test_slow():
    time.sleep(60)

def test_skipped():
    pytest.skip("for a reason")
"""


def test_a_test_that_fails_crashes_or_hangs_is_one_failure_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\nfrom tests.mooncake.apart import install\n"
        "def pytest_configure(config):\n    install(config, Path(__file__).parent)\n"
    )
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 60\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", str(tmp_path)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("TESTS_MOONCAKE_")}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    for line in (
        "PASSED test_cases.py::test_good",
        "FAILED test_cases.py::test_bad - AssertionError: a reason",
        "PASSED test_cases.py::test_same_process",
        "FAILED test_cases.py::test_crash",
        "PASSED test_cases.py::test_after_the_crash[a b]",
        "PASSED test_cases.py::test_after_the_crash[x/y[z]]",
        "FAILED test_cases.py::test_slow",
        "SKIPPED",
    ):
        assert line in run.stdout, run.stdout
    assert "said before" in run.stdout
    assert "test_crash ended its pytest (exit code -11)" in run.stdout
    assert "4 passed, 1 skipped" in run.stdout.replace("3 failed, ", "")
    assert run.returncode == 1
