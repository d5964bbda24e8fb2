"""Moving a store's payloads from one placement to the other, while engines use it.

1. The recorded placement changes first: what is new goes to its new place, and no pack moves twice.
2. Each transaction moves a few packs, bytes as they are. Catalogue, order of eviction and totals do not change. What a
   killed move leaves needs no repair; another one moves the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from persistkv.config import PAGE_BYTES
from persistkv.errors import StoreFullError
from persistkv.storage.backend import MoveProgress
from persistkv_lmdb.environment import Environment
from persistkv_lmdb.layout import Transaction, pack_table, rows, used_bytes, write_placement
from persistkv_lmdb.options import Placement
from persistkv_lmdb.payload import Payloads
from persistkv_lmdb.pieces import delete_pieces, page_bytes, stored_pieces
from persistkv_lmdb.room import Amount, Room
from persistkv_lmdb.shares import LOCK_FILE_BYTES
from persistkv_lmdb.space import read_extents

_STEP_BYTES = 16 << 20  # 16 MiB: what a transaction moves, tens of milliseconds
_ROWS_BYTES = 8 << 10  # 8 KiB: pages of the catalogue that a pack's move may add
_ATTEMPTS = 4
_PATIENCE_S = 5.0
_TURN_S = 0.01  # between steps: who waits for the lock looks every 5 ms, and would hardly ever find it free


class Mover:
    """One move. Used once."""

    def __init__(self, environment: Environment, to: Placement) -> None:
        self._environment = environment
        self._to = to

    def run(self) -> Iterator[MoveProgress]:
        """Move all packs, a few at each step.

        :raises StoreFullError: the capacity has no room for it: before anything moved, or because others took it
            meanwhile. What was moved stays so, and the rest can be moved later.
        """
        self._switch()
        waiting = self._waiting()
        total = sum(length for _, length in waiting)
        moved = 0
        yield MoveProgress(0, total)
        while waiting:
            step = [waiting.pop()]
            while waiting and sum(length for _, length in step) + waiting[-1][1] <= _STEP_BYTES:
                step.append(waiting.pop())
            self._move(step)
            moved += sum(length for _, length in step)
            time.sleep(_TURN_S)
            yield MoveProgress(moved, total)
        self._end()

    def _switch(self) -> None:
        """Record the placement, where there is room for all that is to move."""
        environment = self._environment
        with environment.transaction(write=True) as transaction:
            payloads = environment.payloads(transaction)
            if environment.placement is self._to:
                payloads.finish()
                return
            lengths = [length for _, length in _elsewhere(transaction, self._to)]
            if self._to is Placement.EXTENTS:
                catalogue = self._check_extents(payloads, sum(lengths))
            else:
                catalogue = self._check_inline(transaction, payloads, lengths)
            write_placement(transaction, self._to, catalogue)
            payloads.finish()

    def _check_extents(self, payloads: Payloads, need: int) -> int:
        """What ``data.mdb``, which does not shrink, may have beside the extents: what it has, and room to delete it."""
        environment = self._environment
        held = environment.file_bytes()
        catalogue = environment.catalogue_with(held)
        room = environment.capacity - LOCK_FILE_BYTES - catalogue - payloads.space.used * PAGE_BYTES
        if need > room:
            self._refuse(need, room, f"data.mdb keeps its {held} bytes")
        return catalogue

    def _check_inline(self, transaction: Transaction, payloads: Payloads, lengths: list[int]) -> int:
        environment = self._environment
        payloads.shrink(0)
        whole = environment.capacity - LOCK_FILE_BYTES - environment.headroom_bytes() - used_bytes(transaction)
        need = sum(map(page_bytes, lengths))
        if need > whole:
            self._refuse(need, whole, "pages of LMDB have headers, and some stay free for deletions")
        least = 4 * page_bytes(max(lengths, default=0))  # a step, and what the two before it freed
        at_once = whole - payloads.space.total * PAGE_BYTES
        if least > at_once:
            self._refuse(least, at_once, "segments give back what they have only as packs leave them")
        return 0

    def _refuse(self, need: int, room: int, why: str) -> None:
        path, capacity = self._environment.path, self._environment.capacity
        raise StoreFullError(
            f"{path}: moving needs {need} bytes, a capacity of {capacity} leaves {max(0, room)} ({why}): "
            f"move it with capacity={capacity + need - room} or more"
        )

    def _waiting(self) -> list[tuple[bytes, int]]:
        """Names of packs that lie elsewhere, with their bytes; those at the end of the segments last, to move first."""
        with self._environment.transaction() as transaction:
            found = list(_elsewhere(transaction, self._to))
            if self._to is Placement.INLINE:
                found.sort(key=lambda pack: max(read_extents(transaction, pack[0]) or [], default=()))
        return found

    def _move(self, step: list[tuple[bytes, int]]) -> None:
        """Move some packs; one by one where they do not fit together."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._try(step)
            except StoreFullError:
                if len(step) > 1:
                    for pack in step:
                        self._move([pack])
                    return None
                if attempt == _ATTEMPTS - 1:
                    raise
                self._settle()
        return None

    def _settle(self) -> None:
        """Wait until what was freed is free."""
        environment = self._environment
        environment.wait_for_readers(environment.age(), _PATIENCE_S)
        environment.age()
        self._end()

    def _try(self, step: list[tuple[bytes, int]]) -> None:
        environment = self._environment
        freed = 0
        with environment.transaction(write=True) as transaction:
            payloads = environment.payloads(transaction)
            room = Room(environment, transaction, payloads)
            rows_bytes = _ROWS_BYTES * len(step)
            length = sum(length for _, length in step)
            if self._to is Placement.EXTENTS:
                room.check(Amount(rows_bytes, length))
            else:
                room.check(Amount(rows_bytes + sum(page_bytes(length) for _, length in step), 0))
            for name, length in step:
                if self._to is Placement.EXTENTS:
                    freed += _move_to_extents(transaction, payloads, name, length)
                else:
                    self._move_inline(transaction, payloads, name, length)
            payloads.finish()
            environment.note_freed(transaction, freed)

    def _move_inline(self, transaction: Transaction, payloads: Payloads, name: bytes, length: int) -> None:
        extents = read_extents(transaction, name)
        if extents is None:  # it went, and may have come again
            return
        payload = memoryview(bytearray(length))
        if self._environment.files.read(extents, 0, [payload]):
            payloads.space.retire(name)
            payloads.write(name, iter([payload]), length)

    def _end(self) -> None:
        """A transaction that cuts the files to what is recorded."""
        for _ in range(2):
            with self._environment.transaction(write=True) as transaction:
                self._environment.payloads(transaction).finish()


def _move_to_extents(transaction: Transaction, payloads: Payloads, name: bytes, length: int) -> int:
    """Bytes that left LMDB: none where the pack went meanwhile, or is damaged."""
    if sum(map(len, stored_pieces(transaction, name))) != length or not length:
        return 0
    payloads.write(name, stored_pieces(transaction, name), length)
    delete_pieces(transaction, name)
    return length


def _elsewhere(transaction: Transaction, to: Placement) -> Iterator[tuple[bytes, int]]:
    """Names and payload bytes of the packs that do not lie where they should."""
    for key, row in rows(transaction, transaction.db.packs, b""):
        name = bytes(key)
        in_extents = transaction.txn.get(name, db=transaction.db.extents) is not None
        table = pack_table(name, row)
        if table is not None and in_extents != (to is Placement.EXTENTS):
            yield name, table.payload_length
