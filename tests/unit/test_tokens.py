"""The chunked token database: which chunks, what they are called, where they lie."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.addresses import AddressRows
from kvpool.coordinator import Coordinator, Hit
from kvpool.errors import HashError, LayoutError
from kvpool.hashes import BlockHashes, chain_hashes
from kvpool.keys import KeySpace, Namespace
from kvpool.memory import BlockLayout, Region
from kvpool.spec import CacheGroup, CacheSpec, Kind
from kvpool.tokens import ChunkedTokenDatabase
from tests.unit.search_reference import drive, specs

NAMESPACE = Namespace.of({})
FULL_16 = CacheSpec((CacheGroup(Kind.FULL, 16),), 4)


def database(spec: CacheSpec, *layouts: BlockLayout, **options: Any) -> ChunkedTokenDatabase:
    return ChunkedTokenDatabase(spec, KeySpace(NAMESPACE, spec), layouts, **options)


class Recorded(BlockHashes):
    """Remembers which hashes are read."""

    __slots__ = ("read",)

    def __init__(self, count: int) -> None:
        super().__init__(b"".join(i.to_bytes(8, "big") for i in range(count)), 8, scheme="test")
        self.read: list[int] = []

    def __getitem__(self, index: Any, /) -> Any:
        assert isinstance(index, int), "nobody takes slices here"
        self.read.append(index)
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("nobody reads all")

    def pack(self, indices: npt.NDArray[np.intp]) -> bytes:
        self.read += indices.tolist()
        return super().pack(indices)

    @property
    def view(self) -> memoryview:
        raise AssertionError("nobody reads all")


class TestSaves:
    @settings(max_examples=150, deadline=None)
    @given(st.data(), specs())
    def test_what_a_span_takes_is_what_masks_and_chunks_say(self, data: st.DataObject, spec: CacheSpec) -> None:
        """Wherever it starts, with the same lengths again and again, in any order; with sparse retention too."""
        interval = data.draw(st.sampled_from([None, None, 0, spec.common_block, 3 * spec.common_block]))
        spec = replace(spec, retention_interval=interval)
        db, unit = database(spec), data.draw(st.sampled_from([spec.common_block, spec.hash_block_size]))
        hashes = BlockHashes(np.random.default_rng(0).bytes(8 * 12 * spec.common_block), 8, scheme="test")
        for start, size in data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6)):
            begin, end = start * unit, (start + size) * unit
            masks = db.coordinator.store_mask(end, begin, end)
            expected = {
                g: db.chunks(spec.align(end), end // spec.hash_block_size, begin, masks[g], group=g)
                for g in spec.cached_groups
            }
            found = dict(db.save_chunks(begin, end, end))
            assert found.keys() == expected.keys()
            for g, chunks in expected.items():
                for column in ("ids", "ends", "hash_ids"):
                    assert getattr(found[g], column).tolist() == getattr(chunks, column).tolist(), (g, column)
            keys = [key for g, chunks in expected.items() for key in db.keys(g, 0, hashes, chunks)]
            assert db.save_keys(hashes, begin, end, end) == keys

    def test_what_is_kept_is_bounded(self) -> None:
        db = database(FULL_16)
        for size in range(1, 200):
            db.save_chunks(16, 16 + 16 * size)
        assert len(db._save_sets) <= 16
        assert max(len(kept.ids) for kept in db._save_sets.values()) <= 64

    def test_keys_of_the_shard_that_a_rank_holds(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 16, shards=2),), 16)
        keys = database(spec, shards=[1]).save_keys(Recorded(4), 16, 48)
        assert keys == [f"{NAMESPACE.hex}/0.1/{i:016x}" for i in (1, 2)]


class TestProcessTokens:
    def test_chunks_and_their_last_hashes(self) -> None:
        hashes = chain_hashes(range(48), 4)
        found = list(database(FULL_16).process_tokens(48, hashes))
        assert found == [(0, 16, hashes[3]), (16, 32, hashes[7]), (32, 48, hashes[11])]

    def test_starts_at_the_chunk_that_the_mask_number_ends_in(self) -> None:
        hashes = chain_hashes(range(48), 4)
        assert [[s for s, _, _ in database(FULL_16).process_tokens(48, hashes, n)] for n in (0, 1, 16, 17, 48, 99)] == [
            [0, 16, 32],
            [16, 32],
            [16, 32],
            [32],
            [],
            [],
        ]

    def test_the_chunk_mask_belongs_to_the_first_chunk_and_its_length_is_a_limit(self) -> None:
        hashes = chain_hashes(range(80), 4)
        assert [s for s, _, _ in database(FULL_16).process_tokens(80, hashes, 16, [True, False, True])] == [16, 48]
        assert [s for s, _, _ in database(FULL_16).process_tokens(80, hashes, 16, [True] * 99)] == [16, 32, 48, 64]
        assert list(database(FULL_16).process_tokens(80, hashes, 16, [])) == []

    def test_a_partial_tail_chunk_is_keyed_by_its_ending_fine_hash(self) -> None:
        hashes = chain_hashes(range(44), 4)
        assert list(database(FULL_16).process_tokens(24, hashes))[-1] == (16, 24, hashes[5])
        assert list(database(FULL_16).process_tokens(27, hashes))[-1] == (16, 24, hashes[5]), "to the last hash block"

    def test_hashes_are_a_limit(self) -> None:
        assert [e for _, e, _ in database(FULL_16).process_tokens(99, chain_hashes(range(44), 4))] == [16, 32, 44]

    def test_stripes_cover_every_chunk_once_whatever_was_saved_before(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 16),) * 2, 16)
        hashes = chain_hashes(range(160), 16)
        for group in (0, 1):
            taken = {
                rank: [
                    s // 16 for s, _, _ in database(spec).process_tokens(160, hashes, 48, None, 3, rank, group=group)
                ]
                for rank in range(3)
            }
            assert sorted(c for chunks in taken.values() for c in chunks) == list(range(3, 10))
            assert all(c % 3 == (rank + group) % 3 for rank, chunks in taken.items() for c in chunks)

    @pytest.mark.parametrize("token_len", [0, -5, 3])
    def test_empty_work_touches_nothing(self, token_len: int) -> None:
        hashes = Recorded(10)
        assert list(database(FULL_16).process_tokens(token_len, hashes)) == []
        assert list(database(FULL_16).process_tokens(40, hashes, 0, [False] * 3)) == []
        assert list(database(FULL_16).process_tokens(40, BlockHashes(scheme="x"))) == []
        assert hashes.read == []

    @settings(deadline=None)
    @given(
        st.integers(0, 200),
        st.integers(0, 60),
        st.integers(0, 220),
        st.none() | st.lists(st.booleans(), max_size=14),
        st.integers(1, 4),
        st.integers(0, 3),
    )
    def test_equals_a_plain_loop(
        self, token_len: int, count: int, start: int, mask: list[bool] | None, step: int, rank: int
    ) -> None:
        hashes = Recorded(count)
        tokens, expected = min(token_len // 4, count) * 4, []
        for chunk in range(100):
            begin, end = chunk * 16, min(chunk * 16 + 16, tokens)
            offset = chunk - -(-start // 16)
            if begin >= tokens or offset < 0 or chunk % step != rank % step:
                continue
            if mask is None or (offset < len(mask) and mask[offset]):
                expected.append((begin, end, (end // 4 - 1).to_bytes(8, "big")))
        assert list(database(FULL_16).process_tokens(token_len, hashes, start, mask, step, rank)) == expected
        assert hashes.read == [int.from_bytes(h, "big") for _, _, h in expected], "masks before hashes"


class TestMasksBeforeHashes:
    """Only hashes that a mask lets through are read, for lookup, save and load."""

    SPEC = CacheSpec((CacheGroup(Kind.FULL, 32), CacheGroup(Kind.SLIDING_WINDOW, 8, window=8)), 8)

    def test_lookup(self) -> None:
        coordinator, space = Coordinator(self.SPEC), KeySpace(NAMESPACE, self.SPEC)
        for group in (0, 1):
            hashes = Recorded(12)
            (probe,) = [p for p in coordinator.everything(96, 12) if p.group == group]
            space.keys(group, 0, hashes, probe.hash_ids)
            assert hashes.read == [3, 7, 11]

    def test_a_search_reads_what_it_probes_and_no_more(self) -> None:
        space, hashes = KeySpace(NAMESPACE, self.SPEC), Recorded(12)
        everywhere = {0: set(range(12)), 1: set(range(12))}
        trace = drive(
            self.SPEC, 97, everywhere, on_probe=lambda probe: space.keys(probe.group, 0, hashes, probe.hash_ids)
        )
        assert trace.hit == Hit(96, (96, 96))
        assert sorted(hashes.read) == [3, 7, 11, 11], "the dense group three chunks, the sliding window its tail"

    @pytest.mark.parametrize("start", [0, 32, 64])
    def test_save(self, start: int) -> None:
        masks = Coordinator(self.SPEC).store_mask(96, start)
        for group in (0, 1):
            hashes = Recorded(12)
            mine = database(self.SPEC)
            chunks = mine.chunks(96, len(hashes), start, masks[group], group=group)
            mine.keys(group, 0, hashes, chunks)
            assert hashes.read == [i for i in (3, 7, 11) if i >= start // 8]

    def test_load(self) -> None:
        mine = database(self.SPEC)
        for group, expected in ((0, [3, 7]), (1, [7])):
            hashes = Recorded(12)
            mine.keys(group, 0, hashes, mine.load_chunks(group, Hit(64, (64, 64))))
            assert hashes.read == expected


class TestLoad:
    def test_the_last_chunk_is_named_by_the_boundary_it_was_stored_under(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 16), CacheGroup(Kind.MAMBA, 16)), 4, partial_hits=True)
        hit = drive(spec, 64, {0: {3, 6}, 1: {3, 5}}).hit
        assert hit == Hit(24, (28, 24))
        dense, state = (database(spec).load_chunks(g, hit) for g in (0, 1))
        assert (dense.ids.tolist(), dense.ends.tolist(), dense.hash_ids.tolist()) == ([0, 1], [16, 24], [3, 6])
        assert (state.ids.tolist(), state.ends.tolist(), state.hash_ids.tolist()) == ([1], [24], [5])

    def test_what_the_engine_holds_is_not_loaded(self) -> None:
        mine = database(FULL_16)
        assert mine.load_chunks(0, Hit(64, (64,)), 32).ids.tolist() == [2, 3]
        assert len(mine.load_chunks(0, Hit(64, (64,)), 64)) == 0
        assert len(mine.load_chunks(0, Hit(0, (0,)))) == 0

    def test_nothing_is_loaded_for_groups_that_opt_out_or_need_nothing(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 7, cacheable=False), CacheGroup(Kind.CHUNKED_LOCAL, 16, chunk=32)), 16)
        assert len(database(spec).load_chunks(0, Hit(32, (0, 32)))) == 0
        assert len(database(spec).load_chunks(1, Hit(32, (0, 32)))) == 0, "a new span begins at 32"
        assert database(spec).load_chunks(1, Hit(48, (0, 48))).ids.tolist() == [2]


class TestExactBlocks:
    SPEC = CacheSpec((CacheGroup(Kind.FULL, 4), CacheGroup(Kind.MAMBA, 16)), 4, partial_hits=True)

    def test_a_state_is_named_by_the_hash_that_ends_there(self) -> None:
        chunks = database(self.SPEC).boundary(1, 44, 11)
        assert (chunks.ids.tolist(), chunks.ends.tolist(), chunks.hash_ids.tolist()) == ([2], [44], [10])

    @pytest.mark.parametrize("tokens", [0, -4, 48])
    def test_no_hash_no_save(self, tokens: int) -> None:
        assert len(database(self.SPEC).boundary(1, tokens, 11)) == 0

    def test_a_boundary_lies_on_a_hash_block(self) -> None:
        with pytest.raises(HashError, match="boundary at 42 tokens"):
            database(self.SPEC).boundary(1, 42, 11)

    def test_the_tail_goes_with_it(self) -> None:
        """With a common block of 16 and a state at 44: chunks 8, 9 and 10 of the group with blocks of 4."""
        chunks = database(self.SPEC).tail_chunks(0, 44, 44, 11)
        assert (chunks.ids.tolist(), chunks.hash_ids.tolist()) == ([8, 9, 10], [8, 9, 10])
        assert len(database(self.SPEC).tail_chunks(0, 44, 43, 11)) == 0, "not computed yet"
        assert len(database(self.SPEC).tail_chunks(1, 44, 44, 11)) == 0, "the engine hands states over itself"

    def test_the_tail_reaches_one_hash_block_further_where_a_drafter_reads_on(self) -> None:
        spec = CacheSpec(self.SPEC.groups, 4, use_eagle=True, partial_hits=True)
        chunks = database(spec).tail_chunks(0, 44, 48, 12)
        assert (chunks.ids.tolist(), chunks.ends.tolist()) == ([8, 9, 10, 11], [36, 40, 44, 48])
        assert chunks.hash_ids.tolist() == [8, 9, 10, 11]
        assert len(database(spec).tail_chunks(0, 44, 47, 12)) == 0, "the block above is not computed yet"
        assert len(database(spec).tail_chunks(0, 44, 99, 11)) == 0, "the block above has no hash"
        coarse = CacheSpec(
            (CacheGroup(Kind.FULL, 16), CacheGroup(Kind.MAMBA, 16)), 4, use_eagle=True, partial_hits=True
        )
        tail = database(coarse).tail_chunks(0, 40, 44, 11)
        assert (tail.ids.tolist(), tail.ends.tolist(), tail.hash_ids.tolist()) == ([2], [44], [10]), "not 16 further"

    def test_hashes_limit_the_tail(self) -> None:
        assert database(self.SPEC).tail_chunks(0, 44, 99, 11).ids.tolist() == [8, 9, 10]
        assert len(database(self.SPEC).tail_chunks(0, 44, 99, 10)) == 0

    def test_groups_that_opt_out_have_no_tail_and_no_boundary(self) -> None:
        spec = CacheSpec((CacheGroup(Kind.FULL, 4, cacheable=False), *self.SPEC.groups), 4, partial_hits=True)
        assert [len(database(spec).tail_chunks(g, 44, 44, 11)) for g in range(3)] == [0, 3, 0]
        assert [len(database(spec).boundary(g, 44, 11)) for g in range(3)] == [0, 1, 1]

    def test_what_is_saved_for_a_tail_is_hit(self) -> None:
        mine = database(self.SPEC)
        stored = {
            0: {*mine.chunks(32, 11).hash_ids.tolist(), *mine.tail_chunks(0, 44, 45, 11).hash_ids.tolist()},
            1: set(mine.boundary(1, 44, 11).hash_ids.tolist()),
        }
        assert drive(self.SPEC, 45, stored).hit == Hit(44, (44, 44))


def layout_of(rng: np.random.Generator, regions: int, num_blocks: int = 40) -> BlockLayout:
    """Pieces in regions of their own, with strides that repeat and some padding between blocks."""
    sizes = rng.choice([16, 24, 64], regions).astype(np.int64)
    strides = sizes + rng.choice([0, 8], regions)
    offsets = rng.integers(0, 32, regions)
    memory = [np.zeros(int(o + s * num_blocks), np.uint8) for o, s in zip(offsets, strides, strict=True)]
    return BlockLayout(
        tuple(Region.of(m.data) for m in memory), np.arange(regions), offsets, strides, sizes, num_blocks
    )


def scalar(layout: BlockLayout, rows: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes by plain arithmetic."""
    addresses, sizes = [], []
    for row in rows:
        addresses.append(
            [
                layout.regions[layout.region[j]].address + int(layout.offsets[j]) + block * int(layout.strides[j])
                for block in row
                for j in range(len(layout.region))
            ]
        )
        sizes.append([int(layout.sizes[j]) for _ in row for j in range(len(layout.region))])
    return addresses, sizes


