"""``kvpool doctor``: what it says of stores that are well, and of each way to be unwell."""

from __future__ import annotations

import json
import math
import os
import queue
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self, TypeVar

import pytest

from kvpool.backends import _file_look
from kvpool.backends.memory import MemoryStore
from kvpool.cli import doctor
from kvpool.cli.main import main
from kvpool.config import Config
from kvpool.memory import Buffers
from kvpool.store import Finding, Presence, Results
from tests.redis.server import RedisServer

T = TypeVar("T")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setattr(doctor, "_QUIET_S", 1000.0)  # however busy the machine is
    return Said(capsys)


class Said:
    """Runs the doctor; its exit code, and its lines without times."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, url: str) -> tuple[int, list[str]]:
        code = main(["doctor", url])
        out, err = self._capsys.readouterr()
        assert err == ""
        return code, [re.sub(r" in [\d.e+]+ ms$", "", line) for line in out.splitlines()]


WELL = [
    "ok    opened",
    "ok    put 16 values of 64 KiB",
    "ok    found them",
    "ok    got them",
    "ok    deleted them",
]


def test_a_store_that_is_well(tmp_path: Path, said: Said) -> None:
    url = f"file://{tmp_path}/kv?capacity=100MB"
    code, lines = said(url)
    assert (code, lines[0], lines[1:6], lines[-1]) == (0, url, WELL, "It can be used.")
    made = f"warn  file store {tmp_path}/kv: there is no such folder; it has been made just now"
    assert lines[6:8] == [made, "      is it the one that the engines use?"]
    assert " free of " in lines[8]
    assert made not in said(url)[1]
    assert not any("kvpool-doctor" in names for _, _, files in os.walk(tmp_path) for names in files)


def test_nothing_is_left_behind(tmp_path: Path, said: Said, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/kv"
    script = faults(tmp_path, kind="corrupt", op="get")
    for place in (url, f"kvpool.testing.faults:FaultyStore?store={url}&script={script}"):
        said(place)
        assert main(["inspect", url]) == 0
        assert capsys.readouterr().out == "Nothing is stored.\n"


def test_a_store_of_one_process(said: Said) -> None:
    code, lines = said("memory://")
    assert code == 0
    assert lines[6].startswith("warn  private to one process")


def faults(folder: Path, **fault: str | float) -> Path:
    path = folder / "faults.json"
    path.write_text(json.dumps([fault]))
    return path


@pytest.mark.parametrize(
    ("kind", "op", "words"),
    [
        ("flip", "get", "what came back is not what was put"),
        ("absent", "put", "a lookup does not find what was put, and only that: [0, 0,"),
        ("absent", "get", "got them: not so for 16 of 17 keys: ABSENT instead of OK"),
        ("corrupt", "get", "got them: not so for 17 of 17 keys: "),
        ("rejected", "put", "put 16 values of 64 KiB: not so for 16 of 16 keys: "),
        ("absent", "delete", "deleted them: not so for 16 of 17 keys: ABSENT instead of OK"),
        ("raise", "exists", "on purpose"),
    ],
)
def test_each_way_to_be_wrong_is_named(tmp_path: Path, said: Said, kind: str, op: str, words: str) -> None:
    script = faults(tmp_path, kind=kind, op=op)
    code, lines = said(f"kvpool.testing.faults:FaultyStore?store=memory://&script={script}")
    assert code == 1
    assert any(line.startswith("fail  ") and words in line for line in lines), lines
    assert lines[-1] == "It cannot be used as it is."


@pytest.mark.parametrize("kind", ["hang", "stuck"])
def test_a_store_that_does_not_answer(tmp_path: Path, said: Said, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CALL_S", 0.1)
    monkeypatch.setattr(doctor, "_ALL_S", 0.5)
    script = faults(tmp_path, kind=kind)
    code, lines = said(f"kvpool.testing.faults:FaultyStore?store=memory://&script={script}")
    assert code == 1
    words = "TIMED_OUT instead of OK" if kind == "hang" else "a call does not end within 0.5 s"
    assert any(words in line for line in lines), lines


class Slow(MemoryStore):
    """Holds up the loop in each call until somebody has been told."""

    told: ClassVar[queue.Queue[str]]

    async def __aenter__(self) -> Self:
        return self._wait(await super().__aenter__())

    async def __aexit__(self, *error: Any) -> None:
        await super().__aexit__(*error)
        self._wait(None)

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        return self._wait(await super().exists(keys, deadline=deadline))

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        return self._wait(await super().get_into(keys, into, deadline=deadline))

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        return self._wait(await super().put(keys, source, deadline=deadline))

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        return self._wait(await super().delete(keys, deadline=deadline))

    async def diagnose(self) -> Sequence[Finding]:
        return self._wait([])

    def missing(self) -> str:
        return self._wait("")

    def _wait(self, answer: T) -> T:
        self.told.get(timeout=20)
        return answer


def test_what_is_waited_for_is_told_at_once_and_until_when(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, say = queue.Queue[str](), doctor._say

    def telling(line: str) -> None:
        say(line)
        if line.startswith("wait"):
            told.put(line)

    monkeypatch.setattr(doctor, "_say", telling)
    monkeypatch.setattr(doctor, "_QUIET_S", 0.0)
    monkeypatch.setattr(doctor, "named_store", lambda _: (Config.load({}), Slow()))
    monkeypatch.setattr(Slow, "told", told, raising=False)
    assert main(["doctor", "memory://"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wait")]
    at = r"; given up at \d\d:\d\d:\d\d"
    waits = [f"wait  not yet {what}" for what in ("opened", "put 16 values of 64 KiB", "found them", "got them")]
    waits += [f"wait  not yet {what}" for what in ("deleted them", "told of its set-up", "closed")]
    assert lines[0] == "wait  not yet looked at its place", "nothing gives that up"
    for line, wait in zip(lines[1:], waits, strict=True):
        assert re.fullmatch(wait + at, line)


def test_nobody_reads_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told, failed = queue.Queue[str](), list[object]()

    def saying(line: str) -> None:
        if line.startswith("wait"):
            told.put(line)
            raise BrokenPipeError

    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(doctor, "_say", saying)
    monkeypatch.setattr(doctor, "_QUIET_S", 0.0)
    monkeypatch.setattr(doctor, "named_store", lambda _: (Config.load({}), Slow()))
    monkeypatch.setattr(Slow, "told", told, raising=False)
    assert main(["doctor", "memory://"]) == 0
    assert not failed


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/tmp/kv", "'/tmp/kv'...: not a URL. A folder is written file:// and its absolute path: file:///tmp/kv\n"),
        ("./kv", f"file://{os.getcwd()}/kv\n"),
        ("kv", "unknown store 'kv' (known: checked, "),
        ("kv", "; a folder is written file:///absolute/path; "),
        ("file:kv", "store 'file:kv': not a URL. Write file:///absolute/path; my_pkg.mod:Class names a class\n"),
        ("file:/tmp/kv", "'file'...: not a URL. Write file:///absolute/path\n"),
        ("redis:localhost", "store 'redis:localhost': not a URL. Write redis://...; "),
        (
            "localhost:6379",
            "'localhost'...: not a URL. A URL begins with a scheme. For a store, write redis://localhost:6379\n",
        ),
        ("redis.internal:6379/0?password=QZQ", "write redis://redis.internal:6379\n"),
        ("[::1]:6379", "write redis://[::1]:6379\n"),
        ("10.0.0.9:50051", "write mooncake://10.0.0.9:50051\n"),
        ("10.0.0.9:26379", "write redis+sentinel://10.0.0.9:26379/service\n"),
        ("kv-1:7000", "write redis://kv-1:7000 or mooncake://kv-1:7000\n"),
        ("10.0.0.9", "write redis://10.0.0.9 or mooncake://10.0.0.9\n"),
        ("a:1,b:2", "Write scheme://host/path?option=value or "),
        ("me:QZQ@h:6379", "'me'...: not a URL. Write scheme://host/path?option=value or "),
        ("no_such_module:Store", "PYTHONPATH=/the/folder"),
    ],
)
def test_how_a_url_is_written(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "config" not in err
    assert "QZQ" not in err


def test_a_file_in_place_of_the_folder(tmp_path: Path, said: Said) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        code, lines = said(f"file://{tmp_path}/{path}")
        assert code == 1
        assert lines[1].endswith(f": file store {tmp_path}/{path}: {tmp_path}/file is a file, not a folder")


def test_a_url_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "memory://?capcity=1"]) == 2
    assert "did you mean 'capacity'" in capsys.readouterr().err


def test_a_directory_that_could_be_better(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    root.chmod(0o777)
    _, lines = said(f"file://{root}")
    assert "warn  without a capacity values are kept until the disk is full" in lines
    assert "warn  others may write here, and a checksum does not tell whose value it is" in lines
    assert f"      chmod go-w {root}" in lines
    _, lines = said(f"file://{root}?capacity=900PiB")
    assert any(line.startswith("warn  the capacity of ") for line in lines)
    space = SimpleNamespace(f_frsize=1 << 10, f_blocks=1 << 20, f_bavail=1 << 10, f_files=1000, f_favail=10)
    monkeypatch.setattr(os, "statvfs", lambda _: space)
    monkeypatch.setattr(_file_look, "file_system", lambda _: "nfs4")
    code, lines = said(f"file://{root}?capacity=100MB")
    assert code == 0
    assert {
        "ok    nfs4, 1 MiB free of 1 GiB",
        "warn  nfs4 may hang when the network does, and a thread in it cannot be interrupted",
        "warn  only 0.1% of the space is free",
        "warn  the file system can take only 10 more files",
    } <= set(lines)


def test_the_file_system_of_a_path() -> None:
    assert _file_look.file_system("/proc/self/fd") == "proc"
    assert _file_look.file_system("/") != "proc"


def test_a_directory_that_cannot_be_used(said: Said) -> None:
    code, lines = said("file:///proc/nothing")
    assert code == 1
    assert lines[1:] == [
        "fail  put 16 values of 64 KiB: not so for 16 of 16 keys: file store /proc/nothing: No such file or directory",
        "It cannot be used as it is.",
    ]


def test_a_redis_server(said: Said) -> None:
    with RedisServer(maxmemory="100mb", maxmemory_policy="allkeys-lru") as server:
        code, lines = said(server.url)
        assert (code, lines[1:6]) == (0, WELL)
        assert any(line.endswith(f"on port {server.port}") for line in lines)
        assert any(
            line.endswith("of 100.00M of memory are in use; when it is full, allkeys-lru evicts") for line in lines
        )
        server.raw("CONFIG", "SET", "maxmemory", 0)
        server.raw("ACL", "SETUSER", "kv", "on", ">hush", "~kvpool:*", "+get", "+set", "+touch", "+unlink")
        code, lines = said(server.url)
        assert code == 0
        assert "warn  the server has no maxmemory, so it may take all memory of its machine" in lines
        code, lines = said(server.url.replace("://", "://kv:hush@"))
        assert code == 0
        assert lines[0] == server.url.replace("://", "://kv:***@")
        assert "ok    this user may not see the server's settings" in lines
        server.raw("ACL", "SETUSER", "kv", "-set")
        code, lines = said(server.url.replace("://", "://kv:hush@"))
        assert code == 1
        assert any("NOPERM" in line for line in lines)
    code, lines = said(server.url)
    assert code == 1
    (fail,) = lines[1:-1]  # one that is away has not been opened, and is told once
    assert fail.startswith("fail  put 16 values of 64 KiB: not so for 16 of 16 keys: ")
    assert fail.endswith(": Connection refused")


def test_both_tiers_are_looked_at(tmp_path: Path, said: Said) -> None:
    _, lines = said(f"tiered://?near=guarded://?store=file://{tmp_path}/a&shared=checked://?store=file://{tmp_path}/b")
    assert sum(" free of " in line for line in lines) == 2


def test_a_script_of_faults_that_is_not_there(tmp_path: Path, said: Said, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"kvpool.testing.faults:FaultyStore?store=memory://&script={tmp_path}/faults.json"
    assert main(["doctor", url]) == 2
    assert f"faults script {tmp_path}/faults.json: there is no such file" in capsys.readouterr().err
    faults(tmp_path, kind="failed", op="get", times=0)
    assert "ok    faults on purpose: 1 rule" in said(url)[1]
