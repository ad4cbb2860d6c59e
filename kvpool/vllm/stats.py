"""The pool's counters through vLLM's own channels: its log line and its Prometheus metrics."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpool.metrics import Counters

__all__ = ["KVPoolPromMetrics", "KVPoolStats"]


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
    """One Prometheus counter ``kvpool:<counter>`` for each of :class:`~kvpool.metrics.Counters`, labelled by engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counters: dict[str, Any] = {
            field.name: self._counter_cls(
                name=f"kvpool:{field.name}",
                documentation=f"kvpool: {field.name.replace('_', ' ')}.",
                labelnames=self._labelnames,
            )
            for field in fields(Counters)
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
