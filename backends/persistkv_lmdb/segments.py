"""Segment files: ``segments/00000000.seg`` and so on in the store's directory. Their pages hold payloads.

1. A file has the length that LMDB records. It is longer if a transaction that extended it was aborted, or if the
   process ended after a commit that shortened it. Bytes beyond the recorded length are never read.
2. Space is allocated without holes: a full disk fails when a file grows, not when it is written.
3. A file is never removed, only truncated: an open descriptor refers to the same file in all processes.
4. The name of a file is durable before its first pages are allocated, even if its creator was killed or failed.
5. Other threads write while the transaction runs, and all writes have ended when it commits or aborts. If the process
   is killed, the kernel keeps the writer lock until its writes have ended, because it closes the files only then.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreError
from persistkv.storage.executor import ThreadPool
from persistkv.storage.format.codec import Buffer
from persistkv_lmdb.allocator import Extent
from persistkv_lmdb.errors import translated_io
from persistkv_lmdb.files import open_directory, open_regular
from persistkv_lmdb.vectored_io import (
    Bounce,
    behind,
    front,
    is_aligned,
    is_cached,
    read_all,
    write_all,
)

logger = logging.getLogger(__name__)

DIRECTORY = "segments"
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_WRITES_AT_ONCE = 3  # the next writes are queued when one ends
_THREAD_BYTES = 1 << 20  # 1 MiB: a shorter write ends before another thread would have started it


class Run(NamedTuple):
    """Consecutive bytes of one file."""

    segment: int
    offset: int
    length: int


class Piece(NamedTuple):
    """Contiguous part of a request within one file."""

    number: int
    """Index of its payload within a scan."""
    run: Run
    buffers: Sequence[memoryview]


class _Descriptors(NamedTuple):
    buffered: int
    direct: int | None


class SegmentFiles:
    """Segment files of a store. ``prepare``, ``read`` and ``scan`` are thread-safe; the rest needs the writer lock."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        """:raises OSError: the store's directory cannot be opened."""
        self._path = path
        self._read_only = read_only
        self._store = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # a directory replacing it is another store's
        self._lock = threading.Lock()
        self._open: dict[int, _Descriptors] = {}
        self._touched: set[int] = set()
        self._unnamed = False
        """Whether a file may be missing after a power loss: its directory was not synced since it was made."""
        self._pool: ThreadPool | None = None
        self._writes: list[Future[None]] = []
        """Writes since the last ``settle``."""
        self._bounce = Bounce(self.settle)
        self._direct = True

    def prepare(self) -> None:
        """Open existing files, so that the first read does not wait for it. Later calls retry files that fail here."""
        with suppress(OSError):
            for segment in self._there():
                self._descriptors(segment)

    def grow(self, segment: int, before: int, pages: int) -> None:
        """Extend a file to ``pages`` pages, with space allocated for all of them.

        :param before: its pages according to LMDB.
        :raises StoreFullError: the disk has no space for it; the file is unchanged.
        """
        with translated_io(self._path):
            fd = self._descriptors(segment, create=True).buffered
            try:
                os.posix_fallocate(fd, before * PAGE_BYTES, (pages - before) * PAGE_BYTES)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(fd, before * PAGE_BYTES)
                raise
            self._touched.add(segment)
            self._unnamed = self._unnamed or not before

    def fit(self, segments: Mapping[int, int]) -> None:
        """Truncate files longer than LMDB records, and extend lost or shorter ones, whose packs fail verification.

        :param segments: pages of each segment; files of other segments are emptied.
        :raises StoreFullError: the disk has no space for a lost file.
        """
        with translated_io(self._path):
            for segment in {*segments, *self._there()}:
                expected = segments.get(segment, 0) * PAGE_BYTES
                fd = self._descriptors(segment, create=True).buffered
                held = os.fstat(fd).st_size
                if held > expected:
                    os.ftruncate(fd, expected)
                elif held < expected:
                    os.posix_fallocate(fd, held, expected - held)

    def write(self, extents: Sequence[Extent], stream: Iterator[Buffer]) -> int:
        """Start writing a payload to its extents; the stream's buffers stay in use until ``settle`` or ``sync``.

        :returns: its length in bytes, a multiple of 4 KiB; the remainder of the extents is not written.
        :raises StoreFullError: the file system needs more space although it was allocated. ``settle`` and ``sync`` may
            raise it, too.
        :raises StoreError: the extents are too short, or the disk failed.
        """
        written = 0
        for buffers in self._bounce.aligned(stream):
            length = sum(map(len, buffers))
            runs = list(runs_of(extents, written, length))
            if sum(run.length for run in runs) < length:
                raise StoreError(f"{self._path}: a payload is longer than it said")
            self._touched.update(run.segment for run in runs)
            if length < _THREAD_BYTES:
                self._write_runs(runs, buffers)
            else:
                self._begin_write(runs, buffers)
            written += length
        return written

    def _begin_write(self, runs: Sequence[Run], buffers: list[memoryview]) -> None:
        """Write in another thread. If one is idle, return once it has started.

        Otherwise the thread would wait up to 5 ms for the GIL while the caller continues with other work.
        """
        if self._pool is None:
            self._pool = ThreadPool(_WRITES_AT_ONCE, "persistkv-segments")
        begun, write = threading.Event(), Future[None]()
        is_idle = sum(not other.done() for other in self._writes) < _WRITES_AT_ONCE
        self._writes.append(write)  # known before it is queued: an interrupt may come between
        self._pool.begin(write, partial(self._write_runs, runs, buffers, begun))
        if is_idle:
            begun.wait()

    def settle(self) -> None:
        """Wait for all writes; their buffers are no longer in use.

        :raises StoreError: one of them failed.
        """
        wait(self._writes)
        try:
            while self._writes:  # a failed future that is kept would keep its buffers, through its traceback
                self._writes.pop(0).result()
        finally:
            self._writes.clear()

    def abandon(self) -> None:
        """Cancel the writes of a transaction that is rolled back, and wait for those that run, however often Ctrl-C is
        pressed meanwhile: the next transaction, of any process, may use their extents.
        """
        while self._writes:
            with suppress(BaseException):
                wait([write for write in self._writes if not write.cancel()])
                self._writes.clear()

    def sync(self) -> None:
        """Make payloads, file lengths and file names durable.

        :raises StoreError: some of it is lost, and a second call would not report that: nothing that was written may be
            published.
        """
        self.settle()
        with translated_io(self._path):
            for segment in sorted(self._touched):
                os.fdatasync(self._descriptors(segment).buffered)
            self._touched.clear()
            if self._unnamed:
                os.fsync(self._store)
                with self._directory() as directory:
                    os.fsync(directory)
                self._unnamed = False

    def read(
        self, extents: Sequence[Extent], offset: int, buffers: Sequence[memoryview], *, cached: bool = False
    ) -> bool:
        """Fill ``buffers`` from a payload, starting at ``offset``; return False if the payload ends earlier or is lost.

        :param cached: read through the page cache, regardless of its content.
        :raises StoreError: the disk failed.
        """
        filled = 0
        with translated_io(self._path):
            for piece in placed_pieces(0, extents, offset, buffers):
                if not self._read(piece, cached=cached):
                    return False
                filled += piece.run.length
        return filled == sum(buffer.nbytes for buffer in buffers)

    def scan(self, wanted: Sequence[tuple[Sequence[Extent], int, Sequence[memoryview]]]) -> list[bool]:
        """Read parts of many payloads, given as extents, offset and buffers; see ``read``.

        Contiguous parts are read with one call, past the page cache if buffers and file system allow it.

        :raises StoreError: the disk failed.
        """
        pieces = [piece for number, one in enumerate(wanted) for piece in placed_pieces(number, *one)]
        filled = [0] * len(wanted)
        with translated_io(self._path):
            for neighbours in neighbours_of(pieces):
                whole = self._scan(neighbours)
                for piece in neighbours:
                    if whole or self._read(piece):
                        filled[piece.number] += piece.run.length
        return [count == sum(map(len, buffers)) for count, (_, _, buffers) in zip(filled, wanted, strict=True)]

    def _scan(self, neighbours: Sequence[Piece]) -> bool:
        """Read contiguous pieces past the page cache with one call; False: they must be read one by one."""
        first = neighbours[0].run
        buffers = [buffer for piece in neighbours for buffer in piece.buffers]
        descriptors = self._found(first.segment)
        if descriptors is None or descriptors.direct is None or not self._direct:
            return False
        try:
            return read_all(descriptors.direct, buffers, first.offset, PAGE_BYTES)
        except OSError as error:
            if not self._is_refusal(error, buffers):
                raise
            return False

    def lengths(self) -> dict[int, int]:
        """Return the allocated bytes of each file, without holes and without preallocation beyond its end."""
        with translated_io(self._path):
            found = {segment: os.fstat(self._descriptors(segment).buffered) for segment in self._there()}
        return {segment: min(status.st_size, 512 * status.st_blocks) for segment, status in found.items()}

    def make_writable(self) -> None:
        """Open files for writing from now on; no other call may be running."""
        self._read_only = False
        self._close_files()

    def close(self) -> None:
        """Close all descriptors; no other call may be running."""
        if self._pool is not None:
            self._pool.shutdown()
        self._close_files()
        os.close(self._store)

    def _close_files(self) -> None:
        for fd in [fd for descriptors in self._open.values() for fd in descriptors if fd is not None]:
            os.close(fd)
        self._open.clear()

    def _write_runs(self, runs: Sequence[Run], buffers: list[memoryview], begun: threading.Event | None = None) -> None:
        if begun is not None:
            begun.set()
        with translated_io(self._path):
            for run in runs:
                self._write(run, front(buffers, run.length))
                buffers = behind(buffers, run.length)

    def _write(self, run: Run, buffers: Sequence[memoryview]) -> None:
        descriptors = self._descriptors(run.segment)
        if descriptors.direct is not None and self._direct:
            try:
                write_all(descriptors.direct, buffers, run.offset, PAGE_BYTES)
                return
            except OSError as error:
                if not self._is_refusal(error, buffers):
                    raise
        write_all(descriptors.buffered, buffers, run.offset)

    def _read(self, piece: Piece, *, cached: bool = False) -> bool:
        """Fill a piece's buffers, past the page cache if possible; return False if the file is lost or too short.

        If the file ends within the piece, it may hold more than an aligned read returned: the read is repeated through
        the page cache.
        """
        run = piece.run
        descriptors = self._found(run.segment)
        if descriptors is None:
            return False
        direct = None if cached else self._direct_fd(descriptors, run)
        if direct is not None:
            try:
                if read_all(direct, piece.buffers, run.offset, PAGE_BYTES):
                    return True
            except OSError as error:
                if not self._is_refusal(error, piece.buffers):
                    raise
        return read_all(descriptors.buffered, piece.buffers, run.offset)

    def _direct_fd(self, descriptors: _Descriptors, run: Run) -> int | None:
        """Return the descriptor for O_DIRECT; None if it is refused, the run has partial pages, or all is cached."""
        if descriptors.direct is None or not self._direct or run.length % PAGE_BYTES:
            return None
        return None if is_cached(descriptors.buffered, run.offset, run.length) else descriptors.direct

    def _is_refusal(self, error: OSError, buffers: Sequence[memoryview]) -> bool:
        """Return whether O_DIRECT was refused. If the buffers were aligned, it is not used again.

        Alignment is checked only after a failure: checking before each transfer would take longer.
        """
        if error.errno not in _NO_DIRECT:
            return False
        if is_aligned(buffers):
            self._direct = False
            logger.info("%s: O_DIRECT is refused (%s); payloads go through the page cache", self._path, error)
        return True

    def _found(self, segment: int) -> _Descriptors | None:
        """Return the descriptors of a file to read; None if it is lost."""
        try:
            return self._descriptors(segment)
        except FileNotFoundError:
            return None

    def _descriptors(self, segment: int, *, create: bool = False) -> _Descriptors:
        with self._lock:
            found = self._open.get(segment)
            if found is None:
                found = self._open[segment] = self._opened(segment, create)
            return found

    def _opened(self, segment: int, create: bool) -> _Descriptors:
        name = f"{segment:08d}.seg"
        access = os.O_RDONLY if self._read_only else os.O_RDWR
        with self._directory(create=create) as directory:
            try:
                buffered = open_regular(name, access, dir_fd=directory)
            except FileNotFoundError:
                if not create:
                    raise
                self._unnamed = True
                buffered = open_regular(name, os.O_RDWR | os.O_CREAT, dir_fd=directory)
            try:
                return _Descriptors(buffered, open_regular(name, access | os.O_DIRECT, dir_fd=directory))
            except OSError as error:
                if error.errno in _NO_DIRECT:
                    return _Descriptors(buffered, None)
                os.close(buffered)
                raise

    @contextmanager
    def _directory(self, *, create: bool = False) -> Iterator[int]:
        """Open the directory of the files for the length of the block."""
        if create:
            with suppress(FileExistsError):
                os.mkdir(DIRECTORY, 0o700, dir_fd=self._store)
                self._unnamed = True
        descriptor = open_directory(DIRECTORY, dir_fd=self._store)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _there(self) -> list[int]:
        """Return the numbers of the existing files."""
        try:
            with self._directory() as directory:
                names = os.listdir(directory)
        except FileNotFoundError:
            return []
        return [int(name[:8]) for name in names if name[8:] == ".seg" and name[:8].isdecimal()]


