"""The scheduler's half of the connector: no event loop, no thread, nothing that blocks.

It asks the worker's process how much of a prompt is stored (a socket polled on the scheduler's own thread), hands out
load and save jobs with each step, and pins the blocks that a save still reads.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpool.config import Config
from kvpool.errors import LookupTimeout, TransportError
from kvpool.hashes import BlockHashes
from kvpool.keys import KeySpace, Namespace
from kvpool.progress import SaveProgress, SaveRange
from kvpool.spec import CacheSpec
from kvpool.tokens import ChunkedTokenDatabase, Chunks
from kvpool.transport import LookupRequest, LookupResult, PolledLookupClient
from kvpool.vllm.messages import Job, Part, StepWork, WorkerReport
from kvpool.vllm.stats import ConnectorCounters, growth

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpool.vllm.kv_events import KVEvents

__all__ = ["SchedulerSide"]

logger = logging.getLogger(__name__)

#: The id that stands for "no block" in a block table.
NULL_BLOCK = 0
#: A save job reports this long after its deadline at the latest, unless something is wedged.
REPORT_SLACK_S = 2.0
#: A request whose save failed waits twice as long with each failure, up to the second of these, before the next.
RETRY_S, MAX_RETRY_S = 0.1, 30.0
#: Pins may hold at most this share of the engine's blocks; further saves wait for the next step.
MAX_PINNED_SHARE = 0.5


@dataclass(slots=True)
class _RequestState:
    """What is known of one request in one generation; it goes when the request ends."""

    request: Request
    bypass: bool  #: never looked up, loaded or saved
    hashes: BlockHashes | None = None  #: see SchedulerSide._hashes
    saving: bool = False  #: known to the save progress
    ticket: int | None = None
    asked_local: int = 0  #: local tokens of the lookup in flight or answered
    answer: LookupResult | None = None
    answer_until: float = 0.0
    answer_used: bool = False
    retry_at: float = 0.0  #: no save before that: the last one failed
    failures: int = 0
    stale: bool = False  #: computed, in part, before a reset: neither stored nor looked up again
    no_lookup: bool = False  #: a load failed or a lookup was late: computed by the engine in this generation
    offered: int = 0  #: local tokens at the last positive match

    @property
    def found(self) -> int:
        """Tokens found in the store, which need no saving; a failed load proves nothing of the kind."""
        return 0 if self.answer is None or self.no_lookup else self.answer.hit_length


@dataclass(slots=True)
class _Load:
    state: _RequestState
    job: Job
    ranks_left: int
    complete: bool = True


@dataclass(slots=True)
class _Save:
    state: _RequestState
    job: Job
    range: SaveRange | None  #: None for Mamba states: their blocks are gone when a failure is known
    pinned: list[KVCacheBlock]
    quarantine_at: float
    ranks_reading: int
    ranks_left: int
    stored: bool = True
    skipped: bool = False  #: some chunks were not admitted, so they are done with but not in the store
    quarantined: bool = False


class SchedulerSide:
    """``client`` answers lookups from the process that holds the store. ``events``: where KV events go, if wanted."""

    def __init__(
        self,
        config: Config,
        spec: CacheSpec,
        namespace: Callable[[], Namespace],
        hash_scheme: str,
        client: PolledLookupClient,
        *,
        reads: bool,
        writes: bool,
        epoch: bytes,
        events: KVEvents | None = None,
    ) -> None:
        self.config = config
        self.spec = spec
        self._namespace = namespace
        self.epoch = epoch
        self._scheme = hash_scheme
        # The worker makes the keys; here the database only says which chunks are wanted and which blocks hold them.
        self._database = ChunkedTokenDatabase(spec, KeySpace(Namespace.of({}), spec), null_block=NULL_BLOCK)
        self._client = client
        self._events = events
        self.counters = ConnectorCounters()
        self._told: dict[str, int] = {}
        self._reads = reads and config.load_enabled
        self._writes = writes and config.save_enabled
        self._numbers = itertools.count(1)
        self._requests: dict[str, _RequestState] = {}
        self._tickets: dict[int, _RequestState] = {}
        self._new_loads: list[Job] = []
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        self._progress = SaveProgress()
        self._pinned_blocks = 0
        self._layouts: set[str] = set()
        self._grace_left = config.lookup_grace_ms / 1000
        self._polled = False
        self._pool: BlockPool | None = None

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    # ---- requests

    def on_new_request(self, request: Request) -> None:
        """A new generation: whatever an earlier request of this id left behind is forgotten."""
        self.forget(request.request_id)
        self._requests[request.request_id] = self._new_state(request)

    def forget(self, request_id: str) -> None:
        """The request has ended. Jobs in flight keep their own state until they are reported."""
        state = self._requests.pop(request_id, None)
        self._progress.end(request_id)
        if state is not None:
            self._drop_lookup(state)

    def _drop_lookup(self, state: _RequestState) -> None:
        if state.ticket is not None:
            self._client.cancel(state.ticket)
            self._tickets.pop(state.ticket, None)
            state.ticket = None

    def _new_state(self, request: Request) -> _RequestState:
        # A LoRA adapter is hashed by name and path, not by content, so such requests stay out of the pool.
        bypass = request.lora_request is not None
        return _RequestState(request, bypass)

    def _state(self, request: Request) -> _RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            self.on_new_request(request)
            state = self._requests[request.request_id]
        return state

    def reset(self) -> None:
        """Start a new epoch: nothing stored before is found again, by this engine; other namespaces are untouched."""
        self.epoch = os.urandom(16)
        if self._events is not None:
            self._events.cleared()
        for state in self._requests.values():
            self._drop_lookup(state)
            state.answer = None
            # Its blocks are those of the old epoch and must not be stored under the new one.
            state.stale = state.saving or state.offered > 0 or state.request.num_computed_tokens > 0

    # ---- lookup

    def match(self, request: Request, local_tokens: int) -> int | None:
        """Tokens that can be loaded beyond ``local_tokens``; None: not known yet, ask again in the next step."""
        if not self._reads or request.skip_reading_prefix_cache:
            return 0
        state = self._state(request)
        if state.bypass or state.no_lookup or state.stale:
            return 0
        if not self._polled:
            self._polled = True  # once a step is enough, however many requests wait
            self._poll(0.0)
        # An answer counts at least once, so that a short age cannot make a request ask for ever.
        fresh = state.answer is not None and (not state.answer_used or time.monotonic() < state.answer_until)
        if state.ticket is None and not state.no_lookup and not (fresh and state.asked_local <= local_tokens):
            # Under preemption the local count shrinks step by step: the second time ask for everything, once.
            shrunk = state.answer is not None and state.asked_local > local_tokens
            state.answer = None
            self._ask(state, local_tokens, asked_local=0 if shrunk else local_tokens)
        if state.ticket is not None and self._grace_left > 0:
            start = time.monotonic()
            self._poll(self._grace_left, until=state)
            self._grace_left -= time.monotonic() - start
        if state.ticket is not None:
            return None
        hit = 0 if state.answer is None else state.answer.hit_length
        state.answer_used = True
        # The answer may be older than the request's last token; a hit never covers it.
        hit = min(hit, self.spec.align(request.num_tokens - 1))
        tokens = hit - local_tokens
        if tokens < max(1, self.config.min_load_tokens):
            return 0
        state.offered = local_tokens
        return tokens

    def _ask(self, state: _RequestState, local_tokens: int, *, asked_local: int) -> None:
        hashes = state.request.block_hashes
        if self.spec.align(min(len(hashes) * self.spec.hash_block_size, state.request.num_tokens - 1)) <= local_tokens:
            return
        namespace, num_tokens = self._namespace().digest, state.request.num_tokens
        request = LookupRequest(namespace, self.epoch, num_tokens, asked_local, self._hashes(state))
        state.asked_local = asked_local
        state.ticket = self._client.submit(request, timeout=self.config.lookup_timeout_ms / 1000)
        self._tickets[state.ticket] = state

    def _hashes(self, state: _RequestState) -> BlockHashes:
        """The request's block hashes back to back.

        Joined once and extended as they grow: joining 72,256 of them (289,024 tokens by 4) takes 2 ms, and under
        preemption vLLM asks again in every step.
        """
        hashes, joined = state.request.block_hashes, state.hashes
        known = 0 if joined is None else len(joined)
        # They are chained, so the last one tells for all: a streaming session drops its last token, and its hash.
        if joined is None or known > len(hashes) or (known and joined[known - 1] != hashes[known - 1]):
            joined = BlockHashes(b"".join(hashes), len(hashes[0]) if hashes else 0, scheme=self._scheme)
            state.hashes = joined
        elif len(hashes) > known:
            joined.extend(hashes[known:])
        return joined

    def _poll(self, wait: float, until: _RequestState | None = None) -> None:
        """Take in answers; with ``until``, wait up to ``wait`` seconds for that request's."""
        end = time.monotonic() + wait
        while self._tickets:
            for ticket, result in self._client.poll(wait=max(0.0, end - time.monotonic()) if until else 0.0):
                state = self._tickets.pop(ticket, None)
                if state is None:
                    continue
                state.ticket = None
                if isinstance(result, TransportError):
                    state.no_lookup = True
                    if isinstance(result, LookupTimeout):
                        self.counters.lookups_unanswered += 1
                    else:
                        self.counters.lookups_refused += 1
                    logger.debug("lookup of %s is a miss: %s", state.request.request_id, result)
                elif result.epoch != self.epoch:
                    state.no_lookup = True
                    self.counters.lookups_of_another_epoch += 1
                else:
                    state.answer, state.answer_used = result, False
                    state.answer_until = time.monotonic() + result.max_age
            if until is None or until.ticket is None or time.monotonic() >= end:
                return

    # ---- load

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine has blocks for ``external_tokens``: make the load job of the next step."""
        if external_tokens <= 0:
            return
        state = self._state(request)
        start, end = state.offered, state.offered + external_tokens
        tables = blocks.get_block_ids()
        # Every block that the engine will take for computed is loaded, whether or not the hit needs it.
        found = {}
        for g in self.spec.cached_groups:
            first = start - start % self.spec.groups[g].block_size
            wanted = self._database.chunks(end, len(request.block_hashes), first, group=g)
            found[g] = self._database.blocks(g, wanted, tables[g])
        job = self._job(state, found)
        self._loads[job.number] = _Load(state, job, self.spec.parallel.size)
        self._new_loads.append(job)

    def _job(self, state: _RequestState, found: Mapping[int, tuple[Chunks, npt.NDArray[np.intp]]]) -> Job:
        hashes = self._hashes(state)
        parts = tuple(
            Part(
                group,
                chunks.ids,
                BlockHashes(hashes.pack(chunks.hash_ids), hashes.hash_len, scheme=self._scheme),
                blocks.reshape(-1),
            )
            for group, (chunks, blocks) in found.items()
            if len(chunks)
        )
        return Job(next(self._numbers), state.request.request_id, self.epoch, parts)

    # ---- save

    def build_work(self, output: SchedulerOutput) -> StepWork:
        """The jobs of this step."""
        self._grace_left, self._polled = self.config.lookup_grace_ms / 1000, False
        self._quarantine()
        loads, self._new_loads = self._new_loads, []
        saves = list(self._state_jobs(output))  # first: what is not pinned now is lost
        saves += [job for state, computed in self._computed(output) for job in self._save_jobs(state, computed, output)]
        return StepWork(self._namespace(), self.epoch, loads, saves, idle=not output.total_num_scheduled_tokens)

    def _computed(self, output: SchedulerOutput) -> Iterable[tuple[_RequestState, int]]:
        """Requests of this step and how many of their tokens have KV when it has run."""
        if not self._writes:
            return
        cached = output.scheduled_cached_reqs
        before = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None and not state.bypass and not state.stale:
                yield state, before[request_id] + scheduled

    def _save_jobs(self, state: _RequestState, computed: int, output: SchedulerOutput) -> Iterable[Job]:
        """Chunks that are whole after this step and not yet stored, as jobs on pinned blocks."""
        assert output.kv_connector_block_state is not None
        request = state.request
        if time.monotonic() < state.retry_at:
            return
        if not state.saving:
            self._progress.begin(request.request_id, state.found)
            state.saving = True
        end = min(
            self.spec.align(min(computed, self._savable(request))),
            self._progress.mark(request.request_id) + self._budget(),
        )
        for due in self._progress.offer(request.request_id, end):
            tables = output.kv_connector_block_state.get_block_ids(request.request_id)
            if tables is None or not (job := self._save_job(state, due, tables)):
                self._progress.report(due, saved=tables is not None)
                continue
            self._pin(job, state, due)
            yield job

    def _state_jobs(self, output: SchedulerOutput) -> Iterable[Job]:
        """Mamba states that this step computes, as jobs on pinned blocks.

        vLLM names the exact block of each, which leaves the request's table soon, or was never in it.
        """
        if not self._writes or output.kv_connector_block_state is None:
            return
        for request_id, offers in output.kv_connector_block_state.boundary_state_offloads.items():
            state = self._requests.get(request_id)
            if state is None or state.bypass or state.stale or time.monotonic() < state.retry_at:
                continue
            request = state.request
            found: dict[int, dict[int, tuple[Chunks, npt.NDArray[np.intp]]]] = {}
            for group, block, tokens in offers:
                # A state inside a block, or behind what the other groups store, is part of no hit.
                if state.found < tokens <= self._savable(request) and not tokens % self.spec.alignment:
                    chunks = self._database.boundary(group, tokens, len(request.block_hashes))
                    found.setdefault(tokens, {})[group] = chunks, np.array([block])
            for states in found.values():
                if self._budget():
                    job = self._job(state, states)
                    self._pin(job, state, None)
                    yield job

    def _savable(self, request: Request) -> int:
        """How many tokens of a request may be stored: whole hash blocks, of the prompt unless ``save_decoded``."""
        known = len(request.block_hashes) * self.spec.hash_block_size
        return known if self.config.save_decoded else min(known, request.num_prompt_tokens)

    def _pin(self, job: Job, state: _RequestState, due: SaveRange | None) -> None:
        """Keep the blocks of a save until every rank has copied them."""
        assert self._pool is not None
        blocks = [self._pool.blocks[i] for part in job.parts for i in part.block_ids.tolist()]
        self._pool.touch(blocks)
        self._pinned_blocks += len(blocks)
        until = time.monotonic() + self.config.save_timeout_s + REPORT_SLACK_S
        ranks = self.spec.parallel.size
        self._saves[job.number] = _Save(state, job, due, blocks, until, ranks, ranks)

    def _budget(self) -> int:
        """Tokens, whole common blocks, that may be pinned for saves beyond what is."""
        assert self._pool is not None
        blocks = sum(self.spec.common_block // self.spec.groups[g].block_size for g in self.spec.cached_groups)
        left = int(MAX_PINNED_SHARE * self._pool.num_gpu_blocks) - self._pinned_blocks
        return max(left // blocks, 0) * self.spec.common_block

    def _save_job(self, state: _RequestState, due: SaveRange, tables: Sequence[list[int]]) -> Job | None:
        """The chunks of a range that a later hit can use and that still have a block; None if there are none."""
        request = state.request
        # vLLM has seen another prompt leave this one there, and keeps the place for a third.
        shared = request.shared_prefix_boundary
        wanted = self._database.save_chunks(due.start, due.end, request.num_prompt_tokens, shared)
        job = self._job(state, {g: self._database.blocks(g, chunks, tables[g]) for g, chunks in wanted})
        return job if job.parts else None

    # ---- reports

    def take_report(self, output: KVConnectorOutput) -> None:
        """What the worker says has happened to jobs; unknown numbers are ignored."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            return
        self._compare_layouts(report.layouts)
        for number, (ranks, ok) in report.loaded.items():
            if (load := self._loads.get(number)) is not None:
                load.ranks_left -= ranks
                load.state.no_lookup |= not ok
                load.state.saving &= ok  # what counts as saved may be lost, so it is offered anew
                load.complete &= ok
                if load.ranks_left <= 0:
                    del self._loads[number]
                    if self._events is not None and not load.complete and load.job.epoch == self.epoch:
                        self._events.lost(load.job)
        for number, ranks in report.released.items():
            if (save := self._saves.get(number)) is not None:
                save.ranks_reading -= ranks
                if save.ranks_reading <= 0:
                    self._unpin(save)
        for number, (ranks, ok) in report.saved.items():
            if (save := self._saves.get(number)) is not None:
                save.ranks_left -= ranks
                save.stored &= ok
                save.skipped |= number in report.skipped
                if save.ranks_left <= 0:
                    del self._saves[number]
                    self._unpin(save)
                    if save.range is not None:
                        self._progress.report(save.range, saved=save.stored)
                    if self._events is not None and save.stored and not save.skipped and save.job.epoch == self.epoch:
                        self._events.stored(save.state.request, save.job)
                    save.state.failures = 0 if save.stored else save.state.failures + 1
                    if not save.stored:  # again, but not in every step: a store in trouble must not cost the engine
                        save.state.retry_at = time.monotonic() + min(RETRY_S * 2**save.state.failures, MAX_RETRY_S)

    def _compare_layouts(self, layouts: Mapping[str, int]) -> None:
        """Ranks whose blocks differ in form cannot share one namespace: then the engine goes on without the pool."""
        self._layouts.update(layouts)
        if len(self._layouts) > 1 and (self._reads or self._writes):
            self._reads = self._writes = False
            logger.error(
                "kvpool is switched off: the ranks hold their KV blocks in different layouts (%s). Run all ranks on "
                "the same kind of machine, with the same attention backend and dtype.",
                ", ".join(sorted(self._layouts)),
            )

    def _unpin(self, save: _Save) -> None:
        assert self._pool is not None
        blocks, save.pinned = save.pinned, []
        self._pinned_blocks -= len(blocks)
        self._pool.free_blocks(reversed(blocks))

    def has_pending_saves(self) -> bool:
        """Whether the engine should keep stepping so that pins come back; a job past its deadline no longer counts."""
        self._quarantine()
        return any(not save.quarantined for save in self._saves.values())

    def _quarantine(self) -> None:
        """Count saves that are long past their deadline: their blocks stay pinned, and nobody waits for them."""
        now = time.monotonic()
        for save in self._saves.values():
            if not save.quarantined and save.quarantine_at <= now:
                save.quarantined = True
                self.counters.quarantined_saves += 1

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call."""
        return [] if self._events is None else self._events.take()

    def take_stats(self) -> dict[str, int]:
        """What the counters grew by since the last call."""
        self.counters.lookup_replies_dropped = sum(self._client.counts().values())
        before, self._told = self._told, self.counters.snapshot()
        return growth(self._told, before)

    def outstanding(self) -> dict[str, int]:
        """How much state is held, by kind; all 0 when the engine is at rest."""
        return {
            "requests": len(self._requests),
            "lookups": len(self._tickets),
            "loads": len(self._loads),
            "saves": len(self._saves),
            "save progress": len(self._progress),
            "pinned blocks": self._pinned_blocks,
        }

    def close(self) -> None:
        self._client.close()
