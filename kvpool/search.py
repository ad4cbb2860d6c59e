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
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.attention import Lengths, needed
from kvpool.errors import StoreError
from kvpool.spec import CacheSpec, Kind
from kvpool.store import PRESENT, Presence

__all__ = ["MAX_WAVES", "Hit", "HitSearch", "Probe", "Search"]

Ids = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

#: Most waves a search takes, for any presence pattern.
MAX_WAVES: Final = 6
_DENSE_WAVES: Final = 3
#: Where the first wave samples a dense group: each half as far again as the one before, so the waste of a wrong guess
#: stays a fixed share of the hit. What a miss costs: 24 keys of 18,000 chunks, 27 of 65,000. A table, because to work
#: the places out each time takes 10 us, as long as all else that a search does for a miss.
_LADDER: Final = np.unique(np.rint(1.5 ** np.arange(64)).astype(np.intp)) - 1
#: A gap of so many chunks of a dense group is asked for as a whole; in a larger one the second wave takes so many
#: samples, which lie so.
_SAMPLES: Final = 64
_SPACING: Final = np.linspace(0.0, 1.0, _SAMPLES)
#: Candidates asked for in full in the first wave of candidates; each next one takes eight times as many.
_BATCH: Final = 4
#: Shorter candidates of which one key is asked for beside a batch, of the group that serves fewest.
_SCOUTS: Final = 1024
#: States of a unit in ``_Group.known``, beside PRESENT.
_ABSENT, _OPEN = 0, 2


class Probe(NamedTuple):
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


class _Shape:
    """What does not change from search to search of one group. Lengths are in tokens."""

    __slots__ = ("block", "by_hash", "dense", "fine", "group", "hash_block", "index", "mamba", "margin", "per_chunk")

    def __init__(self, spec: CacheSpec, index: int) -> None:
        self.index, self.group = index, spec.groups[index]
        self.block, self.hash_block = self.group.block_size, spec.hash_block_size
        self.per_chunk = self.block // self.hash_block
        self.mamba, self.dense = self.group.kind is Kind.MAMBA, self.group.kind.dense
        self.fine, self.margin = spec.ends_inside(index), spec.eagle_margin(index)
        #: A unit is what this group's needs are counted in: every hash where hits may end inside a chunk (``fine``, or
        #: a Mamba state), else a chunk, named by its last hash.
        self.by_hash = spec.partial_hits and (self.dense or self.mamba)


