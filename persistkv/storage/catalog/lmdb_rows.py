"""Table rows in an LMDB environment: each table is a database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import lmdb

from persistkv.storage.catalog.rows import Rows
from persistkv.storage.format.codec import Buffer

if TYPE_CHECKING:
    from lmdb import _Database


class LmdbRows(Rows):
    """One running LMDB transaction. Returned buffers are valid until its next change of a row, or its end."""

    def __init__(self, txn: lmdb.Transaction[memoryview], databases: Mapping[str, _Database]) -> None:
        self.txn = txn
        self._databases = databases

    def get(self, table: str, key: bytes) -> Buffer | None:
        return self.txn.get(key, db=self._databases[table])

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        self.txn.put(key, value, db=self._databases[table])

    def put_many(self, table: str, rows: Sequence[tuple[bytes, bytes]]) -> None:
        """Write many rows at once, as ``put`` does."""
        with self.cursor(table) as cursor:
            cursor.putmulti(rows)

    def delete(self, table: str, key: bytes) -> bool:
        return self.txn.delete(key, db=self._databases[table])

    def range(self, table: str, start: bytes) -> Iterator[tuple[Buffer, Buffer]]:
        cursor = self.cursor(table)
        if cursor.set_range(start):
            yield from cursor.iternext()

    def first(self, table: str, start: bytes) -> bytes | None:
        """As in ``Rows``. No cursor stays open, so the caller may change rows next."""
        with self.cursor(table) as cursor:
            return bytes(cursor.key()) if cursor.set_range(start) else None

    def cursor(self, table: str) -> lmdb.Cursor[memoryview]:
        return self.txn.cursor(self._databases[table])

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        return int(self.txn.stat(self._databases[table])["entries"])
