"""What lies where in the environment. Byte by byte in docs/format.md.

Keys begin with the namespace's id (16 bytes), so that a namespace is one range of each database.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from persistkv.errors import CorruptPackError, CorruptStoreError
from persistkv.storage.backend import Namespace, Policy
from persistkv.storage.codec import Buffer
from persistkv.storage.identity import Identity
from persistkv.storage.pack import ID_BYTES, UNKNOWN_DEPTH, PackTable
from persistkv_lmdb.clock import Reading, StoreClock
from persistkv_lmdb.options import DEFAULT_CAPACITY, MAX_CAPACITY, MIN_CAPACITY, Placement

if TYPE_CHECKING:
    from lmdb import _Database

DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"  # as LMDB names them
FORMAT_VERSION = 2
_CAPACITY_ROW = b"capacity"
_CAPACITY = struct.Struct("<Q")
_TTL_ROW = b"ttl"
_TTL = struct.Struct("<d")
_CATALOGUE_ROW = b"catalogue"
_PLACEMENT_ROW = b"placement"
_FORMAT_ROW = b"format"
_FORMAT = struct.Struct("<8sI")
_MAGIC = b"PKVLMDB1"

_CREATED = struct.Struct("<d")
SEQUENCE = struct.Struct("<Q")
LOG_KEY = struct.Struct(">16sQ")
ADDED, REMOVED = b"+", b"-"
_META_PAGES = 2
_STATE = struct.Struct("<8s6Q")
_USE = struct.Struct("<QdII")
_CHAIN = struct.Struct("<QdB")
_CLOCK_ROW = b"clock"
_MOMENT = struct.Struct("<Q")
_MOST = 1 << 62  # more was never counted: that leaves room to count on

PINNED, ORDERED = 1, 2
PACK, MANIFEST = 0, 1
ORDER_KEY = struct.Struct(">QIB32s")
"""Place, depth counted from UNKNOWN_DEPTH down, ``PACK`` or ``MANIFEST``, and the row's name."""


class OtherReleaseError(CorruptStoreError):
    """It is the store of another release."""


class Databases(NamedTuple):
    """The named databases of an environment."""

    meta: _Database
    """format → magic and version; capacity → u64; ttl → f64; placement → its name; clock → last moment, ``StoreClock``;
    catalogue → u64; space → the allocator's totals."""
    namespaces: _Database
    """namespace → time of creation, then the identity's canonical JSON."""
    states: _Database
    """namespace → ``NamespaceState``."""
    packs: _Database
    """namespace, pack id → the sequence number at which it came, then its table."""
    pieces: _Database
    """namespace, pack id, u32 big-endian → the payload of a pack that lies inline, cut each 256 KiB."""
    log: _Database
    """namespace, sequence number big-endian → ``+`` or ``-``, then a pack id."""
    manifests: _Database
    """namespace, digest of the manifest's id → its head."""
    manifest_keys: _Database
    """The same key → its keys."""
    uses: _Database
    """namespace, pack id → ``Use``."""
    order: _Database
    """``ORDER_KEY`` → nothing: what may be evicted, first to go first."""
    chains: _Database
    """The key of ``manifests`` → ``Chain``."""
    links: _Database
    """namespace, pack id, digest of the id of a manifest that names it → nothing."""
    extents: _Database
    """namespace, pack id → where the payload lies, for a pack that lies in extents."""
    segments: _Database
    """segment → its pages."""
    free: _Database
    """segment, first page → pages: the free extents, by place."""
    sizes: _Database
    """pages, segment, first page → nothing: the same by size."""
    aging: _Database
    """transaction that freed it, segment, first page → pages: extents that readers may still see."""


