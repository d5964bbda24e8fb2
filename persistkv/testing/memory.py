"""A store in memory, for tests: the shortest driver.

Each ``open`` creates a separate store, which ends with its handle.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from persistkv.config import StoreUrl, convert_options, parse_duration, parse_size
from persistkv.errors import StoreError, StoreUnavailableError
from persistkv.storage.backend import Capabilities
from persistkv.storage.catalog import TABLES, RowBackend, Rows
from persistkv.storage.format.codec import Buffer
from persistkv.storage.policy import Policy
from persistkv.storage.stats import Rebuilt


class MemoryOptions(msgspec.Struct, frozen=True):
    """Options of a URL such as ``memory://test?capacity=64MiB``."""

    capacity: str | None = None
    """Bound on the bytes of all data, keys and payloads included, a size such as ``64MiB``; None: no bound."""
    ttl: str | None = None
    """Time after which unused packs and manifests expire, a duration such as ``7d``; None: never."""


class MemoryRows(Rows):
    """Tables of database rows in memory, sorted by key. Tests can damage stored data through ``put``."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._rows: dict[str, dict[bytes, bytes]] = {table: {} for table in TABLES}
        self._keys: dict[str, list[bytes]] = {table: [] for table in TABLES}

    def copy(self) -> MemoryRows:
        """Return an independent copy."""
        made = MemoryRows()
        made.num_bytes = self.num_bytes
        made._rows = {table: dict(rows) for table, rows in self._rows.items()}
        made._keys = {table: list(keys) for table, keys in self._keys.items()}
        return made

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._rows[table].get(key)

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        self.delete(table, key)
        insort(self._keys[table], key)
        self._rows[table][key] = bytes(value)
        self.num_bytes += len(key) + len(value)

    def delete(self, table: str, key: bytes) -> bool:
        value = self._rows[table].pop(key, None)
        if value is None:
            return False
        del self._keys[table][bisect_left(self._keys[table], key)]
        self.num_bytes -= len(key) + len(value)
        return True

    def range(self, table: str, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        keys, rows = self._keys[table], self._rows[table]
        for number in range(bisect_left(keys, start), len(keys)):
            yield keys[number], rows[keys[number]]


class MemoryBackend(RowBackend):
    """Storage driver that keeps all data in memory; ``capacity`` in bytes and ``ttl_s``: see ``MemoryOptions``."""

    capabilities = Capabilities(shared=False)
    status_interval_s: float | None = None

    def __init__(self, capacity: int | None = None, ttl_s: float | None = None) -> None:
        self.capacity = capacity
        self.ttl_s = ttl_s
        self._rows = MemoryRows()
        self._writing = threading.Lock()
        self._statuses: dict[str, bytes] = {}
        self._closed = False

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> MemoryBackend:
        policy = cls.new_policy(url)
        if read_only:
            raise StoreUnavailableError(f"memory://{url.location} is new with each open: there is nothing to read")
        return cls(policy.capacity, policy.ttl_s)

    @classmethod
    def new_policy(cls, url: StoreUrl) -> Policy:
        options = convert_options(MemoryOptions, url.options, where="memory")
        capacity = None if options.capacity is None else parse_size(options.capacity, name="memory option capacity")
        ttl_s = None if options.ttl is None else parse_duration(options.ttl, name="memory option ttl")
        return Policy(capacity, ttl_s)

    @classmethod
    def rebuild(cls, url: StoreUrl, progress: Callable[[int, int], None]) -> Rebuilt | None:
        raise StoreUnavailableError(f"memory://{url.location} is new with each open: there is nothing to rebuild")

    def policy(self) -> Policy:
        return Policy(self.capacity, self.ttl_s)

    def set_policy(self, policy: Policy) -> None:
        self.capacity = policy.capacity
        self.ttl_s = policy.ttl_s

    @contextmanager
    def rows(self, *, write: bool = False) -> Iterator[MemoryRows]:
        if self._closed:
            raise StoreError("this memory store is closed")
        if not write:
            yield self._rows
            return
        with self._writing:
            changed = self._rows.copy()  # readers do not wait: they see the rows before the transaction
            yield changed
            self._rows = changed

    def has_room(self, rows: Rows, num_bytes: int) -> bool:
        assert isinstance(rows, MemoryRows)
        return self.capacity is None or rows.num_bytes + num_bytes <= self.capacity

    def disk_bytes(self) -> int:
        return self._rows.num_bytes

    def index_file(self, namespace: bytes) -> None:
        return None

    def publish_status(self, engine: str, row: bytes | None) -> None:
        if row is None:
            self._statuses.pop(engine, None)
        else:
            self._statuses[engine] = row

    def statuses(self) -> dict[str, bytes]:
        return dict(self._statuses)

    def close(self) -> None:
        self._closed = True
        self._rows = MemoryRows()
