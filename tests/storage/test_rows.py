"""``Rows``: reads and writes of the blocks of several groups in one row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from persistkv.memory.rows import RowBlocks, Rows, StagedBlocks

TWO_GROUPS = (((0, 4096), (8192, 100)), ((4096, 4096),))


@pytest.mark.parametrize("block_ids", [[0], [1, 2, 3], [5, 4, 1, 2, 3, 7]])
@pytest.mark.parametrize("group", [0, 1])
def test_rows_pieces_equal_gathered_bytes_without_copy(
    make_rows: Callable[..., Rows],
    block_ids: list[int],
    group: int,
) -> None:
    rows = make_rows(8, 8192, (((0, 8192),), ((0, 4096), (6144, 100))))
    pieces = rows.pieces(group, block_ids)
    assert b"".join(pieces) == rows.gather(group, block_ids).tobytes()
    assert all(
        np.shares_memory(np.frombuffer(piece, np.uint8), rows.array) for piece in pieces
    )


def test_rows_pieces_adjacent_whole_rows_are_joined(
    make_rows: Callable[..., Rows],
) -> None:
    rows = make_rows(8, 8192)
    assert list(map(len, rows.pieces(0, [2, 3, 4, 7, 1, 2]))) == [
        3 * 8192,
        8192,
        2 * 8192,
    ]


@pytest.mark.parametrize("block_ids", [[3], [3, 4, 5], [5, 3, 9], [9, 9]])
def test_rows_gather_returns_valid_ranges_only(
    make_rows: Callable[..., Rows],
    block_ids: list[int],
) -> None:
    rows = make_rows(16, 12288, TWO_GROUPS)
    gathered = rows.gather(0, block_ids)
    assert gathered.shape == (len(block_ids), 4196)
    assert gathered.flags.c_contiguous
    for row, block in zip(block_ids, gathered, strict=True):
        assert block[:4096].tobytes() == rows.array[row, :4096].tobytes()
        assert block[4096:].tobytes() == rows.array[row, 8192:8292].tobytes()
    assert (
        rows.gather(1, block_ids).tobytes()
        == rows.array[block_ids, 4096:8192].tobytes()
    )


def test_rows_gather_copies_adjacent_whole_rows(make_rows: Callable[..., Rows]) -> None:
    rows = make_rows(8, 4096)
    assert not np.shares_memory(rows.gather(0, [2, 3, 4]), rows.array)


def test_rows_places_write_through_to_row(make_rows: Callable[..., Rows]) -> None:
    rows = make_rows(8, 12288, TWO_GROUPS)
    first, second = rows.places(0, 5)
    first[:] = bytes(4096)
    second[:] = bytes(100)
    assert not rows.array[5, :4096].any()
    assert not rows.array[5, 8192:8292].any()
    assert rows.array[5, 8292:].any()


def test_rows_check_absent_row_raises(make_rows: Callable[..., Rows]) -> None:
    rows = make_rows(8, 4096)
    rows.check([])
    with pytest.raises(ValueError, match="rows 0 to 8 do not exist: there are 8 rows"):
        rows.check([0, 8])


def test_rows_buffer_not_multiple_of_stride_raises(
    make_rows: Callable[..., Rows],
) -> None:
    layout = make_rows(1, 4096).layout
    with pytest.raises(ValueError, match="no multiple of the row stride"):
        Rows(memoryview(bytearray(5000)), layout)


def test_staged_blocks_gather_spans_runs_as_one_sequence(
    make_rows: Callable[..., Rows],
) -> None:
    rows = make_rows(8, 4096)
    staged = StagedBlocks([rows.array[0:2], rows.array[4:5], rows.array[6:8]])
    whole = rows.array[[0, 1, 4, 6, 7]]
    for start in range(5):
        for stop in range(start + 1, 6):
            assert staged.gather(start, stop).tobytes() == whole[start:stop].tobytes()
    assert RowBlocks(rows, 0, [4, 1]).gather(1, 2).tobytes() == rows.array[1].tobytes()
