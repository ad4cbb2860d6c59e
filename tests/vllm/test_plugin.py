"""The connector by name alone, and its counters in vLLM's own statistics."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from tomllib import loads
from typing import Any

import msgspec
import prometheus_client
import pytest
import zmq
from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from kvpool.vllm.connector import KVPoolConnector
from kvpool.vllm.stats import KVPoolStats
from tests.vllm.engine import BLOCK, Engine, prompt


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> KVTransferConfig:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory._registry.pop("KVPoolConnector", None)
    project = loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    register = EntryPoint(name=name, value=value, group="vllm.general_plugins").load()
    register()
    register()  # vLLM loads plugins more than once
    return KVTransferConfig(kv_connector="KVPoolConnector", kv_role="kv_both")


def test_the_plugin_registers_the_connector_under_its_name(by_name: KVTransferConfig) -> None:
    assert KVConnectorFactory.get_connector_class(by_name) is KVPoolConnector
    assert KVConnectorFactory.supports_hma_config(by_name)


def test_stats_add_up_and_are_logged(by_name: KVTransferConfig) -> None:
    log: Any = KVConnectorLogging(by_name)
    log.observe({"lookups": 2, "loaded_bytes": 10})
    log.observe({"lookups": 1})
    lines: list[str] = []
    log.log(lambda text, *args: lines.append(text % args))
    assert lines == ["KV Transfer metrics: lookups=3, loaded_bytes=10"]
    log.log(lambda text, *args: lines.append(text % args))
    assert len(lines) == 1
    assert KVPoolStats().is_empty()


def test_counters_reach_prometheus(by_name: KVTransferConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()

    def counter(**options: Any) -> prometheus_client.Counter:
        return prometheus_client.Counter(**options, registry=registry)

    monkeypatch.setattr(KVConnectorProm, "_counter_cls", staticmethod(counter))

    class Config:
        kv_transfer_config = by_name

    metrics = KVConnectorProm(Config(), ["model_name", "engine"], {0: ["m", "0"]})  # type: ignore[arg-type]
    metrics.observe({"saved_chunks": 3, "unknown to this version": 1})
    metrics.observe({"saved_chunks": 4})
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("kvpool:saved_chunks_total", labels) == 7


def test_a_running_engine_tells_what_its_pool_did(model: Path, tmp_path: Path) -> None:
    """Its counters in vLLM's statistics, its blocks through vLLM's own publisher of KV events."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}",
    }
    engine = Engine(model, {"store": f"file://{tmp_path}"}, disable_log_stats=False, kv_events_config=events)
    try:
        told: dict[str, int] = {}
        make = engine.scheduler.make_stats

        def noted(*args: Any, **kwargs: Any) -> Any:
            stats = make(*args, **kwargs)
            for name, value in ((stats and stats.kv_connector_stats) or {}).items():
                told[name] = told.get(name, 0) + value
            return stats

        engine.scheduler.make_stats = noted
        engine.run(prompt(320, seed=1))
        engine.drain()
        engine.run(prompt(10, seed=2), output=2)  # statistics travel with a step
        assert told["saved_chunks"] == 320 // BLOCK
        assert told["lookups"] == 1
        stored: dict[str | None, list[Any]] = {}
        tokens: list[int] = []
        for seed in range(100, 200):  # until the publisher has found the subscriber
            stored, tokens = {}, prompt(320, seed=seed)
            engine.run(tokens)
            engine.drain()
            while socket.poll(100):
                batch = msgspec.msgpack.decode(socket.recv_multipart()[-1], type=KVEventBatch)
                for event in batch.events:
                    if isinstance(event, BlockStored):
                        stored.setdefault(event.medium, []).append(event)
            if "GPU" in stored:
                break
        ours = [h for event in stored["STORAGE"] for h in event.block_hashes]
        assert ours == [h for event in stored["GPU"] for h in event.block_hashes], "vLLM names its own blocks alike"
        assert [t for event in stored["STORAGE"] for t in event.token_ids] == tokens
    finally:
        engine.close()
        socket.close(0)
