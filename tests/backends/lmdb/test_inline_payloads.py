"""Payloads stored as rows of 256 KiB, from streams whose parts have any length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persistkv.storage.catalogue import TableRows
from persistkv.storage.format.codec import Buffer
from persistkv_lmdb.layout import PIECES
from persistkv_lmdb.payloads.inline import PIECE_BYTES, InlinePayloads, read_pieces

NAME, NEIGHBOURS = b"n" * 32, (b"m" * 32, b"n" * 31 + b"o")


def pattern(length: int) -> bytes:
    return (b"%d," * 20 % tuple(range(20)) * (length // 40 + 1))[:length]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[lmdb.Environment]:
    with closing(
        lmdb.open(str(tmp_path), map_size=64 << 20, max_dbs=1, sync=False)
    ) as env:
        env.open_db(PIECES.encode())
        yield env


@contextmanager
def transaction(env: lmdb.Environment) -> Iterator[TableRows]:
    """Run a write transaction, and roll it back."""
    txn = env.begin(write=True, buffers=True)
    try:
        yield TableRows(txn, {PIECES: env.open_db(PIECES.encode(), txn=txn)})
    finally:
        txn.abort()


def stored(rows: TableRows) -> list[tuple[bytes, bytes]]:
    return [(bytes(key), bytes(value)) for key, value in rows.range(PIECES, b"")]


def write(rows: TableRows, name: bytes, stream: Iterable[Buffer]) -> None:
    InlinePayloads(rows).write(name, iter(stream))


lengths = st.one_of(
    st.integers(0, 5000),
    st.sampled_from(
        [
            PIECE_BYTES,
            PIECE_BYTES - 1,
            PIECE_BYTES + 1,
            2 * PIECE_BYTES,
            3 * PIECE_BYTES + 7,
        ]
    ),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(lengths, max_size=5), st.data())
def test_inline_payloads_any_stream_cut_reads_back_any_span(
    env: lmdb.Environment,
    cuts: list[int],
    data: st.DataObject,
) -> None:
    payload = pattern(sum(cuts))
    ends = [sum(cuts[: index + 1]) for index in range(len(cuts))]
    with transaction(env) as rows:
        write(
            rows,
            NAME,
            [
                payload[end - length : end]
                for end, length in zip(ends, cuts, strict=True)
            ],
        )
        held = stored(rows)
        assert b"".join(value for _, value in held) == payload
        assert [key for key, _ in held] == [
            NAME + index.to_bytes(4, "big") for index in range(len(held))
        ]
        assert all(len(value) == PIECE_BYTES for _, value in held[:-1])

        offset = data.draw(st.integers(0, len(payload)))
        length = data.draw(st.integers(0, len(payload) - offset))
        middle = data.draw(st.integers(0, length))
        buffers = [bytearray(middle), bytearray(length - middle)]
        assert read_pieces(
            rows, NAME, offset, [memoryview(buffer) for buffer in buffers]
        )
        assert b"".join(buffers) == payload[offset : offset + length]
        beyond = memoryview(bytearray(len(payload) - offset + 1))
        assert not read_pieces(rows, NAME, offset, [beyond])


def test_inline_payloads_write_reused_buffer_stores_each_content(
    env: lmdb.Environment,
) -> None:
    part = bytearray(pattern(PIECE_BYTES))

    def stream() -> Iterator[memoryview]:
        for index in range(3):
            part[0] = index
            yield memoryview(part)

    with transaction(env) as rows:
        write(rows, NAME, stream())
        assert [value[0] for _, value in stored(rows)] == [0, 1, 2]


def test_inline_payloads_delete_keeps_adjacent_names(env: lmdb.Environment) -> None:
    with transaction(env) as rows:
        for name in (NAME, *NEIGHBOURS):
            write(rows, name, [pattern(2 * PIECE_BYTES + 1)])
        payloads = InlinePayloads(rows)
        payloads.delete(NAME)
        payloads.delete(b"z" * 32)
        assert {key[:32] for key, _ in stored(rows)} == set(NEIGHBOURS)
        assert len(stored(rows)) == 6
