"""Search of a replica for content of forgotten tenants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from persistkv.storage.catalogue.rows import (
    MANIFEST_KEYS,
    MANIFESTS,
    PACKS,
    SEQUENCE,
    USES,
    TableRows,
    Use,
    decoded,
    pack_table,
)
from persistkv.storage.format.manifest import decode_manifest
from persistkv.storage.format.pack import ID_BYTES, PLAIN_KEY, PackTable, table_head
from persistkv.storage.shared.forgetting.records import ForgottenTenants
from persistkv.storage.shared.replica.rows import KeysRow, read_version
from persistkv.tenants import DEFAULT_TENANT, tenant_digest

# digest of the default tenant's name
_DEFAULT_TENANT = tenant_digest(DEFAULT_TENANT)


class RequestRow(NamedTuple):
    """A request in the replica."""

    digest: bytes
    """Digest of its id."""
    nonce: bytes
    """Nonce of the blob with its keys."""
    is_forgotten: bool


class ForgottenRows(NamedTuple):
    """Packs and requests of forgotten tenants, within one transaction."""

    rows: TableRows
    namespace: bytes
    forgotten: ForgottenTenants

    def packs(self) -> Iterator[PackTable]:
        """Yield the tables of the forgotten packs."""
        for key, row in self.rows.range(USES, self.namespace):
            use = Use.decode(row)
            if use is None:
                continue
            # First compare the tenant, by the digest of its name, which needs no read of the table.
            # The row of a pack of the default tenant has no digest.
            owner = use.tenant or _DEFAULT_TENANT
            if owner not in self.forgotten.tenants:
                continue
            table = self._forgotten_table(bytes(key), use)
            if table is not None:
                yield table

    def _forgotten_table(self, name: bytes, use: Use) -> PackTable | None:
        """Return the table of a pack of a forgotten tenant; None: the pack is newer than the
        forgetting, or its row is damaged.

        :param name: namespace and pack id.
        """
        pack_row = bytes(self.rows.get(PACKS, name) or b"")
        encoded_table = pack_row[SEQUENCE.size :]
        head = table_head(encoded_table)
        if head is None:
            return None
        # newer content is under a new data key, or was used later
        if not self.forgotten.covers(head.tenant, head.data_key, use.time):
            return None
        return pack_table(name, pack_row)

    def requests(self) -> Iterator[RequestRow]:
        """Yield all requests, forgotten or not."""
        for key, row in self.rows.starting_with(MANIFEST_KEYS, self.namespace):
            keys = KeysRow.decode(row)
            # the row is damaged, so the blob of the keys is unknown
            if keys is None:
                continue
            digest = bytes(key[ID_BYTES:])
            is_forgotten = self._is_forgotten(digest, keys.data_key)
            yield RequestRow(digest, keys.nonce, is_forgotten)

    def _is_forgotten(self, digest: bytes, data_key: bytes) -> bool:
        """Return whether a request is of a forgotten tenant.

        :param data_key: id of the data key that seals the request; ``PLAIN_KEY``: none does.
        """
        # each tenant has data keys of its own, so the head, which may not open, need not be read
        if data_key != PLAIN_KEY:
            return data_key in self.forgotten.keys
        # without a key, the tenant and the time of the request decide; only the head names the
        # tenant
        head = self.rows.get(MANIFESTS, self.namespace + digest)
        manifest = decoded(decode_manifest, head)
        if manifest is None:
            return False
        time = read_version(self.rows, digest).time
        return self.forgotten.covers(manifest.tenant, data_key, time)
