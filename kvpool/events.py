"""What a pool tells its listener: one event for each thing it did, after it was done.

A listener is called on the event loop and must return at once; what it raises is logged and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Event", "Listener", "LoadEnded", "LookupEnded", "ResetDone", "SaveEnded", "tell"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LookupEnded:
    """``outcome``: a hit, a miss, late (past its deadline), or failed (the store raised). ``seconds`` from the call."""

    outcome: Literal["hit", "miss", "late", "failed"]
    hit_tokens: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """Chunks by how they ended; ``missing`` were there at the lookup and are gone."""

    loaded: int
    missing: int
    late: int
    failed: int
    corrupt: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveEnded:
    """Chunks by how they ended; ``present`` were there before, ``skipped`` were not admitted, ``dropped`` given up."""

    saved: int
    present: int
    skipped: int
    dropped: int
    late: int
    failed: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ResetDone:
    """The pool uses another epoch now; nothing saved before is found again."""

    epoch: bytes


Event: TypeAlias = LookupEnded | LoadEnded | SaveEnded | ResetDone
Listener: TypeAlias = Callable[[Event], None]


def tell(listener: Listener | None, event: Event) -> None:
    """Hand an event to a listener, if there is one."""
    if listener is not None:
        try:
            listener(event)
        except Exception:
            logger.exception("the listener failed on %s", event)
