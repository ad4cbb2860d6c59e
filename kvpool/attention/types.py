"""Words shared by the attention kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Lengths", "Mask", "Reuse"]

#: One length in tokens, or many.
Lengths = TypeVar("Lengths", int, npt.NDArray[np.intp])
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where later requests resume, as far as it decides what is kept.

    ``common_block``: least common multiple of all block sizes, tokens; whole-block hits end on its multiples.
    ``eagle``: the group is read by a drafter, so a hit also needs the block above it. ``retention``: None: a later
    request may resume at every multiple of ``common_block``; n: at every multiple of n; 0: at none of them.
    ``resume_at``: token counts at which a replay of the prompt resumes, kept whatever the retention.
    """

    common_block: int
    eagle: bool = False
    retention: int | None = None
    resume_at: tuple[int, ...] = ()

    @property
    def segment(self) -> int:
        """Tokens between regular places to resume at; 0 for none."""
        return self.common_block if self.retention is None else self.retention
