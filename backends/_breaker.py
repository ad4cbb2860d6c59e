"""When to stop asking a store that fails, and when to ask again. No I/O, no clock of its own: times are given.

Closed: every call is let through. Open: none is, for ``cooldown_s``. Then half-open: one call at a time is let through
as a probe; a good one closes the breaker, a bad one opens it again for twice as long, up to ``max_cooldown_s``.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

__all__ = ["Breaker", "State"]

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Opens after ``failures`` failed calls in a row, or when ``ratio`` of the last ``window`` calls failed.

    Every time is a number of seconds on one clock that never goes back.
    """

    def __init__(
        self,
        *,
        failures: int = 5,
        ratio: float = 0.5,
        window: int = 20,
        cooldown_s: float = 1.0,
        max_cooldown_s: float = 30.0,
    ) -> None:
        self._failures = failures
        self._ratio = ratio
        self._cooldown_s = cooldown_s
        self._max_cooldown_s = max(cooldown_s, max_cooldown_s)
        self._recent: deque[bool] = deque(maxlen=window)  # whether each of the last calls was good
        self._in_a_row = 0
        self._pause = cooldown_s
        self._until: float | None = None  # not closed: when it becomes, or became, half-open
        self._calls: dict[int, float] = {}  # calls that are let through and not settled: when each is overdue
        self._last = 0

    def state(self, now: float) -> State:
        """As it is now, overdue calls counted."""
        self._count_overdue(now)
        return "closed" if self._until is None else "open" if now < self._until else "half-open"

    def admit(self, now: float, overdue: float) -> int | None:
        """A ticket for one call, to be settled; None: do not call.

        ``overdue``: a call that is not settled by then has failed, whatever becomes of it.
        """
        state = self.state(now)
        if state == "open" or (state == "half-open" and self._calls):
            return None
        self._last += 1
        self._calls[self._last] = overdue
        return self._last

    def settle(self, ticket: int, now: float, good: bool | None) -> None:
        """The call has ended. ``good`` None: it says nothing about the store (the caller gave up).

        What began before the breaker last opened no longer counts, nor does what was overdue.
        """
        self._count_overdue(now)
        self._settle(ticket, now, good)

    def _settle(self, ticket: int, now: float, good: bool | None) -> None:
        if self._calls.pop(ticket, None) is None or good is None:
            return
        if self._until is not None:
            if good:
                self._until, self._pause = None, self._cooldown_s
            else:
                self._pause = min(2 * self._pause, self._max_cooldown_s)
                self._open(now)
            return
        self._recent.append(good)
        self._in_a_row = 0 if good else self._in_a_row + 1
        bad = self._recent.count(False)
        often = len(self._recent) == self._recent.maxlen and bad >= self._ratio * len(self._recent)
        if not good and (self._in_a_row >= self._failures or often):
            self._open(now)

    def _open(self, now: float) -> None:
        self._until = now + self._pause
        self._recent.clear()
        self._in_a_row = 0
        self._calls.clear()

    def _count_overdue(self, now: float) -> None:
        for at, ticket in sorted((at, ticket) for ticket, at in self._calls.items() if at <= now):
            self._settle(ticket, at, False)
