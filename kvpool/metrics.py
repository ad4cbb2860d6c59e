"""Counters of what a pool did. Plain integers, changed on the event loop only, read from anywhere."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Every name ends in what it counts; all only ever grow."""

    lookups: int = 0
    lookup_hits: int = 0
    lookup_misses: int = 0
    lookup_late: int = 0  #: ended by their deadline and answered as a miss
    lookup_failed: int = 0  #: the store failed; answered as a miss
    hit_tokens: int = 0
    probe_waves: int = 0
    probed_keys: int = 0
    unknown_keys: int = 0  #: probed, and the store could not tell; taken for absent
    load_jobs: int = 0
    loaded_chunks: int = 0
    loaded_bytes: int = 0
    load_missing_chunks: int = 0  #: were present at lookup, absent at load
    load_late_chunks: int = 0
    load_failed_chunks: int = 0
    load_corrupt_chunks: int = 0
    save_jobs: int = 0
    saved_chunks: int = 0
    saved_bytes: int = 0
    save_present_chunks: int = 0  #: found in the store already, so not copied
    save_skipped_chunks: int = 0  #: not admitted: not wanted often enough yet
    save_late_chunks: int = 0
    save_failed_chunks: int = 0
    save_rejected_chunks: int = 0
    save_dropped_chunks: int = 0  #: given up before the copy because the store is slower than the engine
    abandoned_calls: int = 0  #: store calls that outlived their deadline; they keep their staging memory until they end

    def snapshot(self) -> dict[str, int]:
        """A copy as a plain dict."""
        return {name: getattr(self, name) for name in _NAMES}

    def add(self, **deltas: int) -> None:
        """Add to several counters at once."""
        for name, delta in deltas.items():
            setattr(self, name, getattr(self, name) + delta)

    def since(self, before: dict[str, int]) -> dict[str, int]:
        """What was added after ``before``, a snapshot; only what changed."""
        return {name: d for name in _NAMES if (d := getattr(self, name) - before.get(name, 0))}


_NAMES = tuple(f.name for f in fields(Counters))
