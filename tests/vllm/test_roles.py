"""Engines that only save or only load, and pools beside each other and beside another connector."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import PATIENT, Engine, Output, prompt


def test_a_producer_fills_the_store_that_a_consumer_reads(model: Path, tmp_path: Path) -> None:
    store = {"store": f"file://{tmp_path}"}
    tokens, other = prompt(1000, seed=1), prompt(600, seed=2)
    producer = Engine(model, store, role="kv_producer")
    try:
        producer.run(tokens)
        local = producer.run(tokens)
        producer.forget()
        producer.run(tokens)
        counters = producer.counters
        producer.assert_at_rest()
        assert (counters["lookups"], counters["loaded_chunks"]) == (0, 0)
        assert counters["saved_chunks"] == 1000 // 32
    finally:
        producer.close()
    consumer = Engine(model, store, role="kv_consumer")
    try:
        assert consumer.run(tokens).like(local)
        consumer.run(other)
        counters = consumer.counters
        consumer.assert_at_rest()
        assert counters["loaded_chunks"] == 1000 // 32
        assert counters["save_jobs"] == 0
    finally:
        consumer.close()


def test_answers_are_found_in_the_next_turn_if_they_are_saved(model: Path, tmp_path: Path) -> None:
    engine = Engine(model, {"store": f"file://{tmp_path}", "save_decoded": True})
    try:
        question = prompt(300, seed=5)
        answer = engine.run(question, output=70)
        follow_up = prompt(450, seed=6, start=[*question, *answer.tokens])
        local = engine.run(follow_up)
        assert local.cached >= 352
        engine.forget()
        before = engine.counters["loaded_chunks"]
        assert engine.run(follow_up).like(local)
        assert engine.counters["loaded_chunks"] - before >= 352 // 32
        engine.assert_at_rest()
    finally:
        engine.close()


def child(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**PATIENT, "store": f"file://{folder}", "failed_key_ttl_s": 0},
    } | options


class Several:
    """An engine with several connectors in vLLM's MultiConnector."""

    def __init__(self, model: Path, children: Sequence[dict[str, Any]], **options: Any) -> None:
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": list(children)},
        }
        self.engine = Engine(model, None, kv_transfer_config=transfer, **options)

    def pools(self) -> list[Any]:
        """The connectors of kvpool, as worker and scheduler see them."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group: Any = get_kv_transfer_group()
        both = [*group.sub_connectors, *self.engine.scheduler.connector.sub_connectors]
        return [connector for connector in both if type(connector).__name__ == "KVPoolConnector"]

    def loaded(self) -> list[int]:
        return [c.worker.counters()["loaded_chunks"] for c in self.pools() if c.worker]

    def again(self, tokens: list[int]) -> Output:
        self.engine.forget()
        output = self.engine.run(tokens)
        self.engine.drain()
        return output

    def assert_at_rest(self) -> None:
        self.engine.drain()
        assert self.engine.pool.get_num_free_blocks() == self.engine.pool.num_gpu_blocks - 1
        for connector in self.pools():
            half = connector.worker or connector.scheduler
            assert not any(half.outstanding().values()), half.outstanding()


def test_two_pools_in_one_engine(model: Path, tmp_path: Path) -> None:
    several = Several(model, [child(tmp_path / "near"), child(tmp_path / "far")])
    try:
        tokens = prompt(1000, seed=3)
        several.engine.run(tokens)
        local = several.engine.run(tokens)
        assert several.again(tokens).like(local)
        assert several.loaded() == [31, 0], "the first that has it serves it"
        shutil.rmtree(tmp_path / "near")
        assert several.again(tokens).like(local)
        assert several.loaded() == [31, 31], "the second was saved to as well"
        several.assert_at_rest()
    finally:
        several.engine.close()


def test_a_pool_beside_another_connector(model: Path, tmp_path: Path) -> None:
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }
    several = Several(model, [child(tmp_path / "pool"), other], disable_hybrid_kv_cache_manager=True)
    try:
        tokens = prompt(1000, seed=4)
        several.engine.run(tokens)
        local = several.engine.run(tokens)
        assert several.again(tokens).like(local)
        assert several.loaded() == [31]
        several.assert_at_rest()
    finally:
        several.engine.close()


def test_statistics_of_a_pool_in_a_multi_connector_are_understood_by_class_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the API server does it; it dies if it cannot."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    import kvpool.vllm.connector  # noqa: F401

    assert "KVPoolConnector" in KVConnectorFactory._registry
    stats = MultiConnector.build_kv_connector_stats({"KVPoolConnector": {"data": {"lookups": 3}}})
    assert stats is not None
    assert not stats.is_empty()
