"""The contract of a lookup transport: from the process that schedules to the process that holds the store.

One server, many clients, many lookups in flight. Two client faces on one sans-I/O core: ``await lookup()`` for async
engines and ``submit()`` / ``poll()`` for synchronous ones, polled on the caller's own thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from kvpool.errors import TransportError
from kvpool.hashes import BlockHashes

if TYPE_CHECKING:
    from kvpool.registry import URL

__all__ = ["LookupClient", "LookupHandler", "LookupRequest", "LookupResult", "LookupTransport", "PolledLookupClient"]


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """How much of this prompt is stored?

    ``namespace``: 16-byte digest of what the bytes are. ``epoch``: 16 bytes; results of another epoch are void.
    ``num_tokens``: prompt length; a hit is always shorter. ``local_tokens``: what the engine's own prefix cache already
    holds, which is neither probed nor loaded.
    """

    namespace: bytes
    epoch: bytes
    num_tokens: int
    local_tokens: int
    hashes: BlockHashes


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


#: Answers one lookup in the process that holds the store. It runs inside a cancel scope with the request's deadline.
LookupHandler = Callable[[LookupRequest], Awaitable[LookupResult]]


class LookupClient(ABC):
    """The face for async engines; an async context manager."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *exc: object) -> None: ...

    @abstractmethod
    async def lookup(self, request: LookupRequest, *, deadline: float) -> LookupResult:
        """Ask and wait. ``deadline`` is absolute on the loop's clock. Raises :class:`~kvpool.errors.TransportError`."""


class PolledLookupClient(ABC):
    """The face for synchronous engines: no loop, no thread, every call returns at once. Not thread-safe."""

    @abstractmethod
    def submit(self, request: LookupRequest, *, timeout: float) -> int:
        """Send; returns a ticket. Never blocks, never raises for a peer that is away: that ticket ends by timeout."""

    @abstractmethod
    def poll(self, *, wait: float = 0.0) -> Sequence[tuple[int, LookupResult | TransportError]]:
        """Tickets that are done (answered, failed, timed out), each once; waits up to ``wait`` seconds for one."""

    @abstractmethod
    def cancel(self, ticket: int) -> None:
        """Forget a ticket: it is never reported. Unknown tickets are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Let go of sockets. Idempotent; outstanding tickets are forgotten."""


class LookupTransport(ABC):
    """Makes the two ends of one lookup channel. Cheap to build and to pickle as a URL; opens nothing by itself."""

    scheme: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def from_url(cls, url: URL) -> Self:
        """Build from a parsed URL. Raises :class:`~kvpool.errors.ConfigError` naming field and value."""

    @abstractmethod
    def serve(self, handler: LookupHandler) -> AbstractAsyncContextManager[None]:
        """Answer lookups until the context ends. One failing or malformed request never ends the service."""

    @abstractmethod
    def client(self) -> LookupClient:
        """A new async client."""

    @abstractmethod
    def polled_client(self) -> PolledLookupClient:
        """A new polled client, for the calling thread."""
