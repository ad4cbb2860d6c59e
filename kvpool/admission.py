"""Which chunks are worth saving: all, or those that were wanted before.

A prompt that comes once costs a save and gives nothing. With ``uses`` = 2 a chunk is stored when it is to be saved for
the second time, by any request of this engine; since chunks are named by the whole prefix, the prefix has come back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Admission"]


class Admission:
    """Counts how often each chunk was to be saved; of at most ``remembered`` chunks, the latest."""

    def __init__(self, uses: int = 1, *, remembered: int = 262_144) -> None:
        self._uses = uses
        self._remembered = remembered
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def admit(self, digests: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """bool[n]: which of these chunks to save now. Costs nothing where every chunk is saved at once."""
        if self._uses <= 1:
            return np.ones(len(digests), np.bool_)
        admitted = np.zeros(len(digests), np.bool_)
        for i, digest in enumerate(digests):
            # Eight bytes tell chunks apart well enough for a policy; a collision costs one early save.
            key = digest[:8]
            uses = self._seen.get(key, 0) + 1
            self._seen[key] = uses
            self._seen.move_to_end(key)
            admitted[i] = uses >= self._uses
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)
        return admitted
