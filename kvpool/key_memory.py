"""Keys that something is known about for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["KeyMemory"]


class KeyMemory:
    """Remembers keys for ``ttl`` seconds, ``limit`` at most; the oldest go first. With a ``ttl`` of 0 it keeps none."""

    def __init__(self, ttl: float, limit: int = 65_536) -> None:
        self._ttl = ttl
        self._limit = limit if ttl else 0
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, keys: Iterable[str], now: float) -> None:
        if not self._limit:
            return
        until, memory = now + self._ttl, self._until
        for key in keys:
            memory[key] = until
            memory.move_to_end(key)
        while len(self._until) > self._limit:
            self._until.popitem(last=False)

    def discard(self, keys: Iterable[str]) -> None:
        if self._until:
            for key in keys:
                self._until.pop(key, None)

    def among(self, keys: Sequence[str], now: float) -> list[int]:
        """The indices of those that are remembered now."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return [i for i, key in enumerate(keys) if key in self._until] if self._until else []
