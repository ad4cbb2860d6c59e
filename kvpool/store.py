"""The contract between kvpool and a place that keeps bytes.

A store maps string keys to immutable byte values. It knows nothing of tokens, engines or layouts. Deadlines are
enforced, retries, circuit breaking, checksums, tiering and metrics are added by wrapper stores, not by each backend.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvpool.errors import LayoutError

if TYPE_CHECKING:
    from kvpool.memory import Buffers, Region
    from kvpool.registry import URL

__all__ = [
    "ABSENT",
    "PRESENT",
    "UNKNOWN",
    "Capabilities",
    "Finding",
    "Presence",
    "Results",
    "Status",
    "Store",
    "SupportsClear",
    "SupportsDiagnosis",
    "SupportsMissing",
    "SupportsPin",
    "SupportsRegister",
    "SupportsScan",
    "check_batch",
]

#: One entry a key, uint8: :data:`ABSENT`, :data:`PRESENT` or :data:`UNKNOWN`.
Presence = npt.NDArray[np.uint8]
ABSENT = 0
PRESENT = 1
#: The store could not tell (failed, timed out). Callers treat it as absent, and count it apart.
UNKNOWN = 2


class Status(IntEnum):
    """What happened to one key of a batch."""

    OK = 0  #: read in full and proven; or stored; or deleted. A put of an existing key is OK and changes nothing.
    ABSENT = 1  #: nothing (whole) is stored under the key
    FAILED = 2  #: the store failed for this key; see ``Results.errors``
    TIMED_OUT = 3  #: the deadline passed before this key was done
    CORRUPT = 4  #: something is stored but it is not what the key promises (length, format, checksum)
    REJECTED = 5  #: the store refuses to take it now (full, value too large); puts only
    SKIPPED = 6  #: not wanted in the store by the pool's own policy; saves only, no store answers it


@dataclass(slots=True)
class Results:
    """The outcome of a batch as columns, aligned one to one with its keys, never compacted.

    ``status``: uint8[n] of :class:`Status`. ``nbytes``: int64[n], bytes moved for the key (0 unless OK).
    ``errors``: the few failures worth a message, by key index.
    """

    status: npt.NDArray[np.uint8]
    nbytes: npt.NDArray[np.int64]
    errors: dict[int, Exception] = field(default_factory=dict)

    @classmethod
    def empty(cls, n: int, status: Status = Status.ABSENT) -> Self:
        """Results for ``n`` keys that all stand at ``status``."""
        return cls(np.full(n, status, np.uint8), np.zeros(n, np.int64))

    def set(self, i: int, status: Status, nbytes: int = 0, error: Exception | None = None) -> None:
        """Record the outcome of key ``i``."""
        self.status[i] = status
        self.nbytes[i] = nbytes
        if error is not None:
            self.errors[i] = error

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """bool[n]: which keys are OK."""
        return np.equal(self.status, Status.OK)

    def __len__(self) -> int:
        return len(self.status)


def check_batch(keys: Sequence[str], buffers: Buffers | None) -> None:
    """What every backend checks first. Raises :class:`~kvpool.errors.LayoutError`: not one entry of buffers a key."""
    if buffers is not None and len(buffers) != len(keys):
        raise LayoutError(f"{len(keys)} keys do not fit buffers of {len(buffers)} values; give one a key")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store promises. Plain data, known before the store is opened where that is possible."""

    shared: bool  #: other processes that open the same URL see the same values
    zero_copy: bool = False  #: moves bytes straight between registered engine memory and the store
    ttl: bool = False  #: values may expire by themselves
    unlimited: bool = False  #: nothing makes room by itself: it grows until the machine has none left
    scan: bool = False  #: implements SupportsScan
    headroom: int = 0  #: bytes in front of each value in memory that it would like to use; spares it a copy or a piece
    max_value_bytes: int | None = None  #: larger values are REJECTED
    lent_bytes: int = 0  #: memory of this process that anybody's values may lie in, as long as the store is open
    loops: frozenset[str] = frozenset({"asyncio", "trio"})  #: event loops it runs on; others are refused by name


