"""What a model's KV cache consists of: groups of layers, each with its attention kind and block size.

Everything the hit search decides follows from a :class:`CacheSpec`. What kvpool cannot do right it refuses here, at
construction, with every reason in one message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from kvpool.errors import ConfigError, UnsupportedError
from kvpool.ranks import Parallel

__all__ = ["CacheGroup", "CacheSpec", "Kind"]


class Kind(StrEnum):
    """How the layers of a group attend to earlier tokens."""

    FULL = "full"  #: to all of them
    MLA = "mla"  #: to all of them, through one latent shared by all heads
    SLIDING_WINDOW = "sliding_window"  #: to the last ``window``, itself included
    CHUNKED_LOCAL = "chunked_local"  #: to those in the same span of ``chunk`` tokens
    MAMBA = "mamba"  #: not at all: one recurrent state stands for the whole prefix

    @property
    def dense(self) -> bool:
        """Whether a hit needs every chunk from the first on."""
        return self in (Kind.FULL, Kind.MLA)


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table.

    ``block_size``: tokens a block as the hit search sees it (with decode context parallelism: of all ranks together).
    ``window`` / ``chunk``: tokens, for the kind that has one. ``shards``: values a chunk has over all ranks; it is
    present only when all are (:meth:`kvpool.ranks.Parallel.shards`). ``eagle``: a drafter reads this group, so
    a hit also needs the block above it, which is computed again. ``cacheable``: False for scratch memory that is never
    stored, looked up or loaded. ``mamba_mode``: the engine's state mode; only "align" can be cached.
    """

    kind: Kind
    block_size: int
    window: int | None = None
    chunk: int | None = None
    shards: int = 1
    eagle: bool = False
    cacheable: bool = True
    mamba_mode: str = "align"

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Kind) and self.kind in tuple(Kind):
            object.__setattr__(self, "kind", Kind(self.kind))

    def spread(
        self, parallel: Parallel, kv_heads: int | None = None, stages: Sequence[int] | None = None
    ) -> CacheGroup:
        """This group over all ranks of ``parallel``.

        With decode context parallelism each rank holds a part of every attention block, so one chunk covers the blocks
        of all of them; a Mamba state is whole on each rank. ``kv_heads``: of the whole model; only MLA and Mamba do
        without. ``stages``: the pipeline stages that hold layers of the group. Raises ConfigError.
        """
        if kv_heads is None and self.kind not in (Kind.MLA, Kind.MAMBA):
            raise ConfigError(f"a {self.kind} group over several ranks needs kv_heads: the KV heads of the whole model")
        heads = {Kind.MLA: 1, Kind.MAMBA: None}.get(self.kind, kv_heads)
        scale = 1 if self.kind is Kind.MAMBA else parallel.decode_context
        return replace(self, block_size=self.block_size * scale, shards=parallel.shards(heads, stages))

    def reasons(self) -> list[str]:
        """Why this group cannot be served; empty if it can."""
        if not isinstance(self.kind, Kind):
            return [f"attention kind {self.kind!r} is not supported (supported: {', '.join(Kind)})"]
        found = []
        if self.block_size < 1:
            found.append(f"block size {self.block_size} must be positive")
        if self.shards < 1:
            found.append(f"{self.shards} shards; there must be at least one")
        for name, kind in (("window", Kind.SLIDING_WINDOW), ("chunk", Kind.CHUNKED_LOCAL)):
            value = getattr(self, name)
            if self.kind is kind and (value is None or value < 1):
                found.append(f"{kind} needs a positive {name}, not {value}")
            if self.kind is not kind and value is not None:
                found.append(f"{self.kind} has no {name}")
        if self.kind is Kind.MAMBA and self.mamba_mode != "align":
            found.append(f"Mamba mode {self.mamba_mode!r}: only 'align' keeps states at block boundaries")
        return found


