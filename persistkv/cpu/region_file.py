"""The file behind a shared region: created by one process and attached by others; a lock shows that
it is in use.

1. Each process that uses the region holds a shared ``flock`` on a descriptor that has no other use.
   So a lock ends with its process, and a descriptor passed to another process cannot keep it alive.
2. A process unlinks the file only if it holds the exclusive lock (so the file is unused), or if it
   created the file and could not allocate it.
3. A process uses a file only if the path still leads to it after the process has locked it. Between
   its creation and its locking, a file looks like a leftover, and another process may remove it;
   then the creator retries.
4. A process attaches only to a regular file of its own user that no other user may open: the
   creator of the file can read all contexts. It removes no file of another user.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import time
from pathlib import Path

from persistkv.errors import ConfigurationError, RegionError
from persistkv.memory.pages import use_huge_pages

SHARED_MEMORY_DIRECTORY = "/dev/shm"

_PREFIX = "persistkv_offload_"
_SUFFIX = ".mmap"
_POLL_SECONDS = 0.01  # seconds between attempts to open a file, and to allocate it
# seconds to wait for the host process of a killed engine, which maps the memory for at most 20 s
_PREDECESSOR_S = 25.0
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

logger = logging.getLogger(__name__)


def region_path(instance_id: str, directory: str = SHARED_MEMORY_DIRECTORY) -> str:
    """Return the path of an engine's file; raise ConfigurationError if its id is no file name."""
    if not instance_id or "/" in instance_id or "\0" in instance_id:
        raise ConfigurationError(
            "instance_id", instance_id, "a name without '/' that is not empty"
        )
    return f"{directory}/{_PREFIX}{instance_id}{_SUFFIX}"


def remove_leftover_regions(directory: str = SHARED_MEMORY_DIRECTORY) -> list[str]:
    """Delete the shared memory files that killed engines left, and return their paths. Files in use
    and files of other users are kept.
    """
    removed = []
    for path in sorted(Path(directory).glob(f"{_PREFIX}*{_SUFFIX}")):
        if _remove_leftover(str(path)):
            removed.append(str(path))
    return removed


class RegionFile:
    """An allocated shared memory file and this process's lock on it, created with ``open``. Not
    thread-safe."""

    def __init__(
        self,
        path: str,
        lock_fd: int,
        fd: int,
        created: bool,
    ) -> None:
        self.path = path
        self.fd = fd
        """Descriptor to map or to pass to another process. It carries no lock and is
        close-on-exec."""
        self.created = created
        """Whether this process created the file."""
        self._lock_fd: int | None = lock_fd
        """Descriptor whose lock marks the file as in use; None after ``close``."""
        self._pid = os.getpid()
        """The process that opened the file; a forked one has another."""

    @classmethod
    def open(
        cls,
        path: str,
        size: int,
        timeout_s: float,
    ) -> RegionFile:
        """Create the file with ``size`` bytes allocated, or attach to the file of another process.

        A file that no process has locked is replaced. If another process is creating the file, the
        call waits until the file has its size, at most ``timeout_s`` seconds.

        :raises ConfigurationError: ``size`` bytes are not free; the file is removed. If the
            directory is large enough, the call has waited up to 25 s for other processes to free
            them, whatever ``timeout_s`` is.
        :raises RegionError: the file did not reach its size in time, another user owns it or may
            open it, or the directory cannot be used.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            file = cls._create_or_attach(path, size)
            if file is not None:
                return file
            if time.monotonic() >= deadline:
                raise RegionError(
                    f"{path} has {_size_of(path)} bytes and did not get the expected {size} "
                    f"within {timeout_s:g} s: "
                    "its creator hangs, or an engine of another geometry uses the same instance_id"
                )
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Release the lock; the last process to do so removes the file. Idempotent.

        In a process forked after ``open``, it only closes that process's descriptors.
        """
        lock_fd = self._lock_fd
        self._lock_fd = None
        if lock_fd is None:
            return
        os.close(self.fd)
        # A forked process shares the lock of its parent, and would take the file from it.
        is_opener = os.getpid() == self._pid
        # The exclusive lock is granted only if no other process uses the file.
        if is_opener and _try_lock(lock_fd, fcntl.LOCK_EX):
            _unlink_if_at(lock_fd, self.path)
        os.close(lock_fd)

    @classmethod
    def _create_or_attach(cls, path: str, size: int) -> RegionFile | None:
        """Try once to create the file, or to attach to it. None: the caller must retry, because the
        file is not ready or was removed."""
        lock_fd = _create(path)
        if lock_fd is not None:
            return cls._lock_and_allocate(lock_fd, path, size, created=True)
        # first remove a leftover: one of another geometry would never have the right size
        if _remove_leftover(path):
            return None
        lock_fd = _open_existing(path)
        if lock_fd is None:
            return None
        return cls._lock_and_allocate(lock_fd, path, size, created=False)

    @classmethod
    def _lock_and_allocate(
        cls,
        lock_fd: int,
        path: str,
        size: int,
        *,
        created: bool,
    ) -> RegionFile | None:
        """Lock the open file, and allocate it if this process created it. If the file is not ready,
        or was removed, close it and return None.

        :param created: whether this process created the file; otherwise another one allocates it.
        """
        file = None
        try:
            _check_private(lock_fd, path)
            # the creator of the file has not allocated it yet
            if not created and os.fstat(lock_fd).st_size != size:
                return None
            # another process is about to remove the file
            if not _try_lock(lock_fd, fcntl.LOCK_SH):
                return None
            # another process removed the file before it was locked
            if not _is_at(lock_fd, path):
                return None
            if created:
                _allocate(lock_fd, path, size)
            # A second descriptor, without the lock, to map and to pass to other processes. A passed
            # copy of the first one would keep the lock after the end of this process.
            fd = os.open(path, _OPEN_FLAGS)
            file = cls(path, lock_fd, fd, created)
            return file
        finally:
            if file is None:
                os.close(lock_fd)


