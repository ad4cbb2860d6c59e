"""The models of the other engine tests."""

from __future__ import annotations

from tests.vllm.conftest import hybrid_model, model

__all__ = ["hybrid_model", "model"]
