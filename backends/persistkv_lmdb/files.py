"""Safe opening of a store's files, and durability outside of transactions.

A store has regular files only: links and FIFOs are refused, never followed or waited for. In a directory that another
user prepared, a link would redirect writes to any file of this user, and a FIFO would block the process that opens it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from persistkv.errors import StoreUnavailableError
from persistkv_lmdb.vectored_io import write_all

_ROOT = 0


def open_regular(path: str | Path, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """Open a regular file; return its descriptor.

    :raises OSError: it cannot be opened; ``ELOOP`` for a symbolic link, ``EINVAL`` for other non-regular files.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path} is a symbolic link") from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"{path} is no regular file")


def open_directory(path: str | Path, *, dir_fd: int | None = None) -> int:
    """Open a directory that is not a symbolic link; return its descriptor.

    :raises OSError: it cannot be opened.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def check_store(store: Path, *, files: Iterable[str], directories: Iterable[str], read_only: bool) -> None:
    """Refuse a store's directory if another user may have prepared its content.

    :param files: names that must be regular files if they exist.
    :param directories: names that must be directories if they exist.
    :raises StoreUnavailableError: another user owns the directory and it is opened for writing, or one of the names is
        a link, a FIFO or of another type.
    """
    owner = store.stat().st_uid
    if not read_only and owner not in (os.geteuid(), _ROOT):
        raise StoreUnavailableError(
            f"{store} belongs to user {owner}, and this process runs as user {os.geteuid()}: "
            "run it as that user, or change the owner"
        )
    for names, is_right, kind in ((files, stat.S_ISREG, "regular file"), (directories, stat.S_ISDIR, "directory")):
        for name in names:
            try:
                found = (store / name).lstat().st_mode
            except FileNotFoundError:
                continue
            if not is_right(found):
                what = "a symbolic link" if stat.S_ISLNK(found) else f"no {kind}"
                raise StoreUnavailableError(f"{store / name} is {what}: move it away, or choose another directory")


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable.

    :raises OSError: it cannot be read, or the disk failed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_again(path: Path, count: int) -> None:
    """Rewrite the first ``count`` bytes of a file as they read now, and make them durable.

    After a failed write, the kernel may hold the bytes and consider them written: a sync alone succeeds and does
    nothing. The caller must exclude other writers.

    :raises OSError: they cannot be read or written, or the disk failed; their content as read is unchanged.
    """
    with path.open("rb") as file:
        held = file.read(count)
    write_durably(path, held, 0)


def write_durably(path: Path, content: bytes, offset: int) -> None:
    """Write part of a file, and make it durable. The caller must exclude other writers.

    :raises OSError: the disk failed; part of the content may be written.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if content:
            write_all(fd, [memoryview(content)], offset)
        os.fsync(fd)
    finally:
        os.close(fd)
