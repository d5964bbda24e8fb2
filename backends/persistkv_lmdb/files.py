"""Files of a store: safe opening, durable writes, LMDB's meta pages, the writer lock, and
translation of errors.

A store has regular files only: links and FIFOs are refused, never followed or waited for. In a
directory that another user prepared, a link would redirect writes to any file of this user, and a
FIFO would block the process that opens it.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import lmdb

from persistkv.errors import (
    CorruptStoreError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from persistkv_lmdb.lock_wait import LockWait

DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"  # names given by LMDB
GUARD_FILE, WRITER_LOCK_FILE = "guard", "writer.lock"
SEGMENT_DIRECTORY, STATUS_DIRECTORY = "segments", "status"
INDEX_PREFIX = "index-"
KEY_FILE, KEY_PART_FILE = "keys", "keys.part"
STORE_FILES = (
    DATA_FILE,
    LOCK_FILE,
    GUARD_FILE,
    WRITER_LOCK_FILE,
    KEY_FILE,
    KEY_PART_FILE,
)
_STORE_DIRECTORIES = (SEGMENT_DIRECTORY, STATUS_DIRECTORY)

# seconds to wait for the writer lock, whose holder may be checking the store's integrity
OPENING_PATIENCE_S = 30.0
# seconds to wait for the writer lock: several times the duration of a commit of 128 MiB to a slow
# disk
WRITING_PATIENCE_S = 10.0
# seconds to wait for the writer lock after a wait that timed out
_SHORT_PATIENCE_S = 0.2
# content of the file of the writer lock (``WriterLock.mark_commit``)
_BEGUN = b"+"
_ENDED = b"-"
_ROOT = 0  # user id of root

# integers in LMDB's pages, in the byte order of the machine
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
_META_MAGIC = 0xBEEFC0DE
_PAGE_HEADERS = (16, 24)  # lengths in bytes, in LMDB 0.9 and 1.0
# offsets within a meta page, after its header
_PAGE_BYTES_AT = 24
_LAST_PAGE_AT = 120
_META_BYTES = 160  # enough of a meta page to read these fields, with either header
_MOST_PAGE_BYTES = 64 << 10  # 64 KiB

# errors of LMDB for a full map, disk or transaction
_FULL = (lmdb.MapFullError, lmdb.DiskError, lmdb.TxnFullError)
_CORRUPT = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.NotFoundError,
)
_INVALID_ROW = (struct.error, OverflowError, SystemError, MemoryError)
"""Errors that Python raises for a row whose length, taken from a damaged page, is impossible."""
_FULL_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
STAT_BLOCK_BYTES = 512  # unit of ``st_blocks``
# 64 MiB, the raw bytes of a pack: with less free space, a disk counts as nearly full
_NEARLY_FULL = 64 << 20


class ReplacedError(StoreError):
    """Files of the store were removed or replaced since it was opened. Nothing of the transaction
    is acknowledged; the environment must be opened again.
    """


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate LMDB's errors within the ``with`` statement into a ``StoreError`` that names the
    store.

    A full disk or map becomes ``StoreFullError``. Damage, which includes a row of impossible
    length, becomes ``CorruptStoreError``.
    """
    try:
        yield
    except lmdb.Error as error:
        kind = _error_type_of(error, path)
        raise kind(f"{path}: {_reason(error)}") from error
    except _INVALID_ROW as error:
        raise CorruptStoreError(f"{path}: a row does not read: {error}") from error


def _error_type_of(error: lmdb.Error, path: Path) -> type[StoreError]:
    """Return the type of StoreError that corresponds to an error of LMDB, for the store at
    ``path``."""
    if isinstance(error, _FULL) or error.code in _FULL_CODES:
        return StoreFullError
    # LMDB reports a write that a full disk cut short as an I/O error
    if error.code == errno.EIO and growth_bytes(path) < _NEARLY_FULL:
        return StoreFullError
    if isinstance(error, _CORRUPT):
        return CorruptStoreError
    return StoreError


