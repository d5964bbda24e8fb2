"""Tables of the catalogue in an LMDB environment, each of them a database, and the encoding of
their rows.

docs/format.md specifies the encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from persistkv.errors import CorruptPackError, CorruptStoreError
from persistkv.storage.backend import Namespace
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.keys import STORE
from persistkv.storage.format.pack import ID_BYTES, UNKNOWN_DEPTH, PackTable
from persistkv.storage.format.seal import PLAIN, Seal
from persistkv.storage.identity import Identity
from persistkv.tenants import TAG_BYTES, tenant_digest

if TYPE_CHECKING:
    import lmdb
    from lmdb import _Database

T = TypeVar("T")

# Names of the tables, with the content of their rows as key → value. Except in META, ORDER,
# EXPIRIES, TENANTS and TENANT_ORDER, keys begin with the namespace's id (16 bytes), so a namespace
# is one range of each table.
META = "meta"
"""``clock`` → number of the last moment, then ``StoreClock``. ``note``, namespace, name → content
of a note (``Backend.note``). Drivers also store their own rows here."""
# namespace → time of creation, then the identity's canonical JSON
NAMESPACES = "namespaces"
STATES = "states"  # namespace → ``NamespaceState``
# namespace, pack id → the sequence number at which the pack was added, then its table
PACKS = "packs"
# namespace, sequence number big-endian → ``+`` or ``-``, pack id; after ``-``, fingerprints of its
# keys
LOG = "log"
MANIFESTS = "manifests"  # namespace, digest of the manifest's id → the manifest's head
# namespace, digest of the manifest's id → the manifest's keys
MANIFEST_KEYS = "manifest_keys"
USES = "uses"  # namespace, pack id → ``Use``
# ``ORDER_KEY`` → empty: packs and manifests that may be evicted, in eviction order
ORDER = "order"
CHAINS = "chains"  # namespace, digest of the manifest's id → ``Chain``
# namespace, pack id, digest of the id of a manifest that names the pack → empty
LINKS = "links"
# ``EXPIRY_KEY`` → empty: manifests with a ttl of their own, by the earliest time of expiry
EXPIRIES = "expiries"
TENANTS = "tenants"  # digest of a tenant's name → ``TenantTotals``
# digest of a tenant's name, ``ORDER_KEY`` → empty: its packs that may be evicted, in eviction order
TENANT_ORDER = "tenant_order"

TABLES = (
    META,
    NAMESPACES,
    STATES,
    PACKS,
    LOG,
    MANIFESTS,
    MANIFEST_KEYS,
    USES,
    ORDER,
    CHAINS,
    LINKS,
    EXPIRIES,
    TENANTS,
    TENANT_ORDER,
)


# Tables whose values are sealed in a store with a key, because they contain keys of blocks, their
# fingerprints, ids of requests, labels or tenants.
SEALED_TABLES = frozenset({PACKS, LOG, MANIFESTS, MANIFEST_KEYS, TENANTS})


class TableRows:
    """Rows (key and value) of all tables of a store within one LMDB transaction, sorted by key in
    each table. In a store with a key, the values of some tables are sealed.

    A sealed value that does not open reads as empty, which is no valid value of any row.

    A row's key has at most 64 bytes. Returned buffers are valid until a row is changed, or the
    transaction ends. A change that finds no room raises LMDB's error; the transaction must then be
    rolled back.
    """

    def __init__(
        self,
        txn: lmdb.Transaction[memoryview],
        databases: Mapping[str, _Database],
        seal: Seal = PLAIN,
        sealed: Collection[str] = SEALED_TABLES,
        *,
        of_tenants: bool = True,
    ) -> None:
        """:param databases: by the name of the table.
        :param sealed: names of the tables whose values ``seal`` hides, if it encrypts.
        :param of_tenants: whether the data keys of tenants seal their rows; False: the data key of
            the store seals all rows, as in the replica of a shared store.
        """
        self.txn = txn
        self._databases = databases
        self._seal = seal
        self._sealed = sealed if seal.encrypts else ()
        self._of_tenants = of_tenants

    def get(self, table: str, key: bytes) -> Buffer | None:
        """Return the value of a key; None if there is no such row."""
        value = self.txn.get(key, db=self._databases[table])
        if value is None or table not in self._sealed:
            return value
        return self._opened(table, key, value)

    def put(
        self,
        table: str,
        key: bytes,
        value: Buffer,
        tenant: str = STORE,
    ) -> None:
        """Write a row, replacing the row with the same key.

        :param tenant: whose content the value describes.
        """
        if table in self._sealed:
            owner = tenant if self._of_tenants else STORE
            name = _row_name(table, key)
            value = self._seal.sealed(name, value, owner)
        self.txn.put(key, value, db=self._databases[table])

    def put_many(
        self,
        table: str,
        rows: Sequence[tuple[bytes, bytes]],
    ) -> None:
        """Write many rows at once that belong to no tenant."""
        # sealed rows are encrypted one by one
        if table in self._sealed:
            for key, value in rows:
                self.put(table, key, value)
            return
        with self.cursor(table) as cursor:
            cursor.putmulti(rows)

    def _opened(
        self,
        table: str,
        key: Buffer,
        value: Buffer,
    ) -> bytes:
        """Return the value of a sealed row; empty, which decoders refuse, if it does not open."""
        try:
            return self._seal.opened(_row_name(table, key), value)
        except CorruptPackError:
            return b""

    def delete(self, table: str, key: bytes) -> bool:
        """Delete a row; return whether it existed."""
        return self.txn.delete(key, db=self._databases[table])

    def range(
        self,
        table: str,
        start: bytes,
    ) -> Iterator[tuple[Buffer, Buffer]]:
        """Iterate over (key, value) from the key ``start`` on, ascending. Do not change rows
        meanwhile."""
        cursor = self.cursor(table)
        if not cursor.set_range(start):
            return
        if table not in self._sealed:
            yield from cursor.iternext()
            return
        for key, value in cursor.iternext():
            yield key, self._opened(table, key, value)

    def starting_with(
        self,
        table: str,
        prefix: bytes,
    ) -> Iterator[tuple[Buffer, Buffer]]:
        """Iterate over the rows whose keys start with ``prefix``, ascending. Do not change rows
        meanwhile."""
        for key, value in self.range(table, prefix):
            if key[: len(prefix)] != prefix:
                return
            yield key, value

    def first(self, table: str, start: bytes) -> bytes | None:
        """Return the first key of a table from ``start`` on; None if there is none. Unlike during
        an iteration, the caller may change rows before the next call."""
        with self.cursor(table) as cursor:
            return bytes(cursor.key()) if cursor.set_range(start) else None

    def existing(
        self,
        table: str,
        keys: Sequence[bytes],
    ) -> set[bytes]:
        """Return those of the keys that have a row; fast also for many."""
        with self.cursor(table) as cursor:
            rows = cursor.getmulti(keys)
            return {bytes(key) for key, _ in rows}

    def has_prefix(self, table: str, prefix: bytes) -> bool:
        """Return whether the key of any row starts with ``prefix``."""
        found = self.first(table, prefix)
        return found is not None and found.startswith(prefix)

    def tenant_digest(self, tenant: str) -> bytes:
        """Return the digest of a tenant's name, which keys of rows contain in its place."""
        # A replica of a shared store uses no secret, because engines of the store may seal with
        # different data keys, and their digests must agree.
        secret = self._seal.names_secret if self._of_tenants else b""
        return tenant_digest(tenant, secret)

    def cursor(self, table: str) -> lmdb.Cursor[memoryview]:
        """Return a cursor over a table, before its first row. It yields values as they are stored:
        those of a sealed table are not opened."""
        return self.txn.cursor(self._databases[table])

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        statistics = self.txn.stat(self._databases[table])
        return int(statistics["entries"])

    def used_bytes(self) -> int:
        """Return the bytes of the pages that this transaction's snapshot uses, without free
        pages."""
        main_tree = self.txn.stat()  # lists the tables
        trees = [main_tree]
        for database in self._databases.values():
            trees.append(self.txn.stat(database))
        pages = _META_PAGES
        for tree in trees:
            pages += tree["branch_pages"]
            pages += tree["leaf_pages"]
            pages += tree["overflow_pages"]
        return int(pages * main_tree["psize"])


