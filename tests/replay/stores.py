"""Stores that lie, named by their class in a URL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from kvpool.errors import StoreError
from kvpool.memory import Buffers
from kvpool.registry import URL, create_store
from kvpool.store import Results, Status, Store
from kvpool.testing.faults import FaultyStore

__all__ = ["Broken", "Lazy", "Locked", "Mixed"]


class _Lying(FaultyStore):
    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls(create_store("memory://"))


class Lazy(_Lying):
    """Says that it has read what it has not."""

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        results = Results.empty(len(keys), Status.OK)
        results.nbytes[:] = into.nbytes
        return results


class Mixed(_Lying):
    """Gives every key of a batch its neighbour's value."""

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        return await super().get_into(keys, into.select(np.roll(np.arange(len(keys)), 1)), deadline=deadline)


class Locked(_Lying):
    """Shared, but it cannot be opened."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.capabilities = replace(self.capabilities, shared=True)

    async def __aenter__(self) -> Self:
        raise StoreError("the key is missing")


class Broken(_Lying):
    """Fails in a way that no contract has foreseen."""

    async def __aenter__(self) -> Self:
        raise RuntimeError("of a kind nobody thought of")