class TestAddresses:
    @settings(deadline=None, max_examples=60)
    @given(st.sampled_from([96, 2, 1]), st.sampled_from([1, 2, 4]), st.integers(0, 2**32), st.data())
    def test_equal_a_scalar_reference(self, regions: int, k: int, seed: int, data: st.DataObject) -> None:
        layout = layout_of(np.random.default_rng(seed), regions)
        mine = database(FULL_16, layout, blocks_per_chunk=[k])
        table = data.draw(st.lists(st.integers(0, 39), min_size=8 * k, max_size=8 * k))
        ids = sorted(data.draw(st.sets(st.integers(0, 7))))
        rows = [table[i * k : i * k + k] for i in ids]
        expected = scalar(layout, rows)
        chunks = mine.chunks(128, 32).select(np.array(ids, np.intp))
        same, blocks = mine.blocks(0, chunks, table)
        assert same is chunks
        buffers = mine.buffers(0, blocks)
        assert (buffers.addresses.tolist(), buffers.sizes.tolist()) == expected
        lists = mine.addresses(0, blocks)
        assert lists == expected
        assert all(type(a) is int for part in lists for row in part for a in row), "a native client takes no numpy ints"
        assert mine.addresses(0, blocks) == expected, "from the kept rows"
        spans = [(i * 16, i * 16 + 16) for i in ids]
        assert mine.span_buffers(0, spans, table).addresses.tolist() == expected[0]

    def test_empty_input(self) -> None:
        mine = database(FULL_16, layout_of(np.random.default_rng(0), 2))
        assert mine.addresses(0, []) == ([], [])
        assert len(mine.buffers(0, np.zeros((0, 1), np.intp))) == 0
        assert len(mine.span_buffers(0, [], [1, 2])) == 0
        assert len(mine.blocks(0, mine.chunks(0, 0), [])[1]) == 0

    def test_the_blocks_behind_the_end_of_a_span_have_no_bytes(self) -> None:
        layout = layout_of(np.random.default_rng(0), 2)
        mine = database(FULL_16, layout, blocks_per_chunk=[4])
        buffers = mine.span_buffers(0, [(16, 24)], [0, 1, 2, 3, 4, 5])
        assert buffers.nbytes.tolist() == [2 * layout.block_bytes]
        assert buffers.addresses[0, :4].tolist() == scalar(layout, [[4, 5]])[0][0]

    @pytest.mark.parametrize("span", [(8, 16), (0, 15), (16, 16), (0, 20), (-16, 0), (20, 32)])
    def test_unaligned_spans_are_an_error(self, span: tuple[int, int]) -> None:
        mine = database(FULL_16, layout_of(np.random.default_rng(0), 1))
        with pytest.raises(LayoutError, match=f"span {span[0]}..{span[1]} is not a chunk"):
            mine.span_buffers(0, [(0, 16), span], [1, 2, 3])

    def test_a_short_table_is_an_error(self) -> None:
        mine = database(FULL_16, layout_of(np.random.default_rng(0), 1))
        with pytest.raises(LayoutError, match="chunk 2 ends at block 3 of a table of 2"):
            mine.blocks(0, mine.chunks(48, 12), [1, 2])
        with pytest.raises(LayoutError, match="block 2 of a table of 2"):
            mine.span_buffers(0, [(32, 48)], [1, 2])

    def test_what_has_no_memory_has_no_addresses(self) -> None:
        with pytest.raises(LayoutError, match="without layouts"):
            database(FULL_16).buffers(0, [1])
        with pytest.raises(LayoutError, match="without layouts"):
            database(FULL_16).addresses(0, [1])

    def test_layouts_and_block_counts_must_fit_the_groups(self) -> None:
        layout = layout_of(np.random.default_rng(0), 1)
        with pytest.raises(LayoutError, match="1 groups, but 2 layouts"):
            database(FULL_16, layout, layout)
        with pytest.raises(LayoutError, match="3 engine blocks do not divide"):
            database(FULL_16, layout, blocks_per_chunk=[3])