class Use(NamedTuple):
    """When a pack was used last, and where that put it."""

    place: int
    """Among all that may be evicted, by the store's counter of moments; see ``recency``."""
    time: float
    """Seconds since the epoch."""
    depth: int
    """Blocks before it in its chain; UNKNOWN_DEPTH where nobody told."""
    pins: int
    """Pinned manifests that name it. Where there is one, ``order`` does not list it."""

    def order_key(self, name: bytes) -> bytes:
        """:param name: namespace and pack id."""
        return ORDER_KEY.pack(self.place, UNKNOWN_DEPTH - self.depth, PACK, name)

    def encode(self) -> bytes:
        """The row."""
        return _USE.pack(*self)

    @classmethod
    def decode(cls, row: Buffer | None) -> Use | None:
        """The use of its row; None where it is none."""
        return cls(*_USE.unpack(row)) if row is not None and len(row) == _USE.size else None


class Chain(NamedTuple):
    """A manifest's packs, and when it was written."""

    moment: int
    """Its place, too."""
    time: float
    flags: int
    packs: tuple[bytes, ...]
    """Ids, those nearest to the begin of the context first."""

    @property
    def pinned(self) -> bool:
        """Whether it is kept. ``order`` does not list it then."""
        return bool(self.flags & PINNED)

    @property
    def ordered(self) -> bool:
        """Whether ``packs`` stand in the order of the context."""
        return bool(self.flags & ORDERED)

    def order_key(self, name: bytes) -> bytes:
        """:param name: namespace and digest of the manifest's id."""
        return ORDER_KEY.pack(self.moment, UNKNOWN_DEPTH, MANIFEST, name)

    def encode(self) -> bytes:
        """The row."""
        return _CHAIN.pack(self.moment, self.time, self.flags) + b"".join(self.packs)

    @classmethod
    def decode(cls, row: Buffer | None) -> Chain | None:
        """The chain of its row; None where it is none."""
        if row is None or len(row) < _CHAIN.size or (len(row) - _CHAIN.size) % ID_BYTES:
            return None
        moment, seconds, flags = _CHAIN.unpack_from(row)
        ids = bytes(row[_CHAIN.size :])
        packs = tuple(ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES))
        return cls(moment, seconds, flags, packs)


class Transaction(NamedTuple):
    """One running transaction. What it hands out lies in mapped pages and dies with it."""

    txn: lmdb.Transaction[memoryview]
    db: Databases


@dataclass
class NamespaceState:
    """A namespace's position and exact totals: one row, written by each commit that changes one of them."""

    generation: bytes
    """8 random bytes: the cursors of a namespace that was made anew are not those of its predecessor."""
    sequence: int = 0
    """Changes so far."""
    packs: int = 0
    blocks: int = 0
    requests: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0

    @property
    def cursor(self) -> bytes:
        """Where the catalogue stands."""
        return self.generation + self.sequence.to_bytes(8, "big")

    def encode(self) -> bytes:
        """The row.

        :raises CorruptStoreError: more went than it had counted.
        """
        generation, *counts = astuple(self)
        if min(counts) < 0:
            raise CorruptStoreError(f"namespace state: a count of {min(counts)}")
        return _STATE.pack(generation, *counts)

    @classmethod
    def decode(cls, row: Buffer) -> NamespaceState:
        """The state of its row.

        :raises CorruptStoreError: where it is none.
        """
        if len(row) != _STATE.size:
            raise CorruptStoreError(f"namespace state: {len(row)} bytes instead of {_STATE.size}")
        generation, *counts = _STATE.unpack(row)
        if max(counts) > _MOST:
            raise CorruptStoreError(f"namespace state: a count of {max(counts)}")
        return cls(generation, *counts)

    def count(self, table: PackTable, sign: int) -> None:
        """Take a pack into the totals (1), or out of them (-1)."""
        self.packs += sign
        self.blocks += sign * len(table.keys)
        self.raw_bytes += sign * table.raw_length
        self.stored_bytes += sign * table.payload_length


