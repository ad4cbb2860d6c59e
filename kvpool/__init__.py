"""kvpool: share an LLM engine's KV cache through pluggable stores.

The names here are the public face for engines; stores and transports are written against :mod:`kvpool.store`,
:mod:`kvpool.transport` and :mod:`kvpool.codec`.
"""

from kvpool.config import Config
from kvpool.coordinator import Hit
from kvpool.hashes import BlockHashes, chain_hashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout, Buffers, Region
from kvpool.pool import KVPool, Transfer
from kvpool.portal import Portal
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import Status, Store

__version__ = "0.1.0.dev0"

__all__ = [
    "BlockHashes",
    "BlockLayout",
    "Buffers",
    "CacheGroup",
    "CacheSpec",
    "Config",
    "Hit",
    "KVPool",
    "Kind",
    "Namespace",
    "Portal",
    "Region",
    "Status",
    "Store",
    "Transfer",
    "__version__",
    "chain_hashes",
]
