"""The rules of a KV cache of several groups: what is hit, what to load, what to store. No I/O.

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

import numpy as np
import numpy.typing as npt

from kvpool.attention import Mask, Reuse, needed, reachable
from kvpool.search import MAX_WAVES, Hit, HitSearch, Probe, Search
from kvpool.spec import CacheSpec, Kind

__all__ = ["MAX_WAVES", "Coordinator", "Hit", "Mask", "Probe", "Search"]

Ids = npt.NDArray[np.intp]


class Coordinator:
    """Answers for one :class:`~kvpool.spec.CacheSpec`. Stateless."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._search = HitSearch(spec)

    # -- looking up

    def search(self, num_tokens: int, num_hashes: int, *, local_tokens: int = 0) -> Search:
        """Find the longest hit of a prompt of ``num_tokens`` with ``num_hashes`` block hashes.

        ``local_tokens``: what the engine's own prefix cache holds already; it is not asked for, and a hit that does not
        reach beyond it is a miss. A hit never covers the last token, and every hit is loadable in every group. At most
        :data:`MAX_WAVES` waves, and never a hash outside :meth:`everything`.
        """
        return self._search.search(num_tokens, num_hashes, local_tokens)

    def everything(self, num_tokens: int, num_hashes: int) -> list[Probe]:
        """All that the masks and limits allow to ask for a prompt, as one wave; a search asks for a part of it."""
        spec, probes = self.spec, []
        limit = max(min(spec.align(num_tokens), num_hashes * spec.hash_block_size), 0)
        # With partial hits a later request may resume at any hash block, so no chunk is ruled out.
        masks = (
            (None,) * len(spec.groups)
            if spec.partial_hits
            else self.lookup_mask(min(num_tokens, limit + spec.common_block))
        )
        for i in spec.cached_groups:
            if spec.partial_hits and (spec.groups[i].kind.dense or spec.groups[i].kind is Kind.MAMBA):
                ids = np.arange(limit // spec.hash_block_size)
            else:
                chunks = np.arange(limit // spec.groups[i].block_size)
                mask = masks[i]
                chunks = chunks if mask is None else chunks[mask[: len(chunks)]]
                ids = (chunks + 1) * spec.hashes_per_block(i) - 1
            if len(ids):
                probes.append(Probe(i, ids))
        return probes

    def lookup_mask(self, num_tokens: int) -> tuple[Mask | None, ...]:
        """For each group, which chunks of the first ``num_tokens`` a hit on a common block needs; None means all.

        bool[n] over the whole chunks of the aligned length; groups that are not cached need none.
        """
        return self._masks(0, num_tokens, retention=None, resume_at=(), exact_mamba=False)

    # -- loading

    def load_chunks(self, group: int, hit_length: int, start_token: int = 0) -> Ids:
        """The chunks of ``group`` to load for a hit, when the engine holds the first ``start_token`` tokens.

        A chunk that the engine holds in part is loaded whole.
        """
        spec = self.spec.groups[group]
        if hit_length <= start_token or not spec.cacheable:
            return np.empty(0, np.intp)
        first, end = needed(spec, hit_length)
        return np.arange(max(first, start_token // spec.block_size), end, dtype=np.intp)

    def load_mask(self, hit_length: int) -> tuple[Mask, ...]:
        """For each group, bool over the chunks of the first ``hit_length`` tokens: which of them a hit loads."""
        masks = []
        for i, group in enumerate(self.spec.groups):
            mask = np.zeros(-(-max(hit_length, 0) // group.block_size), np.bool_)
            mask[self.load_chunks(i, hit_length)] = True
            masks.append(mask)
        return tuple(masks)

    # -- storing

    def store_mask(
        self,
        aligned_len: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        shared_tokens: int = 0,
    ) -> tuple[Mask | None, ...]:
        """For each group, which chunks a later hit can use and are stored by their position; None means all.

        bool over the whole chunks from ceil(``start_token`` / block size) to ``aligned_len`` (rounded down to the
        alignment). With sparse retention the places where a replay of the prompt (``num_prompt_tokens``) resumes are
        kept too, and the one where a third prompt resumes that shares its first ``shared_tokens`` with it, as an
        earlier one did. Mamba states are never stored by position, as the engine moves and drops them: all False here,
        see :meth:`boundary_mask`.
        """
        resume_at = self._resume_at(num_prompt_tokens, shared_tokens)
        return self._masks(start_token, aligned_len, self.spec.retention_interval, resume_at, exact_mamba=True)

    def boundary_mask(
        self,
        aligned_len: int,
        start_token: int = 0,
        num_prompt_tokens: int | None = None,
        shared_tokens: int = 0,
    ) -> tuple[Mask | None, ...]:
        """Like :meth:`store_mask` with the Mamba states that a later hit can use: chunk i is the state at its end.

        For engines that hand over the exact block of a state (:meth:`ChunkedTokenDatabase.boundary`).
        """
        resume_at = self._resume_at(num_prompt_tokens, shared_tokens)
        return self._masks(start_token, aligned_len, self.spec.retention_interval, resume_at, exact_mamba=False)

    def _resume_at(self, num_prompt_tokens: int | None, shared_tokens: int) -> tuple[int, ...]:
        """Where a later request that repeats this prompt resumes, or its first ``shared_tokens``, unless 0.

        An identical prompt computes its last token again, a longer one goes on from the last whole common block; where
        a drafter reads on (never in Mamba groups) both lose one common block.
        """
        shared = (shared_tokens,) if shared_tokens else ()
        if num_prompt_tokens is None:
            return shared
        if not any(self.spec.eagle_margin(i) for i in self.spec.cached_groups):
            return (num_prompt_tokens - 1, *shared)
        block = self.spec.common_block
        ends = {(num_prompt_tokens - 1) // block, num_prompt_tokens // block}
        return (*sorted({max(end - 1, 0) * block for end in ends}), *shared)

    def _masks(
        self, start_token: int, num_tokens: int, retention: int | None, resume_at: tuple[int, ...], exact_mamba: bool
    ) -> tuple[Mask | None, ...]:
        masks: list[Mask | None] = []
        length = self.spec.align(max(num_tokens, 0))
        for group, eagle in zip(self.spec.groups, self.spec.eagle, strict=True):
            end = length // group.block_size
            first = min(end, -(-max(start_token, 0) // group.block_size))
            if not group.cacheable or (exact_mamba and group.kind is Kind.MAMBA):
                masks.append(np.zeros(end - first, np.bool_))
            else:
                masks.append(reachable(group, first, end, Reuse(self.spec.common_block, eagle, retention, resume_at)))
        return tuple(masks)
