"""A third party's store in one file: values in a table of an SQLite database."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import anyio
import anyio.to_thread
import numpy as np
from pydantic import BaseModel, Field

from kvpool.errors import StoreClosed
from kvpool.memory import Buffers
from kvpool.registry import URL
from kvpool.store import ABSENT, PRESENT, UNKNOWN, Capabilities, Presence, Results, Status, Store, check_batch

T = TypeVar("T")


class Options(BaseModel):
    path: str = Field(description="path of the database file")


class AcmeStore(Store):
    """``acme://?path=/some/file.db``"""

    capabilities = Capabilities(shared=True)

    def __init__(self, path: str) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._opened = False
        self._lock = anyio.Lock()

    @classmethod
    def from_url(cls, url: URL) -> Self:
        return cls(url.options(Options).path)

    async def __aenter__(self) -> Self:
        if self._opened:
            raise StoreClosed("acme store was opened before")
        self._opened = True
        self._db = await anyio.to_thread.run_sync(self._connect)
        return self

    async def __aexit__(self, *exc: object) -> None:
        with anyio.CancelScope(shield=True):
            async with self._lock:
                if self._db is not None:
                    self._db.close()
                self._db = None

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=30, check_same_thread=False)
        db.execute("PRAGMA synchronous = OFF")  # a cache: after a power loss it may be empty
        db.execute("CREATE TABLE IF NOT EXISTS kv (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        db.commit()
        return db

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        def work(db: sqlite3.Connection) -> Presence:
            found = (db.execute("SELECT 1 FROM kv WHERE key = ?", (key,)).fetchone() for key in keys)
            return np.array([PRESENT if row else ABSENT for row in found], np.uint8)

        return await self._run(work, deadline, np.full(len(keys), UNKNOWN, np.uint8))

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        def work(db: sqlite3.Connection) -> Results:
            results = Results.empty(len(keys))
            for i, key in enumerate(keys):
                row = db.execute("SELECT value FROM kv WHERE key = ?", (key,)).fetchone()
                if row is not None and len(row[0]) != into.nbytes[i]:
                    results.set(i, Status.CORRUPT)
                elif row is not None:
                    start = 0
                    for view in into.views(i):
                        view[:] = row[0][start : start + len(view)]
                        start += len(view)
                    results.set(i, Status.OK, start)
            return results

        check_batch(keys, into)
        return await self._run(work, deadline, Results.empty(len(keys), Status.TIMED_OUT))

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        def work(db: sqlite3.Connection) -> Results:
            results = Results.empty(len(keys), Status.OK)
            with db:
                for i, key in enumerate(keys):
                    value = b"".join(source.views(i))
                    done = db.execute("INSERT OR IGNORE INTO kv VALUES (?, ?)", (key, value))
                    results.nbytes[i] = len(value) * done.rowcount
            return results

        check_batch(keys, source)
        return await self._run(work, deadline, Results.empty(len(keys), Status.TIMED_OUT))

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        def work(db: sqlite3.Connection) -> Results:
            with db:
                gone = [db.execute("DELETE FROM kv WHERE key = ?", (key,)).rowcount for key in keys]
            results = Results.empty(len(keys))
            results.status[:] = [Status.OK if n else Status.ABSENT for n in gone]
            return results

        return await self._run(work, deadline, Results.empty(len(keys), Status.TIMED_OUT))

    async def _run(self, work: Callable[[sqlite3.Connection], T], deadline: float, late: T) -> T:
        """``work`` in a thread, which is never left behind: it touches the caller's memory."""
        if self._db is None:
            raise StoreClosed("acme store is not open")
        with anyio.CancelScope(deadline=deadline):
            async with self._lock:
                if self._db is None:
                    raise StoreClosed("acme store is closed")
                return await anyio.to_thread.run_sync(work, self._db)
        return late


def raw(path: str, statement: str, *values: Any) -> list[Any]:
    """For the tests: straight to the database."""
    with sqlite3.connect(path, timeout=30) as db:
        rows = db.execute(statement, values).fetchall()
    db.close()
    return rows
