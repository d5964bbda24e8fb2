"""vLLM's regions under /dev/shm: the files behind the primary tier's memory, and files that killed
engines left.

1. vLLM does not pass the descriptors of its region, so its files are found by their mappings. From
   0.33 on, a region may consist of several files, and these may be unlinked.
2. Only a file of this user that no process maps is removed.
3. Processes of other containers may share /dev/shm and be invisible here. If this is possible, a
   file is removed only if it has not been modified for ten minutes: an engine maps its region while
   it starts, and a mapping stays valid after the file is removed.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from persistkv.cpu.region_file import SHARED_MEMORY_DIRECTORY
from persistkv.memory.libc import MADV_POPULATE_WRITE, address_of, madvise
from persistkv.memory.pages import use_huge_pages

logger = logging.getLogger(__name__)

WEIGHTS_PREFIX = "persistkv_weights_"
"""Start of the names of the files of ``WeightsWord``, which exist until the engine has attached
them."""
_PATTERNS = ("vllm_offload_*.mmap", f"{WEIGHTS_PREFIX}*")
"""Names of the files that killed engines may leave."""
_SAFE_AGE_S = 600  # seconds: an older file is mapped if an engine uses it
# inode number of the first PID namespace, which the kernel fixes
_FIRST_PID_NAMESPACE = 0xEFFFFFFC

_MAPS_LINE = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) \S+ (?P<offset>[0-9a-f]+) "
    r"(?P<major>[0-9a-f]+):(?P<minor>[0-9a-f]+) (?P<inode>\d+) *(?P<path>.*)"
)

FileId = tuple[int, int]
"""Device and inode of a file."""


class _Mapping(NamedTuple):
    """One line of ``/proc/PID/maps``. For memory without a file, the inode of ``file`` is 0 and
    ``path`` is empty."""

    start: int
    """First address of the mapping."""
    stop: int
    """First address after the mapping."""
    offset: int
    """Offset in the file at which the mapping begins, in bytes."""
    file: FileId
    path: str
    """Ends in ``(deleted)`` if the file was unlinked."""

    @property
    def has_file(self) -> bool:
        _, inode = self.file
        return inode != 0

    @classmethod
    def parse(cls, line: str) -> _Mapping:
        """Parse a line as the kernel writes it; raise ValueError if it is another kind of line."""
        fields = _MAPS_LINE.match(line)
        if fields is None:
            raise ValueError(f"unknown line of /proc/PID/maps: {line!r}")
        major = int(fields["major"], 16)
        minor = int(fields["minor"], 16)
        inode = int(fields["inode"])
        return cls(
            start=int(fields["start"], 16),
            stop=int(fields["stop"], 16),
            offset=int(fields["offset"], 16),
            file=(os.makedev(major, minor), inode),
            path=fields["path"],
        )


class _Part(NamedTuple):
    """A part of the rows that is mapped from one file, from the file's start on."""

    first: _Mapping
    """The first mapping of the file: the kernel may split one mapping into several."""
    num_bytes: int
    """Bytes of all mappings of the part."""

    def continues_in(self, mapping: _Mapping) -> bool:
        """Return whether a mapping that follows this part in memory also follows it in the file."""
        return mapping.file == self.first.file and mapping.offset == self.num_bytes


def open_region(rows: memoryview) -> tuple[int, ...]:
    """Open the files from which the rows are mapped, in order; ``close_region`` closes the
    descriptors.

    :returns: the descriptors; empty if the rows do not consist of mappings of whole files, one
        after the other. The last file may be longer than its mapping.
    """
    fds: list[int] = []
    parts = _parts_of(address_of(rows), rows.nbytes)
    for part in parts:
        is_last = part is parts[-1]
        fd = _open(part, may_be_longer=is_last)
        if fd is None:
            # a part is missing: the host process would map other bytes than these rows
            close_region(fds)
            return ()
        fds.append(fd)
    return tuple(fds)