def _row_name(table: str, key: Buffer) -> bytes:
    """Return the name under which the value of a row is sealed, so that the value does not open as
    that of another row."""
    return table.encode() + b"\0" + key


_META_PAGES = 2  # number of meta pages of an LMDB environment

NOTE = b"note"  # prefix of the keys of notes in ``META``
SEQUENCE = struct.Struct("<Q")
"""Beginning of a row in ``PACKS``: the sequence number at which the pack was added."""
LOG_KEY = struct.Struct(">16sQ")
"""Key in ``LOG``: namespace, and the sequence number of a change, big-endian for its order."""
ADDED, REMOVED = b"+", b"-"
"""Kinds of changes in ``LOG``."""
_CREATED = struct.Struct("<d")  # seconds since the epoch, before a namespace's identity
_STATE = struct.Struct("<8s6Q")  # the fields of ``NamespaceState``
_USE = struct.Struct("<QdIIB")  # the fields of ``Use`` without the tenant
_CHAIN = struct.Struct("<QdBdd")  # the fields of ``Chain`` without the packs
# length of ``NamespaceState.generation``, with which each cursor begins
GENERATION_BYTES = 8
# generation of a namespace without content, which has no rows
NO_GENERATION = bytes(GENERATION_BYTES)
# position in the change log of a namespace without content
EMPTY_CURSOR = NO_GENERATION + bytes(8)
MAX_COUNT = 1 << 62  # limit of valid counters: adding to them cannot overflow 64 bits