def runs_of(extents: Sequence[Extent], offset: int, length: int) -> Iterator[Run]:
    """Yield the runs of a part of a payload; they are shorter than the part if the payload ends before it does."""
    for extent in extents:
        size = extent.pages * PAGE_BYTES
        if length and offset < size:
            count = min(length, size - offset)
            yield Run(extent.segment, extent.page * PAGE_BYTES + offset, count)
            length -= count
            offset = size
        offset -= size


def placed_pieces(
    number: int, extents: Sequence[Extent], offset: int, buffers: Sequence[memoryview]
) -> Iterator[Piece]:
    """Yield pieces that fill ``buffers`` from ``offset`` of a payload; fewer if the payload ends earlier.

    :param number: index of the payload.
    """
    rest = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    length = sum(map(len, rest))
    for run in runs_of(extents, offset, length):
        if run.length == length:  # the usual case: one run, nothing to split
            yield Piece(number, run, rest)
            return
        yield Piece(number, run, front(rest, run.length))
        rest = behind(rest, run.length)


def neighbours_of(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Group consecutive pieces that are contiguous in one file."""
    together: list[Piece] = []
    end = (-1, 0)
    for piece in pieces:
        if together and (piece.run.segment, piece.run.offset) != end:
            yield together
            together = []
        together.append(piece)
        end = (piece.run.segment, piece.run.offset + piece.run.length)
    if together:
        yield together
