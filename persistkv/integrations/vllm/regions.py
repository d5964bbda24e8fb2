"""Finds the file behind the primary tier's memory by its mapping, since vLLM does not pass its descriptor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from persistkv.memory.libc import MADV_POPULATE_WRITE, address_of, madvise
from persistkv.memory.pages import use_huge_pages


class Mapping(NamedTuple):
    """One line of ``/proc/PID/maps``."""

    start: int
    stop: int
    offset: int
    device: int
    inode: int
    path: str
    """Empty for memory without a file; ends in ``(deleted)`` if the file was unlinked."""


def mappings(process: str = "self") -> Iterator[Mapping]:
    """Yield the mappings of a process in order of their addresses.

    :raises OSError: the process has ended, or its mappings must not be read.
    """
    with open(f"/proc/{process}/maps") as lines:
        for line in lines:
            addresses, _, offset, device, inode, *path = line.split(maxsplit=5)
            start, _, stop = addresses.partition("-")
            major, _, minor = device.partition(":")
            yield Mapping(
                int(start, 16),
                int(stop, 16),
                int(offset, 16),
                os.makedev(int(major, 16), int(minor, 16)),
                int(inode),
                path[0].rstrip("\n") if path else "",
            )


def open_region(rows: memoryview) -> int | None:
    """Open the file from which the rows are mapped, starting at its first byte. The caller closes the descriptor.

    :param rows: the whole region, contiguous, writable.
    :returns: None if the rows are not a shared mapping of exactly one file.
    """
    source = _source(address_of(rows), rows.nbytes)
    if source is None:
        return None
    for candidate in _candidates(source):
        try:
            fd = os.open(candidate, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) == (source.device, source.inode) and status.st_size >= rows.nbytes:
            return fd
        os.close(fd)
    return None


def ready(rows: memoryview) -> None:
    """Move the rows into huge pages, and map all of them in this process's page table, before they are first used.

    The store's process also requests huge pages, but later. The kernel would then move the rows and drop them from the
    page tables of all processes, and the engine's next copy to each small page would take a fault of some microseconds.
    If the rows are in huge pages by then, nothing is moved.

    :param rows: as in ``open_region``. They may be used during the call; no byte changes.
    """
    fd = open_region(rows)
    if fd is None:
        return
    try:
        use_huge_pages(fd, rows.nbytes)
    finally:
        os.close(fd)
    madvise(address_of(rows), rows.nbytes, MADV_POPULATE_WRITE)  # if it fails, the first use of each row does it


def _source(address: int, num_bytes: int) -> Mapping | None:
    """Return the first of the mappings that cover the bytes with one file from its start, in order; None: none do."""
    first: Mapping | None = None
    covered = address
    for mapping in mappings():
        if not mapping.start <= covered < mapping.stop:
            continue
        first = first or mapping
        file_begins_at = mapping.start - mapping.offset
        if not mapping.inode or (mapping.device, mapping.inode) != (first.device, first.inode):
            return None
        if file_begins_at != address:
            return None
        covered = mapping.stop
        if covered >= address + num_bytes:
            return first
    return None


def _candidates(source: Mapping) -> Iterator[str]:
    """Yield paths that may lead to the file: the mapping's, and those of this process's descriptors of the file."""
    yield source.path
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                status = os.stat(f"/proc/self/fd/{name}")
                if (status.st_dev, status.st_ino) == (source.device, source.inode):
                    yield f"/proc/self/fd/{name}"