@dataclass(frozen=True)
class CacheSpec:
    """All groups of a model, and the rules that hits follow.

    ``hash_block_size``: tokens a block hash covers. ``use_eagle``: a drafter is in use; if no group is flagged
    ``eagle``, all are. ``retention_interval``: how often sparse groups (sliding window, Mamba) keep a place to resume
    at: None at every alignment, 0 only where a replay of the prompt resumes, n every n tokens. ``partial_hits``: hits
    may end on a hash block inside a block. Raises UnsupportedError with every reason.
    """

    groups: tuple[CacheGroup, ...]
    hash_block_size: int
    use_eagle: bool = False
    retention_interval: int | None = None
    partial_hits: bool = False
    parallel: Parallel = field(default=Parallel())

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        found = [f"group {i}: {reason}" for i, group in enumerate(self.groups) for reason in group.reasons()]
        cached = [(i, g) for i, g in enumerate(self.groups) if g.cacheable and not g.reasons()]
        if not any(g.cacheable for g in self.groups):
            found.append("no group can be cached")
        if self.hash_block_size < 1:
            found.append(f"hash block size {self.hash_block_size} must be positive")
        else:
            found += [
                f"group {i}: block size {g.block_size} is not a multiple of the hash block size {self.hash_block_size}"
                for i, g in cached
                if g.block_size % self.hash_block_size
            ]
        if len(self.groups) > 1 and self.parallel.prefill_context > 1:
            found.append(f"{len(self.groups)} groups with prefill context parallelism {self.parallel.prefill_context}")
        if self.parallel.decode_context > 1:
            found += [
                f"group {i}: {g.kind} with decode context parallelism {self.parallel.decode_context}"
                for i, g in cached
                if g.kind in (Kind.SLIDING_WINDOW, Kind.CHUNKED_LOCAL)
            ]
            whole = (
                self.parallel.tensor * self.parallel.prefill_context
            )  # shards of one pipeline stage: nothing is equal
            found += [
                f"group {i}: {g.shards} shards of {g.block_size} tokens over {whole} ranks with decode context "
                f"parallelism {self.parallel.decode_context}; make it with CacheGroup.spread()"
                for i, g in cached
                if g.shards % whole or (g.kind.dense and g.block_size % self.parallel.decode_context)
            ]
        if self.use_eagle or any(g.eagle for _, g in cached):
            found += [f"group {i}: {g.kind} with EAGLE" for i, g in cached if g.kind is Kind.CHUNKED_LOCAL]
        interval, lcm = self.retention_interval, math.lcm(*(g.block_size for _, g in cached))
        if interval is not None and (interval < 0 or interval % max(lcm, 1)):
            found.append(f"retention interval {interval} must be a multiple of {lcm}, the common block size, or 0")
        if found:
            raise UnsupportedError("this KV cache cannot be pooled: " + "; ".join(found))

    @cached_property
    def cached_groups(self) -> tuple[int, ...]:
        """Indices of the groups that are stored and loaded."""
        return tuple(i for i, g in enumerate(self.groups) if g.cacheable)

    @cached_property
    def common_block(self) -> int:
        """Least common multiple of the block sizes, in tokens."""
        return math.lcm(*(self.groups[i].block_size for i in self.cached_groups))

    @cached_property
    def alignment(self) -> int:
        """Tokens; every hit length is a multiple of it.

        With partial hits the hash block, but for groups whose chunks are only of use whole.
        """
        if not self.partial_hits:
            return self.common_block
        whole = [g.block_size for g in self.groups if g.cacheable and not g.kind.dense and g.kind is not Kind.MAMBA]
        return math.lcm(self.hash_block_size, *whole)

    def align(self, num_tokens: int) -> int:
        """``num_tokens`` rounded down to the alignment."""
        return num_tokens - num_tokens % self.alignment

    @cached_property
    def eagle(self) -> tuple[bool, ...]:
        """For each group, whether a hit needs the block above it.

        Groups of one shape are read together, so one flag holds for all of them. Mamba layers have no drafter.
        """
        flags = [g.eagle and g.cacheable for g in self.groups]
        if self.use_eagle and not any(flags):
            flags = [g.cacheable for g in self.groups]
        shapes = {_shape(g) for g, flag in zip(self.groups, flags, strict=True) if flag}
        return tuple(g.cacheable and _shape(g) in shapes for g in self.groups)

    def ends_inside(self, group: int) -> bool:
        """Whether hits may end inside a chunk of ``group``, which is then stored under the hash it ends at.

        Dense chunks only grow, so one stored under a later hash serves as well.
        """
        info = self.groups[group]
        return self.partial_hits and info.kind.dense and info.block_size > self.hash_block_size

    def eagle_margin(self, group: int) -> int:
        """Tokens above a hit that must be stored too, because the drafter has them computed again."""
        if not self.eagle[group] or self.groups[group].kind is Kind.MAMBA:
            return 0
        return self.hash_block_size if self.ends_inside(group) else self.groups[group].block_size

    def hashes_per_block(self, group: int) -> int:
        """Hash blocks in one block of ``group``."""
        return self.groups[group].block_size // self.hash_block_size


def _shape(group: CacheGroup) -> tuple[Kind, int, int | None, int | None]:
    return group.kind, group.block_size, group.window, group.chunk
