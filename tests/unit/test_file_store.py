"""FileStore beyond the contract: what is on disk, hostile and broken directories, many processes, killed writers."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from kvpool.backends import _file_tree
from kvpool.backends._file_format import place_of
from kvpool.backends.file import FileStore
from kvpool.errors import ConfigError, StoreClosed, StoreError
from kvpool.memory import Buffers
from kvpool.registry import create_store
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Status
from kvpool.testing.stores import get, put, value_of

pytestmark = pytest.mark.anyio

PROJECT = Path(__file__).parents[2]


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if not path.is_dir()]


def the_file(root: Path, name: str) -> Path:
    (found,) = [path for path in files(root) if path.name == name]
    return found


@pytest.fixture(params=["unnamed", "named"])
def temporary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a new file begins: without a name (O_TMPFILE), or with one where the file system has no such files."""
    if request.param == "named":
        monkeypatch.setattr(_file_tree, "_O_TMPFILE", 0)
    return str(request.param)


# ---- what is on disk


async def test_files_and_folders_are_for_their_owner_only(tmp_path: Path, temporary: str) -> None:
    root = tmp_path / "a" / "kv"
    async with FileStore(root) as store:
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        await put(store, [("ns/0.0/k", b"value")])
        (file,) = files(root)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.relative_to(root).parts[:2] == ("ns", "0.0")
        assert {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_dir()} == {0o700}


