"""An engine without a model: looks up, loads, verifies, "computes" the rest and saves it, as a real one would.

It keeps no prefix cache of its own: what it does not load it computes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import anyio.lowlevel
import numpy as np

from kvpool.config import Config
from kvpool.events import Event, ResetDone
from kvpool.hashes import BlockHashes
from kvpool.keys import Namespace
from kvpool.memory import BlockLayout
from kvpool.pool import KVPool
from kvpool.registry import create_store, parse_url
from kvpool.replay.blocks import BlockIds, BlockMemory, Flags, Ids, block_hashes
from kvpool.replay.trace import BLOCK_TOKENS, Trace
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import SupportsScan
from kvpool.threads import Threads

__all__ = ["Ended", "Job", "Outcome", "run_engine"]

T = TypeVar("T")

SPEC = CacheSpec((CacheGroup(Kind.FULL, BLOCK_TOKENS),), BLOCK_TOKENS)
#: Time-outs where the user has set none and time does not matter: only a store that is really gone is late.
_PATIENT = {"lookup_timeout_ms": 30_000.0, "load_timeout_s": 120.0, "save_timeout_s": 120.0}
#: With a speed, late answers are a result; so many late requests in a row mean that the store is gone.
_LATE_IN_A_ROW = 100
#: Counters that say that the job cannot be done, and in words; the second kind only where nothing may be late.
_FAILED = {
    "lookup_failed": "a lookup failed",
    "load_failed_chunks": "a load failed",
    "save_failed_chunks": "a save failed",
    "save_rejected_chunks": "the store refused blocks",
}
_LATE = {
    "lookup_late": "a lookup was late",
    "load_late_chunks": "a load was late",
    "save_late_chunks": "a save was late",
}
_PACED_REQUESTS = 4  # with a speed, block memory for so many of the longest request at the same time
_INLINE_BYTES = 1 << 20  # with a speed, more work than this is done beside the loop, so as not to make others late


@dataclass(frozen=True)
class Job:
    """A replay. ``speed``: how many times faster than recorded; None: one request after another, timestamps ignored."""

    trace: Trace
    store: str
    block_bytes: int = 1024
    engines: int = 1
    speed: float | None = None

    @property
    def namespace(self) -> Namespace:
        """The ids of another trace stand for other prompts, so each trace has a namespace of its own."""
        return Namespace.of(
            {"replay": self.trace.digest, "block_tokens": BLOCK_TOKENS, "block_bytes": self.block_bytes}
        )

    @property
    def num_blocks(self) -> int:
        """Blocks in the memory of each engine."""
        return max(1, self.trace.longest) * (1 if self.speed is None else _PACED_REQUESTS)

    @property
    def bounded(self) -> bool:
        """Whether the store has been given a capacity."""
        return "capacity" in parse_url(self.store).params

    @property
    def config(self) -> Config:
        """The user's configuration with this store. Raises ConfigError."""
        config = Config.load({"store": self.store})
        if self.speed is not None:
            return config
        return config.model_copy(update={k: v for k, v in _PATIENT.items() if k not in config.model_fields_set})


@dataclass
class Outcome:
    """What became of one request. Times in seconds; None where there was nothing to do.

    ``counters``: what the pool has counted since the engine's last outcome. ``problem``: why the replay cannot go on.
    """

    request: int
    blocks: int
    verified: int = 0
    wrong_ids: list[int] = field(default_factory=list)
    lookup_s: float | None = None
    load_s: float | None = None
    save_s: float | None = None
    counters: dict[str, int] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Ended:
    """There is nothing left to do. ``stored``: blocks in the store, None if it is not bounded or cannot tell."""

    namespace: str
    stored: int | None


async def run_engine(
    job: Job,
    take: Callable[[], int | None],
    report: Callable[[Outcome], None],
    started: Callable[[], Awaitable[float]],
) -> Ended:
    """Play requests until there are none, or one has a problem.

    ``take``: the next request nobody else has taken, in arrival order. ``report`` gets every outcome. ``started``:
    called when the store is open; gives the time on the loop's clock at which the trace begins.
    Raises ConfigError or StoreError.
    """
    memory = BlockMemory(job.num_blocks, job.block_bytes)
    config = job.config
    store = create_store(config.store)
    layout = BlockLayout.of_arrays(memory.array)
    said = _LastError()
    pool = KVPool(
        store,
        spec=SPEC,
        namespace=job.namespace,
        layouts=[layout],
        config=config,
        listener=said,
        name=str(parse_url(config.store)),
    )
    async with pool:
        done = await _Engine(job, pool, memory, said).run(take, report, await started())
        stored = None
        if done and job.bounded and isinstance(store, SupportsScan):
            stored = sum([1 async for _ in store.scan(pool.keyspace.prefix(0, 0))])
        return Ended(pool.keyspace.namespace.hex, stored)


