"""Saves, from the tokens that a step computes to the last rank's report, and the blocks pinned meanwhile. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.config import Config
from kvpool.progress import SaveProgress, SaveRange
from kvpool.spec import CacheSpec
from kvpool.vllm.jobs import Jobs
from kvpool.vllm.messages import Job, WorkerReport
from kvpool.vllm.requests import Requests, RequestState
from kvpool.vllm.stats import ConnectorCounters

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["Save", "Saves"]

#: A save job reports this long after its deadline at the latest, unless something is wedged.
REPORT_SLACK_S = 2.0
#: A request whose save failed waits twice as long with each failure, up to the second of these, before the next.
RETRY_S, MAX_RETRY_S = 0.1, 30.0
#: Pins may hold at most this share of the engine's blocks; further saves wait for the next step.
MAX_PINNED_SHARE = 0.5


@dataclass(slots=True)
class Save:
    """One save. ``stored``: all chunks, on all ranks that have reported it; or ``skipped``, some of them."""

    state: RequestState
    job: Job
    range: SaveRange | None  #: None for Mamba states: their blocks are gone when a failure is known
    pinned: list[KVCacheBlock]
    quarantine_at: float
    ranks_reading: int
    ranks_left: int
    stored: bool = True
    skipped: bool = False  #: some chunks were not admitted, so they are done with but not in the store
    quarantined: bool = False


class Saves:
    """What to save of the engine's requests, and the saves under way, which keep their own state until reported."""

    def __init__(
        self, config: Config, spec: CacheSpec, requests: Requests, jobs: Jobs, counters: ConnectorCounters
    ) -> None:
        self._config = config
        self._spec = spec
        self._requests = requests
        self._jobs = jobs
        self._counters = counters
        self._progress = SaveProgress()
        self._saves: dict[int, Save] = {}
        #: Blocks, counted once a save.
        self.pinned_blocks = 0
        self.pool: BlockPool | None = None

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._saves)

    @property
    def requests(self) -> int:
        """Requests of which it is known how much is saved."""
        return len(self._progress)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._progress.end(request_id)

    # ---- what a step computes

    def jobs(self, output: SchedulerOutput) -> Iterator[Job]:
        """The jobs of this step, on blocks that are pinned. To be read to its end."""
        yield from self._state_jobs(output)  # first: what is not pinned now is lost
        for state, computed in self._computed(output):
            yield from self._range_jobs(state, computed, output)

    def _computed(self, output: SchedulerOutput) -> Iterable[tuple[RequestState, int]]:
        """Requests of this step and how many of their tokens have KV when it has run."""
        cached = output.scheduled_cached_reqs
        before = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            if (state := self._requests.savable(request_id)) is not None:
                yield state, before[request_id] + scheduled

    def _range_jobs(self, state: RequestState, computed: int, output: SchedulerOutput) -> Iterator[Job]:
        """Chunks that are whole after this step and not yet stored."""
        assert output.kv_connector_block_state is not None
        request = state.request
        if time.monotonic() < state.retry_at:
            return
        if not state.saving:
            self._progress.begin(request.request_id, state.found)
            state.saving = True
        end = min(
            self._spec.align(min(computed, self._limit(request))),
            self._progress.mark(request.request_id) + self._budget(),
        )
        for due in self._progress.offer(request.request_id, end):
            tables = output.kv_connector_block_state.get_block_ids(request.request_id)
            if tables is None or not (job := self._jobs.save(state, due, tables)):
                self._progress.report(due, saved=tables is not None)
                continue
            self._pin(job, state, due)
            yield job

    def _state_jobs(self, output: SchedulerOutput) -> Iterator[Job]:
        """Mamba states that this step computes.

        vLLM names the exact block of each, which leaves the request's table soon, or was never in it.
        """
        if output.kv_connector_block_state is None:
            return
        for request_id, offers in output.kv_connector_block_state.boundary_state_offloads.items():
            state = self._requests.savable(request_id)
            if state is None or time.monotonic() < state.retry_at:
                continue
            found: dict[int, dict[int, int]] = {}
            for group, block, tokens in offers:
                # A state inside a block, or behind what the other groups store, is part of no hit.
                if state.found < tokens <= self._limit(state.request) and not tokens % self._spec.alignment:
                    found.setdefault(tokens, {})[group] = block
            for tokens, blocks in found.items():
                if self._budget():
                    job = self._jobs.save_states(state, tokens, blocks)
                    self._pin(job, state, None)
                    yield job

    def _limit(self, request: Request) -> int:
        """How many tokens of a request may be stored: whole hash blocks, of the prompt unless ``save_decoded``."""
        known = len(request.block_hashes) * self._spec.hash_block_size
        return known if self._config.save_decoded else min(known, request.num_prompt_tokens)

    # ---- pins

    def _pin(self, job: Job, state: RequestState, due: SaveRange | None) -> None:
        """Keep the blocks of a save until every rank has copied them."""
        assert self.pool is not None
        blocks = [self.pool.blocks[i] for part in job.parts for i in part.block_ids.tolist()]
        self.pool.touch(blocks)
        self.pinned_blocks += len(blocks)
        until = time.monotonic() + self._config.save_timeout_s + REPORT_SLACK_S
        ranks = self._spec.parallel.size
        self._saves[job.number] = Save(state, job, due, blocks, until, ranks, ranks)

    def _unpin(self, save: Save) -> None:
        assert self.pool is not None
        blocks, save.pinned = save.pinned, []
        self.pinned_blocks -= len(blocks)
        self.pool.free_blocks(reversed(blocks))

    def _budget(self) -> int:
        """Tokens, whole common blocks, that may be pinned for saves beyond what is."""
        assert self.pool is not None
        blocks = sum(self._spec.common_block // self._spec.groups[g].block_size for g in self._spec.cached_groups)
        left = int(MAX_PINNED_SHARE * self.pool.num_gpu_blocks) - self.pinned_blocks
        return max(left // blocks, 0) * self._spec.common_block

    # ---- what becomes of them

    def take_report(self, report: WorkerReport) -> Iterator[Save]:
        """Those that have ended with this report, on all ranks. To be read to its end."""
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
                    self._end(save)
                    yield save

    def _end(self, save: Save) -> None:
        del self._saves[save.job.number]
        self._unpin(save)
        if save.range is not None:
            self._progress.report(save.range, saved=save.stored)
        save.state.failures = 0 if save.stored else save.state.failures + 1
        if not save.stored:  # again, but not in every step: a store in trouble must not cost the engine
            save.state.retry_at = time.monotonic() + min(RETRY_S * 2**save.state.failures, MAX_RETRY_S)

    def pending(self) -> bool:
        """Whether any may still end in time; a job past its deadline no longer counts."""
        self.quarantine()
        return any(not save.quarantined for save in self._saves.values())

    def quarantine(self) -> None:
        """Count saves that are long past their deadline: their blocks stay pinned, and nobody waits for them."""
        now = time.monotonic()
        for save in self._saves.values():
            if not save.quarantined and save.quarantine_at <= now:
                save.quarantined = True
                self._counters.quarantined_saves += 1
