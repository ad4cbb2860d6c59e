"""KVPool: the async facade over a store. Look up, load, save, pin, reset, drain, close.

What to ask, load and save is decided by :mod:`kvpool.coordinator` and :mod:`kvpool.tokens`; how bytes travel is in
:mod:`kvpool.transfers`. Here the questions are asked, deadlines set, outcomes counted and told.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Literal, Self

import anyio
import anyio.abc
import numpy as np
import numpy.typing as npt

from kvpool.calls import StoreCalls, checked_presence, checked_results
from kvpool.config import Config
from kvpool.coordinator import Coordinator, Hit, Probe
from kvpool.deadlines import move_on_at, running_loop
from kvpool.errors import ConfigError, KVPoolError, LayoutError, StoreError
from kvpool.events import Listener, LoadEnded, LookupEnded, Reporter, ResetDone, SaveEnded
from kvpool.hashes import BlockHashes
from kvpool.keys import KeySpace, Namespace
from kvpool.memory import BlockLayout, Buffers
from kvpool.metrics import Counters
from kvpool.pins import Pins
from kvpool.registry import create_store, parse_url
from kvpool.spec import CacheSpec
from kvpool.staging import Staging
from kvpool.store import PRESENT, UNKNOWN, Presence, Results, Status, Store
from kvpool.transfers import Transfer, Transfers

__all__ = ["KVPool", "Transfer"]

#: A store may evict a manifest, be cleared or start again empty: a pool that saves leaves it this often.
MANIFEST_EVERY_S, MANIFEST_TIMEOUT_S = 60.0, 1.0

_PROBE = "kvpool/probe"


class KVPool:
    """Shares KV blocks through one store; an async context manager, used from one event loop.

    ``layouts``: where each group's blocks live, one a group; may be empty for a pool that only looks up. ``shards``:
    which shard of each group this rank holds (0 where a group is not sharded). ``listener``: told what was done.
    ``name``: what the log calls the store, such as its URL.
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
        listener: Listener | None = None,
        name: str = "",
    ) -> None:
        if isinstance(layouts, BlockLayout):
            raise LayoutError("layouts is a list of one BlockLayout a group: write layouts=[layout]")
        if layouts and len(layouts) != len(spec.groups):
            raise LayoutError(f"{len(layouts)} block layouts for {len(spec.groups)} groups; give one a group")
        self.config = config or Config.load()
        Transfers.check(layouts, self.config, store)
        self.store = store
        self.spec = spec
        self.namespace = namespace
        self.layouts = tuple(layouts)
        self.coordinator = Coordinator(spec)
        self.counters = Counters() if counters is None else counters
        self.keyspace = self._keyspace(epoch_of(self.config.epoch_label))
        self._reporter = Reporter(listener, f"store {name or type(store).__name__}")
        self._shards = tuple(shards) or (0,) * len(spec.groups)
        self._queued_save_bytes = 0
        self._saves: set[anyio.Event] = set()
        self._described: dict[str, float] = {}  # manifests, and when each is to be left again
        self._closed = True
        self._stack = AsyncExitStack()
        self._tasks: anyio.abc.TaskGroup
        self._calls: StoreCalls
        self._transfers: Transfers

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: Config | str | None = None,
        *,
        spec: CacheSpec,
        namespace: Namespace,
        layouts: Sequence[BlockLayout] = (),
        listener: Listener | None = None,
    ) -> AsyncIterator[Self]:
        """Open the configured store (a URL is enough) and a pool on it. Raises ConfigError or StoreError."""
        settings = Config.load({"store": config}) if isinstance(config, str) else config or Config.load()
        store = create_store(settings.store)
        pool = cls(
            store,
            spec=spec,
            namespace=namespace,
            layouts=layouts,
            config=settings,
            listener=listener,
            name=str(parse_url(settings.store)),
        )
        async with pool:
            yield pool

    async def __aenter__(self) -> Self:
        backend = running_loop()
        if backend not in self.store.capabilities.loops:
            allowed = ", ".join(sorted(self.store.capabilities.loops))
            raise ConfigError(f"store {type(self.store).__name__} runs on {allowed}, not on the {backend} event loop")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.store)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            self._calls = StoreCalls(
                self._tasks,
                self.counters,
                grace=self.config.deadline_grace_s,
                max_left_bytes=self.config.staging_bytes / 2,
            )
            self._transfers = Transfers(self.store, self._calls, self.layouts, self._shards, self.config, self.counters)
            stack.callback(self.staging.close)
            await self._transfers.open()
            self._stack = stack.pop_all()
        self._closed = False
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give up what is in flight and close the store. Use :meth:`drain` first to let saves end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._reporter.close()
        self._calls.close()
        self._tasks.cancel_scope.cancel()
        # Not told of the body's exception: the task group would wrap it in an ExceptionGroup.
        await self._stack.__aexit__(None, None, None)

    @property
    def staging(self) -> Staging:
        """The memory that all bytes travel through."""
        return self._transfers.staging

    # ---- look up

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

        A hit that spares less than ``min_load_tokens``, a fault or a passed deadline is a miss: ``Hit(0, ...)``.
        """
        self._check_open()
        start = anyio.current_time()
        limit = start + self.config.lookup_timeout_ms / 1000
        if deadline is not None and deadline < limit:
            limit = deadline
        count = self.counters
        count.lookups += 1
        space = keyspace or self.keyspace
        outcome: Literal["hit", "miss", "late", "failed"]
        error: Exception | None = None
        hit = Hit(0, (0,) * len(self.spec.groups))
        search = self.coordinator.search(num_tokens, len(hashes), local_tokens=local_tokens)
        try:
            probes = next(search)
            while True:
                answer, doubt = await self._probe(space, hashes, probes, limit)
                error = error or doubt
                probes = search.send(answer)
        except StopIteration as stop:
            found: Hit = stop.value
            outcome = "hit" if found.length - local_tokens >= max(1, self.config.min_load_tokens) else "miss"
            hit = found if outcome == "hit" else hit
        except TimeoutError:
            outcome = "late"
        except Exception as failure:
            outcome, error = "failed", failure
        except anyio.get_cancelled_exc_class():
            waited = anyio.current_time() - start
            if not self._closed and waited >= self.config.lookup_timeout_ms / 1000 / 2:
                self._reporter.given_up("lookup", waited)  # whoever asked has a deadline of its own, a little earlier
            raise
        count.lookup_hits += outcome == "hit"
        count.lookup_misses += outcome == "miss"
        count.lookup_late += outcome == "late"
        count.lookup_failed += outcome == "failed"
        count.hit_tokens += hit.length
        if error is not None or outcome == "late" or self._reporter.wants_all:
            self._reporter.tell(LookupEnded(outcome, hit.length, num_tokens, anyio.current_time() - start, error))
        return hit

    async def _probe(
        self, keyspace: KeySpace, hashes: BlockHashes, probes: Sequence[Probe], deadline: float
    ) -> tuple[list[Presence], Exception | None]:
        """Ask the store for one wave: every shard of every probe in one call, reduced over the shards.

        The second: what keeps the answer from being whole.
        """
        self.counters.probe_waves += 1
        asked = await self._transfers.present(keyspace.all_shards(hashes, probes), deadline)
        if asked.late:
            raise TimeoutError
        if (found := asked.result) is None:
            raise asked.error or StoreError("no answer")
        answer: list[Presence] = []
        start = 0
        for group, hash_ids in probes:
            shards, size = self.spec.groups[group].shards, len(hash_ids)
            end = start + shards * size
            every = found[start:end]
            if shards > 1:
                every = (every.reshape(shards, size) == PRESENT).all(axis=0).astype(np.uint8)
            answer.append(every)
            start = end
        return answer, asked.error

    async def answers(self, *, deadline: float | None = None) -> bool:
        """Whether the store tells in time if it has a key that nobody stores. Never raises for what a store does."""
        self._check_open()
        limit = self._limit(deadline, self.config.lookup_timeout_ms / 1000)

        async def ask() -> Presence:
            try:
                return await self.store.exists([_PROBE], deadline=limit)
            except Exception:  # an answer too, and none to log: whoever probes a store knows that it is in trouble
                return np.full(1, UNKNOWN, np.uint8)

        presence = checked_presence(await self._calls.run(ask, limit), 1).result
        return presence is not None and int(presence[0]) != UNKNOWN

    async def pin(self, parts: Sequence[Transfer], *, seconds: float, keyspace: KeySpace | None = None) -> Pins:
        """Ask the store to keep these chunks until they are loaded, ``seconds`` at most; an async context manager.

        Where the store cannot pin, or does not answer, nothing is pinned: a load may then find them gone.
        """
        self._check_open()
        self._check_parts(parts)
        space = keyspace or self.keyspace
        keys = [
            key
            for part in parts
            for key in space.keys(part.group, self._shards[part.group], part.hashes, np.arange(len(part)))
        ]
        pins = Pins(self.store, self._calls, keys)
        await pins.take(seconds, self._limit(None, self.config.lookup_timeout_ms / 1000))
        return pins

    # ---- load and save

    def transfer(self, group: int, hashes: BlockHashes, chunk_ids: npt.ArrayLike, block_ids: npt.ArrayLike) -> Transfer:
        """The chunks ``chunk_ids`` of a prompt with block hashes ``hashes``, held by ``block_ids``.

        Raises LayoutError for a group or a chunk that does not exist.
        """
        self._check_group(group)
        ids = np.asarray(chunk_ids, np.intp)
        ratio = self.spec.hashes_per_block(group)
        try:
            digests = hashes.pack((ids + 1) * ratio - 1)
        except IndexError:
            text = f"chunks {ids.min()} to {ids.max()} of a prompt that has {len(hashes) // ratio} whole ones"
            raise LayoutError(f"{text} in group {group}, counted from 0") from None
        packed = BlockHashes(digests, hashes.hash_len, scheme=hashes.scheme)
        return Transfer(group, packed, np.asarray(block_ids, np.intp))

    async def load(
        self, parts: Sequence[Transfer], *, keyspace: KeySpace | None = None, deadline: float | None = None
    ) -> list[Results]:
        """Load chunks into the engine's blocks; one column of results a member of ``parts``.

        A block holds the chunk if and only if its status is OK. Any other block is untouched, or undefined if the store
        moves bytes without a copy (``zero_copy``). No block is written after this returns or is cancelled. If
        :meth:`reset` is called meanwhile, nothing counts as loaded (blocks may have been written). Raises LayoutError
        for a group or block id that does not exist.
        """
        self._check_open()
        self._check_parts(parts)
        start = anyio.current_time()
        limit = self._limit(deadline, self.config.load_timeout_s)
        self.counters.load_jobs += 1
        space = keyspace or self.keyspace
        results = await self._transfers.load(parts, space, limit)
        void = keyspace is None and space is not self.keyspace
        if void:
            for out in results:
                out.status[:] = Status.FAILED
                out.nbytes[:] = 0
        event = LoadEnded(
            loaded=sum(int(out.ok.sum()) for out in results),
            missing=_count(results, Status.ABSENT),
            late=_count(results, Status.TIMED_OUT),
            failed=_count(results, Status.FAILED, Status.REJECTED),
            corrupt=_count(results, Status.CORRUPT),
            nbytes=sum(int(out.nbytes.sum()) for out in results),
            seconds=anyio.current_time() - start,
            error=_first_error(results),
            void=void,
        )
        self.counters.add(
            loaded_chunks=event.loaded,
            loaded_bytes=event.nbytes,
            load_missing_chunks=event.missing,
            load_late_chunks=event.late,
            load_failed_chunks=event.failed,
            load_corrupt_chunks=event.corrupt,
        )
        self._reporter.tell(event)
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

        Chunks that the store already has are OK and not copied; SKIPPED ones were not admitted
        (``save_after_uses``). ``copied`` is called once, as soon as no block of the job will be read any more, at the
        latest before this returns or raises. Raises LayoutError for a group or block id that does not exist.
        """
        ended = anyio.Event()
        self._saves.add(ended)
        queued = 0
        try:
            self._check_open()
            self._check_parts(parts)
            start = anyio.current_time()
            limit = self._limit(deadline, self.config.save_timeout_s)
            self.counters.save_jobs += 1
            space = keyspace or self.keyspace
            drop = self._queued_save_bytes >= self.config.save_queue_bytes
            if drop:
                # The store is slower than the engine: give up now, while it costs nothing, and not after a long wait.
                results = [Results.empty(len(p), Status.REJECTED) for p in parts]
            else:
                queued = self._transfers.nbytes(parts)
                self._queued_save_bytes += queued
                then, copied = copied, None
                results = await self._transfers.save(parts, space, limit, then)
                if any(out.ok.any() for out in results):
                    await self._describe(space, limit)
        finally:
            self._queued_save_bytes -= queued
            self._saves.discard(ended)
            ended.set()
            if copied is not None:
                copied()
        event = SaveEnded(
            saved=sum(int((out.ok & (out.nbytes > 0)).sum()) for out in results),
            present=sum(int((out.ok & (out.nbytes == 0)).sum()) for out in results),
            skipped=_count(results, Status.SKIPPED),
            dropped=_count(results, Status.REJECTED) if drop else 0,
            late=_count(results, Status.TIMED_OUT),
            failed=_count(results, Status.FAILED, Status.CORRUPT, Status.ABSENT),
            nbytes=sum(int(out.nbytes.sum()) for out in results),
            seconds=anyio.current_time() - start,
            rejected=0 if drop else _count(results, Status.REJECTED),
            error=_first_error(results),
        )
        self.counters.add(
            saved_chunks=event.saved,
            saved_bytes=event.nbytes,
            save_present_chunks=event.present,
            save_skipped_chunks=event.skipped,
            save_dropped_chunks=event.dropped,
            save_late_chunks=event.late,
            save_failed_chunks=event.failed,
            save_rejected_chunks=event.rejected,
        )
        self._reporter.tell(event)
        return results

    async def drain(self, *, deadline: float = math.inf) -> bool:
        """Wait until no save is in flight; tells whether that was before the deadline."""
        with move_on_at(deadline):
            while self._saves:
                await next(iter(self._saves)).wait()
        return not self._saves

    # ---- namespaces and epochs

    def reset(self, label: str | None = None) -> bytes:
        """Start another epoch and return it: nothing that was saved before is found again by this pool.

        Engines share again through an equal ``label``; without one the epoch is random. Needs no store and cannot
        fail; other namespaces and epochs are untouched. Saves in flight end in the old epoch; loads in flight report
        nothing as loaded.
        """
        epoch = os.urandom(16) if label is None else epoch_of(label)
        self.keyspace = self._keyspace(epoch)
        self._reporter.tell(ResetDone(epoch))
        return epoch

    def _keyspace(self, epoch: bytes) -> KeySpace:
        return KeySpace(self.namespace.derive(epoch=epoch.hex()) if any(epoch) else self.namespace, self.spec)

    async def _describe(self, keyspace: KeySpace, deadline: float) -> None:
        """Leave the namespace's manifest in the store, so that a person can tell what its values are."""
        key, now = keyspace.manifest_key, anyio.current_time()
        if now < self._described.get(key, -math.inf):
            return
        # Without those of epochs that are over: there may be one for each update of a model's weights.
        self._described = {other: again for other, again in self._described.items() if again > now}
        self._described[key] = now + MANIFEST_EVERY_S
        text = Buffers.of(bytearray(keyspace.namespace.manifest.encode()))
        limit = min(deadline, now + MANIFEST_TIMEOUT_S)
        ok = False
        try:
            put = await self._calls.run(lambda: self.store.put([key], text, deadline=limit), limit)
            ok = bool(checked_results(put, 1, int(text.nbytes[0]), filled=False).ok.all())
        finally:
            if not ok:  # the next save tries again
                self._described.pop(key, None)

    def _limit(self, deadline: float | None, timeout: float) -> float:
        return min(math.inf if deadline is None else deadline, anyio.current_time() + timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise KVPoolError("the pool is not open: use it inside 'async with'")

    def _check_parts(self, parts: Sequence[Transfer]) -> None:
        if isinstance(parts, Transfer):
            raise LayoutError("parts is a list of transfers: write [transfer]")
        for part in parts:
            self._check_group(part.group)

    def _check_group(self, group: int) -> None:
        if not 0 <= group < len(self.spec.groups):
            raise LayoutError(f"group {group} does not exist: the spec has {len(self.spec.groups)}, counted from 0")


def epoch_of(label: str) -> bytes:
    """The 16-byte epoch of a label; all zero for none, the epoch of engines that were never reset."""
    return hashlib.blake2b(label.encode("utf-8", "surrogatepass"), digest_size=16).digest() if label else bytes(16)


def _count(results: Sequence[Results], *statuses: Status) -> int:
    return sum(int(np.count_nonzero(out.status == status)) for out in results for status in statuses)


def _first_error(results: Sequence[Results]) -> Exception | None:
    return next((error for out in results for error in out.errors.values()), None)
