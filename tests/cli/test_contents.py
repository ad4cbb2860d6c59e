"""``kvpool inspect`` and ``kvpool clear``."""

from __future__ import annotations

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
    return {line[:32].rstrip(): line[32:].strip() for line in capsys.readouterr().out.splitlines()}


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
    assert inspected(store, capsys) == {"in all": "0"}


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


def test_a_namespace_is_checked(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["clear", store, "--namespace", "../x", "--yes"])
    assert "is not a namespace" in capsys.readouterr().err
