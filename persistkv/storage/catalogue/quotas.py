"""Totals and quotas of tenants: one row of the catalogue for each tenant.

1. A row changes in the transaction that changes the tenant's packs. It exists while the tenant has
   packs or a quota.
2. The default tenant has no row, no quota and no order of its own: a store without tenants pays for
   none of them. Its totals are those of the store, less those of all other tenants.
3. A tenant is *above* its quota if the payloads of its packs take more than the quota. ``META``
   lists these tenants, so that an eviction finds them without reading the rows of all tenants.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from persistkv.storage.catalogue.rows import (
    MAX_COUNT,
    META,
    PACKS,
    TENANTS,
    TableRows,
    pack_table,
)
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import PackTable
from persistkv.tenants import DEFAULT_TENANT

logger = logging.getLogger(__name__)

# beginning of a row in ``TENANTS``: packs, stored bytes, quota (0 if there is none); the tenant's
# name follows
_TOTALS = struct.Struct("<QQQ")
# prefix of keys in ``META``; the digest of a tenant that is above its quota follows
_ABOVE = b"above"


@dataclass
class TenantTotals:
    """Totals of a tenant's packs over all namespaces, and its quota."""

    tenant: str
    packs: int = 0
    stored_bytes: int = 0
    """Bytes of the payloads, padding included."""
    quota: int | None = None
    """Bound on ``stored_bytes``; None: there is none."""

    def is_above(self, expected: int = 0) -> bool:
        """Return whether the tenant would be above its quota with ``expected`` more bytes."""
        return self.quota is not None and self.stored_bytes + expected > self.quota

    def count(self, table: PackTable, sign: int) -> None:
        """Add a pack (``sign`` 1), or subtract it (-1)."""
        packs = self.packs + sign
        stored_bytes = self.stored_bytes + sign * table.payload_length
        # a result below 0 comes from a damaged row
        self.packs = max(0, packs)
        self.stored_bytes = max(0, stored_bytes)

    def encode(self) -> bytes:
        """Return the value of a row in ``TENANTS``."""
        quota = self.quota or 0
        numbers = _TOTALS.pack(self.packs, self.stored_bytes, quota)
        return numbers + self.tenant.encode()

    @classmethod
    def decode(cls, row: Buffer) -> TenantTotals | None:
        """Decode the value of a row in ``TENANTS``; return None if it is damaged."""
        if len(row) <= _TOTALS.size:
            return None
        packs, stored_bytes, quota = _TOTALS.unpack_from(row)
        if max(packs, stored_bytes, quota) > MAX_COUNT:
            return None
        try:
            tenant = bytes(row[_TOTALS.size :]).decode()
        except UnicodeDecodeError:
            return None
        return cls(tenant, packs, stored_bytes, quota or None)


