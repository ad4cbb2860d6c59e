"""Addresses of blocks as plain Python ints, for native clients that take nested lists.

A block's addresses never change while an engine's memory stands, so each block's row is made once and kept, within a
stated budget: turning 2,258 x 100 numpy integers into Python ints takes about 10 ms, finding 2,258 rows again 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.memory import BlockLayout, Buffers

__all__ = ["AddressRows"]

#: Bytes that one kept address takes: an int object above 2**30 and its list slot.
_BYTES_PER_ADDRESS = 40
#: Bytes of a kept row beside: the list and its rounding, the int that is its key, and the dict's entry (a dict that has
#: just grown is one third full: three places of 4 bytes and two of 24 an entry).
_BYTES_PER_ROW = 56 + 8 + 32 + 3 * 4 + 2 * 24


class AddressRows:
    """The address row of each block of one layout, kept for at most ``budget_bytes`` (64 MiB unless said otherwise).

    Rows of blocks that no longer fit are made again each time. Not thread-safe.
    """

    def __init__(self, layout: BlockLayout, budget_bytes: int = 64 << 20) -> None:
        self.layout = layout
        self.budget_bytes = budget_bytes
        self.row_bytes = _BYTES_PER_ROW + _BYTES_PER_ADDRESS * len(layout.region)
        self._room = budget_bytes // self.row_bytes
        self._rows: dict[int, list[int]] = {}
        base = np.array([r.address for r in layout.regions], np.int64)
        self._first = layout.offsets + base[layout.region]
        self._sizes: list[int] = layout.sizes.tolist()

    @property
    def kept_bytes(self) -> int:
        """Memory held for kept rows."""
        return len(self._rows) * self.row_bytes

    def lists(self, block_ids: npt.ArrayLike) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of chunks, one list a chunk, pieces block by block.

        ``block_ids``: [n], or [n, k] with k blocks a chunk. The lists are shared between calls: read, do not change.
        Raises LayoutError for an id that is no block.
        """
        ids = self.layout.check(block_ids)
        if not ids.size:
            return [], []
        rows, k = self._lookup(ids.ravel().tolist()), 1 if ids.ndim == 1 else ids.shape[1]
        if k > 1:
            rows = [[a for row in rows[i : i + k] for a in row] for i in range(0, len(rows), k)]
        return rows, [self._sizes * k] * len(ids)

    def buffers(self, block_ids: npt.ArrayLike) -> Buffers:
        """Like :meth:`lists`, as :class:`~kvpool.memory.Buffers` that have kept rows as their ``lists``."""
        buffers = self.layout.buffers(block_ids)
        vars(buffers)["lists"] = self.lists(block_ids)  # what the cached property would make anew
        return buffers

    def _lookup(self, ids: Sequence[int]) -> list[list[int]]:
        kept = self._rows
        try:
            return list(map(kept.__getitem__, ids))
        except KeyError:
            pass
        missing = [i for i in dict.fromkeys(ids) if i not in kept]
        made: dict[int, list[int]] = dict(
            zip(missing, (self._first + np.array(missing)[:, None] * self.layout.strides).tolist(), strict=True)
        )
        kept.update((i, made[i]) for i in missing[: max(self._room - len(kept), 0)])
        return [kept.get(i) or made[i] for i in ids]
