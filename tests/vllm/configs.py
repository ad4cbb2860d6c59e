"""Configurations of vLLM, and the connector on them, without an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)

from kvpool.vllm import KVPoolConnector
from tests.vllm.engine import transfer_config

#: Shared and limited, so that nobody is warned; made, but never opened.
QUIET = "file:///never/opened?capacity=1GiB"


@mock.patch.dict(os.environ)  # vLLM sets variables for the engine that is to come
def vllm_config(
    model: Path, extra: dict[str, Any] | None = None, policy: str = "recompute", **options: Any
) -> VllmConfig:
    transfer = transfer_config({"store": QUIET} | (extra or {}), policy=policy)
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
