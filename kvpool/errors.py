"""Every error kvpool raises on purpose.

A caller that only wants "compute it yourself" catches :class:`KVPoolError`. Driver errors (socket, file
system, native client) are translated by each backend into :class:`StoreError` or into a per-key
:class:`~kvpool.store.Status`; they never leave it raw.
"""

from __future__ import annotations


class KVPoolError(Exception):
    """Base of all errors raised by kvpool."""


class ConfigError(KVPoolError, ValueError):
    """A setting is unknown, misspelt or impossible; the message names the field, the value and what is allowed."""


class UnsupportedError(KVPoolError):
    """The engine, model or platform needs something kvpool refuses on purpose; the message lists every reason."""


class LayoutError(KVPoolError, ValueError):
    """Block memory that does not have the shape the caller claims (unaligned span, block id out of range, ...)."""


class HashError(KVPoolError, ValueError):
    """Block hashes that cannot be used: ragged, of another length or scheme, or not chained."""


class StoreError(KVPoolError):
    """A store could not do its work as a whole (one key failing is a Status, not an exception)."""


class StoreClosed(StoreError):
    """The store was used before it was opened or after it was closed."""


class WrongLength(StoreError):
    """A stored value is not as long as the memory it should fill; goes with CORRUPT in ``Results.errors``.

    ``stored`` and ``wanted``: bytes. A store that can tell reports it, so that a wrapper can look at what is there.
    """

    def __init__(self, stored: int, wanted: int) -> None:
        super().__init__(f"{stored} bytes are stored, {wanted} are expected")
        self.stored = stored
        self.wanted = wanted


class TransportError(KVPoolError):
    """A lookup could not be carried to the store's process and back."""


class TransportClosed(TransportError):
    """The lookup transport was used before it was opened or after it was closed."""


class LookupTimeout(TransportError):
    """No answer arrived before the deadline."""


class ProtocolMismatch(TransportError):
    """The two ends speak another protocol version, codec or namespace; the message names both sides."""


class PortalClosed(KVPoolError):
    """The portal's loop is not running in this process: closed, crashed, or inherited over a fork."""


class JobCancelled(KVPoolError):
    """A job handed to the portal was cancelled before it had ended."""
