"""Hooks that vLLM calls in a worker, in the orders in which it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.config import Config
from kvpool.memory import BlockLayout
from kvpool.vllm import KVPoolConnector
from kvpool.vllm.messages import StepWork
from kvpool.vllm.worker import WorkerSide
from tests.vllm.halves import EPOCH, NAMESPACE, spec
from tests.vllm.worker_half import job, until, work


def hooked(submit: Callable[..., None]) -> Any:
    """A worker's connector that hands its steps to ``submit``."""
    connector: Any = object.__new__(KVPoolConnector)
    connector._step, connector._handed_over, connector._handled = None, False, None
    connector.worker = SimpleNamespace(submit=submit, collect=lambda work: None, take_received=set, take_failed=set)
    return connector


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("saved", ["before", "after", "never"])
def test_each_step_is_handed_over_once(saved: str, idle: bool) -> None:
    """``wait_for_save`` comes before the results, after them with drafts, and in no step of an early pipeline stage
    with drafts; without a forward pass vLLM 0.30 leaves it out as well.
    """
    submitted: list[StepWork] = []
    connector = hooked(lambda step, computed: submitted.append(step))
    steps = [StepWork(NAMESPACE.digest, EPOCH, idle=idle) for _ in range(3)]
    for number, step in enumerate(steps, 1):
        connector.bind_connector_metadata(step)
        assert len(submitted) == number - 1, "not before the forward pass"
        if saved == "before":
            connector.wait_for_save()
        connector.get_transfer_results(set())
        assert submitted == steps[:number]
        if saved == "after":
            connector.wait_for_save()
        connector.clear_connector_metadata()
    assert submitted == steps


def test_a_step_whose_forward_pass_raised_counts_as_not_computed() -> None:
    """vLLM calls the same hooks while the error passes by. An error that its caller is handling is none of the step."""
    told: list[bool] = []
    connector = hooked(lambda step, computed: told.append(computed))

    def step(error: Exception | None) -> None:
        connector.bind_connector_metadata(StepWork(NAMESPACE.digest, EPOCH))
        try:
            if error:
                raise error
        finally:
            connector.wait_for_save()
            connector.get_transfer_results(set())

    step(None)
    try:
        raise KeyError("of whoever calls the engine")
    except KeyError:
        step(None)
        with pytest.raises(ValueError, match="forward"):
            step(ValueError("forward"))
    with pytest.raises(ValueError, match="forward"):
        step(ValueError("forward"))
    assert told == [True, True, False, False]


def test_nothing_is_saved_of_a_step_that_was_not_computed(tmp_path: Path) -> None:
    side = WorkerSide(Config.load({"store": f"file://{tmp_path}"}), spec(), None, kv_heads=[8])
    side.start([BlockLayout.of_arrays(np.zeros((64, 32), np.uint8))], {"form": "test"})
    try:
        side.submit(work(saves=(job(1),)), computed=False)
        report = side.take_report()
        assert report is not None
        assert report.released == {1: 1}
        assert report.saved == {1: (1, False)}
        *_, total = until(side, lambda r: 2 in r.loaded, work((job(2),)))
        assert total.loaded == {2: (1, False)}
    finally:
        side.close()
