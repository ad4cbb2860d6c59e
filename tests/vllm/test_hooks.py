"""Hooks that vLLM calls in a worker, in the orders in which it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.vllm import KVPoolConnector
from kvpool.vllm.messages import StepWork
from tests.vllm.halves import EPOCH, NAMESPACE


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("saved", ["before", "after", "never"])
def test_each_step_is_handed_over_once(saved: str, idle: bool) -> None:
    """``wait_for_save`` comes before the results, after them with drafts, and in no step of an early pipeline stage
    with drafts; without a forward pass vLLM 0.30 leaves it out as well.
    """
    submitted: list[StepWork] = []
    connector: Any = object.__new__(KVPoolConnector)
    connector._step, connector._handed_over = None, False
    connector.worker = SimpleNamespace(
        submit=submitted.append, collect=lambda work: None, take_received=set, take_failed=set
    )
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
