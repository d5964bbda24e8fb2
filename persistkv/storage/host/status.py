"""Engine status: a small row per engine and open store, which ``persistkv top`` and exporters read.

Status is best effort: rows may be lost, no call waits for one, and readers skip rows that cannot be
decoded.
"""

from __future__ import annotations

from contextlib import suppress
from operator import attrgetter

import msgspec

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import Backend
from persistkv.storage.format.seal import PLAIN, Seal
from persistkv.storage.records import LoadReport, StoreCounters

# number of intervals without an update after which an engine counts as stopped
_MISSED = 5
# name under which a status is sealed, so that no other record of the store opens as one
_RECORD = b"status of an engine"


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status row of one engine. Fields are added, never renamed: engines of several releases
    share a store."""

    engine: str
    """Random name of 32 hexadecimal digits, chosen when the store was opened."""
    host: str
    """Name of the machine on which the store is open; times are those of its clock, in seconds
    since the epoch."""
    pid: int
    """Id of the process that does the I/O."""
    namespace: str
    """The namespace's id, hexadecimal."""
    started: float
    """Time when the store was opened."""
    time: float
    """Time when this row was written."""
    interval_s: float
    """Seconds until the next row is due."""
    counters: StoreCounters
    indexed_blocks: int
    """Number of blocks that a lookup finds, including usable ones of an adopted namespace; a block
    in two packs counts twice."""
    staged_bytes: int
    """Raw bytes of staged copies that are waiting or being written."""
    waiting_jobs: int
    """Store jobs and request ends that have not started."""
    writing_jobs: int
    """Store jobs whose rows the host may still read."""
    loading_jobs: int
    """Load jobs that are queued or being read."""
    breaker: str | None = None
    """State of the medium's circuit breaker: ``closed``, ``open`` (no requests are sent) or
    ``half-open``; None: it has none."""
    engine_pid: int | None = None
    """Id of the process that runs the model; None: unknown."""
    load_counts: dict[str, int] = {}
    """Number of requests for which the store held blocks, by ``LoadReport.reason``."""
    load_reports: list[LoadReport] = []
    """Use of the stored blocks of the last of these requests, at most 64."""

    def encode(self, seal: Seal = PLAIN) -> bytes:
        """Return the row: JSON. A store with a key seals it, because it contains ids of requests,
        which clients may choose.

        :param seal: the seal of the store.
        :raises StoreError: the keys of the store are not known yet.
        """
        row = msgspec.json.encode(self)
        return seal.sealed(_RECORD, row) if seal.encrypts else row

    def is_live(self, now: float) -> bool:
        """Return whether the row is at most five intervals old at ``time.time()`` = ``now``."""
        return now - self.time <= _MISSED * self.interval_s


# made at import: msgspec 0.22 crashes if two threads are the first to decode a type
_DECODE = msgspec.json.Decoder(EngineStatus).decode


def read_statuses(backend: Backend) -> list[EngineStatus]:
    """Return the status of each engine, sorted by start time. Rows that killed engines left are
    included.

    :raises StoreError: the medium failed.
    """
    found = []
    seal = backend.seal
    # skip a status that is damaged or sealed with another key, because it must not hide those of
    # other engines
    unreadable = (
        CorruptPackError,
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    )
    for row in backend.statuses().values():
        with suppress(*unreadable):
            # without a key, rows are not sealed
            body = seal.opened(_RECORD, row) if seal.encrypts else row
            status = _DECODE(body)
            found.append(status)
    return sorted(found, key=attrgetter("started", "engine"))