class TestAddressRows:
    def test_memory_kept_is_bounded_and_stated(self) -> None:
        layout = layout_of(np.random.default_rng(0), 100)
        rows = AddressRows(layout, budget_bytes=10 * 5000)
        expected = scalar(layout, [[i] for i in range(40)])
        for _ in range(2):
            assert rows.lists(np.arange(40)) == expected
            assert 0 < rows.kept_bytes <= 50_000
        assert rows.lists([39, 3, 39])[0] == [expected[0][i] for i in (39, 3, 39)]

    def test_without_a_budget_nothing_is_kept(self) -> None:
        layout = layout_of(np.random.default_rng(0), 3)
        rows = AddressRows(layout, budget_bytes=0)
        assert rows.lists([1, 2]) == scalar(layout, [[1], [2]])
        assert rows.kept_bytes == 0

    @pytest.mark.parametrize("regions", [1, 2, 96])
    @pytest.mark.parametrize("count", [300, 683, 1400])  # 683: the dict has just grown
    def test_the_stated_memory_bounds_what_is_really_kept(self, regions: int, count: int) -> None:
        layout = BlockLayout(
            tuple(Region(1 << 40 | i << 24, 8 << 11, None) for i in range(regions)),
            np.arange(regions),
            np.zeros(regions, np.int64),
            np.full(regions, 8, np.int64),
            np.full(regions, 8, np.int64),
            1 << 11,
        )
        rows, ids = AddressRows(layout), np.arange(count) + 300
        tracemalloc.start()
        try:
            rows.lists(ids)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert rows.kept_bytes == count * rows.row_bytes
        assert rows.kept_bytes / 2 < kept <= rows.kept_bytes

    def test_64_mib_are_kept_unless_said_otherwise(self) -> None:
        rows = AddressRows(layout_of(np.random.default_rng(0), 1))
        assert rows.budget_bytes == 64 << 20
        assert rows._room * rows.row_bytes <= 64 << 20 < (rows._room + 1) * rows.row_bytes

    def test_a_kept_row_is_found_again(self) -> None:
        rows = AddressRows(layout_of(np.random.default_rng(0), 3))
        assert rows.lists([5])[0][0] is rows.lists([6, 5])[0][1]

    def test_ids_are_checked(self) -> None:
        with pytest.raises(LayoutError, match="outside"):
            AddressRows(layout_of(np.random.default_rng(0), 3)).lists([40])


