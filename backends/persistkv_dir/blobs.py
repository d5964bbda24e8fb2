"""Blobs as files of a directory that many machines mount.

1. A blob is complete when its name appears: it is written to a temporary file, synced, and renamed.
2. It is durable on return: its directory is synced after the rename. The directories above it are
   synced once per handle, because the process that created them may not have synced them yet.
3. Names never leave the root: symbolic links below it are not followed, and only regular files are
   blobs.
4. Each list, deletion and write opens its directories with ``_REVALIDATE``: a client of NFS then
   compares its cached directory with the server's. A blob counts as missing only after such an
   attempt.
5. A root that a handle has seen, and that is gone, is unavailable, not empty: it may be unmounted.
6. Files are removed if they are blobs to delete, or temporary files of dead writers. Directories
   stay.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from persistkv.errors import StoreError
from persistkv.storage.blobs import (
    MAX_NAME,
    BlobInfo,
    BlobMissingError,
    Blobs,
    RefusedError,
    UnavailableError,
    check_name,
    check_prefix,
    is_name,
)
from persistkv.storage.checks import CallsCheck, Check
from persistkv.storage.format.codec import Buffer
from persistkv_dir.checks import check_directory

_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700
_MOST_BUFFERS = 1024  # per call: IOV_MAX
# a day: age at which the temporary file of a writer is removed. A writer that was paused for longer
# writes its blob again.
_DEAD_AFTER_S = 24 * 3600.0
# names of temporary files: no name of a blob begins with a dot, so that lists do not show them
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")

_REMEDIES = {
    "list": "let the user of the engines read and search the directory",
    "put": "let the user of the engines write to it; the file system must support fsync of "
    "directories, and rename",
    "read": "let the user of the engines read its files",
    "delete": "let the user of the engines delete its files: without that, the store exceeds "
    "its capacity",
}

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
# Flags to open a directory with. The client of a network file system answers from its cache with
# the first flag, and asks the server with the second.
_LOOK_UP = os.O_PATH
_REVALIDATE = os.O_RDONLY

_REFUSED = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENAMETOOLONG,
        # there is a file where the name needs a directory, or the reverse
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EEXIST,
        errno.ELOOP,
    }
)
"""Errors that another attempt would meet, too."""

_NO_BLOB = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO}
)
"""Errors of a path without a regular file: nothing, a link, a directory, a socket."""

_REPLACED = frozenset({errno.ENOENT, errno.ESTALE})
"""Errors of a directory or file that another machine removed or replaced."""


class _PlaceOfBlob(NamedTuple):
    """Path of a blob below the root."""

    directories: tuple[str, ...]
    """Names of the directories on the path, the outermost first."""
    file: str
    """Name of the file."""

    @classmethod
    def of(cls, name: str) -> _PlaceOfBlob:
        *directories, file = name.split("/")
        return cls(tuple(directories), file)

    def __str__(self) -> str:
        return "/".join((*self.directories, self.file))


class _OpenBlob:
    """A blob that is being read."""

    def __init__(
        self,
        place: _PlaceOfBlob,
        descriptor: int,
        status: os.stat_result,
    ) -> None:
        self.place = place
        self.descriptor = descriptor
        self.version = (status.st_ino, status.st_size, status.st_mtime_ns)
        """Inode, size and time of modification: another blob at the same place has others."""

    def close(self) -> None:
        os.close(self.descriptor)


class _FileSystemTime(NamedTuple):
    """A time that the file system reported, and the local monotonic clock then."""

    time: float
    monotonic: float

    def now(self) -> float:
        """Return the file system's time at present, or earlier if this machine was suspended."""
        return self.time + time.monotonic() - self.monotonic


