"""Which owners of memory are left alone. No I/O, no clock of its own: times are given.

An owner is doubted when a transfer was late or failed, and then tried. One that fails is *silent*: what it keeps is not
asked for until a trial is good. Trials of a silent owner follow each other at growing intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvpool.backends._breaker import Breaker

__all__ = ["Owners", "Place", "Trial"]

FORGET_S = 30.0  # an owner that no value was found at for so long: it is gone, or nobody asks for what it keeps


class Place(NamedTuple):
    """Where a value is read from: its owner (``host:port``), its name, and how many bytes are stored."""

    owner: str
    name: str
    nbytes: int


class Trial(NamedTuple):
    """To be made, and settled. ``place``: a small value that the owner keeps."""

    owner: str
    place: Place
    ticket: int


@dataclass
class _Owner:
    place: Place
    found: float  # when a value was last found there
    breaker: Breaker = field(default_factory=lambda: Breaker(failures=1, cooldown_s=0.5, max_cooldown_s=2.0))
    doubted: bool = False
    tried: bool = False  # now
    mute: bool = False  # it gave no sign of life


class Owners:
    """What is known about the owners that were doubted lately; of no other anything is."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}

    def silent(self, now: float) -> frozenset[str]:
        """Those whose values are not to be asked for."""
        return frozenset(name for name, o in self._owners.items() if o.breaker.state(now) != "closed")

    def mute(self, now: float) -> bool:
        """Whether one of the silent ones gave no sign of life: transfers then fail whatever client makes them."""
        return any(o.mute and o.breaker.state(now) != "closed" for o in self._owners.values())

    def found(self, places: Iterable[Place], now: float) -> None:
        """Values were found there. Of an owner's the smallest is the one to try it with."""
        smallest: dict[str, Place] = {}
        for place in places:
            if place.owner not in smallest or place.nbytes < smallest[place.owner].nbytes:
                smallest[place.owner] = place
        for name, place in smallest.items():
            owner = self._owners.setdefault(name, _Owner(place, now))
            owner.place, owner.found = place, now

    def doubt(self) -> None:
        """Some transfer was late or failed; of all known owners, it is not known which."""
        for owner in self._owners.values():
            owner.doubted = True

    def due(self, now: float) -> list[Trial]:
        """The trials to be made now; each is to be settled."""
        trials = []
        for name, owner in list(self._owners.items()):
            if owner.tried:
                continue
            if now - owner.found > FORGET_S:
                del self._owners[name]
            elif owner.doubted or owner.breaker.state(now) == "half-open":
                owner.doubted = False
                ticket = owner.breaker.admit(now, math.inf)
                if ticket is not None:
                    owner.tried = True
                    trials.append(Trial(name, owner.place, ticket))
        return trials

    def settle(
        self, trial: Trial, now: float, good: bool | None, *, mute: bool = False
    ) -> Literal["silent", "answers"] | None:
        """A trial has ended, well or not (None: it says nothing); what that has changed. ``mute``: it failed for want
        of a sign of life."""
        owner = self._owners[trial.owner]
        owner.tried, owner.mute = False, mute
        was = owner.breaker.state(now) == "closed"
        owner.breaker.settle(trial.ticket, now, good)
        closed = owner.breaker.state(now) == "closed"
        return None if was == closed else "answers" if closed else "silent"
