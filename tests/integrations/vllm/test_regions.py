from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from persistkv.integrations.vllm.regions import (
    close_region,
    map_huge_pages,
    open_region,
    remove_leftovers,
)
from persistkv.memory.libc import map_shared, memory_at, unmap

ROWS, STRIDE = 4, 4096


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "vllm_offload_test.mmap"
    path.write_bytes(bytes(ROWS * STRIDE))
    return path


def rows_of(memory: mmap.mmap) -> memoryview:
    """Return the rows as vLLM passes them: signed bytes in two dimensions."""
    return np.frombuffer(memory, np.int8).reshape(ROWS, STRIDE).data


def check_same_memory(fds: Sequence[int], rows: memoryview) -> None:
    try:
        (fd,) = fds
        os.pwrite(fd, b"\x05", 2 * STRIDE)
        assert rows[2, 0] == 5
    finally:
        close_region(fds)


@pytest.mark.parametrize("unlinked", [False, True])
def test_open_region_mapped_file_returns_its_descriptor(
    file: Path, unlinked: bool
) -> None:
    with file.open("r+b") as opened:
        rows = rows_of(mmap.mmap(opened.fileno(), ROWS * STRIDE))
        if unlinked:
            file.unlink()
        check_same_memory(open_region(rows), rows)


def test_open_region_closed_descriptor_reopens_file(file: Path) -> None:
    with file.open("r+b") as opened:
        rows = rows_of(mmap.mmap(opened.fileno(), ROWS * STRIDE))
    check_same_memory(open_region(rows), rows)


@pytest.fixture
def segments() -> Iterator[tuple[list[int], memoryview]]:
    """Three memory files, the last longer than its mapped part, and the rows that are mapped from
    them."""
    sizes = [2 * STRIDE, STRIDE, STRIDE]
    fds = [os.memfd_create(f"segment-{index}") for index in range(3)]
    for fd, size in zip(fds, [2 * STRIDE, STRIDE, 2 * STRIDE], strict=True):
        os.ftruncate(fd, size)
    address = map_shared(list(zip(fds, sizes, strict=True)), mmap.PAGESIZE)
    yield (
        fds,
        np.frombuffer(memory_at(address, ROWS * STRIDE), np.int8)
        .reshape(ROWS, STRIDE)
        .data,
    )
    unmap(address, ROWS * STRIDE)
    for fd in fds:
        os.close(fd)


def test_open_region_several_segments_returns_files_in_order(
    segments: tuple[list[int], memoryview],
) -> None:
    fds, rows = segments
    found = open_region(rows)
    assert [os.fstat(fd).st_ino for fd in found] == [os.fstat(fd).st_ino for fd in fds]
    os.pwrite(found[1], b"\x05", 0)
    os.pwrite(found[2], b"\x06", STRIDE - 1)
    assert (rows[2, 0], rows[3, -1]) == (5, 6)
    close_region(found)


def test_open_region_segment_longer_than_mapping_returns_no_file(
    segments: tuple[list[int], memoryview],
) -> None:
    fds, rows = segments
    os.ftruncate(fds[1], 2 * STRIDE)
    assert open_region(rows) == ()


def test_map_huge_pages_keeps_bytes_and_avoids_page_faults() -> None:
    size = 8 << 20  # four huge pages
    fd = os.memfd_create("rows")
    os.posix_fallocate(fd, 0, size)
    pattern = np.random.default_rng(5).integers(0, 256, size, np.uint8)
    os.pwrite(fd, pattern.data, 0)
    rows = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    map_huge_pages(rows.data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rows[:: mmap.PAGESIZE] ^= 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    pattern[:: mmap.PAGESIZE] ^= 1
    assert (np.frombuffer(os.pread(fd, size, 0), np.uint8) == pattern).all()
    assert faults < size // mmap.PAGESIZE // 4
    os.close(fd)


def test_map_huge_pages_anonymous_memory_is_unchanged() -> None:
    rows = np.random.default_rng(6).integers(0, 256, (ROWS, STRIDE), np.uint8)
    before = rows.copy()
    map_huge_pages(rows.data)
    assert (rows == before).all()


def test_open_region_private_memory_returns_no_file() -> None:
    assert open_region(np.zeros((ROWS, STRIDE), np.int8).data) == ()


def test_open_region_mapping_at_file_offset_returns_no_file(file: Path) -> None:
    with file.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), (ROWS - 1) * STRIDE, offset=STRIDE)
    assert (
        open_region(np.frombuffer(memory, np.int8).reshape(ROWS - 1, STRIDE).data) == ()
    )


def test_remove_leftovers_unmapped_region_is_deleted(
    file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "somebody_elses.mmap"
    other.touch()
    assert remove_leftovers(str(tmp_path), sees_all_processes=True) == [str(file)]
    assert other.exists()


def test_remove_leftovers_mapped_region_is_kept(file: Path, tmp_path: Path) -> None:
    program = (
        "import mmap, sys; file = open(sys.argv[1], 'r+b'); memory = mmap.mmap(file.fileno(), 0); "
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        assert remove_leftovers(str(tmp_path), sees_all_processes=True) == []
    assert remove_leftovers(str(tmp_path), sees_all_processes=True) == [str(file)]


def test_remove_leftovers_word_of_weights_is_deleted_when_its_worker_has_ended(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; from persistkv.integrations.vllm.weights.word import WeightsWord; "
        "word = WeightsWord.create('engine', 0, sys.argv[1]); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        (word,) = tmp_path.iterdir()
        assert remove_leftovers(str(tmp_path), sees_all_processes=True) == []
    assert remove_leftovers(str(tmp_path), sees_all_processes=True) == [str(word)]


def test_remove_leftovers_region_replaced_during_scan_is_kept(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine with the id of a killed one may create its region meanwhile."""
    listdir = os.listdir

    def replace_and_list(path: str) -> list[str]:
        if path == "/proc":
            (tmp_path / "new").write_bytes(b"live")
            (tmp_path / "new").rename(file)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", replace_and_list)
    assert remove_leftovers(str(tmp_path), sees_all_processes=True) == []
    assert file.read_bytes() == b"live"


def test_remove_leftovers_young_region_in_pid_namespace_is_kept(
    file: Path, tmp_path: Path
) -> None:
    assert remove_leftovers(str(tmp_path), sees_all_processes=False) == []
    os.utime(file, (0, 0))
    assert remove_leftovers(str(tmp_path), sees_all_processes=False) == [str(file)]
