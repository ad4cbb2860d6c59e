"""The class that vLLM loads. It only translates hooks; the work is in scheduler.py and worker.py."""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvpool.config import Config
from kvpool.errors import ConfigError
from kvpool.keys import Namespace
from kvpool.pool import epoch_of
from kvpool.ranks import Rank
from kvpool.registry import create_store, create_transport, parse_url
from kvpool.vllm._versions import KVConnectorTransferResults, say_version
from kvpool.vllm.kv_events import KVEvents
from kvpool.vllm.layout import block_layouts, cache_spec, kv_heads, layout_facts
from kvpool.vllm.messages import StepWork
from kvpool.vllm.namespace import hash_scheme, model_facts, say_store, seed_facts, warn_of_adapters, warn_of_random_seed
from kvpool.vllm.plugin import register
from kvpool.vllm.scheduler import SchedulerSide
from kvpool.vllm.stats import KVPoolPromMetrics, KVPoolStats
from kvpool.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVPoolConnector"]

logger = logging.getLogger(__name__)


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):
    """Shares the engine's KV blocks through a kvpool store.

    Configured by ``kv_connector_extra_config``: every field of :class:`kvpool.config.Config`. A mistake there, or an
    engine that the pool cannot serve, stops vLLM at start with a message that names it.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        transfer = self._kv_transfer_config
        given = transfer.kv_connector_extra_config
        self._config = Config.load(given, name="kv_connector_extra_config", check_urls=True)
        store = create_store(self._config.store)  # wrong options stop both halves at start; nothing is opened here
        self._spec = cache_spec(vllm_config, kv_cache_config)
        ranks = self._spec.parallel.size
        if ranks > 1 and not store.capabilities.shared:
            raise ConfigError(
                f"store: {type(store).__name__} keeps its values in one process, and this engine has {ranks} ranks; "
                "use a store that they share, such as file:///path or redis://host"
            )
        if self._config.event_loop not in store.capabilities.loops:
            allowed = ", ".join(sorted(store.capabilities.loops))
            raise ConfigError(
                f"event_loop: {type(store).__name__} runs on {allowed}, not on {self._config.event_loop!r}"
            )
        _check_transport(self._config)
        transport = {
            "url": self._config.transport or _private_url(vllm_config, self._config),
            "codec": self._config.codec,
        }
        create_transport(transport)
        self._step: StepWork | None = None
        self._handed_over = False
        self._handled: BaseException | None = None
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            say_version()
            if transfer.kv_load_failure_policy != "recompute":
                logger.warning(
                    "kvpool: kv_load_failure_policy is %r, so a request whose load fails ends with an error. "
                    "Set it to 'recompute' and the engine computes what could not be loaded.",
                    transfer.kv_load_failure_policy,
                )
            say_store(self._config, store, transfer.kv_role or "")
            warn_of_random_seed(vllm_config)
            warn_of_adapters(vllm_config)
            self.scheduler = SchedulerSide(
                self._config,
                self._spec,
                _namespace(vllm_config, kv_cache_config, self._config),
                hash_scheme(vllm_config),
                create_transport(transport).polled_client(),
                reads=transfer.is_kv_consumer,
                writes=transfer.is_kv_producer,
                epoch=epoch_of(self._config.epoch_label),
                drafts=vllm_config.speculative_config is not None,
                events=self._kv_events(vllm_config, shared=store.capabilities.shared),
            )
        else:
            rank = Rank(get_tp_group().rank_in_group, get_pp_group().rank_in_group)
            self.worker = WorkerSide(
                self._config,
                self._spec,
                transport if rank == Rank() else None,
                rank=rank,
                kv_heads=kv_heads(vllm_config, kv_cache_config),
            )

    def _kv_events(self, vllm_config: VllmConfig, *, shared: bool) -> KVEvents | None:
        wanted = vllm_config.kv_events_config
        if wanted is None or not wanted.enable_kv_cache_events:
            return None
        return KVEvents(self._spec, MEDIUM_STORAGE if shared else MEDIUM_CPU)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped save is a later miss, nothing more."""
        return False

    # ---- scheduler's process

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_work(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.take_report(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.forget(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_saves()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        """A new epoch: nothing that was stored before is used again by this engine."""
        self._scheduler.reset()
        return True

    # ---- worker's process

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        layouts = block_layouts(kv_caches, self._kv_cache_config)
        self._worker.start(layouts, layout_facts(kv_caches, self._vllm_config, self._kv_cache_config))

    def unregister_kv_caches(self) -> None:
        """Sleep mode, from vLLM 0.33 on: the KV memory is about to go. Nothing touches it after this."""
        self._worker.suspend()

    def restore_kv_caches(self) -> None:
        """The KV memory is back, at the same addresses."""
        self._worker.resume()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepWork)
        self._step, self._handed_over, self._handled = connector_metadata, False, sys.exc_info()[1]

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads are asynchronous; they start with the step's saves, after the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no forward pass ever uses a block that is being loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Comes after the forward pass, so the blocks are whole, unless it has raised: vLLM calls it then, too."""
        if self._step is not None and not self._handed_over:
            self._handed_over = True
            self._worker.submit(self._step, computed=sys.exc_info()[1] is self._handled)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._step is not None:
            # vLLM does not always call it: 0.30 not without a forward pass, and with speculative decoding only the last
            # pipeline stage calls it, after drafting. The drafters that are served keep no KV, so this is no earlier.
            self.wait_for_save()
            self._worker.collect(self._step)
        return KVConnectorTransferResults(
            finished_recving=self._worker.take_received(), failed_recving=self._worker.take_failed()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        half = self.worker or self.scheduler
        grown = half.take_stats() if half is not None else None
        return KVPoolStats(grown) if grown else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVPoolStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KVPoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        if self.worker is not None:
            self.worker.close()

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler is not None, "a scheduler hook was called in a worker"
        return self.scheduler

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker is not None, "a worker hook was called in the scheduler"
        return self.worker


def _namespace(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: Config) -> Callable[[], Namespace]:
    """The engine's namespace, for later: vLLM sets the seed of its hash chain after it has made the scheduler."""
    facts = model_facts(vllm_config, kv_cache_config, config)
    return functools.cache(lambda: Namespace.of({**facts, **seed_facts(vllm_config)}))


def _log_like_vllm() -> None:
    """Let vLLM's log show what kvpool says, in its form and from its level on, unless logging is set up otherwise."""
    ours, theirs = logging.getLogger("kvpool"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.setLevel(theirs.level)
        for handler in theirs.handlers:
            ours.addHandler(handler)


def _check_transport(config: Config) -> None:
    """Raises ConfigError for an address at which the two halves would not meet, so that every lookup were a miss."""
    url = parse_url(config.transport) if config.transport else None
    if url is not None and (url.scheme == "inprocess" or (url.scheme == "zmq+ipc" and not url.host)):
        raise ConfigError(
            f"transport: {url} is not an address that the engine's scheduler and its workers share; write "
            "zmq+ipc://NAME or zmq+tcp://HOST:PORT, or leave it out for a channel of this engine's own"
        )


def _private_url(vllm_config: VllmConfig, config: Config) -> str:
    """A lookup channel that only the processes of this engine know: its id is random and made once for all of them.

    Several connectors of one engine (MultiConnector's children) differ in what is configured.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    assert transfer is not None
    pool = (str(parse_url(config.store)), config.tenant, config.epoch_label)
    facts = repr((transfer.engine_id, parallel.data_parallel_index, *pool)).encode("utf-8", "surrogatepass")
    return f"zmq+ipc://kvpool-{hashlib.blake2b(facts, digest_size=16).hexdigest()}"


# In a MultiConnector vLLM finds what makes sense of our statistics by the name of the class alone.
register()