@contextmanager
def translated_at_open(path: Path) -> Iterator[None]:
    """Translate errors within the ``with`` statement, which opens the store in ``path``: LMDB's
    errors that mean damage into ``CorruptStoreError``, its other errors and ``OSError`` into
    ``StoreUnavailableError``.
    """
    try:
        yield
    except lmdb.Error as error:
        is_damage = isinstance(error, _CORRUPT)
        kind = CorruptStoreError if is_damage else StoreUnavailableError
        raise kind(f"{path}: {_reason(error)}") from error
    except OSError as error:
        raise StoreUnavailableError(f"{path}: {error.strerror or error}") from error


@contextmanager
def translated_io(
    path: Path,
    full: type[StoreError] = StoreFullError,
) -> Iterator[None]:
    """Translate ``OSError`` within the ``with`` statement into a ``StoreError`` that names
    ``path``.

    :param full: type of the error for a full disk, an exceeded quota or file size limit. Callers
        give ``StoreError`` if an eviction, which a ``StoreFullError`` causes, would not help.
    """
    try:
        yield
    except OSError as error:
        kind = full if error.errno in _FULL_CODES else StoreError
        raise kind(f"{path}: {error.strerror or error}") from error


def map_is_full(error: StoreFullError) -> bool:
    """Return whether LMDB's map is full although the driver expected free pages: they are
    fragmented, or damaged."""
    # ``translated`` keeps LMDB's error as the cause
    return isinstance(error.__cause__, lmdb.MapFullError)


def _reason(error: lmdb.Error) -> str:
    """Return the message of an error."""
    # an error without a code is py-lmdb's own, and has no reason
    return error.reason if error.code else str(error)


def free_disk_bytes(path: Path) -> int:
    """Return the bytes of free disk space; 64 MiB, which does not count as nearly full, if that is
    unknown."""
    try:
        status = os.statvfs(path)
    except OSError:  # the directory was moved away
        return _NEARLY_FULL
    return status.f_bavail * status.f_frsize


def has_only_reserved_space(path: Path) -> bool:
    """Return whether all free disk space is reserved for root, as ext4 does with 5 % of a disk.
    Space that this process frees may then be added to the reserve, and not be available."""
    try:
        status = os.statvfs(path)
    except OSError:  # the directory was moved away
        return False
    return status.f_bavail == 0 and status.f_bfree > 0


def has_catalogue(store: Path) -> bool:
    """Return whether ``data.mdb`` exists and is not empty."""
    data = store / DATA_FILE
    return data.exists() and data.stat().st_size > 0


def growth_bytes(path: Path) -> int:
    """Return the bytes by which ``data.mdb`` may grow: free disk space, within the process's file
    size limit."""
    free = free_disk_bytes(path)
    longest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if longest != resource.RLIM_INFINITY:
        with suppress(OSError):
            size = (path / DATA_FILE).stat().st_size
            within_limit = max(0, longest - size)
            free = min(free, within_limit)
    return free


def allocated_bytes(status: os.stat_result) -> int:
    """Return the allocated bytes of a file, without holes and without preallocation beyond its
    end."""
    on_disk = STAT_BLOCK_BYTES * status.st_blocks
    # the size is larger with holes, the bytes on disk with preallocation
    return min(status.st_size, on_disk)


def open_regular(
    path: str | Path,
    flags: int,
    *,
    dir_fd: int | None = None,
) -> int:
    """Open a regular file, with mode 0600 if ``O_CREAT`` creates it; return its descriptor.

    :raises OSError: ``ELOOP`` for a symbolic link, ``EINVAL`` for other non-regular files.
    """
    # O_NONBLOCK: opening a FIFO would wait for another process. The type is checked after opening:
    # between a check and the opening, another user could replace the file.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path} is a symbolic link") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"{path} is no regular file")


FileId: TypeAlias = tuple[int, int]
"""Device and inode of a file or directory."""


