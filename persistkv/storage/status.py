"""What an engine shows of a store that it has open: a small row that ``persistkv top`` and exporters read.

It is no part of what is stored: nothing is lost with it, nobody waits for it, and a row that does not read is passed
over.
"""

from __future__ import annotations

import msgspec

from persistkv.storage.backend import Backend
from persistkv.storage.extensions import statuses
from persistkv.storage.records import StoreCounters

_MISSED = 5  # rows in a row that an engine may be late with before it counts as gone


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One row. Fields are added, never renamed: engines of several releases share a store."""

    engine: str
    """Random, drawn when the store was opened."""
    host: str
    """The machine's name."""
    pid: int
    """Of the process that does the I/O."""
    namespace: str
    """The namespace's id, hexadecimal."""
    started: float
    """Seconds since the epoch."""
    time: float
    """When this row was made, by that machine's clock."""
    interval_s: float
    """When the next one is due."""
    counters: StoreCounters
    """Since ``started``."""
    indexed_blocks: int
    """Blocks of the namespace that a lookup finds."""
    staged_bytes: int
    """Raw bytes of copies that wait to be written, or are."""
    waiting_jobs: int
    """Store jobs and ends of requests that were not begun."""
    writing_jobs: int
    """Store jobs whose rows are in use."""
    loading_jobs: int
    """Load jobs that wait or are read."""
    breaker: str | None = None
    """See ``Backend.breaker_state``."""

    def encode(self) -> bytes:
        """The row."""
        return msgspec.json.encode(self)

    def is_live(self, now: float) -> bool:
        """Whether the engine can be taken to run still."""
        return now - self.time <= _MISSED * self.interval_s


def read_statuses(backend: Backend) -> list[EngineStatus]:
    """The rows that read, those of engines that went without a word included, in the order of their start.

    :raises StoreError: the medium failed.
    """
    found: list[EngineStatus] = []
    for row in statuses(backend).values():
        try:
            found.append(msgspec.json.decode(row, type=EngineStatus))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return sorted(found, key=lambda status: (status.started, status.engine))
