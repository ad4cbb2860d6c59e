"""The vLLM connector: ``kv_connector_module_path="kvpool.vllm"``, ``kv_connector="KVPoolConnector"``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool.vllm.connector import KVPoolConnector

__all__ = ["KVPoolConnector"]


def __getattr__(name: str) -> object:
    # Late, because the plugin is loaded while vLLM itself is still being imported.
    if name == "KVPoolConnector":
        from kvpool.vllm.connector import KVPoolConnector

        return KVPoolConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
