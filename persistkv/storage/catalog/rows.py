"""Ordered rows: the interface that a driver implements for its catalogue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from persistkv.storage.format.codec import Buffer

# The tables. Except in META, keys begin with the namespace's id (16 bytes), so a namespace is one range of each table.
META = "meta"
"""``clock`` → the last moment, then ``StoreClock``. Drivers also store their own rows here."""
NAMESPACES = "namespaces"
"""namespace → time of creation, then the identity's canonical JSON."""
STATES = "states"
"""namespace → ``NamespaceState``."""
PACKS = "packs"
"""namespace, pack id → the sequence number at which the pack was added, then its table."""
PIECES = "pieces"
"""namespace, pack id, u32 big-endian → at most 256 KiB of the payload. Used if payloads are stored in rows."""
LOG = "log"
"""namespace, sequence number big-endian → ``+`` or ``-``, then a pack id."""
MANIFESTS = "manifests"
"""namespace, digest of the manifest's id → the manifest's head."""
MANIFEST_KEYS = "manifest_keys"
"""namespace, digest of the manifest's id → the manifest's keys."""
USES = "uses"
"""namespace, pack id → ``Use``."""
ORDER = "order"
"""``ORDER_KEY`` → empty: packs and manifests that may be evicted, in eviction order."""
CHAINS = "chains"
"""namespace, digest of the manifest's id → ``Chain``."""
LINKS = "links"
"""namespace, pack id, digest of the id of a manifest that names the pack → empty."""

TABLES = (META, NAMESPACES, STATES, PACKS, PIECES, LOG, MANIFESTS, MANIFEST_KEYS, USES, ORDER, CHAINS, LINKS)


class Rows(ABC):
    """The rows of all tables within one transaction of the driver, sorted by key in each table.

    Keys have at most 64 bytes. Values have at most 256 KiB, except tables of packs and keys of manifests, which have no
    limit. Returned buffers are valid until a row is changed or the transaction ends.
    """

    @abstractmethod
    def get(self, table: str, key: bytes) -> Buffer | None:
        """Return the value of a key; None if there is no such row."""

    @abstractmethod
    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """Write a row, replacing the row with the same key.

        :raises StoreFullError: there is no room; the transaction must be rolled back.
        """

    @abstractmethod
    def delete(self, table: str, key: bytes) -> bool:
        """Delete a row; return whether there was one."""

    @abstractmethod
    def range(self, table: str, start: bytes) -> Iterator[tuple[Buffer, Buffer]]:
        """Iterate over (key, value) from the key ``start`` on, ascending. Do not change rows meanwhile."""

    def starting_with(self, table: str, prefix: bytes) -> Iterator[tuple[Buffer, Buffer]]:
        """Iterate over the rows whose keys start with ``prefix``, ascending. Do not change rows meanwhile."""
        for key, value in self.range(table, prefix):
            if key[: len(prefix)] != prefix:
                return
            yield key, value

    def first(self, table: str, start: bytes) -> bytes | None:
        """Return the first key from ``start`` on; None if there is none."""
        return next((bytes(key) for key, _ in self.range(table, start)), None)
