"""Adds up what the engines of a replay say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool._options import redact
from kvpool.registry import parse_url
from kvpool.replay.engine import Ended, Job, Outcome

__all__ = ["Report"]

_PERCENTILES = (50, 90, 99, 100)
_SHOWN_WRONG = 5  # wrong blocks that are named


class Report:
    """The result of a replay, finished or not.

    ``stored``: blocks in the store at the end, None if that is not known. ``problem``: why it did not come to its end.
    ``seconds``: from the first request to the last. ``cpu_seconds``: of all processes, from their start on.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.requests = 0
        self.blocks = 0
        self.verified = 0
        self.wrong = 0
        self.wrong_places: list[str] = []
        self.counters: Counter[str] = Counter()
        self.times: dict[str, list[float]] = {"lookup": [], "load": [], "save": []}
        self.problem = ""
        self.namespace = job.namespace.hex
        self.stored: int | None = None
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self._ideal = job.trace.ideal_hits() / max(1, len(job.trace.ids))

    def add(self, outcome: Outcome) -> None:
        """One more request is done."""
        line = self.job.trace.lines[outcome.request]
        self.requests += 1
        self.blocks += outcome.blocks
        self.verified += outcome.verified
        self.wrong += len(outcome.wrong_ids)
        for block in outcome.wrong_ids[: _SHOWN_WRONG - len(self.wrong_places)]:
            self.wrong_places.append(f"line {line}: the block of id {block}")
        self.counters.update(outcome.counters)
        for name, seconds in (("lookup", outcome.lookup_s), ("load", outcome.load_s), ("save", outcome.save_s)):
            if seconds is not None:
                self.times[name].append(seconds)
        if outcome.problem:
            self.stop(f"line {line}: {outcome.problem}")

    def stop(self, problem: str) -> None:
        """It cannot come to its end; the first reason holds. A store's words may quote a URL with its secrets."""
        self.problem = self.problem or redact(problem)

    def end(self, ended: Ended) -> None:
        """An engine has come to its end; what the last one says of the store holds."""
        self.namespace, self.stored = ended.namespace, ended.stored

    @property
    def hit_rate(self) -> float:
        """Blocks loaded and verified, as a share of the blocks listed, 0 to 1."""
        return self.verified / max(1, self.blocks)

    @property
    def complete(self) -> bool:
        return self.requests == len(self.job.trace)

    @property
    def already_stored(self) -> int | None:
        """Blocks that were computed and turned out to be stored when they were to be saved; None if incomplete.

        Another request had saved them since the lookup; or a block before them was gone, which ends a hit.
        """
        if not self.complete or self.problem:
            return None
        count = self.counters
        lost = sum(count[f"save_{what}_chunks"] for what in ("late", "failed", "rejected", "dropped", "skipped"))
        return self.blocks - self.verified - self.wrong - count["saved_chunks"] - lost

    def as_dict(self) -> dict[str, Any]:
        """Everything as one JSON object."""
        job = self.job
        return {
            "trace": job.trace.name,
            "store": str(parse_url(job.store)),
            "namespace": self.namespace,
            "engines": job.engines,
            "block_bytes": job.block_bytes,
            "blocks_per_engine": job.num_blocks,
            "speed": job.speed,
            "complete": self.complete,
            "problem": self.problem or None,
            "requests": self.requests,
            "blocks": self.blocks,
            "block_hit_rate": self.hit_rate,
            "ideal_block_hit_rate": self._ideal,
            "verified_blocks": self.verified,
            "wrong_blocks": self.wrong,
            "already_stored_blocks": self.already_stored,
            "loaded_bytes": self.counters["loaded_bytes"],
            "saved_bytes": self.counters["saved_bytes"],
            "stored_blocks": self.stored,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "latency_ms": {name: self._percentiles(name) for name in self.times},
            "counters": dict(sorted(self.counters.items())),
        }

    def rows(self) -> list[tuple[str, str]]:
        """The table for a person: name and value."""
        job, count = self.job, self.counters
        memory = f"{job.num_blocks:,} blocks of {_bytes(job.block_bytes)}, {_bytes(job.num_blocks * job.block_bytes)}"
        of_all = "" if self.complete else f" of {len(job.trace):,}"
        rows = [
            ("trace", job.trace.name),
            ("store", f"{parse_url(job.store)}, namespace {self.namespace}"),
            ("engines", f"{job.engines}; block memory of each: {memory}"),
            ("requests", f"{self.requests:,}{of_all}, {self.blocks:,} blocks"),
            (
                "block hit rate",
                f"{self.hit_rate:.2%}{self._compared() if self.complete else ''}",
            ),
            ("blocks verified", f"{self.verified:,}"),
            ("wrong blocks", f"{self.wrong:,}"),
            ("loaded", _bytes(count["loaded_bytes"])),
            ("saved", f"{_bytes(count['saved_bytes'])}, {count['saved_chunks']:,} blocks"),
            *((name, self._latency(name)) for name in self.times if self.times[name]),
            ("time", f"{self.seconds:.1f} s, {self.cpu_seconds:.1f} s of CPU"),
        ]
        if self.stored is not None:
            stored = _bytes(self.stored * job.block_bytes)
            capacity = parse_url(job.store).params.get("capacity", "unlimited")
            rows.append(("in the store", f"{stored}, {self.stored:,} blocks; its capacity: {capacity}"))
        rare = [
            ("already stored", self.already_stored, "blocks computed: saved by another meanwhile, or behind a gap"),
            ("gone", count["load_missing_chunks"], "blocks that were found but not there any more when loaded"),
            (
                "damaged",
                count["load_corrupt_chunks"],
                "blocks that the store or pool found damaged and did not hand over",
            ),
            ("late lookups", count["lookup_late"], "counted as misses"),
            ("late loads", count["load_late_chunks"], "blocks, computed instead"),
            ("late saves", count["save_late_chunks"], "blocks"),
            ("not admitted", count["save_skipped_chunks"], "blocks not saved, by the pool's own policy"),
            ("dropped saves", count["save_dropped_chunks"], "blocks, because the store is slower than the engine"),
        ]
        return rows + [(name, f"{n:,} {what}") for name, n, what in rare if n]

    def _compared(self) -> str:
        found = f" (ideal: {self._ideal:.2%}, one engine and a store that is empty at first and has no limit)"
        if self.hit_rate > self._ideal:
            found += "; the store held blocks of this trace before"
        return found

    def _latency(self, name: str) -> str:
        return "  ".join(f"{key} {value:.2f}" for key, value in self._percentiles(name).items()) + "  ms"

    def _percentiles(self, name: str) -> dict[str, float]:
        """In milliseconds; empty if it never happened."""
        times: Sequence[float] = self.times[name]
        if not times:
            return {}
        values = 1000 * np.percentile(times, _PERCENTILES)
        return {"max" if p == 100 else f"p{p}": float(v) for p, v in zip(_PERCENTILES, values, strict=True)}


def _bytes(n: int) -> str:
    size, unit = float(n), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{n} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
