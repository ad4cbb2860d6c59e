"""``kvpool inspect`` and ``kvpool clear``."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from kvpool.cli.main import main
from kvpool.registry import URL, create_store
from kvpool.replay.engine import Job
from kvpool.replay.trace import Trace
from kvpool.store import Store
from kvpool.testing.faults import FaultyStore
from tests.replay.traces import made, write


class Odd(FaultyStore):
    """Shared, with keys that no kvpool made."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.capabilities = replace(self.capabilities, shared=True)

    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls(create_store("memory://"))

    async def scan(self, prefix: str = "") -> AsyncIterator[str]:
        for key in ("\x1b[31mred", "\udcff", "a\nb/c"):
            yield key


class Locked(FaultyStore):
    """Shared, cannot be opened, and cannot list anything."""

    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls(create_store("file:///nowhere"))

    async def __aenter__(self) -> Self:
        raise AssertionError("it was opened")


PROMPTS, _ = made(5)
UNIQUE = len({block for ids in PROMPTS for block in ids})


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A file store with the blocks of one trace in two sizes, so in two namespaces."""
    url = f"file://{tmp_path}/kv"
    trace = str(write(tmp_path / "day.jsonl", PROMPTS))
    assert main(["replay", trace, "--store", url]) == 0
    assert main(["replay", trace, "--store", url, "--block-bytes", "64"]) == 0
    return url


@pytest.fixture
def namespaces(tmp_path: Path, store: str) -> list[str]:
    trace = Trace.load(tmp_path / "day.jsonl")
    return [Job(trace, store, block_bytes=size).namespace.hex for size in (1024, 64)]


def inspected(store: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    capsys.readouterr()
    assert main(["inspect", store]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["namespace", "values", "by", "group.shard"]
    return {line[:32].rstrip(): line[32:].strip() for line in lines}


def is_empty(store: str, capsys: pytest.CaptureFixture[str]) -> bool:
    capsys.readouterr()
    return main(["inspect", store]) == 0 and capsys.readouterr().out == "Nothing is stored.\n"


def test_namespaces_and_their_values(store: str, namespaces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(store, capsys)
    assert found == {
        **dict.fromkeys(namespaces, f"{UNIQUE + 1}  0.0: {UNIQUE}, manifest: 1"),
        "in all": f"{2 * UNIQUE + 2}",
    }


def test_one_namespace_is_removed(store: str, namespaces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["clear", store, "--namespace", namespaces[0], "--yes"]) == 0
    assert capsys.readouterr().out == f"{UNIQUE + 1} values removed\n"
    assert inspected(store, capsys).keys() == {namespaces[1], "in all"}


def test_the_namespace_of_a_replay_is_the_one_in_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_EPOCH_LABEL", "blue")
    trace, store = write(tmp_path / "day.jsonl", PROMPTS), f"file://{tmp_path}/kv"
    assert main(["replay", str(trace), "--store", store]) == 0
    (shown,) = re.findall(r"namespace ([0-9a-f]{32})", capsys.readouterr().out)
    assert inspected(store, capsys).keys() == {shown, "in all"}


def test_clear_asks_and_takes_no_answer_for_no(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    questions: list[str] = []
    answers = iter(["", "n", "y"])

    def ask(question: str) -> str:
        questions.append(question)
        return next(answers)

    monkeypatch.setattr("builtins.input", ask)
    assert [main(["clear", store]) for _ in range(3)] == [1, 1, 0]
    assert questions[0] == f"Remove everything from {store}? [y/N] "
    assert is_empty(store, capsys)


def test_clear_needs_someone_to_ask(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert main(["clear", store]) == 2
    assert "--yes" in capsys.readouterr().err
    assert inspected(store, capsys)["in all"] == f"{2 * UNIQUE + 2}"


def test_no_answer_at_all_is_no(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(question: str) -> str:
        raise EOFError

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ended)
    assert main(["clear", store]) == 1
    assert capsys.readouterr().out.endswith("\nNothing was removed.\n")


def test_names_do_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "tests.cli.test_contents:Odd"]) == 0
    out = capsys.readouterr().out
    assert r"\x1b[31mred: 1, a\nb: 1, \udcff: 1" in out
    assert out.isascii()


@pytest.mark.parametrize("command", ["inspect", "clear"])
def test_a_private_store_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "memory://", *(["--yes"] if command == "clear" else [])]) == 2
    assert "private to the process" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["{}", "guarded://?store={}", "tiered://?near=memory://&shared={}"])
@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--namespace", "0" * 32], ["clear", "--yes"]])
def test_what_is_not_there_is_said_and_not_made(
    arguments: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path, words in (("typo", "typo: there is no such folder"), ("file", "file is a file, not a folder")):
        assert main([*arguments, kind.format(f"file://{tmp_path}/{path}")]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.endswith(f"{words}\n")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("arguments", [["inspect"], ["clear", "--yes"]])
def test_a_server_that_is_away_is_told_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "redis://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "kvpool: redis store 127.0.0.1:1: Connection refused\n"


def test_what_a_namespace_stands_for(
    store: str, namespaces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in (store, f"checked://?store=file://{tmp_path}/other"):
        trace = str(tmp_path / "day.jsonl")
        assert main(["replay", trace, "--store", url]) == 0
        capsys.readouterr()
        assert main(["inspect", url, "--namespace", namespaces[0]]) == 0
        facts = json.loads(capsys.readouterr().out)["facts"]
        assert facts == {"replay": Trace.load(trace).digest, "block_tokens": 512, "block_bytes": 1024}
        assert main(["inspect", url, "--namespace", "0" * 32]) == 1
        assert capsys.readouterr().err == "kvpool: this namespace has no manifest in the store\n"


def test_a_store_that_cannot_list_is_not_even_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "tests.cli.test_contents:Locked"]) == 2
    assert "Locked cannot list its keys; docs/inspect.md has other ways" in capsys.readouterr().err


def test_a_namespace_is_checked(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["clear", store, "--namespace", "../x", "--yes"])
    assert "is not a namespace" in capsys.readouterr().err
