"""Blocking work on the files of one root directory: read, write, remove, look. Runs in worker threads.

Nothing is kept open between batches, so a root that goes away and comes back is simply found again. Directories are
opened one component at a time without following symbolic links: whatever is planted inside, no file outside the root
is read, written or removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from kvpool.backends import _file_format as form
from kvpool.backends import _file_io as io
from kvpool.errors import WrongLength

__all__ = ["Damaged", "Tree"]

_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # NONBLOCK: a planted FIFO must not hang us
_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS}
# Someone removes empty directories meanwhile (ext4 says EPERM to a new file in one): walk again, make them again.
_GONE = {errno.ENOENT, errno.EPERM}
_TEMPORARY = "=tmp"
_MANY = 16  # keys of one directory for which it may be listed,
_LISTED_BYTES = 256  # if it is not longer than this for each: up to three files or so a key asked for
_PARENTS = 16  # directories kept open during one batch


class Damaged(Exception):
    """The file is not a whole value of its key; it has been removed."""


class Tree:
    """The files below ``root`` as seen during one batch; a context manager. Raises OSError where nothing else is said.

    ``turn`` is called while something takes long, and may raise to end it. ``create``: make missing directories, for
    their owner only. ``refresh``: note when a value was last used, in its file's modification time, to the second.
    ``checksum``: how new values are proven.
    """

    def __init__(
        self,
        root: str,
        turn: Callable[[], None] = lambda: None,
        *,
        create: bool = False,
        refresh: bool = False,
        checksum: form.Checksum = "xxh3_64",
    ) -> None:
        self._root = root
        self._turn = turn
        self._create = create
        self._refresh = refresh
        self._checksum: form.Checksum = checksum
        self._parents: dict[str, int] = {}
        self._held: int | None = None

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all directories; those needed again are looked up again."""
        for fd in self._parents.values():
            os.close(fd)
        self._parents.clear()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def exists(self, keys: Sequence[str], tell: Callable[[list[int], list[bool] | Exception], None]) -> None:
        """Tell of keys, by their indices, whether a file long enough to be a value is there, or why that is unknown.

        Keys that share a directory are asked for together. If they are many and the directory is short, it is listed,
        a third of the time of a system call for each; then a file counts whatever its length, and a load finds out.
        """
        by_directory: dict[tuple[str, str], tuple[list[int], list[str]]] = {}
        for i, key in enumerate(keys):
            try:
                parent, fan, name = form.place_of(key)
            except form.BadKey as error:
                tell([i], error)
            else:
                rows, names = by_directory.setdefault((parent, fan), ([], []))
                rows.append(i)
                names.append(name)
        for (parent, fan), (rows, names) in by_directory.items():
            self._turn()
            many = len(rows) >= _MANY and not self._refresh
            try:
                flags = _LIST | os.O_NOFOLLOW if many else io.DIRECTORY
                with io.opened(fan, flags, self._parent(parent)) as directory:
                    if many and os.fstat(directory).st_size <= 4096 + _LISTED_BYTES * len(rows):
                        with os.scandir(directory) as listing:
                            there = {entry.name for entry in listing if entry.is_file(follow_symlinks=False)}
                        tell(rows, [name in there for name in names])
                    else:
                        tell(rows, [self._exists(name, directory) for name in names])
            except FileNotFoundError:
                tell(rows, [False] * len(rows))
            except OSError as error:
                tell(rows, error)

    def has(self, key: str) -> bool:
        """The same of one key; raises what keeps it unknown."""
        answers: list[bool] = []

        def tell(_: list[int], answer: list[bool] | Exception) -> None:
            if isinstance(answer, Exception):
                raise answer
            answers.extend(answer)

        self.exists([key], tell)
        return answers[0]

    def _exists(self, name: str, directory: int) -> bool:
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if self._refresh and _is_old(found):
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=directory, follow_symlinks=False)
        return stat.S_ISREG(found.st_mode) and found.st_size >= form.HEADER_BYTES

    def read(self, key: str, pieces: Sequence[memoryview]) -> None:
        """Fill ``pieces``. Raises FileNotFoundError, :class:`Damaged` or WrongLength: a whole value."""
        parent, fan, name = form.place_of(key)
        directory = os.open(fan, io.DIRECTORY, dir_fd=self._parent(parent))
        try:
            fd = os.open(name, _READ, dir_fd=directory)
            try:
                self._read(key, pieces, fd, name, directory)
            finally:
                os.close(fd)
        finally:
            os.close(directory)

    def _read(self, key: str, pieces: Sequence[memoryview], fd: int, name: str, directory: int) -> None:
        head = bytearray(form.HEADER_BYTES)
        wanted = form.HEADER_BYTES + sum(map(len, pieces))
        spill = bytearray(1)  # a byte too many shows up in it
        moved = io.move_all(os.preadv, fd, [memoryview(head), *pieces, memoryview(spill)], enough=wanted)
        if moved == wanted and form.payload_bytes(head) == moved - form.HEADER_BYTES:
            problem = form.damage(key, head, moved, pieces)
        else:
            problem = form.damage(key, head, os.fstat(fd).st_size, None)
            if not problem:
                raise WrongLength(form.payload_bytes(head), wanted - len(head))
        if problem:
            io.remove_if_same(name, directory, fd)
            raise Damaged(problem)
        if self._refresh and _is_old(os.fstat(fd)):
            with contextlib.suppress(OSError):
                os.utime(fd)

    def write(self, key: str, pieces: Sequence[memoryview]) -> bool:
        """Store a value whole, or not at all; False if one is there already."""
        place = form.place_of(key)
        for last in (False, True):
            try:
                with self._directory(place) as directory:
                    return self._write(place.name, directory, key, pieces)
            except OSError as error:
                if last or error.errno not in _GONE:
                    raise
                self._hold_off_prune()
        raise AssertionError("unreachable")

    def remove(self, key: str, *, prune: bool = False) -> bool:
        """Remove a file; False if there is none. ``prune``: and its directory, if that is empty now."""
        place = form.place_of(key)
        try:
            with self._directory(place) as directory:
                os.unlink(place.name, dir_fd=directory)
        except FileNotFoundError:
            return False
        if prune:
            with contextlib.suppress(OSError):
                os.rmdir(place.fan, dir_fd=self._parent(place.parent))
        return True

    def keys(self, prefix: str = "") -> Iterator[str]:
        """The keys that begin with ``prefix``, read from file names as the iteration goes on."""
        return (key for key, _ in self._walk(prefix))

    def uses(self) -> Iterator[tuple[int, int, str]]:
        """For each value: when it was last used (ns), the length of its file, its key."""
        for key, entry in self._walk(""):
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield found.st_mtime_ns, found.st_size, key

    def lock_file(self, name: str) -> int:
        """A descriptor of a file for locks in the root, made if it is not there; ``name`` cannot be a key's."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(f"={name}", flags, 0o600, dir_fd=self._parent(""))

    def prune(self) -> None:
        """Remove empty directories, unless a writer has asked not to; other writers make theirs again."""
        with contextlib.suppress(OSError), io.opened(self._root, _LIST, None) as root:
            fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for directory in reversed([path for path, _ in _walk(self._root, lambda _: True)][1:]):
                self._turn()
                with contextlib.suppress(OSError):
                    os.rmdir(f"{self._root}/{directory}")

    def _hold_off_prune(self) -> None:
        """Forget the directories seen so far, and let none be pruned until the batch ends."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._held = os.open(self._root, _LIST)
            self.lock(self._held, fcntl.LOCK_SH)

    def lock(self, fd: int, kind: int) -> None:
        """Like flock, for a call that may have to end while it waits."""
        pause = 0.0001
        while True:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                self._turn()
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
            else:
                return

    def remove_leftovers(self) -> None:
        """Remove the temporary files of writers that died. A live writer holds a lock on its own."""
        with contextlib.suppress(FileNotFoundError):
            directory = self._parent(_TEMPORARY, create=False)
            for name in os.listdir(f"{self._root}/{_TEMPORARY}"):
                with contextlib.suppress(OSError), io.opened(name, _READ, directory) as fd:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    io.remove_if_same(name, directory, fd)

    def make_root(self) -> None:
        """Create the root, for its owner only, unless it is there."""
        os.makedirs(self._root, 0o700, exist_ok=True)

    def _walk(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Keys and their files. What comes or goes meanwhile may be missed; an unreadable root is an error."""
        with contextlib.suppress(FileNotFoundError):
            os.scandir(self._root).close()
            for directory, entries in _walk(self._root, lambda below: _may_hold(prefix, below)):
                self._turn()
                for entry in entries:
                    if (key := form.key_of(directory, entry.name)) is not None and key.startswith(prefix):
                        self._turn()
                        yield key, entry

    def _write(self, name: str, directory: int, key: str, pieces: Sequence[memoryview]) -> bool:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode) and found.st_size >= form.HEADER_BYTES:
                return False
            os.unlink(name, dir_fd=directory)  # what a power loss has left, or no value at all
        with self._new_file(directory) as (fd, source, source_dir):
            views = [memoryview(form.header(key, pieces, self._checksum)), *pieces]
            wanted = sum(v.nbytes for v in views)
            if io.move_all(os.pwritev, fd, views, enough=wanted) != wanted:
                raise OSError(errno.EIO, "the file could not be written in full")
            try:
                os.link(source, name, src_dir_fd=source_dir, dst_dir_fd=directory, follow_symlinks=True)
            except FileExistsError:  # another writer was faster; its value is as good
                return False
        return True

    @contextlib.contextmanager
    def _new_file(self, directory: int) -> Iterator[tuple[int, str, int]]:
        """A new file that no reader can see, and the name and directory to link it from.

        It has no name of its own and so leaves nothing behind when this process is killed. Where the file system has
        no such files, it gets a name in a directory apart, and a lock that says its writer is alive.
        """
        if _O_TMPFILE and _have_proc():
            try:
                fd = os.open(".", _O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=directory)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
            else:
                try:
                    yield fd, f"/proc/self/fd/{fd}", directory
                finally:
                    os.close(fd)
                return
        home = self._parent(_TEMPORARY)
        name = uuid.uuid4().hex
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=home)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd, name, home
        finally:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=home)

    @contextlib.contextmanager
    def _directory(self, place: form.Place) -> Iterator[int]:
        fd = io.open_directory(place.fan, self._parent(place.parent), self._create)
        try:
            yield fd
        finally:
            os.close(fd)

    def _parent(self, path: str, *, create: bool | None = None) -> int:
        """A directory below the root, kept open until the batch ends."""
        fd = self._parents.get(path)
        if fd is not None:
            return fd
        create = self._create if create is None else create
        while len(self._parents) >= _PARENTS:
            os.close(self._parents.pop(next(iter(self._parents))))
        try:
            fd = os.open(self._root, io.DIRECTORY & ~os.O_NOFOLLOW)  # the root itself may be a link of its owner's
        except FileNotFoundError:
            if not create:
                raise
            self.make_root()
            fd = os.open(self._root, io.DIRECTORY & ~os.O_NOFOLLOW)
        for part in filter(None, path.split("/")):
            above = fd
            try:
                fd = io.open_directory(part, above, create)
            finally:
                os.close(above)
        self._parents[path] = fd
        return fd


@functools.cache
def _have_proc() -> bool:
    return os.path.isdir("/proc/self/fd")


def _is_old(found: os.stat_result) -> bool:
    return time.time() - found.st_mtime > 1.0


def _walk(root: str, enter: Callable[[str], bool]) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Each directory, relative to the root, before those in it, and what in it is none; as deep as a key may lie."""
    left = [("", 0)]
    while left:
        directory, depth = left.pop()
        try:
            with os.scandir(f"{root}/{directory}") as listing:
                entries = list(listing)
        except OSError:
            continue
        others: list[os.DirEntry[str]] = []
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                others.append(entry)
            elif depth < form.MAX_DEPTH:
                below = f"{directory}/{entry.name}" if directory else entry.name
                if enter(below):
                    left.append((below, depth + 1))
        yield directory, others


def _may_hold(prefix: str, directory: str) -> bool:
    """Whether keys with this prefix may lie in ``directory`` (quoting aside, where the answer is yes)."""
    if "%" in directory or "=" in directory:
        return not directory.startswith(_TEMPORARY)
    return f"{directory}/".startswith(prefix) or prefix.startswith(f"{directory}/")
