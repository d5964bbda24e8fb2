from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from persistkv.integrations.vllm.regions import close_region, open_region, ready, remove_leftovers
from persistkv.memory.libc import map_shared, memory_at, unmap

ROWS, STRIDE = 4, 4096


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "vllm_offload_test.mmap"
    path.write_bytes(bytes(ROWS * STRIDE))
    return path


def rows_of(memory):
    """Return the rows as vLLM passes them: signed bytes in two dimensions."""
    return memoryview(np.frombuffer(memory, np.int8).reshape(ROWS, STRIDE))


def check_leads_to(fds, rows):
    try:
        (fd,) = fds
        os.pwrite(fd, b"\x05", 2 * STRIDE)
        assert rows[2, 0] == 5
    finally:
        close_region(fds)


@pytest.mark.parametrize("unlinked", [False, True])
def test_finds_the_file_behind_a_mapping(file, unlinked):
    with file.open("r+b") as opened:
        rows = rows_of(mmap.mmap(opened.fileno(), ROWS * STRIDE))
        if unlinked:
            file.unlink()
        check_leads_to(open_region(rows), rows)


def test_finds_a_file_whose_descriptor_was_closed(file):
    with file.open("r+b") as opened:
        rows = rows_of(mmap.mmap(opened.fileno(), ROWS * STRIDE))
    check_leads_to(open_region(rows), rows)


@pytest.fixture
def segments():
    """Three unlinked files, the last longer than its part of the rows, and the rows that are mapped from them."""
    sizes = [2 * STRIDE, STRIDE, STRIDE]
    fds = [os.memfd_create(f"segment-{index}") for index in range(3)]
    for fd, size in zip(fds, [2 * STRIDE, STRIDE, 2 * STRIDE], strict=True):
        os.ftruncate(fd, size)
    address = map_shared(list(zip(fds, sizes, strict=True)), mmap.PAGESIZE)
    yield fds, memoryview(np.frombuffer(memory_at(address, ROWS * STRIDE), np.int8).reshape(ROWS, STRIDE))
    unmap(address, ROWS * STRIDE)
    for fd in fds:
        os.close(fd)


def test_finds_the_segments_of_a_region_in_order(segments):
    fds, rows = segments
    found = open_region(rows)
    assert [os.fstat(fd).st_ino for fd in found] == [os.fstat(fd).st_ino for fd in fds]
    os.pwrite(found[1], b"\x05", 0)
    os.pwrite(found[2], b"\x06", STRIDE - 1)
    assert (rows[2, 0], rows[3, -1]) == (5, 6)
    close_region(found)


def test_segments_that_are_longer_than_their_part_of_the_rows_are_not_taken(segments):
    fds, rows = segments
    os.ftruncate(fds[1], 2 * STRIDE)
    assert open_region(rows) == ()


def test_rows_that_are_ready_keep_their_bytes_and_are_written_without_faults():
    size = 8 << 20  # four huge pages
    fd = os.memfd_create("rows")
    os.posix_fallocate(fd, 0, size)
    pattern = np.random.default_rng(5).integers(0, 256, size, np.uint8)
    os.pwrite(fd, pattern, 0)
    rows = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    ready(memoryview(rows))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rows[:: mmap.PAGESIZE] ^= 1
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    pattern[:: mmap.PAGESIZE] ^= 1
    assert (np.frombuffer(os.pread(fd, size, 0), np.uint8) == pattern).all()
    assert faults < size // mmap.PAGESIZE // 4
    os.close(fd)


def test_memory_that_is_no_file_is_left_as_it_is():
    rows = np.zeros((ROWS, STRIDE), np.uint8)
    ready(memoryview(rows))
    assert not rows.any()


def test_memory_of_this_process_alone_has_no_file():
    assert open_region(memoryview(np.zeros((ROWS, STRIDE), np.int8))) == ()


def test_a_mapping_that_does_not_begin_with_the_file_is_not_taken(file):
    with file.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), (ROWS - 1) * STRIDE, offset=STRIDE)
    assert open_region(memoryview(np.frombuffer(memory, np.int8).reshape(ROWS - 1, STRIDE))) == ()


def test_removes_what_nobody_maps(file, tmp_path):
    other = tmp_path / "somebody_elses.mmap"
    other.touch()
    assert remove_leftovers(str(tmp_path), sees_all_processes=True) == [str(file)]
    assert other.exists()


def test_what_another_process_maps_stays(file, tmp_path):
    program = (
        "import mmap, sys; file = open(sys.argv[1], 'r+b'); memory = mmap.mmap(file.fileno(), 0); "
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdout.readline()
        assert remove_leftovers(str(tmp_path), sees_all_processes=True) == []
    assert remove_leftovers(str(tmp_path), sees_all_processes=True) == [str(file)]


def test_a_young_file_stays_where_not_all_processes_are_seen(file, tmp_path):
    assert remove_leftovers(str(tmp_path), sees_all_processes=False) == []
    os.utime(file, (0, 0))
    assert remove_leftovers(str(tmp_path), sees_all_processes=False) == [str(file)]
