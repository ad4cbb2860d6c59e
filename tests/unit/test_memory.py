"""Regions, buffers and block layouts, against a byte-by-byte reference."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.errors import LayoutError
from kvpool.memory import BlockLayout, Buffers, Region

I64 = np.int64
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def int64(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, I64)


# -- regions ----------------------------------------------------------------------------------------------------------


def test_a_region_shows_and_changes_its_buffer() -> None:
    memory = bytearray(b"abcdef")
    region = Region.of(memory)
    assert bytes(region.view) == b"abcdef"
    region.view[0:2] = b"XY"
    region.array[5] = ord("Z")
    assert memory == b"XYcdeZ"


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "c16", [("a", "i4"), ("b", "u1")], "?"])
def test_a_region_takes_arrays_of_any_element(dtype: Any) -> None:
    array = np.zeros((2, 3), dtype)
    assert Region.of(array).nbytes == array.nbytes


@pytest.mark.parametrize(
    "buffer",
    [b"read only", np.zeros(8, np.uint8)[::2], np.asfortranarray(np.zeros((3, 2)))],
    ids=["readonly", "strided", "fortran"],
)
def test_a_region_refuses_what_is_no_plain_writable_span(buffer: Any) -> None:
    with pytest.raises(LayoutError, match="writable, C-contiguous"):
        Region.of(buffer)


@pytest.mark.parametrize(("address", "nbytes"), [(0, 1), (-1, 4), (16, -1)])
def test_an_impossible_span_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(LayoutError, match="not a span"):
        Region(address, nbytes, None)


def test_an_empty_region_has_an_empty_view() -> None:
    region = Region.of(bytearray())
    assert len(region.view) == 0
    assert region.array.shape == (0,)


def test_device_memory_is_never_shown() -> None:
    region = Region(4096, 16, None, device="cuda:0")
    for show in (lambda: region.view, lambda: region.array):
        with pytest.raises(LayoutError, match="cuda:0"):
            show()


def test_a_view_keeps_the_memory_alive_without_its_region() -> None:
    class Owner(np.ndarray[Any, Any]):
        pass

    array = np.full(1 << 16, 7, np.uint8).view(Owner)
    gone = weakref.ref(array)
    view = Region.of(array).view[8:16]
    del array
    gc.collect()
    assert gone() is not None
    assert bytes(view) == bytes([7] * 8)
    del view
    gc.collect()
    assert gone() is None


# -- buffers ----------------------------------------------------------------------------------------------------------


def test_buffers_describe_many_keys_and_pieces() -> None:
    a, b = bytearray(range(16)), bytearray(range(100, 132))
    buffers = Buffers(
        (Region.of(a), Region.of(b)),
        np.array([1, 0, 1], np.intp),
        np.array([[0, 4, 8], [16, 0, 31]], I64),
        np.array([[2, 3, 0], [4, 16, 1]], I64),
    )
    assert len(buffers) == 2
    assert buffers.nbytes.tolist() == [5, 21]
    assert b"".join(buffers.views(0)) == bytes([100, 101, 4, 5, 6])
    assert b"".join(buffers.views(1)) == bytes([116, 117, 118, 119, *range(16), 131])
    base = [buffers.regions[i].address for i in (1, 0, 1)]
    assert buffers.addresses.tolist() == [
        [base[0], base[1] + 4, base[2] + 8],
        [base[0] + 16, base[1], base[2] + 31],
    ]
    buffers.views(0)[1][:] = b"xyz"
    assert a[4:7] == b"xyz"


def test_selected_keys_come_in_the_order_asked_for() -> None:
    buffers = Buffers.of(bytearray(b"a"), bytearray(b"bb"), bytearray(b"ccc"))
    for index, expected in (([2, 0], [3, 1]), (np.array([False, True, True]), [2, 3]), ([], [])):
        chosen = buffers.select(index)
        assert chosen.nbytes.tolist() == expected
    assert bytes(buffers.select([2]).views(0)[0]) == b"ccc"


def test_no_keys_are_no_problem() -> None:
    for buffers in (Buffers.of(), Buffers.single(Region.of(bytearray(4)), [], 4)):
        assert len(buffers) == 0
        assert buffers.nbytes.tolist() == []
        assert buffers.addresses.shape[0] == 0


@pytest.mark.parametrize(
    ("offset", "size"),
    [(-1, 2), (0, -1), (0, 9), (8, 1), (9, 0), (1, 8), (2**62, 2**62), (0, 2**63 - 1), (2**63 - 1, 1)],
)
def test_a_piece_outside_its_region_is_refused(offset: int, size: int) -> None:
    with pytest.raises(LayoutError, match="outside its region"):
        Buffers.single(Region.of(bytearray(8)), [0, offset], [1, size])


@pytest.mark.parametrize("index", [-1, 1])
def test_a_region_index_out_of_range_is_refused(index: int) -> None:
    region = (Region.of(bytearray(8)),)
    one = np.ones((1, 1), I64)
    with pytest.raises(LayoutError, match="region index"):
        Buffers(region, np.array([index], np.intp), one, one)
    with pytest.raises(LayoutError, match="region index"):
        BlockLayout(region, np.array([index], np.intp), int64(0), int64(2), int64(2), 2)


def test_shapes_that_do_not_fit_are_refused() -> None:
    region = Region.of(bytearray(8))
    with pytest.raises(LayoutError, match="do not fit"):
        Buffers((region,), np.zeros(2, np.intp), np.zeros((1, 1), I64), np.zeros((1, 1), I64))
    with pytest.raises(LayoutError, match="do not fit"):
        Buffers.single(region, [0, 1, 2], [1, 1])


# -- block layouts ----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    layout: BlockLayout
    memory: list[bytearray]
    ids: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Pieces of any size and stride, spread over several regions; regions have slack before, between and after."""
    num_blocks = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    num_regions = draw(st.integers(1, 3))
    region, offsets, strides, ends = [], [], [], [0] * num_regions
    for size in sizes:
        r = draw(st.integers(0, num_regions - 1))
        stride = size + draw(st.integers(0, 9))
        start = ends[r] + draw(st.integers(0, 5))
        region.append(r)
        offsets.append(start)
        strides.append(stride)
        ends[r] = start + (num_blocks - 1) * stride + size
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    memory = [bytearray(rng.bytes(end + draw(st.integers(0, 4)))) for end in ends]
    layout = BlockLayout(
        tuple(Region.of(m) for m in memory),
        np.array(region, np.intp),
        int64(*offsets),
        int64(*strides),
        int64(*sizes),
        num_blocks,
    )
    ids = draw(st.lists(st.integers(0, num_blocks - 1), max_size=8))
    return Case(layout, memory, ids)