def _create(path: str) -> int | None:
    """Create the file and return a descriptor; None if it exists."""
    flags = _OPEN_FLAGS | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        return None
    except OSError as error:
        raise RegionError(f"{path} cannot be created: {error.strerror}") from error


def _open_existing(path: str) -> int | None:
    """Open the file and return a descriptor; None if it does not exist any more."""
    try:
        return os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RegionError(f"{path} cannot be opened: {error.strerror}") from error


def _allocate(
    fd: int,
    path: str,
    size: int,
) -> None:
    """Allocate memory for every byte now. In a sparse file, an access without free memory kills a
    process by SIGBUS. Waits up to 25 s for memory that the host process of a killed engine is about
    to release.
    """
    directory = os.path.dirname(path)
    deadline = time.monotonic() + _PREDECESSOR_S
    while True:
        try:
            os.posix_fallocate(fd, 0, size)
            break
        except OSError as error:
            space = shutil.disk_usage(directory)
            never_fits = size > space.total
            if never_fits or time.monotonic() > deadline:
                _unlink_if_at(fd, path)
                expected = (
                    f"at most the {space.free} bytes free in {directory} "
                    f"({error.strerror})"
                )
                raise ConfigurationError("total_size_bytes", size, expected) from error
        logger.info("%s: waiting until %d bytes are free in %s", path, size, directory)
        # if they are not free in time, the error of a last attempt is raised
        _wait_until_free(directory, size, deadline)
    if not use_huge_pages([fd], size):
        logger.info(
            "%s is not completely in huge pages: disk transfers are slower", path
        )


def _wait_until_free(
    directory: str,
    size: int,
    deadline: float,
) -> None:
    """Wait until ``size`` bytes are free in a directory, or the deadline has passed."""
    while time.monotonic() <= deadline:
        if shutil.disk_usage(directory).free >= size:
            return
        time.sleep(_POLL_SECONDS)


def _check_private(fd: int, path: str) -> None:
    """Raise RegionError unless the open file is a regular one, of this user, that no other user may
    open."""
    status = os.fstat(fd)
    mode = status.st_mode
    others = stat.S_IRWXG | stat.S_IRWXO
    problem = ""
    if not stat.S_ISREG(mode):
        problem = "is no regular file"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}"
    elif mode & others:
        problem = f"has mode {stat.S_IMODE(mode):o}: other users may open it"
    if problem:
        raise RegionError(f"{path} {problem}. Remove it, or use another instance_id")


def _remove_leftover(path: str) -> bool:
    """Unlink the file if it is this user's and no process uses it; return whether it was
    unlinked."""
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except OSError:
        return False
    try:
        is_own = os.fstat(fd).st_uid == os.geteuid()
        removed = is_own and _try_lock(fd, fcntl.LOCK_EX) and _unlink_if_at(fd, path)
    finally:
        os.close(fd)
    if removed:
        logger.info("removed %s, left by a process that was killed", path)
    return removed


def _try_lock(fd: int, kind: int) -> bool:
    """Acquire a ``flock`` without waiting; return whether it was granted."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: str) -> bool:
    """Return whether the path leads to the open file."""
    try:
        at_path = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), at_path)


def _unlink_if_at(fd: int, path: str) -> bool:
    """Unlink the path if it leads to the open file; return whether it did."""
    if not _is_at(fd, path):
        return False
    os.unlink(path)
    return True


def _size_of(path: str) -> int:
    """Return the bytes of a file; 0 if it does not exist."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
