"""Encoding of the catalogue's rows, as specified in docs/format.md."""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import NamedTuple

from persistkv.errors import CorruptPackError, CorruptStoreError
from persistkv.storage.backend import Namespace
from persistkv.storage.catalog.clock import Reading, StoreClock
from persistkv.storage.catalog.rows import LINKS, META, Rows
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import ID_BYTES, UNKNOWN_DEPTH, PackTable
from persistkv.storage.identity import Identity

SEQUENCE = struct.Struct("<Q")
LOG_KEY = struct.Struct(">16sQ")
ADDED, REMOVED = b"+", b"-"
_CREATED = struct.Struct("<d")
_STATE = struct.Struct("<8s6Q")
_USE = struct.Struct("<QdII")
_CHAIN = struct.Struct("<QdB")
_CLOCK_ROW = b"clock"
_MOMENT = struct.Struct("<Q")
_MOST = 1 << 62  # limit of valid counters; adding to them cannot overflow 64 bits

PINNED, ORDERED = 1, 2
PACK, MANIFEST = 0, 1
ORDER_KEY = struct.Struct(">QIB32s")
"""Moment, depth counted from UNKNOWN_DEPTH down, ``PACK`` or ``MANIFEST``, and the row's name."""


class Use(NamedTuple):
    """Last use of a pack."""

    moment: int
    """Moment of the store's counter; see ``order``."""
    time: float
    """Seconds since the epoch, on the store's clock."""
    depth: int
    """Number of blocks before the pack in its chain; UNKNOWN_DEPTH if it is not known."""
    pins: int
    """Number of pinned manifests that name the pack. If it is not 0, ``ORDER`` does not list the pack."""

    def order_key(self, name: bytes) -> bytes:
        """Return the key of ``ORDER``.

        :param name: namespace and pack id.
        """
        return ORDER_KEY.pack(self.moment, UNKNOWN_DEPTH - self.depth, PACK, name)

    def encode(self) -> bytes:
        """Return the row."""
        return _USE.pack(*self)

    @classmethod
    def decode(cls, row: Buffer | None) -> Use | None:
        """Return the use of a row; None if the row is missing or damaged."""
        return cls(*_USE.unpack(row)) if row is not None and len(row) == _USE.size else None


class Chain(NamedTuple):
    """A manifest's packs, and the moment and time at which it was written."""

    moment: int
    time: float
    flags: int
    packs: tuple[bytes, ...]
    """Ids of the packs, from the beginning of the context on."""

    @property
    def pinned(self) -> bool:
        """Whether the manifest is pinned. ``ORDER`` does not list it then."""
        return bool(self.flags & PINNED)

    @property
    def ordered(self) -> bool:
        """Whether ``packs`` are in the order of the context."""
        return bool(self.flags & ORDERED)

    def order_key(self, name: bytes) -> bytes:
        """Return the key of ``ORDER``.

        :param name: namespace and digest of the manifest's id.
        """
        return ORDER_KEY.pack(self.moment, UNKNOWN_DEPTH, MANIFEST, name)

    def encode(self) -> bytes:
        """Return the row."""
        return _CHAIN.pack(self.moment, self.time, self.flags) + b"".join(self.packs)

    @classmethod
    def decode(cls, row: Buffer | None) -> Chain | None:
        """Return the chain of a row; None if the row is missing or damaged."""
        if row is None or len(row) < _CHAIN.size or (len(row) - _CHAIN.size) % ID_BYTES:
            return None
        moment, seconds, flags = _CHAIN.unpack_from(row)
        ids = bytes(row[_CHAIN.size :])
        packs = tuple(ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES))
        return cls(moment, seconds, flags, packs)


