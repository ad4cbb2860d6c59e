"""What the two halves of the connector tell each other, once a step. Pickled by vLLM between its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvpool.keys import Namespace

__all__ = ["Job", "StepWork", "WorkerReport"]


@dataclass(frozen=True, eq=False)
class Job:
    """Chunks of one request to load or to save.

    ``number`` is unique within the engine, so a late report can never meet a reused request id. ``digests``: one chunk
    hash after the other. ``block_ids``: int64[n], the engine block of each chunk.
    """

    number: int
    request_id: str
    epoch: bytes
    hash_len: int
    scheme: str
    digests: bytes
    block_ids: npt.NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.block_ids)


@dataclass
class StepWork(KVConnectorMetadata):
    """Scheduler to worker: the jobs of one step.

    ``epoch``: the current one; loads of another are void. ``idle``: the step computes nothing, so the worker may wait a
    moment for its jobs.
    """

    namespace: Namespace
    epoch: bytes
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Worker to scheduler; summed over ranks, so each rank reports each event exactly once.

    ``released``: save job -> ranks that will not read its blocks again. ``saved``: save job -> bool[n], stored on every
    rank that has reported. ``loaded``: load job -> bool[n], loaded on every rank that has reported.
    """

    released: dict[int, int] = field(default_factory=dict)
    saved: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)
    loaded: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The report of both ranks together."""
        assert isinstance(other, WorkerReport)
        total = WorkerReport(dict(self.released), dict(self.saved), dict(self.loaded))
        for job, ranks in other.released.items():
            total.released[job] = total.released.get(job, 0) + ranks
        for mine, theirs in ((total.saved, other.saved), (total.loaded, other.loaded)):
            for job, ok in theirs.items():
                mine[job] = mine[job] & ok if job in mine else ok
        return total

    def __bool__(self) -> bool:
        return bool(self.released or self.saved or self.loaded)
