"""The environments of this process: LMDB refuses to open one twice in it, so all handles on a store share one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from persistkv_lmdb.environment import Environment, file_id
from persistkv_lmdb.options import Placement


class _Environments:
    """The environments of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Environment] = []
        os.register_at_fork(after_in_child=self._forget)

    def acquire(self, path: Path, capacity: int | None, placement: Placement | None, *, read_only: bool) -> Environment:
        with self._lock:
            wanted = file_id(path)
            found = next((env for env in self._open if env.file_id == wanted), None)
            if found is None:
                found = Environment(path, capacity, placement, read_only=read_only)
                self._open.append(found)
            else:
                found.check_placement(placement)
            if not read_only:
                if found.read_only:
                    found.make_writable()
                if capacity not in (None, found.capacity):
                    found.set_capacity(capacity)
            found.handles += 1
            return found

    def release(self, environment: Environment) -> None:
        with self._lock:
            environment.handles -= 1
            if not environment.handles:
                self._open = [env for env in self._open if env is not environment]
                environment.close()

    def _forget(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        for environment in self._open:
            environment.forget()
        self._open = []


# State of the process, because what it stands for is: LMDB refuses to open an environment twice in one.
_ENVIRONMENTS = _Environments()


def acquire(path: Path, capacity: int | None, placement: Placement | None, *, read_only: bool) -> Environment:
    """The process's environment of these files, opened where it is not; errors as in ``Environment``. Thread-safe."""
    return _ENVIRONMENTS.acquire(path, capacity, placement, read_only=read_only)


def release(environment: Environment) -> None:
    """Give back what ``acquire`` gave; the last one closes it. Thread-safe."""
    _ENVIRONMENTS.release(environment)
