"""From vLLM's cache configuration and tensors to kvpool's spec and block layouts. Default deny: by exact type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvpool.errors import ConfigError, LayoutError, UnsupportedError
from kvpool.keys import Fact
from kvpool.memory import BlockLayout, Region
from kvpool.ranks import Parallel
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.vllm._versions import hash_block_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

#: What has been shown (docs/vllm.md tells how); anything else is refused by name.
_KINDS: dict[type, Kind] = {
    FullAttentionSpec: Kind.FULL,
    SlidingWindowSpec: Kind.SLIDING_WINDOW,
    MLAAttentionSpec: Kind.MLA,
    SlidingWindowMLASpec: Kind.SLIDING_WINDOW,
    MambaSpec: Kind.MAMBA,
}
#: One latent that all heads share, whole on every tensor-parallel rank.
_LATENT = (MLAAttentionSpec, SlidingWindowMLASpec)

__all__ = ["block_layouts", "cache_spec", "kv_heads", "layout_facts"]


def cache_spec(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CacheSpec:
    """The groups of this engine. Raises UnsupportedError with every reason why the pool cannot serve it."""
    reasons = _engine_reasons(vllm_config)
    ranks = vllm_config.parallel_config
    parallel = Parallel(ranks.tensor_parallel_size, ranks.pipeline_parallel_size)
    heads = kv_heads(vllm_config, kv_cache_config)
    groups = []
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        made = _cache_group(group)
        if isinstance(made, CacheGroup):
            try:
                groups.append(replace(made, shards=parallel.shards(heads[i])))
            except ConfigError as error:
                reasons.append(f"group {i}: {error}")
            if made.kind is Kind.MAMBA and vllm_config.speculative_config is not None:
                reasons.append(f"group {i}: Mamba states with speculative decoding are not supported yet")
        else:
            reasons.append(f"group {i} {made}")
    if reasons:
        raise UnsupportedError("kvpool cannot serve this engine: " + "; ".join(reasons))
    return CacheSpec(
        tuple(groups),
        hash_block_size(vllm_config, kv_cache_config),
        retention_interval=kv_cache_config.prefix_cache_retention_interval,
        parallel=parallel,
    )


def _cache_group(group: KVCacheGroupSpec) -> CacheGroup | str:
    """kvpool's view of one group, or why there is none. By exact type: a subclass may keep other bytes."""
    inner = _layer_specs(group)
    spec: Any = inner[0]
    if len({type(s) for s in inner}) != 1:
        return f"mixes the attention specs {sorted({type(s).__name__ for s in inner})}"
    kind = _KINDS.get(type(spec))
    if kind is None:
        known = ", ".join(t.__name__ for t in _KINDS)
        return f"has the attention spec {type(spec).__name__}, which is not supported (supported: {known})"
    if getattr(spec, "non_causal", False):
        return "attends non-causally, so the KV of a prefix depends on what follows it"
    if getattr(spec, "prefix_replay_tokens", 0):
        return f"has vLLM compute {spec.prefix_replay_tokens} tokens again after each hit, which is not supported"
    window = spec.sliding_window if kind is Kind.SLIDING_WINDOW else None
    mode = spec.mamba_cache_mode if kind is Kind.MAMBA else "align"
    cacheable = group.enable_kv_transfer and spec.prefix_cacheable
    return CacheGroup(kind, spec.block_size, window=window, cacheable=cacheable, mamba_mode=mode)


def _layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    """The spec of each layer where they differ (layers of one kind whose pages differ in size), else the one of all."""
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if type(spec) is UniformTypeKVCacheSpecs else [spec]


def _engine_reasons(vllm_config: VllmConfig) -> list[str]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    sizes = {
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1),
        "decode_context_parallel_size": getattr(parallel, "decode_context_parallel_size", 1),
    }
    reasons = [f"{name}={n} is not supported yet, only 1" for name, n in sizes.items() if n != 1]
    if not cache.enable_prefix_caching:
        reasons.append("prefix caching is off; start vLLM with enable_prefix_caching=True")
    drafter = vllm_config.speculative_config
    if drafter is not None and drafter.method != "ngram":
        # A drafter with layers of its own keeps KV in the groups, which depends on its weights and on what follows.
        reasons.append(f"speculative decoding by {drafter.method!r} is not supported yet, only by 'ngram'")
    if vllm_config.device_config.device_type != "cpu":
        reasons.append(f"device {vllm_config.device_config.device_type!r} is not supported yet, only 'cpu'")
    if cache.prefix_match_unit is not None:
        reasons.append(f"prefix_match_unit={cache.prefix_match_unit} (hits inside a block) is not supported yet")
    if vllm_config.model_config.is_encoder_decoder:
        reasons.append("encoder-decoder models (cross attention) are not supported")
    return reasons


