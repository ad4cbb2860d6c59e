"""The hit search written down from its definition, slow and plain, and what tests of the real one share.

A hit of L tokens is possible when every group can go on from L: the tokens that the next one attends to (for a Mamba
group: the state) lie in chunks that are present. It is a multiple of the alignment and does not cover the last token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kvpool.coordinator import Coordinator, Hit, Probe
from kvpool.keys import KeySpace, Namespace
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.store import ABSENT, PRESENT, Presence
from kvpool.tokens import ChunkedTokenDatabase

#: For each group, the hash indices under which something is stored.
Stored = Mapping[int, Set[int]]


def attended(group: CacheGroup, length: int) -> range:
    """The earlier tokens that the token behind ``length`` tokens attends to."""
    if group.kind is Kind.SLIDING_WINDOW:
        assert group.window is not None
        return range(max(0, length - group.window + 1), length)
    if group.kind is Kind.CHUNKED_LOCAL:
        assert group.chunk is not None
        return range(length // group.chunk * group.chunk, length)
    return range(length)


def serves(spec: CacheSpec, index: int, length: int, stored: Set[int], limit: int, local_tokens: int = 0) -> bool:
    """Whether one group can go on from ``length``, with what is stored and what the engine holds."""
    group, hash_block = spec.groups[index], spec.hash_block_size
    block = group.block_size
    if group.kind is Kind.MAMBA:
        return (length % block == 0 or spec.partial_hits) and length // hash_block - 1 in stored
    inside = spec.partial_hits and group.kind.dense and block > hash_block
    if length % block and not inside:
        return False
    tokens = set(attended(group, length))
    if group.kind is Kind.SLIDING_WINDOW:
        tokens.add(length - 1)  # with a window of 1 nothing is attended to, but the place must be known to be stored
    margin = (hash_block if inside else block) if spec.eagle[index] else 0  # the drafter's block is computed again
    tokens |= set(range(length, length + margin))
    if length + margin > limit:
        return False
    end = length + margin
    for chunk in sorted({t // block for t in tokens}):
        if chunk < local_tokens // block:
            continue
        whole = (chunk + 1) * block // hash_block - 1
        used = min((chunk + 1) * block, end) // hash_block - 1
        names = range(used, min(whole, limit // hash_block - 1) + 1) if inside else [whole]
        if not any(i in stored for i in names):
            return False
    return True


def longest_hit(spec: CacheSpec, num_tokens: int, num_hashes: int, stored: Stored, local_tokens: int = 0) -> int:
    """The definition: try every length from the longest down."""
    limit = min(num_tokens // spec.alignment * spec.alignment, num_hashes * spec.hash_block_size)
    for length in range((num_tokens - 1) // spec.alignment * spec.alignment, local_tokens, -spec.alignment):
        if all(serves(spec, i, length, stored[i], limit, local_tokens) for i in spec.cached_groups):
            return length
    return 0


@dataclass
class Trace:
    """One driven search: the answer, and what was asked in each wave, as (group, hash index)."""

    hit: Hit
    waves: list[list[tuple[int, int]]]

    @property
    def asked(self) -> list[tuple[int, int]]:
        return [key for wave in self.waves for key in wave]


def drive(
    spec: CacheSpec,
    num_tokens: int,
    stored: Stored,
    *,
    num_hashes: int | None = None,
    local_tokens: int = 0,
    absent: int = ABSENT,
    on_probe: Callable[[Probe], object] = lambda probe: None,
) -> Trace:
    """Run a search against a dict; ``on_probe`` sees each probe."""
    count = num_tokens // spec.hash_block_size if num_hashes is None else num_hashes
    search = Coordinator(spec).search(num_tokens, count, local_tokens=local_tokens)
    waves = []
    try:
        probes = next(search)
        while True:
            assert probes, "an empty wave"
            assert len({p.group for p in probes}) == len(probes), "one probe a group and wave"
            for probe in probes:
                on_probe(probe)
            waves.append([(p.group, i) for p in probes for i in p.hash_ids.tolist()])
            answers: list[Presence] = [
                np.array([PRESENT if i in stored[p.group] else absent for i in p.hash_ids.tolist()], np.uint8)
                for p in probes
            ]
            probes = search.send(answers)
    except StopIteration as done:
        return Trace(done.value, waves)


def everything(spec: CacheSpec, num_tokens: int, num_hashes: int | None = None) -> dict[int, set[int]]:
    """All that the masks allow to ask for."""
    count = num_tokens // spec.hash_block_size if num_hashes is None else num_hashes
    found: dict[int, set[int]] = {i: set() for i in range(len(spec.groups))}
    for probe in Coordinator(spec).everything(num_tokens, count):
        found[probe.group] = set(probe.hash_ids.tolist())
    return found


@st.composite
def specs(draw: st.DrawFn, *, eagle: bool = True, partial: bool = True, max_groups: int = 4) -> CacheSpec:
    """Any combination of groups that kvpool takes."""
    hash_block = draw(st.sampled_from([1, 2, 4]))
    blocks = st.sampled_from([1, 2, 4, 8]).map(lambda ratio: hash_block * ratio)
    use_eagle = eagle and draw(st.booleans())
    kinds = [Kind.FULL, Kind.MLA, Kind.SLIDING_WINDOW, Kind.MAMBA]
    groups = []
    for _ in range(draw(st.integers(1, max_groups))):
        kind, block = draw(st.sampled_from(kinds if use_eagle else [*kinds, Kind.CHUNKED_LOCAL])), draw(blocks)
        groups.append(
            CacheGroup(
                kind,
                block,
                window=draw(st.integers(1, 6 * block)) if kind is Kind.SLIDING_WINDOW else None,
                chunk=draw(st.integers(1, 6 * block)) if kind is Kind.CHUNKED_LOCAL else None,
                eagle=use_eagle and draw(st.booleans()),
            )
        )
    if draw(st.integers(0, 9)) == 0:
        groups.insert(draw(st.integers(0, len(groups))), CacheGroup(Kind.FULL, 3, cacheable=False))
    return CacheSpec(
        tuple(groups),
        hash_block,
        use_eagle=use_eagle,
        partial_hits=partial and draw(st.booleans()),
    )


@st.composite
def patterns(draw: st.DrawFn, spec: CacheSpec, num_tokens: int) -> dict[int, set[int]]:
    """What may be stored: a prefix in each group, with holes, islands, and sparse groups that keep few places."""
    count = num_tokens // spec.hash_block_size
    rng = random.Random(draw(st.integers(0, 2**32)))
    stored = {}
    reach = draw(st.floats(0, 1.2))
    for i, group in enumerate(spec.groups):
        end = count * min(1.0, reach * draw(st.sampled_from([1.0, 1.0, 0.9, 0.5])))
        holes, islands = draw(st.sampled_from([0, 0, 0.02, 0.3, 0.9])), draw(st.sampled_from([0, 0, 0.1, 0.5]))
        if group.kind.dense and draw(st.booleans()):
            holes = 0
        stored[i] = {x for x in range(count) if rng.random() >= (holes if x < end else 1 - islands)}
    return stored


def assert_loadable(hit: Hit, spec: CacheSpec, num_tokens: int, stored: Stored, local: int) -> None:
    """All that a hit loads is stored."""
    database = ChunkedTokenDatabase(spec, KeySpace(Namespace.of({}), spec))
    for group in spec.cached_groups:
        chunks = database.load_chunks(group, hit, local)
        assert set(chunks.hash_ids.tolist()) <= stored[group], f"group {group} cannot load what was hit"
