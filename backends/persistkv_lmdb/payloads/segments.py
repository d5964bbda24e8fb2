"""Segment files: ``segments/00000000.seg`` and so on in the store's directory. Their pages hold
payloads.

1. A file has the length that LMDB records. It is longer if a transaction that extended it was
   aborted. Bytes beyond the recorded length are never read.
2. Space is allocated before it is written: a full disk fails when a file grows or a hole is filled.
   Holes are punched after the transaction that records them, before the writer lock is released. If
   a process is killed meanwhile, or its transaction is aborted after it filled a hole, a later
   transaction notices that the files take too much space.
3. A file is never removed: an open descriptor refers to the same file in all processes. A file or a
   directory that a user removes is noticed before bytes in it are acknowledged.
4. The name of a file is durable before its first pages are allocated, even if its creator was
   killed or failed.
5. Payloads are written between two transactions, in extents that the first one reserved. If the
   process is killed, the kernel keeps its claim on them (``Guard.claim``) until its writes have
   ended, because it closes the files only then.
6. I/O is gathered: up to 1,024 buffers per call, O_DIRECT if addresses, lengths and offsets are
   multiples of 4 KiB.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreError
from persistkv.memory.libc import address_of, punch_hole
from persistkv.storage.format.codec import Buffer
from persistkv.storage.threads import ThreadPool
from persistkv_lmdb.files import (
    SEGMENT_DIRECTORY,
    FileId,
    ReplacedError,
    allocated_bytes,
    file_id,
    open_regular,
    translated_io,
)

logger = logging.getLogger(__name__)

# errors of a file system that refuses O_DIRECT, or of buffers that are not aligned for it
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
# number of threads that write: when one write ends, the disk has others to continue with
_WRITES_AT_ONCE = 3
# 1 MiB: a shorter write ends before another thread would have started it
_THREAD_BYTES = 1 << 20
_MOST_BUFFERS = 1024  # maximum number of buffers in one call: IOV_MAX
# 4 MiB: bytes of one write. The disk writes them while the next bytes are gathered and hashed.
_BATCH_BYTES = 4 << 20
PLACE = struct.Struct(">II")  # place of an extent: segment, first page


class Extent(NamedTuple):
    """Consecutive 4 KiB pages of one segment file."""

    segment: int
    """Number of the segment."""
    page: int
    """Number of the first page in the file."""
    pages: int
    """Number of pages."""

    @property
    def end(self) -> int:
        """Number of the page after the last one."""
        return self.page + self.pages

    @property
    def offset(self) -> int:
        """Byte offset in the file."""
        return self.page * PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        return self.pages * PAGE_BYTES

    @property
    def place(self) -> bytes:
        """Key of the extent in a table that is ordered by place."""
        return PLACE.pack(self.segment, self.page)

    def split(self, pages: int) -> tuple[Extent, Extent]:
        """Return the extents of the first ``pages`` pages and of the rest; one may be empty."""
        rest = Extent(self.segment, self.page + pages, self.pages - pages)
        return self._replace(pages=pages), rest

    def touches(self, other: Extent) -> bool:
        """Return whether the extent ``other`` begins where this one ends."""
        return self.segment == other.segment and self.end == other.page


class _ByteRun(NamedTuple):
    """Consecutive bytes of one segment file; offset and length in bytes."""

    segment: int
    offset: int
    length: int


class _Descriptors(NamedTuple):
    """Descriptors of one segment file: through the page cache, and with O_DIRECT (None: the file
    system refuses it)."""

    buffered: int
    direct: int | None


class SegmentFiles:
    """Segment files of a store.

    ``read`` and ``lengths`` are thread-safe. ``allocate_space``, ``punch``, ``adjust_lengths`` and
    ``sync_growth`` need the writer lock. One thread at a time may write payloads, from ``write`` to
    ``sync`` or ``abandon``.

    :raises OSError: the store's directory cannot be opened.
    """

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self._path = path
        self._read_only = read_only
        self._store_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        """Descriptor of the store's directory, kept open because a directory that replaces it is
        another store's."""
        self._segments_fd: int | None = None
        """Descriptor of the directory ``segments``, kept open for the same reason; None: it was not
        used yet, or does not exist."""
        self._segments_id: FileId | None = None
        """Id of that directory."""
        self._lock = threading.Lock()
        """Protects ``_open`` and ``_segments_fd``, which any thread fills on first use."""
        self._open: dict[int, _Descriptors] = {}
        """Descriptors of the files that were used, by segment number."""
        self._lacks_file = False
        """Whether an open file was found to be removed."""
        self._touched: set[int] = set()
        """Segments with written payloads that ``sync`` must make durable."""
        self._grown: set[int] = set()
        """Segments in which space was allocated, which ``sync_growth`` must make durable."""
        self._has_new_names = False
        """Whether the names of new files may not be durable: ``sync_growth`` must sync the
        directories that contain them."""
        self._pool: ThreadPool | None = None
        """Threads that write; None before the first large payload."""
        self._writes: list[Future[None]] = []
        """Writes that were started in other threads since the last
        ``wait_for_writes``."""
        self._bounce = BounceBuffer(self.wait_for_writes)
        """Memory through which buffers are copied that O_DIRECT would refuse."""
        self._direct = True
        """False once O_DIRECT was refused for aligned buffers."""

    def allocate_space(self, extent: Extent) -> None:
        """Allocate disk space for pages of a hole, or for pages after the end of a file, which
        grows. The transaction must call ``sync_growth`` before it commits.

        :raises StoreFullError: the disk has no space for them; the file is as before.
        """
        with translated_io(self._path):
            fd = self._descriptors(extent.segment, create=True).buffered
            old_bytes = os.fstat(fd).st_size
            try:
                os.posix_fallocate(fd, extent.offset, extent.num_bytes)
            except OSError:
                # A part may have been allocated. Pages after the old end are cut off; the space of
                # pages in a hole is returned.
                with suppress(OSError):
                    os.ftruncate(fd, old_bytes)
                self.punch([extent])
                raise
            self._grown.add(extent.segment)
            # the process that created this empty file may have ended before it synced the name
            if old_bytes == 0:
                self._has_new_names = True

    def punch(self, holes: Iterable[Extent]) -> None:
        """Return the disk space of pages to the file system. Without effect if it supports no
        holes, or fails."""
        for hole in holes:
            with suppress(OSError):
                fd = self._descriptors(hole.segment).buffered
                punch_hole(fd, hole.offset, hole.num_bytes)

    @cached_property
    def punches(self) -> bool:
        """Whether the file system supports holes in files."""
        try:
            # if there is no file yet, this raises, and the answer is False until the next opening
            first_segment = min(self._existing_segments(), default=0)
            fd = self._descriptors(first_segment).buffered
            # try after the end of the file, where there is nothing to lose
            end = os.fstat(fd).st_size
            punch_hole(fd, end, PAGE_BYTES)
        except OSError as error:
            logger.info(
                "%s: free space is not returned to the file system, which makes no holes: %s",
                self._path,
                error,
            )
            return False
        return True

    def adjust_lengths(self, segments: Mapping[int, int]) -> int:
        """Give each segment file the number of pages that LMDB records: truncate longer files,
        extend shorter or lost ones. Packs whose bytes were lost fail verification when they are
        read.

        :returns: the bytes of the files on disk.
        :raises ReplacedError: an open file was removed.
        :raises StoreFullError: the disk has no space for a lost file.
        """
        disk_bytes = 0
        with translated_io(self._path):
            for segment in {*segments, *self._existing_segments()}:
                # truncate an unrecorded file to nothing: an aborted transaction made it
                recorded_pages = segments.get(segment, 0)
                disk_bytes += self._adjust_length(segment, recorded_pages * PAGE_BYTES)
        return disk_bytes

    def _adjust_length(self, segment: int, length: int) -> int:
        """Give a file the length ``length`` in bytes, and create it if it is missing; return its
        bytes on disk."""
        fd = self._descriptors(segment, create=True).buffered
        status = self._checked_status(segment, fd)
        present_length = status.st_size
        if present_length == length:
            return allocated_bytes(status)
        if present_length > length:
            os.ftruncate(fd, length)
        else:
            # allocate disk space, so that later writes do not fail
            os.posix_fallocate(fd, present_length, length - present_length)
        return allocated_bytes(os.fstat(fd))

    def write(
        self,
        extents: Sequence[Extent],
        stream: Iterator[Buffer],
    ) -> int:
        """Start writing a payload to reserved extents. The stream's buffers are in use until
        ``sync`` or ``abandon`` returns.

        :returns: length of the payload in bytes, padded to a multiple of 4 KiB. The rest of the
            extents is not written.
        :raises StoreError: the extents are too short, or the disk failed (``StoreFullError``: it is
            full, which a copy-on-write file system reports only now). ``sync`` may raise it, too.
        """
        written = 0
        # each list of buffers is one write
        for buffers in self._bounce.aligned_batches(stream):
            length = sum(map(len, buffers))
            runs = list(_runs_of(extents, written, length))
            available = sum(run.length for run in runs)
            if available < length:
                raise StoreError(f"{self._path}: a payload is longer than it said")
            self._touched.update(run.segment for run in runs)
            # A short write takes less time here than handing it to another thread. But while other
            # writes are running, this thread would wait for the disk behind them.
            is_short = length < _THREAD_BYTES
            if is_short and not self._writes:
                self._write_runs(runs, buffers)
            else:
                self._begin_write(runs, buffers)
            written += length
        return written

    def _begin_write(
        self,
        runs: Sequence[_ByteRun],
        buffers: list[memoryview],
    ) -> None:
        """Start one write in another thread; ``wait_for_writes`` waits for it."""
        if self._pool is None:
            self._pool = ThreadPool(_WRITES_AT_ONCE, "persistkv-segments")
        num_running = sum(not write.done() for write in self._writes)
        write = Future[None]()
        begun = threading.Event()

        def run() -> None:
            begun.set()
            self._write_runs(runs, buffers)

        # Record the write before it is queued: if Ctrl-C came in between, ``abandon`` would not
        # wait for a write that is running.
        self._writes.append(write)
        self._pool.begin(write, run)
        # If a thread is idle, wait until it runs the write: otherwise, this thread would keep the
        # GIL, for which the other one might wait up to 5 ms. If no thread is idle, the write stays
        # queued.
        if num_running < _WRITES_AT_ONCE:
            begun.wait()

    def wait_for_writes(self) -> None:
        """Wait until all started writes have ended. Their buffers are then not in use, even if a
        write failed, which raises a StoreError.
        """
        wait(self._writes)
        try:
            # keep no failed future: the traceback of its error refers to the buffers
            while self._writes:
                write = self._writes.pop(0)
                write.result()
        finally:
            self._writes.clear()

    def abandon(self) -> None:
        """Cancel the queued writes, and wait for the running ones, whose errors are ignored.

        Ctrl-C does not end the wait: the next commit writes into the same extents.
        """
        # if Ctrl-C ends a wait, the list is not cleared yet, and the loop waits again
        while self._writes:
            with suppress(BaseException):
                running = [write for write in self._writes if not write.cancel()]
                wait(running)
                self._writes.clear()
        self._touched.clear()

    def sync(self) -> None:
        """Make the written payloads durable.

        :raises StoreError: some of it may be lost. The caller must write it again: a second call
            would not report the loss.
        """
        self.wait_for_writes()
        with translated_io(self._path):
            for segment in sorted(self._touched):
                os.fdatasync(self._descriptors(segment).buffered)
        self._touched.clear()

    def check_present(self, segments: Iterable[int]) -> None:
        """Raise a ReplacedError if one of these open files was removed."""
        with translated_io(self._path):
            for segment in segments:
                self._checked_status(segment, self._descriptors(segment).buffered)

    def _checked_status(self, segment: int, fd: int) -> os.stat_result:
        """Return the status of an open segment file. Check that it still has a name: a removed file
        would accept writes that no reader finds.

        :raises ReplacedError: it was removed.
        """
        status = os.fstat(fd)
        if not status.st_nlink:
            self._lacks_file = True
            raise ReplacedError(f"{self._path}: segment {segment} was removed")
        return status

    def sync_growth(self) -> None:
        """Make the lengths of files that grew and the names of new ones durable. Otherwise a power
        loss could leave a file shorter than LMDB records, and a full disk would refuse the space.

        :raises StoreError: some may be lost; the next call tries again.
        """
        with translated_io(self._path):
            for segment in sorted(self._grown):
                os.fdatasync(self._descriptors(segment).buffered)
        self._grown.clear()
        if not self._has_new_names:
            return
        with translated_io(self._path):
            # sync the name of ``segments``, then the names of the files in it
            os.fsync(self._store_fd)
            with self._lock:
                directory = self._directory()
            os.fsync(directory)
        self._has_new_names = False

    def read(
        self,
        extents: Sequence[Extent],
        offset: int,
        buffers: Sequence[memoryview],
        *,
        direct: bool,
    ) -> bool:
        """Fill buffers, one after the other, with a payload from byte ``offset`` on.

        :param extents: all extents of the payload.
        :param direct: read with O_DIRECT if possible; False: through the page cache.
        :returns: whether all buffers were filled; False if the payload is too short or lost.
        :raises StoreError: the disk failed; the buffers have undefined content.
        """
        unfilled = [_as_bytes(buffer) for buffer in buffers if buffer.nbytes]
        missing = sum(map(len, unfilled))
        for run in _runs_of(extents, offset, missing):
            run_buffers = unfilled
            # usually there is one run, and nothing to split
            if run.length < missing:
                run_buffers = first_bytes(unfilled, run.length)
                unfilled = after_bytes(unfilled, run.length)
            with translated_io(self._path):
                if not self._read(run, run_buffers, direct):
                    return False
            missing -= run.length
        # if bytes are missing, the extents end too early
        return missing == 0

    def lengths(self) -> dict[int, int]:
        """Return the bytes on disk of each segment file, by segment number; see
        ``allocated_bytes``."""
        lengths: dict[int, int] = {}
        with translated_io(self._path):
            for segment in self._existing_segments():
                fd = self._descriptors(segment).buffered
                lengths[segment] = allocated_bytes(os.fstat(fd))
        return lengths

    def is_current(self) -> bool:
        """Return whether the directory of the files is still the one at its path, and no file was
        found to be removed."""
        if self._lacks_file:
            return False
        # the directory was not used yet, or does not exist
        if self._segments_id is None:
            return True
        # build the path as text, because joining paths takes three times as long as the system call
        return self._segments_id == file_id(f"{self._path}/{SEGMENT_DIRECTORY}")

    def close(self) -> None:
        """Close all descriptors; no other call may be running."""
        if self._pool is not None:
            self._pool.shutdown()
        descriptors = [self._store_fd, self._segments_fd]
        for opened in self._open.values():
            descriptors += opened
        self._open.clear()
        for fd in descriptors:
            if fd is not None:
                os.close(fd)

    def _write_runs(
        self,
        runs: Sequence[_ByteRun],
        buffers: list[memoryview],
    ) -> None:
        """Write buffers to the file ranges ``runs``, which together are as long."""
        with translated_io(self._path):
            for run in runs:
                self._write_run(run, first_bytes(buffers, run.length))
                buffers = after_bytes(buffers, run.length)

    def _write_run(self, run: _ByteRun, buffers: list[memoryview]) -> None:
        """Write one run with O_DIRECT, or through the page cache if that is refused."""
        fds = self._descriptors(run.segment)
        if fds.direct is not None and self._direct:
            try:
                write_all(fds.direct, buffers, run.offset, unit=PAGE_BYTES)
                return
            except OSError as error:
                if not self._is_direct_refusal(error, buffers):
                    raise
        write_all(fds.buffered, buffers, run.offset)

    def _read(
        self,
        run: _ByteRun,
        buffers: Sequence[memoryview],
        direct: bool,
    ) -> bool:
        """Read bytes of a file into buffers; return False if the file is lost or too short.

        An O_DIRECT read near the end of a file may be incomplete. It is therefore repeated through
        the page cache.
        """
        try:
            fds = self._descriptors(run.segment)
        except FileNotFoundError:
            return False
        # O_DIRECT needs whole pages, and aligned buffers, which the kernel checks
        has_whole_pages = run.length % PAGE_BYTES == 0
        goes_direct = direct and self._direct and has_whole_pages
        if goes_direct and fds.direct is not None:
            try:
                if read_all(fds.direct, buffers, run.offset, unit=PAGE_BYTES):
                    return True
            except OSError as error:
                if not self._is_direct_refusal(error, buffers):
                    raise
        return read_all(fds.buffered, buffers, run.offset)

    def _is_direct_refusal(self, error: OSError, buffers: Sequence[memoryview]) -> bool:
        """Return whether an I/O error means that O_DIRECT was refused, because the buffers are not
        aligned, or by the file system. In the second case, stop using it.

        Alignment is checked only after a failure: checking before each transfer would take longer.
        """
        if error.errno not in _NO_DIRECT:
            return False
        if all(is_aligned(buffer) for buffer in buffers):
            self._direct = False
            logger.info(
                "%s: O_DIRECT is refused (%s); payloads go through the page cache",
                self._path,
                error,
            )
        return True

    def _descriptors(self, segment: int, *, create: bool = False) -> _Descriptors:
        """Return the descriptors of a segment file, which is opened on first use.

        :raises OSError: it cannot be opened; ``FileNotFoundError``: it does not exist.
        """
        with self._lock:
            descriptors = self._open.get(segment)
            if descriptors is None:
                descriptors = self._open_segment(segment, create)
                self._open[segment] = descriptors
            return descriptors

    def _open_segment(self, segment: int, create: bool) -> _Descriptors:
        """Open a segment file. The caller holds the lock."""
        name = f"{segment:08d}.seg"
        access = os.O_RDONLY if self._read_only else os.O_RDWR
        directory = self._directory(create=create)
        flags = access
        if create:
            flags |= os.O_CREAT
            # Set this also if the file exists: its creator may have been killed before it synced
            # the name. Set it only after ``_directory`` has made the directory, because
            # ``sync_growth`` opens it.
            self._has_new_names = True
        buffered = open_regular(name, flags, dir_fd=directory)
        try:
            direct = open_regular(name, access | os.O_DIRECT, dir_fd=directory)
        except OSError as error:
            # the file system has no O_DIRECT
            if error.errno in _NO_DIRECT:
                return _Descriptors(buffered, direct=None)
            os.close(buffered)
            raise
        return _Descriptors(buffered, direct)

    def _directory(self, *, create: bool = False) -> int:
        """Return the descriptor of the directory ``segments``, which ``create`` makes if it is
        missing. The caller holds the lock.

        It is opened once: in a directory that replaces it, the same names are files of another
        store.
        """
        if self._segments_fd is None:
            if create:
                with suppress(FileExistsError):
                    os.mkdir(SEGMENT_DIRECTORY, 0o700, dir_fd=self._store_fd)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._segments_fd = os.open(SEGMENT_DIRECTORY, flags, dir_fd=self._store_fd)
            self._segments_id = file_id(self._segments_fd)
        return self._segments_fd

    def _existing_segments(self) -> list[int]:
        """Return the numbers of the segment files in the directory; none if it does not exist."""
        try:
            with self._lock:
                names = os.listdir(self._directory())
        except FileNotFoundError:
            return []
        found: list[int] = []
        for name in names:
            number = segment_number(name)
            if number is not None:
                found.append(number)
        return found


