"""One hit search: a generator that asks for little, in at most :data:`MAX_WAVES` waves. No I/O.

The hit is the longest length, a multiple of the alignment and below the last token, that every group can serve from
what is present. Two phases lead to it:

1. *Dense* groups (full attention, MLA) need every chunk from the first on, so their run of present chunks bounds the
   hit. Wave 1 asks for some dozens of chunks, geometrically spaced; wave 2 for all that seem present and for finer
   samples of the gap behind them; wave 3 for the rest of the gap. Then the run is exact, whatever the pattern.
2. *Candidates* are the lengths that the dense groups allow. The other groups are asked for what the longest few need
   (the longest of all already in wave 1, as whole-prompt hits are common), then for batches of shorter ones, and in
   the last wave for all that is still open.

Nothing is asked twice, nothing outside the lookup masks, nothing that the engine's own prefix cache holds.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.attention import Lengths, needed
from kvpool.errors import StoreError
from kvpool.spec import CacheSpec, Kind
from kvpool.store import PRESENT, Presence

__all__ = ["MAX_WAVES", "Hit", "Probe", "Search", "search"]

Ids = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

#: Most waves a search takes, for any presence pattern.
MAX_WAVES: Final = 6
_DENSE_WAVES: Final = 3
#: Chunks of a dense group asked for in one wave of samples: what a miss costs.
_SAMPLES: Final = 64
_SPACING: Final = np.linspace(0.0, 1.0, _SAMPLES)
#: Candidates asked for in full in the first wave of candidates; each next one takes eight times as many.
_BATCH: Final = 4
#: Shorter candidates of which one key is asked for beside a batch, of the group that serves fewest.
_SCOUTS: Final = 1024
#: States of a hash in ``_Group.known``, beside PRESENT.
_OPEN, _ABSENT = 0, 2


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask whether ``group`` has something stored under each of these hashes (intp[n], indices into the BlockHashes).

    The answer is one presence entry a hash. A group of several shards is present only where every shard is.
    """

    group: int
    hash_ids: Ids


@dataclass(frozen=True, slots=True)
class Hit:
    """``length`` tokens can be served; 0 is a miss.

    ``boundaries``: for each group, the token count under whose hash its last chunk is stored; 0 without a hit and for
    groups that are not cached.
    """

    length: int
    boundaries: tuple[int, ...]


Answers: TypeAlias = Sequence[Presence]
Search: TypeAlias = Generator[list[Probe], Answers, Hit]


