"""The worker's half of the connector: hands jobs to the event loop and reports each exactly once.

Everything here runs on vLLM's worker thread and returns at once; the pool, the store and the lookup server live on the
portal's own thread.
"""

from __future__ import annotations

import collections
import hashlib
import heapq
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvpool.config import Config
from kvpool.errors import JobCancelled, KVPoolError, PortalClosed, StoreError
from kvpool.hashes import BlockHashes
from kvpool.keys import Fact, KeySpace, Namespace
from kvpool.memory import BlockLayout
from kvpool.metrics import Counters
from kvpool.pool import KVPool, Transfer
from kvpool.portal import Portal
from kvpool.ranks import Rank
from kvpool.registry import create_store, create_transport, parse_url
from kvpool.spec import CacheSpec
from kvpool.store import Results, Status
from kvpool.transfers import Transfers
from kvpool.transport import LookupRequest, LookupResult
from kvpool.trouble import Trouble, reason
from kvpool.vllm.health import Health
from kvpool.vllm.messages import Job, StepWork, WorkerReport
from kvpool.vllm.namespace import say_namespace
from kvpool.vllm.service import Service
from kvpool.vllm.stats import ConnectorCounters, growth

__all__ = ["WorkerSide"]

logger = logging.getLogger(__name__)

#: For each part of a job: bool[n], which chunks were proven loaded.
Columns: TypeAlias = list[npt.NDArray[np.bool_]]
#: A job ends by its own deadline; one that has not even begun is cancelled this long after it.
EXPIRY_SLACK_S = 0.5
#: Longest wait in a step that computes nothing while jobs are in flight, so that vLLM does not spin at full speed.
IDLE_WAIT_S = 0.001
#: How long closing may take, stores and servers dead or not.
CLOSE_TIMEOUT_S = 5.0


class _Spaces:
    """Key spaces by what the scheduler names (namespace digest, epoch), for this worker's own layout.

    Used by the worker's thread and by the event loop, so no step here relies on what the one before it has seen.
    """

    def __init__(self, spec: CacheSpec, layout: Fact) -> None:
        self._spec = spec
        self._layout = layout
        self._known: dict[tuple[bytes, bytes], KeySpace] = {}
        self.engine: Namespace | None = None

    def name(self, engine: Namespace) -> None:
        """Learn what the engine's digest stands for; keys need it not, only the manifest that a person reads."""
        self.engine = engine

    def knows(self, namespace: bytes) -> bool:
        """Whether it is known what this digest stands for."""
        return self.engine is not None and self.engine.digest == namespace

    def get(self, namespace: bytes, epoch: bytes) -> KeySpace:
        space = self._known.get((namespace, epoch))
        if space is None:
            facts: dict[str, Fact] = {"engine": namespace.hex(), "epoch": epoch.hex(), "layout": self._layout}
            key, engine = Namespace.of(facts), self.engine
            if engine is None or engine.digest != namespace:
                return KeySpace(key, self._spec)  # not kept: what it stands for may be told at this very moment
            # The key is made of the engine's digest alone; the manifest spells it out for a person.
            key = Namespace(key.digest, Namespace.of({**facts, "engine_facts": engine.facts}).manifest)
            space = self._known[namespace, epoch] = KeySpace(key, self._spec)
            for old in list(self._known)[:-16]:  # resets make new epochs; only the latest few are in use
                self._known.pop(old, None)
        return space


