"""Queries of the catalogue within one transaction."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress

from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.backend import Changes, Namespace
from persistkv.storage.catalog.records import (
    ADDED,
    LOG_KEY,
    SEQUENCE,
    Chain,
    NamespaceState,
    Use,
    cursor_sequence,
    decode_namespace,
    manifest_row,
    manifests_of,
    pack_table,
    read_clock,
)
from persistkv.storage.catalog.rows import (
    CHAINS,
    LOG,
    MANIFEST_KEYS,
    MANIFESTS,
    NAMESPACES,
    PACKS,
    STATES,
    USES,
    Rows,
)
from persistkv.storage.extensions import RequestUse
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest, decode_manifest, decode_manifest_keys
from persistkv.storage.format.pack import ID_BYTES, PackTable, table_lengths


def find_namespace(rows: Rows, name: bytes) -> Namespace | None:
    """Return a namespace by its id; None if it is not held, or its row is damaged."""
    row = rows.get(NAMESPACES, name)
    return None if row is None else decode_namespace(name, row)


def find_changes(rows: Rows, namespace: bytes, cursor: bytes | None) -> Changes:
    """Return the changes since a cursor; see ``Backend.changes``.

    :raises StoreError: there is no such namespace.
    """
    row = rows.get(STATES, namespace)
    if row is None:
        raise StoreError(f"the store holds no namespace {namespace.hex()}")
    state = NamespaceState.decode(row)
    since = None if cursor is None else cursor_sequence(state, cursor)
    moved = None if since is None else _moved(rows, namespace, since, state.sequence)
    if moved is None:
        found = [pack_table(key, row) for key, row in rows.starting_with(PACKS, namespace)]
        return Changes(state.cursor, [table for table in found if table is not None], reset=True)
    added, removed = moved
    return Changes(state.cursor, find_tables(rows, namespace, added), removed)


def find_tables(rows: Rows, namespace: bytes, pack_ids: Iterable[bytes]) -> list[PackTable]:
    """Return the tables of packs, in the order of the ids, except packs that are not held or damaged."""
    found: list[PackTable] = []
    for pack_id in pack_ids:
        row = rows.get(PACKS, namespace + pack_id)
        table = None if row is None else pack_table(namespace + pack_id, row)
        found += [] if table is None else [table]
    return found


def find_manifests(rows: Rows, namespace: bytes, start: bytes, at_most: int) -> tuple[bytes, list[RequestManifest]]:
    """Return the key to continue with (empty at the end), and the heads of manifests from the key ``start`` on.

    :param at_most: rows to read; damaged ones are left out of the result.
    """
    heads: list[RequestManifest] = []
    for number, (key, row) in enumerate(rows.range(MANIFESTS, start)):
        if key[:ID_BYTES] != namespace:
            break
        if number == at_most:
            return bytes(key), heads
        with suppress(CorruptPackError):
            heads.append(decode_manifest(row))
    return b"", heads


def find_manifest_keys(rows: Rows, namespace: bytes, manifest_id: str) -> ManifestKeys | None:
    """Return the keys of a manifest; None if it is not held or damaged."""
    row = rows.get(MANIFEST_KEYS, manifest_row(namespace, manifest_id))
    try:
        return None if row is None else decode_manifest_keys(row)
    except CorruptPackError:
        return None


def find_manifests_naming(rows: Rows, namespace: bytes, pack_ids: Sequence[bytes]) -> list[RequestManifest]:
    """Return the heads of the manifests that name any of these packs."""
    names = dict.fromkeys(name for pack_id in pack_ids for name in manifests_of(rows, namespace + pack_id))
    heads: list[RequestManifest] = []
    for name in names:
        row = rows.get(MANIFESTS, name)
        with suppress(CorruptPackError):
            heads += [] if row is None else [decode_manifest(row)]
    return heads


def find_chain(rows: Rows, namespace: bytes, manifest_id: str) -> list[bytes] | None:
    """Return the ids of the packs that a manifest names, in order; None if it is not held."""
    chain = Chain.decode(rows.get(CHAINS, manifest_row(namespace, manifest_id)))
    return None if chain is None else list(chain.packs)


class UseQueries:
    """Queries for the use of requests. Reuse one object for many requests: it caches data of packs that they share."""

    def __init__(self, namespace: bytes) -> None:
        self._namespace = namespace
        self._moments: dict[bytes, list[int]] = {}

    def find(self, rows: Rows, manifest_ids: Sequence[str]) -> list[RequestUse | None]:
        """Return the use of each request; None if the request or its last pack is not held."""
        skew = read_clock(rows)[1].skew
        return [self._find(rows, manifest_row(self._namespace, name), skew) for name in manifest_ids]

    def _find(self, rows: Rows, name: bytes, skew: float) -> RequestUse | None:
        """Return the use of the request with the row key ``name``.

        :param skew: see ``StoreClock.skew``.
        """
        chain = Chain.decode(rows.get(CHAINS, name))
        if chain is None:
            return None
        if not chain.packs:
            return RequestUse(chain.time + skew, False, 0, chain.pinned)
        last = self._namespace + chain.packs[-1]
        use = Use.decode(rows.get(USES, last))
        if use is None:
            return None
        if last not in self._moments:
            self._moments[last] = _moments(rows, last)
        naming = self._moments[last]
        later = len(naming) - bisect_right(naming, chain.moment)
        lengths = [_pack_lengths(rows, self._namespace + pack_id) for pack_id in chain.packs]
        raw, stored = (sum(length) for length in zip(*lengths, strict=True))
        reused = use.moment > chain.moment
        return RequestUse(use.time + skew, reused, max(0, len(naming) - 1), chain.pinned, later, raw, stored)


def _moved(rows: Rows, namespace: bytes, since: int, until: int) -> tuple[dict[bytes, None], list[bytes]] | None:
    """Return the ids of the packs that were added and removed after ``since``; None if the log lacks entries."""
    added: dict[bytes, None] = {}
    removed: list[bytes] = []
    for sequence in range(since + 1, until + 1):
        row = rows.get(LOG, LOG_KEY.pack(namespace, sequence))
        if row is None:
            return None
        entry = bytes(row)
        if entry[:1] == ADDED:
            added[entry[1:]] = None
        else:
            removed.append(entry[1:])
    return added, removed


def _moments(rows: Rows, pack: bytes) -> list[int]:
    """Return the moments at which the manifests that name a pack were written, sorted."""
    chains = [Chain.decode(rows.get(CHAINS, name)) for name in manifests_of(rows, pack)]
    return sorted(chain.moment for chain in chains if chain is not None)


def _pack_lengths(rows: Rows, name: bytes) -> tuple[int, int]:
    """Return the raw and payload bytes of a pack; 0 and 0 if it is not held."""
    row = rows.get(PACKS, name)
    return (0, 0) if row is None else table_lengths(row[SEQUENCE.size :])