class DirBlobs(Blobs):
    """Blobs in the directory ``root``, which the first ``put`` creates.

    :param read_only: ``put`` and ``delete`` are refused, and nothing is ever written.
    """

    latency_s = 0.001
    connections = 8

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self.root = root.absolute()
        self.read_only = read_only
        self._closed = False
        self._root_was_seen = False
        """Whether ``root`` has existed at some time: then it is not created again."""
        self._durable: set[tuple[int, int]] = set()
        """Device and inode of the directories whose path is durable: its entries are synced."""
        self._file_system_time: _FileSystemTime | None = None
        """Time of the last ``put``; None: there was none, so the server's clock is not known."""

    def put(self, name: str, pieces: Sequence[Buffer]) -> float:
        """See ``Blobs.put``. Missing directories are created; the returned time is that of the file
        system."""
        check_name(name)
        self._check_writable()
        place = _PlaceOfBlob.of(name)
        with self._translated(name):
            try:
                write_time = self._write(place, pieces)
            except OSError as error:
                if error.errno not in _REPLACED:
                    raise
                # The directory does not exist yet or was removed meanwhile; or another machine has
                # removed the temporary file, which was a day old.
                self._create_directories(place.directories)
                write_time = self._write(place, pieces)
        self._file_system_time = _FileSystemTime(write_time, time.monotonic())
        return write_time

    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        """See ``Blobs.read``. ``length`` is not used, because it is the length of all buffers. A
        file that a network file system has forgotten is opened again."""
        check_name(name)
        self._check_open()
        with self._translated(name):
            blob = self._open_blob(_PlaceOfBlob.of(name))
        num_read = 0
        try:
            for buffer in buffers:
                rest = buffer.cast("B")
                while rest:
                    position = offset + num_read
                    # bytes of two blobs must not be mixed
                    may_restart = num_read == 0
                    # translate errors of the read only: those of the iterable pass unchanged
                    with self._translated(name):
                        done = self._read_some(
                            blob, rest, position, may_restart=may_restart
                        )
                    if done == 0:
                        return num_read
                    num_read += done
                    rest = rest[done:]
            return num_read
        finally:
            blob.close()

    def delete(self, names: Sequence[str]) -> None:
        """See ``Blobs.delete``. After failures, the first one is raised at the end."""
        for name in names:
            check_name(name)
        self._check_writable()
        # sort the places, because ``groupby`` finds neighbours only: each directory is opened once
        places = sorted(map(_PlaceOfBlob.of, names))
        failures: list[StoreError] = []
        for directories, neighbours in groupby(places, attrgetter("directories")):
            # try all directories, even if one is forbidden
            failures += self._delete_in(directories, neighbours)
        if failures:
            raise failures[0]

    def list(
        self,
        prefix: str,
        after: str = "",
    ) -> Iterator[BlobInfo]:
        # check here, because the body of a generator begins at its first ``next``
        check_prefix(prefix)
        self._check_open()
        return self._list(prefix, after)

    def check(self, *, writes: bool) -> Iterator[Check]:
        """See ``Blobs.check``. A directory that does not exist is not created, and its calls are
        not tried."""
        yield from check_directory(self.root)
        if self.root.is_dir():
            writes = writes and not self.read_only
            yield from CallsCheck(self, _REMEDIES, writes=writes).run()

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.root} is closed")

    def _check_writable(self) -> None:
        self._check_open()
        if self.read_only:
            raise RefusedError(f"{self.root} is open for reading only")

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Translate ``OSError`` within the ``with`` statement into a ``StoreError`` with the
        path."""
        try:
            yield
        except OSError as error:
            kind = RefusedError if error.errno in _REFUSED else UnavailableError
            raise kind(f"{self.root / name}: {_reason(error)}") from error

    # Directories

    def _open_root(self, access: int) -> int:
        """Open the directory of the store.

        :raises UnavailableError: it was there before, and is not there now.
        """
        # Read the attribute before the call. If this thread finds no root, another one may create
        # it then, and set the attribute: the root has not disappeared.
        was_seen = self._root_was_seen
        try:
            descriptor = os.open(self.root, access | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if was_seen:
                reason = "mount it, or create it again if it was deleted"
                raise UnavailableError(
                    f"{self.root} has disappeared: {reason}"
                ) from None
            raise
        except NotADirectoryError:
            raise RefusedError(f"{self.root} is not a directory") from None
        self._root_was_seen = True
        return descriptor

    @contextmanager
    def _directory(
        self,
        directories: Iterable[str],
        access: int,
    ) -> Iterator[int]:
        """Open a directory below the root; the ``with`` statement receives its descriptor.

        :param directories: the names on the path from the root.
        :param access: ``_LOOK_UP`` or ``_REVALIDATE``.
        """
        with ExitStack() as opened:
            descriptor = opened.enter_context(_closing(self._open_root(access)))
            for directory in directories:
                # open one after the other, because O_NOFOLLOW concerns the last part of a path only
                descriptor = opened.enter_context(
                    _directory_in(descriptor, directory, access)
                )
            yield descriptor

    def _create_directories(self, directories: Sequence[str]) -> None:
        """Create the directories on a path below the root if they are missing, and the root; make
        their entries durable."""
        # Once the root was seen, it is never created again: if it is gone, it may be unmounted, and
        # ``_open_root`` raises.
        if not self._root_was_seen:
            self._create_root()
        with ExitStack() as opened:
            parent = opened.enter_context(_closing(self._open_root(_REVALIDATE)))
            if _identity(parent) not in self._durable:
                self._sync_parents_of_root(os.fstat(parent).st_dev)
                self._durable.add(_identity(parent))
            for name in directories:
                with suppress(FileExistsError):
                    os.mkdir(name, _DIRECTORY_MODE, dir_fd=parent)
                # sync even if it exists: the process that created it may not have synced it yet
                os.fsync(parent)
                child = opened.enter_context(_directory_in(parent, name, _REVALIDATE))
                # writes of blobs in this directory need not sync its path again
                self._durable.add(_identity(child))
                parent = child

    def _create_root(self) -> None:
        """Create the store's directory and its parents, the outermost first."""
        for path in (*reversed(self.root.parents), self.root):
            if not path.exists():
                path.mkdir(_DIRECTORY_MODE, exist_ok=True)

    def _sync_parents_of_root(self, device: int) -> None:
        """Make the entries of the store's directory and its parents durable, up to a mount.

        :param device: of the store's directory.
        """
        for parent in self.root.parents:
            # this parent is on another file system: the entry in it is a mount point, which was
            # there before the store
            if parent.stat().st_dev != device:
                break
            try:
                descriptor = os.open(
                    parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                )
            except PermissionError:
                # this parent belongs to another user, who created the entries in it
                continue
            with _closing(descriptor):
                os.fsync(descriptor)

    # Writing

    def _write(self, place: _PlaceOfBlob, pieces: Sequence[Buffer]) -> float:
        """Write a blob; return the file system's time afterwards.

        :raises OSError: nothing was written.
        :raises UnavailableError: the blob is at its place, but it may not be durable.
        """
        with self._directory(place.directories, _REVALIDATE) as directory:
            # the directory exists, but the entries on its path may not be synced yet
            if _identity(directory) not in self._durable:
                self._create_directories(place.directories)
            modified = _write_and_rename(directory, place.file, pieces)
            try:
                os.fsync(directory)
                # The rename has set the directory's time. It is later than that of the file if the
                # process was stopped between the write and the rename.
                renamed = os.fstat(directory).st_mtime
            except OSError as error:
                # raise no OSError, from which callers conclude that nothing was written
                raise UnavailableError(
                    f"{self.root / str(place)}: {_reason(error)}"
                ) from error
        return max(modified, renamed)

    def _delete_in(
        self,
        directories: Sequence[str],
        places: Iterable[_PlaceOfBlob],
    ) -> Sequence[StoreError]:
        """Try to delete each of the blobs of one directory; return the errors of those that could
        not be deleted."""
        failures: list[StoreError] = []
        with (
            _collected(failures),
            self._translated("/".join(directories)),
            _if_exists(self._directory(directories, _REVALIDATE)) as directory,
        ):
            # if the directory is gone, all of its blobs are deleted already
            if directory is None:
                return failures
            for place in places:
                with _collected(failures), self._translated(str(place)):
                    _unlink_file(directory, place.file)
        return failures

    # Reading

    def _open_blob(self, place: _PlaceOfBlob) -> _OpenBlob:
        """Open a blob for reading; the caller closes it.

        :raises BlobMissingError: there is no regular file at its path.
        """
        # try the client's cache first: usually, it spares a request to the server for each
        # directory on the path
        try:
            return self._open_file(place, _LOOK_UP)
        except OSError as error:
            if error.errno not in _REPLACED | _NO_BLOB:
                raise
        # try again, because the client of a network file system may have answered from its cache
        try:
            return self._open_file(place, _REVALIDATE)
        except OSError as error:
            if error.errno not in _NO_BLOB:
                raise
            raise BlobMissingError(
                f"{self.root / str(place)} does not exist"
            ) from error

    def _open_file(self, place: _PlaceOfBlob, access: int) -> _OpenBlob:
        """Open the file of a blob.

        :param access: ``_LOOK_UP`` or ``_REVALIDATE``, for the directories on its path.
        """
        # O_NONBLOCK: opening a FIFO does not wait for its writer
        flags = os.O_RDONLY | os.O_NONBLOCK | _SAFE
        with self._directory(place.directories, access) as directory:
            descriptor = os.open(place.file, flags, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, "not a regular file")
        except BaseException:
            os.close(descriptor)
            raise
        return _OpenBlob(place, descriptor, status)

    def _read_some(
        self,
        blob: _OpenBlob,
        buffer: memoryview,
        offset: int,
        *,
        may_restart: bool,
    ) -> int:
        """Read into the beginning of a buffer; return the number of bytes, 0 if the blob ends.

        :param may_restart: no byte of the blob was read yet, so a blob that has replaced it may be
            read instead.
        """
        try:
            return os.preadv(blob.descriptor, [buffer], offset)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        # ESTALE: another machine deleted or replaced the file, or the server started again
        fresh = self._open_blob(blob.place)
        is_replaced = blob.version != fresh.version
        if is_replaced and not may_restart:
            fresh.close()
            raise UnavailableError(
                f"{self.root / str(blob.place)} was replaced while it was read"
            )
        blob.close()
        blob.descriptor = fresh.descriptor
        blob.version = fresh.version
        return os.preadv(blob.descriptor, [buffer], offset)

    # Listing

    def _list(self, prefix: str, after: str) -> Iterator[BlobInfo]:
        """Yield the blobs whose names start with ``prefix`` and are greater than ``after``."""
        # the prefix is empty or ends with a slash, so the last part is empty
        directories = prefix.split("/")[:-1]
        with (
            self._translated(prefix),
            _if_exists(self._directory(directories, _REVALIDATE)) as directory,
        ):
            yield from self._list_directory(directory, prefix, after)

    def _list_directory(
        self,
        directory: int | None,
        prefix: str,
        after: str,
    ) -> Iterator[BlobInfo]:
        """Yield the blobs below a directory whose names are greater than ``after``.

        :param directory: descriptor of the directory; None: it does not exist.
        :param prefix: path of the directory below the root, ending with a slash; empty: the root.
            The names of its blobs start with it.
        """
        # no blob has a longer name; this also bounds the depth of the recursion
        if directory is None or len(prefix) >= MAX_NAME:
            return
        for entry in self._entries(directory):
            name = prefix + entry
            if entry.endswith("/"):
                # Skip a directory that precedes ``after``: all names in it do, too. An exception is
                # the directory that ``after`` is in.
                holds_after = after.startswith(name)
                if name <= after and not holds_after:
                    continue
                inner_directory = _directory_in(directory, entry[:-1], _REVALIDATE)
                with _if_exists(inner_directory) as inner:
                    yield from self._list_directory(inner, name, after)
            elif name > after and is_name(name):
                status = _status_of_file(directory, entry)
                if status is not None:
                    yield BlobInfo(name, status.st_size, status.st_mtime)

    def _entries(self, directory: int) -> Sequence[str]:
        """Return the names of the files and directories in a directory, in ascending order; those
        of directories end with ``/``. Delete temporary files of dead writers.

        With the ``/``, this is the order of the full names below them: ``a-b`` precedes ``a/b``.
        """
        entries = []
        # the scan of a directory that is removed meanwhile ends early
        with suppress(FileNotFoundError), os.scandir(directory) as scan:
            for entry in scan:
                if _TEMPORARY.fullmatch(entry.name):
                    self._remove_if_dead(directory, entry.name)
                elif not is_name(entry.name):
                    continue
                elif entry.is_dir(follow_symlinks=False):
                    entries.append(entry.name + "/")
                elif entry.is_file(follow_symlinks=False):
                    entries.append(entry.name)
        return sorted(entries)

    def _remove_if_dead(self, directory: int, temporary: str) -> None:
        """Delete a temporary file if it is so old that its writer must be dead. If the server's
        time is not known, its age is not known, either: leave it."""
        if self.read_only or self._file_system_time is None:
            return
        status = _status_of_file(directory, temporary)
        if status is None:
            return
        # compare with the server's clock, which has set the time of the file
        if status.st_mtime < self._file_system_time.now() - _DEAD_AFTER_S:
            # another process may have removed the file, or this one has no permission
            with suppress(OSError):
                os.unlink(temporary, dir_fd=directory)


