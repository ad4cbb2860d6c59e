"""The scheduler's half of the connector: no event loop, no thread, nothing that blocks.

It asks the worker's process how much of a prompt is stored (lookups.py), hands out load and save jobs with each step
(loads.py, saves.py), and takes in what the workers report of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvpool.config import Config
from kvpool.keys import Namespace
from kvpool.spec import CacheSpec
from kvpool.transport import PolledLookupClient
from kvpool.vllm.health import RanksAway
from kvpool.vllm.jobs import Jobs
from kvpool.vllm.loads import Loads
from kvpool.vllm.lookups import Lookups
from kvpool.vllm.messages import StepWork, WorkerReport
from kvpool.vllm.namespace import say_reset
from kvpool.vllm.requests import Names, Requests, RequestState
from kvpool.vllm.saves import Saves
from kvpool.vllm.stats import ConnectorCounters, growth

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpool.vllm.kv_events import KVEvents

__all__ = ["SchedulerSide"]

logger = logging.getLogger(__name__)


class SchedulerSide:
    """``client`` answers lookups from the process that holds the store. ``drafts``: whether the engine speculates.
    ``events``: where KV events go, if wanted.
    """

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
        drafts: bool = False,
        events: KVEvents | None = None,
    ) -> None:
        self.config = config
        self.spec = spec
        self.counters = ConnectorCounters()
        self._client = client
        self._drafts = drafts
        self._events = events
        self._reads = reads and config.load_enabled
        self._writes = writes and config.save_enabled
        self._names = Names(namespace, epoch, hash_scheme)
        self._requests = Requests(hash_scheme)
        self._jobs = Jobs(spec, self._names)
        self._lookups = Lookups(config, spec, self._names, client, self.counters)
        self._loads = Loads(self._jobs, spec.parallel.size)
        self._saves = Saves(config, spec, self._requests, self._jobs, self.counters)
        self._away = RanksAway()
        self._layouts: set[str] = set()
        self._told: dict[str, int] = {}
        self._name_engine = True

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._saves.pool = pool

    @property
    def namespace(self) -> Namespace:
        """The engine's."""
        return self._names.namespace()

    @property
    def epoch(self) -> bytes:
        """The current one."""
        return self._names.epoch

    # ---- requests

    def on_new_request(self, request: Request) -> RequestState:
        """A new generation: whatever an earlier request of this id left behind is forgotten."""
        self.forget(request.request_id)
        if self._drafts and self._writes and request.resumable:
            self._stop_saving()
        return self._requests.add(request)

    def _stop_saving(self) -> None:
        """For a streaming session with drafts: where a turn stops among drafts that were right, vLLM goes on as if the
        KV of those behind the stop were that of the next turn's first tokens. Its own prefix cache hands such blocks to
        other requests, so none of this engine's may be stored any more.
        """
        self._writes = False
        logger.warning(
            "kvpool stores nothing more of this engine: a streaming session has begun, and with speculative decoding "
            "vLLM may keep wrong KV of one. What is stored is still used."
        )

    def forget(self, request_id: str) -> None:
        """The request has ended. Jobs in flight keep their own state until they are reported."""
        state = self._requests.pop(request_id)
        self._saves.forget(request_id)
        if state is not None:
            self._lookups.drop(state)

    def reset(self) -> None:
        """Start a new epoch: nothing stored before is found again, by this engine; other namespaces are untouched."""
        self._names.renew()
        say_reset(self.epoch)
        if self._events is not None:
            self._events.cleared()
        for state in self._requests:
            self._lookups.drop(state)
            state.answer = None
            # Its blocks are those of the old epoch and must not be stored under the new one.
            state.stale = state.saving or state.offered > 0 or state.request.num_computed_tokens > 0

    def match(self, request: Request, local_tokens: int) -> int | None:
        """Tokens that can be loaded beyond ``local_tokens``; None: not known yet, ask again in the next step."""
        if not self._reads or request.skip_reading_prefix_cache:
            return 0
        state = self._requests.of(request) or self.on_new_request(request)
        if state.bypass or state.no_lookup or state.stale:
            return 0
        if self._away.ranks:
            return self._without(state)
        tokens = self._lookups.match(state, local_tokens)
        if tokens:
            state.offered = local_tokens
        return tokens

    def _without(self, state: RequestState) -> int | None:
        """A rank could not load its part of a hit. If that is old news, one step tells whether it still holds."""
        if not state.waited and self._away.stale():
            state.waited = True
            return None
        self.counters.lookups_without_rank += not state.unasked
        state.unasked = True
        self._lookups.drop(state)
        return 0

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The engine has blocks for ``external_tokens``: make the load job of the next step."""
        if external_tokens > 0:
            state = self._requests.of(request) or self.on_new_request(request)
            self._loads.add(state, external_tokens, blocks.get_block_ids())

    # ---- one step

    def build_work(self, output: SchedulerOutput) -> StepWork:
        """The jobs of this step."""
        self._lookups.new_step()
        self._saves.quarantine()
        loads = self._loads.take()
        saves = list(self._saves.jobs(output)) if self._writes else []
        namespace, named = self.namespace, not self._name_engine
        self._name_engine = False
        idle = not output.total_num_scheduled_tokens
        return StepWork(namespace.digest, self.epoch, loads, saves, idle, engine=None if named else namespace)

    def take_report(self, output: KVConnectorOutput) -> None:
        """What the workers say has happened to jobs; unknown numbers are ignored."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            return
        self._name_engine |= report.unnamed
        self._away.take(report.serving)
        self._compare_layouts(report.layouts)
        events = self._events
        for load in self._loads.take_report(report):
            if events is not None and not load.complete and load.job.epoch == self.epoch:
                events.lost(load.job)
        for save in self._saves.take_report(report):
            if events is not None and save.stored and not save.skipped and save.job.epoch == self.epoch:
                events.stored(save.state.request, save.job)

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

    def has_pending_saves(self) -> bool:
        """Whether the engine should keep stepping so that pins come back."""
        return self._saves.pending()

    # ---- what is told of it

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
            "lookups": len(self._lookups),
            "loads": len(self._loads),
            "saves": len(self._saves),
            "save progress": self._saves.requests,
            "pinned blocks": self._saves.pinned_blocks,
        }

    def close(self) -> None:
        self._client.close()
