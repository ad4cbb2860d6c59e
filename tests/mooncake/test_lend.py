"""``kvpool lend mooncake://...`` with a real master: memory comes, stays, and is taken back."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpool.registry import create_store
from kvpool.testing.stores import put
from tests.mooncake.servers import ROOT, Mooncake
from tests.process import die_with_parent

MEMORY = 64 << 20


@contextmanager
def lending(url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "kvpool", "lend", f"{url}?segment={MEMORY}"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


@pytest.mark.anyio
@pytest.mark.parametrize("received", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_takes_the_memory_back(received: signal.Signals) -> None:
    with Mooncake(owners=0) as mooncake, lending(mooncake.url) as process:
        assert line(process) == f"lending 0.0625 GiB to {mooncake.url}?segment={MEMORY}"
        assert mooncake.master.metrics()["master_total_capacity_bytes"] == MEMORY
        async with create_store(mooncake.url) as store:
            assert (await put(store, [("k", b"value")])).ok.all()
        process.send_signal(received)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in err, "Mooncake's own words may be there"
        assert out == f"{received.name}: taking the memory back\nThe memory is taken back.\n"
        assert mooncake.master.metrics()["master_total_capacity_bytes"] == 0


def test_it_waits_for_a_master() -> None:
    with Mooncake(owners=0) as mooncake:
        mooncake.master.kill()
        with lending(mooncake.url) as process:
            assert process.stderr is not None
            while "the store does not answer; going on to try" not in process.stderr.readline():
                assert process.poll() is None
            mooncake.master.start()
            assert line(process).startswith("lending 0.0625 GiB to ")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