def read_regular(path: Path, at_most: int) -> bytes:
    """Return the first ``at_most`` bytes of a regular file; errors as in ``open_regular``."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read(at_most)


def file_id(path: Path | str | int) -> FileId | None:
    """Return the id of a file, the same for every path to it and every descriptor of it; None if it
    cannot be read."""
    try:
        status = os.stat(path)
    except OSError:  # the caller takes this for another file, and reports it
        return None
    return status.st_dev, status.st_ino


def prepare_directory(store: Path, *, read_only: bool) -> None:
    """Create a store's directory and its parents durably unless ``read_only``, and check its
    content.

    :raises StoreUnavailableError: it cannot be created; it belongs to another user (except root)
        and is opened for writing; a store's file is a link, FIFO or of another type; it contains
        other files and no store; or it is empty and ``read_only``.
    """
    with translated_at_open(store):
        if not read_only:
            _create_directories(store)
        status = store.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise StoreUnavailableError(f"{store} is a file; a store is a directory")
        if not read_only:
            _check_owner(store, status.st_uid)
        _check_kinds(store)
        # With a guard file alone, this is a store whose creation was interrupted, or whose
        # catalogue is lost: opening the store handles both.
        has_guard = (store / GUARD_FILE).exists()
        if has_guard or (store / DATA_FILE).exists():
            return
        _check_no_other_files(store)
        if read_only:
            raise StoreUnavailableError(f"{store} is an empty directory and no store")


def _create_directories(store: Path) -> None:
    """Create a directory and its parents, the outermost first, each durably."""
    for directory in (*reversed(store.parents), store):
        if not directory.exists():
            directory.mkdir(0o700, exist_ok=True)
            sync_directory(directory.parent)


def _check_owner(store: Path, owner: int) -> None:
    """Raise a StoreUnavailableError if a store's directory belongs to another user than that of
    this process, except root."""
    user = os.geteuid()
    if owner not in (user, _ROOT):
        raise StoreUnavailableError(
            f"{store} belongs to user {owner}, and this process runs as user {user}: run it as "
            f"that user, or change the owner"
        )


def _check_kinds(store: Path) -> None:
    """Raise a StoreUnavailableError if a file or directory of a store is of another kind, such as a
    link."""
    for name in STORE_FILES:
        _check_kind(store / name, stat.S_ISREG, "regular file")
    for name in _STORE_DIRECTORIES:
        _check_kind(store / name, stat.S_ISDIR, "directory")


def _check_kind(
    file: Path,
    is_kind: Callable[[int], bool],
    kind: str,
) -> None:
    """Raise a StoreUnavailableError if a file or directory of a store exists and is of another
    kind.

    :param is_kind: returns whether a file with a mode (``st_mode``) is of the kind.
    :param kind: its name, for the error.
    """
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        return
    if not is_kind(mode):
        found = "a symbolic link" if stat.S_ISLNK(mode) else f"no {kind}"
        raise StoreUnavailableError(
            f"{file} is {found}: move it away, or choose another directory"
        )


def _check_no_other_files(directory: Path) -> None:
    """Raise a StoreUnavailableError if a directory without a store holds files that are not
    persistkv's."""
    # each root of an ext4 file system has a directory lost+found
    known_names = {*STORE_FILES, *_STORE_DIRECTORIES, "lost+found"}
    others: list[str] = []
    for entry in directory.iterdir():
        if entry.name not in known_names and not entry.name.startswith(INDEX_PREFIX):
            others.append(entry.name)
    if others:
        first = ", ".join(sorted(others)[:3])
        raise StoreUnavailableError(
            f"{directory} is a directory with other files ({first}) and no store: name a store, "
            f"or a new or empty directory to create one"
        )


def is_on_read_only_file_system(store: Path) -> bool:
    """Return whether a store exists on a file system that is mounted read-only, as in an image."""
    try:
        return bool(os.statvfs(store).f_flag & os.ST_RDONLY)
    except OSError:  # opening the store will report the reason
        return False


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(
    path: Path,
    content: bytes,
    offset: int,
) -> None:
    """Write ``content`` at a byte offset of an existing file, and make it durable. The caller
    excludes others."""
    fd = open_regular(path, os.O_RDWR)
    try:
        rest = memoryview(content)
        # one call may write only a part
        while rest:
            num_written = os.pwrite(fd, rest, offset)
            rest = rest[num_written:]
            offset += num_written
        os.fsync(fd)
    finally:
        os.close(fd)


