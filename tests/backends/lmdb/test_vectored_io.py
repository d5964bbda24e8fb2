"""Vectored I/O: streams in pieces of any length, more buffers than one call accepts, short
transfers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persistkv_lmdb.payloads.segments import (
    BounceBuffer,
    after_bytes,
    first_bytes,
    read_all,
    starts_aligned,
    write_all,
)

PAGE = 4096


def pattern(length: int, seed: int = 0) -> bytes:
    return bytes(
        (7 * position + position // 251 + seed) % 256 for position in range(length)
    )


@pytest.fixture(scope="module")
def rows() -> memoryview:
    """Page-aligned memory, like rows."""
    memory = memoryview(mmap.mmap(-1, 64 * PAGE))
    memory[:] = pattern(len(memory))
    return memory


pieces = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 40), st.integers(1, 20)).map(
            lambda p: ("row", PAGE * p[0], PAGE * p[1])
        ),
        st.tuples(st.integers(0, 100_000), st.integers(0, 9000)).map(
            lambda p: ("row", *p)
        ),
        st.integers(0, 5000).map(lambda length: ("bytes", 0, length)),
        st.integers(1, 30).map(lambda count: ("bytes", 0, PAGE * count)),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(
    cut=pieces,
    batch=st.sampled_from([1, 2, 3, 16, 64]),
)
def test_bounce_any_stream_yields_aligned_buffers_with_same_bytes(
    rows: memoryview,
    cut: list[tuple[str, int, int]],
    batch: int,
) -> None:
    chunks = [
        rows[at : at + length] if kind == "row" else pattern(length, at)
        for kind, at, length in cut
    ]
    written = bytearray()
    # batches that a pending write may still read: copied data stays valid until
    # ``wait_for_writes``
    lent: list[list[memoryview]] = []

    def wait_for_writes() -> None:
        for buffers in lent:
            written.extend(b"".join(buffers))
        lent.clear()

    for buffers in BounceBuffer(wait_for_writes, PAGE * batch).aligned_batches(
        iter(chunks)
    ):
        # at most as many bytes again are copied
        assert sum(map(len, buffers)) <= 2 * PAGE * batch
        assert all(
            len(buffer) and not len(buffer) % PAGE and starts_aligned(buffer)
            for buffer in buffers
        )
        lent.append(buffers)
    wait_for_writes()
    expected = b"".join(map(bytes, chunks))
    assert written == expected + bytes(-len(expected) % PAGE)


@pytest.mark.parametrize("pages", [1, 2, 4])
def test_bounce_divides_stream_into_batches(pages: int) -> None:
    """The disk writes one while the rest of the stream is gathered."""
    memory = memoryview(mmap.mmap(-1, 32 * PAGE))
    stream = (
        memory[at : at + pages * PAGE] for at in range(0, 32 * PAGE, pages * PAGE)
    )
    lists = list(BounceBuffer(lambda: None, 8 * PAGE).aligned_batches(stream))
    assert [sum(map(len, buffers)) // PAGE for buffers in lists] == [8, 8, 8, 8]


def test_bounce_aligned_pieces_are_not_copied(rows: memoryview) -> None:
    (buffers,) = BounceBuffer(lambda: None).aligned_batches(
        iter([rows[: 8 * PAGE], pattern(100), bytes(PAGE - 100), rows[8 * PAGE :]])
    )
    assert [buffer.obj is rows.obj for buffer in buffers] == [True, False, True]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 50), max_size=8), data=st.data())
def test_first_and_after_bytes_split_buffers_at_count(
    lengths: list[int],
    data: st.DataObject,
) -> None:
    buffers = [memoryview(pattern(length, seed)) for seed, length in enumerate(lengths)]
    whole = b"".join(buffers)
    count = data.draw(st.integers(0, len(whole)))
    assert b"".join(first_bytes(buffers, count)) == whole[:count]
    assert b"".join(after_bytes(buffers, count)) == whole[count:]


@pytest.mark.parametrize("most", [1, 100, 5000, PAGE + 1, 1 << 30])
def test_read_all_write_all_short_transfers_are_continued(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    """Simulate a kernel that transfers at most ``most`` bytes per call, and accepts at most 1,024
    buffers."""
    calls = []

    def shortened(call: Callable[..., int]) -> Callable[..., int]:
        def transfer(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            assert len(buffers) <= 1024
            calls.append(len(buffers))
            return call(fd, first_bytes(buffers, most), offset)

        return transfer

    payload = pattern(20_000)
    views = [memoryview(payload)[at : at + 9] for at in range(0, len(payload), 9)]
    monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
    monkeypatch.setattr(os, "preadv", shortened(os.preadv))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(fd, views, 123)
    found = bytearray(len(payload))
    assert read_all(
        fd, [memoryview(found)[at : at + 7] for at in range(0, len(found), 7)], 123
    )
    assert found == payload
    assert not read_all(fd, [memoryview(bytearray(len(payload) + 1))], 123)
    os.close(fd)
    assert len(calls) > 3


def test_write_all_short_aligned_write_continues_at_page(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offsets = []
    pwritev = os.pwritev

    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        offsets.append(offset)
        return pwritev(fd, first_bytes(buffers, PAGE + 700), offset)

    monkeypatch.setattr(os, "pwritev", short)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(fd, [memoryview(pattern(3 * PAGE))], 0, PAGE)
    assert offsets == [0, PAGE, 2 * PAGE]
    assert os.pread(fd, 4 * PAGE, 0) == pattern(3 * PAGE)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="Input/output"):
        write_all(fd, [memoryview(pattern(PAGE))], 0, PAGE)
    os.close(fd)
