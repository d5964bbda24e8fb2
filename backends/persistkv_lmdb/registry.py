"""The environments of this process. LMDB refuses to open one twice in a process, so all handles on a store share one.

1. At most one environment per directory is open; one thread at a time opens, reopens or closes it.
2. The wait for another thread is bounded and per store: opening may take long, because of an integrity check or a
   stopped process that holds a lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from persistkv.errors import StoreBusyError
from persistkv.storage.extensions import Policy
from persistkv_lmdb import guard
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.errors import translated_at_open
from persistkv_lmdb.opening import file_id


class _Slot:
    """Entry of a store's directory, kept while this process opens it or has it open."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.environments: list[Environment] = []
        """More than one if another process replaced the open files with those of another store."""
        self.visitors = 0
        """Threads that hold the lock or wait for it."""


class Environments:
    """The environments of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never held during I/O
        self._slots: dict[tuple[int, int], _Slot] = {}
        os.register_at_fork(after_in_child=self._forget)

    def acquire(self, path: Path, policy: Policy, *, read_only: bool) -> Environment:
        """Return the process's environment of these files, opened if necessary; errors as in ``Environment``.

        :raises StoreBusyError: another thread of this process has been opening it for too long.
        """
        with translated_at_open(path):
            status = path.stat()
        with self._visited((status.st_dev, status.st_ino), path, guard.OPENING_PATIENCE_S) as slot:
            wanted = file_id(path)
            found = next((env for env in slot.environments if env.file_id == wanted), None)
            if found is None:
                found = Environment(path, policy, read_only=read_only)
                slot.environments.append(found)
            elif found.read_only and not read_only:
                found.make_writable()
            found.handles += 1
            return found

    def release(self, environment: Environment) -> None:
        """Release one use of an environment; the last release closes it."""
        with self._lock:
            found = [key for key, slot in self._slots.items() if environment in slot.environments]
        for key in found:  # one, or none in a fork
            with self._visited(key, environment.path, None) as slot:
                environment.handles -= 1
                if not environment.handles:
                    slot.environments.remove(environment)
                    environment.close()

    @contextmanager
    def _visited(self, key: tuple[int, int], path: Path, patience_s: float | None) -> Iterator[_Slot]:
        """Hold the slot's lock for the length of the block; remove a slot that is left empty."""
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            slot.visitors += 1
        try:
            if not slot.lock.acquire(timeout=-1 if patience_s is None else patience_s):
                raise StoreBusyError(
                    f"{path} is busy: another thread of this process has been opening it for more than {patience_s:g} s"
                )
            try:
                yield slot
            finally:
                slot.lock.release()
        finally:
            with self._lock:
                slot.visitors -= 1
                if not slot.visitors and not slot.environments and self._slots.get(key) is slot:
                    del self._slots[key]

    def _forget(self) -> None:
        """Reset the registry in a forked child: another thread of the parent may have held a lock."""
        self._lock = threading.Lock()
        for slot in self._slots.values():
            for environment in slot.environments:
                environment.forget()
        self._slots = {}


# State of the process: LMDB refuses to open an environment twice in one process.
ENVIRONMENTS = Environments()
