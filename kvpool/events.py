"""What a pool tells its listener and the log: one event for each thing it did, after it was done.

A listener is called on the event loop and must return at once; what it raises is logged and changes nothing. The log
hears of a store that begins to fail, fails, and serves again, whatever store it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import anyio

from kvpool.trouble import Trouble, reason

__all__ = ["Event", "Listener", "LoadEnded", "LookupEnded", "Reporter", "ResetDone", "SaveEnded"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LookupEnded:
    """``outcome``: a hit, a miss, late (past its deadline), or failed (the store raised). ``seconds`` from the call.

    ``error``: what the store said; with a hit or a miss, that it could not tell for some keys, taken for absent.
    """

    outcome: Literal["hit", "miss", "late", "failed"]
    hit_tokens: int
    num_tokens: int
    seconds: float
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """Chunks by how they ended; ``missing`` were there at the lookup and are gone. ``error``: one of those there were.

    ``void``: :meth:`~kvpool.pool.KVPool.reset` came meanwhile, so nothing counts as loaded.
    """

    loaded: int
    missing: int
    late: int
    failed: int
    corrupt: int
    nbytes: int
    seconds: float
    error: Exception | None = None
    void: bool = False


@dataclass(frozen=True, slots=True)
class SaveEnded:
    """Chunks by how they ended; ``present`` were there before, ``skipped`` were not admitted, ``dropped`` given up.

    ``rejected``: by the store, which is full, or has a limit for one value. ``error``: one of those there were.
    """

    saved: int
    present: int
    skipped: int
    dropped: int
    late: int
    failed: int
    nbytes: int
    seconds: float
    rejected: int = 0
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class ResetDone:
    """The pool uses another epoch now; nothing saved before is found again."""

    epoch: bytes


Event: TypeAlias = LookupEnded | LoadEnded | SaveEnded | ResetDone
Listener: TypeAlias = Callable[[Event], None]


class Reporter:
    """Tells the listener, and the log what events mean for the store that is called ``name``."""

    def __init__(self, listener: Listener | None, name: str) -> None:
        self._listener = listener
        self._store = Trouble(logger, name, "what it does not serve is computed")
        self._values = Trouble(logger, name, "such a value is not used, its block is computed", verb="damaged")
        self._calls = Trouble(logger, "the listener of the pool", "the pool goes on as if it had not")
        self._closed = False

    @property
    def wants_all(self) -> bool:
        """Whether a lookup that went well is of interest; if not, it is spared the event."""
        return self._listener is not None or not (self._store.well and self._values.well)

    def tell(self, event: Event) -> None:
        """Once for each event. Costs next to nothing while all is well and nobody listens."""
        if self._closed:
            pass  # what the end of the pool cuts off is not the store's fault
        elif isinstance(event, LookupEnded):
            self._lookup(event)
        elif isinstance(event, LoadEnded):
            self._load(event)
        elif isinstance(event, SaveEnded):
            self._save(event)
        else:
            logger.info("the pool uses a new epoch, %s: nothing saved before is found again", event.epoch.hex())
        if self._listener is not None:
            try:
                self._listener(event)
            except Exception as error:
                logger.debug("the listener failed on %s", event, exc_info=error)
                self._calls.note(anyio.current_time(), "call", reason(error))

    def given_up(self, what: Literal["lookup", "load", "save"], seconds: float) -> None:
        """Whoever asked has waited so long without an answer, and then cancelled the call."""
        self._store.bad(anyio.current_time(), what, f"no answer within {seconds:.3g} s")

    def close(self) -> None:
        """Nothing more will come that the log should hear of."""
        self._closed = True
        for trouble in (self._store, self._values, self._calls):
            trouble.close(anyio.current_time())

    def _lookup(self, event: LookupEnded) -> None:
        if event.outcome == "late":
            self.given_up("lookup", event.seconds)
        elif event.outcome == "failed" or event.error is not None:
            self._store.bad(anyio.current_time(), "lookup", reason(event.error))
        else:
            self._good("lookup")

    def _load(self, event: LoadEnded) -> None:
        if event.void:
            return
        if event.corrupt:
            self._values.note(anyio.current_time(), "value", reason(event.error), event.corrupt)
        if event.failed:
            self._store.bad(anyio.current_time(), "load", reason(event.error))
        elif event.late:
            self.given_up("load", event.seconds)
        elif event.loaded:
            self._good("load")

    def _save(self, event: SaveEnded) -> None:
        if event.dropped:
            why = "more than save_queue_bytes wait for the store, which is slower than the engine"
            self._store.bad(anyio.current_time(), "save", why)
        elif event.failed or event.rejected:
            self._store.bad(anyio.current_time(), "save", reason(event.error))
        elif event.late:
            self.given_up("save", event.seconds)
        elif event.saved:
            self._good("save")

    def _good(self, what: str) -> None:
        for trouble in (self._store, self._values):
            if not trouble.well:
                now = anyio.current_time()
                trouble.good(now, what)
                trouble.tick(now)
