"""What a log says of a thing that fails, in times of its own: each change, never a flood, no secrets."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import StoreError
from kvpool.trouble import EVERY_S, Trouble, reason


class Said(logging.Handler):
    """The lines of one logger of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.logger = logging.Logger("test")
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def trouble(self) -> Trouble:
        return Trouble(self.logger, "store x", "it is computed")


def test_one_line_when_it_fails_and_one_when_it_serves_again() -> None:
    said = Said()
    trouble = said.trouble()
    assert trouble.well
    for i in range(30):
        trouble.bad(100 + i, "lookup", "refused")
    assert said.lines == ["store x: 1 lookup failed: refused; it is computed"]
    assert not trouble.well
    trouble.good(134, "lookup")
    assert said.lines[1:] == ["store x: serves again after 34 s, in which 30 lookups failed"]
    assert trouble.well
    trouble.close(135)
    assert len(said.lines) == 2


def test_a_summary_a_minute_while_it_lasts() -> None:
    said = Said()
    trouble = said.trouble()
    for i in range(181):
        trouble.bad(i, "save" if i % 10 else "lookup", f"reason {i}")
    assert len(said.lines) == 4
    assert said.lines[1] == "store x: 54 saves, 6 lookups failed in 59 s, the last: reason 60; it is computed"
    trouble.close(200)
    assert len(said.lines) == 4, "all had been said"


def test_it_is_well_only_when_each_kind_that_failed_is() -> None:
    said = Said()
    trouble = said.trouble()
    trouble.bad(0, "lookup", "refused")
    trouble.bad(1, "save", "full")
    trouble.good(2, "lookup")
    assert len(said.lines) == 1, "lookups alone do not prove that it takes values"
    trouble.good(3, "save")
    assert "serves again after 3 s, in which 1 lookup, 1 save failed" in said.lines[1]


def test_a_kind_that_is_not_asked_for_any_more_keeps_nothing_open() -> None:
    said = Said()
    trouble = said.trouble()
    trouble.bad(0, "load", "late")
    trouble.good(EVERY_S - 1, "lookup")
    assert len(said.lines) == 1
    trouble.good(EVERY_S, "lookup")
    assert "serves again" in said.lines[1]


def test_what_comes_and_goes_is_counted_and_not_told_each_time() -> None:
    said = Said()
    trouble = said.trouble()
    for i in range(600):
        trouble.bad(i / 10, "lookup", "refused")
        trouble.good(i / 10 + 0.05, "lookup")
    assert len(said.lines) == 2
    trouble.bad(EVERY_S, "lookup", "refused")
    assert said.lines[2].startswith("store x: 600 lookups failed in 59.9 s")


def test_single_events_have_no_end_and_what_is_left_is_said() -> None:
    said = Said()
    trouble = said.trouble()
    trouble.note(0, "value", "checksum")
    trouble.note(1, "value", "checksum", 18)
    trouble.good(2, "value")
    trouble.tick(EVERY_S - 1)
    assert said.lines == ["store x: 1 value failed: checksum; it is computed"]
    assert not trouble.well
    trouble.tick(EVERY_S)
    assert said.lines[1].startswith("store x: 18 values failed in 59 s, the last: checksum")
    assert trouble.well
    trouble.note(EVERY_S + 1, "value", "checksum", 2)
    trouble.close(EVERY_S + 2)
    assert said.lines[2].startswith("store x: 2 values failed")


def test_what_is_not_announced_is_counted() -> None:
    said = Said()
    trouble = said.trouble()
    for i in range(4):
        trouble.bad(i, "call", "refused", announce=False)
    assert said.lines == []
    trouble.bad(4, "call", "refused")
    assert said.lines == ["store x: 5 calls failed in 4 s, the last: refused; it is computed"]


@given(st.lists(st.tuples(st.sampled_from(["bad", "good", "note", "tick"]), st.sampled_from("abc"), st.floats(0, 40))))
def test_a_failure_is_said_once_a_minute_at_most_and_each_is_counted(steps: list[tuple[str, str, float]]) -> None:
    said = Said()
    trouble = said.trouble()
    now, failed = 0.0, 0
    times: list[float] = []  # of the lines that say that it fails
    for kind, what, passed in steps:
        now += passed
        before = len(said.lines)
        if kind in ("bad", "note"):
            failed += 1
            getattr(trouble, kind)(now, what, "why")
        else:
            trouble.good(now, what) if kind == "good" else trouble.tick(now)
        times += [now for line in said.lines[before:] if "serves again" not in line]
    assert all(later - earlier >= EVERY_S - 1e-6 for earlier, later in pairwise(times))
    trouble.close(now)
    again = [line for line in said.lines if "serves again" in line]
    assert 2 * len(again) <= len(said.lines)
    if not again:
        assert sum(_numbers(line) for line in said.lines) == failed


def _numbers(line: str) -> int:
    counts = line.split(": ")[1].partition(" failed")[0]
    return sum(int(part.split()[0]) for part in counts.split(", "))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, "no reason is given"),
        (StoreError("redis://user:secret@host:\n refused"), "redis://***@host: refused"),
        (KeyError("x"), "KeyError: 'x'"),
        (ExceptionGroup("two", [StoreError("a"), ValueError("b")]), "a; ValueError: b"),
    ],
)
def test_a_reason_is_one_line_without_secrets(error: Exception | None, text: str) -> None:
    assert reason(error) == text
