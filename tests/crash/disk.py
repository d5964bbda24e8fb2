"""Simulated disk: replays the calls that ``record.c`` recorded, and rebuilds files as a power loss
may leave them.

The simulation assumes only the guarantees of POSIX:

1. A write is durable after the next sync of its file, or at once if the write is synchronous. Until
   then each page of 4 KiB may be on the disk or not, in any order, and each sector of 512 bytes in
   it may be new or old.
2. The same holds for the length of a file, and for allocated space.
3. A new file or directory may be missing, and a removed file present, until its parent directory
   has been synced.
4. After a failed sync, later syncs do not make the affected pages durable, because the kernel marks
   them as clean. Such a page may be on the disk or not, until it is rewritten and synced. The same
   holds for a length. The sync of a directory can be retried: a file system whose journal fails
   accepts no further changes.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = 4 << 10  # 4 KiB
SECTOR_BYTES = 512
(
    WRITE,
    SYNCED_WRITE,
    SYNC,
    RESIZE,
    ALLOCATE,
    CREATE,
    MKDIR,
    UNMODELLED,
    FAILED,
    REMOVE,
    PUNCH,
) = range(1, 12)
_HEAD = struct.Struct("<IIQQ")


class Record(NamedTuple):
    """One call that returned."""

    op: int
    path: Path
    """Relative to the recorded directory."""
    offset: int
    length: int
    data: memoryview


def read_log(log: Path) -> Iterator[Record]:
    """Yield the records in order, without a last record that a kill truncated."""
    rest = memoryview(log.read_bytes())
    while len(rest) >= _HEAD.size:
        op, path_length, offset, length = _HEAD.unpack_from(rest)
        end = _HEAD.size + path_length
        size = length if op in (WRITE, SYNCED_WRITE) else 0
        if len(rest) < end + size:
            return
        yield Record(
            op,
            Path(bytes(rest[_HEAD.size : end]).decode()),
            offset,
            length,
            rest[end : end + size],
        )
        rest = rest[end + size :]


class _File:
    """One file: its durable content, and changes that are not durable yet."""

    def __init__(self) -> None:
        self.now = bytearray()
        self.durable = bytearray()
        self.versions: dict[int, list[bytes]] = {}
        """Contents of each page after each write that is not durable yet, by page number."""
        self.lengths: list[int] = []
        """Lengths that the file had and that are not durable yet."""
        self.failed_versions: dict[int, list[bytes]] = {}
        """Like ``versions``, for pages of a failed sync, which later syncs do not write."""
        self.failed_lengths: list[int] = []

    def resize(self, length: int) -> None:
        if length < len(self.now):
            first = length // PAGE_BYTES
            for page in range(first, -(-len(self.now) // PAGE_BYTES)):
                tail = (
                    bytes(self.now[page * PAGE_BYTES : length])
                    if page == first
                    else b""
                )
                self.versions.setdefault(page, []).append(tail.ljust(PAGE_BYTES, b"\0"))
            del self.now[length:]
        self.now.extend(bytes(length - len(self.now)))
        self.lengths.append(length)

    def write(
        self,
        offset: int,
        data: memoryview,
        *,
        synced: bool,
        failed: bool = False,
    ) -> None:
        end = offset + len(data)
        if end > len(self.now):
            self.resize(end)
        self.now[offset:end] = data
        pages = range(offset // PAGE_BYTES, -(-end // PAGE_BYTES))
        if failed:
            for page in pages:
                older = self.versions.pop(page, [])
                self.failed_versions.setdefault(page, []).extend(
                    [*older, self._page(self.now, page)]
                )
            return
        if not synced:
            for page in pages:
                self.versions.setdefault(page, []).append(self._page(self.now, page))
            return
        if end > len(self.durable):
            self.durable.extend(bytes(end - len(self.durable)))
        self.lengths = [length for length in self.lengths if length > end]
        self.failed_lengths = [length for length in self.failed_lengths if length > end]
        for page in pages:
            self._keep(page)

    def sync(self) -> None:
        length = len(self.now)
        if not self.lengths:
            written = max(self.versions, default=-1) + 1
            length = max(len(self.durable), min(length, written * PAGE_BYTES))
        del self.durable[length:]
        self.durable.extend(bytes(length - len(self.durable)))
        for page in list(self.versions):
            self._keep(page)
        self.failed_lengths = (
            []
            if self.lengths
            else [other for other in self.failed_lengths if other > length]
        )
        self.lengths.clear()

    def fail_to_sync(self) -> None:
        """Exclude all changes that are not durable yet from later syncs."""
        for page, versions in self.versions.items():
            self.failed_versions.setdefault(page, []).extend(versions)
        self.versions.clear()
        self.failed_lengths += self.lengths
        self.lengths.clear()

    def after_power_loss(self, draw: random.Random, kept: float) -> bytes:
        """Return one of the contents that the file may have after a power loss.

        :param kept: probability that the newest version of a page is on the disk.
        """
        length = len(self.durable)
        if (lengths := self.failed_lengths + self.lengths) and draw.random() < kept:
            length = draw.choice(lengths)
        content = bytearray(self.durable[:length])
        content.extend(bytes(length - len(content)))
        for page in sorted({*self.failed_versions, *self.versions}):
            versions = self.failed_versions.get(page, []) + self.versions.get(page, [])
            if page * PAGE_BYTES >= length or draw.random() >= kept:
                continue
            new = versions[-1] if kept == 1 else draw.choice(versions)
            if kept < 1 and draw.random() < 0.2:
                new = _torn(self._page(content, page), new, draw)
            end = min((page + 1) * PAGE_BYTES, length)
            content[page * PAGE_BYTES : end] = new[: end - page * PAGE_BYTES]
        return bytes(content)

    def _keep(self, page: int) -> None:
        start = page * PAGE_BYTES
        end = min(start + PAGE_BYTES, len(self.now), len(self.durable))
        if end > start:
            self.durable[start:end] = self.now[start:end]
        self.versions.pop(page, None)
        self.failed_versions.pop(page, None)

    @staticmethod
    def _page(content: bytearray, page: int) -> bytes:
        return bytes(content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]).ljust(
            PAGE_BYTES, b"\0"
        )


def _torn(old: bytes, new: bytes, draw: random.Random) -> bytes:
    starts = range(0, PAGE_BYTES, SECTOR_BYTES)
    return b"".join(
        draw.choice((old, new))[start : start + SECTOR_BYTES] for start in starts
    )


class Disk:
    """All files of the recorded directory after the replayed records, with durable and pending
    changes."""

    def __init__(self) -> None:
        self._files: dict[Path, _File] = {}
        self._directories: set[Path] = set()
        self._failed: Path | None = None
        """File of the previous record, if that is a write that failed after it was executed. The
        next record is it."""
        self._unsynced_names: set[Path] = set()
        """New files and directories whose parent directory has not been synced since."""
        self._removed: dict[Path, _File] = {}
        """Removed files whose parent directory has not been synced since."""

    def replay(self, record: Record) -> None:
        """Apply one record.

        :raises NotImplementedError: the operation is not simulated.
        """
        op, path, offset, length, data = record
        failed, self._failed = self._failed, None
        if op in (CREATE, MKDIR):
            self._unsynced_names.add(path)
        if op == MKDIR:
            self._directories.add(path)
        elif op == CREATE:
            self._files[path] = _File()
        elif op == REMOVE:
            self._removed[path] = self._files.pop(path)
        elif op in (WRITE, SYNCED_WRITE):
            self._files[path].write(
                offset, data, synced=op == SYNCED_WRITE, failed=path == failed
            )
        elif op == FAILED and offset == SYNC and path in self._files:
            self._files[path].fail_to_sync()
        elif op == FAILED:
            self._failed = path if offset == WRITE and length else None
        elif op == RESIZE:
            self._files[path].resize(length)
        elif op == ALLOCATE:
            file = self._files[path]
            if offset + length > len(file.now):
                file.resize(offset + length)
        elif op == PUNCH:
            file = self._files[path]
            end = min(offset + length, len(file.now))
            file.write(offset, memoryview(bytes(max(0, end - offset))), synced=False)
        elif op == SYNC and path in self._files:
            self._files[path].sync()
        elif op == SYNC:
            self._unsynced_names = {
                new for new in self._unsynced_names if new.parent != path
            }
            self._removed = {
                old: file for old, file in self._removed.items() if old.parent != path
            }
        else:
            raise NotImplementedError(f"operation {op} on {path}")

    def rebuild(self, target: Path, draw: random.Random) -> None:
        """Create ``target`` with files as a power loss at this point may leave them."""
        kept = draw.choice((0.0, 0.5, 0.9, 1.0))
        missing = {
            path for path in sorted(self._unsynced_names) if draw.random() >= kept
        }
        target.mkdir()
        for path in sorted(self._directories):
            if missing.isdisjoint((path, *path.parents)):
                (target / path).mkdir(0o700)
        for path, file in (self._removed | self._files).items():
            if path not in self._files and draw.random() < kept:
                continue
            if missing.isdisjoint((path, *path.parents)):
                (target / path).write_bytes(file.after_power_loss(draw, kept))
