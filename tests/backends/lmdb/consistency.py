"""Consistency of a store's catalogue and segment files, as the tests check it after each
disturbance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptStoreError
from persistkv.storage.catalogue.quotas import (
    TenantTotals,
    read_tenants,
)
from persistkv.storage.catalogue.rows import (
    LOG,
    MANIFESTS,
    META,
    NAMESPACES,
    NO_GENERATION,
    ORDER_KEY,
    PACKS,
    STATES,
    TENANT_ORDER,
    USES,
    NamespaceState,
    TableRows,
    Use,
    pack_table,
)
from persistkv.storage.format.pack import ID_BYTES
from persistkv.tenants import DEFAULT_TENANT
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.layout import EXTENTS, PIECES, tail_pages
from persistkv_lmdb.payloads.allocator import Allocator, decode_extents, pages_of
from persistkv_lmdb.repair.fsck import space_faults


def find_faults(backend: LmdbBackend) -> list[str]:
    """Compare extents with files, rows with each other and totals with a recount of the whole
    catalogue.

    :returns: one line per fault, caused by damage or by a defect of the driver.
    """
    lengths = backend.environment.files.lengths()
    with backend.environment.transaction() as transaction:
        try:
            segments, holes = (
                Allocator(transaction).segments(),
                list(Allocator(transaction).holes()),
            )
            found = [
                *space_faults(transaction),
                *_pack_faults(transaction),
                *_total_faults(transaction),
                *_tenant_faults(transaction),
                *_namespace_faults(transaction),
            ]
        except CorruptStoreError as error:
            return [str(error)]
    for segment, pages in segments.items():
        pages -= pages_of(hole for hole in holes if hole.segment == segment)
        if lengths.get(segment, 0) < pages * PAGE_BYTES:
            found.append(
                f"segment {segment} has {pages} pages, its file {lengths.get(segment, 0)} bytes"
            )
    return found


def _pack_faults(transaction: TableRows) -> Iterator[str]:
    """Yield a line per pack without exactly one payload of its length, and per payload without a
    pack."""
    extents = {
        bytes(key): pages_of(decode_extents(row))
        for key, row in transaction.starting_with(EXTENTS, b"")
    }
    pieces: Counter[bytes] = Counter()
    for key, row in transaction.starting_with(PIECES, b""):
        pieces[bytes(key[:-4])] += len(row)
    for key, row in transaction.starting_with(PACKS, b""):
        name, table = bytes(key), pack_table(key, row)
        pages, inline = extents.pop(name, 0), pieces.pop(name, 0)
        if table is not None and pages:
            pages -= tail_pages(len(table.encode()))
        lengths = [length for length in (PAGE_BYTES * pages, inline) if length]
        if table is not None and lengths != (
            [table.payload_length] if table.payload_length else []
        ):
            yield f"pack {name.hex()} of {table.payload_length} bytes has payloads of {lengths}"
    for name in {*extents, *pieces}:
        yield f"a payload belongs to {name.hex()}, which is no pack"


def _total_faults(transaction: TableRows) -> Iterator[str]:
    """Yield a line per namespace whose recorded totals differ from a recount of its rows."""
    states: dict[bytes, NamespaceState] = {}
    counted: dict[bytes, NamespaceState] = {}
    for key, row in transaction.starting_with(STATES, b""):
        state = NamespaceState.decode(row)
        states[bytes(key)] = state
        counted[bytes(key)] = NamespaceState(state.generation, state.sequence)
    for key, row in transaction.starting_with(PACKS, b""):
        table = pack_table(key, row)
        if table is not None and table.namespace in counted:
            counted[table.namespace].count(table, 1)
    for key, _ in transaction.starting_with(MANIFESTS, b""):
        namespace = bytes(key[:ID_BYTES])
        if namespace in counted:
            counted[namespace].requests += 1
    for name, state in states.items():
        if state != counted[name]:
            yield f"namespace {name.hex()}: {state}; counted: {counted[name]}"


def _tenant_faults(transaction: TableRows) -> Iterator[str]:
    """Yield a line per tenant whose recorded totals or order differ from its packs."""
    recorded = {totals.tenant: totals for totals in read_tenants(transaction)}
    counted: dict[str, TenantTotals] = {}
    for tenant, totals in recorded.items():
        counted[tenant] = TenantTotals(tenant, quota=totals.quota)
    listed: set[bytes] = set()
    for key, row in transaction.starting_with(PACKS, b""):
        table = pack_table(key, row)
        if table is None or table.tenant == DEFAULT_TENANT:
            continue
        counted.setdefault(table.tenant, TenantTotals(table.tenant)).count(table, 1)
        name = bytes(key)
        use = Use.decode(transaction.get(USES, name))
        if use is not None and not use.pinned:
            listed.add(transaction.tenant_digest(table.tenant) + use.order_key(name))
    for tenant in {*recorded, *counted}:
        if recorded.get(tenant) != counted.get(tenant):
            yield f"{recorded.get(tenant)}; counted: {counted.get(tenant)}"
    found = {bytes(key) for key, _ in transaction.starting_with(TENANT_ORDER, b"")}
    for key in listed - found:
        yield f"a tenant's order lacks {ORDER_KEY.unpack(key[-ORDER_KEY.size :])}"
    above: set[bytes] = set()
    for totals in recorded.values():
        if totals.is_above():
            above.add(transaction.tenant_digest(totals.tenant))
    for key, _ in transaction.starting_with(META, b"above"):
        above.symmetric_difference_update({bytes(key[len(b"above") :])})
    for digest in above:
        yield f"the list of tenants above their quotas is wrong about {digest.hex()}"


def _namespace_faults(transaction: TableRows) -> Iterator[str]:
    """Yield a line per namespace that has rows but no content, or content but no totals."""
    with_content = _namespaces_in(transaction, PACKS) | _namespaces_in(
        transaction, MANIFESTS
    )
    for table in (NAMESPACES, STATES, LOG):
        for name in _namespaces_in(transaction, table) - with_content:
            yield f"namespace {name.hex()} has no content, but rows of {table}"
    for name in with_content - _namespaces_in(transaction, STATES):
        yield f"namespace {name.hex()} has content, but no totals"
    for key, row in transaction.starting_with(STATES, b""):
        if NamespaceState.decode(row).generation == NO_GENERATION:
            yield f"namespace {bytes(key).hex()} has no generation"


def _namespaces_in(transaction: TableRows, table: str) -> set[bytes]:
    return {bytes(key[:ID_BYTES]) for key, _ in transaction.starting_with(table, b"")}
