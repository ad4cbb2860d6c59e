"""KVPool: the async facade over a store. Look up, load, save.

What to ask, load and save is decided by :mod:`kvpool.coordinator` and :mod:`kvpool.tokens`; this file only moves the
answers and the bytes. Bytes travel through staging memory, so that a store call that outlives its deadline can never
write into a block that the engine has taken back.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import anyio
import anyio.abc
import numpy as np
import numpy.typing as npt

from kvpool.config import Config
from kvpool.coordinator import Coordinator, Hit, Probe
from kvpool.deadlines import fail_at, move_on_at, running_loop
from kvpool.errors import ConfigError, KVPoolError, LayoutError, StoreError
from kvpool.hashes import BlockHashes
from kvpool.keys import KeySpace, Namespace
from kvpool.memory import BlockLayout, Buffers
from kvpool.metrics import Counters
from kvpool.registry import create_store
from kvpool.spec import CacheSpec
from kvpool.staging import Lease, Staging
from kvpool.store import PRESENT, Presence, Results, Status, Store
from kvpool.threads import Threads

__all__ = ["KVPool", "Transfer"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOAD, SAVE = 0, 1  #: priorities in staging memory: loads go before saves
#: A store that honours deadlines answers this soon after one; then its call is given up.
DEADLINE_GRACE_S = 0.25
#: How many failed keys are remembered at most; the oldest are forgotten first.
MAX_FAILED_KEYS = 65_536


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


@dataclass(slots=True)
class _Call:
    """One store call and the staging memory it touches. Whoever is last, caller or call, lets go of the memory."""

    lease: Lease | None
    done: anyio.Event = field(default_factory=anyio.Event)
    results: Results | None = None
    error: Exception | None = None
    abandoned: bool = False


class KVPool:
    """Shares KV blocks through one store; an async context manager, used from one event loop.

    ``layouts``: where each group's blocks live, one a group; may be empty for a pool that only looks up.
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
        self._threads = Threads(2)
        self._failed: OrderedDict[str, float] = OrderedDict()
        self._queued_save_bytes = 0
        self._described: set[str] = set()
        self._closed = True
        self._stack = AsyncExitStack()
        self._tasks: anyio.abc.TaskGroup
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
            with fail_at(limit):
                probes = next(search)
                while True:
                    count.probe_waves += 1
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
        async with anyio.create_task_group() as tasks:
            for part, out in zip(parts, results, strict=True):
                for rows in self._batches(part):
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
        reading = _Countdown(0, copied)
        try:
            self._check_open()
            limit = self._limit(deadline, self.config.save_timeout_s)
            self.counters.save_jobs += 1
            results = [Results.empty(len(c), Status.TIMED_OUT) for c in parts]
            batches = [(p, out, rows) for p, out in zip(parts, results, strict=True) for rows in self._batches(p)]
            reading.left = len(batches)
            self._describe(space)
            async with anyio.create_task_group() as tasks:
                for part, out, rows in batches:
                    tasks.start_soon(self._save_batch, part, rows, out, space, limit, reading)
        finally:
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
        self.counters.probed_keys += len(keys)
        present = await self.store.exists(keys, deadline=deadline)
        if len(present) != len(keys):
            raise StoreError(f"{type(self.store).__name__}.exists answered {len(present)} of {len(keys)} keys")
        self._apply_failed(keys, present)
        answer: list[Presence] = []
        start = 0
        for probe, n in zip(probes, shards, strict=True):
            size = len(probe.hash_ids)
            block = present[start : start + n * size].reshape(n, size)
            answer.append((block == PRESENT).all(axis=0).astype(np.uint8))
            start += n * size
        return answer

    async def _load_batch(
        self, part: Transfer, rows: npt.NDArray[np.intp], out: Results, keyspace: KeySpace, deadline: float
    ) -> None:
        layout = self.layouts[part.group]
        keys = keyspace.keys(part.group, 0, part.hashes, rows)
        width = self._chunk_bytes(part)
        lease = await self._lease(len(rows) * width, LOAD, deadline)
        if lease is None:
            return
        call = _Call(lease)
        try:
            buffers = lease.buffers(len(rows), width)
            got = await self._owned(call, lambda: self.store.get_into(keys, buffers, deadline=deadline), deadline)
            if got is None:
                if call.error is not None:
                    out.status[rows] = Status.FAILED
                return
            ok = np.flatnonzero(got.ok)
            self._remember_failed([keys[i] for i in np.flatnonzero(~got.ok & (got.status != Status.TIMED_OUT))])
            # A cancelled job must not touch the engine's blocks; from here on nothing waits for the store any more.
            await anyio.lowlevel.checkpoint_if_cancelled()
            if len(ok):
                staged = lease.rows(len(rows), width)
                staged = staged if len(ok) == len(rows) else staged[ok]
                ids = part.block_ids[rows[ok]]
                flat = ids.reshape(-1)
                await self._threads.run(layout.scatter, flat, staged.reshape(len(flat), layout.block_bytes))
            out.status[rows] = got.status
            out.nbytes[rows] = np.where(got.ok, width, 0)
            out.errors.update({int(rows[i]): e for i, e in got.errors.items()})
        finally:
            self._let_go(call)

    async def _save_batch(
        self,
        part: Transfer,
        rows: npt.NDArray[np.intp],
        out: Results,
        keyspace: KeySpace,
        deadline: float,
        reading: _Countdown,
    ) -> None:
        layout = self.layouts[part.group]
        width = self._chunk_bytes(part)
        size = len(rows) * width
        call = _Call(None)
        queued = 0
        try:
            if self._queued_save_bytes + size > self.config.staging_bytes:
                self.counters.save_dropped_chunks += len(rows)
                out.status[rows] = Status.REJECTED
                return
            queued = size
            self._queued_save_bytes += size
            keys = keyspace.keys(part.group, 0, part.hashes, rows)
            present = await self._present(keys, deadline)
            if present is None:
                out.status[rows] = Status.FAILED
                return
            out.status[rows[present]] = Status.OK
            self.counters.save_present_chunks += int(present.sum())
            absent = np.flatnonzero(~present)
            if not len(absent):
                return
            rows, keys = rows[absent], [keys[i] for i in absent]
            call.lease = await self._lease(len(rows) * width, SAVE, deadline)
            if call.lease is None:
                return
            flat = part.block_ids[rows].reshape(-1)
            staged = call.lease.rows(len(rows), width).reshape(len(flat), layout.block_bytes)
            await self._threads.run(layout.gather, flat, staged)
            reading.step()
            reading = _Countdown(0, None)
            buffers = call.lease.buffers(len(rows), width)
            put = await self._owned(call, lambda: self.store.put(keys, buffers, deadline=deadline), deadline)
            if put is None:
                if call.error is not None:
                    out.status[rows] = Status.FAILED
                return
            out.status[rows] = put.status
            out.nbytes[rows] = np.where(put.ok, width, 0)
            out.errors.update({int(rows[i]): e for i, e in put.errors.items()})
        finally:
            reading.step()
            self._queued_save_bytes -= queued
            self._let_go(call)

    async def _present(self, keys: Sequence[str], deadline: float) -> npt.NDArray[np.bool_] | None:
        """Which keys need no put; None if the store failed as a whole."""
        try:
            with fail_at(deadline):
                found = await self.store.exists(keys, deadline=deadline)
        except TimeoutError:
            return None
        except Exception as error:
            logger.warning("save gave up at the presence probe: %s: %s", type(error).__name__, error)
            return None
        return np.equal(found, PRESENT)

    def _describe(self, keyspace: KeySpace) -> None:
        """Leave the namespace's manifest in the store, once, so that a person can tell what its values are."""
        if keyspace.manifest_key in self._described:
            return
        self._described.add(keyspace.manifest_key)

        async def put() -> None:
            text = bytearray(keyspace.namespace.manifest.encode())
            limit = anyio.current_time() + self.config.save_timeout_s
            try:
                with move_on_at(limit):
                    await self.store.put([keyspace.manifest_key], Buffers.of(text), deadline=limit)
            except Exception as error:
                logger.debug("no manifest stored: %s", error)

        self._tasks.start_soon(put)

    async def _lease(self, nbytes: int, priority: int, deadline: float) -> Lease | None:
        """Staging memory, or None if there was none before the deadline."""
        try:
            return await self.staging.acquire(nbytes, priority=priority, deadline=deadline)
        except TimeoutError:
            return None

    async def _owned(self, call: _Call, fn: Callable[[], Awaitable[Results]], deadline: float) -> Results | None:
        """Run a store call that owns ``call.lease`` until it has ended, and wait for it until the deadline.

        None: it failed (``call.error``), or it is late and goes on alone, its result void.
        """
        self._tasks.start_soon(self._run_call, call, fn, deadline)
        try:
            with move_on_at(deadline + DEADLINE_GRACE_S):
                await call.done.wait()
        finally:
            call.abandoned = not call.done.is_set()
        if call.abandoned:
            self.counters.abandoned_calls += 1
        elif call.error is not None:
            logger.warning("store call failed: %s: %s", type(call.error).__name__, call.error)
        return call.results if call.done.is_set() else None

    async def _run_call(self, call: _Call, fn: Callable[[], Awaitable[Results]], deadline: float) -> None:
        try:
            with move_on_at(deadline + DEADLINE_GRACE_S):
                call.results = await fn()
        except Exception as error:
            call.error = error
        finally:
            call.done.set()
            if call.abandoned:
                self._let_go(call)

    @staticmethod
    def _let_go(call: _Call) -> None:
        """Release the staging memory of a call that has ended; a running one releases it itself."""
        if call.lease is not None and not (call.abandoned and not call.done.is_set()):
            call.lease.release()
            call.lease = None

    def _batches(self, part: Transfer) -> list[npt.NDArray[np.intp]]:
        """Row indices of a job in batches that fit ``batch_bytes`` of staging."""
        per_batch = max(1, int(self.config.batch_bytes) // max(1, self._chunk_bytes(part)))
        return [np.arange(i, min(i + per_batch, len(part))) for i in range(0, len(part), per_batch)]

    def _chunk_bytes(self, part: Transfer) -> int:
        blocks = 1 if part.block_ids.ndim == 1 else part.block_ids.shape[1]
        return blocks * self.layouts[part.group].block_bytes

    def _remember_failed(self, keys: Sequence[str]) -> None:
        """Keys whose load failed count as absent for a while, so that no request can loop on them."""
        until = anyio.current_time() + self.config.failed_key_ttl_s
        for key in keys:
            self._failed[key] = until
            self._failed.move_to_end(key)
        while len(self._failed) > MAX_FAILED_KEYS:
            self._failed.popitem(last=False)

    def _apply_failed(self, keys: Sequence[str], present: Presence) -> None:
        if not self._failed:
            return
        now = anyio.current_time()
        while self._failed and next(iter(self._failed.values())) <= now:
            self._failed.popitem(last=False)
        for i, key in enumerate(keys):
            if key in self._failed:
                present[i] = 0

    def _limit(self, deadline: float | None, timeout: float) -> float:
        return min(math.inf if deadline is None else deadline, anyio.current_time() + timeout)

    def _miss(self) -> Hit:
        return Hit(0, (0,) * len(self.spec.groups))

    def _check_open(self) -> None:
        if self._closed:
            raise KVPoolError("the pool is not open: use it inside 'async with'")


@dataclass(slots=True)
class _Countdown:
    """Calls ``then`` once, when the last of ``left`` parts has stepped or the whole is finished."""

    left: int
    then: Callable[[], None] | None

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.finish()

    def finish(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then()


def _count(results: Results, *statuses: Status) -> int:
    return int(np.isin(results.status, statuses).sum())
