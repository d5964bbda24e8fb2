"""A disk that forgets: replays what ``record.c`` recorded, and rebuilds files as a power loss may leave them.

What POSIX promises, and no more:

1. A write is durable once its file was synced after it, or where it was synchronous itself. Until then each 4 KiB of it
   may be on the disk or not, in any order; where it is, each 512 bytes may be new or not.
2. The same for a file's length, and for space that was allocated.
3. A file or directory that is new may be missing until its directory was synced.
4. What was not durable when a sync failed is not made durable by a later one: the kernel takes it for written. It may
   be on the disk or not, until the page is written once more and synced. The same for a length. (A directory's sync can
   be asked for again: a file system whose journal fails takes nothing more.)
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = 4 << 10  # 4 KiB
SECTOR_BYTES = 512
WRITE, SYNCED_WRITE, SYNC, RESIZE, ALLOCATE, CREATE, MKDIR, UNMODELLED, FAILED = range(1, 10)
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
    """What was recorded, in order; what a kill cut short is left out."""
    rest = memoryview(log.read_bytes())
    while len(rest) >= _HEAD.size:
        op, path_length, offset, length = _HEAD.unpack_from(rest)
        end = _HEAD.size + path_length
        size = length if op in (WRITE, SYNCED_WRITE) else 0
        if len(rest) < end + size:
            return
        yield Record(op, Path(bytes(rest[_HEAD.size : end]).decode()), offset, length, rest[end : end + size])
        rest = rest[end + size :]


class _File:
    """What is durable of one file, and what may be."""

    def __init__(self) -> None:
        self.now = bytearray()
        self.durable = bytearray()
        self.versions: dict[int, list[bytes]] = {}
        """Page number to what it held after each write that is not durable."""
        self.lengths: list[int] = []
        """Each length it had that is not durable."""
        self.adrift: dict[int, list[bytes]] = {}
        """The same as ``versions``, of pages that no sync will write."""
        self.adrift_lengths: list[int] = []

    def resize(self, length: int) -> None:
        if length < len(self.now):
            first = length // PAGE_BYTES
            for page in range(first, -(-len(self.now) // PAGE_BYTES)):
                tail = bytes(self.now[page * PAGE_BYTES : length]) if page == first else b""
                self.versions.setdefault(page, []).append(tail.ljust(PAGE_BYTES, b"\0"))
            del self.now[length:]
        self.now.extend(bytes(length - len(self.now)))
        self.lengths.append(length)

    def write(self, offset: int, data: memoryview, *, synced: bool, failed: bool = False) -> None:
        end = offset + len(data)
        if end > len(self.now):
            self.resize(end)
        self.now[offset:end] = data
        pages = range(offset // PAGE_BYTES, -(-end // PAGE_BYTES))
        if failed:
            for page in pages:
                older = self.versions.pop(page, [])
                self.adrift.setdefault(page, []).extend([*older, self._page(self.now, page)])
            return
        if not synced:
            for page in pages:
                self.versions.setdefault(page, []).append(self._page(self.now, page))
            return
        if end > len(self.durable):
            self.durable.extend(bytes(end - len(self.durable)))
        self.lengths = [length for length in self.lengths if length > end]
        self.adrift_lengths = [length for length in self.adrift_lengths if length > end]
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
        self.adrift_lengths = [] if self.lengths else [other for other in self.adrift_lengths if other > length]
        self.lengths.clear()

    def fail_to_sync(self) -> None:
        """What is not durable may never be."""
        for page, versions in self.versions.items():
            self.adrift.setdefault(page, []).extend(versions)
        self.versions.clear()
        self.adrift_lengths += self.lengths
        self.lengths.clear()

    def after_a_loss(self, draw: random.Random, kept: float) -> bytes:
        """One of the many contents that it may have.

        :param kept: how likely a page's newest version is on the disk.
        """
        length = len(self.durable)
        if (lengths := self.adrift_lengths + self.lengths) and draw.random() < kept:
            length = draw.choice(lengths)
        content = bytearray(self.durable[:length])
        content.extend(bytes(length - len(content)))
        for page in sorted({*self.adrift, *self.versions}):
            versions = self.adrift.get(page, []) + self.versions.get(page, [])
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
        self.adrift.pop(page, None)

    @staticmethod
    def _page(content: bytearray, page: int) -> bytes:
        return bytes(content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]).ljust(PAGE_BYTES, b"\0")


def _torn(old: bytes, new: bytes, draw: random.Random) -> bytes:
    starts = range(0, PAGE_BYTES, SECTOR_BYTES)
    return b"".join(draw.choice((old, new))[start : start + SECTOR_BYTES] for start in starts)


class Disk:
    """What all files of the recorded directory hold, durable and not, after the records so far."""

    def __init__(self) -> None:
        self._files: dict[Path, _File] = {}
        self._directories: set[Path] = set()
        self._failed: Path | None = None
        """Where the call before this one failed to write: what comes next is what it did all the same."""
        self._unnamed: set[Path] = set()
        """New files and directories whose own directory was not synced since."""

    def replay(self, record: Record) -> None:
        """One call more.

        :raises NotImplementedError: it is not modelled.
        """
        op, path, offset, length, data = record
        failed, self._failed = self._failed, None
        if op in (CREATE, MKDIR):
            self._unnamed.add(path)
        if op == MKDIR:
            self._directories.add(path)
        elif op == CREATE:
            self._files[path] = _File()
        elif op in (WRITE, SYNCED_WRITE):
            self._files[path].write(offset, data, synced=op == SYNCED_WRITE, failed=path == failed)
        elif op == FAILED and offset == SYNC and path in self._files:
            self._files[path].fail_to_sync()
        elif op == FAILED:
            self._failed = path if offset == WRITE else None
        elif op == RESIZE:
            self._files[path].resize(length)
        elif op == ALLOCATE:
            file = self._files[path]
            if offset + length > len(file.now):
                file.resize(offset + length)
        elif op == SYNC and path in self._files:
            self._files[path].sync()
        elif op == SYNC:
            self._unnamed = {new for new in self._unnamed if new.parent != path}
        else:
            raise NotImplementedError(f"operation {op} on {path}")

    def rebuild(self, target: Path, draw: random.Random) -> None:
        """Make ``target`` what a power loss now may leave."""
        kept = draw.choice((0.0, 0.5, 0.9, 1.0))
        missing = {path for path in sorted(self._unnamed) if draw.random() >= kept}
        target.mkdir()
        for path in sorted(self._directories):
            if missing.isdisjoint((path, *path.parents)):
                (target / path).mkdir(0o700)
        for path, file in self._files.items():
            if missing.isdisjoint((path, *path.parents)):
                (target / path).write_bytes(file.after_a_loss(draw, kept))