@dataclass
class NamespaceState:
    """A namespace's change count and exact totals: one row, written by each commit that changes one of them."""

    generation: bytes
    """8 random bytes, part of each cursor: a deleted and recreated namespace does not accept cursors from before."""
    sequence: int = 0
    """Number of changes so far."""
    packs: int = 0
    blocks: int = 0
    requests: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0

    @property
    def cursor(self) -> bytes:
        """Current position in the change log."""
        return self.generation + self.sequence.to_bytes(8, "big")

    def encode(self) -> bytes:
        """Return the row.

        :raises CorruptStoreError: a total is negative.
        """
        generation, *counts = astuple(self)
        if min(counts) < 0:
            raise CorruptStoreError(f"namespace state: a count of {min(counts)}")
        return _STATE.pack(generation, *counts)

    @classmethod
    def decode(cls, row: Buffer) -> NamespaceState:
        """Return the state of a row.

        :raises CorruptStoreError: the row is damaged.
        """
        if len(row) != _STATE.size:
            raise CorruptStoreError(f"namespace state: {len(row)} bytes instead of {_STATE.size}")
        generation, *counts = _STATE.unpack(row)
        if max(counts) > _MOST:
            raise CorruptStoreError(f"namespace state: a count of {max(counts)}")
        return cls(generation, *counts)

    def count(self, table: PackTable, sign: int) -> None:
        """Add a pack to the totals (``sign`` 1), or subtract it (-1)."""
        self.packs += sign
        self.blocks += sign * len(table.keys)
        self.raw_bytes += sign * table.raw_length
        self.stored_bytes += sign * table.payload_length


def cursor_sequence(state: NamespaceState, cursor: bytes) -> int | None:
    """Return the sequence number in a cursor of this namespace; None if the cursor is not valid for it."""
    sequence = int.from_bytes(cursor[8:], "big")
    known = len(cursor) == 16 and cursor[:8] == state.generation and sequence <= state.sequence
    return sequence if known else None


def manifest_row(namespace: bytes, manifest_id: str) -> bytes:
    """Return a manifest's row key. It contains a digest, because ids may exceed the limit of keys (LMDB: 511 bytes)."""
    return namespace + blake2b(manifest_id.encode(), digest_size=ID_BYTES).digest()


def encode_namespace(namespace: Namespace) -> bytes:
    """Return the row of ``NAMESPACES``."""
    return _CREATED.pack(namespace.created) + namespace.identity.encode()


def decode_namespace(key: Buffer, row: Buffer) -> Namespace | None:
    """Return the namespace of a row; None if the row is damaged."""
    if len(row) < _CREATED.size:
        return None
    try:
        namespace = Namespace(Identity.decode(bytes(row[_CREATED.size :])), _CREATED.unpack_from(row)[0])
        return namespace if namespace.id == key else None
    except (ValueError, RecursionError):
        return None


def pack_table(key: Buffer, row: Buffer) -> PackTable | None:
    """Return the table of a row of ``PACKS``; None if the row is damaged or belongs to another key."""
    try:
        table = PackTable.parse(row[SEQUENCE.size :])
    except CorruptPackError:
        return None
    return table if table.namespace + table.pack_id == key else None


def read_clock(rows: Rows) -> tuple[int, StoreClock]:
    """Return the number of the last moment and the clock at that moment; a new store has moment 0.

    :raises CorruptStoreError: the row is damaged, so the eviction order is unknown.
    """
    row = rows.get(META, _CLOCK_ROW)
    if row is None:
        return 0, StoreClock.starting(Reading.now())
    moment = _MOMENT.unpack_from(row)[0] if len(row) >= _MOMENT.size else _MOST + 1
    clock = StoreClock.decode(row[_MOMENT.size :])
    if moment > _MOST or clock is None:
        raise CorruptStoreError(f"unreadable clock: moment {moment}, {clock}")
    return moment, clock


def write_clock(rows: Rows, moment: int, clock: StoreClock) -> None:
    """Record the last moment and the clock at that moment."""
    rows.put(META, _CLOCK_ROW, _MOMENT.pack(moment) + clock.encode())


def manifests_of(rows: Rows, pack: bytes) -> list[bytes]:
    """Return the row keys of the manifests that name a pack.

    :param pack: the pack's row key.
    """
    return [pack[:ID_BYTES] + bytes(key[2 * ID_BYTES :]) for key, _ in rows.starting_with(LINKS, pack)]
