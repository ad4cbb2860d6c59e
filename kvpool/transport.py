"""The contract of a lookup transport: from the process that schedules to the process that holds the store.

One server, many clients, many lookups in flight. Two client faces on one sans-I/O core: ``await lookup()`` for async
engines and ``submit()`` / ``poll()`` for synchronous ones, polled on the caller's own thread.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from kvpool.errors import TransportError
from kvpool.hashes import BlockHashes

if TYPE_CHECKING:
    from kvpool.registry import URL

__all__ = [
    "DIGEST_BYTES",
    "MAX_TIMEOUT",
    "LookupClient",
    "LookupHandler",
    "LookupRequest",
    "LookupResult",
    "LookupTransport",
    "PolledLookupClient",
]

#: Length of a namespace digest and of an epoch.
DIGEST_BYTES = 16
#: Seconds; a longer time limit is cut to this one. A lookup that takes a minute is worth less than computing.
MAX_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """How much of this prompt is stored?

    ``namespace``: 16-byte digest of what the bytes are. ``epoch``: 16 bytes; results of another epoch are void.
    ``num_tokens``: prompt length; a hit is always shorter. ``local_tokens``: what the engine's own prefix cache already
    holds, which is neither probed nor loaded. Raises ValueError for values that cannot be.
    """

    namespace: bytes
    epoch: bytes
    num_tokens: int
    local_tokens: int
    hashes: BlockHashes

    def __post_init__(self) -> None:
        if len(self.namespace) != DIGEST_BYTES or len(self.epoch) != DIGEST_BYTES:
            raise ValueError(
                f"lookup: namespace and epoch are {DIGEST_BYTES} bytes each, "
                f"not {len(self.namespace)} and {len(self.epoch)}"
            )
        if not 0 <= self.local_tokens <= self.num_tokens:
            raise ValueError(f"lookup: {self.local_tokens} local tokens of a prompt of {self.num_tokens}")


@dataclass(frozen=True, slots=True)
class LookupResult:
    """``hit_length`` tokens can be served, ``local_tokens`` included; 0 is a miss.

    ``boundaries``: for each group the token count under whose hash its last chunk is stored (0 without a hit).
    ``max_age``: seconds from receipt for which the answer may be relied on without asking again.
    """

    hit_length: int
    boundaries: tuple[int, ...]
    epoch: bytes
    max_age: float

    def check(self, num_tokens: int) -> None:
        """Raise ValueError unless this can be the answer for a prompt of ``num_tokens``. Transports check both ways."""
        if not 0 <= self.hit_length < max(num_tokens, 1):
            raise ValueError(f"a hit of {self.hit_length} tokens for a prompt of {num_tokens}; a hit is always shorter")
        if not all(0 <= b <= num_tokens for b in self.boundaries):
            raise ValueError(f"a boundary outside the prompt of {num_tokens} tokens: {self.boundaries}")
        if len(self.epoch) != DIGEST_BYTES:
            raise ValueError(f"an epoch of {len(self.epoch)} bytes instead of {DIGEST_BYTES}")
        if not (math.isfinite(self.max_age) and self.max_age >= 0):
            raise ValueError(f"an age limit of {self.max_age} seconds")


#: Answers one lookup in the process that holds the store. It runs inside a cancel scope with the request's deadline.
LookupHandler = Callable[[LookupRequest], Awaitable[LookupResult]]


class LookupClient(ABC):
    """The face for async engines; an async context manager, opened once. Lookups may run side by side."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *exc: object) -> None: ...

    @abstractmethod
    async def lookup(self, request: LookupRequest, *, deadline: float) -> LookupResult:
        """Ask and wait. ``deadline``: absolute on the loop's clock, at most :data:`MAX_TIMEOUT` away (or cut to that).

        Raises :class:`~kvpool.errors.LookupTimeout`, :class:`~kvpool.errors.ProtocolMismatch` (the two ends do not
        match), :class:`~kvpool.errors.TransportClosed` (this client), or else
        :class:`~kvpool.errors.TransportError` (the handler failed, the request is too large). All mean a miss.
        """


class PolledLookupClient(ABC):
    """The face for synchronous engines: no loop, no thread, every call returns at once. Not thread-safe.

    Belongs to the process that made it: in a forked child every call but ``close`` raises
    :class:`~kvpool.errors.TransportClosed`, as it does after ``close``.
    """

    @abstractmethod
    def submit(self, request: LookupRequest, *, timeout: float) -> int:
        """Send; returns a ticket, never used twice. ``timeout``: seconds, at most :data:`MAX_TIMEOUT` (or cut to that).

        Never blocks, and never raises for a peer that is away or a request it cannot carry: the ticket ends with an
        error instead.
        """

    @abstractmethod
    def poll(self, *, wait: float = 0.0) -> Sequence[tuple[int, LookupResult | TransportError]]:
        """Tickets that are done (answered, failed, timed out), each once; waits up to ``wait`` seconds for one.

        Does not wait when no ticket is outstanding. The errors are those of :meth:`LookupClient.lookup`.
        """

    @abstractmethod
    def cancel(self, ticket: int) -> None:
        """Forget a ticket: it is never reported. Unknown tickets are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Let go of sockets. Idempotent; outstanding tickets are forgotten."""

    def counts(self) -> Mapping[str, int]:
        """Replies that were dropped so far, by reason, such as "late". A transport that keeps no count says nothing."""
        return {}


class LookupTransport(ABC):
    """Makes the two ends of one lookup channel. Cheap to build and to pickle as a URL; opens nothing by itself."""

    scheme: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def from_url(cls, url: URL) -> Self:
        """Build from a parsed URL. Raises :class:`~kvpool.errors.ConfigError` naming field and value."""

    @abstractmethod
    def serve(self, handler: LookupHandler, *, namespace: bytes | None = None) -> AbstractAsyncContextManager[None]:
        """Answer lookups until the context ends. One failing or malformed request never ends the service.

        ``namespace``: refuse lookups of any other by name. Requests past their deadline are dropped, however long
        they waited. Raises :class:`~kvpool.errors.TransportError` on entry when the address is taken by a live server.
        Handlers that still run when the context ends are cancelled, and have ended before it does.
        """

    @abstractmethod
    def client(self) -> LookupClient:
        """A new async client."""

    @abstractmethod
    def polled_client(self) -> PolledLookupClient:
        """A new polled client, for the calling thread."""

    def counts(self) -> Mapping[str, int]:
        """Requests that servers of this object dropped or refused so far, by reason, such as "expired".

        A transport that keeps no count says nothing.
        """
        return {}
