"""System calls on open directories and files, a little more convenient. All raise OSError."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence

__all__ = ["DIRECTORY", "move_all", "open_directory", "opened", "remove_if_same"]

#: How a directory is opened to reach what is in it; a symbolic link is refused.
DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_PIECES = 1000  # the kernel takes up to 1,024 in one call


def open_directory(name: str, above: int, create: bool) -> int:
    """A descriptor of the directory ``name`` in ``above``; made for its owner only, if ``create`` and it is missing."""
    try:
        return os.open(name, DIRECTORY, dir_fd=above)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=above)
    return os.open(name, DIRECTORY, dir_fd=above)


@contextlib.contextmanager
def opened(name: str, flags: int, directory: int | None) -> Iterator[int]:
    """A descriptor for the length of a ``with`` block."""
    fd = os.open(name, flags, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


def remove_if_same(name: str, directory: int, fd: int) -> None:
    """Unlink ``name`` unless someone has put another file there since ``fd`` was opened."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=directory, follow_symlinks=False)):
            os.unlink(name, dir_fd=directory)


def move_all(
    move: Callable[[int, Sequence[memoryview], int], int], fd: int, views: list[memoryview], enough: float = math.inf
) -> int:
    """Read or write all views from the start of the file, in one call where the kernel allows; the bytes moved.

    Takes away from ``views``. ``enough``: bytes after which the kernel is not asked for more.
    """
    done = 0
    while views and done < enough:
        moved = move(fd, views[:_PIECES], done)
        done += moved
        if not moved or done >= enough:
            break
        while views and moved >= views[0].nbytes:
            moved -= views.pop(0).nbytes
        if moved:
            views[0] = views[0][moved:]
    return done
