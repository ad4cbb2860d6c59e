"""Bring your own store: one SQLite database, shared by all processes that open it.

Nothing of it is registered anywhere: its URL names the class.

    third_party_store:SQLiteStore?path=/var/cache/kv.db

The contract is :class:`kvpool.store.Store`; :class:`kvpool.testing.stores.StoreConformance` has the tests for it, and
tests/examples/test_third_party_store.py runs them on this one.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import anyio
import anyio.from_thread
import numpy as np
from pydantic import BaseModel, Field

from kvpool.errors import StoreClosed, StoreError
from kvpool.memory import Buffers
from kvpool.registry import URL
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Capabilities, Presence, Results, Status, Store, check_batch
from kvpool.threads import Threads


class Options(BaseModel):
    """What may stand behind the ``?`` of the URL."""

    path: str = Field(min_length=1, description="the database file")


class SQLiteStore(Store):
    """Values as rows of one table. SQLite's transactions make a put whole; ``INSERT OR IGNORE`` lets the first win."""

    scheme: ClassVar[str] = "sqlite"
    capabilities = Capabilities(shared=True, max_value_bytes=64 << 20)

    def __init__(self, path: str) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._opened = False
        self._one = Threads(1)  # one call at a time has the connection

    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls(url.options(Options).path)

    async def __aenter__(self) -> Self:
        if self._opened:
            raise StoreClosed(f"sqlite store {self._path} was opened before")
        self._opened = True
        try:
            self._db = await self._one.run(self._connect)
        except sqlite3.Error as error:
            raise StoreError(f"sqlite store {self._path}: {error}") from error
        return self

    async def __aexit__(self, *exc: object) -> None:
        if (db := self._db) is not None:
            self._db = None  # calls that still wait for their turn see it
            with anyio.CancelScope(shield=True):
                await self._one.run(db.close)

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        found = np.full(len(keys), UNKNOWN, np.uint8)

        def look(db: sqlite3.Connection, i: int) -> None:
            found[i] = PRESENT if db.execute("SELECT 1 FROM kv WHERE key = ?", (keys[i],)).fetchone() else ABSENT

        await self._each(keys, look, deadline)
        return found

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, into)
        results = Results.empty(len(keys), Status.TIMED_OUT)

        def get(db: sqlite3.Connection, i: int) -> None:
            row = db.execute("SELECT value FROM kv WHERE key = ?", (keys[i],)).fetchone()
            if row is None:
                results.set(i, Status.ABSENT)
            elif len(row[0]) != into.nbytes[i]:
                results.set(i, Status.CORRUPT, error=StoreError(f"{keys[i]}: {len(row[0])} bytes are stored"))
            else:
                value, start = memoryview(row[0]), 0
                for piece in into.views(i):
                    piece[:] = value[start : start + len(piece)]
                    start += len(piece)
                results.set(i, Status.OK, start)

        await self._each(keys, get, deadline, results)
        return results

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        check_batch(keys, source)
        results = Results.empty(len(keys), Status.TIMED_OUT)

        def put(db: sqlite3.Connection, i: int) -> None:
            if source.nbytes[i] > (self.capabilities.max_value_bytes or 0):
                results.set(i, Status.REJECTED)
                return
            value = b"".join(source.views(i))
            new = db.execute("INSERT OR IGNORE INTO kv VALUES (?, ?)", (keys[i], value)).rowcount
            results.set(i, Status.OK, len(value) if new else 0)

        await self._each(keys, put, deadline, results)
        return results

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        results = Results.empty(len(keys), Status.TIMED_OUT)

        def delete(db: sqlite3.Connection, i: int) -> None:
            gone = db.execute("DELETE FROM kv WHERE key = ?", (keys[i],)).rowcount
            results.set(i, Status.OK if gone else Status.ABSENT)

        await self._each(keys, delete, deadline, results)
        return results

    async def _each(
        self,
        keys: Sequence[str],
        step: Callable[[sqlite3.Connection, int], None],
        deadline: float,
        results: Results | None = None,
    ) -> None:
        """Run ``step`` for each key in a thread: one hop a batch, ended between two keys when cancelled or late."""

        def work() -> None:
            for i, key in enumerate(keys):
                anyio.from_thread.check_cancelled()
                try:
                    step(self._checked(), i)
                except sqlite3.Error as error:
                    if results is not None:
                        results.set(i, Status.FAILED, error=StoreError(f"sqlite store {self._path}: {key}: {error}"))

        self._checked()
        with anyio.CancelScope(deadline=deadline):
            await self._one.run(work)  # never leaves a thread behind: it touches the caller's memory

    def _checked(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreClosed(f"sqlite store {self._path} is {'closed' if self._opened else 'not open yet'}")
        return self._db

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None, timeout=1)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")  # a cache: what a power loss takes is computed again
        db.execute("CREATE TABLE IF NOT EXISTS kv (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        return db
