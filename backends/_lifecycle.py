"""Opening and closing, the same for every store: opened once, closed once, calls in flight end before it is closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from kvpool.errors import StoreClosed

__all__ = ["Lifecycle"]


class Lifecycle:
    """Counts calls in flight. Used from one event loop; ``closed`` may be read from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._opened = False
        self._calls = 0
        self._idle = anyio.Event()
        self.closed = True

    def open(self) -> None:
        """Raises :class:`~kvpool.errors.StoreClosed` on a second opening."""
        if self._opened:
            raise StoreClosed(f"{self._name} was opened before; build a new one to open it again")
        self._opened = True
        self.closed = False

    def check(self) -> None:
        """Raises :class:`~kvpool.errors.StoreClosed` unless open."""
        if self.closed:
            raise StoreClosed(f"{self._name} is {'closed' if self._opened else 'not open yet'}")

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call in flight."""
        self.check()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def close(self) -> None:
        """No new calls; wait for those in flight, which see ``closed`` and end soon. Idempotent."""
        self.closed = True
        with anyio.CancelScope(shield=True):
            while self._calls:
                self._idle = anyio.Event()
                await self._idle.wait()