def piece(region: Region, offset: int, stride: int, size: int) -> BlockLayout:
    """Blocks of one piece, as many as fit."""
    count = (region.nbytes - offset - size) // stride + 1
    return BlockLayout((region,), np.array([0]), np.array([offset]), np.array([stride]), np.array([size]), count)


class TestSharedMemory:
    """Two groups of two layers over the same bytes, as in a hybrid model."""

    SPEC = CacheSpec((CacheGroup(Kind.FULL, 4), CacheGroup(Kind.SLIDING_WINDOW, 4, window=8)), 4)

    def layouts(self) -> tuple[BlockLayout, BlockLayout, npt.NDArray[np.uint8]]:
        memory = np.zeros((2, 8, 32), np.uint8)  # two layers a group, eight blocks
        layout = BlockLayout.of_arrays(*memory)
        return layout, BlockLayout.of_arrays(*memory), memory

    def test_a_copy_touches_only_the_owning_groups_layers(self) -> None:
        first = np.zeros((3, 8, 32), np.uint8)  # group 0: layers 0 and 2; group 1: layer 1
        groups = BlockLayout.of_arrays(first[0], first[2]), BlockLayout.of_arrays(first[1])
        mine = database(self.SPEC, *groups)
        for group, layers in ((0, {0, 2}), (1, {1})):
            first[:] = 0
            for view in mine.buffers(group, [5]).views(0):
                view[:] = b"\xff" * len(view)
            touched = {(layer, block) for layer, block in np.argwhere(first.any(axis=2)).tolist()}
            assert touched == {(layer, 5) for layer in layers}

    def test_a_block_belongs_to_one_group_at_a_time(self) -> None:
        a, b, _ = self.layouts()
        mine = database(self.SPEC, a, b, null_block=0)
        mine.check_owners([[1, 2, 0], [3, 0, 4]])
        with pytest.raises(LayoutError, match="block 3 of group 0 and block 3 of group 1"):
            mine.check_owners([[1, 3], [3, 0]])
        with pytest.raises(LayoutError, match="1 block tables, but 2 layouts"):
            mine.check_owners([[1, 3]])

    @pytest.mark.parametrize("null", [-1, 0, 7, 1000])
    def test_any_id_may_be_the_null_block(self, null: int) -> None:
        a, b, _ = self.layouts()
        mine = database(self.SPEC, a, b, null_block=null)
        mine.check_owners([[1, 2, null], [null, 3, null]])
        mine.check_owners([[null], []])
        kept, blocks = mine.blocks(0, mine.chunks(12, 3), [1, null, 2])
        assert (kept.ids.tolist(), blocks.tolist()) == ([0, 2], [[1], [2]])
        with pytest.raises(LayoutError, match="block 2 of group 0 and block 2 of group 1"):
            mine.check_owners([[1, 2, null], [null, 2, null]])

    def test_interleaved_groups_of_one_region_share_no_bytes(self) -> None:
        region = Region.of(np.zeros(128, np.uint8).data)
        database(self.SPEC, piece(region, 0, 16, 8), piece(region, 8, 16, 8)).check_owners([[1, 2], [2, 3]])

    def test_pages_of_different_sizes_share_bytes_under_different_ids(self) -> None:
        region = Region.of(np.zeros(128, np.uint8).data)
        mine = database(self.SPEC, piece(region, 0, 8, 8), piece(region, 0, 16, 16))
        mine.check_owners([[1, 4], [1, 3]])  # bytes 8..16 and 32..40; 16..32 and 48..64
        with pytest.raises(LayoutError, match="block 3 of group 0 and block 1 of group 1"):
            mine.check_owners([[0, 3, 9], [1, 3]])

    def test_regions_that_overlap_in_part(self) -> None:
        memory = np.zeros(96, np.uint8)
        a, b = piece(Region.of(memory[:64].data), 0, 8, 8), piece(Region.of(memory[32:].data), 0, 8, 8)
        mine = database(self.SPEC, a, b)
        mine.check_owners([[1, 4], [1, 4]])  # block 4 of a is block 0 of b
        with pytest.raises(LayoutError, match="block 5 of group 0 and block 1 of group 1"):
            mine.check_owners([[1, 5], [1, 4]])

    @settings(deadline=None, max_examples=200)
    @given(st.data())
    def test_owners_equal_a_plain_map_of_bytes(self, data: st.DataObject) -> None:
        memory, layouts, tables, owned = np.zeros(200, np.uint8), [], [], []
        for _ in range(2):
            size, gap, offset = (data.draw(st.integers(low, 9)) for low in (1, 0, 0))
            cut = data.draw(st.integers(0, 40))
            layouts.append(piece(Region.of(memory[cut:].data), offset, size + gap, size))
            tables.append(data.draw(st.lists(st.integers(0, layouts[-1].num_blocks - 1), max_size=4)))
            starts = [cut + offset + i * (size + gap) for i in tables[-1]]
            owned.append({byte for start in starts for byte in range(start, start + size)})
        mine = database(self.SPEC, *layouts)
        if owned[0] & owned[1]:
            with pytest.raises(LayoutError, match="lie in the same bytes"):
                mine.check_owners(tables)
        else:
            mine.check_owners(tables)

    def test_groups_with_memory_of_their_own_may_use_the_same_ids(self) -> None:
        a, b = self.layouts()[0], self.layouts()[0]
        database(self.SPEC, a, b).check_owners([[1, 2], [1, 2]])

    def test_null_blocks_are_never_stored(self) -> None:
        a, b, _ = self.layouts()
        mine = database(self.SPEC, a, b, null_block=0)
        kept, blocks = mine.blocks(1, mine.chunks(16, 4, group=1), [0, 5, 0, 7])
        assert (kept.ids.tolist(), blocks.tolist()) == ([1, 3], [[5], [7]])
        assert kept.hash_ids.tolist() == [1, 3]
        plain = database(self.SPEC, a, b)
        assert plain.blocks(1, plain.chunks(16, 4, group=1), [0, 5, 0, 7])[1].tolist() == [[0], [5], [0], [7]]

    def test_a_chunk_with_one_null_block_of_several_is_not_stored(self) -> None:
        a, b, _ = self.layouts()
        mine = database(self.SPEC, a, b, null_block=0, blocks_per_chunk=[2, 2])
        assert mine.blocks(0, mine.chunks(12, 3), [1, 2, 3, 0, 4, 5])[0].ids.tolist() == [0, 2]
