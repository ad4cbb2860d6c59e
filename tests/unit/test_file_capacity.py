"""A file store with a capacity: the bound holds at every moment, for all processes together, killed ones included."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from kvpool.backends.file import FileStore
from kvpool.errors import ConfigError
from kvpool.registry import create_store
from kvpool.store import ABSENT, PRESENT, Status
from kvpool.testing.stores import get, put

pytestmark = pytest.mark.anyio

PROJECT = Path(__file__).parents[2]
HEADER = 40


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """No writer is at work below the root."""
    with (root / "=gate").open("a") as gate, (root / "=writers").open("a") as writers:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(writers, fcntl.LOCK_EX)
        yield


def values(root: Path) -> list[Path]:
    return list(root.rglob("=??/*"))


def total(root: Path) -> int:
    """Bytes of all value files."""
    return sum(path.stat().st_size for path in values(root))


def age(root: Path, name: str, seconds: float) -> None:
    (file,) = root.rglob(f"=??/{name}")
    then = time.time() - seconds
    os.utime(file, (then, then))


async def there(store: FileStore, keys: str) -> str:
    """Which of these one-letter keys are there, without using them."""
    found = {key async for key in store.scan()}
    return "".join(key for key in keys if key in found)


async def test_the_bound_holds_and_values_come_and_go(tmp_path: Path) -> None:
    capacity = 10_000
    async with FileStore(tmp_path, capacity=capacity) as store:
        most = 0
        for i in range(200):
            size = (i * 37) % 1500
            assert (await put(store, [(f"k{i}", bytes(size))])).ok.all()
            most = max(most, total(tmp_path))
            assert total(tmp_path) <= capacity
            assert (await get(store, [f"k{i}"], [size]))[0].ok.all(), "what was just stored is there"
        assert most > 0.8 * capacity


async def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    size = 1000 - HEADER
    async with FileStore(tmp_path, capacity=8000) as store:
        await put(store, [(key, bytes(size)) for key in "abcdefgh"])
        for seconds, key in enumerate("hgfedcba"):
            age(tmp_path, key, 10 * (seconds + 1))  # a was used longest ago
        assert (await store.exists(["a"])).tolist() == [PRESENT]  # a probe is a use: a load follows
        assert (await get(store, ["b"], [size]))[0].ok.all()  # and so is a load
        assert (await put(store, [("c", bytes(size))])).ok.all()  # and so is a put of what is there
        assert (await put(store, [("i", bytes(size))])).ok.all()
        assert await there(store, "abcdefghi") == "abcefghi"


async def test_without_a_capacity_nothing_is_touched(tmp_path: Path) -> None:
    async with FileStore(tmp_path) as store:
        await put(store, [("k", b"value")])
        age(tmp_path, "k", 100)
        (file,) = values(tmp_path)
        before = file.stat().st_mtime_ns
        await store.exists(["k"])
        await get(store, ["k"], [5])
        await put(store, [("k", b"value")])
        assert file.stat().st_mtime_ns == before
        assert not (tmp_path / "=gate").exists()


async def test_what_can_never_fit_is_rejected_and_evicts_nothing(tmp_path: Path) -> None:
    async with FileStore(tmp_path, capacity=1000) as store:
        await put(store, [("a", bytes(400))])
        results = await put(store, [("big", bytes(1000 - HEADER + 1)), ("b", bytes(400))])
        assert results.status.tolist() == [Status.REJECTED, Status.OK]
        assert "more than the capacity of 1000" in str(results.errors[0])
        assert await there(store, "ab") == "ab"
        assert (await put(store, [("c", bytes(1000 - HEADER))])).ok.all()
        assert await there(store, "abc") == "c"


async def test_what_is_deleted_makes_room(tmp_path: Path) -> None:
    async with FileStore(tmp_path, capacity=1000) as store:
        for _ in range(3):
            await put(store, [("a", bytes(400)), ("b", bytes(400))])
            assert await there(store, "ab") == "ab"
            await store.delete(["a"])
            await put(store, [("c", bytes(400))])
            assert await there(store, "abc") == "bc"
            assert await store.clear() == 2


@pytest.mark.parametrize("counter", [b"", b"\0" * 8, b"\xff" * 8, b"\x01"])
async def test_a_wrong_counter_is_put_right(tmp_path: Path, counter: bytes) -> None:
    """As after a crash of the machine, or when someone removed files by hand."""
    async with FileStore(tmp_path, capacity=5000) as store:
        await put(store, [(key, bytes(900)) for key in "abcde"])
    (tmp_path / "=gate").write_bytes(counter)
    async with FileStore(tmp_path, capacity=5000) as store:
        await put(store, [("f", bytes(900))])
        assert total(tmp_path) <= 5000
        assert len(await there(store, "abcdef")) == 5, "one made room, and no more"


async def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_bytes(bytes(50_000))
    async with FileStore(tmp_path, capacity=1000) as store:
        for key in "abcdef":
            assert (await put(store, [(key, bytes(400))])).ok.all()
    assert (tmp_path / "theirs").stat().st_size == 50_000


async def test_waiting_for_another_process_ends_at_the_deadline(tmp_path: Path) -> None:
    async with FileStore(tmp_path, capacity=5000) as store:
        await put(store, [("a", b"v")])
        with locked(tmp_path):
            late = await put(store, [("b", b"v")], deadline=anyio.current_time() + 0.05)
            assert late.status.tolist() == [Status.TIMED_OUT]
            with anyio.move_on_after(0.05) as scope:
                await put(store, [("b", b"v")])
            assert scope.cancelled_caught
            assert (await get(store, ["a"], [1]))[0].ok.all(), "readers do not wait"
        assert (await store.exists(["b"])).tolist() == [ABSENT]
        assert (await put(store, [("b", b"v")])).ok.all()


WORKER = """
    import sys, anyio
    from kvpool.backends.file import FileStore
    from kvpool.memory import Buffers
    root, number, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    async def main():
        async with FileStore(root, capacity=200_000) as store:
            print("ready", flush=True)
            for i in range(rounds):
                keys = [f"ns/0.0/{number}-{i}-{j}" for j in range(8)]
                values = [bytearray(bytes([number]) * 5000) for _ in keys]
                results = await store.put(keys, Buffers.of(*values))
                assert results.ok.all(), results.errors
    anyio.run(main)