PINNED, ORDERED, LOW, RESTORED = 1, 2, 4, 8
"""Bits of ``Chain.flags``."""
NO_PRIORITY, LOW_PRIORITY, NORMAL_PRIORITY = 0, 1, 2
"""Values of ``Use.priority``."""
PACK, MANIFEST = 0, 1
"""Kinds of entries in ``ORDER``. They order a pack of depth 0 before the manifests of its
moment."""
NAME_BYTES = 2 * ID_BYTES  # namespace, and pack id or digest of a manifest's id
ORDER_KEY = struct.Struct(">?QIB32s")
"""Key in the table ``ORDER``: False for low priority, moment, UNKNOWN_DEPTH minus the depth,
``PACK`` or ``MANIFEST``, and the key of the row in ``USES`` or ``CHAINS``.
"""
# key in the table ``EXPIRIES``: ``Chain.expires``, the manifest's key in ``CHAINS``
EXPIRY_KEY = struct.Struct(">d32s")


class Use(NamedTuple):
    """Last use of a pack."""

    # number of the commit that used the pack last; only commits that use anything count
    moment: int
    time: float  # time of the last use: seconds since the epoch, on the store's clock
    # smallest ``Frame.depth`` of the pack's frames, in blocks; UNKNOWN_DEPTH if it is not known
    depth: int
    # number of pinned manifests that name the pack; unless it is 0, ``ORDER`` lacks the pack
    pins: int
    priority: int
    """Highest priority of the manifests that have named the pack since it was written;
    ``NO_PRIORITY``: none has. Only ``LOW_PRIORITY`` has the pack evicted before others."""
    tenant: bytes = b""
    """Digest of the tenant's name, under which ``TENANT_ORDER`` lists the pack; empty for the
    default tenant, which has no order of its own."""

    @property
    def pinned(self) -> bool:
        """Whether the pack must not be evicted."""
        return self.pins > 0

    def order_key(self, name: bytes) -> bytes:
        """Return the key in ``ORDER`` of the pack with the key ``name``."""
        is_normal = self.priority != LOW_PRIORITY
        # order deeper packs before shallower ones, and packs of unknown depth before all
        height = UNKNOWN_DEPTH - self.depth
        return ORDER_KEY.pack(is_normal, self.moment, height, PACK, name)

    def encode(self) -> bytes:
        """Return the value of a row in ``USES``."""
        numbers = self[:-1]
        return _USE.pack(*numbers) + self.tenant

    @classmethod
    def decode(cls, row: Buffer | None) -> Use | None:
        """Decode the value of a row in ``USES``; return None if the row is missing or damaged."""
        if row is None or len(row) < _USE.size:
            return None
        moment, time, depth, pins, priority = _USE.unpack_from(row)
        tenant = bytes(row[_USE.size :])
        # the row of a pack of the default tenant ends without a digest
        if tenant and len(tenant) != TAG_BYTES:
            return None
        return cls(moment, time, depth, pins, priority, tenant)


