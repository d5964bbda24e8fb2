"""Huge and resident pages: no byte changes, whether or not the kernel supports them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from persistkv.memory import libc
from persistkv.memory.libc import address_of
from persistkv.memory.pages import (
    HUGE_PAGE_BYTES,
    collapse,
    map_aligned,
    prefault,
    prefer_huge_pages,
    use_huge_pages,
)
from persistkv.storage.host.server.child import map_rows
from tests.memory.mappings import prefers_huge_pages

MakeFile = Callable[[int], tuple[int, mmap.mmap]]


@pytest.fixture
def make_file() -> Iterator[MakeFile]:
    """Return a function that makes shared memory filled with random bytes."""
    fds: list[int] = []

    def make_file(num_bytes: int) -> tuple[int, mmap.mmap]:
        fd = os.memfd_create("test")
        fds.append(fd)
        os.ftruncate(fd, num_bytes)
        memory = mmap.mmap(fd, num_bytes)
        bytes_of(memory)[:] = np.random.default_rng(num_bytes).integers(
            0, 256, num_bytes, dtype=np.uint8
        )
        return fd, memory

    yield make_file
    for fd in fds:
        os.close(fd)


def bytes_of(memory: mmap.mmap) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8)


@pytest.mark.parametrize(
    "num_bytes",
    [mmap.PAGESIZE, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + mmap.PAGESIZE, 40 << 20],
)
def test_use_huge_pages_any_size_keeps_bytes(
    make_file: MakeFile,
    num_bytes: int,
) -> None:
    fd, memory = make_file(num_bytes)
    before = bytes_of(memory).copy()
    use_huge_pages([fd], num_bytes)
    assert np.array_equal(bytes_of(memory), before)
    bytes_of(memory)[::4096] ^= 255
    use_huge_pages([fd], num_bytes)
    assert not np.array_equal(bytes_of(memory), before)
    bytes_of(memory)[::4096] ^= 255
    assert np.array_equal(bytes_of(memory), before)
    assert os.fstat(fd).st_size == num_bytes


def test_use_huge_pages_success_places_memory_in_huge_pages(
    make_file: MakeFile,
) -> None:
    fd, memory = make_file(4 * HUGE_PAGE_BYTES)
    if not use_huge_pages([fd], len(memory)):
        pytest.skip("the kernel gives no huge pages")
    address = map_aligned([fd], len(memory))
    try:
        for start in range(0, len(memory), HUGE_PAGE_BYTES):
            ctypes.string_at(address + start, 1)
        assert held_in_huge_pages(address) == 4 * HUGE_PAGE_BYTES
    finally:
        libc.unmap(address, len(memory))


def held_in_huge_pages(address: int) -> int:
    """Return the bytes of the mapping at this address that huge pages back. They are counted only
    if mapped whole."""
    with open("/proc/self/smaps") as file:
        lines = iter(file)
        assert any(line.startswith(f"{address:x}-") for line in lines)
        return next(
            int(line.split()[1]) << 10
            for line in lines
            if line.startswith("ShmemPmdMapped")
        )


def test_use_huge_pages_regular_file_keeps_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (4 * HUGE_PAGE_BYTES // 256))
    with open(path, "r+b") as file:
        use_huge_pages([file.fileno()], 4 * HUGE_PAGE_BYTES)
    assert path.read_bytes() == bytes(range(256)) * (4 * HUGE_PAGE_BYTES // 256)
    fd = os.open(path, os.O_RDONLY)
    assert not use_huge_pages([fd], 4 * HUGE_PAGE_BYTES)
    os.close(fd)


@pytest.mark.parametrize(
    "num_bytes", [mmap.PAGESIZE, 3 * HUGE_PAGE_BYTES + mmap.PAGESIZE]
)
def test_map_aligned_file_starts_at_huge_page_and_is_shared(
    make_file: MakeFile,
    num_bytes: int,
) -> None:
    fd, memory = make_file(num_bytes)
    address = map_aligned([fd], num_bytes)
    assert not address % HUGE_PAGE_BYTES
    assert ctypes.string_at(address, num_bytes) == memory[:]
    ctypes.memset(address + num_bytes - 1, 7, 1)
    assert memory[-1] == 7


def test_map_aligned_too_large_or_read_only_raises(make_file: MakeFile) -> None:
    fd, _ = make_file(mmap.PAGESIZE)
    with pytest.raises(OSError, match=f"of files of {mmap.PAGESIZE}"):
        map_aligned([fd], mmap.PAGESIZE + 1)
    os.ftruncate(fd, 1 << 62)
    with pytest.raises(OSError, match="cannot be mapped"):
        map_aligned([fd], 1 << 62)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    with pytest.raises(OSError, match="cannot be mapped"):
        map_aligned([read_only], mmap.PAGESIZE)
    os.close(read_only)


def test_collapse_success_maps_huge_pages(make_file: MakeFile) -> None:
    fd, memory = make_file(4 * HUGE_PAGE_BYTES)
    address = map_aligned([fd], len(memory))
    if not collapse(address, len(memory)):
        pytest.skip("the kernel gives no huge pages")
    assert mapped_in_huge_pages(address) == 4 * HUGE_PAGE_BYTES // 1024
    ctypes.memset(address, 7, 2 * HUGE_PAGE_BYTES)
    assert mapped_in_huge_pages(address) == 4 * HUGE_PAGE_BYTES // 1024


def mapped_in_huge_pages(address: int) -> int:
    """Return the KiB in huge pages of the mapping that begins at ``address``."""
    with open("/proc/self/smaps") as file:
        lines = iter(file)
        next(line for line in lines if line.startswith(f"{address:x}-"))
        return next(
            int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped")
        )


def test_prefer_huge_pages_marks_whole_pages_of_the_memory() -> None:
    memory = mmap.mmap(-1, 4 * HUGE_PAGE_BYTES)
    address = address_of(memoryview(memory))
    assert not prefers_huge_pages(address)
    num_bytes = len(memory) - mmap.PAGESIZE
    if not prefer_huge_pages(address + 1, num_bytes):
        pytest.skip("the kernel has no huge pages")
    assert not prefers_huge_pages(address)
    assert prefers_huge_pages(address + mmap.PAGESIZE)
    assert not prefers_huge_pages(address + len(memory) - mmap.PAGESIZE)


def test_prefer_huge_pages_of_other_memory_returns_false() -> None:
    assert not prefer_huge_pages(mmap.PAGESIZE, mmap.PAGESIZE), "nothing is mapped"
    assert not prefer_huge_pages(mmap.PAGESIZE + 1, mmap.PAGESIZE), "no whole page"


@pytest.mark.parametrize(
    "num_bytes", [mmap.PAGESIZE, 3 * HUGE_PAGE_BYTES + mmap.PAGESIZE]
)
def test_map_rows_shares_memory_and_closes_descriptor(
    make_file: MakeFile,
    num_bytes: int,
) -> None:
    fd, memory = make_file(num_bytes)
    given = os.dup(fd)
    rows = map_rows([given], num_bytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given)
    assert (rows.format, rows.nbytes, rows.readonly) == ("B", num_bytes, False)
    assert rows == memoryview(memory)
    rows[-1] ^= 255
    assert memory[-1] == rows[-1]


# Resident pages

PAGE = mmap.PAGESIZE


@pytest.fixture
def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, 64 * PAGE))


def resident(memory: memoryview) -> list[bool]:
    address = address_of(memory)
    entries = np.fromfile(
        Path("/proc/self/pagemap"),
        np.uint64,
        len(memory) // PAGE,
        offset=address // PAGE * 8,
    )
    return [bool(entry >> np.uint64(63)) for entry in entries]


def test_prefault_cells_with_gaps_touches_only_their_pages(memory: memoryview) -> None:
    prefault(memory, 4 * PAGE + 100, PAGE, 16 * PAGE)
    assert [
        index for index, is_resident in enumerate(resident(memory)) if is_resident
    ] == [base + page for base in range(0, 64, 16) for page in (4, 5)]


def test_prefault_adjacent_cells_touches_all_pages(memory: memoryview) -> None:
    prefault(memory, 0, 3 * PAGE, 3 * PAGE)
    assert all(resident(memory))


def test_prefault_cells_smaller_than_page_touches_all_pages(memory: memoryview) -> None:
    prefault(memory, 0, 100, PAGE // 2)
    assert all(resident(memory))


@pytest.mark.parametrize("supported", [True, False])
def test_prefault_with_or_without_kernel_support_keeps_bytes(
    memory: memoryview,
    supported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not supported:
        monkeypatch.setattr(libc, "MADV_POPULATE_WRITE", 9999)
    content = np.random.default_rng(0).integers(0, 256, len(memory), np.uint8)
    np.frombuffer(memory, np.uint8)[:] = content
    prefault(memory, 0, PAGE, 4 * PAGE)
    assert np.array_equal(np.frombuffer(memory, np.uint8), content)


def test_prefault_no_kernel_support_reads_pages_and_logs(
    memory: memoryview,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(libc, "MADV_POPULATE_WRITE", 9999)
    with caplog.at_level("INFO"):
        prefault(memory, 0, 64 * PAGE, 64 * PAGE)
    assert all(resident(memory))
    assert errno.errorcode[errno.EINVAL] in caplog.text
    assert "prefaulted" in caplog.text


def test_map_rows_several_files_are_contiguous(make_file: MakeFile) -> None:
    files = [
        make_file(size)
        for size in (2 * mmap.PAGESIZE, HUGE_PAGE_BYTES, 3 * mmap.PAGESIZE)
    ]
    num_bytes = HUGE_PAGE_BYTES + 4 * mmap.PAGESIZE
    rows = map_rows([os.dup(fd) for fd, _ in files], num_bytes)
    assert bytes(rows) == b"".join(bytes(memory[:]) for _, memory in files)[:num_bytes]
    rows[-1] ^= 255
    assert files[2][1][2 * mmap.PAGESIZE - 1] == rows[-1]


def test_map_aligned_partial_page_before_next_file_raises(make_file: MakeFile) -> None:
    fds = [make_file(size)[0] for size in (mmap.PAGESIZE + 1, mmap.PAGESIZE)]
    with pytest.raises(OSError, match="not whole pages"):
        map_aligned(fds, 2 * mmap.PAGESIZE)