def _write_and_rename(
    directory: int,
    name: str,
    pieces: Sequence[Buffer],
) -> float:
    """Write a temporary file, sync it, and rename it; return its time of modification, in seconds
    since the epoch.

    :raises OSError: nothing was written.
    """
    temporary = f".{secrets.token_hex(16)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
    with _closing(os.open(temporary, flags, _FILE_MODE, dir_fd=directory)) as file:
        try:
            _write_all(file, pieces)
            os.fsync(file)
            modified = os.fstat(file).st_mtime
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise
    return modified


def _write_all(file: int, pieces: Sequence[Buffer]) -> None:
    """Write all pieces to a file, in several calls if there are many."""
    rest = [memoryview(piece).cast("B") for piece in pieces]
    # index of the first piece with bytes that are not written yet
    number = 0
    while number < len(rest):
        num_written = os.writev(file, rest[number : number + _MOST_BUFFERS])
        # pass the pieces that are complete, including empty ones
        while number < len(rest) and num_written >= len(rest[number]):
            num_written -= len(rest[number])
            number += 1
        # the call has written only a part of this piece
        if num_written:
            rest[number] = rest[number][num_written:]


@contextmanager
def _collected(failures: list[StoreError]) -> Iterator[None]:
    """Add a StoreError that ends the ``with`` statement to ``failures``, instead of raising it."""
    try:
        yield
    except StoreError as error:
        failures.append(error)


