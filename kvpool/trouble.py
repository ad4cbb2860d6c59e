"""What a log says of a thing that may fail: each change, and never a flood.

No I/O but the line itself, and no clock: times are given, in seconds on one clock that never goes back.
"""

from __future__ import annotations

import logging
from collections import Counter

from kvpool._options import redact
from kvpool.errors import KVPoolError

__all__ = ["Trouble", "reason"]

#: Between two lines that say that a thing fails.
EVERY_S = 60.0
_MAX_REASON = 400


class Trouble:
    """Says that ``name`` fails, at most once in ``every`` seconds with a count, and once that it serves again.

    ``meaning``: what a failure comes to. ``verb``: what happened to what is counted. A thing that comes and goes is
    told of twice in ``every`` seconds, and what happened in between is in the next count. ``level``: INFO where whoever
    asks is told of each failure too, and warns of it.
    """

    def __init__(
        self,
        logger: logging.Logger,
        name: str,
        meaning: str,
        *,
        verb: str = "failed",
        every: float = EVERY_S,
        level: int = logging.WARNING,
    ) -> None:
        self._logger = logger
        self._level = level
        self._name = name
        self._meaning = meaning
        self._verb = verb
        self._every = every
        self._failing: dict[str, float] = {}  # what fails, and when it did last
        self._counts: Counter[str] = Counter()  # since the last line
        self._all: Counter[str] = Counter()  # since it was well
        self._reason = ""
        self._since = self._counted_from = 0.0
        self._next = float("-inf")
        self._told = False

    @property
    def well(self) -> bool:
        """Whether nothing fails and nothing is left to say: then no call that went well needs to be reported."""
        return not self._failing and not self._counts

    def bad(self, now: float, what: str, why: str, n: int = 1, *, announce: bool = True) -> None:
        """``n`` of ``what`` (a noun, such as "lookup") failed. ``announce`` false: count it, it needs no line yet."""
        if not self._failing:
            self._since = now
            self._all.clear()
        self._failing[what] = now
        self._all[what] += n
        self.note(now, what, why, n, announce=announce)

    def note(self, now: float, what: str, why: str, n: int = 1, *, announce: bool = True) -> None:
        """As :meth:`bad` for what is over at once, so that nothing serves again after it."""
        if not self._counts:
            self._counted_from = now
        self._counts[what] += n
        self._reason = why
        if announce:
            self.tick(now)

    def good(self, now: float, what: str) -> None:
        """A call of this kind went well. The thing is well when that is so for each kind that failed of late."""
        for kind, at in list(self._failing.items()):
            if kind == what or now - at >= self._every:
                del self._failing[kind]
        if self._told and not self._failing:
            self._told = False
            self._counts.clear()
            counts = _counted(self._all)
            self._logger.log(
                self._level,
                "%s: serves again after %.3g s, in which %s %s",
                self._name,
                now - self._since,
                counts,
                self._verb,
            )

    def tick(self, now: float) -> None:
        """Say what has not been said, if it is time."""
        if self._counts and now >= self._next:
            self._next = now + self._every
            self._say(now)

    def close(self, now: float) -> None:
        """Say what has not been said: nothing more will come."""
        if self._counts:
            self._say(now)

    def _say(self, now: float) -> None:
        passed = now - self._counted_from
        span = f" in {passed:.3g} s, the last" if passed and self._counts.total() > 1 else ""
        counts = _counted(self._counts)
        text = "%s: %s %s%s: %s; %s"
        self._logger.log(self._level, text, self._name, counts, self._verb, span, self._reason, self._meaning)
        self._counts.clear()
        self._told = bool(self._failing)


def reason(error: BaseException | None) -> str:
    """An error in one line without secrets; of a group, what is in it."""
    if error is None:
        return "no reason is given"
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(reason, error.exceptions))
    try:
        text = " ".join(str(error).split())
    except Exception:  # it is somebody else's class
        text = "it cannot say why"
    if not isinstance(error, KVPoolError):
        text = f"{type(error).__name__}: {text}"
    return redact(text)[:_MAX_REASON]


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{n:,} {what}{'s' * (n != 1)}" for what, n in counts.items())