class _Group:
    """What is known of one group during one search.

    ``known``: uint8, by unit. ``chunks``: the view of it with one entry a chunk.
    """

    __slots__ = ("chunks", "known", "run", "run_end", "shape")

    def __init__(self, shape: _Shape, limit: int, local_tokens: int) -> None:
        self.shape = shape
        self.known = np.empty(limit // (shape.hash_block if shape.by_hash else shape.block), np.uint8)
        self.known.fill(_OPEN)
        self.chunks = self.known[shape.per_chunk - 1 :: shape.per_chunk] if shape.by_hash else self.known
        self.run, self.run_end = 0, len(self.chunks)
        if local_tokens:  # held by the engine; a hit is longer, so no Mamba state among them is of use
            self.run = min(local_tokens // shape.block, self.run_end)
            self.chunks[: self.run] = PRESENT

    def hash_ids(self, units: Ids) -> Ids:
        shape = self.shape
        return units if shape.by_hash or shape.per_chunk == 1 else units * shape.per_chunk + (shape.per_chunk - 1)

    # -- the run of a dense group: at least ``run`` chunks from the first on are present, at most ``run_end``

    def limit_run(self, length: int) -> None:
        """No hit is longer than ``length``: chunks beyond what it needs do not matter."""
        self.run_end = max(self.run, min(self.run_end, (length + self.shape.margin) // self.shape.block))

    def narrow(self) -> None:
        """Move ``run`` and ``run_end`` together as far as the answers allow."""
        if self.run < self.run_end and self.chunks[self.run] == _ABSENT:  # spares a miss 4 us of looking through all
            self.run_end = self.run
            return
        self.run_end = self.run + _first(self.chunks[self.run : self.run_end] == _ABSENT)
        self.run += _first(self.chunks[self.run : self.run_end] != PRESENT)

    @property
    def bound(self) -> int:
        """Tokens; a hit cannot be longer, from what is known of the run."""
        shape = self.shape
        return self.run_end * shape.block + (shape.block - shape.hash_block if shape.fine else 0) - shape.margin

    def ask_run(self, wave: int) -> Ids:
        """Units to ask for next: all up to the last present sample, and a part of the gap behind it."""
        sure = self.run
        if wave:
            present = _where(self.chunks[self.run : self.run_end] == PRESENT)
            sure += int(present[-1]) + 1 if len(present) else 0
        gap = self.run_end - sure
        if gap <= _SAMPLES or wave >= _DENSE_WAVES - 1:
            chunks = np.arange(self.run, self.run_end)
        else:
            if wave == 0:
                count = int(_LADDER.searchsorted(gap - 1))
                chunks = _LADDER[: count + 1] + sure
                chunks[count] = self.run_end - 1
            else:
                chunks = (_SPACING * (gap - 1)).astype(np.intp) + sure
            if sure > self.run:
                chunks = np.concatenate([np.arange(self.run, sure), chunks])
        if wave:
            chunks = chunks[self.chunks[chunks] == _OPEN]
        units: Ids = (chunks + 1) * self.shape.per_chunk - 1 if self.shape.by_hash else chunks
        return units

    # -- what hits of given lengths use, in units; for dense groups only the chunk a hit ends in

    def spans(self, lengths: Lengths) -> tuple[Lengths, Lengths]:
        """First and one past the last unit for one length, or for each of many."""
        shape = self.shape
        if shape.mamba:
            last = lengths // (shape.hash_block if shape.by_hash else shape.block)
            return last - 1, last
        if shape.dense:
            return lengths // shape.hash_block - 1, -(-(lengths + shape.margin) // shape.block) * shape.per_chunk
        first, end = needed(shape.group, lengths)
        return first, end + shape.margin // shape.block

    def ask_first(self, length: int) -> Ids:
        """Units that a hit of this length uses beyond what the engine holds; nothing was asked before."""
        base, stop = self.spans(length)
        return np.arange(base if self.shape.by_hash else max(base, self.run), min(stop, len(self.known)))

    def ask_spans(self, lengths: Ids) -> Ids:
        """Units not asked for yet that hits of these ascending lengths use."""
        if len(lengths) == 1:  # the common case, four times as fast in plain ints
            base, stop = self.spans(int(lengths[0]))
            return _where(self.known[base:stop] == _OPEN) + base
        first, end = self.spans(lengths)
        base, stop = int(first[0]), min(int(end[-1]), len(self.known))
        if stop <= base:
            return first[:0]
        size = stop - base + 1
        depth = np.bincount(first - base, minlength=size) - np.bincount(np.minimum(end, stop) - base, minlength=size)
        wanted = (np.cumsum(depth[:-1]) > 0) & (self.known[base:stop] == _OPEN)
        return _where(wanted) + base

    def ask_scouts(self, lengths: Ids) -> Ids:
        """For each length one unit that its hit cannot do without."""
        ends = np.minimum(self.spans(lengths)[1], len(self.known)) - 1
        open_ends: Ids = ends[self.known[ends] == _OPEN]
        return open_ends

    def judge(self, lengths: Ids) -> tuple[Flags, Flags]:
        """For each ascending length: may this group serve it; and is that proven, with nothing left to ask?"""
        shape = self.shape
        first, end = self.spans(lengths)
        base, stop = int(first[0]), min(int(end[-1]), len(self.known))
        state = self.known[base:stop]
        first, end = first - base, np.maximum(np.minimum(end, stop) - base, first - base)
        settled = _none(state == _OPEN, first, end)
        if not shape.dense:
            may = _none(state == _ABSENT, first, end)
            return may, may & settled
        # The chunk behind the run serves a hit that ends inside it if it is stored under that end or a later one.
        tail = self.known[self.run * shape.per_chunk : (self.run + 1) * shape.per_chunk]
        last_may = _where(tail != _ABSENT)
        reach = self.run * shape.per_chunk + (int(last_may[-1]) + 1 if len(last_may) else 0)
        may = (lengths + shape.margin) // shape.hash_block <= reach
        return may, may & settled

    def boundary(self, length: int) -> int:
        """The token count under whose hash the last chunk of a hit is stored: the nearest one that is."""
        shape = self.shape
        if not shape.fine:
            return length
        first = length // shape.hash_block - 1
        chunk_end = -(-length // shape.block) * shape.per_chunk
        return (first + 1 + int(np.argmax(self.known[first:chunk_end] == PRESENT))) * shape.hash_block


def _where(flags: Flags) -> Ids:
    """Where flags are set (np.flatnonzero without its three layers of Python)."""
    return flags.nonzero()[0]


def _first(flags: Flags) -> int:
    """The first flag that is set; as many as there are if none is."""
    if not len(flags):
        return 0
    i = int(flags.argmax())
    return i if flags[i] else len(flags)


def _none(flags: Flags, first: Ids, end: Ids) -> Flags:
    """For each span, whether no flag in it is set."""
    before = np.zeros(len(flags) + 1, np.int32)
    np.cumsum(flags, out=before[1:])
    return np.equal(before[end], before[first])


_Groups: TypeAlias = dict[int, _Group]


def _union(a: Ids | None, b: Ids) -> Ids:
    """Both without repetitions, ascending."""
    return b if a is None or not len(a) else np.union1d(a, b) if len(b) else a


class HitSearch:
    """Searches by the rules of one spec."""

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._shapes = [_Shape(spec, i) for i in spec.cached_groups]
        self._margin = max(shape.margin for shape in self._shapes)

    def search(self, num_tokens: int, num_hashes: int, local_tokens: int = 0) -> Search:
        """Search as :meth:`kvpool.coordinator.Coordinator.search` describes."""
        # Plain ints: numpy's unsigned ones wrap below 0.
        num_tokens, num_hashes, local_tokens = int(num_tokens), int(num_hashes), max(int(local_tokens), 0)
        spec = self._spec
        miss = Hit(0, (0,) * len(spec.groups))
        limit = max(min(spec.align(num_tokens), num_hashes * spec.hash_block_size), 0)
        top = spec.align(min(num_tokens - 1, limit - self._margin))
        if top <= local_tokens:
            return miss
        groups = {shape.index: _Group(shape, limit, local_tokens) for shape in self._shapes}
        top, waves = yield from _dense_phase(spec, groups, top)
        first = spec.align(local_tokens) + spec.alignment
        judges = [g for g in groups.values() if g.shape.fine or not g.shape.dense]
        if judges and top >= first:
            candidates = np.arange(first, top + 1, spec.alignment)
            top = yield from _candidate_phase(groups, judges, candidates, MAX_WAVES - waves)
        if top < first:
            return miss
        return Hit(top, tuple(groups[i].boundary(top) if i in groups else 0 for i in range(len(spec.groups))))


def _dense_phase(spec: CacheSpec, groups: _Groups, top: int) -> Generator[list[Probe], Answers, tuple[int, int]]:
    """The longest hit that the dense groups allow, and the waves it took: at most three."""
    dense = [g for g in groups.values() if g.shape.dense]
    waves = 0
    for g in dense:
        g.limit_run(top)
    while any(g.run < g.run_end for g in dense):
        asked = {g.shape.index: g.ask_run(waves) for g in dense}
        if waves == 0:
            for g in groups.values():
                if g.shape.fine or not g.shape.dense:
                    asked[g.shape.index] = _union(asked.get(g.shape.index), g.ask_first(top))
        yield from _ask(groups, asked)
        waves += 1
        for g in dense:
            g.narrow()
        top = spec.align(min([top, *[g.bound for g in dense]]))
        for g in dense:
            g.limit_run(top)
    return top, waves


def _candidate_phase(
    groups: _Groups, judges: list[_Group], candidates: Ids, waves: int
) -> Generator[list[Probe], Answers, int]:
    """The longest of these ascending lengths that every judge serves, or 0, in at most ``waves`` waves."""
    size = max([_BATCH, *(g.shape.per_chunk for g in judges if g.shape.fine)])  # at least all ends inside one chunk
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
        asked = {g.shape.index: g.ask_spans(candidates[-size:]) for g in judges}
        scouted = candidates[:-size][-scouting:] if scouting else candidates[:0]
        if len(scouted):
            scout = min(zip(verdicts, judges, strict=True), key=lambda pair: int(pair[0][0].sum()))[1]
            index = scout.shape.index
            asked[index] = _union(asked[index], scout.ask_scouts(scouted))
        touched = size + len(scouted)
        if (yield from _ask(groups, asked)):
            waves, size, scouting = waves - 1, 8 * size, _SCOUTS


def _ask(groups: _Groups, asked: dict[int, Ids]) -> Generator[list[Probe], Answers, bool]:
    """One wave, if there is anything to ask. ``asked``: units, by group."""
    asked = {index: units for index, units in asked.items() if len(units)}
    if not asked:
        return False
    answers = yield [Probe(index, groups[index].hash_ids(units)) for index, units in asked.items()]
    for (index, units), presence in zip(asked.items(), answers, strict=True):
        if len(presence) != len(units):
            raise StoreError(f"{len(presence)} presence entries for {len(units)} keys of group {index}")
        groups[index].known[units] = np.equal(presence, PRESENT).view(np.uint8)  # UNKNOWN counts as absent
    return True