def segment_number(name: str) -> int | None:
    """Return the number of the segment with this file name; None if it is the name of another
    file."""
    digits = name.removesuffix(".seg")
    if digits == name or len(digits) != 8:
        return None
    # ``int`` also accepts signs, spaces and digits of other scripts
    is_number = digits.isascii() and digits.isdecimal()
    return int(digits) if is_number else None


def _runs_of(
    extents: Sequence[Extent],
    offset: int,
    length: int,
) -> Iterator[_ByteRun]:
    """Yield the file ranges that hold ``length`` bytes of a payload from byte ``offset`` on: fewer
    bytes if the extents end earlier.

    :param extents: all extents of the payload, in its order.
    """
    missing = length
    start = offset  # byte at which the next run begins, counted from the beginning of the extent
    for extent in extents:
        extent_bytes = extent.pages * PAGE_BYTES
        # the run begins in a later extent
        if start >= extent_bytes:
            start -= extent_bytes
            continue
        if not missing:
            return
        count = min(missing, extent_bytes - start)
        file_offset = extent.page * PAGE_BYTES + start
        yield _ByteRun(extent.segment, file_offset, count)
        missing -= count
        start = 0


def starts_aligned(view: memoryview) -> bool:
    """Return whether the address of a buffer, which must not be empty, is a multiple of 4 KiB."""
    address = address_of(view)
    return address % PAGE_BYTES == 0


