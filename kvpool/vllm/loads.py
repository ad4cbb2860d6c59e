"""Loads, from the engine's blocks for a hit to the last rank's report. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpool.vllm.jobs import Jobs
from kvpool.vllm.messages import Job, WorkerReport
from kvpool.vllm.requests import RequestState

__all__ = ["Load", "Loads"]


@dataclass(slots=True)
class Load:
    """One load. ``complete``: all chunks, on all ranks that have reported it."""

    state: RequestState
    job: Job
    ranks_left: int
    complete: bool = True


class Loads:
    """Loads of an engine with ``ranks`` ranks. They keep their own state until they are reported."""

    def __init__(self, jobs: Jobs, ranks: int) -> None:
        self._jobs = jobs
        self._ranks = ranks
        self._new: list[Job] = []
        self._loads: dict[int, Load] = {}

    def __len__(self) -> int:
        """How many are handed out or waiting for it."""
        return len(self._loads)

    def add(self, state: RequestState, tokens: int, tables: Sequence[list[int]]) -> None:
        """Load ``tokens`` tokens behind the last match's, into the request's blocks, with the next step."""
        job = self._jobs.load(state, state.offered, state.offered + tokens, tables)
        self._loads[job.number] = Load(state, job, self._ranks)
        self._new.append(job)

    def take(self) -> list[Job]:
        """The jobs of this step."""
        new, self._new = self._new, []
        return new

    def take_report(self, report: WorkerReport) -> Iterator[Load]:
        """Those that have ended with this report, on all ranks. To be read to its end."""
        for number, (ranks, ok) in report.loaded.items():
            if (load := self._loads.get(number)) is None:
                continue
            load.ranks_left -= ranks
            load.state.no_lookup |= not ok
            load.state.saving &= ok  # what counts as saved may be lost, so it is offered anew
            load.complete &= ok
            if load.ranks_left <= 0:
                del self._loads[number]
                yield load
