"""Engines on a model with Mamba states, and what their blocks are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpool.spec import Kind
from tests.vllm.engine import Engine

__all__ = ["block", "group", "start", "whole"]


def start(model: Path, store: object, **options: Any) -> Engine:
    """vLLM's kernels for these states take bf16 only."""
    options = {"kv_bytes": 24 << 20, "max_num_batched_tokens": 1024, "dtype": "bfloat16", **options}
    return Engine(model, {"store": store, "failed_key_ttl_s": 0}, **options)


def block(engine: Engine) -> int:
    """Tokens of a block: vLLM makes it so large that a page of attention holds a state."""
    size: int = engine.connector.spec.common_block
    return size


def group(engine: Engine, kind: Kind) -> int:
    """The first group of this kind."""
    return [g.kind for g in engine.connector.spec.groups].index(kind)


def whole(engine: Engine, tokens: int) -> int:
    """Tokens of the longest hit that a prompt of so many can have."""
    return (tokens - 1) // block(engine) * block(engine)
