"""Damage to the rows and segments of an LMDB store. It bypasses the driver, which must not have the
store open."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import lmdb

from persistkv.config import PAGE_BYTES, StoreUrl
from persistkv.storage import open_backend
from persistkv.storage.catalogue.rows import SEQUENCE, manifest_row
from persistkv.storage.format.pack import PackTable
from persistkv_lmdb.layout import DATABASES
from persistkv_lmdb.payloads.inline import PIECE_BYTES
from tests.tools.contexts import Contexts

_TABLE_PREFIX = SEQUENCE.size


class Extent(NamedTuple):
    """Consecutive bytes of a segment."""

    file: Path
    offset: int
    length: int

    def flip(self, position: int) -> None:
        """Change one byte."""
        with self.file.open("r+b") as file:
            file.seek(self.offset + position)
            byte = file.read(1)[0]
            file.seek(self.offset + position)
            file.write(bytes([byte ^ 0x40]))

    def read(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)

    def write(self, data: bytes) -> None:
        with self.file.open("r+b") as file:
            file.seek(self.offset)
            file.write(data)


class Damage:
    """Damage to an LMDB store; each method damages one thing."""

    def __init__(self, url: str, namespace: bytes) -> None:
        self._location = Path(StoreUrl.parse(url).location)
        self._env = lmdb.open(
            str(self._location), max_dbs=len(DATABASES), map_size=0, create=False
        )
        self._db = {
            name: self._env.open_db(name.encode(), create=False) for name in DATABASES
        }
        self._namespace = namespace

    def __enter__(self) -> Damage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._env.close()

    def flip_payload(self, pack: bytes, position: int) -> None:
        index, offset = divmod(position, PIECE_BYTES)
        self._flip("pieces", self._namespace + pack + index.to_bytes(4, "big"), offset)

    def swap_payloads(self, one: bytes, other: bytes) -> None:
        """Swap the first pieces of two payloads."""
        names = [self._namespace + pack + bytes(4) for pack in (one, other)]
        rows = [self._get("pieces", name) for name in names]
        for name, row in zip(names, reversed(rows), strict=True):
            self._put("pieces", name, row)

    def cut_payload(self, pack: bytes, length: int) -> None:
        name = self._namespace + pack + bytes(4)
        self._put("pieces", name, self._get("pieces", name)[:length])

    def extent(self, pack: bytes) -> Extent:
        """Return the location of a payload that has a single extent."""
        row = self._get("extents", self._namespace + pack)
        assert len(row) == 12
        first = int.from_bytes(row[4:8], "little") * PAGE_BYTES
        length = int.from_bytes(row[8:], "little") * PAGE_BYTES
        number = int.from_bytes(row[:4], "little")
        return Extent(self._location / "segments" / f"{number:08d}.seg", first, length)

    def stale_extent(self, pack: bytes, other: bytes) -> None:
        """Make the catalogue point to the extent of another payload."""
        self._put(
            "extents",
            self._namespace + pack,
            self._get("extents", self._namespace + other),
        )

    def drop_payload(self, pack: bytes) -> None:
        with self._env.begin(write=True) as txn:
            txn.delete(self._namespace + pack + bytes(4), db=self._db["pieces"])

    def change_key(self, pack: bytes) -> None:
        """Change a key in the table, and update the table's checksum."""
        name = self._namespace + pack
        row = self._get("packs", name)
        table = PackTable.parse(row[_TABLE_PREFIX:])
        data = bytes([table.keys.data[0] ^ 1]) + table.keys.data[1:]
        changed = PackTable(
            table.namespace,
            table.pack_id,
            table.codec,
            table.payload_length,
            table.raw_length,
            table.packed_frames,
            type(table.keys)(data, table.keys.key_length, table.keys.lengths),
        )
        self._put("packs", name, row[:_TABLE_PREFIX] + changed.encode())

    def flip_table(self, pack: bytes, position: int) -> None:
        self._flip("packs", self._namespace + pack, _TABLE_PREFIX + position)

    def misplace_table(self, pack: bytes, other: bytes) -> None:
        """Overwrite the table of ``pack`` with the table of ``other``."""
        self._put(
            "packs", self._namespace + pack, self._get("packs", self._namespace + other)
        )

    def flip_head(self, request: str, position: int) -> None:
        self._flip("manifests", manifest_row(self._namespace, request), position)

    def flip_keys(self, request: str, position: int) -> None:
        self._flip("manifest_keys", manifest_row(self._namespace, request), position)

    def _flip(self, db: str, name: bytes, position: int) -> None:
        row = bytearray(self._get(db, name))
        row[position] ^= 0x40
        self._put(db, name, bytes(row))

    def _get(self, db: str, name: bytes) -> bytes:
        with self._env.begin() as txn:
            row = txn.get(name, db=self._db[db])
        assert row is not None
        return row

    def _put(self, db: str, name: bytes, row: bytes) -> None:
        with self._env.begin(write=True) as txn:
            txn.put(name, row, db=self._db[db])


def store_with_a_bad_pack(url: str) -> bytes:
    """Make a store of requests ``one`` and ``two``, the pack of ``one`` with a flipped byte; return
    this pack's id."""
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend)
        writer.add("one", "a b")
        writer.add("two", "c d")
    with Damage(url, writer.namespace) as damage:
        damage.flip_payload(writer.packs["one"], 5000)
    return writer.packs["one"]