def cursor_sequence(state: NamespaceState, cursor: bytes) -> int | None:
    """The sequence number that a cursor of this namespace stands for; None for any other cursor."""
    sequence = int.from_bytes(cursor[8:], "big")
    known = len(cursor) == 16 and cursor[:8] == state.generation and sequence <= state.sequence
    return sequence if known else None


def manifest_row(namespace: bytes, manifest_id: str) -> bytes:
    """A manifest's key: LMDB's are at most 511 bytes, ids may be longer."""
    return namespace + blake2b(manifest_id.encode(), digest_size=ID_BYTES).digest()


def encode_namespace(namespace: Namespace) -> bytes:
    """The row of ``namespaces``."""
    return _CREATED.pack(namespace.created) + namespace.identity.encode()


def decode_namespace(key: Buffer, row: Buffer) -> Namespace | None:
    """The namespace of a row; None where it is damaged."""
    if len(row) < _CREATED.size:
        return None
    try:
        namespace = Namespace(Identity.decode(bytes(row[_CREATED.size :])), _CREATED.unpack_from(row)[0])
        return namespace if namespace.id == key else None
    except (ValueError, RecursionError):
        return None


def pack_table(key: Buffer, row: Buffer) -> PackTable | None:
    """The table of a row of ``packs``; None where it is damaged or lies in another's place."""
    try:
        table = PackTable.parse(row[SEQUENCE.size :])
    except CorruptPackError:
        return None
    return table if table.namespace + table.pack_id == key else None


def rows(transaction: Transaction, db: _Database, prefix: bytes) -> Iterator[tuple[memoryview, memoryview]]:
    """The rows whose keys begin with ``prefix``."""
    cursor = transaction.txn.cursor(db)
    if cursor.set_range(prefix):
        for key, row in cursor.iternext():
            if key[: len(prefix)] != prefix:
                break
            yield key, row


def open_databases(env: lmdb.Environment, policy: Policy) -> Databases:
    """Open the databases of a store; create them in an empty environment that is open for writing.

    :param policy: recorded in a store that is created here.

    :raises CorruptStoreError: something else lies there, or another format; it was not changed.
    """
    if env.flags()["readonly"]:
        return _existing_databases(env, None)
    with env.begin(write=True, buffers=True) as txn:
        if txn.stat()["entries"]:
            return _existing_databases(env, txn)
        databases = Databases(*[env.open_db(name.encode(), txn=txn) for name in Databases._fields])
        txn.put(_FORMAT_ROW, _FORMAT.pack(_MAGIC, FORMAT_VERSION), db=databases.meta)
        transaction = Transaction(txn, databases)
        write_policy(transaction, policy)
        txn.put(_PLACEMENT_ROW, str(policy.placement).encode(), db=databases.meta)
        return databases


def _existing_databases(env: lmdb.Environment, txn: lmdb.Transaction[memoryview] | None) -> Databases:
    try:
        meta = env.open_db(Databases._fields[0].encode(), txn=txn, create=False)
        if txn is not None:
            _check_format(txn.get(_FORMAT_ROW, db=meta))
        else:
            with env.begin(buffers=True) as reading:
                _check_format(reading.get(_FORMAT_ROW, db=meta))
        return Databases(*[env.open_db(name.encode(), txn=txn, create=False) for name in Databases._fields])
    except (lmdb.NotFoundError, lmdb.IncompatibleError):
        raise CorruptStoreError("it is an LMDB environment of something else") from None


def _check_format(row: Buffer | None) -> None:
    if row is None or len(row) != _FORMAT.size or _FORMAT.unpack(row)[0] != _MAGIC:
        raise CorruptStoreError("it is an LMDB environment of something else")
    version = _FORMAT.unpack(row)[1]
    if version != FORMAT_VERSION:
        raise OtherReleaseError(f"its format is {version}; this release reads {FORMAT_VERSION}")


def used_bytes(transaction: Transaction) -> int:
    """Bytes of the pages that hold something; freed ones, which are used again, left out."""
    txn = transaction.txn
    stats = [txn.stat(), *map(txn.stat, transaction.db)]
    pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
    return (_META_PAGES + pages) * stats[0]["psize"]


