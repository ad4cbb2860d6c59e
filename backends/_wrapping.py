"""What the wrapper stores have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError
from kvpool.memory import Buffers, Region
from kvpool.registry import URL
from kvpool.store import (
    Results,
    Status,
    Store,
    SupportsClear,
    SupportsDiagnosis,
    SupportsMissing,
    SupportsRegister,
    SupportsScan,
)

__all__ = [
    "GRACE_S",
    "Rows",
    "Turns",
    "answered",
    "check_place",
    "copy_rows",
    "memory_like",
    "merge",
    "pass_on_powers",
    "pick",
    "select",
]

#: Seconds past its deadline in which a wrapped store may still answer; then its call is cancelled.
GRACE_S = 0.05

#: intp: indices of some keys of a batch, each once, ascending.
Rows = npt.NDArray[np.intp]

_TURN_BYTES = 1 << 20  # copied between two checkpoints: about 0.1 ms of the loop's time
_KEY_COST = 1 << 12  # a key takes about as long as copying this many bytes


def check_place(url: URL) -> None:
    """Raises :class:`~kvpool.errors.ConfigError` if a wrapper's URL has more than options."""
    if url.host or url.port is not None or url.username or url.path.strip("/"):
        raise ConfigError(f"{url}: a {url.scheme} store is written {url.scheme}://?option=value, with the URL it wraps")


def pass_on_powers(wrapper: Store, inner: Store) -> None:
    """Give ``wrapper`` the optional powers of ``inner`` as they are, but for those that it has itself."""
    for name, power in (
        ("scan", SupportsScan),
        ("clear", SupportsClear),
        ("diagnose", SupportsDiagnosis),
        ("missing", SupportsMissing),
    ):
        if isinstance(inner, power) and not hasattr(type(wrapper), name):
            setattr(wrapper, name, getattr(inner, name))
    if wrapper.capabilities.zero_copy and isinstance(inner, SupportsRegister):
        setattr(wrapper, "register", inner.register)  # noqa: B010  # an attribute that the class does not have


def pick(keys: Sequence[str], rows: Rows) -> Sequence[str]:
    """The keys of these rows."""
    index: list[int] = rows.tolist()
    return keys if len(index) == len(keys) else [keys[i] for i in index]


def select(buffers: Buffers, rows: Rows) -> Buffers:
    """The memory of these rows."""
    return buffers if len(rows) == len(buffers) else buffers.select(rows)


def merge(results: Results, rows: Rows, part: Results) -> None:
    """Write the results of these rows over those of the whole batch."""
    results.status[rows] = part.status
    results.nbytes[rows] = part.nbytes
    for i in rows.tolist() if results.errors else ():
        results.errors.pop(i, None)
    results.errors.update({int(rows[i]): error for i, error in part.errors.items()})


def answered(results: Results) -> bool:
    """Whether the store said anything about any key of a batch (which is not empty): then it is alive."""
    return not np.isin(results.status, (Status.FAILED, Status.TIMED_OUT)).all()


def memory_like(buffers: Buffers) -> Buffers:
    """New memory for values of the same sizes, one piece each."""
    ends = np.cumsum(buffers.nbytes)
    region = Region.of(np.empty(int(ends[-1]) if len(ends) else 0, np.uint8))
    return Buffers.single(region, ends - buffers.nbytes, buffers.nbytes)


async def copy_rows(source: Buffers, target: Buffers, rows: Rows) -> None:
    """Copy values between host memory of any pieces; the loop gets a turn for each MiB."""
    turns = Turns()
    for i in rows.tolist():
        await turns.take(_KEY_COST)
        for a, b in _matched(source.views(i), target.views(i)):
            await turns.take(len(a))
            np.copyto(b, a)


class Turns:
    """Gives the loop a turn for each so many bytes of work, and notices there that the deadline has passed."""

    def __init__(self, deadline: float = math.inf, bytes_per_turn: int = _TURN_BYTES) -> None:
        self._deadline = deadline
        self._bytes_per_turn = self._left = bytes_per_turn
        self._late = False

    async def take(self, nbytes: int) -> bool:
        """About to do this much. False: the deadline has passed."""
        self._left -= nbytes
        if self._left < 0:
            self._left = self._bytes_per_turn - nbytes
            await anyio.lowlevel.checkpoint()
            self._late = anyio.current_time() >= self._deadline
        return not self._late


def _matched(
    source: Iterable[memoryview], target: Iterable[memoryview]
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Spans of equal length, up to a MiB each, that make up two values of the same size."""
    there = iter(target)
    b = np.empty(0, np.uint8)
    for piece in source:
        a = np.frombuffer(piece, np.uint8)
        while len(a):
            if not len(b):
                b = np.frombuffer(next(there), np.uint8)
            n = min(len(a), len(b), _TURN_BYTES)
            yield a[:n], b[:n]
            a, b = a[n:], b[n:]