@pytest.mark.parametrize("most", [1, 7, 1000])
async def test_the_kernel_may_move_less_than_asked(tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def some(move: Callable[..., int]) -> Callable[..., int]:
        def moved(fd: int, views: Sequence[Any], offset: int) -> int:
            return move(fd, [memoryview(views[0])[:most]], offset)

        return moved

    monkeypatch.setattr(os, "preadv", some(os.preadv))
    monkeypatch.setattr(os, "pwritev", some(os.pwritev))
    value = value_of("k", 300)
    async with FileStore(tmp_path) as store:
        assert (await put(store, [("k", value)])).ok.all()
        assert the_file(tmp_path, "k").read_bytes()[40:] == value
        assert (await get(store, ["k"], [300]))[1] == [value]
        assert (await get(store, ["k"], [299]))[0].status.tolist() == [Status.CORRUPT]


async def test_a_damaged_file_is_removed(tmp_path: Path) -> None:
    async with FileStore(tmp_path) as store:
        for damage in (b"", b"x" * 39, b"x" * 45, None):
            await put(store, [("k", b"value")])
            file = the_file(tmp_path, "k")
            file.write_bytes(file.read_bytes()[:-1] + b"X" if damage is None else damage)
            results, _ = await get(store, ["k"], [5])
            assert results.status.tolist() == [Status.CORRUPT]
            assert "k: the " in str(results.errors[0])
            assert files(tmp_path) == []
            assert (await get(store, ["k"], [5]))[0].status.tolist() == [Status.ABSENT]


async def test_what_a_power_loss_leaves_is_absent_and_replaced(tmp_path: Path) -> None:
    async with FileStore(tmp_path) as store:
        await put(store, [("k", b"value")])
        the_file(tmp_path, "k").write_bytes(b"")
        assert (await store.exists(["k"])).tolist() == [ABSENT]
        results = await put(store, [("k", b"value")])
        assert results.nbytes.tolist() == [5]
        assert (await get(store, ["k"], [5]))[1] == [b"value"]


async def test_a_put_of_what_is_there_moves_nothing(tmp_path: Path) -> None:
    async with FileStore(tmp_path) as store:
        await put(store, [("k", b"value")])
        results = await put(store, [("k", b"value"), ("n", b"new")])
        assert (results.ok.tolist(), results.nbytes.tolist()) == ([True, True], [0, 3])


async def test_strange_files_are_not_listed(tmp_path: Path) -> None:
    async with FileStore(tmp_path) as store:
        await put(store, [("ns/k", b"v")])
        for strange in ("file", "ns/file", "=tmp/file", "=zz/file"):
            (tmp_path / strange).parent.mkdir(exist_ok=True)
            (tmp_path / strange).write_text("strange")
        assert [key async for key in store.scan()] == ["ns/k"]
        assert await store.clear() == 1
        assert (tmp_path / "ns/file").exists()


ODD = [b"bad name", b"\xff\xfe", b"\xc3\xa9", b"\x1b[31m", b"new\nline", b"%", b"%00", b"%61", b"other-fan"]


@pytest.mark.parametrize("name", ODD)
async def test_a_file_that_is_no_keys_is_left_alone(tmp_path: Path, name: bytes) -> None:
    async with FileStore(tmp_path, capacity=150) as store:
        await put(store, [("ns/k", b"v" * 60)])
        fan = the_file(tmp_path, "k").parent
        (fan / os.fsdecode(name)).write_bytes(b"strange" * 100)
        assert [key async for key in store.scan()] == ["ns/k"]
    async with FileStore(tmp_path, capacity=150) as store:  # counts anew: 100 bytes are there, 100 more make k go
        assert (await put(store, [("ns/n", b"v" * 60)])).ok.all()
        assert [key async for key in store.scan()] == ["ns/n"]
        assert await store.clear() == 1
    assert os.listdir(os.fsencode(fan)) == [name]


async def test_folders_deeper_than_any_key_are_passed_over(tmp_path: Path) -> None:
    deepest = "/" * 512
    async with FileStore(tmp_path) as store:
        await put(store, [("ns/k", b"v"), (deepest, b"v")])
        fd = os.open(tmp_path, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("a", dir_fd=fd)
            above, fd = fd, os.open("a", os.O_RDONLY, dir_fd=fd)
            os.close(above)
        os.close(fd)
        assert sorted([key async for key in store.scan()]) == [deepest, "ns/k"]
        assert await store.clear() == 2
        assert not (tmp_path / "ns").exists()
    await anyio.run_process(["rm", "-rf", str(tmp_path / "a")])  # what pytest cannot


# ---- hostile directories


async def test_links_are_not_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "kv"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    async with FileStore(root) as store:
        await put(store, [("ns/k", b"value"), ("other/k", b"value")])
        fan = the_file(root / "ns", "k").parent
        fan.rename(outside / fan.name)
        fan.symlink_to(outside / fan.name)
        (root / "away").symlink_to(outside)
        before = sorted(files(outside))
        keys = ["ns/k", "away/k", "other/k"]
        results, memory = await get(store, keys, [5] * 3)
        assert results.status.tolist() == [Status.FAILED, Status.FAILED, Status.OK]
        assert memory[2] == b"value"
        assert (await store.delete(keys[:2])).status.tolist() == [Status.FAILED] * 2
        assert (await put(store, [(k, b"value") for k in keys[1:]])).status.tolist() == [Status.FAILED, Status.OK]
        assert (await store.exists(["away/k", "ns/k"])).tolist() == [UNKNOWN, UNKNOWN]
        assert await store.clear() == 1, "only other/k is below the root"
        assert sorted(files(outside)) == before


async def test_a_link_in_place_of_a_fan_loses_no_put(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "kv"
    async with FileStore(root, capacity=1 << 20) as store:
        await put(store, [("ns/k", b"value")])
        fan = the_file(root, "k").parent
        fan.rename(outside)
        fan.symlink_to(outside)
        os.utime(outside / "k", (1, 1))
        assert (await store.exists(["ns/k"])).tolist() == [UNKNOWN]
        assert (await put(store, [("ns/k", b"value")])).status.tolist() == [Status.FAILED]
        assert (outside / "k").stat().st_mtime == 1


async def test_a_link_in_place_of_a_value_is_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"p" * 100)
    async with FileStore(tmp_path / "kv") as store:
        await put(store, [("k", b"value")])
        file = the_file(tmp_path / "kv", "k")
        file.unlink()
        file.symlink_to(precious)
        assert (await store.exists(["k"])).tolist() == [ABSENT]
        assert (await get(store, ["k"], [5]))[0].status.tolist() == [Status.FAILED]
        assert (await put(store, [("k", b"value")])).ok.all()
        assert (await get(store, ["k"], [5]))[1] == [b"value"]
        assert precious.read_bytes() == b"p" * 100


async def test_what_is_no_file_does_not_hang_us(tmp_path: Path) -> None:
    async with FileStore(tmp_path) as store:
        await put(store, [("fifo", b"value"), ("folder", b"value"), ("good", b"value")])
        fifo, folder = the_file(tmp_path, "fifo"), the_file(tmp_path, "folder")
        fifo.unlink()
        os.mkfifo(fifo)
        folder.unlink()
        folder.mkdir()
        with anyio.fail_after(10):
            results, _ = await get(store, ["fifo", "folder", "good"], [5] * 3)
            assert results.status.tolist() == [Status.FAILED, Status.FAILED, Status.OK]
            assert (await store.exists(["fifo", "folder"])).tolist() == [ABSENT, ABSENT]
            results = await put(store, [("fifo", b"value"), ("folder", b"value")])
            assert results.status.tolist() == [Status.OK, Status.FAILED]
            assert (await get(store, ["fifo"], [5]))[1] == [b"value"]


async def test_no_key_is_a_failure_of_that_key(tmp_path: Path) -> None:
    async with FileStore(tmp_path) as store:
        results = await put(store, [("a b", b"1"), ("good", b"2"), ("", b"3")])
        assert results.status.tolist() == [Status.FAILED, Status.OK, Status.FAILED]
        assert "'a b' is no key" in str(results.errors[0])
        assert (await store.exists(["a b", "good"])).tolist() == [UNKNOWN, PRESENT]
        assert (await get(store, ["a b"], [1]))[0].status.tolist() == [Status.FAILED]


async def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "disk")
    async with FileStore(tmp_path / "kv") as store:
        assert (await put(store, [("k", b"v")])).ok.all()
        assert len(files(tmp_path / "disk")) == 1


# ---- broken directories


async def all_fail(store: FileStore, status: Status) -> None:
    results = await put(store, [("k", b"v"), ("n", b"v")])
    assert results.status.tolist() == [Status.FAILED] * 2
    assert str(store._root) in str(results.errors[0])
    assert (await get(store, ["k", "n"], [1, 1]))[0].status.tolist() == [status] * 2
    assert (await store.delete(["k", "n"])).status.tolist() == [status] * 2


async def test_a_root_that_is_a_file_fails_each_key_and_heals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "kv"
    root.write_text("not a folder")
    async with FileStore(root) as store:
        assert f"{root} is a file, not a folder; values are computed" in caplog.text
        await all_fail(store, Status.FAILED)
        assert (await store.exists(["k"])).tolist() == [UNKNOWN]
        with pytest.raises(StoreError, match="is a file, not a folder"):
            await store.clear()
        with pytest.raises(StoreError, match="is a file, not a folder"):
            [key async for key in store.scan()]
        root.unlink()
        assert (await get(store, ["k"], [1]))[0].status.tolist() == [Status.ABSENT]
        assert [key async for key in store.scan()] == []
        assert (await put(store, [("k", b"v")])).ok.all()
        assert (await get(store, ["k"], [1]))[1] == [b"v"]


async def test_a_root_that_goes_and_comes_back(tmp_path: Path, temporary: str) -> None:
    root, away = tmp_path / "kv", tmp_path / "away"
    async with FileStore(root) as store:
        await put(store, [("ns/k", b"v")])
        root.rename(away)
        assert (await store.exists(["ns/k"])).tolist() == [ABSENT]
        assert (await get(store, ["ns/k"], [1]))[0].status.tolist() == [Status.ABSENT]
        assert (await store.delete(["ns/k"])).status.tolist() == [Status.ABSENT]
        away.rename(root)
        assert (await get(store, ["ns/k"], [1]))[1] == [b"v"]
        root.rename(away)
        assert (await put(store, [("ns/k", b"w")])).ok.all(), "a missing root is made again"
        assert (await get(store, ["ns/k"], [1]))[1] == [b"w"]


async def test_one_bad_folder_fails_only_its_keys(tmp_path: Path) -> None:
    async with FileStore(tmp_path) as store:
        await put(store, [("good/k", b"v")])
        (tmp_path / "bad").write_text("")
        results = await put(store, [("bad/k", b"v"), ("good/n", b"v")])
        assert results.status.tolist() == [Status.FAILED, Status.OK]
        assert (await get(store, ["good/k", "bad/k", "good/n"], [1] * 3))[0].ok.tolist() == [True, False, True]


def as_another_user(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process without root's rights; its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_unreadable_root_is_a_miss_or_a_failure(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    for folder in [tmp_path, *tmp_path.parents]:  # the other user must get as far as the root
        if folder.owner() == Path.home().owner() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
        if folder == Path("/tmp"):
            break
    (root / "ns").mkdir(parents=True)
    root.chmod(0o000)

    async def main() -> None:
        async with FileStore(root) as store:
            await all_fail(store, Status.FAILED)
            assert (await store.exists(["k"])).tolist() == [UNKNOWN]
            with pytest.raises(StoreError, match="Permission denied"):
                [key async for key in store.scan()]

    try:
        assert as_another_user(lambda: anyio.run(main)) == 0
        root.chmod(0o555)

        async def read_only() -> None:
            async with FileStore(root) as store:
                results = await put(store, [("k", b"v")])
                assert results.status.tolist() == [Status.FAILED]
                assert "Permission denied" in str(results.errors[0])
                assert (await get(store, ["k"], [1]))[0].status.tolist() == [Status.ABSENT]

        assert as_another_user(lambda: anyio.run(read_only)) == 0
    finally:
        root.chmod(0o700)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
async def test_a_full_disk_rejects(tmp_path: Path, code: int, temporary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev
    async with FileStore(tmp_path) as store:

        def full(fd: int, views: Sequence[Any], offset: int) -> int:
            if offset or len(views) == 1:
                raise OSError(code, os.strerror(code))
            return write(fd, [memoryview(views[0])], offset)

        monkeypatch.setattr(os, "pwritev", full)
        results = await put(store, [("a", b"value"), ("b", b"value")])
        assert results.status.tolist() == [Status.REJECTED] * 2
        assert os.strerror(code) in str(results.errors[0])
        assert files(tmp_path) == []
        monkeypatch.setattr(os, "pwritev", write)
        assert (await put(store, [("a", b"value")])).ok.all()


async def test_folders_that_vanish_under_a_writer_are_made_again(tmp_path: Path, temporary: str) -> None:
    """``clear`` removes empty folders while others write into them."""
    async with FileStore(tmp_path) as store, FileStore(tmp_path) as other:
        done = False

        async def clear() -> None:
            while not done:
                await other.clear()

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(clear)
                for i in range(60):
                    assert (await put(store, [(f"a/b/c/{i}", b"v"), (f"{i}/x", b"v")])).ok.all()
                done = True


# ---- time


class Watched:
    """Counts the files that a put begins, and does ``at_five`` in the thread when it comes to the fifth."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_five: Callable[[], object]) -> None:
        self.begun = 0
        write = _file_tree.Tree.write

        def watched(tree: _file_tree.Tree, key: str, pieces: Sequence[memoryview]) -> bool:
            self.begun += 1
            if self.begun == 5:
                at_five()
            return write(tree, key, pieces)

        monkeypatch.setattr(_file_tree.Tree, "write", watched)


MANY = [(f"k{i:03}", b"v") for i in range(200)]


async def test_a_batch_is_one_hop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hops = 0
    run_sync = anyio.to_thread.run_sync

    async def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal hops
        hops += 1
        return await run_sync(*args, **kwargs)

    async with FileStore(tmp_path) as store:
        monkeypatch.setattr(anyio.to_thread, "run_sync", counted)
        items = [(f"k{i}", b"v") for i in range(100)]
        await put(store, items)
        await get(store, [k for k, _ in items], [1] * 100)
        await store.exists([k for k, _ in items])
        await store.delete([k for k, _ in items])
    assert hops == 4


async def test_system_calls_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            calls[call.__name__] += 1
            return call(*args, **options)

        return count

    for call in (os.open, os.close, os.stat, os.fstat, os.preadv, os.pwritev, os.link):
        monkeypatch.setattr(os, call.__name__, counted(call))
    keys = [f"ns/0.0/{i:064x}" for i in range(8000)]  # 31 a directory
    fans = len({place_of(key).fan for key in keys})
    async with FileStore(tmp_path) as store:
        await put(store, [(key, b"value") for key in keys])
        calls.clear()
        assert (await store.exists(keys)).all()
        assert calls == {"fstat": fans, "open": fans + 3, "close": fans + 3}, "the root, two parts of the name; fans"
        calls.clear()
        assert (await store.exists(keys[:500])).all()
        assert calls["stat"] == 500
        assert calls["open"] == calls["close"] <= fans + 3
        calls.clear()
        assert (await get(store, keys[:10], [5] * 10))[0].ok.all()
        assert (calls["preadv"], calls["stat"], calls["fstat"]) == (10, 0, 0)
        assert calls["open"] == calls["close"] == 2 * 10 + 3
        calls.clear()
        assert (await put(store, [(key + "x", b"value") for key in keys[:10]])).ok.all()
        assert (calls["pwritev"], calls["link"], calls["stat"]) == (10, 10, 10)


async def test_the_deadline_is_looked_at_between_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def until_late() -> None:
        with contextlib.suppress(BaseException):  # the cancellation, which the file at hand does not see
            while True:
                anyio.from_thread.check_cancelled()
                time.sleep(0.001)

    watched = Watched(monkeypatch, until_late)
    async with FileStore(tmp_path) as store:
        results = await put(store, MANY, deadline=anyio.current_time() + 0.5)
        done = int(results.ok.sum())
        assert results.status.tolist() == [Status.OK] * done + [Status.TIMED_OUT] * (200 - done)
        assert len(files(tmp_path)) == watched.begun == done <= 5


async def test_a_cancelled_batch_ends_after_the_file_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FileStore(tmp_path) as store:
        scope = anyio.CancelScope()
        watched = Watched(monkeypatch, lambda: anyio.from_thread.run_sync(scope.cancel))
        with scope:
            await put(store, MANY)
        assert scope.cancelled_caught
        assert watched.begun == len(files(tmp_path)) == 5


async def test_closing_ends_a_batch_after_the_file_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[bool] = []
    at_five = anyio.Event()

    def wait_for_close() -> None:
        anyio.from_thread.run_sync(at_five.set)
        while not store._life.closed:
            time.sleep(0.001)

    watched = Watched(monkeypatch, wait_for_close)
    async with anyio.create_task_group() as tasks:
        async with FileStore(tmp_path) as store:

            async def work() -> None:
                with pytest.raises(StoreClosed):
                    await put(store, MANY)
                raised.append(True)

            tasks.start_soon(work)
            await at_five.wait()
        assert watched.begun == 5
    assert raised == [True]


async def test_a_call_waits_for_a_thread_no_longer_than_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    go_on, at_five = threading.Event(), anyio.Event()

    def wait() -> None:
        anyio.from_thread.run_sync(at_five.set)
        assert go_on.wait(timeout=30)

    Watched(monkeypatch, wait)
    async with FileStore(tmp_path, threads=1) as store, anyio.create_task_group() as tasks:

        async def work() -> None:
            await put(store, MANY)
            order.append("slow")

        tasks.start_soon(work)
        await at_five.wait()
        results, _ = await get(store, ["a"], [1], deadline=anyio.current_time() + 0.05)
        assert results.status.tolist() == [Status.TIMED_OUT]
        assert (await store.exists(["a"])).tolist() == [ABSENT], "a lookup does not wait for values"
        order.append("late")
        go_on.set()
    assert order == ["late", "slow"]


# ---- other processes

WORKER = """
    import sys, anyio
    from kvpool.backends import _file_tree
    from kvpool.backends.file import FileStore
    from kvpool.memory import Buffers
    root, number, rounds, size, named = sys.argv[1], *map(int, sys.argv[2:])
    if named:
        _file_tree._O_TMPFILE = 0
    async def main():
        async with FileStore(root) as store:
            print("ready", flush=True)
            for i in range(rounds):
                keys = [f"shared/{(i * 7 + j) % 60}" for j in range(8)]
                values = [bytearray(bytes([number]) * size) for _ in keys]
                results = await store.put(keys, Buffers.of(*values))
                assert results.ok.all(), results.errors
                found = [bytearray(size) for _ in keys]
                results = await store.get_into(keys, Buffers.of(*found))
                assert all(s in (0, 1) for s in results.status), (results.status, results.errors)
                for ok, value in zip(results.ok, found):
                    assert not ok or (value == value[:1] * size and value[0]), "mixed"
                if i % 5 == number % 5:
                    await store.delete(keys[:2])
    anyio.run(main)
"""


def start(root: Path, number: int, rounds: int, size: int, named: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(root), *map(str, (number, rounds, size, int(named)))]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_many_processes_share_one_directory(tmp_path: Path, temporary: str) -> None:
    workers = [start(tmp_path, n + 1, 60, 30_000, temporary == "named") for n in range(3)]
    for worker in workers:
        _, errors = worker.communicate(timeout=60)
        assert (worker.returncode, errors) == (0, "")


def test_writers_killed_at_any_moment_leave_nothing(tmp_path: Path, temporary: str) -> None:
    size = 1 << 20
    workers = [start(tmp_path, n + 1, 10**6, size, temporary == "named") for n in range(3)]
    for n, worker in enumerate(workers):
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        time.sleep(0.05 + 0.03 * n)
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=30)

    async def look() -> None:
        async with FileStore(tmp_path) as store:
            keys = [f"shared/{i}" for i in range(60)]
            there = (await store.exists(keys)) == PRESENT
            assert there.any()
            results, memory = await get(store, keys, [size] * 60)
            assert (results.ok == there).all(), "a value was there but not whole"
            assert all(m == m[:1] * size for m, ok in zip(memory, results.ok, strict=True) if ok)
            assert len(files(tmp_path)) == int(there.sum()), "leftovers"

    anyio.run(look)


async def test_opening_removes_leftovers_of_the_dead_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_file_tree, "_O_TMPFILE", 0)
    link = os.link
    async with FileStore(tmp_path) as store:
        (tmp_path / "=tmp").mkdir(mode=0o700)
        (tmp_path / "=tmp" / "dead").write_bytes(b"half")
        seen: list[set[str]] = []

        def open_another(*args: Any, **kwargs: Any) -> None:
            # Just before this writer links its file into place, another process opens the store.
            with _file_tree.Tree(str(tmp_path)) as tree:
                tree.remove_leftovers()
            seen.append({path.name for path in files(tmp_path / "=tmp")})
            link(*args, **kwargs)

        monkeypatch.setattr(os, "link", open_another)
        assert (await put(store, [("k", b"value")])).ok.all()
        assert len(seen[0]) == 1
        assert "dead" not in seen[0]
        assert (await get(store, ["k"], [5]))[1] == [b"value"]
        assert list((tmp_path / "=tmp").iterdir()) == []


# ---- set up


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://", "absolute path"),
        ("file:///", "absolute path"),
        ("file://relative/path", "absolute path"),
        ("file:///kv?threads=0", "threads='0'.*1 to 64"),
        ("file:///kv?thread=2", "did you mean 'threads'"),
    ],
)
def test_bad_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_store(url)


def test_a_relative_root_is_refused() -> None:
    with pytest.raises(ConfigError, match="'kv' is not an absolute path"):
        FileStore("kv")


async def test_pieces_of_a_device_are_refused(tmp_path: Path) -> None:
    from kvpool.errors import LayoutError
    from kvpool.memory import Region

    async with FileStore(tmp_path) as store:
        with pytest.raises(LayoutError, match="cuda:0"):
            await store.put(["k"], Buffers.single(Region(4096, 10, None, "cuda:0"), [0], 10))