class _Group:
    """What is known of one group during one search.

    ``known``: uint8, by hash index. ``units``: the view of it in which this group's needs are counted: every hash where
    hits may end inside a chunk (``fine``, or a Mamba state), else the last hash of each chunk.
    """

    def __init__(self, spec: CacheSpec, index: int, limit: int, local_tokens: int) -> None:
        self.index, self.group = index, spec.groups[index]
        kind, self.block, self.hash_block = self.group.kind, self.group.block_size, spec.hash_block_size
        self.per_chunk = self.block // self.hash_block
        self.mamba, self.dense = kind is Kind.MAMBA, kind.dense
        self.fine, self.margin = spec.ends_inside(index), spec.eagle_margin(index)
        self.known = np.zeros(limit // self.hash_block, np.uint8)
        self.chunks = self.known[self.per_chunk - 1 :: self.per_chunk]
        by_hash = spec.partial_hits and (self.dense or self.mamba)
        self.unit_hashes = 1 if by_hash else self.per_chunk
        self.units = self.known if by_hash else self.chunks
        held = local_tokens // self.block  # by the engine; a hit is longer, so no Mamba state among them is of use
        self.chunks[:held] = PRESENT
        self.run, self.run_end = min(held, len(self.chunks)), len(self.chunks)

    def hash_ids(self, units: Ids) -> Ids:
        return units if self.unit_hashes == 1 else (units + 1) * self.unit_hashes - 1

    # -- the run of a dense group: at least ``run`` chunks from the first on are present, at most ``run_end``

    def limit_run(self, length: int) -> None:
        """No hit is longer than ``length``: chunks beyond what it needs do not matter."""
        self.run_end = max(self.run, min(self.run_end, (length + self.margin) // self.block))

    def narrow(self) -> None:
        """Move ``run`` and ``run_end`` together as far as the answers allow."""
        absent = _where(self.chunks[self.run : self.run_end] == _ABSENT)
        if len(absent):
            self.run_end = self.run + int(absent[0])
        missing = _where(self.chunks[self.run : self.run_end] != PRESENT)
        self.run = self.run + int(missing[0]) if len(missing) else self.run_end

    @property
    def bound(self) -> int:
        """Tokens; a hit cannot be longer, from what is known of the run."""
        inside = self.block - self.hash_block if self.fine else 0
        return self.run_end * self.block + inside - self.margin

    def ask_run(self, wave: int) -> Ids:
        """Hash indices to ask for next: all up to the last present sample, and a part of the gap behind it."""
        present = _where(self.chunks[self.run : self.run_end] == PRESENT)
        sure = self.run + (int(present[-1]) + 1 if len(present) else 0)
        gap = self.run_end - sure
        if gap <= _SAMPLES or wave >= _DENSE_WAVES - 1:
            ahead = np.arange(gap)
        elif wave == 0:  # finer towards the front: the waste of a wrong guess stays a fixed share of the hit
            ahead = _ascending(np.rint(gap**_SPACING).astype(np.intp)) - 1
        else:
            ahead = _ascending(np.rint((gap - 1) * _SPACING).astype(np.intp))
        chunks = sure + ahead
        if sure > self.run:
            chunks = np.concatenate([np.arange(self.run, sure), chunks])
        chunks = chunks[self.chunks[chunks] == _OPEN]
        ids: Ids = (chunks + 1) * self.per_chunk - 1
        return ids

    # -- what hits of given lengths use, in units; for dense groups only the chunk a hit ends in

    def spans(self, lengths: Lengths) -> tuple[Lengths, Lengths]:
        """First and one past the last unit for one length, or for each of many."""
        if self.mamba:
            last = lengths // (self.hash_block * self.unit_hashes)
            return last - 1, last
        if self.dense:
            return lengths // self.hash_block - 1, -(-(lengths + self.margin) // self.block) * self.per_chunk
        first, end = needed(self.group, lengths)
        return first, end + self.margin // self.block

    def ask_spans(self, lengths: Ids) -> Ids:
        """Hash indices not asked for yet that hits of these ascending lengths use."""
        if len(lengths) == 1:  # the common case, four times as fast in plain ints
            base, stop = self.spans(int(lengths[0]))
            return self.hash_ids(_where(self.units[base:stop] == _OPEN) + base)
        first, end = self.spans(lengths)
        base, stop = int(first[0]), min(int(end[-1]), len(self.units))
        if stop <= base:
            return first[:0]
        size = stop - base + 1
        depth = np.bincount(first - base, minlength=size) - np.bincount(np.minimum(end, stop) - base, minlength=size)
        wanted = (np.cumsum(depth[:-1]) > 0) & (self.units[base:stop] == _OPEN)
        return self.hash_ids(_where(wanted) + base)

    def ask_scouts(self, lengths: Ids) -> Ids:
        """For each length one hash index that its hit cannot do without."""
        ends = np.minimum(self.spans(lengths)[1], len(self.units)) - 1
        return self.hash_ids(ends[self.units[ends] == _OPEN])

    def judge(self, lengths: Ids) -> tuple[Flags, Flags]:
        """For each ascending length: may this group serve it; and is that proven, with nothing left to ask?"""
        first, end = self.spans(lengths)
        base, stop = int(first[0]), min(int(end[-1]), len(self.units))
        state = self.units[base:stop]
        first, end = first - base, np.maximum(np.minimum(end, stop) - base, first - base)
        settled = _none(state == _OPEN, first, end)
        if not self.dense:
            may = _none(state == _ABSENT, first, end)
            return may, may & settled
        # The chunk behind the run serves a hit that ends inside it if it is stored under that end or a later one.
        tail = self.known[self.run * self.per_chunk : (self.run + 1) * self.per_chunk]
        last_may = _where(tail != _ABSENT)
        reach = self.run * self.per_chunk + (int(last_may[-1]) + 1 if len(last_may) else 0)
        may = (lengths + self.margin) // self.hash_block <= reach
        return may, may & settled

    def boundary(self, length: int) -> int:
        """The token count under whose hash the last chunk of a hit is stored: the nearest one that is."""
        if not self.fine:
            return length
        first = length // self.hash_block - 1
        chunk_end = -(-length // self.block) * self.per_chunk
        return (first + 1 + int(np.argmax(self.known[first:chunk_end] == PRESENT))) * self.hash_block


def _where(flags: Flags) -> Ids:
    """Where flags are set (np.flatnonzero without its three layers of Python)."""
    return flags.nonzero()[0]


def _ascending(values: Ids) -> Ids:
    """Without repetitions; ``values`` never fall."""
    keep = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=keep[1:])
    return values[keep]


def _none(flags: Flags, first: Ids, end: Ids) -> Flags:
    """For each span, whether no flag in it is set."""
    before = np.zeros(len(flags) + 1, np.int32)
    np.cumsum(flags, out=before[1:])
    return np.equal(before[end], before[first])


_Groups: TypeAlias = dict[int, _Group]


def _union(a: Ids | None, b: Ids) -> Ids:
    """Both without repetitions, ascending."""
    return b if a is None or not len(a) else np.union1d(a, b) if len(b) else a


def search(spec: CacheSpec, num_tokens: int, num_hashes: int, local_tokens: int = 0) -> Search:
    """Search as :meth:`kvpool.coordinator.Coordinator.search` describes."""
    # Plain ints: numpy's unsigned ones wrap below 0.
    num_tokens, num_hashes, local_tokens = int(num_tokens), int(num_hashes), max(int(local_tokens), 0)
    miss = Hit(0, (0,) * len(spec.groups))
    limit = max(min(spec.align(num_tokens), num_hashes * spec.hash_block_size), 0)
    groups = {i: _Group(spec, i, limit, local_tokens) for i in spec.cached_groups}
    top = spec.align(min(num_tokens - 1, limit - max(g.margin for g in groups.values())))
    if top <= local_tokens:
        return miss
    top, waves = yield from _dense_phase(spec, groups, top)
    first = spec.align(local_tokens) + spec.alignment
    length = yield from _candidate_phase(groups, np.arange(first, top + 1, spec.alignment), MAX_WAVES - waves)
    if not length:
        return miss
    return Hit(length, tuple(groups[i].boundary(length) if i in groups else 0 for i in range(len(spec.groups))))


def _dense_phase(spec: CacheSpec, groups: _Groups, top: int) -> Generator[list[Probe], Answers, tuple[int, int]]:
    """The longest hit that the dense groups allow, and the waves it took: at most three."""
    dense = [g for g in groups.values() if g.dense]
    waves = 0
    for g in dense:
        g.limit_run(top)
    while any(g.run < g.run_end for g in dense):
        asked = {g.index: g.ask_run(waves) for g in dense}
        if waves == 0:
            for g in groups.values():
                if g.fine or not g.dense:
                    asked[g.index] = _union(asked.get(g.index), g.ask_spans(np.array([top])))
        yield from _ask(groups, asked)
        waves += 1
        for g in dense:
            g.narrow()
        top = spec.align(min(top, *(g.bound for g in dense)))
        for g in dense:
            g.limit_run(top)
    return top, waves


def _candidate_phase(groups: _Groups, candidates: Ids, waves: int) -> Generator[list[Probe], Answers, int]:
    """The longest of these ascending lengths that every group serves, or 0, in at most ``waves`` waves."""
    judges = [g for g in groups.values() if g.fine or not g.dense]
    if not judges or not len(candidates):
        return int(candidates[-1]) if len(candidates) else 0
    size = max([_BATCH, *(g.per_chunk for g in judges if g.fine)])  # at least all ends inside one chunk
    touched = 1  # so many of the longest have been asked about, in full or by a scout
    scouting = 0
    while True:
        # Drop what cannot be, and all that is shorter than the longest proven one.
        recent = candidates[-touched:]
        verdicts = [g.judge(recent) for g in judges]
        may = np.logical_and.reduce([v[0] for v in verdicts])
        proven = _where(np.logical_and.reduce([v[1] for v in verdicts]))
        if len(proven):
            candidates = recent[proven[-1] :][may[proven[-1] :]]
            if len(candidates) == 1:
                return int(candidates[0])
        else:
            candidates = np.concatenate([candidates[:-touched], recent[may]])
            if not len(candidates):
                return 0
        size = len(candidates) if waves == 1 else min(size, len(candidates))
        asked = {g.index: g.ask_spans(candidates[-size:]) for g in judges}
        scouted = candidates[:-size][-scouting:] if scouting else candidates[:0]
        if len(scouted):
            scout = min(zip(verdicts, judges, strict=True), key=lambda pair: int(pair[0][0].sum()))[1]
            asked[scout.index] = _union(asked[scout.index], scout.ask_scouts(scouted))
        touched = size + len(scouted)
        if (yield from _ask(groups, asked)):
            waves, size, scouting = waves - 1, 8 * size, _SCOUTS


def _ask(groups: _Groups, asked: dict[int, Ids]) -> Generator[list[Probe], Answers, bool]:
    """One wave, if there is anything to ask."""
    probes = [Probe(index, ids) for index, ids in asked.items() if len(ids)]
    if not probes:
        return False
    answers = yield probes
    for probe, presence in zip(probes, answers, strict=True):
        if len(presence) != len(probe.hash_ids):
            raise StoreError(f"{len(presence)} presence entries for {len(probe.hash_ids)} keys of group {probe.group}")
        groups[probe.group].known[probe.hash_ids] = _ABSENT - np.equal(presence, PRESENT)  # UNKNOWN counts as absent
    return True
