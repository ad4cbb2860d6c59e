"""The worker's half of the connector without an engine: jobs for it, and steps until it has reported."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvpool.hashes import chain_hashes
from kvpool.vllm.messages import Job, Part, StepWork, WorkerReport
from kvpool.vllm.worker import WorkerSide
from tests.vllm.halves import BLOCK, EPOCH, NAMESPACE

__all__ = ["job", "step", "until", "work"]


def job(number: int, blocks: int = 4, seed: int = 0) -> Job:
    hashes = chain_hashes(np.arange(blocks * BLOCK) + 1000 * seed, BLOCK)
    ids = np.arange(blocks)
    return Job(number, f"request-{number}", EPOCH, (Part(0, ids, hashes, ids + 1),))


def work(loads: tuple[Job, ...] = (), saves: tuple[Job, ...] = ()) -> StepWork:
    return StepWork(NAMESPACE.digest, EPOCH, list(loads), list(saves), idle=True)


def step(side: WorkerSide, given: StepWork) -> WorkerReport:
    side.submit(given)
    side.collect(given)
    return side.take_report() or WorkerReport()


def until(side: WorkerSide, done: Callable[[WorkerReport], bool], given: StepWork) -> list[WorkerReport]:
    """Steps until the summed reports satisfy ``done``; fails if that takes too long."""
    reports, total, end = [step(side, given)], WorkerReport(), time.monotonic() + 20
    total = total.aggregate(reports[0])
    while not done(total):
        assert time.monotonic() < end, total
        reports.append(step(side, work()))
        total = total.aggregate(reports[-1])
    return [*reports, total]