def is_cut_short(directory: Path) -> bool:
    """Return whether ``data.mdb`` ends before the last page that LMDB has allocated: reading it
    would raise SIGBUS.

    LMDB may have allocated pages at the end without ever writing them; ``fsck.inspect``
    distinguishes this. Other processes may write meanwhile.
    """
    try:
        with (directory / DATA_FILE).open("rb") as file:
            first = _read_meta(file)
            second = None
            # the first meta page names the size of pages, and so the place of the second one
            if first is not None:
                file.seek(first.page_bytes)
                second = _read_meta(file)
            # read the size last: the file may grow meanwhile, before a meta page lists its new
            # pages
            size = os.fstat(file.fileno()).st_size
    except OSError:  # opening the store will report the reason
        return False
    metas = [meta for meta in (first, second) if meta is not None]
    # LMDB may use the snapshot of either page
    return any(meta.end > size for meta in metas)


def rewrite_meta_pages(directory: Path) -> None:
    """Write LMDB's two meta pages again as they read, and make them durable. The caller excludes
    other writers.

    After a failed write, the kernel may hold the bytes in its cache and consider them written: a
    sync alone would do nothing, so they are written again.

    :raises OSError: they may not be durable. A later call may repeat the rewrite.
    """
    # without a valid meta page, this stays empty, and the file is only synced
    both_pages = b""
    with (directory / DATA_FILE).open("rb") as file:
        meta = _read_meta(file)
        if meta is not None:
            file.seek(0)
            both_pages = file.read(2 * meta.page_bytes)
    write_durably(directory / DATA_FILE, both_pages, offset=0)


class _MetaPage(NamedTuple):
    """Fields of a meta page of LMDB."""

    end: int
    """Byte offset after the last page that it lists."""
    page_bytes: int


def _read_meta(file: BinaryIO) -> _MetaPage | None:
    """Read and decode the beginning of a meta page; return None if it is no meta page."""
    page = file.read(_META_BYTES)
    if len(page) != _META_BYTES:
        return None
    # the magic number shows which release of LMDB wrote the page
    for header in _PAGE_HEADERS:
        (magic,) = _U32.unpack_from(page, header)
        if magic != _META_MAGIC:
            continue
        (page_bytes,) = _U32.unpack_from(page, header + _PAGE_BYTES_AT)
        (last_page,) = _U64.unpack_from(page, header + _LAST_PAGE_AT)
        if 1 <= page_bytes <= _MOST_PAGE_BYTES:
            end = (last_page + 1) * page_bytes
            return _MetaPage(end, page_bytes)
    return None