def kv_heads(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[int | None]:
    """For each group, the KV heads of the whole model: what decides which ranks hold the same bytes.

    1 for a latent, which all heads share; None for Mamba states, of which every rank has its own.
    """

    def heads(group: KVCacheGroupSpec) -> int | None:
        kind = type(_layer_specs(group)[0])
        if kind is MambaSpec:
            return None
        return 1 if kind in _LATENT else vllm_config.model_config.get_total_num_kv_heads()

    return [heads(group) for group in kv_cache_config.kv_cache_groups]


def block_layouts(kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig) -> list[BlockLayout]:
    """Where each group's blocks live, from the tensors that vLLM registered for each layer.

    Raises LayoutError for a tensor whose blocks are not one dense span each.
    """
    layouts = []
    for group in kv_cache_config.kv_cache_groups:
        # Layers that share one tensor are moved once.
        tensors = {kv_caches[name].data_ptr(): (name, kv_caches[name]) for name in group.layer_names}
        regions = []
        strides = []
        sizes = []
        for name, tensor in tensors.values():
            block = _block(tensor, kv_cache_config.num_blocks)
            if block is None:
                raise LayoutError(
                    f"layer {name}: KV cache of shape {tuple(tensor.shape)}, strides {tensor.stride()} is not "
                    f"{kv_cache_config.num_blocks} blocks of one dense span each"
                )
            item = tensor.element_size()
            size = block.numel() * item
            stride = tensor.stride(0) * item * (tensor.shape[0] // kv_cache_config.num_blocks)
            span = (kv_cache_config.num_blocks - 1) * stride + size
            regions.append(Region(tensor.data_ptr(), span, tensor, tensor.device.type))
            strides.append(stride)
            sizes.append(size)
        count = len(regions)
        layouts.append(
            BlockLayout(
                tuple(regions),
                np.arange(count, dtype=np.intp),
                np.zeros(count, np.int64),
                np.array(strides, np.int64),
                np.array(sizes, np.int64),
                kv_cache_config.num_blocks,
            )
        )
    return layouts


def _block(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor | None:
    """The first block, ``[kernel blocks, ...]``; None if blocks are not one dense span each.

    A kernel may divide each block into several of its own, which then stand one after the other in the first dimension.
    """
    if not num_blocks or tensor.shape[0] % num_blocks or not tensor.shape[0]:
        return None
    block = tensor[: tensor.shape[0] // num_blocks]
    span = 1 + sum((n - 1) * s for n, s in zip(block.shape, block.stride(), strict=True))
    return block if span == block.numel() else None


def layout_facts(
    kv_caches: Mapping[str, torch.Tensor], vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> dict[str, Fact]:
    """What only the worker knows of the bytes of a block: shapes, dtypes, packing, kernel and instruction set.

    The same on all ranks of an engine, whichever layers they hold.
    """
    context = vllm_config.compilation_config.static_forward_context
    layers: dict[str, Fact] = {}
    for name, tensor in kv_caches.items():
        layer = context.get(name)
        backend = layer.get_attn_backend() if layer is not None and hasattr(layer, "get_attn_backend") else None
        block = tensor[: tensor.shape[0] // kv_cache_config.num_blocks]
        form: dict[str, Fact] = {
            "shape": list(block.shape),
            "strides": list(block.stride()),
            "dtype": str(tensor.dtype),
            "backend": getattr(backend, "__qualname__", str(backend)),
        }
        layers[json.dumps(form)] = form
    device = next(iter(kv_caches.values())).device.type
    return {
        "device": device,
        # The CPU kernels pack K and V for the instruction set they run on.
        "instructions": torch.backends.cpu.get_cpu_capability() if device == "cpu" else "",
        "amx": device == "cpu" and bool(torch.cpu._is_amx_tile_supported()),
        "layers": [layers[key] for key in sorted(layers)],
    }
