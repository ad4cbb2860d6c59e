"""A ZeroMQ context that is there while it is needed."""

from __future__ import annotations

import logging
import os
import threading

import zmq

__all__ = ["CLOSE_SECONDS", "SharedContext"]

log = logging.getLogger(__name__)

#: A transport lets go of its sockets and threads within this time, whether its peers live or not.
CLOSE_SECONDS = 5.0


class SharedContext:
    """Lives from the first open socket to the last, and anew in a forked child. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._pid = 0
        self._sockets = 0

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """A new socket. Raises zmq.ZMQError."""
        with self._lock:
            if self._context is None or self._pid != os.getpid():  # a context does not work in a forked child
                self._context, self._pid, self._sockets = zmq.Context(), os.getpid(), 0
            opened = self._context.socket(kind)
            self._sockets += 1
            return opened

    def close(self, closing: zmq.Socket[bytes]) -> None:
        """Close a socket. With the last one, all that belongs to them is gone when this returns.

        Usually in a millisecond; after CLOSE_SECONDS the rest is left to a background thread, and logged.
        """
        closing.close(linger=0)
        with self._lock:
            self._sockets -= 1
            if self._sockets or self._context is None:
                return
            context, self._context = self._context, None
        end = threading.Thread(target=context.term, name="kvpool-zmq-term", daemon=True)
        end.start()
        end.join(CLOSE_SECONDS)
        if end.is_alive():
            log.error("ZeroMQ did not let go within %g seconds; left to a background thread", CLOSE_SECONDS)