def is_aligned(view: memoryview) -> bool:
    """Return whether O_DIRECT accepts a buffer: its address and length are multiples of 4 KiB."""
    is_whole_pages = len(view) % PAGE_BYTES == 0
    return is_whole_pages and starts_aligned(view)


def first_bytes(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return views of the first ``count`` bytes of a sequence of buffers."""
    found: list[memoryview] = []
    missing = count
    for buffer in buffers:
        if missing <= len(buffer):
            found.append(buffer[:missing])
            break
        found.append(buffer)
        missing -= len(buffer)
    return found


def after_bytes(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return views of a sequence of buffers without its first ``count`` bytes."""
    to_skip = count
    for index, buffer in enumerate(buffers):
        if to_skip < len(buffer):
            rest_of_buffer = buffer[to_skip:]
            return [rest_of_buffer, *buffers[index + 1 :]]
        to_skip -= len(buffer)
    return []


def write_all(
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
    unit: int = 1,
) -> None:
    """Write all bytes of the buffers to a file, from byte ``offset`` of the file on.

    :param unit: a write that was cut short is continued after a multiple of this many bytes: 4096
        for O_DIRECT.
    """
    rest = list(buffers)
    while rest:
        batch = rest[:_MOST_BUFFERS]
        done = os.pwritev(fd, batch, offset)
        # an incomplete unit is written again by the next call
        done -= done % unit
        # raise if nothing was written, because the loop would not end
        if not done:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest = after_bytes(rest, done)
        offset += done


def read_all(
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
    unit: int = 1,
) -> bool:
    """Fill the buffers from byte ``offset`` of a file on; return False, with undefined content in
    the buffers, if the file ends too early or a system call reads a number of bytes that is not a
    multiple of ``unit``.
    """
    rest = list(buffers)
    missing = sum(map(len, rest))
    while missing:
        batch = rest[:_MOST_BUFFERS]
        done = os.preadv(fd, batch, offset)
        if not done or done % unit:
            return False
        offset += done
        missing -= done
        # usually one call reads all, and nothing is left to divide
        rest = after_bytes(rest, done) if missing else []
    return True


class BounceBuffer:
    """Aligned memory of fixed size, through which unaligned buffers are copied before they are
    written.

    :param wait_for_writes: waits until no write uses the memory any more; called before it is
        reused.
    :param batch_bytes: size of the memory, and of a batch, which is written at once; a multiple of
        4 KiB.
    """

    def __init__(
        self,
        wait_for_writes: Callable[[], None],
        batch_bytes: int = _BATCH_BYTES,
    ) -> None:
        # mapped, because mappings are aligned; backed by physical memory on first use
        self._memory = memoryview(mmap.mmap(-1, batch_bytes))
        self._wait_for_writes = wait_for_writes
        self._was_used = False
        """Whether bytes were copied to the memory before, so that a write may be using it."""

    def aligned_batches(
        self,
        stream: Iterator[Buffer],
    ) -> Iterator[list[memoryview]]:
        """Yield the stream's bytes as lists of aligned buffers, one list (batch) per write, padded
        with zeros to a multiple of 4 KiB. Buffers that are aligned are yielded without a copy, and
        are valid as long as the stream's buffers.
        """
        # A batch consists of the stream's own aligned buffers, and of runs of copied bytes between
        # them. An own buffer is only used where a page of the batch begins, and as whole pages.
        # Therefore each run is whole pages, too, and O_DIRECT accepts all of them.
        batch: list[memoryview] = []
        length = 0  # bytes of the batch so far, copied or not
        # place in the memory of the last run of copied bytes, which ``batch`` does not contain yet
        run_start = 0
        run_end = 0
        for piece in stream:
            rest = _as_bytes(piece)
            while rest:
                left_in_batch = len(self._memory) - length
                whole_page_bytes = len(rest) - len(rest) % PAGE_BYTES
                is_at_page = length % PAGE_BYTES == 0
                if is_at_page and whole_page_bytes and starts_aligned(rest):
                    count = min(whole_page_bytes, left_in_batch)
                    # this ends the run of copied bytes before the buffer
                    batch += self._copied_run(run_start, run_end)
                    run_start = run_end
                    batch.append(rest[:count])
                else:
                    count = min(len(rest), left_in_batch)
                    self._copy(rest[:count], run_end)
                    run_end += count
                length += count
                rest = rest[count:]
                is_full = count == left_in_batch
                if is_full:
                    batch += self._copied_run(run_start, run_end)
                    yield batch
                    batch = []
                    length = 0
                    run_start = 0
                    run_end = 0
        if length:
            # Only copied bytes can end within a page. Put the zeros that fill the page behind them
            # in the memory, so that both are one buffer.
            num_zeros = -length % PAGE_BYTES
            padded_end = run_end + num_zeros
            self._memory[run_end:padded_end] = bytes(num_zeros)
            batch += self._copied_run(run_start, padded_end)
            yield batch

    def _copy(self, piece: Buffer, start: int) -> None:
        """Copy bytes to the memory, from byte ``start`` on. Before the first copy of a batch, wait
        until the writes of earlier batches no longer use the memory."""
        is_first_of_batch = start == 0
        if is_first_of_batch and self._was_used:
            self._wait_for_writes()
        end = start + len(piece)
        self._memory[start:end] = piece
        self._was_used = True

    def _copied_run(self, start: int, end: int) -> list[memoryview]:
        """Return a run of copied bytes, ``start`` to ``end`` of the memory, as a list of one
        buffer; an empty list if there are none."""
        if start == end:
            return []
        return [self._memory[start:end]]


def _as_bytes(piece: Buffer) -> memoryview:
    """Return a one-dimensional view of the bytes of a buffer, whose ``len`` is their number."""
    # the buffer is such a view already
    if type(piece) is memoryview and piece.format == "B":
        return piece
    return memoryview(piece).cast("B")
