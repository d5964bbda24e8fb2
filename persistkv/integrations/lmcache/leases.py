"""Locks of looked-up keys: leases, which expire if the process that took them is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass
class _Lease:
    """The locks of one key."""

    count: int
    """Number of locks that were not released."""
    expires_at: float
    """Monotonic time at which all locks of the key expire."""


class Leases:
    """Keys that must not be deleted. Thread-safe."""

    def __init__(self, lease_s: float) -> None:
        """:param lease_s: seconds from the last lock of a key to the expiry of all its locks."""
        self._lease_s = lease_s
        self._leases: dict[Hashable, _Lease] = {}
        """By key. Expired leases are kept until ``expire`` is called."""
        self._lock = threading.Lock()

    def acquire(self, keys: Iterable[Hashable]) -> None:
        """Lock keys; locked keys get one more lock. All locks of a key expire together, ``lease_s``
        after the last one was acquired."""
        expires_at = time.monotonic() + self._lease_s
        with self._lock:
            for key in keys:
                lease = self._leases.get(key)
                if lease is None:
                    lease = _Lease(count=0, expires_at=expires_at)
                    self._leases[key] = lease
                lease.count += 1
                lease.expires_at = expires_at

    def release(self, keys: Iterable[Hashable]) -> None:
        """Release one lock of each key; keys without locks are ignored."""
        with self._lock:
            for key in keys:
                lease = self._leases.get(key)
                if lease is None:
                    continue
                lease.count -= 1
                if lease.count <= 0:
                    del self._leases[key]

    def is_locked(self, key: Hashable) -> bool:
        """Return whether a key is locked, and its lease has not expired."""
        with self._lock:
            lease = self._leases.get(key)
            return lease is not None and lease.expires_at > time.monotonic()

    def expire(self) -> None:
        """Forget expired locks."""
        now = time.monotonic()
        with self._lock:
            for key, lease in list(self._leases.items()):
                if lease.expires_at <= now:
                    del self._leases[key]

    def __len__(self) -> int:
        return len(self._leases)
