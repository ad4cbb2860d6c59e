"""kvpool: share an LLM engine's KV cache through pluggable stores.

The names here are the public face for engines; stores and transports are written against :mod:`kvpool.store`,
:mod:`kvpool.transport` and :mod:`kvpool.codec`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

#: Where the names come from. Imported when first asked for: ``import kvpool``, which each module of kvpool and its
#: command line begin with, would else load numpy, pydantic and an event loop (0.6 s in place of 0.03 on a busy core).
_HOMES = {
    "BlockHashes": "kvpool.hashes",
    "BlockLayout": "kvpool.memory",
    "Buffers": "kvpool.memory",
    "CacheGroup": "kvpool.spec",
    "CacheSpec": "kvpool.spec",
    "Config": "kvpool.config",
    "Hit": "kvpool.coordinator",
    "KVPool": "kvpool.pool",
    "Kind": "kvpool.spec",
    "Namespace": "kvpool.keys",
    "Portal": "kvpool.portal",
    "Region": "kvpool.memory",
    "Status": "kvpool.store",
    "Store": "kvpool.store",
    "Transfer": "kvpool.pool",
    "chain_hashes": "kvpool.hashes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
