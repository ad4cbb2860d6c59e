"""Whether a store serves: what each rank's worker judges, and what the scheduler's half knows of all ranks. No I/O.

A hit must be loaded by every rank, while one rank answers lookups: it cannot tell that another one's store is away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import anyio

from kvpool.events import Event, LoadEnded, SaveEnded

__all__ = ["Health", "RanksAway"]

logger = logging.getLogger(__name__)

#: Before the second probe of a store that is held to be away; twice as long with each, up to the other.
PROBE_S, MAX_PROBE_S = 0.25, 2.0
#: What a rank said of itself is old after this time: the engine has not stepped since.
STALE_S = 1.0


class Health:
    """One rank's store. It is held to be away once a load has failed as a whole, until a job or a probe is answered.

    Written on the event loop; ``serves`` is read by the worker's thread as well.
    """

    def __init__(self) -> None:
        self.serves = True
        self.doubted = anyio.Event()
        self._failures = 0

    def on_event(self, event: Event) -> None:
        """What the pool tells of its jobs. A load that is late is as bad as one that fails: what hangs does not serve.

        Saves that fail tell nothing of loads: the store may be full, or for reading only.
        """
        if isinstance(event, LoadEnded):
            if event.loaded + event.missing + event.corrupt:
                self._failures = 0
                self.answered()
            elif event.late + event.failed:
                self.failed()
        elif isinstance(event, SaveEnded) and event.saved + event.present:
            self.answered()

    def answered(self) -> None:
        """It is open, or a probe was answered."""
        if not self.serves:
            self.serves = True
            self.doubted = anyio.Event()

    def failed(self) -> None:
        """It does not open, or a load has failed."""
        if self.serves:
            self._failures += 1
        self.serves = False
        self.doubted.set()

    def delay(self, probes: int) -> float:
        """Seconds before the next probe, after so many. At once at first, unless it answers probes and fails loads."""
        steps = probes + self._failures - 1
        return 0.0 if steps <= 0 else min(PROBE_S * 2.0 ** min(steps - 1, 10), MAX_PROBE_S)


class RanksAway:
    """The ranks of which the store is away, by what each said last."""

    def __init__(self) -> None:
        #: Rank -> when it has said so.
        self.ranks: dict[int, float] = {}

    def take(self, serving: Mapping[int, bool]) -> None:
        """News of some ranks."""
        before = bool(self.ranks)
        for rank, serves in serving.items():
            if serves:
                self.ranks.pop(rank, None)
            else:
                self.ranks[rank] = time.monotonic()
        if before != bool(self.ranks):
            ranks = ", ".join(map(str, sorted(self.ranks)))
            # The ranks' own pools warn; with a store that answers probes only, this changes with each load.
            logger.debug("kvpool: %s", f"no hits while the store is away on rank {ranks}" if ranks else "hits again")

    def stale(self) -> bool:
        """Whether the next step may tell otherwise: the engine has not stepped for a while."""
        return min(self.ranks.values()) < time.monotonic() - STALE_S
