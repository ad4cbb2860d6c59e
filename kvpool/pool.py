"""KVPool: the async facade over a store. Look up, load, save.

What to ask, load and save is decided by :mod:`kvpool.coordinator` and :mod:`kvpool.tokens`; this file only moves the
answers and the bytes. Bytes travel through staging memory, so that a store call that outlives its deadline can never
write into a block that the engine has taken back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio
import anyio.abc
import numpy as np
import numpy.typing as npt

from kvpool.calls import FailedKeys, Outcome, StoreCalls
from kvpool.config import Config
from kvpool.coordinator import Coordinator, Hit, Probe
from kvpool.deadlines import running_loop
from kvpool.errors import ConfigError, KVPoolError, LayoutError, StoreError
from kvpool.hashes import BlockHashes
from kvpool.keys import KeySpace, Namespace
from kvpool.memory import BlockLayout, Buffers
from kvpool.metrics import Counters
from kvpool.registry import create_store
from kvpool.spec import CacheSpec
from kvpool.staging import Lease, Staging
from kvpool.store import ABSENT, PRESENT, Presence, Results, Status, Store
from kvpool.threads import Threads

__all__ = ["KVPool", "Transfer"]

logger = logging.getLogger(__name__)

LOAD, SAVE = 0, 1  #: priorities in staging memory: loads go before saves


@dataclass(frozen=True, eq=False)
class Transfer:
    """Chunks of one group to move, and the engine blocks that hold them.

    ``hashes``: one digest a chunk (its last sub-hash). ``block_ids``: [n], or [n, k] with k engine blocks a chunk.
    """

    group: int
    hashes: BlockHashes
    block_ids: npt.NDArray[np.intp]

    def __post_init__(self) -> None:
        if len(self.hashes) != len(self.block_ids):
            raise LayoutError(f"{len(self.hashes)} chunk hashes do not fit {len(self.block_ids)} rows of block ids")

    def __len__(self) -> int:
        return len(self.block_ids)


class KVPool:
    """Shares KV blocks through one store; an async context manager, used from one event loop.

    ``layouts``: where each group's blocks live, one a group; may be empty for a pool that only looks up. ``shards``:
    which shard of each group this rank holds (0 where a group is not sharded).
    Every call ends by its deadline (absolute on the loop's clock; the configured time-outs where none is given), and
    never raises for what a store does: whatever is not proven is reported as not loaded, not saved, not there.
    """

    def __init__(
        self,
        store: Store,
        *,
        spec: CacheSpec,
        namespace: Namespace,
        layouts: Sequence[BlockLayout] = (),
        shards: Sequence[int] = (),
        config: Config | None = None,
        counters: Counters | None = None,
    ) -> None:
        if layouts and len(layouts) != len(spec.groups):
            raise LayoutError(f"{len(layouts)} block layouts for {len(spec.groups)} groups; give one a group")
        self.config = config or Config.load()
        largest = max((x.block_bytes for x in layouts), default=0)
        if largest > self.config.staging_bytes:
            raise ConfigError(
                f"staging_bytes={int(self.config.staging_bytes)} does not hold one block of {largest} bytes; "
                f"set it to several times that"
            )
        self.store = store
        self.spec = spec
        self.namespace = namespace
        self.layouts = tuple(layouts)
        self.coordinator = Coordinator(spec)
        self.counters = Counters() if counters is None else counters
        self.keyspace = KeySpace(namespace, spec)
        self._shards = tuple(shards) or (0,) * len(spec.groups)
        self._threads = Threads(2)
        self._failed = FailedKeys(self.config.failed_key_ttl_s)
        self._queued_save_bytes = 0
        self._described: set[str] = set()
        self._closed = True
        self._stack = AsyncExitStack()
        self._tasks: anyio.abc.TaskGroup
        self._calls: StoreCalls
        self.staging: Staging

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: Config | str | None = None,
        *,
        spec: CacheSpec,
        namespace: Namespace,
        layouts: Sequence[BlockLayout] = (),
    ) -> AsyncIterator[Self]:
        """Open the configured store (a URL is enough) and a pool on it. Raises ConfigError or StoreError."""
        settings = Config.load({"store": config}) if isinstance(config, str) else config or Config.load()
        store = create_store(settings.store)
        async with cls(store, spec=spec, namespace=namespace, layouts=layouts, config=settings) as pool:
            yield pool

    async def __aenter__(self) -> Self:
        backend = running_loop()
        if backend not in self.store.capabilities.loops:
            allowed = ", ".join(sorted(self.store.capabilities.loops))
            raise ConfigError(f"store {type(self.store).__name__} runs on {allowed}, not on the {backend} event loop")
        self.staging = Staging(int(self.config.staging_bytes))
        async with AsyncExitStack() as stack:
            stack.callback(self.staging.close)
            await stack.enter_async_context(self.store)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            self._calls = StoreCalls(self._tasks, self.counters, grace=self.config.deadline_grace_s)
            self._stack = stack.pop_all()
        self._closed = False
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._closed = True
        self._tasks.cancel_scope.cancel()
        # Not told of the body's exception: the task group would wrap it in an ExceptionGroup.
        await self._stack.__aexit__(None, None, None)

    # ---- what callers do

    def transfer(self, group: int, hashes: BlockHashes, chunk_ids: npt.ArrayLike, block_ids: npt.ArrayLike) -> Transfer:
        """The chunks ``chunk_ids`` of a prompt with block hashes ``hashes``, held by ``block_ids``."""
        ids = np.asarray(chunk_ids, np.intp)
        digests = hashes.pack((ids + 1) * self.spec.hashes_per_block(group) - 1)
        packed = BlockHashes(digests, hashes.hash_len, scheme=hashes.scheme)
        return Transfer(group, packed, np.asarray(block_ids, np.intp))

    async def lookup(
        self,
        hashes: BlockHashes,
        num_tokens: int,
        *,
        local_tokens: int = 0,
        keyspace: KeySpace | None = None,
        deadline: float | None = None,
    ) -> Hit:
        """How many of ``num_tokens`` prompt tokens can be served, ``local_tokens`` of them by the engine itself.

        A fault or a passed deadline is a miss: the answer is then ``Hit(0, ...)``.
        """
        self._check_open()
        limit = self._limit(deadline, self.config.lookup_timeout_ms / 1000)
        count = self.counters
        count.lookups += 1
        search = self.coordinator.search(num_tokens, len(hashes), local_tokens=local_tokens)
        try:
            probes = next(search)
            while True:
                probes = search.send(await self._probe(keyspace or self.keyspace, hashes, probes, limit))
        except StopIteration as stop:
            hit: Hit = stop.value
        except TimeoutError:
            count.lookup_late += 1
            return self._miss()
        except Exception as error:
            count.lookup_failed += 1
            logger.warning("lookup answered as a miss: %s: %s", type(error).__name__, error)
            return self._miss()
        count.add(lookup_hits=hit.length > 0, lookup_misses=hit.length == 0, hit_tokens=hit.length)
        return hit

    async def load(
        self, parts: Sequence[Transfer], *, keyspace: KeySpace | None = None, deadline: float | None = None
    ) -> list[Results]:
        """Load chunks into the engine's blocks; one column of results a member of ``parts``.

        A block holds the chunk if and only if its status is OK; any other block is untouched. No block is written after
        this returns or is cancelled.
        """
        self._check_open()
        limit = self._limit(deadline, self.config.load_timeout_s)
        self.counters.load_jobs += 1
        results = [Results.empty(len(c), Status.TIMED_OUT) for c in parts]
        batches = [(p, out, rows) for p, out in zip(parts, results, strict=True) for rows in self._batches(p)]
        async with anyio.create_task_group() as tasks:
            for part, out, rows in batches:
                tasks.start_soon(self._load_batch, part, rows, out, keyspace or self.keyspace, limit)
        for out in results:
            self.counters.add(
                loaded_chunks=int(out.ok.sum()),
                loaded_bytes=int(out.nbytes.sum()),
                load_missing_chunks=_count(out, Status.ABSENT),
                load_late_chunks=_count(out, Status.TIMED_OUT),
                load_failed_chunks=_count(out, Status.FAILED, Status.REJECTED),
                load_corrupt_chunks=_count(out, Status.CORRUPT),
            )
        return results

    async def save(
        self,
        parts: Sequence[Transfer],
        *,
        keyspace: KeySpace | None = None,
        deadline: float | None = None,
        copied: Callable[[], None] | None = None,
    ) -> list[Results]:
        """Save chunks from the engine's blocks; one column of results a member of ``parts``.

        Chunks that the store already has are OK and not copied. ``copied`` is called once, as soon as no block of the
        job will be read any more, at the latest before this returns or raises.
        """
        space = keyspace or self.keyspace
        reading = _Countdown(copied)
        nbytes = 0
        try:
            self._check_open()
            limit = self._limit(deadline, self.config.save_timeout_s)
            self.counters.save_jobs += 1
            if self._queued_save_bytes >= self.config.save_queue_bytes:
                # The store is slower than the engine: give up now, while it costs nothing, and not after a long wait.
                self.counters.save_dropped_chunks += sum(len(p) for p in parts)
                return [Results.empty(len(p), Status.REJECTED) for p in parts]
            results = [Results.empty(len(p), Status.TIMED_OUT) for p in parts]
            batches = [(p, out, rows) for p, out in zip(parts, results, strict=True) for rows in self._batches(p)]
            nbytes = sum(len(p) * self._chunk_bytes(p) for p in parts)
            self._queued_save_bytes += nbytes
            reading.left = len(batches)
            self._describe(space)
            async with anyio.create_task_group() as tasks:
                for part, out, rows in batches:
                    tasks.start_soon(self._save_batch, part, rows, out, space, limit, reading.step)
        finally:
            self._queued_save_bytes -= nbytes
            reading.finish()
        for out in results:
            self.counters.add(
                saved_chunks=int((out.ok & (out.nbytes > 0)).sum()),
                saved_bytes=int(out.nbytes.sum()),
                save_late_chunks=_count(out, Status.TIMED_OUT),
                save_failed_chunks=_count(out, Status.FAILED, Status.CORRUPT, Status.ABSENT),
                save_rejected_chunks=_count(out, Status.REJECTED),
            )
        return results

    # ---- how it is done

    async def _present(self, keys: Sequence[str], deadline: float) -> Outcome[Presence]:
        """Presence of ``keys``, those that failed lately counted as absent."""
        self.counters.probed_keys += len(keys)
        asked = await self._calls.run(lambda: self.store.exists(keys, deadline=deadline), deadline)
        if asked.result is not None:
            if len(asked.result) != len(keys):
                return Outcome(error=StoreError(f"the store answered {len(asked.result)} of {len(keys)} keys"))
            asked.result[self._failed.among(keys, anyio.current_time())] = ABSENT
        return asked

    async def _probe(
        self, keyspace: KeySpace, hashes: BlockHashes, probes: Sequence[Probe], deadline: float
    ) -> list[Presence]:
        """Ask the store for one wave: every shard of every probe in one call, reduced over the shards."""
        shards = [self.spec.groups[p.group].shards for p in probes]
        keys = [
            key
            for probe, n in zip(probes, shards, strict=True)
            for shard in range(n)
            for key in keyspace.keys(probe.group, shard, hashes, probe.hash_ids)
        ]
        self.counters.probe_waves += 1
        asked = await self._present(keys, deadline)
        if asked.late:
            raise TimeoutError
        if asked.result is None:
            raise asked.error or StoreError("no answer")
        answer: list[Presence] = []
        start = 0
        for probe, n in zip(probes, shards, strict=True):
            size = len(probe.hash_ids)
            every = (asked.result[start : start + n * size].reshape(n, size) == PRESENT).all(axis=0)
            answer.append(every.astype(np.uint8))
            start += n * size
        return answer

    async def _load_batch(
        self, part: Transfer, rows: npt.NDArray[np.intp], out: Results, keyspace: KeySpace, deadline: float
    ) -> None:
        layout = self.layouts[part.group]
        keys = keyspace.keys(part.group, self._shards[part.group], part.hashes, rows)
        width = self._chunk_bytes(part)
        lease = await self._lease(len(rows) * width, LOAD, deadline)
        if lease is None:
            return
        buffers = lease.buffers(len(rows), width)
        got = await self._calls.run(lambda: self.store.get_into(keys, buffers, deadline=deadline), deadline, lease)
        if got.late:
            self._failed.add(keys, anyio.current_time())
            return
        try:
            results = self._checked(got, len(rows))
            self._failed.add((keys[i] for i in np.flatnonzero(~results.ok)), anyio.current_time())
            ok = np.flatnonzero(results.ok)
            # A cancelled job must not touch the engine's blocks; from here on nothing waits for the store any more.
            await anyio.lowlevel.checkpoint_if_cancelled()
            if len(ok):
                staged = lease.rows(len(rows), width)
                staged = staged if len(ok) == len(rows) else staged[ok]
                blocks = part.block_ids[rows[ok]].reshape(-1)
                await self._threads.run(layout.scatter, blocks, staged.reshape(len(blocks), layout.block_bytes))
            _report(out, rows, results, width)
        finally:
            lease.release()

    async def _save_batch(
        self,
        part: Transfer,
        rows: npt.NDArray[np.intp],
        out: Results,
        keyspace: KeySpace,
        deadline: float,
        read: Callable[[], None],
    ) -> None:
        """Probe, copy out, put. ``read`` is called once, when no block of the batch will be read any more."""
        layout = self.layouts[part.group]
        width = self._chunk_bytes(part)
        lease: Lease | None = None
        try:
            keys = keyspace.keys(part.group, self._shards[part.group], part.hashes, rows)
            asked = await self._present(keys, deadline)
            if asked.result is None:
                out.status[rows] = Status.TIMED_OUT if asked.late else Status.FAILED
                return
            present = np.equal(asked.result, PRESENT)
            out.status[rows[present]] = Status.OK
            self.counters.save_present_chunks += int(present.sum())
            absent = np.flatnonzero(~present)
            if not len(absent):
                return
            rows, keys = rows[absent], [keys[i] for i in absent]
            lease = await self._lease(len(rows) * width, SAVE, deadline)
            if lease is None:
                return
            blocks = part.block_ids[rows].reshape(-1)
            staged = lease.rows(len(rows), width).reshape(len(blocks), layout.block_bytes)
            await self._threads.run(layout.gather, blocks, staged)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        finally:
            read()
        buffers = lease.buffers(len(rows), width)
        put = await self._calls.run(lambda: self.store.put(keys, buffers, deadline=deadline), deadline, lease)
        if put.late:
            return
        lease.release()
        results = self._checked(put, len(rows))
        self._failed.discard(keys[i] for i in np.flatnonzero(results.ok))
        _report(out, rows, results, width)

    @staticmethod
    def _checked(outcome: Outcome[Results], n: int) -> Results:
        """The results of a call; FAILED for all keys if it raised or answered for another number of keys."""
        results = outcome.result
        if results is not None and len(results) == n:
            return results
        failed = Results.empty(n, Status.FAILED)
        failed.errors[0] = outcome.error or StoreError(f"the store answered {len(results or ())} of {n} keys")
        return failed

    def _describe(self, keyspace: KeySpace) -> None:
        """Leave the namespace's manifest in the store, once, so that a person can tell what its values are."""
        if keyspace.manifest_key in self._described:
            return
        self._described.add(keyspace.manifest_key)
        text = bytearray(keyspace.namespace.manifest.encode())
        limit = anyio.current_time() + self.config.save_timeout_s

        async def put() -> Results:
            return await self.store.put([keyspace.manifest_key], Buffers.of(text), deadline=limit)

        self._tasks.start_soon(self._calls.run, put, limit)

    async def _lease(self, nbytes: int, priority: int, deadline: float) -> Lease | None:
        """Staging memory, or None if there was none before the deadline."""
        try:
            return await self.staging.acquire(nbytes, priority=priority, deadline=deadline)
        except TimeoutError:
            return None

    def _batches(self, part: Transfer) -> list[npt.NDArray[np.intp]]:
        """Row indices of a job in batches that fit ``batch_bytes`` of staging."""
        if not self.layouts:
            raise LayoutError("this pool was made without block layouts: it can only look up")
        self.layouts[part.group].check(part.block_ids)
        per_batch = max(1, int(self.config.batch_bytes) // max(1, self._chunk_bytes(part)))
        return [np.arange(i, min(i + per_batch, len(part))) for i in range(0, len(part), per_batch)]

    def _chunk_bytes(self, part: Transfer) -> int:
        blocks = 1 if part.block_ids.ndim == 1 else part.block_ids.shape[1]
        return blocks * self.layouts[part.group].block_bytes

    def _limit(self, deadline: float | None, timeout: float) -> float:
        return min(math.inf if deadline is None else deadline, anyio.current_time() + timeout)

    def _miss(self) -> Hit:
        return Hit(0, (0,) * len(self.spec.groups))

    def _check_open(self) -> None:
        if self._closed:
            raise KVPoolError("the pool is not open: use it inside 'async with'")


class _Countdown:
    """Calls ``then`` once: after ``left`` parts have stepped, or when the whole is finished."""

    def __init__(self, then: Callable[[], None] | None) -> None:
        self.left = 0
        self._then = then

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.finish()

    def finish(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


def _report(out: Results, rows: npt.NDArray[np.intp], results: Results, width: int) -> None:
    """Put the results of a batch into the columns of its job."""
    out.status[rows] = results.status
    out.nbytes[rows] = np.where(results.ok, width, 0)
    out.errors.update({int(rows[i]): error for i, error in results.errors.items()})


def _count(results: Results, *statuses: Status) -> int:
    return int(np.isin(results.status, statuses).sum())
