"""The pool's counters through vLLM's own channels: its log line and its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpool.metrics import Counters, counted

__all__ = ["ConnectorCounters", "KVPoolPromMetrics", "KVPoolStats"]


@dataclass
class ConnectorCounters:
    """What the connector counts beside the pool. All only ever grow."""

    lookups_unanswered: int = counted("Lookups without an answer within lookup_timeout_ms; a miss")
    lookups_refused: int = counted("Lookups answered with an error: the two ends do not match, or the lookup failed")
    lookups_of_another_epoch: int = counted("Lookups that were answered after a reset; a miss")
    lookup_replies_dropped: int = counted("Replies that came late, or belong to nobody")
    lookup_requests_expired: int = counted("Requests that reached the lookup server after their deadline")
    lookup_requests_refused: int = counted(
        "Requests that the lookup server could not read, or that do not fit what it serves"
    )
    lookups_without_store: int = counted("Lookups answered as a miss at once because the store is not open")
    lookups_without_rank: int = counted("Requests not looked up, a miss at once, because a rank's store is away")
    failed_jobs: int = counted(
        "Loads and saves that ended with an error: the store is not open, or they ran out of time"
    )
    quarantined_saves: int = counted(
        "Saves long past their deadline: their blocks stay pinned, and nobody waits for them"
    )

    def snapshot(self) -> dict[str, int]:
        """A copy as a plain dict."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def served(self, counts: Mapping[str, int]) -> None:
        """Take in what a lookup server counts by reason."""
        self.lookup_requests_expired = counts.get("expired", 0)
        self.lookup_requests_refused = sum(counts.values()) - self.lookup_requests_expired


def growth(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What was added since ``before``; only what changed."""
    return {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}


class KVPoolStats(KVConnectorStats):
    """What the counters grew by; ``data`` is counter name -> increment, summed over ranks and steps."""

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        total = dict(self.data)
        for name, value in other.data.items():
            total[name] = total.get(name, 0) + value
        return KVPoolStats(total)

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)


class KVPoolPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter ``kvpool:<counter>`` for each of the pool's and the connector's, labelled by engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counters: dict[str, Any] = {
            field.name: self._counter_cls(
                name=f"kvpool:{field.name}",
                documentation=f"{field.metadata['help']}.",
                labelnames=self._labelnames,
            )
            for field in (*fields(Counters), *fields(ConnectorCounters))
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
