"""What goes wrong on purpose: a store that misbehaves, and loads that bring other bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Faults", "damaged_loads"]


class Faults:
    """What the engine's store does wrong, changed while it runs."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self._write([])

    def url(self, store: str) -> dict[str, str]:
        return {"url": "kvpool.testing.faults:FaultyStore", "store": store, "script": str(self.script)}

    @contextmanager
    def __call__(self, **fault: object) -> Iterator[None]:
        self._write([fault])
        try:
            yield
        finally:
            self._write([])

    def _write(self, faults: list[dict[str, object]]) -> None:
        fresh = self.script.with_suffix(".new")
        fresh.write_text(json.dumps(faults))
        fresh.replace(self.script)


@contextmanager
def damaged_loads(layout: Any, damage: Callable[[Any, Any], Sequence[int]]) -> Iterator[list[int]]:
    """Loads into this layout put wrong bytes into blocks; yields which ones.

    ``damage`` gets block ids and a copy of their rows, which it changes, and returns the ids of the blocks it damaged.
    """
    scatter, wrong = layout.scatter, list[int]()

    def damaging(block_ids: Any, rows: Any) -> None:
        rows = rows.copy()
        wrong.extend(damage(block_ids, rows))
        scatter(block_ids, rows)

    object.__setattr__(layout, "scatter", damaging)
    try:
        yield wrong
    finally:
        object.__delattr__(layout, "scatter")