class _Engine:
    def __init__(self, job: Job, pool: KVPool, memory: BlockMemory, said: _LastError) -> None:
        self.job = job
        self.pool = pool
        self.memory = memory
        self.said = said
        self.counted = pool.counters.snapshot()
        self.late_in_a_row = 0
        self.threads = Threads(1)

    async def run(self, take: Callable[[], int | None], report: Callable[[Outcome], None], start: float) -> bool:
        """Whether there was no problem."""
        trace, speed = self.job.trace, self.job.speed
        async with anyio.create_task_group() as tasks:

            async def play(i: int, blocks: BlockIds) -> None:
                outcome = await self.play(i, blocks)
                self.memory.give_back(blocks)
                report(outcome)
                if outcome.problem:
                    tasks.cancel_scope.cancel()

            while (i := take()) is not None:
                if speed is not None:
                    await anyio.sleep_until(start + trace.timestamps[i] / 1000 / speed)
                blocks = await self.memory.take(len(trace.request(i)))
                if speed is not None:
                    tasks.start_soon(play, i, blocks)
                else:
                    await play(i, blocks)
                    await anyio.lowlevel.checkpoint()
        return not tasks.cancel_scope.cancel_called

    async def play(self, i: int, blocks: BlockIds) -> Outcome:
        """One request, from lookup to save."""
        ids = self.job.trace.request(i)
        hashes = block_hashes(ids)
        outcome = Outcome(i, len(ids))
        errors: list[Exception] = []
        loaded = await self.load(hashes, ids, blocks, outcome, errors)
        if not self.problem(errors):  # else a store that does not answer would be waited for once more
            rest = np.flatnonzero(~loaded)
            await self.compute(self.memory.fill, blocks[rest], ids[rest])
            await self.save(hashes, blocks, rest, outcome, errors)
        outcome.counters = self.pool.counters.since(self.counted)
        self.late_in_a_row = self.late_in_a_row + 1 if _LATE.keys() & outcome.counters.keys() else 0
        outcome.problem = self.problem(errors)
        for name, n in outcome.counters.items():
            self.counted[name] += n
        return outcome

    async def load(
        self, hashes: BlockHashes, ids: Ids, blocks: BlockIds, outcome: Outcome, errors: list[Exception]
    ) -> Flags:
        """Which blocks the pool says it has loaded; each of them is verified."""
        pool, memory = self.pool, self.memory
        loaded = np.zeros(len(ids), np.bool_)
        start = anyio.current_time()
        hit = await pool.lookup(hashes, BLOCK_TOKENS * len(ids) + 1)
        outcome.lookup_s = anyio.current_time() - start
        chunks = pool.coordinator.load_chunks(0, hit.length)
        if not len(chunks):
            return loaded
        await self.compute(memory.spoil, blocks[chunks], ids[chunks])
        start = anyio.current_time()
        (results,) = await pool.load([pool.transfer(0, hashes, chunks, blocks[chunks])])
        outcome.load_s = anyio.current_time() - start
        errors += results.errors.values()
        loaded[chunks] = results.ok
        right = await self.compute(memory.right, blocks[loaded], ids[loaded])
        outcome.verified = int(right.sum())
        outcome.wrong_ids = ids[loaded][~right].tolist()
        return loaded

    async def save(
        self, hashes: BlockHashes, blocks: BlockIds, chunks: BlockIds, outcome: Outcome, errors: list[Exception]
    ) -> None:
        if not len(chunks):
            return
        start = anyio.current_time()
        (results,) = await self.pool.save([self.pool.transfer(0, hashes, chunks, blocks[chunks])])
        outcome.save_s = anyio.current_time() - start
        errors += results.errors.values()

    async def compute(self, step: Callable[[BlockIds, Ids], T], blocks: BlockIds, ids: Ids) -> T:
        if self.job.speed is None or len(ids) * self.job.block_bytes <= _INLINE_BYTES:
            return step(blocks, ids)
        return await self.threads.run(step, blocks, ids)

    def problem(self, errors: Sequence[Exception]) -> str:
        """Why the replay cannot go on after what was counted since the last outcome; empty if it can.

        A block that is not there or damaged is a miss. With a speed, being late or dropping saves is a result, too.
        """
        counted = self.pool.counters.since(self.counted)
        bad = [what for name, what in _FAILED.items() if name in counted]
        if self.job.speed is None:
            bad += [what for name, what in _LATE.items() if name in counted]
        elif self.late_in_a_row >= _LATE_IN_A_ROW:
            bad.append(f"{self.late_in_a_row} requests in a row were late")
        if not bad:
            return ""
        reason = next(map(str, errors), self.said.message)
        return ", ".join(bad) + (f": {reason}" if reason else "")


class _LastError:
    """Listens for what the store said last: why a lookup failed stands only there."""

    def __init__(self) -> None:
        self.message = ""

    def __call__(self, event: Event) -> None:
        if not isinstance(event, ResetDone) and event.error is not None:
            self.message = str(event.error)
