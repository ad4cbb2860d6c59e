"""What the two halves of the connector tell each other, once a step. Pickled by vLLM between its processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvpool.hashes import BlockHashes
from kvpool.keys import Namespace

#: How many ranks have ended a job, and whether it went well on all of them.
Ended: TypeAlias = tuple[int, bool]

__all__ = ["Job", "Part", "StepWork", "WorkerReport"]


@dataclass(frozen=True, eq=False)
class Part:
    """Chunks of one group: ``chunk_ids`` intp[n], ``hashes`` one digest each, ``block_ids`` intp[n] its block each."""

    group: int
    chunk_ids: npt.NDArray[np.intp]
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

    ``namespace``: the engine's digest, all that keys are made of. ``engine``: what it stands for, some KB: in the first
    step, and again when a rank asks. ``epoch``: the current one; loads of another are void. ``idle``: the step computes
    nothing, so the worker may wait a moment for its jobs.
    """

    namespace: bytes
    epoch: bytes
    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    idle: bool = False
    engine: Namespace | None = None


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Worker to scheduler; summed over ranks, so each rank reports each event exactly once.

    ``released``: save job -> ranks that will not read its blocks again. ``saved``, ``loaded``: job -> ranks that have
    ended it, and whether every chunk was stored, or loaded, on all of them. ``skipped``: save jobs of which chunks were
    not admitted. ``layouts``: digest of a block layout -> ranks that have it; once, at start. ``unnamed``: a rank has
    not seen what the engine's digest stands for. ``serving``: rank -> whether its store serves, when that has changed,
    and with everything else that it says, so that what is lost once is heard later.
    """

    released: dict[int, int] = field(default_factory=dict)
    saved: dict[int, Ended] = field(default_factory=dict)
    loaded: dict[int, Ended] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    layouts: dict[str, int] = field(default_factory=dict)
    unnamed: bool = False
    serving: dict[int, bool] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The report of both ranks together."""
        assert isinstance(other, WorkerReport)
        total = WorkerReport(
            dict(self.released),
            dict(self.saved),
            dict(self.loaded),
            self.skipped | other.skipped,
            dict(self.layouts),
            self.unnamed or other.unnamed,
            self.serving | other.serving,
        )
        for job, ranks in other.released.items():
            total.released[job] = total.released.get(job, 0) + ranks
        for layout, ranks in other.layouts.items():
            total.layouts[layout] = total.layouts.get(layout, 0) + ranks
        for mine, theirs in ((total.saved, other.saved), (total.loaded, other.loaded)):
            for job, (ranks, ok) in theirs.items():
                before = mine.get(job, (0, True))
                mine[job] = before[0] + ranks, before[1] and ok
        return total

    def __bool__(self) -> bool:
        return bool(self.released or self.saved or self.loaded or self.layouts or self.unnamed or self.serving)
