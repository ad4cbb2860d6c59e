"""The vLLM connector: ``kv_connector_module_path="kvpool.vllm"``, ``kv_connector="KVPoolConnector"``."""

from kvpool.vllm.connector import KVPoolConnector

__all__ = ["KVPoolConnector"]
