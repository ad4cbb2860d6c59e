"""RedisStore: values on a Redis server, on the master that Sentinels name, or in a cluster; shared.

A value is one Redis string: the header of a stored file (length, checksum, digest of the key) and the payload. It is
set with NX: readers see all of it or nothing, and the first writer wins. What the server evicts, expires or loses is
absent; what is not what the key promises is CORRUPT, and removed. The client is kvpool's own, for the reasons in
docs/performance-stores.md.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Self, TypeAlias

import anyio
import anyio.lowlevel
import numpy as np

from kvpool.backends._lifecycle import Lifecycle
from kvpool.backends._redis_batch import Batch
from kvpool.backends._redis_link import ConnectionLost
from kvpool.backends._redis_look import look
from kvpool.backends._redis_servers import Pool
from kvpool.backends._redis_url import settings_of
from kvpool.backends._redis_wire import Connection, ServerError, command, encoded
from kvpool.errors import StoreError
from kvpool.memory import Buffers
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

__all__ = ["RedisStore"]

logger = logging.getLogger(__name__)

_MISSES = "values are computed until it can be used"
_PAGE = 1024  # keys listed or removed at a time
_ROUNDS = 3  # a cluster may send a key elsewhere twice in one call
_NOT_HERE = {"READONLY", "CLUSTERDOWN", "MASTERDOWN"}  # another server may be the one to ask by now
_PRESENCE = np.full(len(Status), UNKNOWN, np.uint8)
_PRESENCE[[Status.OK, Status.ABSENT]] = PRESENT, ABSENT

_LARGE = 1 << 20  # bytes; so many go through a thread, which costs about 0.1 ms

Work: TypeAlias = Callable[[Connection, Sequence[int]], Coroutine[Any, Any, ServerError | None]]


class RedisStore(Store):
    """Values on Redis (6.2 and 7.0 are tested) or what speaks its protocol. ``url``: any form in docs/redis.md.

    A server that cannot be used makes its keys FAILED, with its words, until it can be used again; for ``exists`` they
    are UNKNOWN, or StoreError is raised if no server has answered at all. A full server makes puts REJECTED.
    """

    scheme: ClassVar[str] = "redis"

    def __init__(self, url: str | URL) -> None:
        settings = settings_of(parse_url(url))
        self.capabilities = Capabilities(
            shared=True, ttl=settings.ttl_ms is not None, scan=True, max_value_bytes=settings.max_value
        )
        self._name = f"redis store {settings.place}"
        self._settings = settings
        self._servers = settings.servers
        self._life = Lifecycle(self._name)
        self._calls: set[anyio.CancelScope] = set()

    @classmethod
    def from_url(cls, url: URL) -> Self:
        """``redis://``, ``rediss://``, ``redis+unix://``, ``redis+sentinel://``, ``redis+cluster://`` and so on."""
        return cls(url)

    async def __aenter__(self) -> Self:
        self._life.open()
        timeout = self._settings.timeout
        findings = [Finding("fail", f"no answer within {timeout:g} s")]
        try:
            with self._call(anyio.current_time() + timeout):
                findings = await self._look(every=False)
        except BaseException:
            self._servers.close()
            raise
        for finding in findings:
            if finding.level != "ok":
                logger.warning("%s: %s%s", self._name, finding, f"; {_MISSES}" if finding.level == "fail" else "")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for scope in list(self._calls):
            scope.cancel()
        await self._life.close()
        self._servers.close()

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        batch = Batch(self._name, self._settings.prefix, keys)
        # One TOUCH a key: what is found is the last to be evicted, for a load will follow.
        asked = await batch.wanted()
        results = await self._run(batch, asked, partial(batch.ask, "TOUCH"), deadline)
        presence: Presence = _PRESENCE[results.status]
        if results.errors and bool((presence == UNKNOWN).all()):
            for error in (error for i, error in results.errors.items() if i in asked):
                raise error
        return presence

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, into)
        batch = Batch(self._name, self._settings.prefix, keys)
        return await self._run(batch, await batch.wanted(), partial(batch.get, into), deadline, into)

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, source)
        batch = Batch(self._name, self._settings.prefix, keys)
        limit = self._settings.max_value
        good, sizes = await batch.wanted(), source.nbytes.tolist()
        wanted = [i for i in good if sizes[i] <= limit]
        for i in set(good).difference(wanted) if len(wanted) < len(good) else ():
            error = StoreError(
                f"{self._name}: {keys[i][:100]}: {source.nbytes[i]} bytes are more than max_value={limit}"
            )
            batch.results.set(i, Status.REJECTED, error=error)
        put = partial(batch.put, source, self._settings.ttl_ms, self._settings.checksum)
        return await self._run(batch, wanted, put, deadline, source)

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        batch = Batch(self._name, self._settings.prefix, keys)
        return await self._run(batch, await batch.wanted(), partial(batch.ask, "UNLINK"), deadline)

    async def scan(self, prefix: str = "") -> AsyncIterator[str]:
        """The keys that begin with ``prefix``. Raises :class:`~kvpool.errors.StoreError` if a server fails."""
        pattern = re.sub(rb"[\\*?\[\]]", rb"\\\g<0>", encoded(self._settings.prefix + prefix)) + b"*"
        seen: set[bytes] = set()  # a server may list a key twice
        with self._call(), self._as_store_error():
            pools = await self._servers.pools()
        for pool in pools:
            cursor = b"0"
            while True:
                with self._call(), self._as_store_error():
                    cursor, names = await _scan(pool, cursor, pattern)
                for name in set(names) - seen:
                    yield name[len(self._settings.prefix) :].decode(errors="surrogateescape")
                seen.update(names)
                if cursor == b"0":
                    break

    async def clear(self, prefix: str = "") -> int:
        """Remove the keys that begin with ``prefix``; the number removed. Raises StoreError if a server fails."""
        removed = 0
        page: list[str] = []
        async for key in self.scan(prefix):
            page.append(key)
            if len(page) == _PAGE:
                removed += await self._remove(page)
                page = []
        return removed + await self._remove(page)

    async def _remove(self, keys: list[str]) -> int:
        batch = Batch(self._name, self._settings.prefix, keys)  # names that others gave may be no keys
        results = await self._run(batch, range(len(keys)), partial(batch.ask, "UNLINK"), math.inf)
        for error in results.errors.values():
            raise error
        return int(results.ok.sum())

    async def _run(
        self, batch: Batch, wanted: Sequence[int], work: Work, deadline: float, buffers: Buffers | None = None
    ) -> Results:
        """Do the work on the servers that have the keys; what is not done by the deadline stays TIMED_OUT."""
        for region in () if buffers is None else buffers.regions:
            _ = region.view  # memory of a device is refused before anything is sent
        with self._call(deadline):
            await anyio.lowlevel.checkpoint()
            for _ in range(_ROUNDS):
                if wanted:
                    batch.moved = {}
                    await self._round(batch, wanted, work, buffers)
                    wanted = list(batch.moved)
            for i in wanted:
                batch.fail([i], batch.moved[i])
        return batch.results

    async def _round(self, batch: Batch, wanted: Sequence[int], work: Work, buffers: Buffers | None) -> None:
        """Ask each server for its part, all at the same time."""

        async def do(pool: Pool, part: Sequence[int]) -> None:
            try:
                async with pool.connection(transfer=buffers is not None) as connection:
                    if buffers is not None and int(buffers.nbytes[part].sum()) >= _LARGE:
                        refused = await pool.threads.run(connection.blocking, work, part, stop=connection.shutdown)
                    else:
                        refused = await work(connection, part)
            except (ConnectionLost, ServerError) as error:
                self._servers.distrust(pool)
                batch.fail(part, error)
                return
            if refused is not None and refused.code in _NOT_HERE:
                self._servers.distrust(pool)
            moved = [i for i in part if i in batch.moved] if batch.moved else []
            if moved and not self._servers.moved(pool, batch.moved[moved[0]]):
                hint = "it belongs to a cluster; the URL must begin with redis+cluster://"
                batch.fail(moved, ServerError(f"{batch.moved[moved[0]]} ({hint})"))
                batch.moved = {}

        try:
            parts = await self._servers.split(wanted, batch.name_of)
        except (ConnectionLost, ServerError) as error:
            batch.fail(wanted, error)
            return
        if len(parts) == 1:
            await do(*parts[0])
            return
        async with anyio.create_task_group() as tasks:
            for pool, part in parts:
                tasks.start_soon(do, pool, part)

    @contextmanager
    def _call(self, deadline: float = math.inf) -> Iterator[None]:
        """One call in flight, cut off by its deadline or by closing, which raises StoreClosed."""
        with self._life.call():
            with anyio.CancelScope(deadline=deadline) as scope:
                self._calls.add(scope)
                try:
                    yield
                finally:
                    self._calls.discard(scope)
            if scope.cancelled_caught:
                self._life.check()

    @contextmanager
    def _as_store_error(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionLost, ServerError) as error:
            raise StoreError(f"{self._name}: {error}") from error

    async def diagnose(self) -> Sequence[Finding]:
        """What each server says about itself."""
        with self._call():
            return await self._look(every=True)

    async def _look(self, *, every: bool) -> list[Finding]:
        """What is wrong with the servers (or the first of them), so that it is said before it matters."""
        findings: list[Finding] = []
        try:
            for pool in (await self._servers.pools())[: None if every else 1]:
                findings.extend(await look(pool, self.capabilities.ttl))
        except (ConnectionLost, ServerError) as error:
            findings.append(Finding("fail", str(error)))
        return findings


async def _scan(pool: Pool, cursor: bytes, pattern: bytes) -> tuple[bytes, list[bytes]]:
    """One page of names, and the cursor of the next. Raises ConnectionLost or ServerError."""
    async with pool.connection() as connection:
        (reply,) = await connection.ask(command("SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE))
    match reply:
        case [bytes(after), [*names]]:
            return after, [name for name in names if isinstance(name, bytes)]
        case ServerError():
            raise reply
    raise ConnectionLost(f"not a Redis server: it answered {str(reply)[:80]} to SCAN")