def reference_block(case: Case, block: int) -> bytes:
    """A block's bytes, picked one by one."""
    layout = case.layout
    picked = bytearray()
    for j in range(len(layout.region)):
        for k in range(int(layout.sizes[j])):
            picked.append(case.memory[layout.region[j]][int(layout.offsets[j]) + block * int(layout.strides[j]) + k])
    return bytes(picked)


@relaxed
@given(cases())
def test_gather_equals_the_reference(case: Case) -> None:
    out = np.zeros((len(case.ids), case.layout.block_bytes), np.uint8)
    case.layout.gather(case.ids, out)
    assert [row.tobytes() for row in out] == [reference_block(case, b) for b in case.ids]


@relaxed
@given(cases(), st.integers(0, 2**32))
def test_scatter_equals_the_reference_and_touches_nothing_else(case: Case, seed: int) -> None:
    layout, ids = case.layout, list(dict.fromkeys(case.ids))
    rows = np.random.default_rng(seed).integers(0, 256, (len(ids), layout.block_bytes), np.uint8)
    expected = [bytearray(m) for m in case.memory]
    for block, row in zip(ids, rows, strict=True):
        values = iter(row.tolist())
        for j in range(len(layout.region)):
            for k in range(int(layout.sizes[j])):
                start = int(layout.offsets[j]) + block * int(layout.strides[j])
                expected[layout.region[j]][start + k] = next(values)
    layout.scatter(ids, rows)
    assert case.memory == expected


