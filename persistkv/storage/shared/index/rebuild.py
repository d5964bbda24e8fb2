"""Search for packs that the index does not name. Their own tables suffice to name them again.

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
from persistkv.storage.format.pack import ID_BYTES, PackTable
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import (
    MAX_OBJECT_BYTES,
    Delta,
    Names,
    PackEntry,
)
from persistkv.storage.shared.index.objects import IndexObjects
from persistkv.storage.shared.index.unnamed import read_tail, unnamed_packs
from persistkv.storage.shared.replica import Replica

_COMMIT_BYTES = 4 << 20  # 4 MiB: size of the tables in one commit


class _UnnamedPack(NamedTuple):
    """A pack in the store that the index does not name."""

    name: bytes
    """Pack id and nonce, from the name of its blob."""
    time: float
    """Time of the blob, on the medium's clock."""
    table: PackTable
    """The table from the end of its blob."""

    def entry(self) -> PackEntry:
        """Return the entry with which the index names it."""
        nonce = self.name[ID_BYTES:]
        body = self.table.encode()
        return PackEntry(self.table.pack_id, nonce, body, self.time)


class Rebuilder:
    """Rebuilds the index of one namespace.

    :param replica: has read the objects of the index that are left.
    :param progress: called after each blob with two numbers of bytes: of the blobs that were
        examined so far, and of all blobs.
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

    def rebuild(self) -> list[PackTable]:
        """Commit all packs that the index does not name; return their tables.

        :raises StoreError: the medium failed; packs that were committed before stay.
        """
        found: list[PackTable] = []
        waiting: list[PackEntry] = []
        waiting_bytes = 0
        for pack in self._unnamed():
            found.append(pack.table)
            entry = pack.entry()
            waiting.append(entry)
            waiting_bytes += len(entry.body)
            # write several commits, because one object has a limited size
            if waiting_bytes >= _COMMIT_BYTES:
                self._commit(waiting)
                waiting = []
                waiting_bytes = 0
        if waiting:
            self._commit(waiting)
        return found

    def _unnamed(self) -> Iterator[_UnnamedPack]:
        """Iterate over the packs that the index neither names nor has ended; count the other blobs
        in ``skipped``."""
        blobs = unnamed_packs(self._medium, self._names, self._replica)
        for name in self._replica.ended_names(blobs):
            del blobs[name]
            self.skipped["deleted packs"] += 1
        infos = list(blobs.values())
        all_bytes = sum(info.size for info in infos)
        examined_bytes = 0
        tables = self._medium.maintenance.each(self._table_of, infos)
        # ``each`` keeps the order of the blobs
        for name, (info, table) in zip(blobs, tables, strict=True):
            examined_bytes += info.size
            self._progress(examined_bytes, all_bytes)
            if table is None:
                self.skipped["blobs without a readable table"] += 1
                continue
            pack = _UnnamedPack(name, info.time, table)
            refusal = self._refusal(pack)
            if refusal:
                self.skipped[refusal] += 1
            else:
                yield pack

    def _refusal(self, pack: _UnnamedPack) -> str:
        """Return why the index must not name a pack; empty if it may."""
        table = pack.table
        is_of_namespace = table.namespace == self._replica.namespace
        is_under_its_name = table.pack_id == pack.name[:ID_BYTES]
        if not (is_of_namespace and is_under_its_name):
            return "packs of another place"
        forgotten = self._medium.records.forgotten
        if forgotten.covers(table.tenant, table.data_key, pack.time):
            return "packs of forgotten tenants"
        return ""

    def _table_of(self, info: BlobInfo) -> PackTable | None:
        """Return the table behind the payload of a pack; None: it is unreadable. Errors of the
        medium are raised unchanged."""
        try:
            tail = read_tail(self._medium, info)
            table = self._medium.seal.decode_table(tail)
        except (CorruptPackError, BlobMissingError):
            return None
        # A blob is its payload and then its table. If the lengths do not add up, the table is of
        # another blob.
        table_bytes = info.size - table.payload_length
        if not 0 < table_bytes <= MAX_OBJECT_BYTES:
            return None
        return table

    def _commit(self, entries: Sequence[PackEntry]) -> None:
        """Write a commit with these packs to the inbox, and apply it to the replica."""
        random = self._medium.clock.random
        name = self._names.new_commit(random)
        delta = Delta(packs=list(entries))
        body = self._objects.body(name, delta)
        self._objects.put(name, body)
        self._replica.apply([(name, delta)])
