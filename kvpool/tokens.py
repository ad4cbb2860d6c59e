"""From tokens to chunks to hashes, keys and memory: the chunked token database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from kvpool.addresses import AddressRows
from kvpool.coordinator import Coordinator, Hit
from kvpool.errors import HashError, LayoutError
from kvpool.hashes import BlockHashes
from kvpool.keys import KeySpace
from kvpool.memory import BlockLayout, Buffers
from kvpool.spec import CacheSpec, Kind

__all__ = ["ChunkedTokenDatabase", "Chunks"]

Ids = npt.NDArray[np.intp]

#: Lengths of saved spans of which the chunks are kept, and the longest of them in common blocks (some 100 KB).
_KEPT_SETS, _KEPT_SPAN = 16, 64


@dataclass(frozen=True, slots=True)
class Chunks:
    """Some chunks of one group, as columns.

    ``ids``: chunk numbers. ``ends``: tokens up to the end of what counts in each. ``hash_ids``: index of the hash that
    keys each.
    """

    ids: Ids
    ends: Ids
    hash_ids: Ids

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Chunks:
        """Some of the chunks, by index or mask."""
        return Chunks(self.ids[rows], self.ends[rows], self.hash_ids[rows])


class _SaveSet:
    """What a save of some span of tokens takes of every group: columns over all groups, counted from the span's start.

    ``rows``: for each group, its part of the columns. ``blocks``: block size of each chunk. ``prefixes``: what the key
    of each begins with.
    """

    __slots__ = ("blocks", "ends", "hash_ids", "ids", "prefixes", "rows")

    def __init__(
        self, spec: CacheSpec, start: int, parts: Sequence[tuple[int, Chunks]], prefixes: Sequence[str]
    ) -> None:
        counts = [len(chunks) for _, chunks in parts]
        ends = np.cumsum(counts).tolist()
        self.rows = [(g, slice(end - n, end)) for (g, _), n, end in zip(parts, counts, ends, strict=True)]
        self.blocks = np.repeat([spec.groups[g].block_size for g, _ in parts], counts)
        self.ids = np.concatenate([chunks.ids for _, chunks in parts]) - start // self.blocks
        self.ends = np.concatenate([chunks.ends for _, chunks in parts]) - start
        self.hash_ids = np.concatenate([chunks.hash_ids for _, chunks in parts]) - start // spec.hash_block_size
        self.prefixes: list[str] = []
        for (g, _), n in zip(parts, counts, strict=True):
            self.prefixes += [prefixes[g]] * n


class ChunkedTokenDatabase:
    """Cuts a request into chunks and says what each is called and where it lies.

    ``layouts``: one a group, where the engine's blocks live (omit on a side that moves no bytes). ``blocks_per_chunk``:
    one a group, entries of the engine's block table that make one chunk; 1 unless given. ``null_block``: the id that
    stands for "no block" in a block table, if the engine has one. ``shards``: the shard of each group that this rank
    holds; 0 unless given.

    The pool itself uses chunks and keys, and moves bytes through :class:`~kvpool.memory.BlockLayout`. The methods under
    "where they lie" are for engines that address memory themselves, to drive a native client: :meth:`buffers`,
    :meth:`span_buffers` and :meth:`addresses` raise LayoutError without layouts, :meth:`check_owners` checks tables.
    """

    def __init__(
        self,
        spec: CacheSpec,
        keyspace: KeySpace,
        layouts: Sequence[BlockLayout] = (),
        *,
        blocks_per_chunk: Sequence[int] = (),
        null_block: int | None = None,
        shards: Sequence[int] = (),
    ) -> None:
        count = len(spec.groups)
        if (layouts and len(layouts) != count) or (blocks_per_chunk and len(blocks_per_chunk) != count):
            raise LayoutError(
                f"{count} groups, but {len(layouts)} layouts and {len(blocks_per_chunk)} blocks_per_chunk"
            )
        self.spec = spec
        self.coordinator = Coordinator(spec)
        self.keyspace = keyspace
        self.layouts = tuple(layouts)
        self.blocks_per_chunk = tuple(blocks_per_chunk) or (1,) * count
        self.null_block = null_block
        for i, (group, k) in enumerate(zip(spec.groups, self.blocks_per_chunk, strict=True)):
            if k < 1 or group.block_size % k:
                raise LayoutError(f"group {i}: {k} engine blocks do not divide a chunk of {group.block_size} tokens")
        self._rows = tuple(AddressRows(layout) for layout in layouts)
        self._prefixes = [keyspace.prefix(g, s) for g, s in enumerate(tuple(shards) or (0,) * count)]
        self._save_sets: dict[tuple[int, bool], _SaveSet] = {}

    # -- which chunks

    def chunks(
        self,
        token_len: int,
        num_hashes: int,
        mask_num: int = 0,
        chunk_mask: npt.ArrayLike | None = None,
        put_step: int = 1,
        put_step_rank: int = 0,
        *,
        group: int = 0,
    ) -> Chunks:
        """The chunks of the first ``token_len`` tokens that are wanted; hashes are counted, not read.

        Starts at chunk ceil(``mask_num`` / block size); ``chunk_mask[0]`` belongs to that chunk, and its length is a
        limit. A last chunk that is not whole ends at the last hash block. Striping, for puts only: a rank takes the
        chunks with ``id % put_step == (put_step_rank + group) % put_step``, so that ranks which hold the same bytes
        share the work whatever was saved before.
        """
        block, hash_block = self.spec.groups[group].block_size, self.spec.hash_block_size
        tokens = max(min(token_len // hash_block, num_hashes), 0) * hash_block
        start, end = -(-max(mask_num, 0) // block), -(-tokens // block)
        if chunk_mask is None:
            ids = np.arange(start, end, dtype=np.intp)
        else:
            ids = np.asarray(chunk_mask, np.bool_)[: max(end - start, 0)].nonzero()[0] + start
        if put_step > 1:
            ids = ids[ids % put_step == (put_step_rank + group) % put_step]
        return self._named(group, ids, tokens)

    def process_tokens(
        self,
        token_len: int,
        hashes: Sequence[bytes],
        mask_num: int = 0,
        chunk_mask: npt.ArrayLike | None = None,
        put_step: int = 1,
        put_step_rank: int = 0,
        *,
        group: int = 0,
    ) -> Iterator[tuple[int, int, bytes]]:
        """(start, end, hash) of each wanted chunk, see :meth:`chunks`; a hash is read when its chunk is reached."""
        found = self.chunks(token_len, len(hashes), mask_num, chunk_mask, put_step, put_step_rank, group=group)
        block = self.spec.groups[group].block_size
        for chunk, end, i in zip(found.ids.tolist(), found.ends.tolist(), found.hash_ids.tolist(), strict=True):
            yield chunk * block, end, hashes[i]

    def load_chunks(self, group: int, hit: Hit, start_token: int = 0) -> Chunks:
        """What ``group`` loads for ``hit``, when the engine holds the first ``start_token`` tokens.

        A chunk that the engine holds in part is loaded whole. The last chunk is named by the hash it was stored under.
        """
        chunks = self._named(group, self.coordinator.load_chunks(group, hit.length, start_token), hit.length)
        if len(chunks):
            chunks.hash_ids[-1] = hit.boundaries[group] // self.spec.hash_block_size - 1
        return chunks

    def save_chunks(
        self, start: int, end: int, num_prompt_tokens: int | None = None, shared_tokens: int = 0
    ) -> list[tuple[int, Chunks]]:
        """What a save of the tokens from ``start`` to ``end`` takes, for each cached group.

        The chunks that :meth:`Coordinator.store_mask` allows; ``end`` is rounded down to the alignment. There must be
        hashes up to there.
        """
        found = self._save_set(start, end, num_prompt_tokens, shared_tokens)
        ids, ends = found.ids + start // found.blocks, found.ends + start
        hash_ids = found.hash_ids + start // self.spec.hash_block_size
        return [(group, Chunks(ids[rows], ends[rows], hash_ids[rows])) for group, rows in found.rows]

    def save_keys(
        self,
        hashes: BlockHashes,
        start: int,
        end: int,
        num_prompt_tokens: int | None = None,
        shared_tokens: int = 0,
    ) -> list[str]:
        """The keys of :meth:`save_chunks`, group by group, of the shards that this rank holds."""
        found = self._save_set(start, end, num_prompt_tokens, shared_tokens)
        return self.keyspace.prefixed(found.prefixes, hashes, found.hash_ids, start // self.spec.hash_block_size)

    def _save_set(self, start: int, end: int, num_prompt_tokens: int | None, shared_tokens: int) -> _SaveSet:
        """Without sparse retention a span takes the same wherever it starts, but for the first block of EAGLE.

        So it is worked out once for each length: an engine saves what it computes in a step, and steps are alike. Five
        groups, 256 tokens: 60 -> 12 us for the chunks, and 70 -> 6 us down to the keys.
        """
        common = self.spec.common_block
        moves = self.spec.retention_interval is None and start % common == 0 and end - start <= _KEPT_SPAN * common
        key = end - start, start == 0
        if moves and (found := self._save_sets.get(key)) is not None:
            return found
        masks = self.coordinator.store_mask(end, start, num_prompt_tokens, shared_tokens)
        num_hashes = end // self.spec.hash_block_size
        parts = [
            (g, self.chunks(self.spec.align(end), num_hashes, start, masks[g], group=g))
            for g in self.spec.cached_groups
        ]
        found = _SaveSet(self.spec, start, parts, self._prefixes)
        if moves:
            if len(self._save_sets) >= _KEPT_SETS:
                del self._save_sets[next(iter(self._save_sets))]
            self._save_sets[key] = found
        return found

    def boundary(self, group: int, num_tokens: int, num_hashes: int) -> Chunks:
        """The chunk that holds the state or tail at exactly ``num_tokens``, named by the hash that ends there.

        For blocks that the engine hands over by id because their position in the block table does not find them. Empty
        if that hash does not exist. Raises HashError if ``num_tokens`` is not on a hash block.
        """
        if num_tokens % self.spec.hash_block_size:
            raise HashError(f"boundary at {num_tokens} tokens is not on a hash block of {self.spec.hash_block_size}")
        if not 0 < num_tokens <= num_hashes * self.spec.hash_block_size or not self.spec.groups[group].cacheable:
            return self._named(group, np.empty(0, np.intp), num_tokens)
        return self._named(group, np.array([-(-num_tokens // self.spec.groups[group].block_size) - 1]), num_tokens)

    def tail_chunks(self, group: int, num_tokens: int, computed_tokens: int, num_hashes: int) -> Chunks:
        """What else is stored so that a later request can resume at ``num_tokens``, inside a common block.

        Saves by position end on the common block; a Mamba state at ``num_tokens`` can only be used with the other
        groups' chunks from there up to it, and one hash block more where EAGLE reads on. Empty for Mamba groups, and
        while ``computed_tokens`` do not reach so far.
        """
        spec, info = self.spec, self.spec.groups[group]
        end = num_tokens + spec.eagle_margin(group)
        limit = min(computed_tokens, num_hashes * spec.hash_block_size)
        if num_tokens <= 0 or end > limit or info.kind is Kind.MAMBA or not info.cacheable:
            return self._named(group, np.empty(0, np.intp), 0)
        first = num_tokens // spec.common_block * spec.common_block // info.block_size
        return self._named(group, np.arange(first, -(-end // info.block_size), dtype=np.intp), end)

    def _named(self, group: int, ids: Ids, tokens: int) -> Chunks:
        """Ascending chunks of the first ``tokens`` tokens."""
        ends = (ids + 1) * self.spec.groups[group].block_size
        if len(ends) and ends[-1] > tokens:
            ends[-1] = tokens
        return Chunks(ids, ends, ends // self.spec.hash_block_size - 1)

    # -- what they are called

    def keys(self, group: int, shard: int, hashes: BlockHashes, chunks: Chunks) -> list[str]:
        """The key of each chunk."""
        return self.keyspace.keys(group, shard, hashes, chunks.hash_ids)

    # -- where they lie

    def blocks(self, group: int, chunks: Chunks, block_table: npt.ArrayLike) -> tuple[Chunks, Ids]:
        """The chunks that have memory, and their engine blocks, intp[n, k].

        Chunks with a null block are left out: they were dropped by the engine, and are neither stored nor loaded.
        Raises LayoutError if the table is too short for a chunk.
        """
        k = self.blocks_per_chunk[group]
        table = np.asarray(block_table, np.intp)
        if len(chunks) and int(chunks.ids[-1] + 1) * k > len(table):
            raise LayoutError(
                f"group {group}: chunk {int(chunks.ids[-1])} ends at block {int(chunks.ids[-1] + 1) * k} "
                f"of a table of {len(table)} blocks"
            )
        ids = table[chunks.ids[:, None] * k + np.arange(k)]
        if self.null_block is not None:
            there = (ids != self.null_block).all(axis=1)
            if not there.all():
                return chunks.select(there), ids[there]
        return chunks, ids

    def buffers(self, group: int, block_ids: npt.ArrayLike) -> Buffers:
        """Engine memory of chunks made of blocks ``block_ids`` ([n], or [n, k] with k blocks a chunk)."""
        return self._layout(group).buffers(block_ids)

    def span_buffers(self, group: int, spans: npt.ArrayLike, block_table: npt.ArrayLike) -> Buffers:
        """Engine memory of token spans ([n, 2]: start, end), each one chunk or the first part of one.

        Blocks behind the end of a span have size 0. Raises LayoutError for a span that does not start on a chunk, does
        not end on a hash block or is longer than a chunk.
        """
        info, k = self.spec.groups[group], self.blocks_per_chunk[group]
        start, end = np.asarray(spans, np.intp).reshape(-1, 2).T
        bad = (start % info.block_size != 0) | (end % self.spec.hash_block_size != 0)
        bad |= (end <= start) | (end - start > info.block_size) | (start < 0)
        if bad.any():
            i = int(bad.argmax())
            raise LayoutError(
                f"group {group}: span {int(start[i])}..{int(end[i])} is not a chunk of {info.block_size} tokens "
                f"cut at a hash block of {self.spec.hash_block_size}"
            )
        page = info.block_size // k
        used = np.arange(k) < -(-(end - start) // page)[:, None]
        index = np.where(used, start[:, None] // page + np.arange(k), start[:, None] // page)
        table = np.asarray(block_table, np.intp)
        if index.size and int(index.max()) >= len(table):
            raise LayoutError(f"group {group}: block {int(index.max())} of a table of {len(table)} blocks")
        whole = self._layout(group).buffers(table[index].reshape(-1, k))
        if used.all():
            return whole
        return Buffers(
            whole.regions, whole.region, whole.offsets, whole.sizes * used.repeat(whole.sizes.shape[1] // k, 1)
        )

    def addresses(self, group: int, block_ids: npt.ArrayLike) -> tuple[list[list[int]], list[list[int]]]:
        """Like :meth:`buffers`, as nested lists of plain ints (addresses, sizes); see :class:`AddressRows`."""
        self._layout(group)
        return self._rows[group].lists(block_ids)

    def _layout(self, group: int) -> BlockLayout:
        if not self.layouts:
            raise LayoutError("this token database was made without layouts: it has no memory to address")
        return self.layouts[group]

    def check_owners(self, block_tables: Sequence[npt.ArrayLike]) -> None:
        """Groups that share memory must not share bytes: a block belongs to one group at a time.

        Raises LayoutError naming two blocks of two groups' tables (one a group, of one request) that overlap.
        """
        if len(block_tables) != len(self.layouts):
            raise LayoutError(f"{len(block_tables)} block tables, but {len(self.layouts)} layouts")
        pieces = [self._pieces(group, table) for group, table in enumerate(block_tables)]
        for (a, (ids, starts, ends)), (b, (others, firsts, lasts)) in combinations(enumerate(pieces), 2):
            if not len(ids) or not len(others):
                continue
            reach = np.maximum.accumulate(ends)  # of all pieces of a so far: some end above a piece's start?
            before = np.searchsorted(starts, lasts)  # pieces of a that start below its end
            clash = ((before > 0) & (reach[before - 1] > firsts)).nonzero()[0]
            if len(clash):
                j = int(clash[0])
                i = int((ends[: before[j]] > firsts[j]).argmax())
                raise LayoutError(
                    f"block {int(ids[i])} of group {a} and block {int(others[j])} of group {b} lie in the same bytes"
                )

    def _pieces(self, group: int, table: npt.ArrayLike) -> tuple[Ids, Ids, Ids]:
        """Block id, first address and end of each piece of a group's blocks, by address; null blocks have none."""
        layout, ids = self._layout(group), np.unique(np.asarray(table, np.intp))
        ids = layout.check(ids[ids != self.null_block] if self.null_block is not None else ids)
        base = np.array([r.address for r in layout.regions], np.int64)[layout.region] + layout.offsets
        starts = (base + ids[:, None] * layout.strides).ravel()
        order = np.argsort(starts)
        return ids.repeat(len(base))[order], starts[order], (starts + np.tile(layout.sizes, len(ids)))[order]
