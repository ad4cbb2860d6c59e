"""A line on a terminal that shows how far a long job is."""

from __future__ import annotations

import os
import time
from typing import TextIO

__all__ = ["Progress"]

_EVERY_S = 0.1
_BAR = 30


class Progress:
    """A bar that is drawn over and over on one line of ``stream``; nothing is written where that is no terminal."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream
        self._total = max(1, total)
        self._live = stream.isatty()
        self._begin = time.monotonic()
        self._drawn = -_EVERY_S

    def update(self, done: int, text: str) -> None:
        """``done`` of all are done; ``text`` says more. Cheap to call often."""
        now = time.monotonic() - self._begin
        if not self._live or (now - self._drawn < _EVERY_S and done < self._total):
            return
        self._drawn = now
        full = _BAR * done // self._total
        left = now / done * (self._total - done) if done else 0.0
        line = f"{'━' * full}{'╌' * (_BAR - full)} {done / self._total:4.0%}  {text}  {_clock(left)} left"
        self._write(line[: _width(self._stream) - 1])

    def clear(self) -> None:
        """Leave the line empty for what comes next."""
        if self._live:
            self._write("")

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
