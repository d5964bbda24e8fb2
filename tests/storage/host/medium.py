"""Medium that blocks on request, and messages of an engine to a host on it."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable
from typing import TypeVar

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import StoreError
from persistkv.storage.format.pack import PackedKeys
from persistkv.storage.host.protocol import Hello, LoadJob, StoreJob
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv.testing.blobs import MemoryBlobs
from tests.storage.host.jobs import BLOCK

PATIENCE_S = 30.0
T = TypeVar("T")


class Gate:
    """Gate that blocks the calls of a method while it is shut."""

    def __init__(self, backend: FaultyBackend[MemoryBackend], method: str) -> None:
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self.waiting = 0
        self.running = 0
        self.most_running = 0
        self.errors: list[str] = []
        """Errors of the next calls that pass the gate, one per call."""
        backend.before(method, self._enter)
        backend.after(method, self._leave)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def _enter(self, *_: object) -> None:
        with self._lock:
            self.waiting += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        assert self._open.wait(PATIENCE_S)
        with self._lock:
            self.waiting -= 1
            if self.errors:
                self.running -= 1
                raise StoreError(self.errors.pop(0))

    def _leave(self, result: T, *_: object) -> T:
        with self._lock:
            self.running -= 1
        return result

    def await_waiting(self, count: int = 1) -> None:
        eventually(lambda: self.waiting >= count)


class Medium:
    """Store in memory, with gates before its commits and reads."""

    def __init__(self, blobs: MemoryBlobs | None = None) -> None:
        """:param blobs: the content of another store; None: a new one."""
        self.blobs = blobs or MemoryBlobs()
        self.backend = FaultyBackend.of(MemoryBackend(self.blobs))
        self.commits = Gate(self.backend, "commit")
        self.reads = Gate(self.backend, "read")

    def reopen(self) -> None:
        """Open the store again, after a host has closed it."""
        self.__init__(self.blobs.handle())  # type: ignore[misc]

    def open(self) -> None:
        self.commits.open()
        self.reads.open()


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it never comes to that"
        time.sleep(0.001)


def gated_hello() -> Hello:
    layout = RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),))
    options = StoreOptions(max_age_s=1e6)
    return Hello("lmdb:///gated", Identity.of({"w": "w"}).encode(), layout, options)


def store_message(job: int, keys: list[bytes], depths: bytes = b"") -> StoreJob:
    rows = array("I", range(len(keys))).tobytes()
    return StoreJob(job, PackedKeys.of(keys), rows, f"r{job}", depths)


def load_message(job: int, keys: list[bytes], first_row: int = 0) -> LoadJob:
    rows = array("I", range(first_row, first_row + len(keys))).tobytes()
    return LoadJob(job, PackedKeys.of(keys), rows)


def of_kind(messages: Iterable[object], kind: type[T]) -> list[T]:
    return [message for message in messages if isinstance(message, kind)]
