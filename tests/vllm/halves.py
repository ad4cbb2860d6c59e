"""An engine's scheduler, as far as the connector sees it, and the scheduler's half on it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvpool.config import Config
from kvpool.hashes import chain_hashes
from kvpool.keys import Namespace
from kvpool.ranks import Parallel
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.transport import LookupRequest, LookupResult
from kvpool.vllm.kv_events import KVEvents
from kvpool.vllm.messages import WorkerReport
from kvpool.vllm.scheduler import SchedulerSide

BLOCK = 4
NAMESPACE = Namespace.of({"test": "halves"})
EPOCH = bytes(16)


def spec(tensor: int = 1) -> CacheSpec:
    return CacheSpec((CacheGroup(Kind.FULL, BLOCK, shards=tensor),), BLOCK, parallel=Parallel(tensor))


class FakeRequest:
    number = 0

    def __init__(self, blocks: int, seed: int = 0) -> None:
        FakeRequest.number += 1
        self.request_id = f"r{FakeRequest.number}"
        self.block_hashes = list(chain_hashes(np.arange(blocks * BLOCK) + 1000 * seed, BLOCK))
        self.num_prompt_tokens = self.num_tokens = blocks * BLOCK + 1
        self.num_computed_tokens = 0
        self.lora_request = None
        self.skip_reading_prefix_cache = False
        self.shared_prefix_boundary = 0


class FakePool:
    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = list(range(blocks))
        self.pinned = 0

    def touch(self, blocks: list[int]) -> None:
        self.pinned += len(blocks)

    def free_blocks(self, blocks: Iterator[int]) -> None:
        self.pinned -= len(list(blocks))
        assert self.pinned >= 0, "released twice"


class FakeClient:
    def __init__(self, result: LookupResult) -> None:
        self.result = result
        self.asked = self.polls = 0
        self.requests: list[LookupRequest] = []
        self._answered: list[int] = []

    def submit(self, request: LookupRequest, *, timeout: float) -> int:
        self.requests.append(request)
        self.asked += 1
        return self.asked

    def answer(self) -> None:
        self._answered = list(range(1, self.asked + 1))

    def poll(self, *, wait: float = 0.0) -> list[tuple[int, LookupResult]]:
        self.polls += 1
        done, self._answered = [(t, self.result) for t in self._answered], []
        return done

    def cancel(self, ticket: int) -> None: ...

    def counts(self) -> dict[str, int]:
        return {"late": 2}

    def close(self) -> None: ...


def scheduler(
    pool: FakePool,
    *,
    tensor: int = 1,
    client: FakeClient | None = None,
    reads: bool = True,
    writes: bool = True,
    drafts: bool = False,
    events: KVEvents | None = None,
    **config: Any,
) -> Any:
    side: Any = SchedulerSide(
        Config.load(config),
        spec(tensor),
        lambda: NAMESPACE,
        "test-chained",
        client or FakeClient(LookupResult(0, (0,), EPOCH, 1.0)),  # type: ignore[arg-type]
        reads=reads,
        writes=writes,
        epoch=EPOCH,
        drafts=drafts,
        events=events,
    )
    side.bind_block_pool(pool)
    return side


def output(request: FakeRequest | None = None, computed: int = 0) -> Any:
    ids = [request.request_id] if request else []
    table = (list(range(1, len(request.block_hashes) + 1)),) if request else ()
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=ids, num_computed_tokens=[0] * len(ids)),
        num_scheduled_tokens=dict.fromkeys(ids, computed),
        total_num_scheduled_tokens=computed,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: table, boundary_state_offloads={}),
    )


def reported(**columns: Any) -> Any:
    return SimpleNamespace(kv_connector_worker_meta=WorkerReport(**columns))
