"""A vLLM general plugin: registers the connector by name, so that no module path is needed."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Called by vLLM in each of its processes, through the entry point group ``vllm.general_plugins``."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVPoolConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVPoolConnector", "kvpool.vllm.connector", "KVPoolConnector")