@relaxed
@given(cases(), st.integers(1, 3))
def test_buffers_of_chunks_show_the_same_bytes_as_gather(case: Case, blocks_per_chunk: int) -> None:
    n = len(case.ids) // blocks_per_chunk
    ids = np.array(case.ids[: n * blocks_per_chunk], np.intp).reshape(n, blocks_per_chunk)
    buffers = case.layout.buffers(ids)
    assert len(buffers) == n
    assert buffers.nbytes.tolist() == [blocks_per_chunk * case.layout.block_bytes] * n
    for i in range(n):
        assert b"".join(buffers.views(i)) == b"".join(reference_block(case, b) for b in ids[i].tolist())
    if blocks_per_chunk == 1:
        flat = case.layout.buffers(ids[:, 0])
        assert np.array_equal(flat.addresses, buffers.addresses)


def test_rows_may_be_part_of_a_wider_array() -> None:
    memory = np.arange(24, dtype=np.uint8).reshape(4, 6)
    layout = BlockLayout.of_arrays(memory)
    wide = np.zeros((2, 10), np.uint8)
    layout.gather([3, 1], wide[:, 2:8])
    assert wide[:, 2:8].tolist() == memory[[3, 1]].tolist()
    assert not wide[:, :2].any()
    assert not wide[:, 8:].any()
    layout.scatter([0], wide[:1, 2:8])
    assert memory[0].tolist() == memory[3].tolist()


@pytest.mark.parametrize("ids", [range(8), [6, 1, 2, 3, 7, 0, 5, 4]], ids=["in order", "mixed"])
def test_blocks_are_copied_without_memory_in_between(ids: Sequence[int]) -> None:
    layers = np.ones((6, 8, 1 << 16), np.uint8)  # one allocation: numpy copies twice if rows may lie between the layers
    layout = BlockLayout.of_arrays(*layers[:4], layers[5], layers[4])  # not evenly spaced, either
    _copies_once(layout, ids, np.zeros((len(ids), layout.block_bytes), np.uint8))


def test_rows_between_evenly_spaced_layers_are_copied_without_memory_in_between() -> None:
    memory = np.ones((9, 8, 1 << 16), np.uint8)
    memory[1:4] = 0
    layout = BlockLayout.of_arrays(memory[0], memory[4], memory[8])
    rows = memory[1:4].reshape(8, layout.block_bytes)
    _copies_once(layout, range(8), rows)
    assert rows.all()


def _copies_once(layout: BlockLayout, ids: Sequence[int], rows: npt.NDArray[np.uint8]) -> None:
    for copy in (layout.gather, layout.scatter):
        copy(ids, rows)
        tracemalloc.start()
        try:
            copy(ids, rows)
            assert tracemalloc.get_traced_memory()[1] < 1 << 16
        finally:
            tracemalloc.stop()


def test_pieces_at_one_address_are_not_taken_for_evenly_spaced_ones() -> None:
    memory = bytearray(range(24))
    layout = BlockLayout(
        (Region.of(memory),), np.zeros(3, np.intp), int64(0, 0, 4), int64(12, 12, 12), int64(2, 2, 2), 2
    )
    out = np.zeros((2, 6), np.uint8)
    layout.gather([1, 0], out)
    assert out.tolist() == [[12, 13, 12, 13, 16, 17], [0, 1, 0, 1, 4, 5]]


