"""What the connector says, and refuses, when vLLM starts."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
)

from kvpool.config import Config
from kvpool.errors import ConfigError, LayoutError, UnsupportedError
from kvpool.vllm import KVPoolConnector
from kvpool.vllm.layout import block_layouts, cache_spec
from kvpool.vllm.namespace import model_facts, weights_fingerprint
from tests.vllm.models import write_llama


def vllm_config(
    model: Path, extra: dict[str, Any] | None = None, policy: str = "recompute", **options: Any
) -> VllmConfig:
    transfer = {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra or {},
    }
    arguments: dict[str, Any] = {"model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "block_size": 32}
    arguments |= {"kv_transfer_config": transfer, **options}
    return EngineArgs(**arguments).create_engine_config()


def caches(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def full(cls: Any = FullAttentionSpec, **options: Any) -> Any:
    return cls(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, **options)


def connect(
    config: VllmConfig, *specs: KVCacheSpec, role: KVConnectorRole = KVConnectorRole.SCHEDULER
) -> KVPoolConnector:
    made = KVPoolConnector(config, role, caches(*(specs or (full(),))))
    made.shutdown()
    return made


def _said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("kvpool"))


def test_a_misspelt_setting_stops_the_engine_and_names_the_field(model: Path) -> None:
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match="load_timeout_s"):
            connect(vllm_config(model, {"load_timout_s": 3}), role=role)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"store": "flie:///x"}, "flie"),
        ({"store": "memory://?capacity=many"}, "capacity"),
        ({"load_timeout_s": -1}, "load_timeout_s"),
        ({"codec": 3}, "codec"),
    ],
)
def test_an_impossible_value_stops_the_engine_and_names_it(model: Path, extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        connect(vllm_config(model, extra))


def test_the_failure_policy_is_said(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvpool")
    connect(vllm_config(model, policy="recompute"))
    assert not _said(caplog)
    connect(vllm_config(model, policy="fail"))
    assert "kv_load_failure_policy" in _said(caplog)
    assert "recompute" in _said(caplog)


def test_random_hash_seeds_are_said(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "kvpool")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    connect(vllm_config(model, prefix_caching_hash_algo="xxhash"))
    assert not _said(caplog)
    monkeypatch.delenv("PYTHONHASHSEED")
    connect(vllm_config(model, prefix_caching_hash_algo="xxhash"))
    assert "random seed" in _said(caplog)


def test_every_reason_is_named_at_once(model: Path) -> None:
    config = vllm_config(model, enable_prefix_caching=False)
    local = full(ChunkedLocalAttentionSpec, attention_chunk_size=64)
    with pytest.raises(UnsupportedError) as refused:
        connect(config, full(), local)
    for part in ("prefix caching is off", "group 1 has the attention spec ChunkedLocalAttentionSpec"):
        assert part in str(refused.value)


def test_specs_are_matched_by_exact_type(model: Path) -> None:
    config = vllm_config(model)
    with pytest.raises(UnsupportedError, match="SinkFullAttentionSpec"):
        connect(config, full(SinkFullAttentionSpec, sink_len=4))

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Novel(FullAttentionSpec):
        pass

    with pytest.raises(UnsupportedError, match="Novel"):
        connect(config, full(Novel))
    with pytest.raises(UnsupportedError, match="non-causally"):
        connect(config, full(non_causal=True))


def test_it_never_asks_for_delivery(model: Path) -> None:
    assert connect(vllm_config(model)).requires_kv_delivery is False


def test_two_engines_never_meet_on_one_lookup_channel(model: Path) -> None:
    config = vllm_config(model)
    assert config.kv_transfer_config is not None
    other = vllm_config(model)
    assert other.kv_transfer_config is not None
    assert config.kv_transfer_config.engine_id != other.kv_transfer_config.engine_id


class TestNamespace:
    """What the facts of a namespace do and do not depend on."""

    def facts(self, model: Path, **options: Any) -> dict[str, Any]:
        config = vllm_config(model, **options)
        return dict(model_facts(config, caches(full()), Config.load({})))

    def test_the_folder_name_does_not_matter_the_weights_do(self, tmp_path: Path) -> None:
        one, same = write_llama(tmp_path / "a" / "x"), write_llama(tmp_path / "b" / "y")
        other = write_llama(tmp_path / "c" / "x", seed=1)
        assert self.facts(one) == self.facts(same)
        differing = {k for k, v in self.facts(one).items() if self.facts(other)[k] != v}
        assert differing == {"weights"}

    def test_one_changed_weight_is_another_namespace(self, tmp_path: Path) -> None:
        folder = write_llama(tmp_path / "m")
        before = self.facts(folder)["weights"]
        file = folder / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[len(data) * 2 // 3] ^= 1
        file.write_bytes(data)
        assert self.facts(folder)["weights"] != before

    def test_a_kv_dtype_is_another_namespace(self, model: Path) -> None:
        assert self.facts(model) != self.facts(model, dtype="bfloat16")

    def test_a_label_takes_the_place_of_reading_the_weights(self, model: Path) -> None:
        facts = model_facts(vllm_config(model), caches(full()), Config.load({"model_fingerprint": "v7"}))
        assert facts["weights"] == "v7"

    def test_weights_that_cannot_be_found_are_refused_with_the_way_out(self, tmp_path: Path) -> None:
        folder = write_llama(tmp_path / "m")
        config = vllm_config(folder)
        os.remove(folder / "model.safetensors")
        with pytest.raises(ConfigError, match="model_fingerprint"):
            weights_fingerprint(config)

    def test_files_of_a_hub_cache_are_known_by_their_content_name(self, tmp_path: Path) -> None:
        folder = write_llama(tmp_path / "snapshots" / "abc")
        blobs = tmp_path / "blobs"
        blobs.mkdir()
        (folder / "model.safetensors").rename(blobs / "0123")
        (folder / "model.safetensors").symlink_to(blobs / "0123")
        before = weights_fingerprint(vllm_config(folder))
        (blobs / "0123").rename(blobs / "4567")
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(blobs / "4567")
        assert weights_fingerprint(vllm_config(folder)) != before


class TestLayout:
    def test_a_tensor_whose_blocks_are_not_dense_is_refused_by_name(self) -> None:
        config = caches(full())
        with pytest.raises(LayoutError, match=r"layer\.0"):
            block_layouts({"layer.0": torch.zeros(2, 8, 32, 64).transpose(0, 1)}, config)
        with pytest.raises(LayoutError, match=r"layer\.0"):
            block_layouts({"layer.0": torch.zeros(9, 32, 64)}, config)

    def test_layers_that_share_one_tensor_are_moved_once(self) -> None:
        config = caches(full())
        config.kv_cache_groups[0].layer_names.append("layer.1")
        memory = torch.zeros(8, 32, 64)
        (layout,) = block_layouts({"layer.0": memory, "layer.1": memory}, config)
        assert layout.block_bytes == 32 * 64 * 4

    def test_pages_of_one_allocation(self) -> None:
        """vLLM on CPU backs all layers with one allocation; a layer is a strided view."""
        config = caches(full())
        config.kv_cache_groups[0].layer_names.append("layer.1")
        memory = torch.arange(8 * 2 * 64, dtype=torch.float32).reshape(8, 2, 64)
        (layout,) = block_layouts({"layer.0": memory[:, 0], "layer.1": memory[:, 1]}, config)
        import numpy as np

        out = np.zeros((2, layout.block_bytes), np.uint8)
        layout.gather([5, 2], out)
        assert out.tobytes() == memory[[5, 2]].numpy().tobytes()


def test_the_spec_takes_the_engine_s_own_hash_block(model: Path) -> None:
    config = caches(full())
    config.hash_block_size = 16
    spec = cache_spec(vllm_config(model), config)
    assert (spec.groups[0].block_size, spec.hash_block_size) == (32, 16)
