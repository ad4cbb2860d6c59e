"""Which rank holds which part of a group's values: key shards, replicas and who stores what.

Values that are the same on several ranks (MLA, fewer KV heads than tensor-parallel ranks) exist once in the store; the
ranks that hold them share the puts between them. Every rank loads all it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.errors import ConfigError

__all__ = ["Parallel", "Rank"]


@dataclass(frozen=True)
class Rank:
    """Where one worker stands in each parallel dimension; each from 0."""

    tensor: int = 0
    pipeline: int = 0
    prefill_context: int = 0
    decode_context: int = 0


@dataclass(frozen=True)
class Parallel:
    """Sizes of the parallel dimensions.

    Decode context parallelism divides the tensor-parallel ranks: rank t stands at ``t % decode_context``. With it every
    rank's blocks differ, so nothing is replicated.
    """

    tensor: int = 1
    pipeline: int = 1
    prefill_context: int = 1
    decode_context: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "prefill_context", "decode_context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel size {name} = {getattr(self, name)} must be at least 1")
        if self.tensor % self.decode_context:
            raise ConfigError(
                f"decode context parallel size {self.decode_context} must divide the tensor size {self.tensor}"
            )

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tensor * self.pipeline * self.prefill_context

    def ranks(self) -> list[Rank]:
        """Every rank."""
        return [
            Rank(t, p, c, t % self.decode_context)
            for c in range(self.prefill_context)
            for t in range(self.tensor)
            for p in range(self.pipeline)
        ]

    def replicas(self, kv_heads: int | None) -> int:
        """How many tensor-parallel ranks hold the same bytes.

        ``kv_heads``: KV heads of the whole model; 1 for values every rank holds in full (MLA); None for state that
        differs on every rank (Mamba). Raises ConfigError if it is below 1 or the ranks cannot share that many evenly.
        """
        if kv_heads is not None and kv_heads < 1:
            raise ConfigError(f"{kv_heads} KV heads; there must be at least one")
        if kv_heads is None or self.decode_context > 1 or kv_heads >= self.tensor:
            return 1
        if self.tensor % kv_heads:
            raise ConfigError(f"{kv_heads} KV heads do not spread evenly over {self.tensor} tensor-parallel ranks")
        return self.tensor // kv_heads

    def shards(self, kv_heads: int | None, stages: Sequence[int] | None = None) -> int:
        """How many different values a chunk has over all ranks: every one must be stored for the chunk to be hit.

        ``stages``: the pipeline stages that hold layers of the group; all unless given.
        """
        held = self.pipeline if stages is None else len(stages)
        return self.tensor // self.replicas(kv_heads) * self.prefill_context * held

    def shard(self, rank: Rank, kv_heads: int | None, stages: Sequence[int] | None = None) -> int:
        """The shard that ``rank`` loads and helps to store. Raises ConfigError if its stage has no such layers."""
        held = range(self.pipeline) if stages is None else stages
        if rank.pipeline not in held:
            raise ConfigError(f"pipeline stage {rank.pipeline} holds no layers of this group (stages {list(held)} do)")
        width, column = self.tensor // self.replicas(kv_heads), rank.tensor // self.replicas(kv_heads)
        return (rank.prefill_context * width + column) * len(held) + list(held).index(rank.pipeline)

    def put_stripe(self, rank: Rank, kv_heads: int | None) -> tuple[int, int]:
        """(step, phase): ``rank`` stores the chunks with ``id % step == (phase + group) % step``."""
        step = self.replicas(kv_heads)
        return step, rank.tensor % step
