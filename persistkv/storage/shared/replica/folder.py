"""Directories of replicas on one machine."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from persistkv.errors import StoreError
from persistkv.storage.format.seal import Seal
from persistkv.storage.shared.forgetting.records import ForgottenTenants
from persistkv.storage.shared.replica.replica import Replica

logger = logging.getLogger(__name__)

_MOST_REPLICAS = 64  # maximum number of replicas of one namespace on one machine
# file that marks the directory of a replica that was closed and kept
_CLEAN_MARKER = "clean"


class ReplicaFolder:
    """Directory of a namespace's replicas on this machine: one for each process that has the store
    open.

    :param root: directory for all stores; None: a temporary directory that ends with this object.
    :param parts: parts of the path below ``root`` that identify the namespace.
    :param seal: seal of the store, which also hides the rows of replicas.
    :param forgotten: see ``Replica``.
    """

    def __init__(
        self,
        root: Path | None,
        parts: Sequence[str],
        seal: Seal,
        forgotten: ForgottenTenants,
    ) -> None:
        self._seal = seal
        self._forgotten = forgotten
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        """Temporary directory of the replicas; None: ``root`` was given."""
        if root is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="persistkv-")
            root = Path(self._temporary.name)
        self._folder = root.joinpath(*parts)
        """Directory of all replicas of the namespace."""
        self._lock = -1
        """Descriptor of the locked file ``<number>.lock`` of the opened replica; -1: none. The lock
        ends with the process."""
        self.path = self._folder
        """Directory of the opened replica."""

    def open(self, namespace: bytes) -> Replica:
        """Open the first replica that no process uses. One that did not end cleanly is emptied.

        :raises StoreError: the directory cannot be used.
        """
        try:
            self._acquire()
            # ``close`` creates the marker. It is absent while the replica is open, so a process
            # that is killed leaves none.
            marker = self.path / _CLEAN_MARKER
            if not marker.exists():
                self._clear()
            marker.unlink(missing_ok=True)
        except OSError as error:
            self._release()
            raise StoreError(
                f"{self._folder}: the replica of the index failed ({error})"
            ) from None
        return self._opened(namespace)

    def _opened(self, namespace: bytes) -> Replica:
        """Open the replica in ``path``; empty a damaged one, and open it again."""
        try:
            return Replica(self.path, namespace, self._seal, self._forgotten)
        except StoreError:
            # if the removal fails, the second attempt to open the replica raises
            with suppress(OSError):
                self._clear()
            return Replica(self.path, namespace, self._seal, self._forgotten)

    def close(self, replica: Replica, *, keep: bool) -> None:
        """Close the replica; ``keep`` it for the next process, unless it has traces of forgotten
        tenants or is damaged. Failures are only logged."""
        is_sound = not replica.has_traces and not replica.is_damaged
        is_kept = keep and is_sound and self._temporary is None
        try:
            replica.close(keep=is_kept)
            # write the marker after the files are complete
            if is_kept:
                marker = self.path / _CLEAN_MARKER
                marker.touch()
        except (StoreError, OSError) as error:
            logger.warning(
                "%s: the replica of the index is not kept (%s)", self.path, error
            )
        self._release()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _acquire(self) -> None:
        """Lock the first directory of a replica that no other handle uses, and set ``path`` to it.

        :raises OSError: all are in use, or cannot be made.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Take the first directory whose lock is free: the process that used it before has ended.
        for number in range(_MOST_REPLICAS):
            lock = os.open(
                self._folder / f"{number}.lock",
                os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
                0o600,
            )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock = lock
            self.path = self._folder / str(number)
            self.path.mkdir(exist_ok=True, mode=0o700)
            return
        raise OSError(f"{_MOST_REPLICAS} replicas are in use")

    def _clear(self) -> None:
        """Delete the content of ``path``."""
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _release(self) -> None:
        """Let other handles use the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
