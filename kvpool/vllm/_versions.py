"""vLLM's versions: which ones the connector is tested with, and everything that differs between them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import vllm

from kvpool.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["TESTED", "KVConnectorTransferResults", "event_extra_keys", "hash_block_size", "say_version"]

logger = logging.getLogger(__name__)

#: The releases that the tests run.
TESTED = ("0.30", "0.31", "0.32")
_TESTED = ", ".join(TESTED)

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError as error:  # older: loads would be reported through another hook, and requests would wait for ever
    raise UnsupportedError(
        f"kvpool does not work with vLLM {vllm.__version__}, which lacks the hook get_transfer_results; "
        f"install one of the tested versions: {_TESTED}"
    ) from error


def say_version(version: str = vllm.__version__) -> None:
    """Say at start which vLLM runs and which are tested.

    Another one is warned of and used: whatever has changed in the form of its blocks, the version is in the namespace.
    """
    if version.startswith(tuple(f"{release}." for release in TESTED)):
        logger.info("kvpool runs with vLLM %s (tested: %s)", version, _TESTED)
    else:
        logger.warning(
            "kvpool is tested with vLLM %s; this is %s, whose connector hooks may have changed. If requests fail or "
            "hang, install a tested version or leave the connector out.",
            _TESTED,
            version,
        )


def hash_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one block hash. From 0.32 on the engine core writes it into the cache configuration."""
    known: int | None = getattr(kv_cache_config, "hash_block_size", None)
    if known is not None:
        return known
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]


def event_extra_keys(request: Request, ranges: Sequence[tuple[int, int]]) -> list[tuple[Any, ...] | None] | None:
    """What the hashes of these token ranges cover beside tokens, as KV events tell it. From 0.31 on untagged."""
    from vllm.v1.core import kv_cache_utils

    keys = [kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)[0] for start, end in ranges]
    publish = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return keys if publish is None else publish(keys)
