"""Deletion of the blobs of a forgotten tenant in one namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv.storage.blobs import BlobInfo, BlobMissingError
from persistkv.storage.format.pack import SEALED_TABLE, without_trailer
from persistkv.storage.format.seal import record_key
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import Names
from persistkv.storage.shared.index.unnamed import read_tail, unnamed_packs
from persistkv.storage.shared.replica import Removals, Replica


class Erased(NamedTuple):
    """What was deleted."""

    packs: int
    """Number of deleted packs."""
    stored_bytes: int
    """Bytes of their payloads."""
    left: Sequence[str]
    """Blobs that the medium has kept, in sentences (``Blobs.erase``)."""


class Eraser:
    """Deletes the blobs of one tenant; used once.

    :param replica: replica of the namespace.
    """

    def __init__(
        self,
        medium: Medium,
        names: Names,
        replica: Replica,
        tenant: str,
    ) -> None:
        self._medium = medium
        self._names = names
        self._replica = replica
        self._tenant = tenant
        self._destroyed_keys = medium.records.forgotten.keys_of(tenant)
        """Ids of the data keys of the tenant that its forgetting has destroyed."""

    def erase(self, removals: Removals) -> Sequence[str]:
        """Delete packs that the index names, and the keys of requests; return what the medium keeps
        (``Blobs.erase``), in sentences.

        :param removals: packs and requests of the tenant in the replica.
        :raises StoreError: the medium failed; some of the blobs may be deleted.
        """
        names = self._names
        packs = [names.pack(name) for name in removals.packs]
        keys = [names.keys_blob(nonce) for nonce in removals.key_blobs]
        left: list[str] = []
        left += self._erase(names.packs, packs)
        left += self._erase(names.keys, keys)
        return left

    def erase_unnamed(self) -> Erased:
        """Delete packs that the index does not name, such as those of a commit in progress.

        :raises StoreError: the medium failed; some of the blobs may be deleted.
        """
        packs: list[str] = []
        stored_bytes = 0
        unnamed = unnamed_packs(self._medium, self._names, self._replica)
        blobs = list(unnamed.values())
        found = self._medium.maintenance.each(self._forgotten_bytes, blobs)
        for info, payload_bytes in found:
            # skip a blob of another tenant, or one that was written after the forgetting
            if payload_bytes is None:
                continue
            packs.append(info.name)
            stored_bytes += payload_bytes
        left = self._erase(self._names.packs, packs)
        return Erased(len(packs), stored_bytes, left)

    def _erase(
        self,
        prefix: str,
        names: Sequence[str],
    ) -> Sequence[str]:
        """Delete blobs below a prefix; return what the medium keeps of them."""
        if not names:
            return []
        return self._medium.blobs.erase(prefix, names)

    def _forgotten_bytes(self, info: BlobInfo) -> int | None:
        """Return the bytes of the payload in a blob; None: it is no forgotten pack of the tenant,
        or does not read, or is deleted already."""
        try:
            tail = read_tail(self._medium, info)
            is_forgotten = self._is_forgotten(tail, info.time)
        except (CorruptPackError, BlobMissingError):
            return None
        if not is_forgotten:
            return None
        return info.size - len(tail)

    def _is_forgotten(self, tail: bytes, written: float) -> bool:
        """Return whether a pack is content of the tenant that was written before it was forgotten.

        :param tail: the table of the pack as stored behind the payload.
        :param written: time of its blob.
        :raises CorruptPackError: it is no table.
        """
        medium = self._medium
        if medium.seal.encrypts:
            # Decide by the data key: packs from after the forgetting have another key. Its id is in
            # the clear, while the table cannot be opened without the destroyed key.
            sealed_table = without_trailer(tail, SEALED_TABLE)
            return record_key(sealed_table) in self._destroyed_keys
        table = medium.seal.decode_table(tail)
        # compare the name, because ``covers`` is true also for other forgotten tenants
        if table.tenant != self._tenant:
            return False
        forgotten = medium.records.forgotten
        return forgotten.covers(table.tenant, table.data_key, written)
