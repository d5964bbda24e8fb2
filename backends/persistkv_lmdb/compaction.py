"""Compaction: returns free space of the segments to the file system while engines use the store.

1. Packs at the end of the segments are moved to free extents before them, a few per transaction, byte for byte; then
   the free ends of the files are truncated. Catalogue, eviction order and totals do not change.
2. A killed compaction leaves a valid store; the next one continues.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from persistkv.errors import StoreFullError
from persistkv.storage.catalog.records import pack_table
from persistkv.storage.extensions import CompactProgress
from persistkv_lmdb.allocator import read_extents
from persistkv_lmdb.capacity import Amount, Room
from persistkv_lmdb.commit import TURN_S
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.layout import rows

_STEP_BYTES = 16 << 20  # 16 MiB: moved per transaction, takes tens of milliseconds
_STEP_PACKS = 64  # maximum per transaction: more would need more space in the catalogue than a small store has
_ROWS_BYTES = 8 << 10  # 8 KiB: pages of the catalogue that moving one pack may add
_PASSES = 4  # the old place of a moved pack is reusable only later
_PATIENCE_S = 5.0


class Compactor:
    """One compaction. Used once."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def run(self) -> Iterator[CompactProgress]:
        """Move packs, a few at each step, until no free extent precedes the remaining ones.

        :raises StoreFullError: the catalogue has no space for the rows; packs that were moved stay moved.
        """
        self._cut()
        waiting = self._by_place()
        total, moved = sum(length for _, length in waiting), 0
        for _ in range(_PASSES):
            before = moved
            while waiting:
                step = [waiting.pop()]
                num_bytes = step[0][1]
                while waiting and len(step) < _STEP_PACKS and num_bytes + waiting[-1][1] <= _STEP_BYTES:
                    step.append(waiting.pop())
                    num_bytes += step[-1][1]
                moved += self._lower(step)
                yield CompactProgress(moved, max(moved, total))
                time.sleep(TURN_S)
            self._cut()
            if moved == before:
                return
            waiting = self._by_place()

    def _by_place(self) -> list[tuple[bytes, int]]:
        """Return name and payload bytes of the packs in segments, ordered by place."""
        with self._environment.transaction() as transaction:
            found = []
            for key, row in rows(transaction, transaction.db.packs, b""):
                table, extents = pack_table(key, row), read_extents(transaction, bytes(key))
                if table is not None and extents:
                    found.append((max(extents), bytes(key), table.payload_length))
        return [(name, length) for _, name, length in sorted(found)]

    def _lower(self, step: list[tuple[bytes, int]]) -> int:
        """Move packs to earlier extents; return the bytes moved."""
        environment, moved = self._environment, 0
        with environment.transaction(write=True) as transaction:
            payloads = environment.payloads(transaction)
            Room(environment, transaction, payloads).check(Amount(_ROWS_BYTES * len(step), 0))
            for name, length in step:
                moved += length if payloads.lower(name, length) else 0
            payloads.finish()
        return moved

    def _cut(self) -> None:
        """Wait until freed extents are reusable, record the shorter segments, and truncate the files."""
        environment = self._environment
        try:
            environment.wait_for_readers(environment.age(), _PATIENCE_S)
        except StoreFullError:
            return
        for _ in range(2):
            with environment.transaction(write=True) as transaction:
                payloads = environment.payloads(transaction)
                payloads.shrink(0)
                payloads.finish()
        with environment.transaction(write=True) as transaction:
            environment.payloads(transaction).finish()