class Chain(NamedTuple):
    """A manifest's packs, flags and ttl, and the commit that wrote it."""

    # number of the commit that wrote the manifest; only commits that use anything are counted
    moment: int
    # time at which the manifest was written: seconds since the epoch, on the store's clock
    time: float
    flags: int
    """``PINNED``: ``ORDER`` does not list the manifest. ``LOW``: it has low priority. ``ORDERED``:
    ``packs`` are in the order of the request's tokens; otherwise their order has no meaning.
    ``RESTORED``: the request restored tokens from the store."""
    # seconds from the last use of the last of ``packs`` to the expiry of the manifest; 0: never
    ttl_s: float
    expires: float
    """Earliest time of expiry, on the store's clock, under which ``EXPIRIES`` lists the manifest; 0
    without ``ttl_s``. A use does not change this time. When it has passed, the last use of the last
    pack decides."""
    packs: tuple[bytes, ...]  # ids of its packs, from the beginning of the context on

    @property
    def tenant(self) -> bytes:
        """Empty, because ``TENANT_ORDER`` lists no manifests: they are deleted with their packs."""
        return b""

    @property
    def pinned(self) -> bool:
        return bool(self.flags & PINNED)

    @property
    def priority(self) -> int:
        """``LOW_PRIORITY`` or ``NORMAL_PRIORITY``."""
        return LOW_PRIORITY if self.flags & LOW else NORMAL_PRIORITY

    def order_key(self, name: bytes) -> bytes:
        """Return the key in ``ORDER`` of the manifest with the key ``name``."""
        is_normal = self.priority != LOW_PRIORITY
        # use the largest value in place of a depth, so that the manifest follows all packs of its
        # moment
        return ORDER_KEY.pack(is_normal, self.moment, UNKNOWN_DEPTH, MANIFEST, name)

    def encode(self) -> bytes:
        """Return the value of a row in ``CHAINS``."""
        numbers = self[:-1]
        return _CHAIN.pack(*numbers) + b"".join(self.packs)

    @classmethod
    def decode(cls, row: Buffer | None) -> Chain | None:
        """Decode the value of a row in ``CHAINS``; return None if the row is missing or damaged."""
        if row is None or len(row) < _CHAIN.size:
            return None
        ids = bytes(row[_CHAIN.size :])
        if len(ids) % ID_BYTES:
            return None
        starts = range(0, len(ids), ID_BYTES)
        packs = tuple(ids[start : start + ID_BYTES] for start in starts)
        moment, time, flags, ttl_s, expires = _CHAIN.unpack_from(row)
        return cls(moment, time, flags, ttl_s, expires, packs)


@dataclass
class NamespaceState:
    """A namespace's number of changes so far, and the exact totals of its packs and requests: one
    row, which commits update."""

    # 8 random bytes, part of each cursor: a namespace that begins again accepts no earlier cursors
    generation: bytes
    # number of the last change: packs added and removed since the namespace began
    sequence: int = 0
    packs: int = 0
    blocks: int = 0
    requests: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0

    @property
    def cursor(self) -> bytes:
        """Current position in the namespace's change log: the argument for ``Backend.changes``, 16
        bytes."""
        return self.generation + self.sequence.to_bytes(8, "big")

    def encode(self) -> bytes:
        """Return the value of a row in ``STATES``."""
        # list the fields, because ``dataclasses.astuple`` would copy each value deeply, for each
        # pack
        counts = (
            self.sequence,
            self.packs,
            self.blocks,
            self.requests,
            self.raw_bytes,
            self.stored_bytes,
        )
        return _STATE.pack(self.generation, *counts)

    @classmethod
    def decode(cls, row: Buffer) -> NamespaceState:
        """Decode the value of a row in ``STATES``.

        :raises CorruptStoreError: the row is damaged.
        """
        if len(row) != _STATE.size:
            raise CorruptStoreError(
                f"namespace state: {len(row)} bytes instead of {_STATE.size}"
            )
        generation, *counts = _STATE.unpack(row)
        if max(counts) > MAX_COUNT:
            raise CorruptStoreError(f"namespace state: a count of {max(counts)}")
        return cls(generation, *counts)

    def count(self, table: PackTable, sign: int) -> None:
        """Add a pack to the totals (``sign`` 1), or subtract it (-1)."""
        packs = self.packs + sign
        blocks = self.blocks + sign * len(table.keys)
        raw_bytes = self.raw_bytes + sign * table.raw_length
        stored_bytes = self.stored_bytes + sign * table.payload_length
        # a result below 0 comes from a damaged row
        self.packs = max(0, packs)
        self.blocks = max(0, blocks)
        self.raw_bytes = max(0, raw_bytes)
        self.stored_bytes = max(0, stored_bytes)


def read_state(rows: TableRows, namespace: bytes) -> NamespaceState:
    """Return the recorded state of a namespace; the state of an empty one, with ``NO_GENERATION``,
    if it has no row.

    :raises CorruptStoreError: its row is damaged.
    """
    row = rows.get(STATES, namespace)
    if row is None:
        return NamespaceState(NO_GENERATION)
    return NamespaceState.decode(row)


