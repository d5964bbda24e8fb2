"""Prefaulting makes the right pages resident, and changes no byte."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
import pytest

from persistkv.memory import libc
from persistkv.memory.libc import address_of
from persistkv.memory.pages import prefault

PAGE = mmap.PAGESIZE


@pytest.fixture
def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, 64 * PAGE))


def resident(memory: memoryview) -> list[bool]:
    address = address_of(memory)
    entries = np.fromfile(Path("/proc/self/pagemap"), np.uint64, len(memory) // PAGE, offset=address // PAGE * 8)
    return [bool(entry >> np.uint64(63)) for entry in entries]


def test_only_the_pages_of_the_cells(memory: memoryview) -> None:
    prefault(memory, 4 * PAGE + 100, PAGE, 16 * PAGE)
    assert [index for index, there in enumerate(resident(memory)) if there] == [
        base + page for base in range(0, 64, 16) for page in (4, 5)
    ]


def test_everything(memory: memoryview) -> None:
    prefault(memory, 0, 3 * PAGE, 3 * PAGE)
    assert all(resident(memory))


def test_pages_that_several_cells_share(memory: memoryview) -> None:
    prefault(memory, 0, 100, PAGE // 2)
    assert all(resident(memory))


@pytest.mark.parametrize("supported", [True, False])
def test_no_byte_changes(memory: memoryview, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported:
        monkeypatch.setattr(libc, "MADV_POPULATE_WRITE", 9999)
    content = np.random.default_rng(0).integers(0, 256, len(memory), np.uint8)
    np.frombuffer(memory, np.uint8)[:] = content
    prefault(memory, 0, PAGE, 4 * PAGE)
    assert np.array_equal(np.frombuffer(memory, np.uint8), content)


def test_without_the_kernels_help_pages_are_read(
    memory: memoryview, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(libc, "MADV_POPULATE_WRITE", 9999)
    with caplog.at_level("INFO"):
        prefault(memory, 0, 64 * PAGE, 64 * PAGE)
    assert all(resident(memory))
    assert errno.errorcode[errno.EINVAL] in caplog.text
    assert "prefaulted" in caplog.text
