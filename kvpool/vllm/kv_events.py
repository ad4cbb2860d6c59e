"""vLLM's KV events for what the pool holds, so that a router can send a request to an engine that need not compute it.

They are hints, as all KV events are: a store evicts without telling anyone. A block is announced once all ranks have
stored it, or found it stored, and taken back when a load of it has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, maybe_convert_block_hash

from kvpool.spec import CacheSpec
from kvpool.vllm._versions import event_extra_keys
from kvpool.vllm.messages import Job, Part

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["KVEvents"]


class KVEvents:
    """Collects events until :meth:`take`. ``medium``: vLLM's word for where the values are, "CPU" or "STORAGE"."""

    def __init__(self, spec: CacheSpec, medium: str) -> None:
        self._spec = spec
        self._medium = medium
        self._events: list[KVCacheEvent] = []

    def stored(self, request: Request, job: Job) -> None:
        """All chunks of a job are in the store; one event for each run of neighbours."""
        lora = request.lora_request
        for part in job.parts:
            size = self._spec.groups[part.group].block_size
            hashes = _hashes(part)
            for run in _runs(part):
                ids = part.chunk_ids[run].tolist()
                start, end = ids[0] * size, (ids[-1] + 1) * size
                ratio = self._spec.hashes_per_block(part.group)
                parent = request.block_hashes[ids[0] * ratio - 1] if ids[0] else None
                self._events.append(
                    BlockStored(
                        block_hashes=hashes[run],
                        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                        token_ids=request.all_token_ids[start:end],
                        block_size=size,
                        lora_id=lora.adapter_id if lora else None,
                        medium=self._medium,
                        lora_name=lora.name if lora else None,
                        extra_keys=event_extra_keys(request, [(i * size, (i + 1) * size) for i in ids]),
                        group_idx=part.group,
                    )
                )

    def lost(self, job: Job) -> None:
        """A load of these chunks has failed: they are announced again when they are stored again."""
        for part in job.parts:
            self._events.append(BlockRemoved(block_hashes=_hashes(part), medium=self._medium, group_idx=part.group))

    def cleared(self) -> None:
        """Nothing that was stored before is used again."""
        self._events = [AllBlocksCleared()]

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call, oldest first."""
        events, self._events = self._events, []
        return events


def _hashes(part: Part) -> list[ExternalBlockHash]:
    return [maybe_convert_block_hash(bytes(digest)) for digest in part.hashes]  # type: ignore[arg-type]


def _runs(part: Part) -> Iterator[slice]:
    breaks = np.flatnonzero(np.diff(part.chunk_ids) != 1) + 1
    edges = [0, *breaks.tolist(), len(part.chunk_ids)]
    return (slice(a, b) for a, b in pairwise(edges) if b > a)
