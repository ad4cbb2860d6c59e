"""Reads what a pool has left in a store for a person: which facts a namespace stands for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import anyio

from kvpool.errors import ConfigError
from kvpool.keys import Fact
from kvpool.memory import Buffers
from kvpool.store import Store, SupportsScan

__all__ = ["read_manifests"]

_TIMEOUT_S = 10.0
_MAX_BYTES = 16 << 20


async def read_manifests(store: Store, namespace: str) -> AsyncIterator[dict[str, Fact]]:
    """The manifests of ``namespace`` (32 hex digits) in an open store; none if it was evicted, or never came.

    There may be two: a worker that has not yet heard the engine's own facts leaves a shorter one. Raises ConfigError
    for a store that cannot list its keys, StoreError as the store does.
    """
    if not isinstance(store, SupportsScan):
        raise ConfigError(f"{type(store).__name__} cannot list its keys")
    keys = [key async for key in store.scan(f"{namespace}/manifest/")]
    for key in keys:
        length = key.rpartition("/")[2]
        if not length.isdecimal() or not 0 < int(length) <= _MAX_BYTES:
            continue
        text = bytearray(int(length))
        got = await store.get_into([key], Buffers.of(text), deadline=anyio.current_time() + _TIMEOUT_S)
        if got.ok.all():
            try:
                told = json.loads(text)
            except (ValueError, RecursionError):  # somebody else's
                continue
            if isinstance(told, dict):
                yield told
