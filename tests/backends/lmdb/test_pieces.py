"""Payloads in pieces of 1 MiB, however the stream is cut."""

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persistkv_lmdb.layout import Databases, Transaction
from persistkv_lmdb.pieces import PIECE_BYTES, delete_pieces, read_pieces, write_pieces

NAME, NEIGHBOURS = b"n" * 32, (b"m" * 32, b"n" * 31 + b"o")


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    with lmdb.open(str(tmp_path_factory.mktemp("pieces")), map_size=256 << 20, max_dbs=32, sync=False) as env:
        yield env


@pytest.fixture
def transaction(env):
    databases = Databases(*[env.open_db(name.encode()) for name in Databases._fields])
    with env.begin(write=True, buffers=True) as txn:
        txn.drop(databases.pieces, delete=False)
        yield Transaction(txn, databases)


def pattern(length):
    return (b"%d," * 20 % tuple(range(20)) * (length // 40 + 1))[:length]


def stored(transaction):
    return [(bytes(key), bytes(value)) for key, value in transaction.txn.cursor(transaction.db.pieces)]


lengths = st.one_of(
    st.integers(0, 5000),
    st.sampled_from([PIECE_BYTES, PIECE_BYTES - 1, PIECE_BYTES + 1, 2 * PIECE_BYTES, 3 * PIECE_BYTES + 7]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, max_size=5), st.data())
def test_any_cut_and_any_span(env, cuts, data):
    databases = Databases(*[env.open_db(name.encode()) for name in Databases._fields])
    payload = pattern(sum(cuts))
    ends = [sum(cuts[: index + 1]) for index in range(len(cuts))]
    chunks = [payload[end - length : end] for end, length in zip(ends, cuts, strict=True)]
    with env.begin(write=True, buffers=True) as txn:
        txn.drop(databases.pieces, delete=False)
        transaction = Transaction(txn, databases)
        write_pieces(transaction, NAME, chunks)
        rows = stored(transaction)
        assert b"".join(value for _, value in rows) == payload
        assert [key for key, _ in rows] == [NAME + index.to_bytes(4, "big") for index in range(len(rows))]
        assert all(len(value) == PIECE_BYTES for _, value in rows[:-1])

        offset = data.draw(st.integers(0, len(payload)))
        length = data.draw(st.integers(0, len(payload) - offset))
        middle = data.draw(st.integers(0, length))
        buffers = [bytearray(middle), bytearray(length - middle)]
        assert read_pieces(transaction, NAME, offset, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == payload[offset : offset + length]
        beyond = memoryview(bytearray(len(payload) - offset + 1))
        assert not read_pieces(transaction, NAME, offset, [beyond])


def test_whole_pieces_are_not_gathered(transaction):
    """A chunk of a piece's size goes to LMDB from where it lies; what is reused behind it does no harm."""
    chunk = bytearray(pattern(PIECE_BYTES))

    def stream():
        for index in range(3):
            chunk[0] = index
            yield memoryview(chunk)

    write_pieces(transaction, NAME, stream())
    assert [value[0] for _, value in stored(transaction)] == [0, 1, 2]


def test_deletion_spares_the_neighbours(transaction):
    for name in (NAME, *NEIGHBOURS):
        write_pieces(transaction, name, [pattern(2 * PIECE_BYTES + 1)])
    delete_pieces(transaction, NAME)
    delete_pieces(transaction, b"z" * 32)
    assert {key[:32] for key, _ in stored(transaction)} == set(NEIGHBOURS)
    assert len(stored(transaction)) == 6
