"""Finds packs that the index does not name, by their own tables, and names them again.

Index objects may be lost: deleted by an operator, or damaged. Each pack's blob ends with its table,
which lists its keys. Packs that have a tombstone stay deleted. Requests, labels and pins are lost
with the index objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv.storage.blobs import BlobInfo, BlobMissingError
from persistkv.storage.format.pack import PackTable
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import (
    MAX_OBJECT_BYTES,
    NONCE_BYTES,
    Delta,
    Names,
    PackEntry,
)
from persistkv.storage.shared.index.objects import IndexObjects
from persistkv.storage.shared.index.tails import read_tail
from persistkv.storage.shared.replica import Replica

_COMMIT_BYTES = 4 << 20  # 4 MiB of tables per commit


class UnnamedPack(NamedTuple):
    """A pack that the index did not name."""

    entry: PackEntry
    table: PackTable
    size: int
    """Bytes of its blob."""


class Rebuilder:
    """Rebuilds the index of one namespace.

    :param replica: has read the objects of the index that are left.
    :param progress: called with the bytes of the blobs that were examined, and with all of them.
    """

    def __init__(
        self,
        medium: Medium,
        names: Names,
        replica: Replica,
        progress: Callable[[int, int], None],
    ) -> None:
        self._medium = medium
        self._names = names
        self._replica = replica
        self._objects = IndexObjects(medium, replica.namespace)
        self._progress = progress
        self.skipped: Counter[str] = Counter()
        """Reason → number of blobs that are not packs of the namespace, or stay deleted."""

    def rebuild(self) -> list[UnnamedPack]:
        """Commit all packs that the index does not name; return them.

        :raises StoreError: the medium failed; packs that were committed before stay.
        """
        found: list[UnnamedPack] = []
        waiting: list[PackEntry] = []
        waiting_bytes = 0
        for pack in self._unnamed():
            found.append(pack)
            waiting.append(pack.entry)
            waiting_bytes += len(pack.entry.body)
            if waiting_bytes >= _COMMIT_BYTES:
                self._commit(waiting)
                waiting = []
                waiting_bytes = 0
        if waiting:
            self._commit(waiting)
        return found

    def _unnamed(self) -> Iterator[UnnamedPack]:
        """Iterate over the packs that the index does not name."""
        candidates = self._candidates()
        total = sum(info.size for info in candidates)
        done = 0
        tables = self._medium.maintenance.each(self._table_of, candidates)
        for info, table in tables:
            done += info.size
            self._progress(done, total)
            name = self._names.pack_name(info.name)
            if table is None or name is None:
                self.skipped["blobs without a readable table"] += 1
                continue
            pack_id = name[:-NONCE_BYTES]
            nonce = name[-NONCE_BYTES:]
            is_here = table.namespace == self._replica.namespace
            if not is_here or table.pack_id != pack_id:
                self.skipped["packs of another place"] += 1
                continue
            forgotten = self._medium.records.forgotten
            if forgotten.covers(table.tenant, table.data_key, info.time):
                self.skipped["packs of forgotten tenants"] += 1
                continue
            entry = PackEntry(pack_id, nonce, table.encode(), info.time)
            yield UnnamedPack(entry, table, info.size)

    def _candidates(self) -> list[BlobInfo]:
        """Return the blobs of packs that the index neither names nor has ended."""
        blobs: dict[bytes, BlobInfo] = {}
        for info in self._medium.listed(self._names.packs):
            name = self._names.pack_name(info.name)
            if name is None:
                self.skipped["blobs that are no packs"] += 1
            else:
                blobs[name] = info
        for name in self._replica.live_names(blobs):
            del blobs[name]
        for name in self._replica.ended_names(blobs):
            del blobs[name]
            self.skipped["deleted packs"] += 1
        return list(blobs.values())

    def _table_of(self, info: BlobInfo) -> PackTable | None:
        """Return the table behind the payload of a pack; None: it is unreadable. Errors of the
        medium are raised unchanged."""
        try:
            tail = read_tail(self._medium, info)
            table = self._medium.seal.decode_table(tail)
        except (CorruptPackError, BlobMissingError):
            return None
        following = info.size - table.payload_length
        return table if 0 < following <= MAX_OBJECT_BYTES else None

    def _commit(self, entries: Sequence[PackEntry]) -> None:
        name = self._names.new_commit(self._medium.clock.random)
        delta = Delta(packs=list(entries))
        body = self._objects.encode(name, delta)
        self._objects.put(name, body)
        self._replica.apply([(name, delta)])