class WriterLock:
    """Lock that writers take before LMDB's own, which has no timeout. Thread-safe, and reentrant
    within a thread.

    1. Its holder waits for LMDB's write lock for a short time only, because no other persistkv
       process contends.
    2. It is a flock: the kernel drops it when the process exits. A stopped process keeps it.
    3. Waits are bounded, and processes that wait take turns (``LockWait``). After a timeout, waits
       are short until one succeeds, so that a stopped process does not delay the other work of the
       waiting process.
    4. If its file is deleted (``is_current``), writers exclude each other by LMDB's lock alone
       until they have opened the store again.
    5. Its file records, for other processes, whether a commit was started and not completed; a
       machine crash may lose this record.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / WRITER_LOCK_FILE
        self._threads = threading.RLock()
        """Excludes other threads of this process, which share the descriptor and so its flock."""
        self._depth = 0
        """How often the thread that holds ``_threads`` has entered ``held``: the flock is taken by
        the first and released with the last one."""
        self._timed_out = False
        """Whether the last wait for another process timed out: the next ones are short."""
        self._wait: LockWait | None = None
        """Pending wait for another process, kept after a timeout so that the next call continues
        it; None: no wait was begun since the last one got the lock."""
        self._fd = open_regular(self._file, os.O_RDWR | os.O_CREAT)
        """Descriptor of the file; -1 after ``close``. A granted wait replaces it."""
        self._id = file_id(self._fd)
        """Id of the file, to notice another file at its path."""

    @contextmanager
    def held(
        self,
        patience_s: float | None = None,
        *,
        recover: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Hold the lock within the ``with`` statement.

        :param patience_s: maximum wait in seconds; None: 10 s, or 0.2 s after a wait that timed
            out.
        :param recover: called first if the last commit was interrupted.
        :raises StoreBusyError: another thread or process holds it for longer; the block does not
            run.
        :raises StoreError: it cannot be locked; the block does not run.
        """
        if patience_s is None:
            patience_s = _SHORT_PATIENCE_S if self._timed_out else WRITING_PATIENCE_S
        # one deadline for both waits: for other threads, and for other processes
        deadline = time.monotonic() + patience_s
        if not self._threads.acquire(timeout=patience_s):
            raise self._busy("another thread of this process", patience_s)
        try:
            if self._depth == 0:
                with translated_io(self._file.parent):
                    self._lock(deadline, patience_s)
            self._depth += 1
            try:
                # do this in a nested hold, too: the outer one may have had no ``recover``
                if recover is not None and self.has_interrupted_commit:
                    recover()
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    flock(self._fd, LOCK_UN)
        finally:
            self._threads.release()

    @property
    def has_interrupted_commit(self) -> bool:
        """Whether the last commit that any process started did not complete. The caller must hold
        the lock."""
        with translated_io(self._file.parent):
            first_byte = os.pread(self._fd, 1, 0)
        return first_byte == _BEGUN

    def mark_commit(self, *, begun: bool) -> None:
        """Record for all processes, unsynced, that a commit starts or has completed. The caller
        must hold the lock."""
        with translated_io(self._file.parent):
            mark = _BEGUN if begun else _ENDED
            os.pwrite(self._fd, mark, 0)

    def close(self) -> None:
        """Close the file; idempotent. In a forked child, the parent keeps its lock."""
        # This closes the wait's descriptor in a forked child only: elsewhere, the thread that waits
        # closes it.
        if self._wait is not None:
            self._wait.close_after_fork()
        if self._fd >= 0:
            fd = self._fd
            self._fd = -1
            os.close(fd)

    def is_current(self) -> bool:
        """Return whether the file is still the one at its path."""
        return self._id == file_id(self._file)

    def _lock(self, deadline: float, patience_s: float) -> None:
        """Take the flock; raise StoreBusyError at the deadline."""
        # usually, one attempt is enough; try again if a wait ends early without the lock
        while not self._try_lock(deadline):
            if time.monotonic() >= deadline:
                self._timed_out = True
                raise self._busy(self._holder(), patience_s)
        self._timed_out = False

    def _try_lock(self, deadline: float) -> bool:
        """Try to take the flock until the deadline; return whether it is held.

        False also before the deadline if the pending wait got the lock while no thread awaited it,
        and has released it: the caller tries again, with a new wait.
        """
        try:
            flock(self._fd, LOCK_EX | LOCK_NB)
            return True
        except BlockingIOError:
            if self._wait is None or self._wait.is_over:
                self._wait = LockWait(self._fd)
        remaining_s = max(0.0, deadline - time.monotonic())
        granted_fd = self._wait.result(remaining_s)
        if granted_fd is None:
            return False
        # the lock belongs to the open file description of the wait, which becomes this object's
        self._wait = None
        os.close(self._fd)
        self._fd = granted_fd
        return True

    def _holder(self) -> str:
        """Return words for the process that holds the lock, for a message: with its PID if the
        kernel reports it."""
        held = os.fstat(self._fd)
        major = os.major(held.st_dev)
        minor = os.minor(held.st_dev)
        place = f"{major:02x}:{minor:02x}:{held.st_ino}"
        try:
            locks = Path("/proc/locks").read_text(encoding="ascii")
        except OSError:
            return "another process"
        # fields of a line: number, FLOCK, ADVISORY, WRITE, process, device and inode, range
        pattern = rf"^\d+: FLOCK +\w+ +WRITE +(-?\d+) +{place} "
        found = re.search(pattern, locks, re.MULTILINE)
        # the number is 0 or less for a process in another PID namespace
        if found is None or int(found[1]) <= 0:
            return "another process"
        return f"process {found[1]}"

    def _busy(self, holder: str, patience_s: float) -> StoreBusyError:
        """Return the error after a wait of ``patience_s`` seconds."""
        return StoreBusyError(
            f"{self._file.parent} is busy: {holder} has held its lock for writing for more "
            f"than {patience_s:g} s"
        )