class WorkerSide:
    """One rank's worker. Call :meth:`start` once the block memory is known.

    ``kv_heads``: for each group, the KV heads of the whole model. ``transport``: where lookups are answered; None on
    all ranks but the first.
    """

    def __init__(
        self,
        config: Config,
        spec: CacheSpec,
        transport: Mapping[str, str] | None,
        *,
        rank: Rank = Rank(),  # noqa: B008
        kv_heads: Sequence[int | None] = (),
    ) -> None:
        self._config = config
        self._spec = spec
        self._number = spec.parallel.ranks().index(rank)
        self._server = None if transport is None else create_transport(transport)
        heads = tuple(kv_heads) or (None,) * len(spec.groups)
        self._shards = [spec.parallel.shard(rank, h) for h in heads]
        self._stripes = [spec.parallel.put_stripe(rank, h) for h in heads]
        self._namespace = self._epoch = b""
        self._loads: dict[int, Job] = {}
        self._saves: dict[int, Job] = {}
        self._reading: set[int] = set()  # saves whose blocks may still be read here
        self._expiry: list[tuple[float, tuple[str, int]]] = []
        self._released: collections.deque[int] = collections.deque()
        self._report = WorkerReport()
        self._counters = Counters()
        self._served = ConnectorCounters()
        self._told: dict[str, int] = {}
        self.layouts: tuple[BlockLayout, ...] = ()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._invalid: set[int] = set()
        self._trouble = Trouble(logger, "kvpool", "what it was to load is computed, what it was to save is not stored")
        self._portal: Portal[Service] | None = None
        self._awake = False
        self._health = Health()
        self._said_serving = True

    def start(self, layouts: Sequence[BlockLayout], layout: Fact) -> None:
        """Start the event loop, the store and the lookup server, in the background. What fails there is tried again.

        Raises ConfigError if the staging memory or a value of the store does not hold one block.
        """
        Transfers.check(layouts, self._config, create_store(self._config.store))
        self.layouts = tuple(layouts)
        self._spaces = _Spaces(self._spec, layout)
        self._report.layouts[hashlib.blake2b(repr(layout).encode(), digest_size=8).hexdigest()] = 1
        self.resume()

    def suspend(self) -> None:
        """The block memory is about to go: let go of it, and of the store that may have it registered. Idempotent.

        Raises KVPoolError if the store does not let go within seconds: the engine must not sleep then.
        """
        if not self._awake:
            return
        assert self._portal is not None
        if not self._portal.close(CLOSE_TIMEOUT_S):
            raise KVPoolError(
                "the store may still touch the engine's blocks, so the engine must not sleep; try again when it has "
                "let go: until then the pool serves nothing"
            )
        self._take_in()
        self._awake = False  # the closed portal stays: it reports whatever it is given as not done

    def resume(self) -> None:
        """The block memory is there: begin to serve. Idempotent."""
        if not self._awake:
            self._health = Health()
            self._portal = Portal(self._lifespan, backend=self._config.event_loop)
            self._portal.start()
            self._awake = True

    def _lifespan(self) -> AbstractAsyncContextManager[Service]:
        """The event loop's life: the pool and, on the first rank, a server for the scheduler's lookups."""
        config, server, health = self._config, self._server, self._health

        def open_pool() -> KVPool:
            return KVPool(
                create_store(config.store),
                spec=self._spec,
                namespace=Namespace.of({"key spaces": "named by each job"}),
                layouts=self.layouts,
                shards=self._shards,
                config=config,
                counters=self._counters,
                listener=health.on_event,
                name=str(parse_url(config.store)),
            )

        async def answer(request: LookupRequest) -> LookupResult:
            try:
                pool = await service.pool()
            except StoreError:  # a miss at once: the engine must not wait for a store that is away
                self._served.lookups_without_store += 1
                return LookupResult(0, (0,) * len(self._spec.groups), request.epoch, 0.0)
            space = self._spaces.get(request.namespace, request.epoch)
            hit = await pool.lookup(
                request.hashes, request.num_tokens, local_tokens=request.local_tokens, keyspace=space
            )
            return LookupResult(hit.length, hit.boundaries, request.epoch, config.max_age_s)

        service = Service(open_pool, None if server is None else lambda: server.serve(answer), health)
        return service.run()

    # ---- one step

    def submit(self, work: StepWork, *, computed: bool = True) -> None:
        """Hand the step's loads, then its saves, to the event loop. The step's forward pass has run.

        ``computed``: False if it has raised, so that nobody knows what is in the blocks; then nothing is saved of them.
        """
        assert self._portal is not None
        if work.engine is not None:
            self._spaces.name(work.engine)
        if self._server is not None and (work.namespace, work.epoch) != (self._namespace, self._epoch):
            space = self._spaces.get(work.namespace, work.epoch)
            say_namespace(self._config.store, space.namespace, work.epoch)
        self._namespace, self._epoch = work.namespace, work.epoch
        self._report.unnamed = not self._spaces.knows(work.namespace)
        for job in work.loads:
            self._loads[job.number] = job
            self._portal.submit(_load, self._transfers(job), self._space(job), token=("load", job.number))
            self._expire("load", job.number, self._config.load_timeout_s)
        for job in work.saves:
            if not computed:
                self._report.released[job.number], self._report.saved[job.number] = 1, (1, False)
                continue
            self._saves[job.number] = job
            self._reading.add(job.number)
            released = partial(self._released.append, job.number)
            self._portal.submit(_save, self._striped(job), self._space(job), released, token=("save", job.number))
            self._expire("save", job.number, self._config.save_timeout_s)

    def collect(self, work: StepWork) -> None:
        """Take in what has ended since the last step."""
        assert self._portal is not None
        if work.idle and (self._loads or self._saves):
            self._portal.wait(IDLE_WAIT_S)
        while self._expiry and self._expiry[0][0] <= time.monotonic():
            self._portal.cancel(heapq.heappop(self._expiry)[1])  # no effect on a job that has ended
        self._take_in()

    def _take_in(self) -> None:
        assert self._portal is not None
        for done in self._portal.poll():
            kind, number = cast(tuple[str, int], done.token)
            if done.error is not None:
                self._served.failed_jobs += 1
                # That the store is away has been said, and that calls hang, too.
                if not isinstance(done.error, (StoreError, JobCancelled, PortalClosed)):
                    self._trouble.note(time.monotonic(), f"{kind} job", reason(done.error))
            (self._loaded if kind == "load" else self._saved)(number, done.result if done.error is None else None)
        while self._released:
            self._release(self._released.popleft())

    def _expire(self, kind: str, number: int, timeout: float) -> None:
        """Cancel a job this long after it was handed over: it may still wait for a store that does not open."""
        heapq.heappush(self._expiry, (time.monotonic() + timeout + EXPIRY_SLACK_S, (kind, number)))

    def _loaded(self, number: int, proven: Columns | None) -> None:
        job = self._loads.pop(number)
        # After a reset the engine may have other weights: what was loaded for the old epoch is void.
        if proven is None or job.epoch != self._epoch:
            proven = [np.zeros(len(part.block_ids), np.bool_) for part in job.parts]
        bad = [part.block_ids[~ok] for part, ok in zip(job.parts, proven, strict=True)]
        failed = any(map(len, bad))
        if failed and len(self._spec.groups) > 1:
            # Block ids name no group, so vLLM has the whole request computed again.
            self._failed.add(job.request_id)
        elif failed:
            self._invalid.update(bad[0].tolist())
        self._received.add(job.request_id)
        self._report.loaded[number] = 1, not failed

    def _saved(self, number: int, results: list[Results] | None) -> None:
        self._release(number)
        del self._saves[number]
        done = results is not None
        for out in results or ():
            skipped = np.equal(out.status, Status.SKIPPED)
            done &= bool((out.ok | skipped).all())
            if skipped.any():
                self._report.skipped.add(number)
        self._report.saved[number] = 1, done

    def _release(self, number: int) -> None:
        # "copied" and the job's end both tell, in different steps; the scheduler counts ranks, so it hears of it once.
        if number in self._reading:
            self._reading.discard(number)
            self._report.released[number] = 1

    def take_received(self) -> set[str]:
        """Requests whose load has ended, well or not; each once."""
        received, self._received = self._received, set()
        return received

    def take_failed(self) -> set[str]:
        """Those of :meth:`take_received` whose load failed as a whole; only with several groups."""
        failed, self._failed = self._failed, set()
        return failed

    def take_invalid(self) -> set[int]:
        """Blocks that were to be loaded and are not proven; each once, no later than its request is received."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> WorkerReport | None:
        """What the scheduler's half needs to know, or None."""
        report, self._report = self._report, WorkerReport()
        serves = self._health.serves
        if report or not serves or serves != self._said_serving:
            report.serving[self._number] = self._said_serving = serves
        return report or None

    def take_stats(self) -> dict[str, int]:
        """What the counters grew by since the last call."""
        before, self._told = self._told, self.counters()
        return growth(self._told, before)

    def counters(self) -> dict[str, int]:
        """What the pool and the lookup server have done so far."""
        if self._server is not None:
            self._served.served(self._server.counts())
        return self._counters.snapshot() | self._served.snapshot()

    def outstanding(self) -> dict[str, int]:
        """How much state is held, by kind; all 0 when the engine is at rest."""
        return {
            "loads": len(self._loads),
            "saves": len(self._saves),
            "received": len(self._received),
            "failed": len(self._failed),
            "invalid blocks": len(self._invalid),
        }

    def close(self) -> None:
        """Stop the event loop; idempotent, bounded in time."""
        if self._portal is not None:
            self._portal.close(CLOSE_TIMEOUT_S)

    def _space(self, job: Job) -> KeySpace:
        return self._spaces.get(self._namespace, job.epoch)

    @staticmethod
    def _transfers(job: Job) -> list[Transfer]:
        return [Transfer(part.group, part.hashes, part.block_ids) for part in job.parts]

    def _striped(self, job: Job) -> list[Transfer]:
        """What this rank stores of a job: of values that several ranks hold alike, its own stripe."""
        parts = []
        for part in job.parts:
            step, phase = self._stripes[part.group]
            mine = np.flatnonzero(part.chunk_ids % step == (phase + part.group) % step)
            hashes = BlockHashes(part.hashes.pack(mine), part.hashes.hash_len, scheme=part.hashes.scheme)
            parts.append(Transfer(part.group, hashes, part.block_ids[mine]))
        return parts


async def _load(service: Service, parts: list[Transfer], space: KeySpace) -> Columns:
    pool = await service.pool()
    return [results.ok for results in await pool.load(parts, keyspace=space)]


async def _save(service: Service, parts: list[Transfer], space: KeySpace, released: partial[None]) -> list[Results]:
    pool = await service.pool()
    return await pool.save(parts, keyspace=space, copied=released)
