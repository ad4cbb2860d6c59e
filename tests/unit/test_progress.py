"""Incremental saves: what is saved, being saved, and to be offered again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvpool.progress import SaveProgress, SaveRange


def spans(ranges: list[SaveRange]) -> list[tuple[int, int]]:
    return [(r.start, r.end) for r in ranges]


class TestSaves:
    def test_the_mark_follows_what_is_really_saved(self) -> None:
        progress = SaveProgress()
        progress.begin("a")
        (first,) = progress.offer("a", 64)
        assert progress.mark("a") == 0
        (second,) = progress.offer("a", 96)
        assert spans([first, second]) == [(0, 64), (64, 96)]
        progress.report(second, saved=True)
        assert progress.mark("a") == 0, "the first range is still being saved"
        progress.report(first, saved=True)
        assert progress.mark("a") == 96
        assert progress.offer("a", 96) == []

    @pytest.mark.parametrize("rounds", [1, 3])
    def test_a_failed_or_skipped_range_is_offered_again(self, rounds: int) -> None:
        progress = SaveProgress()
        progress.begin("a")
        (first,) = progress.offer("a", 64)
        (second,) = progress.offer("a", 96)
        progress.report(second, saved=True)
        for _ in range(rounds):
            progress.report(first, saved=False)
            (first,) = progress.offer("a", 96)
            assert (first.start, first.end) == (0, 64)
        progress.report(first, saved=True)
        assert progress.mark("a") == 96

    def test_what_the_store_had_already_needs_no_saving(self) -> None:
        progress = SaveProgress()
        progress.begin("a", saved=48)
        assert progress.mark("a") == 48
        assert spans(progress.offer("a", 64)) == [(48, 64)]

    @pytest.mark.parametrize("how", ["finish", "abort", "preempt"])
    def test_all_state_goes_with_the_request(self, how: str) -> None:
        progress = SaveProgress()
        progress.begin("a")
        (due,) = progress.offer("a", 64)
        progress.end("a")
        progress.end("a")
        assert len(progress) == 0
        progress.report(due, saved=True)
        assert len(progress) == 0
        assert (progress.mark("a"), progress.pin_from("a"), progress.offer("a", 64)) == (0, 0, [])

    def test_a_reused_id_is_a_new_generation(self) -> None:
        progress = SaveProgress()
        old = progress.begin("a")
        (late,) = progress.offer("a", 64)
        new = progress.begin("a")
        assert new > old
        progress.report(late, saved=True)
        assert progress.mark("a") == 0, "an old generation proves nothing about the new one"
        assert [(r.start, r.end, r.generation) for r in progress.offer("a", 64)] == [(0, 64, new)]
        progress.report(late, saved=True)
        assert progress.mark("a") == 0, "not even when the same range is being saved again"

    def test_reports_of_what_nobody_waits_for_are_ignored(self) -> None:
        progress = SaveProgress()
        generation = progress.begin("a")
        (due,) = progress.offer("a", 64)
        progress.report(SaveRange("a", generation, 0, 0, 32), saved=True)
        progress.report(SaveRange("b", generation, 0, 0, 64), saved=True)
        assert progress.mark("a") == 0
        progress.report(due, saved=True)
        progress.report(due, saved=False)
        assert progress.mark("a") == 64, "a second report changes nothing"

    def test_ranks_are_apart_and_pins_cover_every_retry(self) -> None:
        progress = SaveProgress(ranks=2)
        progress.begin("a")
        (left,), (right,) = progress.offer("a", 64, rank=0), progress.offer("a", 64, rank=1)
        progress.report(left, saved=True)
        assert (progress.mark("a", 0), progress.mark("a", 1), progress.pin_from("a")) == (64, 0, 0)
        progress.report(right, saved=False)
        assert progress.offer("a", 64, rank=0) == []
        (again,) = progress.offer("a", 64, rank=1)
        assert progress.pin_from("a") <= again.start
        progress.report(again, saved=True)
        assert progress.pin_from("a") == 64

    def test_what_cannot_be_is_refused(self) -> None:
        progress = SaveProgress(ranks=2)
        with pytest.raises(ValueError, match="'a' begins with -5 saved tokens"):
            progress.begin("a", saved=-5)
        assert len(progress) == 0
        progress.begin("a")
        for rank in (-1, 2):
            with pytest.raises(ValueError, match=f"'a': rank {rank} of 2"):
                progress.offer("a", 16, rank)
        assert spans(progress.offer("a", 16, 1)) == [(0, 16)]

    def test_memory_does_not_grow_with_the_number_of_saves(self) -> None:
        progress = SaveProgress()
        progress.begin("a")
        for end in range(16, 16_000, 16):
            for due in progress.offer("a", end):
                progress.report(due, saved=True)
        assert len(progress._requests["a"].ranks[0]) == 1


class Saves(RuleBasedStateMachine):
    """Against the plainest model: a set of saved tokens and a list of ranges in flight."""

    flight = Bundle("flight")

    def __init__(self) -> None:
        super().__init__()
        self.progress = SaveProgress()
        self.restart()

    @rule()
    def restart(self) -> None:
        self.generation = self.progress.begin("a")
        self.saved: set[int] = set()
        self.flying: list[SaveRange] = []

    @rule(target=flight, end=st.integers(0, 30))
    def offer(self, end: int) -> object:
        ranges = self.progress.offer("a", end)
        offered = [t for r in ranges for t in range(r.start, r.end)]
        busy = {t for r in self.flying for t in range(r.start, r.end)}
        assert offered == [t for t in range(end) if t not in self.saved and t not in busy]
        self.flying += ranges
        return multiple(*ranges)

    @rule(due=consumes(flight), ok=st.booleans())
    def report(self, due: SaveRange, ok: bool) -> None:
        self.progress.report(due, saved=ok)
        if due in self.flying:
            self.flying.remove(due)
            if ok:
                self.saved |= set(range(due.start, due.end))

    @invariant()
    def the_mark_is_the_saved_prefix(self) -> None:
        assert self.progress.mark("a") == next(t for t in range(99) if t not in self.saved)
        assert all(self.progress.pin_from("a") <= r.start for r in self.flying)


Saves.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_order_of_offers_and_reports = Saves.TestCase
