"""The breaker, in given time: when it opens, that nothing is called then, and that it always finds back."""

from __future__ import annotations

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.backends._breaker import Breaker

PATIENCE = 10.0


def run(breaker: Breaker, outcomes: str, now: float = 0.0) -> list[str]:
    """Calls that end at once, a ``+`` or ``-`` each (``?`` says nothing); the state after each, or "refused"."""
    states: list[str] = []
    for outcome in outcomes:
        ticket = breaker.admit(now, now + PATIENCE)
        if ticket is not None:
            breaker.settle(ticket, now, {"+": True, "-": False, "?": None}[outcome])
        states.append(breaker.state(now) if ticket is not None else "refused")
    return states


def opened(failures: int = 3, **options: float) -> Breaker:
    breaker = Breaker(failures=failures, cooldown_s=1.0, **options)  # type: ignore[arg-type]
    assert run(breaker, "-" * failures)[-1] == "open"
    return breaker


def test_opens_after_failures_in_a_row() -> None:
    assert run(Breaker(failures=3), "--+--?-") == ["closed"] * 6 + ["open"]


def test_opens_when_too_many_of_the_last_calls_failed() -> None:
    breaker = Breaker(failures=100, ratio=0.5, window=6)
    assert run(breaker, "-+-+-+") == ["closed"] * 6, "the last call was good"
    assert run(breaker, "-")[-1] == "open"
    assert run(Breaker(failures=100, ratio=0.5, window=6), "-+--+") == ["closed"] * 5, "too few calls to tell"
    assert "open" not in run(Breaker(failures=100, ratio=0.5, window=6), "-++" * 20)


def test_while_open_nothing_is_called_and_then_one_probe() -> None:
    breaker = opened()
    assert breaker.admit(0.99, 9) is None
    assert breaker.state(1.0) == "half-open"
    probe = breaker.admit(1.0, 9)
    assert probe is not None
    assert breaker.admit(1.0, 9) is None
    breaker.settle(probe, 1.5, True)
    assert breaker.state(1.5) == "closed"


def test_a_bad_probe_doubles_the_pause_up_to_a_limit_and_a_good_one_resets_it() -> None:
    breaker = opened(max_cooldown_s=3.0)
    now = 0.0
    for pause in (1.0, 2.0, 3.0, 3.0):
        assert breaker.state(now + pause - 0.01) == "open"
        now += pause
        assert run(breaker, "-", now) == ["open"]
    assert run(breaker, "+", now + 3.0) == ["closed"]
    assert run(breaker, "---", now + 3.0)[-1] == "open"
    assert breaker.state(now + 4.0) == "half-open"


def test_a_probe_that_was_given_up_frees_the_place() -> None:
    assert run(opened(), "?+", 1.0) == ["half-open", "closed"]


def test_what_is_overdue_has_failed_when_it_was_due() -> None:
    breaker = Breaker(failures=2, cooldown_s=1.0)
    late = [breaker.admit(0.0, 5.0), breaker.admit(0.0, 6.0)]
    assert breaker.state(5.5) == "closed"
    assert breaker.state(6.5) == "open"
    for ticket in late:
        assert ticket is not None
        breaker.settle(ticket, 6.6, True)
    assert breaker.state(6.9) == "open", "their end no longer counts"
    assert breaker.state(7.0) == "half-open"
    assert breaker.admit(7.0, 8.0) is not None
    assert breaker.state(9.9) == "open", "an overdue probe, with twice the pause"
    assert breaker.state(10.0) == "half-open"


def test_what_began_before_it_opened_does_not_close_it() -> None:
    breaker = Breaker(failures=1, cooldown_s=1.0)
    old = breaker.admit(0.0, 99.0)
    assert old is not None
    assert run(breaker, "-") == ["open"]
    probe = breaker.admit(1.0, 9.0)
    assert probe is not None
    breaker.settle(old, 1.1, True)
    assert breaker.state(1.1) == "half-open"
    assert breaker.admit(1.1, 9.0) is None
    breaker.settle(probe, 1.2, True)
    assert breaker.state(1.2) == "closed"


class BreakerMachine(RuleBasedStateMachine):
    FAILURES, RATIO, WINDOW, COOLDOWN_S, MAX_COOLDOWN_S = 3, 0.75, 8, 1.0, 4.0

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(
            failures=self.FAILURES,
            ratio=self.RATIO,
            window=self.WINDOW,
            cooldown_s=self.COOLDOWN_S,
            max_cooldown_s=self.MAX_COOLDOWN_S,
        )
        self.now = 0.0
        self.tickets: dict[int, float] = {}  # not settled by us: when overdue
        self.bad_since_closed = 0
        self.probes: set[int] = set()
        self.before = "closed"

    def look(self) -> str:
        """The state; keeps count of failures that can explain an opening."""
        overdue = [t for t, at in self.tickets.items() if at <= self.now]
        for ticket in overdue:
            del self.tickets[ticket]
            self.bad_since_closed += 1
            self.probes.discard(ticket)
        state = self.breaker.state(self.now)
        if self.before == "closed" and state != "closed":
            assert self.bad_since_closed >= min(self.FAILURES, self.RATIO * self.WINDOW)
            self.probes.clear()
        if state == "closed" and self.before != "closed":
            self.bad_since_closed = 0
        self.before = state
        return state

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.look()

    @rule(patience=st.sampled_from([0.2, 2.0, 30.0]))
    def call(self, patience: float) -> None:
        state = self.look()
        ticket = self.breaker.admit(self.now, self.now + patience)
        assert (ticket is None) == (state == "open" or (state == "half-open" and bool(self.probes)))
        if ticket is not None:
            assert ticket not in self.tickets
            self.tickets[ticket] = self.now + patience
            if state == "half-open":
                self.probes.add(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), good=st.sampled_from([True, False, False, False, None]))
    def end(self, data: st.DataObject, good: bool | None) -> None:
        state = self.look()
        if not self.tickets:
            return
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        del self.tickets[ticket]
        self.bad_since_closed += good is False
        self.breaker.settle(ticket, self.now, good)
        probe = ticket in self.probes
        self.probes.discard(ticket)
        if state == "closed":
            assert good is False or self.look() == "closed"
        else:
            expected = {True: "closed", False: "open", None: "half-open"}[good] if probe else state
            assert self.look() == expected

    @invariant()
    def it_finds_back_by_itself(self) -> None:
        """With nothing but time and good calls it is closed again; looked at on a copy."""
        breaker = copy.deepcopy(self.breaker)
        later = self.now + 30.0 + self.MAX_COOLDOWN_S  # an open probe is overdue by then
        for _ in range(2):
            later += self.MAX_COOLDOWN_S
            ticket = breaker.admit(later, later + 1.0)
            assert ticket is not None
            breaker.settle(ticket, later, True)
            assert breaker.state(later) == "closed"


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