def read_capacity(transaction: Transaction) -> int:
    """Return the recorded capacity in bytes; the default where the row is missing or out of range."""
    row = transaction.txn.get(_CAPACITY_ROW, db=transaction.db.meta)
    capacity = _CAPACITY.unpack(row)[0] if row is not None and len(row) == _CAPACITY.size else 0
    return capacity if MIN_CAPACITY <= capacity <= MAX_CAPACITY else DEFAULT_CAPACITY


def read_ttl(transaction: Transaction) -> float | None:
    """Return the recorded ttl in seconds; None where there is none, or where the row is out of range."""
    row = transaction.txn.get(_TTL_ROW, db=transaction.db.meta)
    ttl_s = _TTL.unpack(row)[0] if row is not None and len(row) == _TTL.size else math.nan
    return ttl_s if 0 < ttl_s < math.inf else None


def read_policy(transaction: Transaction) -> Policy:
    """Return the recorded policy.

    :raises CorruptStoreError: the placement is unknown.
    """
    return Policy(read_capacity(transaction), read_ttl(transaction), read_placement(transaction).value)


def write_policy(transaction: Transaction, policy: Policy) -> None:
    """Record capacity and ttl; the placement stays as it was at creation."""
    txn, meta = transaction.txn, transaction.db.meta
    txn.put(_CAPACITY_ROW, _CAPACITY.pack(policy.capacity), db=meta)
    if policy.ttl_s is None:
        txn.delete(_TTL_ROW, db=meta)
    else:
        txn.put(_TTL_ROW, _TTL.pack(policy.ttl_s), db=meta)


def read_placement(transaction: Transaction) -> Placement:
    """Where new packs go.

    :raises CorruptStoreError: nothing known is recorded.
    """
    row = transaction.txn.get(_PLACEMENT_ROW, db=transaction.db.meta)
    try:
        return Placement(bytes(row or b"").decode("ascii", "replace"))
    except ValueError:
        raise CorruptStoreError(f"its placement is {bytes(row or b'')!r}") from None


def read_catalogue_bytes(transaction: Transaction) -> int:
    """What ``data.mdb`` may take beside extents, where that is more than its share; else 0."""
    row = transaction.txn.get(_CATALOGUE_ROW, db=transaction.db.meta)
    return _CAPACITY.unpack(row)[0] if row is not None and len(row) == _CAPACITY.size else 0


def write_placement(transaction: Transaction, placement: Placement, catalogue_bytes: int) -> None:
    """Record both."""
    transaction.txn.put(_PLACEMENT_ROW, placement.value.encode(), db=transaction.db.meta)
    transaction.txn.put(_CATALOGUE_ROW, _CAPACITY.pack(catalogue_bytes), db=transaction.db.meta)


def read_clock(transaction: Transaction) -> tuple[int, StoreClock]:
    """Return the number of the last moment and the clock at that moment; a new store has moment 0.

    :raises CorruptStoreError: the row holds no clock, so the eviction order is unknown.
    """
    row = transaction.txn.get(_CLOCK_ROW, db=transaction.db.meta)
    if row is None:
        return 0, StoreClock.starting(Reading.now())
    moment = _MOMENT.unpack_from(row)[0] if len(row) >= _MOMENT.size else _MOST + 1
    clock = StoreClock.decode(row[_MOMENT.size :])
    if moment > _MOST or clock is None:
        raise CorruptStoreError(f"unreadable clock: moment {moment}, {clock}")
    return moment, clock


def write_clock(transaction: Transaction, moment: int, clock: StoreClock) -> None:
    """Record the clock. Even an unchanged row makes a transaction that LMDB counts."""
    transaction.txn.put(_CLOCK_ROW, _MOMENT.pack(moment) + clock.encode(), db=transaction.db.meta)
