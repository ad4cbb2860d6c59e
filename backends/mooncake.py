"""MooncakeStore: values in the memory of a Mooncake cluster, shared by every engine that knows its master.

A value is a header (length, checksum, digest of the key) and the payload, so whatever is torn, half-written, another
key's or not kvpool's is a miss. Mooncake's client blocks, cannot be cancelled, and crashes on what it does not expect:
its calls run in threads of their own, on memory that stays until they have come back, and get nothing unchecked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar, Self, TypeAlias

import anyio
import anyio.abc
import anyio.lowlevel
import numpy as np

from kvpool.backends._breaker import Breaker
from kvpool.backends._file_format import HEADER_BYTES
from kvpool.backends._lifecycle import Lifecycle
from kvpool.backends._mooncake_batch import batches, good_keys, rounds
from kvpool.backends._mooncake_client import connect
from kvpool.backends._mooncake_codes import Meaning, described, meaning_of
from kvpool.backends._mooncake_deletes import Deletes
from kvpool.backends._mooncake_doctor import look
from kvpool.backends._mooncake_link import Connect, Link
from kvpool.backends._mooncake_moves import BATCH_BYTES, Moves
from kvpool.backends._mooncake_url import settings_of
from kvpool.backends._mooncake_watch import OwnerWatch
from kvpool.deadlines import move_on_at
from kvpool.errors import StoreClosed, StoreError, WrongLength
from kvpool.key_memory import KeyMemory
from kvpool.memory import Buffers, Region
from kvpool.registry import URL, parse_url
from kvpool.store import (
    ABSENT,
    PRESENT,
    UNKNOWN,
    Capabilities,
    Finding,
    Presence,
    Results,
    Status,
    Store,
    check_batch,
)

__all__ = ["MooncakeStore"]

logger = logging.getLogger(__name__)

HEADROOM = 64  # of which the header takes the last 40: the payload behind it is aligned
PROBED_KEYS = 4096  # in one native call, and between two turns of the loop

_Move: TypeAlias = Callable[[Sequence[str], list[int], Buffers, Results, float], Awaitable[None]]


class MooncakeStore(Store):
    """Values in a Mooncake cluster. ``url``: see docs/mooncake.md. ``connect``: makes the native client.

    A master that cannot be reached makes keys FAILED (UNKNOWN for ``exists``) until it can; a full cluster makes puts
    REJECTED for a while. A value that another process reads cannot be removed: :meth:`delete` waits for that.
    """

    scheme: ClassVar[str] = "mooncake"

    def __init__(self, url: str | URL, *, connect: Connect = connect) -> None:
        settings = settings_of(parse_url(url))
        options = settings.options
        self._name = f"mooncake store {settings.address}"
        self._settings = settings
        self._prefix = options.prefix
        self.capabilities = Capabilities(
            shared=True,
            zero_copy=settings.zero_copy,
            headroom=HEADROOM,
            max_value_bytes=settings.max_value,
            lent_bytes=int(options.segment),
        )
        self._life = Lifecycle(self._name)
        self._link = Link(settings, self._name, connect)
        self._moves = Moves(
            self._link, protocol=options.protocol, zero_copy=settings.zero_copy, checksum=options.checksum
        )
        self._watch = OwnerWatch(self._link, self._name, signs=settings.metadata_server is None)
        self._calls: set[anyio.CancelScope] = set()
        self._present = KeyMemory(options.presence_cache_s)
        self._failed = KeyMemory(options.failed_key_s)
        self._deletes = Deletes(self._link, self._name, self._prefix)
        self._putting: dict[str, anyio.Event] = {}  # keys with a put under way
        self._pressure = Breaker(failures=1, cooldown_s=0.25, max_cooldown_s=4.0)
        self._tasks: anyio.abc.TaskGroup

    @classmethod
    def from_url(cls, url: URL) -> Self:
        """``mooncake://master[:port]?option=value``."""
        return cls(url)

    async def __aenter__(self) -> Self:
        self._life.open()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            await self._link.open(self._tasks)
            self._tasks.start_soon(self._watch.run)
        except BaseException:
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._link.forked:
            return  # all of it is the parent's
        for scope in list(self._calls):
            scope.cancel()
        await self._life.close()
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._link.close()

    async def register(self, regions: Sequence[Region]) -> None:
        """Let values move straight from and to this memory, which must stay until the store is closed."""
        for region in regions:
            _ = region.view  # memory of a device cannot be proven, so it is refused
        with self._call():
            await self._link.register(regions)

    async def diagnose(self) -> Sequence[Finding]:
        """The master and its memory, this machine's way to it, and settings that do not do what they say."""
        with self._call():
            host = trouble = ""
            try:
                host = self._link.client().host
            except StoreClosed:
                raise
            except StoreError as error:
                trouble = str(error)
            return await look(self._settings, host, trouble, self._link.advice, self._watch.silent())

    # ---- the contract

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        found = np.full(len(keys), UNKNOWN, np.uint8)
        with self._call():
            await anyio.lowlevel.checkpoint()
            for at in range(0, len(keys), PROBED_KEYS):
                if anyio.current_time() >= deadline:
                    break
                part = keys[at : at + PROBED_KEYS]
                try:
                    found[at : at + len(part)] = await self._probe(part, deadline)
                except StoreClosed:
                    raise
                except StoreError as error:
                    logger.debug("%s", error)
                    break
        return found

    async def _probe(self, keys: Sequence[str], deadline: float) -> Presence:
        """Ask for what is not known already. Raises StoreError if Mooncake cannot be asked."""
        now = anyio.current_time()
        found = np.full(len(keys), UNKNOWN, np.uint8)
        good = good_keys(keys)
        found[self._present.among(keys, now)] = PRESENT
        found[self._failed.among(keys, now)] = ABSENT
        found[self._deletes.absent(keys, good)] = ABSENT
        wanted = [i for i in good if found[i] == UNKNOWN] if (found != UNKNOWN).any() else good
        if wanted:
            client = self._link.client()

            def ask() -> list[int]:
                return client.native.batch_is_exist(self._names(keys, wanted))

            codes = await self._link.ask(client, client.probes, ask, len(wanted), deadline)
            if codes is not None:
                answer = np.array(codes)
                found[wanted] = np.where(answer < 0, UNKNOWN, np.where(answer > 0, PRESENT, ABSENT))
        if self._watch.silent():
            there = np.flatnonzero(found == PRESENT).tolist()
            found[[there[j] for j in await self._watch.lost(self._names(keys, there), deadline)]] = ABSENT
        self._present.add((keys[i] for i in wanted if found[i] == PRESENT), now)
        return found

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        results = Results.empty(len(keys), Status.TIMED_OUT)
        check_batch(keys, into)
        with self._call():
            good = await self._begun(keys, into, results, deadline)
            for i in self._too_large(good, into):
                error = self._error(keys[i], f"{into.nbytes[i]} bytes are more than any value; buffer= sets the limit")
                results.set(i, Status.FAILED, error=error)
                good.remove(i)
            for rows in rounds(keys, good):
                await self._each(keys, rows, into, results, deadline, self._get)
        return results

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        results = Results.empty(len(keys), Status.TIMED_OUT)
        check_batch(keys, source)
        with self._call():
            good = await self._begun(keys, source, results, deadline)
            for i in self._too_large(good, source):
                limit = self._settings.max_value
                error = self._error(keys[i], f"{source.nbytes[i]} bytes are more than {limit}; buffer= sets the limit")
                results.set(i, Status.REJECTED, error=error)
                good.remove(i)
            first, *again = rounds(keys, good) or [[]]
            # Mooncake's put of a value that is only half there says OK, and a load would find nothing.
            busy = [i for i in first if self._deletes.healing(keys[i]) or keys[i] in self._putting]
            await self._put_each(keys, [i for i in first if i not in busy], source, results, deadline)
            if busy:
                with move_on_at(deadline):
                    for key in (keys[i] for i in busy):
                        for event in (self._deletes.healing(key), self._putting.get(key)):
                            if event is not None:
                                await event.wait()
                await self._put_each(keys, busy, source, results, deadline)
            # Of equal keys in a batch the first is the one that counts.
            status = {keys[i]: int(results.status[i]) for i in first} if again else {}
            for i in (i for rows in again for i in rows):
                results.status[i] = status[keys[i]]
        return results

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        results = Results.empty(len(keys), Status.TIMED_OUT)
        with self._call():
            good = await self._begun(keys, None, results, deadline)
            self._present.discard(keys)
            await self._deletes.delete(keys, good, results, deadline)
        return results

    # ---- one batch

    async def _begun(
        self, keys: Sequence[str], buffers: Buffers | None, results: Results, deadline: float
    ) -> list[int]:
        """The keys to work on: what is no key is FAILED, nothing is left if the deadline has passed."""
        for region in buffers.regions if buffers is not None else ():
            _ = region.view  # memory of a device is refused before anything is sent
        good = good_keys(keys, results, self._name) if anyio.current_time() < deadline else []
        # What is to be moved is waited for anyway; a turn of the loop more would be a tenth of a small transfer's time.
        await (anyio.lowlevel.checkpoint_if_cancelled() if good else anyio.lowlevel.checkpoint())
        return good

    async def _each(
        self, keys: Sequence[str], rows: list[int], buffers: Buffers, results: Results, deadline: float, move: _Move
    ) -> None:
        """Move these keys, none twice, in batches; what is not done by the deadline stays TIMED_OUT."""
        if not rows:
            return
        sizes = buffers.nbytes if len(rows) == len(buffers) else buffers.nbytes[rows]
        for part in batches(sizes, min(BATCH_BYTES, self._settings.max_value), self._moves.most_values(buffers)):
            if anyio.current_time() >= deadline:
                break
            try:
                await move(keys, rows[part], buffers, results, deadline)
            except StoreClosed:
                raise
            except StoreError as error:
                self._fail(results, rows[part], error)

    async def _put_each(
        self, keys: Sequence[str], rows: list[int], source: Buffers, results: Results, deadline: float
    ) -> None:
        """Put these keys; whoever puts the same ones meanwhile waits for it."""
        done = anyio.Event()
        names = [keys[i] for i in rows]
        self._putting.update(dict.fromkeys(names, done))
        try:
            await self._each(keys, rows, source, results, deadline, self._put)
        finally:
            for name in names:
                if self._putting.get(name) is done:
                    del self._putting[name]
            done.set()

    async def _get(
        self, keys: Sequence[str], rows: list[int], into: Buffers, results: Results, deadline: float, again: bool = True
    ) -> None:
        client = self._link.client()
        if lost := [rows[j] for j in await self._watch.lost(self._names(keys, rows), deadline)]:
            self._fail(results, lost, self._error(keys[lost[0]], "the owner of its memory does not answer"))
            rows = sorted(set(rows).difference(lost))
        if not rows:
            return
        part = into if len(rows) == len(into) else into.select(rows)
        names, wanted = self._names(keys, rows), [keys[i] for i in rows]
        with self._watch.transfer(names) as ended:
            moved = await self._moves.get(client, wanted, names, part, deadline)
            ended(moved.codes)
        if moved.codes is None:
            return
        if len(moved.whole) == len(rows):
            self._done(rows, into, results)
            self._failed.discard(wanted)
            return
        retry = []
        for j, (i, code) in enumerate(zip(rows, moved.codes, strict=True)):
            meaning = meaning_of(code)
            if j in moved.damaged:
                self._damaged(keys[i], i, moved.damaged[j], results)
            elif j in moved.wrong:
                problem = await self._moves.problem_of_length(client, keys[i], names[j], moved.wrong[j], deadline)
                if problem:
                    self._damaged(keys[i], i, problem, results)
                else:
                    error = WrongLength(moved.wrong[j] - HEADER_BYTES, int(into.nbytes[i]))
                    results.set(i, Status.CORRUPT, error=error)
            elif meaning is Meaning.OK:
                results.set(i, Status.OK, int(into.nbytes[i]))
            elif meaning is Meaning.ABSENT:
                results.set(i, Status.ABSENT)
            elif meaning is Meaning.RETRY and again:
                retry.append(i)
            else:
                self._fail(results, [i], self._error(keys[i], described(code)))
        gone = [keys[i] for i in rows if results.status[i] in (Status.ABSENT, Status.FAILED)]
        self._present.discard(gone)
        self._failed.add((keys[i] for i in rows if results.status[i] == Status.FAILED), anyio.current_time())
        self._failed.discard(keys[i] for i in rows if results.ok[i])
        if retry and anyio.current_time() < deadline:
            await self._get(keys, retry, into, results, deadline, again=False)

    async def _put(
        self, keys: Sequence[str], rows: list[int], source: Buffers, results: Results, deadline: float
    ) -> None:
        client = self._link.client()
        now = anyio.current_time()
        for i in [rows[j] for j in self._deletes.stuck([keys[i] for i in rows])]:
            self._fail(results, [i], self._error(keys[i], "a damaged value is in its place and cannot be removed"))
            rows.remove(i)
        if not rows:
            return
        ticket = self._pressure.admit(now, now + self._settings.options.hang_s)
        if ticket is None:
            results.status[rows] = Status.REJECTED
            results.errors[rows[0]] = StoreError(f"{self._name}: it is full; puts are paused")
            return
        room: bool | None = None
        try:
            if client.puts.running and self._watch.silent():  # the master still has values put there
                results.status[rows] = Status.REJECTED
                results.errors[rows[0]] = StoreError(f"{self._name}: an owner does not answer; one put at a time")
                return
            names, wanted = self._names(keys, rows), [keys[i] for i in rows]
            part = source if len(rows) == len(source) else source.select(rows)
            with self._watch.transfer(names) as ended:
                moved = await self._moves.put(client, wanted, names, part, deadline)
                ended(moved.codes)
            if moved.codes is None:
                return
            room = True
            if not any(moved.codes):
                self._done(rows, source, results)
                self._failed.discard(wanted)
                return
            for i, code in zip(rows, moved.codes, strict=True):
                meaning = meaning_of(code)
                if meaning is Meaning.OK:
                    results.set(i, Status.OK, int(source.nbytes[i]))
                elif meaning is Meaning.PRESSURE:
                    room = False
                    results.set(i, Status.REJECTED, error=self._error(keys[i], described(code)))
                else:
                    self._fail(results, [i], self._error(keys[i], described(code)))
            self._failed.discard(keys[i] for i in rows if results.ok[i])
        finally:
            self._pressure.settle(ticket, anyio.current_time(), room)

    # ---- small things

    def _damaged(self, key: str, i: int, problem: str, results: Results) -> None:
        """Make room for a good value: Mooncake's put would leave the bad one."""
        results.set(i, Status.CORRUPT, error=self._error(key, problem))
        self._present.discard([key])
        self._deletes.heal(key, self._tasks)

    def _names(self, keys: Sequence[str], rows: Sequence[int]) -> list[str]:
        return [self._prefix + key for key in (keys if len(rows) == len(keys) else [keys[i] for i in rows])]

    def _too_large(self, rows: Sequence[int], buffers: Buffers) -> list[int]:
        large = buffers.nbytes > self._settings.max_value
        return [i for i in rows if large[i]] if large.any() else []

    def _done(self, rows: Sequence[int], buffers: Buffers, results: Results) -> None:
        which = slice(None) if len(rows) == len(results) else rows
        results.status[which] = Status.OK
        results.nbytes[which] = buffers.nbytes[which]

    def _fail(self, results: Results, rows: Sequence[int], error: StoreError) -> None:
        results.status[rows] = Status.FAILED
        results.errors[rows[0]] = error

    def _error(self, key: str, text: str) -> StoreError:
        return StoreError(f"{self._name}: {key[:100]}: {text}")

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One call in flight; closing cuts it off, and then it raises StoreClosed."""
        self._link.check_process()
        with self._life.call():
            with anyio.CancelScope() as scope:
                self._calls.add(scope)
                try:
                    yield
                finally:
                    self._calls.discard(scope)
            if scope.cancelled_caught:
                self._life.check()
