"""What decides the bytes of a vLLM engine's blocks, as the facts of a namespace."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvpool.config import Config
from kvpool.keys import Fact, Namespace
from kvpool.registry import parse_url
from kvpool.store import Store
from kvpool.vllm._versions import hash_block_size
from kvpool.vllm.weights import file_digest, model_folder, weights_fingerprint

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = [
    "hash_scheme",
    "model_facts",
    "say_namespace",
    "say_reset",
    "say_store",
    "seed_facts",
    "warn_of_adapters",
    "warn_of_random_seed",
]

logger = logging.getLogger(__name__)

#: Names and versions that a model's configuration carries and that say nothing of its KV.
_NAMES = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})
#: Settings of vLLM that choose what code runs, what a KV cache holds, and how an image is read.
_CODE = ("model_impl", "model_class_overrides", "code_revision", "trust_remote_code", "runner", "convert")
_KV_OPTIONS = ("kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill", "swa_bounded_replay")
_MULTIMODAL = ("mm_processor_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate", "video_pruning_method")
#: Position embeddings whose values do not depend on how long a context the engine allows.
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn", "mrope"})


def model_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config) -> dict[str, Fact]:
    """Everything known when the engine starts. Reads the weight files unless ``model_fingerprint`` is set."""
    import vllm

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    architecture = _plain({k: v for k, v in model.hf_config.to_dict().items() if k not in _NAMES})
    facts: dict[str, Fact] = {
        "engine": "vllm",
        "engine_version": vllm.__version__,
        "model": architecture,
        "weights": config.model_fingerprint or weights_fingerprint(vllm_config),
        "dtype": str(model.dtype),
        "code": {name: str(getattr(model, name, "")) for name in _CODE},
        "quantization": str(model.quantization),
        "quantization_config": str(getattr(model, "quantization_config", None)),
        # Scales of a quantised KV cache come with the weights.
        "kv_dtype": str(cache.cache_dtype),
        "kv_options": {name: str(getattr(cache, name, "")) for name in _KV_OPTIONS},
        "groups": [f"{type(g.kv_cache_spec).__name__} {g.kv_cache_spec}" for g in kv_cache_config.kv_cache_groups],
        "layers": [list(g.layer_names) for g in kv_cache_config.kv_cache_groups],
        "layout": str(kv_cache_config.kv_cache_layout),
        "hash_block_size": hash_block_size(vllm_config, kv_cache_config),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "tenant": config.tenant,
    }
    if not set(_rope_types({k: v for k, v in architecture.items() if "rope" in k})) <= _FIXED_ROPE:
        facts["max_model_len"] = model.max_model_len
    if model.multimodal_config is not None:
        facts["multimodal"] = _multimodal(model)
    return facts


def _multimodal(model: ModelConfig) -> dict[str, Fact]:
    """How inputs become embeddings; vLLM hashes the inputs themselves."""
    options: dict[str, Fact] = {name: str(getattr(model.multimodal_config, name, "")) for name in _MULTIMODAL}
    folder = model_folder(model.model, model.revision)
    return options | {file.name: file_digest(file) for file in sorted(folder.glob("*processor*.json"))}


def hash_scheme(vllm_config: VllmConfig) -> str:
    """How vLLM chains its block hashes."""
    return f"vllm-{vllm_config.cache_config.prefix_caching_hash_algo}"


def seed_facts(vllm_config: VllmConfig) -> dict[str, Fact]:
    """The start of vLLM's hash chain; known once the engine core has set it, so ask at the first request."""
    from vllm.v1.core import kv_cache_utils

    return {"hash_scheme": hash_scheme(vllm_config), "hash_seed": kv_cache_utils.NONE_HASH.hex()}


def say_store(config: Config, store: Store, role: str) -> None:
    """One line at start for whoever compares two engines, and a warning for a store that is not what many expect."""
    url = parse_url(config.store)
    epoch = f"of the label {config.epoch_label!r}" if config.epoch_label else "common to all that were never reset"
    logger.info(
        "kvpool: the store is %s; this engine is %s, tenant %r, epoch %s. The namespace is said with the first step.",
        url,
        role,
        config.tenant,
        epoch,
    )
    named = url if "store" in config.model_fields_set else f"{url} (the default; none is configured)"
    if not store.capabilities.shared:
        logger.warning(
            "kvpool: the store %s is this process's own: no other engine shares its values, and they end with it. "
            'Engines share through "store": "file:///path?capacity=100GiB", for one, or "redis://host".',
            named,
        )
    if store.capabilities.unlimited:
        logger.warning(
            "kvpool: the store %s has no capacity and grows until there is no room left. Set one, such as "
            "?capacity=100GiB.",
            named,
        )


def say_namespace(store: str | Mapping[str, Any], namespace: Namespace, epoch: bytes) -> None:
    """What decides who shares with this engine, once it is known, and after a reset again."""
    facts = namespace.facts
    layout = hashlib.blake2b(repr(facts["layout"]).encode(), digest_size=4).hexdigest()
    logger.info(
        "kvpool: namespace %s = engine %s, layout %s, epoch %s. Engines with the same namespace share; where it "
        "differs, `kvpool inspect %s --namespace NAMESPACE` shows the facts of each.",
        namespace.hex,
        str(facts["engine"])[:8],
        layout,
        epoch.hex()[:8],
        parse_url(store),
    )


def say_reset(epoch: bytes) -> None:
    """That sharing has ended, in both directions."""
    logger.warning(
        "kvpool: the cache was reset: this engine uses a new epoch, %s. It finds nothing that was stored before, and "
        "until it is started again it shares with no other engine, in neither direction.",
        epoch.hex()[:8],
    )


def warn_of_random_seed(vllm_config: VllmConfig) -> None:
    """Say at start-up if no other process can ever hit what this one stores."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        logger.warning(
            "kvpool: block hashes of %s start from a random seed in each process, so no other engine can share what "
            "this one stores. Use prefix_caching_hash_algo='sha256', or set PYTHONHASHSEED to one value everywhere.",
            algorithm,
        )


def warn_of_adapters(vllm_config: VllmConfig) -> None:
    """Say at start-up that requests with a LoRA adapter gain nothing.

    vLLM hashes an adapter by name, and nobody can tell which content it has loaded: it reads the files again after it
    has dropped an adapter, whatever is in them by then.
    """
    if vllm_config.lora_config is not None:
        logger.warning(
            "kvpool: requests with a LoRA adapter bypass the pool, because their block hashes name the adapter and not "
            "its content. Requests without one use it."
        )


def _plain(value: Any) -> Any:
    """As JSON holds it: what a configuration keeps in other types goes in by its text."""
    return json.loads(json.dumps(value, default=str, allow_nan=True), parse_constant=str)


def _rope_types(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("rope_type", "type") and isinstance(inner, str):
                yield inner
            else:
                yield from _rope_types(inner)