def cursor_sequence(state: NamespaceState, cursor: bytes) -> int | None:
    """Return the sequence number in a cursor; None if the cursor is not valid for this
    namespace."""
    # at this cursor, the namespace had no content: all of its changes follow
    if cursor == EMPTY_CURSOR:
        return 0
    if len(cursor) != len(EMPTY_CURSOR):
        return None
    generation = cursor[:GENERATION_BYTES]
    if generation != state.generation:
        return None
    sequence = int.from_bytes(cursor[GENERATION_BYTES:], "big")
    # the log has no changes after that of ``state.sequence``
    return sequence if sequence <= state.sequence else None


def is_current(cursor: bytes, seen: bytes) -> bool:
    """Return whether nothing has changed in a namespace after the position ``seen`` in its change
    log; ``cursor`` is the current position."""
    if seen == cursor:
        return True
    # The sequence number counts changes of packs. If it is 0, the namespace has begun since, with
    # manifests alone: its cursor differs, but no pack has changed.
    sequence = int.from_bytes(cursor[GENERATION_BYTES:], "big")
    return seen == EMPTY_CURSOR and sequence == 0


def manifest_row(namespace: bytes, manifest_id: str) -> bytes:
    """Return the key of a manifest's rows: namespace and digest of its id. Ids may be too long for
    keys."""
    digest = blake2b(manifest_id.encode(), digest_size=ID_BYTES)
    return namespace + digest.digest()


def link_row(pack: bytes, manifest: bytes) -> bytes:
    """Return the key in ``LINKS`` of the row which records that a manifest names a pack.

    :param pack: key of the pack's row in ``PACKS``.
    :param manifest: key of the manifest's row in ``MANIFESTS``, in the same namespace.
    """
    return pack + manifest[ID_BYTES:]


def note_row(namespace: bytes, name: str) -> bytes:
    """Return the key in ``META`` of a note about a namespace."""
    return NOTE + namespace + name.encode()


def encode_namespace(namespace: Namespace) -> bytes:
    """Return the value of a row in ``NAMESPACES``."""
    return _CREATED.pack(namespace.created) + namespace.identity.encode()


def decode_namespace(key: Buffer, row: Buffer | None) -> Namespace | None:
    """Decode key and value of a row in ``NAMESPACES``; return None if the row is missing or
    damaged."""
    if row is None or len(row) < _CREATED.size:
        return None
    try:
        identity = Identity.decode(row[_CREATED.size :])
    except (ValueError, RecursionError):
        return None
    # a damaged row may decode as another identity
    if identity.digest != key:
        return None
    (created,) = _CREATED.unpack_from(row)
    return Namespace(identity, created)


def pack_table(key: Buffer, row: Buffer | None) -> PackTable | None:
    """Return the table of the pack in a row of ``PACKS``; None if the row is missing, damaged or of
    another key."""
    if row is None:
        return None
    try:
        table = PackTable.parse_stored(row[SEQUENCE.size :])
    except CorruptPackError:
        return None
    return table if table.namespace + table.pack_id == key else None


def holds_pack(rows: TableRows, name: bytes) -> bool:
    """Return whether the store has a pack, and its table can be read."""
    row = rows.get(PACKS, name)
    return pack_table(name, row) is not None


def encode_change(
    kind: bytes,
    pack_id: bytes,
    table: PackTable | None = None,
) -> bytes:
    """Return the value of a row in ``LOG``.

    :param table: of a removed pack, if known. The row contains its ``PackedKeys.fingerprints``, so
        that readers of the log need not search their index for them.
    """
    fingerprints = b"" if table is None else table.keys.fingerprints
    return kind + pack_id + fingerprints


def decode_change(row: Buffer) -> tuple[bytes, bytes, bytes]:
    """Return kind, pack id and fingerprints (may be empty) of a row in ``LOG``. Damage is not
    detected, so each of the three may be wrong.
    """
    row = bytes(row)
    kind = row[:1]
    pack_id = row[1 : 1 + ID_BYTES]
    fingerprints = row[1 + ID_BYTES :]
    return kind, pack_id, fingerprints


def decoded(
    decode: Callable[[Buffer], T],
    row: Buffer | None,
) -> T | None:
    """Return a decoded row; None if the row is missing or damaged."""
    if row is None:
        return None
    try:
        return decode(row)
    except CorruptPackError:
        return None


def manifests_of(rows: TableRows, pack: bytes) -> Iterator[bytes]:
    """Yield the keys (``manifest_row``) of the manifests that name a pack, whose key is ``pack``.
    Do not change rows meanwhile.
    """
    # a key in ``LINKS`` consists of namespace, pack id and the digest of the manifest's id
    namespace = pack[:ID_BYTES]
    for key, _ in rows.starting_with(LINKS, pack):
        yield namespace + bytes(key[2 * ID_BYTES :])