def close_region(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _open(part: _Part, *, may_be_longer: bool) -> int | None:
    """Open the file of a part. None: it cannot be opened, or has another size.

    :param may_be_longer: whether the file may have more bytes than the part. The size of the last
        file may have been rounded up; no other part follows it.
    """
    wanted = part.first.file
    # the paths to try: an unlinked file can only be opened through a descriptor of this process
    candidates = [part.first.path]
    for path, file in _descriptors("self"):
        if file == wanted:
            candidates.append(path)
    for candidate in candidates:
        try:
            fd = os.open(candidate, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        status = os.fstat(fd)
        # compare the files, because another one may have the path by now
        is_wanted = _file_id(status) == wanted
        if may_be_longer:
            has_size = status.st_size >= part.num_bytes
        else:
            has_size = status.st_size == part.num_bytes
        if is_wanted and has_size:
            return fd
        os.close(fd)
    return None


def map_huge_pages(rows: memoryview) -> None:
    """Move the rows into huge pages, and map all of them in this process's page table, before they
    are first used.

    The store's process also requests huge pages, but later. The kernel would then move the rows and
    drop them from the page tables of all processes, and the engine's next copy to each small page
    would take a fault of some microseconds. If the rows are in huge pages by then, nothing is
    moved. The rows may be read and written during the call. Rows that are not mapped from whole
    files stay as they are.
    """
    fds = open_region(rows)
    if not fds:
        return
    try:
        use_huge_pages(fds, rows.nbytes)
    finally:
        close_region(fds)
    # ignore a failure: the kernel then maps each row when it is first used
    madvise(address_of(rows), rows.nbytes, MADV_POPULATE_WRITE)


def remove_leftovers(
    directory: str = SHARED_MEMORY_DIRECTORY,
    *,
    sees_all_processes: bool | None = None,
) -> list[str]:
    """Remove the files of vLLM's primary tiers and of ``WeightsWord`` that no process uses, and
    return their paths.

    :param sees_all_processes: whether ``/proc`` shows every process that may use the files; None:
        detect it.
    """
    if sees_all_processes is None:
        sees_all_processes = _sees_all_processes()
    # A file of a process that is invisible here seems unused, so it must be old: an engine maps its
    # files soon after it has created them, and then needs their names no longer.
    candidates = _old_files(directory, any_age=sees_all_processes)
    used = _used_files() if candidates else set()
    removed = []
    for path, file in candidates.items():
        if file in used:
            continue
        with suppress(OSError):
            # the file may have been replaced since then, by a live engine with the same id
            status = path.stat(follow_symlinks=False)
            if _file_id(status) == file:
                path.unlink()
                removed.append(str(path))
    if removed:
        logger.info("removed shared memory of killed engines: %s", ", ".join(removed))
    return removed


def _sees_all_processes() -> bool:
    """Return whether ``/proc`` shows all processes of the machine: this one is in the first
    namespace of process ids. False if that cannot be read."""
    try:
        own_namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return False
    return own_namespace == _FIRST_PID_NAMESPACE


def _old_files(
    directory: str,
    *,
    any_age: bool,
) -> dict[Path, FileId]:
    """Return this user's files that an engine may have left, sorted by path.

    :param any_age: whether to include those that were modified in the last ten minutes.
    """
    paths: list[Path] = []
    for pattern in _PATTERNS:
        paths += Path(directory).glob(pattern)
    found: dict[Path, FileId] = {}
    for path in sorted(paths):
        with suppress(OSError):
            status = path.stat(follow_symlinks=False)
            age_s = time.time() - status.st_mtime
            is_candidate = any_age or age_s > _SAFE_AGE_S
            if is_candidate and status.st_uid == os.geteuid():
                found[path] = _file_id(status)
    return found


def _used_files() -> set[FileId]:
    """Return the files that this user's processes map or have open."""
    used: set[FileId] = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        # OSError means that the process has ended, or is another user's: such a process cannot use
        # this user's files
        with suppress(OSError):
            for mapping in _mappings(process):
                used.add(mapping.file)
            # an engine that starts has the file open before it maps it
            for _, file in _descriptors(process):
                used.add(file)
    return used


def _parts_of(address: int, num_bytes: int) -> list[_Part]:
    """Return the files that back a range of memory, in order. Empty if part of the range is not
    mapped from a file, or a file is not mapped from its start."""
    parts: list[_Part] = []
    next_address = address  # first address that ``parts`` does not cover yet
    end = address + num_bytes
    # mappings are in the order of their addresses
    for mapping in _mappings("self"):
        if not mapping.start <= next_address < mapping.stop:
            continue
        mapped_bytes = min(mapping.stop, end) - next_address
        is_file_start = mapping.start == next_address and mapping.offset == 0
        if parts and parts[-1].continues_in(mapping):
            last = parts[-1]
            parts[-1] = _Part(last.first, last.num_bytes + mapped_bytes)
        elif mapping.has_file and is_file_start:
            parts.append(_Part(mapping, mapped_bytes))
        else:
            return []
        next_address += mapped_bytes
        if next_address == end:
            return parts
    # no mapping covers the end of the range
    return []


def _mappings(process: str) -> Iterator[_Mapping]:
    """Yield the mappings of a process in order of their addresses; raise OSError if it has ended,
    or if this user may not read it."""
    with open(f"/proc/{process}/maps") as lines:
        for line in lines:
            yield _Mapping.parse(line.rstrip("\n"))


def _descriptors(process: str) -> Iterator[tuple[str, FileId]]:
    """Yield the path and the file of each open descriptor of a process; raise OSError if it has
    ended, or if this user may not read it."""
    for name in os.listdir(f"/proc/{process}/fd"):
        with suppress(OSError):  # the descriptor may have been closed
            path = f"/proc/{process}/fd/{name}"
            yield path, _file_id(os.stat(path))


def _file_id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino
