"""Request traces: JSON lines, read and checked. The reading of lines is pure; :meth:`Trace.load` opens a file.

One object a line: ``timestamp`` (milliseconds from the start), ``input_length`` and ``output_length`` (tokens; not
needed here), ``hash_ids``: one id for each 512 tokens of the prompt. An id stands for its block and all that comes
before it, as a chained hash does; equal ids are the same reusable block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.errors import KVPoolError

__all__ = ["BLOCK_TOKENS", "Trace", "TraceError"]

#: Tokens of one block of a trace.
BLOCK_TOKENS = 512
_MAX_ID = 2**63 - 1
_MAX_LINE_BYTES = 64 << 20  # a prompt of some billion tokens; a longer line is no trace


class TraceError(KVPoolError):
    """A file that is not a trace; the message names it, the line and what is wrong there."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order they arrived.

    ``ids``: int64, the block ids of all requests back to back. ``ends``: intp[requests], where each request's ids end
    in it. ``timestamps``: float64[requests], milliseconds. ``lines``: the line number of each request. ``digest``: of
    the whole file, which names the prompts that the ids stand for.
    """

    name: str
    ids: npt.NDArray[np.int64]
    ends: npt.NDArray[np.intp]
    timestamps: npt.NDArray[np.float64]
    lines: npt.NDArray[np.intp]
    digest: str = ""

    @classmethod
    def load(cls, path: str | os.PathLike[str], requests: int | None = None) -> Self:
        """Read the first ``requests`` requests, or all, of a file or a pipe; it is read to its end, and once.

        Raises TraceError, also if it cannot be read.
        """
        name = os.path.basename(os.fspath(path))
        try:
            with open(path, "rb") as file:
                state = xxhash.xxh3_128()
                trace = cls.parse(_lines(file, state), name=name, requests=requests)
                while piece := file.read(1 << 20):
                    state.update(piece)
        except OSError as error:
            raise TraceError(f"trace {os.fspath(path)}: {error.strerror or error}") from error
        return replace(trace, digest=state.hexdigest())

    @classmethod
    def parse(cls, lines: Iterable[bytes], *, name: str = "trace", requests: int | None = None) -> Self:
        """The trace that these lines hold; blank ones are passed over. Raises TraceError."""
        ids: list[int] = []
        ends: list[int] = []
        timestamps: list[float] = []
        numbers: list[int] = []
        full = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        for number, line in islice(full, requests):
            try:
                timestamp, listed = _request(line)
            except ValueError as error:
                raise TraceError(f"trace {name}, line {number}: {error}") from None
            ids += listed
            ends.append(len(ids))
            timestamps.append(timestamp)
            numbers.append(number)
        if not ends:
            raise TraceError(f"trace {name}: there is no request in it; {_FORM}")
        return cls(
            name,
            np.array(ids, np.int64),
            np.array(ends, np.intp),
            np.array(timestamps, np.float64),
            np.array(numbers, np.intp),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def request(self, i: int) -> npt.NDArray[np.int64]:
        """The block ids of request ``i``."""
        return self.ids[self.ends[i - 1] if i else 0 : self.ends[i]]

    @property
    def longest(self) -> int:
        """Blocks of the request that has most."""
        return int(np.diff(self.ends, prepend=0).max())

    @property
    def unique(self) -> int:
        """Different blocks."""
        return len(np.unique(self.ids))

    def ideal_hits(self) -> int:
        """Blocks that hit when requests run one after another over a store that was empty and has no limit."""
        seen: set[int] = set()
        hits = 0
        for i in range(len(self)):
            ids = self.request(i).tolist()
            hits += next((k for k, x in enumerate(ids) if x not in seen), len(ids))
            seen.update(ids)
        return hits


_FORM = 'a trace has one JSON object a line, such as {"timestamp": 0, "hash_ids": [0, 1, 2]}'


def _request(line: bytes) -> tuple[float, list[int]]:
    """Timestamp and block ids of one line. Raises ValueError that says what is wrong."""
    if len(line) > _MAX_LINE_BYTES:
        raise ValueError(f"longer than {_MAX_LINE_BYTES} bytes; {_FORM}")
    try:
        found = json.loads(line.strip())
    except UnicodeDecodeError:
        raise ValueError(f"not text; {_FORM}") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise ValueError(f"not JSON: {what} at character {error.pos + 1}; {_FORM}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, nesting without end
        raise ValueError(f"not a request; {_FORM}") from None
    if not isinstance(found, dict) or "hash_ids" not in found or "timestamp" not in found:
        raise ValueError(f"no object with timestamp and hash_ids; {_FORM}")
    timestamp, ids = found["timestamp"], found["hash_ids"]
    if type(timestamp) not in (int, float) or not 0 <= timestamp <= _MAX_ID:
        raise ValueError(f"timestamp {_shown(timestamp)}: must be milliseconds, 0 or more")
    if not isinstance(ids, list) or any(type(x) is not int or not 0 <= x <= _MAX_ID for x in ids):
        raise ValueError(f"hash_ids {_shown(ids)}: must be a list of whole numbers from 0 to 2^63 - 1")
    return float(timestamp), ids


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _lines(file: BinaryIO, state: xxhash.xxh3_128) -> Iterator[bytes]:
    """Lines, each cut off one byte behind the limit: a file without line ends is not read into memory whole.

    ``state`` becomes the digest of all that was read.
    """
    while line := file.readline(_MAX_LINE_BYTES + 1):
        state.update(line)
        yield line
