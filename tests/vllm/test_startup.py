"""What the connector says, and refuses, when vLLM starts."""

from __future__ import annotations

import dataclasses
import io
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.config import LoRAConfig, MultiModalConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpool.config import Config
from kvpool.errors import ConfigError, LayoutError, UnsupportedError
from kvpool.keys import Namespace
from kvpool.registry import create_transport
from kvpool.vllm import KVPoolConnector, weights
from kvpool.vllm.connector import _private_url
from kvpool.vllm.layout import block_layouts, cache_spec
from kvpool.vllm.namespace import model_facts, seed_facts
from kvpool.vllm.weights import file_digest, weights_fingerprint
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
    return cls(**({"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32} | options))


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
        ({"transport": "inprocess://here"}, "transport: inprocess://here .* zmq"),
        ({"transport": "zmq+ipc://"}, "transport: zmq.* share"),
        ({"store": "tests.vllm.hanging:OnlyAsyncio", "event_loop": "trio"}, "event_loop: OnlyAsyncio"),
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


def test_adapters_that_bypass_the_pool_are_said(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvpool")
    config = vllm_config(model)
    config.lora_config = LoRAConfig(max_lora_rank=8)
    connect(config)
    assert "LoRA adapter bypass the pool" in _said(caplog)


def test_the_version_of_vllm_is_said(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool")
    connect(vllm_config(model))
    assert f"vLLM {vllm.__version__} (tested: " in _said(caplog)


def test_what_is_said_is_seen_in_vllm_s_log(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, root = (logging.getLogger(name) for name in ("kvpool", "vllm", ""))
    seen = logging.StreamHandler(stream := io.StringIO())
    monkeypatch.setattr(theirs, "handlers", [seen])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    with monkeypatch.context() as patch:
        patch.setattr(root, "handlers", [])
        ours.manager._clear_cache()  # type: ignore[attr-defined]
        connect(vllm_config(model))
        connect(vllm_config(model))
    assert stream.getvalue().count(f"kvpool runs with vLLM {vllm.__version__}") == 2
    monkeypatch.setattr(ours, "handlers", [])
    connect(vllm_config(model))
    assert not ours.handlers, "logging is set up by somebody else"


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


def _all_specs(cls: type[KVCacheSpec] = KVCacheSpec) -> set[type[KVCacheSpec]]:
    """Every kind of cache that vLLM has."""
    below = {c for c in cls.__subclasses__() if c.__module__.startswith("vllm.")}
    return below.union(*(_all_specs(c) for c in below))


def _mamba(mode: str = "align") -> MambaSpec:
    return MambaSpec(32, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode=mode)


#: One of each kind that is supported.
SUPPORTED: dict[type[KVCacheSpec], Callable[[], KVCacheSpec]] = {
    FullAttentionSpec: full,
    SlidingWindowSpec: lambda: full(SlidingWindowSpec, sliding_window=64),
    MLAAttentionSpec: lambda: full(MLAAttentionSpec, num_kv_heads=1),
    SlidingWindowMLASpec: lambda: full(SlidingWindowMLASpec, num_kv_heads=1, sliding_window=64),
    MambaSpec: _mamba,
    UniformTypeKVCacheSpecs: lambda: UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer.0": full()}),
}


@pytest.mark.parametrize("cls", [pytest.param(c, id=name) for name, c in sorted((c.__name__, c) for c in _all_specs())])
def test_every_kind_of_cache_is_supported_or_refused_by_its_name(model: Path, cls: type[KVCacheSpec]) -> None:
    config = vllm_config(model)
    if cls in SUPPORTED:
        assert cache_spec(config, caches(SUPPORTED[cls]())).groups[0].block_size == 32
    else:
        with pytest.raises(UnsupportedError, match=rf"attention spec {cls.__name__}, "):
            cache_spec(config, caches(cls.__new__(cls)))


def test_layers_of_one_group_are_of_one_kind(model: Path) -> None:
    mixed = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={"layer.0": full(), "layer.1": full(MLAAttentionSpec, num_kv_heads=1)}
    )
    with pytest.raises(UnsupportedError, match=r"mixes .*FullAttentionSpec.*MLAAttentionSpec"):
        cache_spec(vllm_config(model), caches(mixed))


def test_mamba_states_are_cached_in_align_mode_only(model: Path) -> None:
    for mode in ("none", "all"):
        with pytest.raises(UnsupportedError, match=f"Mamba mode '{mode}'"):
            cache_spec(vllm_config(model), caches(_mamba(mode)))


def test_a_cache_that_is_replayed_after_a_hit_is_refused(model: Path) -> None:
    replayed = full(SlidingWindowMLASpec, num_kv_heads=1, sliding_window=64, bounded_replay=True)
    with pytest.raises(UnsupportedError, match="64 tokens again after each hit"):
        cache_spec(vllm_config(model), caches(full(), replayed))


def test_which_ranks_hold_the_same_bytes(model: Path) -> None:
    """A latent is whole on every rank, a state differs on each, heads are shared out."""
    config = vllm_config(model, {"store": "file:///tmp"})
    config.parallel_config.tensor_parallel_size = 2
    groups = caches(*(make() for make in SUPPORTED.values()))
    assert [g.shards for g in cache_spec(config, groups).groups] == [2, 2, 1, 1, 2, 2]


def test_a_store_that_is_not_shared_is_refused_with_more_than_one_rank(model: Path) -> None:
    config = vllm_config(model, {"store": "memory://"})
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(ConfigError, match=r"store: MemoryStore .* 2 ranks"):
        connect(config)


def test_pools_of_one_engine_have_lookup_channels_of_their_own(model: Path) -> None:
    config = vllm_config(model)
    urls = {_private_url(config, Config.load({"store": store})) for store in ("file:///a", "file:///b", "file:///a")}
    assert len(urls) == 2
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.engine_id = "of somebody's / own choice" * 10
    assert create_transport(_private_url(config, Config.load({})))
    secret = Config.load({"store": "redis://:secret@127.0.0.1"})
    assert _private_url(config, secret) == _private_url(config, Config.load({"store": "redis://:other@127.0.0.1"}))


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

    @pytest.mark.parametrize(
        ("owner", "name", "value", "fact"),
        [
            ("model_config", "dtype", torch.bfloat16, "dtype"),
            ("model_config", "quantization", "fp8", "quantization"),
            ("model_config", "quantization_config", {"bits": 4}, "quantization_config"),
            ("model_config", "model_impl", "transformers", "code"),
            ("model_config", "code_revision", "v2", "code"),
            ("cache_config", "cache_dtype", "fp8", "kv_dtype"),
            ("cache_config", "kv_cache_dtype_skip_layers", ["0"], "kv_options"),
            ("parallel_config", "tensor_parallel_size", 2, "tensor_parallel"),
            ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel"),
        ],
    )
    def test_what_decides_the_bytes_is_a_fact(
        self, model: Path, owner: str, name: str, value: object, fact: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = vllm_config(model)
        before = model_facts(config, caches(full()), Config.load({}))
        monkeypatch.setattr(getattr(config, owner), name, value, raising=False)
        after = model_facts(config, caches(full()), Config.load({}))
        assert {k for k in before if before[k] != after[k]} == {fact}
        assert Namespace.of(before).digest != Namespace.of(after).digest

    @pytest.mark.parametrize(("fact", "change"), [
        ("groups", lambda c: setattr(c.kv_cache_groups[0], "kv_cache_spec", full(num_kv_heads=4))),
        ("groups", lambda c: setattr(c.kv_cache_groups[0], "kv_cache_spec", full(dtype=torch.bfloat16))),
        ("layers", lambda c: c.kv_cache_groups[0].layer_names.append("another")),
        ("layout", lambda c: setattr(c, "kv_cache_layout", "NHD")),
        ("hash_block_size", lambda c: setattr(c, "hash_block_size", 16)),
    ])  # fmt: skip
    def test_so_is_the_form_of_the_cache(self, model: Path, fact: str, change: Callable[[KVCacheConfig], None]) -> None:
        config, changed = vllm_config(model), caches(full())
        change(changed)
        before = model_facts(config, caches(full()), Config.load({}))
        after = model_facts(config, changed, Config.load({}))
        assert {k for k in before if before[k] != after[k]} == {fact}

    def test_so_are_the_model_s_configuration_the_tenant_and_the_version(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = vllm_config(model)
        before = model_facts(config, caches(full()), Config.load({}))

        def differing(**options: Any) -> set[str]:
            after = model_facts(config, caches(full()), Config.load(options))
            return {k for k in before if before[k] != after[k]}

        assert differing(tenant="other") == {"tenant"}
        assert differing(min_load_tokens=99, save_after_uses=2) == set()
        with monkeypatch.context() as patch:
            patch.setattr(vllm, "__version__", "0.99")
            assert differing() == {"engine_version"}
        monkeypatch.setattr(config.model_config.hf_config, "rms_norm_eps", 0.5)
        assert differing() == {"model"}

    def test_so_is_the_hash_chain(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.core import kv_cache_utils

        monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"1" * 32, raising=False)
        before = seed_facts(vllm_config(model))
        assert seed_facts(vllm_config(model)) == before
        assert seed_facts(vllm_config(model, prefix_caching_hash_algo="xxhash")) != before
        monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"2" * 32)
        assert seed_facts(vllm_config(model)) != before

    def test_so_is_how_images_are_read(self, tmp_path: Path) -> None:
        folder = write_llama(tmp_path / "m")
        config = vllm_config(folder)
        assert "multimodal" not in model_facts(config, caches(full()), Config.load({}))
        config.model_config.multimodal_config = MultiModalConfig()
        seen = [model_facts(config, caches(full()), Config.load({}))["multimodal"]]
        (folder / "preprocessor_config.json").write_text("{}")
        seen.append(model_facts(config, caches(full()), Config.load({}))["multimodal"])
        (folder / "preprocessor_config.json").write_text('{"size": 7}')
        seen.append(model_facts(config, caches(full()), Config.load({}))["multimodal"])
        config.model_config.multimodal_config.mm_processor_kwargs = {"do_resize": False}
        seen.append(model_facts(config, caches(full()), Config.load({}))["multimodal"])
        assert all(a != b for a, b in itertools.combinations(seen, 2))

    def test_a_label_takes_the_place_of_reading_the_weights(self, model: Path) -> None:
        facts = model_facts(vllm_config(model), caches(full()), Config.load({"model_fingerprint": "v7"}))
        assert facts["weights"] == "v7"

    def test_weights_that_cannot_be_found_are_refused_with_the_way_out(self, tmp_path: Path) -> None:
        folder = write_llama(tmp_path / "m")
        config = vllm_config(folder)
        os.remove(folder / "model.safetensors")
        with pytest.raises(ConfigError, match="model_fingerprint"):
            weights_fingerprint(config)

    @pytest.mark.parametrize("option", ["load_format", "model_weights"])
    def test_weights_that_come_from_elsewhere_need_a_label(self, model: Path, option: str) -> None:
        config = vllm_config(model)
        if option == "load_format":
            config.load_config.load_format = "tensorizer"
        else:
            config.model_config.model_weights = "s3://bucket/model"
        with pytest.raises(ConfigError, match="model_fingerprint"):
            weights_fingerprint(config)
        facts = model_facts(config, caches(full()), Config.load({"model_fingerprint": "v7"}))
        assert facts["weights"] == "v7"

    def test_weights_are_looked_for_where_the_engine_has_put_them(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two caches may hold different states of one model."""
        config, found = vllm_config(model), {}
        for name in ("", "elsewhere"):
            folder = tmp_path / "hub" / name / "models--a--b"
            snapshot = write_llama(folder / "snapshots" / "1", seed=len(name))
            (folder / "refs").mkdir()
            (folder / "refs" / "main").write_text("1")
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
            monkeypatch.setattr(config.load_config, "download_dir", str(tmp_path / "hub" / name) if name else None)
            monkeypatch.setattr(config.model_config, "model", "a/b")
            found[name] = weights_fingerprint(config)
            assert found[name] == weights_fingerprint(vllm_config(snapshot))
        assert found[""] != found["elsewhere"]

    @pytest.mark.parametrize(("one", "two"), [("01" * 32, "23" * 32), ("01" * 20, "23" * 20)])
    def test_files_of_a_hub_cache_are_known_by_their_content_name(self, tmp_path: Path, one: str, two: str) -> None:
        folder = write_llama(tmp_path / "snapshots" / "abc")
        blobs = tmp_path / "blobs"
        blobs.mkdir()
        (folder / "model.safetensors").rename(blobs / one)
        (folder / "model.safetensors").symlink_to(blobs / one)
        before = weights_fingerprint(vllm_config(folder))
        (blobs / one).rename(blobs / two)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(blobs / two)
        assert weights_fingerprint(vllm_config(folder)) != before

    def test_a_folder_that_happens_to_be_called_blobs_is_no_hub_cache(self, tmp_path: Path) -> None:
        one, other = write_llama(tmp_path / "a" / "blobs"), write_llama(tmp_path / "b" / "blobs", seed=1)
        assert weights_fingerprint(vllm_config(one)) != weights_fingerprint(vllm_config(other))


class TestFilesThatWereReadBefore:
    """The digest of a weight file is noted, so that a restart does not read gigabytes again."""

    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(weights, "SETTLED_S", -1.0)
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"weights" * 1000)
        return file

    def notes(self, tmp_path: Path) -> list[Path]:
        return sorted((tmp_path / "cache" / "kvpool" / "weights").glob("*"))

    def test_one_is_not_read_again(self, file: Path, tmp_path: Path) -> None:
        first = file_digest(file)
        (note,) = self.notes(tmp_path)
        assert file_digest(file) == first == note.read_text()
        note.write_text("0" * 31 + "7")
        assert file_digest(file) == "0" * 31 + "7", "it was read again"

    def test_one_that_changed_is(self, file: Path, tmp_path: Path) -> None:
        first = file_digest(file)
        stat = file.stat()
        file.write_bytes(b"Weights" * 1000)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as rsync and tar leave it
        assert file_digest(file) != first
        assert len(self.notes(tmp_path)) == 2

    @pytest.mark.parametrize("text", ["", "0", "-1", "7" * 33, "g" * 32])
    def test_a_note_that_makes_no_sense_is_replaced(self, file: Path, tmp_path: Path, text: str) -> None:
        first = file_digest(file)
        (note,) = self.notes(tmp_path)
        note.write_text(text)
        assert file_digest(file) == first == note.read_text()

    def test_one_that_was_just_written_is_not_noted(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(weights, "SETTLED_S", 1000.0)
        file_digest(file)
        assert not self.notes(tmp_path)

    def test_without_a_place_for_notes_nothing_is_lost(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = file_digest(file)
        monkeypatch.setenv("XDG_CACHE_HOME", str(file))
        assert file_digest(file) == first

    def test_a_user_without_a_home_needs_none(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a container that runs under a number of its own."""
        first = file_digest(file)
        for name in ("XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name)
        monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
        assert file_digest(file) == first


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

    def test_a_block_of_several_kernel_blocks(self) -> None:
        """They stand one after the other in the first dimension."""
        config = caches(full())
        memory = torch.arange(16 * 2 * 16, dtype=torch.float32).reshape(16, 2, 16)  # each of the 8 blocks is two
        (layout,) = block_layouts({"layer.0": memory}, config)
        out = np.zeros((2, layout.block_bytes), np.uint8)
        layout.gather([5, 2], out)
        assert out.tobytes() == memory[[10, 11, 4, 5]].numpy().tobytes()
        with pytest.raises(LayoutError, match=r"layer\.0"):  # a gap between the two
            block_layouts({"layer.0": torch.zeros(16, 32)[:, :16]}, config)

    def test_pages_of_one_allocation(self) -> None:
        """vLLM on CPU backs all layers with one allocation; a layer is a strided view."""
        config = caches(full())
        config.kv_cache_groups[0].layer_names.append("layer.1")
        memory = torch.arange(8 * 2 * 64, dtype=torch.float32).reshape(8, 2, 64)
        (layout,) = block_layouts({"layer.0": memory[:, 0], "layer.1": memory[:, 1]}, config)
        out = np.zeros((2, layout.block_bytes), np.uint8)
        layout.gather([5, 2], out)
        assert out.tobytes() == memory[[5, 2]].numpy().tobytes()


def test_the_spec_takes_the_engine_s_own_hash_block(model: Path) -> None:
    config = caches(full())
    config.hash_block_size = 16
    spec = cache_spec(vllm_config(model), config)
    assert (spec.groups[0].block_size, spec.hash_block_size) == (32, 16)
