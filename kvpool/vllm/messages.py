"""What the two halves of the connector tell each other, once a step. Pickled by vLLM between its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvpool.hashes import BlockHashes
from kvpool.keys import Namespace

__all__ = ["Job", "Part", "StepWork", "WorkerReport"]


@dataclass(frozen=True, eq=False)
class Part:
    """Chunks of one group. ``hashes``: one digest a chunk. ``block_ids``: intp[n], the engine block of each."""

    group: int
    hashes: BlockHashes
    block_ids: npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Job:
    """Chunks of one request to load or to save.

    ``number`` is unique within the engine, so a late report can never meet a reused request id.
    """

    number: int
    request_id: str
    epoch: bytes
    parts: tuple[Part, ...]


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

    ``released``: save job -> ranks that will not read its blocks again. ``saved``, ``loaded``: job -> whether every
    chunk was stored, or loaded, on all ranks that have reported.
    """

    released: dict[int, int] = field(default_factory=dict)
    saved: dict[int, bool] = field(default_factory=dict)
    loaded: dict[int, bool] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The report of both ranks together."""
        assert isinstance(other, WorkerReport)
        total = WorkerReport(dict(self.released), dict(self.saved), dict(self.loaded))
        for job, ranks in other.released.items():
            total.released[job] = total.released.get(job, 0) + ranks
        for mine, theirs in ((total.saved, other.saved), (total.loaded, other.loaded)):
            for job, ok in theirs.items():
                mine[job] = mine.get(job, True) and ok
        return total

    def __bool__(self) -> bool:
        return bool(self.released or self.saved or self.loaded)