class Store(ABC):
    """An async context manager that keeps immutable values under string keys.

    Contract, checked by :mod:`kvpool.testing`:

    - A put is atomic and idempotent: a reader sees the whole value or none; an existing value is never changed.
      Something half-written is absent.
    - Results align with the keys given, duplicates and holes included; an empty batch does nothing.
    - ``deadline`` is absolute on the running loop's clock (``anyio.current_time()``, seconds). What is not done by then
      is TIMED_OUT (UNKNOWN for ``exists``); the call returns soon after the deadline.
    - Cancelling a call is safe: nothing touches the caller's memory after the call has returned or raised.
    - Bytes of a destination whose status is not OK are undefined (they may have been partly written).
    - Keys are non-empty ASCII text without whitespace or control characters, of up to 512 characters;
      ``/`` separates name parts.
    - A call before ``__aenter__`` or after ``__aexit__`` raises :class:`~kvpool.errors.StoreClosed`. A store may be
      opened once. Closing while calls run lets them end: each returns or raises StoreClosed.
    """

    capabilities: Capabilities
    #: URL scheme under which a backend registers itself (informative; the registry decides).
    scheme: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def from_url(cls, url: URL) -> Self:
        """Build a closed store from a parsed URL. Raises :class:`~kvpool.errors.ConfigError` naming field and value."""

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Open: connect, create directories, start threads."""

    @abstractmethod
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Close: let go of all memory, descriptors and threads."""

    @abstractmethod
    async def exists(self, keys: Sequence[str], *, deadline: float = math.inf) -> Presence:
        """uint8[len(keys)]: which keys have a whole value."""

    @abstractmethod
    async def get_into(self, keys: Sequence[str], into: Buffers, *, deadline: float = math.inf) -> Results:
        """Read each value into its pieces of memory. A stored length other than the pieces' total is CORRUPT."""

    @abstractmethod
    async def put(self, keys: Sequence[str], source: Buffers, *, deadline: float = math.inf) -> Results:
        """Store each value, if its key is absent. OK means a later reader may find it, not that it is durable.

        ``nbytes`` is 0 for a key that was there before, whose value is another's.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[str], *, deadline: float = math.inf) -> Results:
        """Remove values: OK if one was removed, ABSENT if there was none."""


@runtime_checkable
class SupportsScan(Protocol):
    """A store that can list its keys; ``capabilities.scan`` is true."""

    def scan(self, prefix: str = "") -> AsyncIterator[str]:
        """The keys that begin with ``prefix``, in no order; those that come or go meanwhile may be missed."""
        ...


@runtime_checkable
class SupportsPin(Protocol):
    """A store that evicts values and can be asked to spare some for a while."""

    async def pin(self, keys: Sequence[str], *, seconds: float, deadline: float = math.inf) -> Presence:
        """Like ``exists``; what is PRESENT is not evicted for ``seconds``, or until it is unpinned as often."""
        ...

    async def unpin(self, keys: Sequence[str]) -> None:
        """Take back one pin of each key; keys without one are ignored. Ends soon, whatever happens."""
        ...


@runtime_checkable
class SupportsRegister(Protocol):
    """A store that can move values straight from and to memory it was told of (RDMA).

    If ``capabilities.zero_copy`` is true as well, :class:`~kvpool.pool.KVPool` hands the engine's own blocks to
    ``get_into`` and ``put``. Such a call may be late, but like any other it returns, or raises when it is cancelled,
    only when nothing touches the memory any more: the pool waits for that, however long it takes.
    """

    async def register(self, regions: Sequence[Region]) -> None:
        """Make memory known, once a region; it stays valid until the store is closed.

        Raises LayoutError for memory that can never be used, StoreError if it cannot be registered.
        """
        ...


@runtime_checkable
class SupportsClear(Protocol):
    """A store that can remove many keys at once."""

    async def clear(self, prefix: str = "") -> int:
        """Remove the keys that begin with ``prefix``; the number removed. Raises StoreError if it cannot."""
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a store knows about its own set-up. ``warn``: it works, but not as well as it could."""

    level: Literal["ok", "warn", "fail"]
    text: str  #: what is so, without secrets
    advice: str = ""  #: what to change, if anything should be

    def __str__(self) -> str:
        return f"{self.text}; {self.advice}" if self.advice else self.text


@runtime_checkable
class SupportsDiagnosis(Protocol):
    """A store that can look at its own set-up, for ``kvpool doctor``."""

    async def diagnose(self) -> Sequence[Finding]:
        """What a person should know about the place of the values. What cannot be found out is a finding as well."""
        ...


@runtime_checkable
class SupportsMissing(Protocol):
    """A store that is made where it does not exist, for commands that only look and must not make one."""

    def missing(self) -> str:
        """What is not there yet, so that opening would make it; empty if all is there. Blocks for a moment."""
        ...
