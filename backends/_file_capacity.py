"""Keeps the files of one root within a capacity, together with all other processes that write there.

A counter in the root says how many bytes there are at most. A writer adds its own before it writes; when that would be
too much, it counts all files anew and removes the least recently used. What is deleted is not subtracted, and a writer
that is killed may leave bytes counted that it never wrote: the counter errs to the high side only, and the next count
puts it right. After a crash of the machine it may be too low: so each process counts once, at its first write.

Two locks, both let go by the kernel when a process dies. The gate is held for the counter, for moments. Writers share
the other one while they write: who has the gate and then that lock alone sees a root that nobody writes to.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kvpool.backends._file_format import HEADER_BYTES
from kvpool.backends._file_tree import Tree

__all__ = ["Capacity"]

_COUNTER = struct.Struct("<Q")
_KEEP = 0.9  # of the capacity is left after a removal: a count takes about 10 us a file, so it must not come often


class Capacity:
    """The limit of one root, in bytes of file length."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._trusted = False

    def write(self, tree: Tree, key: str, pieces: Sequence[memoryview]) -> bool:
        """Store a value within the limit; False if one is there already. Raises OSError (EFBIG) if it can never fit."""
        need = HEADER_BYTES + sum(piece.nbytes for piece in pieces)
        if need > self._limit:
            raise OSError(errno.EFBIG, f"{need} bytes with the header are more than the capacity of {self._limit}")
        with _opened(tree, "gate") as gate, _opened(tree, "writers") as writers:
            tree.lock(gate, fcntl.LOCK_EX)
            used = self._used(gate)
            if used is None or used + need > self._limit:
                tree.lock(writers, fcntl.LOCK_EX)
                used = self._make_room(tree, need)
                self._trusted = True
            os.pwrite(gate, _COUNTER.pack(used + need), 0)
            tree.lock(writers, fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
            return tree.write(key, pieces)

    def _used(self, gate: int) -> int | None:
        """What the counter says, if it can be trusted."""
        data = os.pread(gate, _COUNTER.size, 0)
        return _COUNTER.unpack(data)[0] if self._trusted and len(data) == _COUNTER.size else None

    def _make_room(self, tree: Tree, need: int) -> int:
        """Count all files; if ``need`` bytes more are too many, remove the least recently used. The bytes left."""
        files = list(tree.uses())
        used = sum(size for _, size, _ in files)
        if used + need <= self._limit:
            return used
        files.sort()
        goal = min(int(self._limit * _KEEP), self._limit - need)
        for _, size, key in files:
            if used <= goal:
                break
            with suppress(OSError):
                used -= size if tree.remove(key, prune=True) else 0
        if used + need > self._limit:
            raise OSError(errno.ENOSPC, f"{used} bytes of the capacity of {self._limit} cannot be removed")
        return used


@contextmanager
def _opened(tree: Tree, name: str) -> Iterator[int]:
    fd = tree.lock_file(name)
    try:
        yield fd
    finally:
        os.close(fd)
