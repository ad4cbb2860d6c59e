"""The hit search and the load, store and lookup masks: what to ask, what to load, what to keep. No I/O.

:meth:`Coordinator.search` is a generator: it yields waves of probes, is sent what is present, and returns the hit.
Whoever drives it asks the store::

    search = coordinator.search(num_tokens, len(hashes))
    try:
        probes = next(search)
        while True:
            probes = search.send([await present(probe) for probe in probes])
    except StopIteration as done:
        hit = done.value
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.errors import UnsupportedError
from kvpool.spec import CacheSpec
from kvpool.store import PRESENT, Presence

__all__ = ["Coordinator", "Hit", "Probe", "Search"]

Ids = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask whether ``group`` has something stored under each of these hashes (intp[n], indices into the BlockHashes).

    The answer is one presence entry a hash. A group of several shards is present only where every shard is.
    """

    group: int
    hash_ids: Ids


@dataclass(frozen=True, slots=True)
class Hit:
    """``length`` tokens can be served; 0 is a miss.

    ``boundaries``: for each group, the token count under whose hash its last chunk is stored; 0 without a hit and for
    groups that are not cached.
    """

    length: int
    boundaries: tuple[int, ...]


Search: TypeAlias = Generator[list[Probe], Sequence[Presence], Hit]


class Coordinator:
    """The rules of one :class:`CacheSpec`."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        if len(spec.groups) > 1 or not spec.groups[0].kind.dense or spec.partial_hits or spec.use_eagle:
            raise UnsupportedError("the coordinator serves one full-attention group so far")

    def search(self, num_tokens: int, num_hashes: int, *, local_tokens: int = 0) -> Search:
        """Find the longest hit of a prompt of ``num_tokens`` with ``num_hashes`` block hashes.

        ``local_tokens``: what the engine's own prefix cache holds already; it is not asked for, and a hit that does not
        reach beyond it is a miss. A hit never covers the last token.
        """
        spec, block = self.spec, self.spec.groups[0].block_size
        per_block = spec.hashes_per_block(0)
        end = min(spec.align(max(num_tokens - 1, 0)) // block, num_hashes // per_block)
        run, window = local_tokens // block, 64
        while run < end:
            ids = np.arange(run, min(run + window, end), dtype=np.intp)
            answers = yield [Probe(0, (ids + 1) * per_block - 1)]
            absent = np.flatnonzero(answers[0] != PRESENT)
            run += int(absent[0]) if len(absent) else len(ids)
            if len(absent):
                break
            window *= 4
        length = run * block if run * block > local_tokens else 0
        return Hit(length, (length,))

    def load_chunks(self, group: int, hit_length: int, start_token: int = 0) -> Ids:
        """The chunks of ``group`` to load for a hit, when the engine holds the first ``start_token`` tokens."""
        block = self.spec.groups[group].block_size
        return np.arange(start_token // block, -(-hit_length // block), dtype=np.intp)