class Quotas:
    """Totals and quotas of tenants within one write transaction. A *digest* is that of a tenant's
    name (``TableRows.tenant_digest``)."""

    def __init__(self, rows: TableRows) -> None:
        self._rows = rows
        self._found: dict[bytes, TenantTotals] = {}
        """Totals of tenants that were read or changed, by the digest of the tenant's name."""
        self._before: dict[bytes, TenantTotals] = {}
        """The same totals as they were read: ``finish`` writes those that differ."""
        self._expected: dict[bytes, int] = {}
        """Bytes that will be added, by the digest of the tenant's name; see ``expect``."""

    def of(self, tenant: str) -> TenantTotals:
        """Return the totals of a tenant, which the caller may change and ``finish`` writes. If the
        row is damaged, the quota is lost, and the totals are computed again from the packs."""
        digest = self._rows.tenant_digest(tenant)
        if digest not in self._found:
            is_damaged = self._read(tenant, digest)
            if is_damaged:
                logger.warning(
                    "the quota of a tenant could not be read: it has none until "
                    "persistkv set"
                )
                self.recount()
        return self._found[digest]

    def _read(self, tenant: str, digest: bytes) -> bool:
        """Read the totals of a tenant into ``_found``, zeros without a readable row. Return whether
        the row is damaged."""
        row = self._rows.get(TENANTS, digest)
        recorded = None if row is None else TenantTotals.decode(row)
        totals = recorded or TenantTotals(tenant)
        self._found[digest] = totals
        # keep a copy, because callers change the object
        self._before[digest] = replace(totals)
        return row is not None and recorded is None

    def count(self, table: PackTable, sign: int) -> None:
        """Add a pack to the totals of its tenant (``sign`` 1), or subtract it (-1)."""
        if table.tenant != DEFAULT_TENANT:
            self.of(table.tenant).count(table, sign)

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Set the bytes that will be added in this transaction or the next one, by tenant. They
        replace those of an earlier call, and count for ``is_above``, so that an eviction chooses
        older content of these tenants before that of others."""
        self._expected.clear()
        for tenant, num_bytes in sizes.items():
            digest = self._rows.tenant_digest(tenant)
            self._expected[digest] = num_bytes

    def is_above(self, digest: bytes) -> bool:
        """Return whether a tenant is above its quota, or will be with the expected bytes
        (``expect``)."""
        totals = self.of_digest(digest)
        expected = self._expected.get(digest, 0)
        return totals is not None and totals.is_above(expected)

    def grown(self) -> Iterator[tuple[bytes, int]]:
        """Iterate over the digests of the tenants whose content this transaction has increased,
        with the bytes of the increase. The caller may evict meanwhile."""
        # iterate over a list, because evictions add tenants to ``_found``
        for digest, totals in list(self._found.items()):
            before = self._before[digest]
            num_bytes = totals.stored_bytes - before.stored_bytes
            if num_bytes > 0:
                yield digest, num_bytes

    def above(self) -> list[bytes]:
        """Return the digests of the tenants that are above their quotas, in a fixed order."""
        # Only these tenants can be above: those whose bytes this transaction has changed or will
        # add, and those that an earlier transaction has listed as above.
        digests = {*self._found, *self._expected}
        for key, _ in self._rows.starting_with(META, _ABOVE):
            digest = bytes(key[len(_ABOVE) :])
            digests.add(digest)
        return [digest for digest in sorted(digests) if self.is_above(digest)]

    def recount(self) -> None:
        """Compute the totals of all tenants from the tables of all packs, because a row was
        damaged. Quotas stay."""
        # read all tenants with a row, because the loop over packs below does not find a tenant
        # without packs, whose totals must be 0
        for recorded in read_tenants(self._rows):
            self._counted(recorded.tenant)
        for totals in self._found.values():
            totals.packs = 0
            totals.stored_bytes = 0
        for table in _tables(self._rows):
            # the totals of the default tenant are not recorded
            if table.tenant != DEFAULT_TENANT:
                self._counted(table.tenant).count(table, 1)

    def _counted(self, tenant: str) -> TenantTotals:
        """Return the totals of a tenant for ``recount``. Unlike ``of``, this does not count again
        if the tenant's row is damaged, too."""
        digest = self._rows.tenant_digest(tenant)
        if digest not in self._found:
            self._read(tenant, digest)
        return self._found[digest]

    def finish(self) -> None:
        """Write the rows that have changed. Call this last in a transaction."""
        for digest, totals in self._found.items():
            before = self._before[digest]
            if totals != before:
                self._write(digest, totals, was_above=before.is_above())

    def _write(
        self,
        digest: bytes,
        totals: TenantTotals,
        *,
        was_above: bool,
    ) -> None:
        """Write the row of a tenant, or delete the row of one without content and quota.

        :param was_above: whether the table ``META`` lists the tenant as above its quota.
        """
        has_content = totals.packs > 0 or totals.stored_bytes > 0
        if has_content or totals.quota is not None:
            self._rows.put(TENANTS, digest, totals.encode())
        else:
            self._rows.delete(TENANTS, digest)
        if totals.is_above():
            self._rows.put(META, _ABOVE + digest, b"")
        elif was_above:
            self._rows.delete(META, _ABOVE + digest)

    def of_digest(self, digest: bytes) -> TenantTotals | None:
        """Return the totals of a tenant by its digest; None if it has no row, or a damaged one."""
        if digest in self._found:
            return self._found[digest]
        row = self._rows.get(TENANTS, digest)
        return None if row is None else TenantTotals.decode(row)


def _tables(rows: TableRows) -> Iterator[PackTable]:
    """Iterate over the readable tables of all packs."""
    for key, row in rows.range(PACKS, b""):
        table = pack_table(key, row)
        if table is not None:
            yield table


def read_tenants(rows: TableRows) -> Iterator[TenantTotals]:
    """Iterate over the totals of all tenants that have a row: not the default one, nor those whose
    rows are damaged."""
    for _, row in rows.range(TENANTS, b""):
        totals = TenantTotals.decode(row)
        if totals is not None:
            yield totals


def read_quotas(rows: TableRows) -> dict[str, int]:
    """Return the quota of each tenant that has one, in bytes."""
    quotas: dict[str, int] = {}
    for totals in read_tenants(rows):
        if totals.quota is not None:
            quotas[totals.tenant] = totals.quota
    return quotas


def write_quotas(rows: TableRows, quotas: Mapping[str, int]) -> None:
    """Record the quotas of all tenants; a tenant that ``quotas`` does not name has none."""
    ledger = Quotas(rows)
    # include tenants that have a quota now, and lose it
    names = {*quotas, *read_quotas(rows)}
    for tenant in names:
        ledger.of(tenant).quota = quotas.get(tenant)
    ledger.finish()


def with_default(
    tenants: Iterable[TenantTotals],
    packs: int,
    stored_bytes: int,
) -> list[TenantTotals]:
    """Return the totals of all tenants, sorted by name: the given ones, and those of the default
    tenant if it has content.

    :param tenants: totals of all tenants except the default one.
    :param packs: number of packs in the whole store.
    :param stored_bytes: bytes of the payloads of these packs.
    """
    found = list(tenants)
    # the default tenant has the rest of the store's content
    rest = TenantTotals(DEFAULT_TENANT, packs, stored_bytes)
    for totals in found:
        rest.packs -= totals.packs
        rest.stored_bytes -= totals.stored_bytes
    if rest.packs > 0 or rest.stored_bytes > 0:
        found.append(rest)
    return sorted(found, key=attrgetter("tenant"))
