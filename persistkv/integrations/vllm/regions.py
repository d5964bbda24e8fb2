"""The descriptor behind the primary tier's memory, which vLLM does not tell: found by where the memory is mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from persistkv.huge_pages import use_huge_pages
from persistkv.libc import MADV_POPULATE_WRITE, address_of, madvise


class Mapping(NamedTuple):
    """One line of ``/proc/PID/maps``."""

    start: int
    stop: int
    offset: int
    device: int
    inode: int
    path: str
    """Empty for memory without a file; ends in ``(deleted)`` where the file was unlinked."""


def mappings(process: str = "self") -> Iterator[Mapping]:
    """The mappings of a process, by address.

    :raises OSError: the process is gone, or not ours to look at.
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
    """A descriptor of the file that the rows are mapped from, whose first byte is theirs; the caller closes it.

    :param rows: the whole region, contiguous, writable.
    :returns: None where the rows are not mapped, shared, from one file alone.
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
    """Have the rows in huge pages, and all of them in this process's page table, before they are first used.

    The store's process asks for huge pages, too, but later: what the kernel then moves leaves the page tables of all,
    and each small page of it is a fault of some microseconds in the step of an engine that next copies into it. Where
    the pages are huge by then, nothing is moved.

    :param rows: as of ``open_region``; others may use them meanwhile, no byte changes.
    """
    fd = open_region(rows)
    if fd is None:
        return
    try:
        use_huge_pages(fd, rows.nbytes)
    finally:
        os.close(fd)
    madvise(address_of(rows), rows.nbytes, MADV_POPULATE_WRITE)  # where it cannot be, the first use of each row does it


def _source(address: int, num_bytes: int) -> Mapping | None:
    """The first of the mappings that cover the bytes, all of one file and in its order, from its beginning."""
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
    """Paths that may lead to the file: that of the mapping, and this process's descriptors of a file without one."""
    yield source.path
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                status = os.stat(f"/proc/self/fd/{name}")
                if (status.st_dev, status.st_ino) == (source.device, source.inode):
                    yield f"/proc/self/fd/{name}"
