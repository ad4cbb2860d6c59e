"""How bytes travel between a store and an engine's blocks: in bounded batches, through staging memory.

A load writes a block only after the store call has ended and its bytes are proven, in one step that a cancelled or
late job never takes. A save copies blocks out early, so that the engine has them back before the store is done.
A store that moves bytes straight between itself and the blocks does so by :mod:`kvpool.zero_copy`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from kvpool.admission import Admission
from kvpool.calls import Outcome, StoreCalls, checked_presence, checked_results
from kvpool.config import Config
from kvpool.errors import ConfigError, KVPoolError, LayoutError, StoreError
from kvpool.hashes import BlockHashes
from kvpool.key_memory import KeyMemory
from kvpool.keys import KeySpace
from kvpool.memory import BlockLayout
from kvpool.metrics import Counters
from kvpool.staging import Lease, Staging
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Presence, Results, Status, Store, SupportsRegister
from kvpool.threads import Threads
from kvpool.zero_copy import ZeroCopy

__all__ = ["Transfer", "Transfers"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOAD, SAVE = 0, 1  #: priorities in staging memory: loads go before saves
_BURST = 2  # batches that begin in one turn of the loop
Ids = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Transfer:
    """Chunks of one group to move, and the engine blocks that hold them.

    ``hashes``: one digest a chunk (its last sub-hash). ``block_ids``: [n], or [n, k] with k engine blocks a chunk.
    """

    group: int
    hashes: BlockHashes
    block_ids: Ids

    def __post_init__(self) -> None:
        if len(self.hashes) != len(self.block_ids):
            raise LayoutError(f"{len(self.hashes)} chunk hashes do not fit {len(self.block_ids)} rows of block ids")

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def blocks_per_chunk(self) -> int:
        """Engine blocks that hold one chunk."""
        return 1 if self.block_ids.ndim == 1 else int(self.block_ids.shape[1])


class Transfers:
    """Moves chunks for one pool. ``layouts``: one a group. ``shards``: the shard of each group that this rank holds."""

    def __init__(
        self,
        store: Store,
        calls: StoreCalls,
        layouts: Sequence[BlockLayout],
        shards: Sequence[int],
        config: Config,
        counters: Counters,
    ) -> None:
        self._store = store
        self._calls = calls
        self._layouts = layouts
        self._shards = shards
        self._counters = counters
        self._batch_bytes = int(config.batch_bytes)
        # Keys whose load failed count as absent for a while, so that no request can loop on them.
        self._failed = KeyMemory(config.failed_key_ttl_s)
        self._admission = Admission(config.save_after_uses)
        self._threads = Threads(2)
        self._at_once = max(1, int(config.staging_bytes) // int(config.batch_bytes))
        self._zero_copy: ZeroCopy | None = None
        self.staging = Staging(int(config.staging_bytes))

    @staticmethod
    def check(layouts: Sequence[BlockLayout], config: Config, store: Store) -> None:
        """Raises ConfigError if not even one block fits the staging memory, or the store's largest value."""
        largest = max((layout.block_bytes for layout in layouts), default=0)
        if largest > config.staging_bytes:
            raise ConfigError(
                f"staging_bytes={int(config.staging_bytes)} does not hold one block of {largest} bytes; "
                "set it to several times that"
            )
        limit = store.capabilities.max_value_bytes
        if limit is not None and largest > limit:
            raise ConfigError(
                f"store: {type(store).__name__} takes values of up to {limit} bytes (max_value_bytes), and one block "
                f"has {largest}; raise the store's limit, or use smaller blocks"
            )

    async def open(self) -> None:
        """Make memory known to a store that wants to know it."""
        if isinstance(self._store, SupportsRegister):
            try:
                await self._store.register([self.staging.region])
            except KVPoolError as error:
                logger.warning("the store copies values once more, staging memory cannot be registered: %s", error)
        self._zero_copy = await ZeroCopy.of(self._store, self._layouts, self._at_once)

    async def present(self, keys: Sequence[str], deadline: float) -> Outcome[Presence]:
        """Presence of ``keys``, those that failed lately counted as absent."""
        self._counters.probed_keys += len(keys)
        asked = await self._calls.run(lambda: self._store.exists(keys, deadline=deadline), deadline)
        asked = checked_presence(asked, len(keys))
        if asked.result is None:
            return asked
        if unknown := asked.result.tobytes().count(UNKNOWN):
            self._counters.unknown_keys += unknown
            late = " in time" if anyio.current_time() >= deadline else ""
            asked.error = StoreError(f"it did not say of {unknown} of {len(keys)} values whether it has them{late}")
        if failed := self._failed.among(keys, anyio.current_time()):
            asked.result = np.array(asked.result)
            asked.result[failed] = ABSENT
        return asked

    def nbytes(self, parts: Sequence[Transfer]) -> int:
        """Bytes of all chunks of a job."""
        return sum(len(part) * self._width(part) for part in parts)

    async def load(self, parts: Sequence[Transfer], keyspace: KeySpace, deadline: float) -> list[Results]:
        """Fill the engine's blocks; a block whose chunk is not OK is untouched. Raises LayoutError for bad blocks."""
        results = [Results.empty(len(part), Status.TIMED_OUT) for part in parts]
        batches = [(p, rows, out) for p, out in zip(parts, results, strict=True) for rows in self._batches(p)]
        async with anyio.create_task_group() as tasks:
            async for part, rows, out in _in_bursts(batches):
                tasks.start_soon(self._load_batch, part, rows, out, keyspace, deadline)
        return results

    async def save(
        self, parts: Sequence[Transfer], keyspace: KeySpace, deadline: float, copied: Callable[[], None] | None
    ) -> list[Results]:
        """Store the engine's blocks. ``copied`` is called once, when none of them will be read any more."""
        reading = _Countdown(copied)
        try:
            results = [Results.empty(len(part), Status.TIMED_OUT) for part in parts]
            batches = [(p, rows, out) for p, out in zip(parts, results, strict=True) for rows in self._batches(p)]
            reading.left = len(batches)
            async with anyio.create_task_group() as tasks:
                async for part, rows, out in _in_bursts(batches):
                    tasks.start_soon(self._save_batch, part, rows, out, keyspace, deadline, reading.step)
            return results
        finally:
            reading.finish()

    # ---- one batch

    async def _load_batch(self, part: Transfer, rows: Ids, out: Results, keyspace: KeySpace, deadline: float) -> None:
        layout, width = self._layouts[part.group], self._width(part)
        keys = keyspace.keys(part.group, self._shards[part.group], part.hashes, rows)
        if self._zero_copy is not None:
            results = await self._zero_copy.load(part.group, keys, part.block_ids[rows], deadline)
            self._failed.add((keys[i] for i in np.flatnonzero(~results.ok)), anyio.current_time())
            _report(out, rows, results, width)
            return
        headroom = self._headroom(part)
        lease = await self._lease(len(rows) * (headroom + width), LOAD, deadline)
        if lease is None:
            self._failed.add(keys, anyio.current_time())
            return
        buffers = lease.buffers(len(rows), width, headroom)
        got = await self._calls.run(lambda: self._store.get_into(keys, buffers, deadline=deadline), deadline, lease)
        if got.late:
            self._failed.add(keys, anyio.current_time())
            return
        try:
            results = checked_results(got, len(rows), width, filled=True)
            self._failed.add((keys[i] for i in np.flatnonzero(~results.ok)), anyio.current_time())
            ok = np.flatnonzero(results.ok)
            # A cancelled job must not touch the engine's blocks; from here on nothing waits for the store any more.
            await anyio.lowlevel.checkpoint_if_cancelled()
            if len(ok):
                staged = lease.rows(len(rows), width, headroom)
                staged = staged if len(ok) == len(rows) else staged[ok]
                blocks = part.block_ids[rows[ok]].reshape(-1)
                await self._threads.run(layout.scatter, blocks, staged.reshape(len(blocks), layout.block_bytes))
            _report(out, rows, results, width)
        finally:
            lease.release()

    async def _save_batch(
        self,
        part: Transfer,
        rows: Ids,
        out: Results,
        keyspace: KeySpace,
        deadline: float,
        read: Callable[[], None],
    ) -> None:
        """Probe, copy out, put. ``read`` is called once, when no block of the batch will be read any more."""
        layout, width, headroom = self._layouts[part.group], self._width(part), self._headroom(part)
        lease: Lease | None = None
        try:
            admitted = self._admission.admit([part.hashes[i] for i in rows.tolist()])
            out.status[rows[~admitted]] = Status.SKIPPED
            rows = rows[admitted]
            if not len(rows):
                return
            keys = keyspace.keys(part.group, self._shards[part.group], part.hashes, rows)
            asked = await self.present(keys, deadline)
            if asked.result is None:
                out.status[rows] = Status.TIMED_OUT if asked.late else Status.FAILED
                if asked.error is not None:
                    out.errors[int(rows[0])] = asked.error
                return
            present = np.equal(asked.result, PRESENT)
            out.status[rows[present]] = Status.OK
            absent = np.flatnonzero(~present)
            if not len(absent):
                return
            rows, keys = rows[absent], [keys[i] for i in absent]
            if self._zero_copy is not None:
                results = await self._zero_copy.save(part.group, keys, part.block_ids[rows], deadline)
                self._failed.discard(keys[i] for i in np.flatnonzero(results.ok))
                _report(out, rows, results, width)
                return
            lease = await self._lease(len(rows) * (headroom + width), SAVE, deadline)
            if lease is None:
                return
            blocks = part.block_ids[rows].reshape(-1)
            staged = lease.rows(len(rows), width, headroom).reshape(len(blocks), layout.block_bytes)
            await self._threads.run(layout.gather, blocks, staged)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        finally:
            read()
        buffers = lease.buffers(len(rows), width, headroom)
        put = await self._calls.run(lambda: self._store.put(keys, buffers, deadline=deadline), deadline, lease)
        if put.late:
            return
        lease.release()
        results = checked_results(put, len(rows), width, filled=False)
        self._failed.discard(keys[i] for i in np.flatnonzero(results.ok))
        _report(out, rows, results, width)

    async def _lease(self, nbytes: int, priority: int, deadline: float) -> Lease | None:
        """Staging memory, or None if there was none before the deadline."""
        try:
            return await self.staging.acquire(nbytes, priority=priority, deadline=deadline)
        except TimeoutError:
            return None

    def _batches(self, part: Transfer) -> list[Ids]:
        """Row indices of a job in batches that fit ``batch_bytes`` of staging."""
        if not self._layouts:
            raise LayoutError("this pool was made without block layouts: it can only look up")
        self._layouts[part.group].check(part.block_ids)
        per_batch = max(1, self._batch_bytes // max(1, self._headroom(part) + self._width(part)))
        return [np.arange(i, min(i + per_batch, len(part))) for i in range(0, len(part), per_batch)]

    def _headroom(self, part: Transfer) -> int:
        """Bytes in front of each value for the store; none where rows of several blocks must be contiguous."""
        wanted = self._store.capabilities.headroom
        return wanted if part.blocks_per_chunk == 1 and wanted + self._width(part) <= self.staging.nbytes else 0

    def _width(self, part: Transfer) -> int:
        return part.blocks_per_chunk * self._layouts[part.group].block_bytes if self._layouts else 0


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


async def _in_bursts(batches: Sequence[T]) -> AsyncIterator[T]:
    """Each in turn, and a turn of the loop after every few: the first steps of 32 batches take 2 ms."""
    for i, batch in enumerate(batches):
        if i and i % _BURST == 0:
            await anyio.lowlevel.checkpoint()
        yield batch


def _report(out: Results, rows: Ids, results: Results, width: int) -> None:
    """Put the results of a batch into the columns of its job. ``nbytes`` stays 0 for what was there before."""
    out.status[rows] = results.status
    out.nbytes[rows] = np.where(results.ok & (results.nbytes > 0), width, 0)
    out.errors.update({int(rows[i]): error for i, error in results.errors.items()})