def _unlink_file(directory: int, name: str) -> None:
    """Delete a file. If there is none, or something that is no file, do nothing."""
    try:
        os.unlink(name, dir_fd=directory)
    except OSError as error:
        if error.errno not in _NO_BLOB:
            raise


def _status_of_file(directory: int, name: str) -> os.stat_result | None:
    """Return the status of a regular file; None if there is none any more."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


@contextmanager
def _directory_in(
    parent: int,
    name: str,
    access: int,
) -> Iterator[int]:
    """Open a directory in another one, not through a link, for the ``with`` statement.

    :param parent: descriptor of the other one.
    :param access: ``_LOOK_UP`` or ``_REVALIDATE``.
    """
    with _closing(
        os.open(name, access | os.O_DIRECTORY | _SAFE, dir_fd=parent)
    ) as descriptor:
        yield descriptor


@contextmanager
def _if_exists(directory: AbstractContextManager[int]) -> Iterator[int | None]:
    """Open a directory; the ``with`` statement receives None instead if it does not exist."""
    with ExitStack() as opened:
        descriptor = None
        # catch errors of the opening only: those of the ``with`` statement's body pass
        try:
            descriptor = opened.enter_context(directory)
        except OSError as error:
            if error.errno not in _NO_BLOB:
                raise
        yield descriptor


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the ``with`` statement, which receives it."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    """Return device and inode of an open directory."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _reason(error: OSError) -> str:
    """Return the error's code and description as text, without a path."""
    code = errno.errorcode.get(error.errno or 0, "unknown error")
    return f"{code} ({error.strerror})"