def test_of_arrays_has_one_piece_a_layer() -> None:
    keys, values = np.arange(12, dtype=np.float32).reshape(3, 4), np.arange(6, dtype=np.int16).reshape(3, 2)
    layout = BlockLayout.of_arrays(keys, values)
    assert layout.block_bytes == 16 + 4
    out = np.zeros((1, 20), np.uint8)
    layout.gather([2], out)
    assert out.tobytes() == keys[2].tobytes() + values[2].tobytes()


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [np.zeros((2, 4)), np.zeros((3, 4))],
        [np.zeros((4, 4))[:, ::2]],
        [np.zeros((0, 4))],
        [np.zeros((4, 0))],
        [np.zeros(())],
    ],
    ids=["none", "unequal", "strided", "no blocks", "empty blocks", "scalar"],
)
def test_arrays_that_are_no_layers_are_refused(layers: list[npt.NDArray[Any]]) -> None:
    with pytest.raises(LayoutError):
        BlockLayout.of_arrays(*layers)


@pytest.mark.parametrize(
    ("offset", "stride", "size", "blocks"),
    [(-1, 4, 4, 2), (0, 3, 4, 2), (0, 4, 0, 2), (0, 4, -4, 2), (1, 4, 4, 4), (0, 4, 4, 5), (0, 4, 4, 0), (0, 4, 4, -1)],
)
def test_impossible_layouts_are_refused(offset: int, stride: int, size: int, blocks: int) -> None:
    region = (Region.of(bytearray(16)),)
    with pytest.raises(LayoutError):
        BlockLayout(region, np.zeros(1, np.intp), int64(offset), int64(stride), int64(size), blocks)


def test_a_layout_needs_one_entry_a_piece() -> None:
    region = (Region.of(bytearray(16)),)
    with pytest.raises(LayoutError, match="one entry a piece"):
        BlockLayout(region, np.zeros(1, np.intp), int64(0, 0), int64(4), int64(4), 2)


@pytest.mark.parametrize("ids", [[4], [-1], [0, 2**40], [True, False], [1.0]])
def test_ids_that_name_no_block_are_refused(ids: list[Any]) -> None:
    layout = BlockLayout.of_arrays(np.zeros((4, 6), np.uint8))
    rows = np.zeros((len(ids), 6), np.uint8)
    for use in (layout.check, layout.buffers, lambda i: layout.gather(i, rows), lambda i: layout.scatter(i, rows)):
        with pytest.raises(LayoutError, match="block id"):
            use(ids)


def test_rows_that_do_not_fit_are_refused() -> None:
    layout = BlockLayout.of_arrays(np.zeros((4, 6), np.uint8))
    wrong: list[npt.NDArray[Any]] = [np.zeros((2, 6), np.uint8), np.zeros((1, 5), np.uint8), np.zeros((1, 6), np.int8)]
    for rows in wrong:
        for copy in (layout.gather, layout.scatter):
            with pytest.raises(LayoutError, match="need rows of shape"):
                copy([0], rows)
    with pytest.raises(LayoutError, match="need rows of shape"):
        layout.gather([[0, 1]], np.zeros((1, 6), np.uint8))
    with pytest.raises(LayoutError, match="block ids of shape"):
        layout.buffers(0)


def test_nothing_to_copy_is_no_problem() -> None:
    layout = BlockLayout.of_arrays(np.ones((4, 6), np.uint8))
    layout.gather([], np.zeros((0, 6), np.uint8))
    layout.scatter([], np.zeros((0, 6), np.uint8))
    assert len(layout.buffers([])) == 0


def test_headroom_lies_in_the_region() -> None:
    region = Region.of(bytearray(100))
    assert Buffers.single(region, [16, 60], 40, headroom=16).headroom == 16
    for offset, headroom in ((15, 16), (50, -1)):
        with pytest.raises(LayoutError, match="in front of a value"):
            Buffers.single(region, [offset], 10, headroom=headroom)
