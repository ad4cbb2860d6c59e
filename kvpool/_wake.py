"""Waking one sleeping task on an event loop from other threads, for a few microseconds.

The caller's thread is an engine's, busy in Python. ``os.write`` and ``os.read`` release the GIL around the system
call, and the thread that gave it away may wait a switch interval (5 ms) to get it back. Calls through
:class:`ctypes.PyDLL` keep it, and neither end can block: the pipe is non-blocking and its content has no meaning.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

import anyio

__all__ = ["Wake"]

_SINK = 4096


def _os_write(fd: int) -> None:
    with suppress(BlockingIOError):  # full of wakes already
        os.write(fd, b"\0")


def _os_drain(fd: int) -> None:
    with suppress(BlockingIOError):
        os.read(fd, _SINK)


def _pipe_calls() -> tuple[Callable[[int], object], Callable[[int], object]]:
    try:
        libc = ctypes.PyDLL(None)
        write, read = libc.write, libc.read
    except (OSError, AttributeError, TypeError):  # no such library to be found on this platform
        return _os_write, _os_drain
    write.argtypes = read.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    write.restype = read.restype = ctypes.c_ssize_t
    sink = ctypes.create_string_buffer(_SINK)  # what is read is never looked at, so all may share it
    return lambda fd: write(fd, b"\0", 1), lambda fd: read(fd, sink, _SINK)


_write, _drain = _pipe_calls()


class Wake:
    """A bell for one task. Many rings while it is awake, or before it has woken up, cost one system call at most."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._asleep = False

    def ring(self) -> None:
        """Wake the task. From any thread; the caller sees to it that :meth:`close` does not run meanwhile."""
        if self._asleep:
            self._asleep = False
            _write(self._write_fd)

    async def sleep(self, unless: Callable[[], object]) -> None:
        """Sleep until the next ring. ``unless`` is asked once rings count, so that news just before is not missed."""
        self._asleep = True
        if not unless():
            await anyio.wait_readable(self._read_fd)
            _drain(self._read_fd)
        self._asleep = False

    def close(self) -> None:
        """Give the descriptors back. Rings after this are ignored."""
        self._asleep = False
        for fd in (self._read_fd, self._write_fd):
            os.close(fd)
