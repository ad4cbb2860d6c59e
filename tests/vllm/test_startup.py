"""What the connector says, and refuses, when vLLM starts."""

from __future__ import annotations

import dataclasses
import io
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import LoRAConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpool.config import Config
from kvpool.errors import ConfigError, UnsupportedError
from kvpool.registry import create_transport
from kvpool.vllm.connector import _private_url
from kvpool.vllm.layout import cache_spec
from tests.vllm.configs import QUIET, caches, connect, full, vllm_config


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


def test_all_mistakes_are_named_at_once(model: Path) -> None:
    extra = {"store": "file:///x?capcity=1GiB", "load_timeout_s": 0, "transport": "zmq+tcp://h:1?x=2", "stor": 1}
    with pytest.raises(ConfigError) as raised:
        connect(vllm_config(model, extra))
    said = str(raised.value)
    for mistake in ("did you mean 'capacity'", "load_timeout_s=0", "unknown option x='2'", "did you mean 'store'"):
        assert said.count(mistake) == 1
    assert said.count("kv_connector_extra_config: ") == 4
    assert "config: " not in said.replace("kv_connector_extra_config: ", "")


def test_the_store_is_said_without_its_secrets(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpool")
    extra = {"store": "redis://me:hunter2@cache.example:6380", "tenant": "blue", "epoch_label": "v7"}
    connect(vllm_config(model, extra))
    (line,) = [line for line in _said(caplog).splitlines() if "the store is" in line]
    assert "redis://me:***@cache.example:6380; this engine is kv_both, tenant 'blue', epoch of the label 'v7'" in line
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(
    ("store", "warned"),
    [
        (None, ["memory:// (the default; none is configured) is this process's own", "memory:// .* has no capacity"]),
        ("memory://?capacity=1GiB", ["memory://.* is this process's own"]),
        ("file:///kv", ["file:///kv has no capacity"]),
        ("guarded://?store=checked://%3Fstore=file:///kv", ["guarded.* has no capacity"]),
        ("tiered://?near=memory://%3Fcapacity=1GiB&shared=file:///kv", ["tiered.* has no capacity"]),
        ("tiered://?near=memory://&shared=redis://host", ["tiered.* has no capacity"]),
        ("tiered://?near=memory://%3Fcapacity=1GiB&shared=redis://host", []),
        ("redis://host", []),
        (QUIET, []),
    ],
)
def test_a_store_that_is_private_or_grows_without_end_is_warned_of(
    model: Path, caplog: pytest.LogCaptureFixture, store: str | None, warned: list[str]
) -> None:
    caplog.set_level(logging.WARNING, "kvpool")
    config = vllm_config(model, {"store": store})
    if store is None:
        assert config.kv_transfer_config is not None
        del config.kv_transfer_config.kv_connector_extra_config["store"]
    connect(config)
    lines = _said(caplog).splitlines()
    assert len(lines) == len(warned)
    for line, pattern in zip(lines, warned, strict=True):
        assert re.search(pattern.replace("(", r"\(").replace(")", r"\)"), line)


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


def test_drafters_with_kv_of_their_own_are_refused_by_name(model: Path) -> None:
    ngram: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    connect(vllm_config(model, speculative_config=ngram))
    with pytest.raises(UnsupportedError, match="group 1: Mamba states with speculative decoding"):
        connect(vllm_config(model, speculative_config=ngram), full(), _mamba())
    for method in ("eagle", "draft_model"):
        config = vllm_config(model, speculative_config={**ngram, "method": method, "model": str(model)})
        with pytest.raises(UnsupportedError, match=f"speculative decoding by '{method}' is not supported yet"):
            connect(config)


def test_hits_inside_a_block_are_refused_by_name(model: Path) -> None:
    config = vllm_config(model, prefix_match_unit=16)
    with pytest.raises(UnsupportedError, match="prefix_match_unit=16"):
        connect(config)


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
