"""Huge pages: the bytes stay, whatever the size and whoever uses them; whether there are any is the kernel's to say."""

import mmap
import os

import numpy as np
import pytest

from persistkv.huge_pages import HUGE_PAGE_BYTES, use_huge_pages


@pytest.fixture
def make_file():
    """Makes shared memory of some size, filled with bytes that differ."""
    fds = []

    def make_file(num_bytes):
        fd = os.memfd_create("test")
        fds.append(fd)
        os.ftruncate(fd, num_bytes)
        memory = mmap.mmap(fd, num_bytes)
        bytes_of(memory)[:] = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, dtype=np.uint8)
        return fd, memory

    yield make_file
    for fd in fds:
        os.close(fd)


def bytes_of(memory):
    return np.frombuffer(memory, np.uint8)


@pytest.mark.parametrize("num_bytes", [mmap.PAGESIZE, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + mmap.PAGESIZE, 40 << 20])
def test_bytes_stay(make_file, num_bytes):
    fd, memory = make_file(num_bytes)
    before = bytes_of(memory).copy()
    use_huge_pages(fd, num_bytes)
    assert np.array_equal(bytes_of(memory), before)
    bytes_of(memory)[::4096] ^= 255
    use_huge_pages(fd, num_bytes)
    assert not np.array_equal(bytes_of(memory), before)
    bytes_of(memory)[::4096] ^= 255
    assert np.array_equal(bytes_of(memory), before)
    assert os.fstat(fd).st_size == num_bytes


def test_pages_are_huge_where_it_says_so(make_file):
    fd, memory = make_file(4 * HUGE_PAGE_BYTES)
    if not use_huge_pages(fd, len(memory)):
        pytest.skip("the kernel gives no huge pages")
    assert held_in_huge_pages(memory) >= 4 * HUGE_PAGE_BYTES // 1024


def held_in_huge_pages(memory):
    """KiB of shared memory in huge pages, of the whole machine: a mapping tells only of those that it maps whole."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("ShmemHugePages"))


def test_what_is_no_memory_stays_as_it_is(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (4 * HUGE_PAGE_BYTES // 256))
    with open(path, "r+b") as file:
        use_huge_pages(file.fileno(), 4 * HUGE_PAGE_BYTES)
    assert path.read_bytes() == bytes(range(256)) * (4 * HUGE_PAGE_BYTES // 256)
    fd = os.open(path, os.O_RDONLY)
    assert not use_huge_pages(fd, 4 * HUGE_PAGE_BYTES)
    os.close(fd)
