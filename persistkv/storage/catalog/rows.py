"""Ordered rows: what a driver supplies for its catalogue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from persistkv.storage.codec import Buffer

# The tables. Except in META, keys begin with the namespace's id (16 bytes), so a namespace is one range of each table.
META = "meta"
"""``clock`` → the last moment, then ``StoreClock``. Drivers keep rows of their own here."""
NAMESPACES = "namespaces"
"""namespace → time of creation, then the identity's canonical JSON."""
STATES = "states"
"""namespace → ``NamespaceState``."""
PACKS = "packs"
"""namespace, pack id → the sequence number at which it was added, then its table."""
PIECES = "pieces"
"""namespace, pack id, u32 big-endian → the payload in pieces of 256 KiB, where it is stored in rows."""
LOG = "log"
"""namespace, sequence number big-endian → ``+`` or ``-``, then a pack id."""
MANIFESTS = "manifests"
"""namespace, digest of the manifest's id → its head."""
MANIFEST_KEYS = "manifest_keys"
"""The same key → its keys."""
USES = "uses"
"""namespace, pack id → ``Use``."""
ORDER = "order"
"""``ORDER_KEY`` → nothing: what may be evicted, the first to be evicted first."""
CHAINS = "chains"
"""The key of ``MANIFESTS`` → ``Chain``."""
LINKS = "links"
"""namespace, pack id, digest of the id of a manifest that names the pack → nothing."""

TABLES = (META, NAMESPACES, STATES, PACKS, PIECES, LOG, MANIFESTS, MANIFEST_KEYS, USES, ORDER, CHAINS, LINKS)


class Rows(ABC):
    """The rows of all tables within one transaction of the driver, sorted by key in each table.

    Keys have at most 64 bytes, values at most 256 KiB, except tables of packs and keys of manifests, which have as many
    as their content needs. What is handed out is valid until the transaction changes or ends.
    """

    @abstractmethod
    def get(self, table: str, key: bytes) -> Buffer | None:
        """Return the value of a key; None where there is no such row."""

    @abstractmethod
    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """Write a row, over the one of the same key.

        :raises StoreFullError: there is no room; the transaction can only be rolled back.
        """

    @abstractmethod
    def delete(self, table: str, key: bytes) -> bool:
        """Delete a row; return whether there was one."""

    @abstractmethod
    def range(self, table: str, start: bytes) -> Iterator[tuple[Buffer, Buffer]]:
        """Iterate over (key, value) from the key ``start`` on, ascending. The rows must not change meanwhile."""

    def starting_with(self, table: str, prefix: bytes) -> Iterator[tuple[Buffer, Buffer]]:
        """Iterate over the rows whose keys start with ``prefix``, ascending. The rows must not change meanwhile."""
        for key, value in self.range(table, prefix):
            if key[: len(prefix)] != prefix:
                return
            yield key, value

    def first(self, table: str, start: bytes) -> bytes | None:
        """Return the first key from ``start`` on; None behind the last one."""
        return next((bytes(key) for key, _ in self.range(table, start)), None)
