"""Counters of what a pool did. Plain integers, changed on the event loop only, read from anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["Counters", "counted"]


def counted(what: str) -> int:
    """A counter's field in a dataclass, 0 at first; ``what`` it counts is its "help" in the field's metadata."""
    zero: int = field(default=0, metadata={"help": what})
    return zero


@dataclass(slots=True)
class Counters:
    """Every name ends in what it counts; all only ever grow."""

    lookups: int = counted("Lookups that were asked of the pool")
    lookup_hits: int = counted("Lookups that found something worth loading")
    lookup_misses: int = counted("Lookups that were answered: nothing, or less than min_load_tokens")
    lookup_late: int = counted("Lookups that ended by their deadline and were answered as a miss")
    lookup_failed: int = counted("Lookups during which the store failed; answered as a miss")
    hit_tokens: int = counted("Tokens of the prefixes that were hit, those of the engine's own cache included")
    probe_waves: int = counted("Round trips that lookups have made to the store")
    probed_keys: int = counted("Keys that the store was asked about, by lookups and before saves")
    unknown_keys: int = counted("Keys of which the store could not tell whether they are there; taken for absent")
    load_jobs: int = counted("Loads that were begun")
    loaded_chunks: int = counted("Chunks that were loaded and proven")
    loaded_bytes: int = counted("Bytes of the chunks that were loaded")
    load_missing_chunks: int = counted("Chunks that were there at the lookup and gone at the load")
    load_late_chunks: int = counted("Chunks that were not loaded before the deadline")
    load_failed_chunks: int = counted("Chunks that the store failed to hand over")
    load_corrupt_chunks: int = counted("Chunks that were damaged, cut or another's; never handed to the engine")
    save_jobs: int = counted("Saves that were begun")
    saved_chunks: int = counted("Chunks that were newly stored")
    saved_bytes: int = counted("Bytes of the chunks that were newly stored")
    save_present_chunks: int = counted("Chunks that the store had already, so that they were not copied")
    save_skipped_chunks: int = counted("Chunks not wanted often enough yet (save_after_uses)")
    save_late_chunks: int = counted("Chunks that were not stored before the deadline")
    save_failed_chunks: int = counted("Chunks that the store failed to take")
    save_rejected_chunks: int = counted("Chunks that the store refused: it is full, or they are too large")
    save_dropped_chunks: int = counted(
        "Chunks given up before the copy because the store is slower than the engine (save_queue_bytes)"
    )
    abandoned_calls: int = counted(
        "Store calls that outlived their deadline; they keep their staging memory until they end"
    )

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
