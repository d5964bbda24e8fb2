"""A store in memory, for tests: the shortest driver.

Each open is a store of its own, which ends with its handle.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from persistkv.config import StoreUrl, convert_options, parse_duration, parse_size
from persistkv.errors import StoreError, StoreUnavailableError
from persistkv.storage.backend import Capabilities
from persistkv.storage.catalog import TABLES, RowBackend, Rows
from persistkv.storage.codec import Buffer


class MemoryOptions(msgspec.Struct, frozen=True):
    """What a URL such as ``memory://test?capacity=64MiB`` may set."""

    capacity: str | None = None
    """Bytes of all rows, payloads included; None: no bound."""
    ttl: str | None = None
    """Time after its last use until content expires, a duration such as ``7d``; None: never."""


class MemoryRows(Rows):
    """Sorted tables, and a journal that takes changes back. Tests may damage rows through ``put``."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._rows: dict[str, dict[bytes, bytes]] = {table: {} for table in TABLES}
        self._keys: dict[str, list[bytes]] = {table: [] for table in TABLES}
        self._journal: list[tuple[str, bytes, bytes | None]] = []

    def get(self, table: str, key: bytes) -> bytes | None:
        """See ``Rows``."""
        return self._rows[table].get(key)

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """See ``Rows``."""
        self._replace(table, key, bytes(value))

    def delete(self, table: str, key: bytes) -> bool:
        """See ``Rows``."""
        held = key in self._rows[table]
        self._replace(table, key, None)
        return held

    def range(self, table: str, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        """See ``Rows``."""
        keys, rows = self._keys[table], self._rows[table]
        for number in range(bisect_left(keys, start), len(keys)):
            yield keys[number], rows[keys[number]]

    def keep(self) -> None:
        """Keep what was changed: nothing takes it back any more."""
        self._journal.clear()

    def roll_back(self) -> None:
        """Take back all changes since the last ``keep``."""
        journal, self._journal = self._journal, []
        for table, key, before in reversed(journal):
            self._replace(table, key, before)
        self._journal.clear()

    def _replace(self, table: str, key: bytes, value: bytes | None) -> None:
        rows, keys = self._rows[table], self._keys[table]
        before = rows.pop(key, None)
        self._journal.append((table, key, before))
        if before is None and value is not None:
            insort(keys, key)
        if before is not None:
            self.num_bytes -= len(key) + len(before)
            if value is None:
                del keys[bisect_left(keys, key)]
        if value is not None:
            rows[key] = value
            self.num_bytes += len(key) + len(value)


class MemoryBackend(RowBackend):
    """The driver."""

    capabilities = Capabilities(persistent=False, shared=False)

    def __init__(self, capacity: int | None = None, ttl_s: float | None = None) -> None:
        self.capacity = capacity
        self.ttl_s = ttl_s
        self._rows = MemoryRows()
        self._lock = threading.RLock()
        self._closed = False

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> MemoryBackend:
        options = convert_options(MemoryOptions, url.options, where="memory")
        capacity = None if options.capacity is None else parse_size(options.capacity, name="memory option capacity")
        ttl_s = None if options.ttl is None else parse_duration(options.ttl, name="memory option ttl")
        if read_only:
            raise StoreUnavailableError(f"memory://{url.location} is new with each open: there is nothing to read")
        return cls(capacity, ttl_s)

    @contextmanager
    def rows(self, *, write: bool = False) -> Iterator[MemoryRows]:
        with self._lock:
            if self._closed:
                raise StoreError("this memory store is closed")
            try:
                yield self._rows
            except BaseException:
                self._rows.roll_back()
                raise
            self._rows.keep()

    def has_room(self, rows: Rows, num_bytes: int) -> bool:
        return self.capacity is None or self._rows.num_bytes + num_bytes <= self.capacity

    def disk_bytes(self) -> int:
        return self._rows.num_bytes

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._rows = MemoryRows()
