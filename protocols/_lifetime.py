"""Whether a client may be used here and now."""

from __future__ import annotations

import os

from kvpool.errors import TransportClosed

__all__ = ["Lifetime"]


class Lifetime:
    """Open from :meth:`open` to :meth:`close`, once, in the process that opened it.

    ``what``: who this is, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid: int | None = None
        self._closed = False

    def open(self) -> None:
        """Raises TransportClosed on the second call."""
        if self._pid is not None:
            raise TransportClosed(f"{self._what} was opened before; make a new one")
        self._pid = os.getpid()

    def check(self) -> None:
        """Raises TransportClosed unless open in this process."""
        if self._pid is None:
            raise TransportClosed(f"{self._what} is not open")
        if self._closed:
            raise TransportClosed(f"{self._what} is closed")
        if not self.here:
            raise TransportClosed(f"{self._what} belongs to process {self._pid}; a forked process makes its own")

    def close(self) -> bool:
        """Whether this call closed it: False if it was not open, and in a forked child, which owns nothing of it."""
        was_open = self._pid is not None and not self._closed and self.here
        self._closed = True
        return was_open

    @property
    def here(self) -> bool:
        """Whether this is the process that opened it."""
        return self._pid == os.getpid()
