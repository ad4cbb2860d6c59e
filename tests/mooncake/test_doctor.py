"""``kvpool doctor mooncake://...`` with real servers; what takes other hardware is in tests/unit."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.mooncake.servers import ROOT, Mooncake, free_port

HTTP = {"metrics_port": 9003}  # where a master answers by default


def doctor(url: str, **environment: str) -> tuple[int, list[str]]:
    """Exit code and lines. In a process of its own, as users run it: Mooncake reads its environment once."""
    run = subprocess.run(
        [sys.executable, "-m", "kvpool", "doctor", url],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MC_")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout.splitlines()


def test_a_cluster_that_is_well() -> None:
    with Mooncake(owners=2, **HTTP) as mooncake:
        code, lines = doctor(mooncake.url)
    assert code == 0
    assert lines[-1] == "It can be used."
    assert "ok    memory lent to the master: 2 segments, 0 of 128 MiB in use" in lines
    assert "ok    set up as 127.0.0.1, and it listens on all interfaces" in lines
    assert any(line.startswith("ok    mooncake-transfer-engine") for line in lines)
    assert "ok    no variable for Mooncake is set" in lines, "those that kvpool sets are its own business"
    assert not [line for line in lines if line.startswith(("warn", "fail"))]


def test_settings_and_variables_that_do_not_do_what_they_say() -> None:
    with Mooncake() as mooncake:
        code, lines = doctor(
            f"{mooncake.url}?replicas=3&tenant=a&protocol=rdma&segment=16MiB",
            MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER="16",
        )
    assert code == 0
    for words in (
        "replicas=3: Mooncake made 2",
        "tenant=a isolates nothing",
        "protocol=rdma is ignored",
        "memory is lent as 127.0.0.1, where only processes of this machine can reach it",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=16 is small",
    ):
        assert any(line.startswith("warn") and words in line for line in lines), (words, lines)
    assert any("its memory cannot be seen" in line for line in lines), "this master answers elsewhere"


def test_a_cluster_without_memory() -> None:
    with Mooncake(owners=0, **HTTP) as mooncake:
        code, lines = doctor(mooncake.url)
    assert code == 1
    assert "fail  no memory has been lent to the master, so nothing can be stored" in lines
    assert any("NO_AVAILABLE_HANDLE (-200)" in line for line in lines)


def test_no_master() -> None:
    address = f"127.0.0.1:{free_port()}"
    code, lines = doctor(f"mooncake://{address}")
    assert code == 1
    assert any(line.startswith("fail") and f"no master at {address}" in line for line in lines)


def test_something_that_is_no_master() -> None:
    with Mooncake(owners=0) as mooncake:
        code, lines = doctor(f"mooncake://127.0.0.1:{mooncake.master.http_port}?timeout_s=2")
    assert code == 1
    assert any("no mooncake_master" in line or "does not answer" in line for line in lines), lines


def test_a_frozen_master_does_not_hold_it_up() -> None:
    with Mooncake() as mooncake, mooncake.master.frozen():
        code, lines = doctor(f"{mooncake.url}?timeout_s=1")
    assert code == 1
    assert any("does not answer" in line for line in lines), lines
