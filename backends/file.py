"""FileStore: one directory of files, shared by many processes at once; one value a file.

A value is written to a file without a name and then linked into place: readers see all of it or nothing, a writer
killed at any moment leaves nothing behind, and of two writers of one key the first wins. Data is not flushed to the
device on put. After a power loss a recent value may be gone, cut off or full of zeros; header and checksum find that
out, and it is a miss, never wrong bytes.

Blocking calls run in worker threads, one hop a batch. A thread touches the caller's memory, so it is never left behind:
a cancelled or late call ends as soon as the file at hand is done.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from itertools import islice
from types import TracebackType
from typing import ClassVar, Self, TypeVar

import anyio
import anyio.from_thread
import numpy as np
from pydantic import BaseModel, ByteSize, Field

from kvpool.backends._file_capacity import Capacity
from kvpool.backends._file_format import BadKey, Checksum
from kvpool.backends._file_look import look
from kvpool.backends._file_tree import Damaged, Tree
from kvpool.backends._lifecycle import Lifecycle
from kvpool.errors import ConfigError, StoreError, WrongLength
from kvpool.memory import Buffers
from kvpool.registry import URL
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
from kvpool.threads import Threads

__all__ = ["FileStore"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MISSES = "values are computed until it can be used"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SCAN_PAGE = 1000  # keys listed in one hop


class _Options(BaseModel):
    capacity: ByteSize | None = Field(
        default=None, gt=0, description="a size above 0, such as 100GiB; unlimited without it"
    )
    checksum: Checksum = Field(default="xxh3_64", description="xxh3_64 or none")
    threads: int = Field(
        default=4, ge=1, le=64, description="batches, and lookups, worked on at the same time, 1 to 64"
    )


class FileStore(Store):
    """Keeps values as files below ``root`` (an absolute path), created for its owner only where it is missing.

    ``capacity``: the sum of all files' lengths at most; the least recently used make room. Whoever writes below one
    root should state the same. ``checksum="none"`` spares the time for reading every byte, and cannot tell a value from
    what a power loss has left of it. ``threads``: batches, and as many lookups, worked on at the same time. A root that
    cannot be used makes every key FAILED (ABSENT where there is simply no file), with a message, until it can be used
    again.
    """

    scheme: ClassVar[str] = "file"
    capabilities = Capabilities(shared=True, scan=True)

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        capacity: int | None = None,
        checksum: Checksum = "xxh3_64",
        threads: int = 4,
    ) -> None:
        self._root = os.fspath(root)
        if not os.path.isabs(self._root):
            raise ConfigError(f"file store: the root {self._root!r} is not an absolute path")
        if "\0" in self._root:
            raise ConfigError(f"file store: the root {self._root!r} holds a NUL")
        self._life = Lifecycle(f"file store {self._root}")
        self._limit = capacity
        self._capacity = None if capacity is None else Capacity(capacity)
        self.capabilities = replace(self.capabilities, unlimited=capacity is None)
        self._checksum: Checksum = checksum
        self._threads = Threads(threads)
        self._looks = Threads(threads)  # so that no lookup waits for values that are on their way

    @classmethod
    def from_url(cls, url: URL) -> Self:
        """``file:///absolute/path[?capacity=100GiB][&checksum=none][&threads=4]``."""
        if url.host or url.port is not None or url.username or not url.path.strip("/"):
            raise ConfigError(f"{url}: a file store is file:// and an absolute path, such as file:///var/cache/kv")
        return cls(url.path, **url.options(_Options).model_dump())

    async def __aenter__(self) -> Self:
        self._life.open()
        await self._hop(self._prepare)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._life.close()

    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        found = np.full(len(keys), UNKNOWN, np.uint8)

        def tell(rows: list[int], there: list[bool] | Exception) -> None:
            if isinstance(there, Exception):
                logger.debug("%s", self._error(keys[rows[0]], there))
            else:
                found[rows] = np.where(there, PRESENT, ABSENT)

        def work() -> None:
            with self._tree() as tree:
                tree.exists(keys, tell)

        await self._hop(work, deadline, self._looks)
        return found

    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        def get(tree: Tree, i: int) -> tuple[Status, int]:
            tree.read(keys[i], into.views(i))
            return Status.OK, sizes[i]

        check_batch(keys, into)
        sizes = into.nbytes.tolist()
        return await self._each(keys, get, deadline)

    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        def put(tree: Tree, i: int) -> tuple[Status, int]:
            if self._capacity is None:
                new = tree.write(keys[i], source.views(i))
            else:
                new = not tree.has(keys[i]) and self._capacity.write(tree, keys[i], source.views(i))
            return Status.OK, sizes[i] if new else 0

        check_batch(keys, source)
        sizes = source.nbytes.tolist()
        return await self._each(keys, put, deadline, create=True)

    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        def delete(tree: Tree, i: int) -> tuple[Status, int]:
            return (Status.OK if tree.remove(keys[i]) else Status.ABSENT), 0

        return await self._each(keys, delete, deadline)

    async def scan(self, prefix: str = "") -> AsyncIterator[str]:
        """The keys that begin with ``prefix``. Raises :class:`~kvpool.errors.StoreError` for an unreadable root."""
        found = self._tree().keys(prefix)
        while page := await self._hop(lambda: list(islice(found, _SCAN_PAGE))):
            for key in page:
                yield key

    async def clear(self, prefix: str = "") -> int:
        """Remove the keys that begin with ``prefix``, and empty directories; the number removed."""

        def work() -> int:
            with self._tree() as tree:
                removed = 0
                for key in tree.keys(prefix):
                    removed += tree.remove(key)
                tree.prune()
                return removed

        return await self._hop(work) or 0

    def missing(self) -> str:
        """Whether there is no folder yet, or something that is none."""
        if file := _in_the_way(self._root):
            return f"file store {self._root}: {file} is a file, not a folder"
        return "" if os.path.lexists(self._root) else f"file store {self._root}: there is no such folder"

    async def diagnose(self) -> Sequence[Finding]:
        """What kind of file system the root is on, how much room there is, and who may write."""
        try:
            return await self._hop(lambda: list(look(self._root, self._limit))) or []
        except StoreError as error:
            return [Finding("fail", str(error))]

    async def _each(
        self,
        keys: Sequence[str],
        step: Callable[[Tree, int], tuple[Status, int]],
        deadline: float,
        *,
        create: bool = False,
    ) -> Results:
        """One hop to a thread for the whole batch; what it has not done by the deadline stays TIMED_OUT."""
        results = Results.empty(len(keys), Status.TIMED_OUT)

        def work() -> None:
            with self._tree(create=create) as tree:
                for i, key in enumerate(keys):
                    self._turn()
                    try:
                        results.set(i, *step(tree, i))
                    except Damaged as error:
                        results.set(i, Status.CORRUPT, error=self._error(key, error))
                    except WrongLength as error:
                        results.set(i, Status.CORRUPT, error=error)
                    except (OSError, BadKey) as error:
                        if isinstance(error, FileNotFoundError) and not create:
                            results.set(i, Status.ABSENT)
                        else:
                            full = isinstance(error, OSError) and error.errno in _FULL
                            status = Status.REJECTED if full else Status.FAILED
                            results.set(i, status, error=self._error(key, error))

        await self._hop(work, deadline)
        return results

    async def _hop(self, work: Callable[[], T], deadline: float = math.inf, threads: Threads | None = None) -> T | None:
        """Run ``work`` in a thread; None if the deadline cut it short. Raises StoreClosed or StoreError."""
        with self._life.call(), anyio.CancelScope(deadline=deadline):
            try:
                return await (threads or self._threads).run(work)
            except OSError as error:
                raise self._error("", error) from error
        return None

    def _tree(self, *, create: bool = False) -> Tree:
        refresh = self._capacity is not None
        return Tree(self._root, self._turn, create=create, refresh=refresh, checksum=self._checksum)

    def _turn(self) -> None:
        """Between two files, in the thread: stop if the call is cancelled or late, or the store closed."""
        try:  # noqa: SIM105 - a third of the time of contextlib.suppress, once a file
            anyio.from_thread.check_cancelled()
        except RuntimeError:  # a simulation has no threads
            pass
        self._life.check()

    def _prepare(self) -> None:
        try:
            with self._tree() as tree:
                tree.make_root()
                tree.remove_leftovers()
        except OSError as error:
            logger.warning("%s; %s", self._error("", error), _MISSES)

    def _error(self, key: str, error: Exception) -> StoreError:
        reason = _reason(self._root, error) if isinstance(error, OSError) else None
        return StoreError(f"file store {self._root}: {key[:100] + ': ' if key else ''}{reason or error}")


def _reason(root: str, error: OSError) -> str:
    """Why the root cannot be used, in words that say what to change where the kernel's do not."""
    file = _in_the_way(root) if error.errno in (errno.ENOTDIR, errno.EEXIST) else ""
    return f"{file} is a file, not a folder" if file else error.strerror or str(error)


def _in_the_way(root: str) -> str:
    """The root, or the path to it, if that is a file."""
    path = root
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path if os.path.exists(path) and not os.path.isdir(path) else ""