"""


def start(root: Path, number: int, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(root), str(number), str(rounds)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_keep_one_bound_and_killed_ones_block_nobody(tmp_path: Path) -> None:
    workers = [start(tmp_path, 1, 50), start(tmp_path, 2, 50), start(tmp_path, 3, 10**6)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    seen: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            with locked(tmp_path):
                seen.append(total(tmp_path))

    looker = threading.Thread(target=look)
    looker.start()
    time.sleep(0.1)
    workers[2].send_signal(signal.SIGKILL)
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=60)
            assert (worker.returncode, errors) in ((0, ""), (-signal.SIGKILL, ""))
    finally:
        done.set()
        looker.join()
    assert seen
    assert max(seen) <= 200_000
    assert max(seen) > 100_000
    (counter,) = struct.unpack("<Q", (tmp_path / "=gate").read_bytes())
    assert counter >= total(tmp_path)

    async def go_on() -> None:
        async with FileStore(tmp_path, capacity=200_000) as store:
            assert (await put(store, [(f"new/{i}", bytes(5000)) for i in range(30)])).ok.all()
        assert total(tmp_path) <= 200_000

    anyio.run(go_on)


def test_by_url() -> None:
    assert isinstance(create_store("file:///nowhere?capacity=100GiB"), FileStore)
    with pytest.raises(ConfigError, match=r"capacity='0': .*such as 100GiB"):
        create_store("file:///nowhere?capacity=0")
