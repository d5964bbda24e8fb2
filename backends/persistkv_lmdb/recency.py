"""Who was used when, and who goes next: what ``order`` lists is what may be evicted, first to go first.

1. A batch that uses anything is one moment, however many transactions are made for it. A pack is listed at a place: the
   moment at which it came; a use at a later moment lists it as far behind that moment as it was listed before it
   (``Recency._place``). A manifest is listed at the moment at which it was written.
2. A place is at most twice the last moment. One that lies behind that comes from damage.
3. The time of a use, on the store's clock, is greater than that of every use at an earlier moment.

What is listed twice, or wrongly, by damage is passed over by whoever reads ``order``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from persistkv.storage.pack import ID_BYTES
from persistkv_lmdb.clock import Reading
from persistkv_lmdb.layout import MANIFEST, ORDER_KEY, Chain, Transaction, Use, read_clock, write_clock

_SKEW_S = 1.0  # change of ``StoreClock.skew`` from which on a reading is recorded
_MAX_PINS = (1 << 32) - 1


class Candidate(NamedTuple):
    """Something that may be evicted."""

    key: bytes
    """Of ``order``."""
    name: bytes
    """Namespace and pack id, or namespace and digest of the manifest's id."""
    is_manifest: bool
    time: float
    """Seconds since the epoch when it was used last."""

    @property
    def namespace(self) -> bytes:
        """16 bytes."""
        return self.name[:ID_BYTES]

    @property
    def id(self) -> bytes:
        """16 bytes."""
        return self.name[ID_BYTES:]


class Recency:
    """The order of eviction, within one write transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._txn, self._db = transaction
        moment, before = read_clock(transaction)
        self.moment = moment + 1
        clock = before.advanced(Reading.now())
        self._clock = clock._replace(time=max(clock.time, math.nextafter(before.time, math.inf)))
        self._counts = False
        self._clock_changed = clock.at.boot != before.at.boot or abs(clock.skew - before.skew) > _SKEW_S
        """Whether the clock must be recorded although the moment does not count."""

    @property
    def time(self) -> float:
        """The store's time."""
        return self._clock.time

    def add_pack(self, name: bytes, depth: int, pins: int) -> None:
        """List a new pack as used now."""
        self._put(name, Use(self.moment, self.time, depth, pins))

    def touch(self, name: bytes, at_least: int = 0) -> int:
        """The pack was used now; nothing where it is not held.

        :param at_least: a place before which it is not to be listed.
        :returns: the place at which it is listed, ``at_least`` where it is not held.
        """
        use = Use.decode(self._txn.get(name, db=self._db.uses))
        if use is None:
            return at_least
        now = use._replace(place=max(self._place(use.place), at_least), time=self.time)
        if now.place != use.place:
            self._unlist(use.order_key(name))
            self._put(name, now)
        elif now != use:
            self._txn.put(name, now.encode(), db=self._db.uses)
        return now.place

    def _place(self, listed: int) -> int:
        """Where to list what was used now: what came back after a pause is kept for as long again."""
        now = self.moment
        return max(listed, 2 * now - listed) if listed <= 2 * now else now

    def pin(self, name: bytes, count: int) -> None:
        """Add to a pack's pins; nothing where it is not held."""
        use = Use.decode(self._txn.get(name, db=self._db.uses))
        if use is not None:
            self._unlist(use.order_key(name))
            self._put(name, use._replace(pins=min(max(0, use.pins + count), _MAX_PINS)))

    def remove_pack(self, name: bytes) -> None:
        """Forget a pack."""
        use = Use.decode(self._txn.get(name, db=self._db.uses))
        if use is not None:
            self._unlist(use.order_key(name))
            self._txn.delete(name, db=self._db.uses)

    def add_manifest(self, name: bytes, flags: int, packs: tuple[bytes, ...]) -> None:
        """List a new manifest as used now."""
        self._put_chain(name, Chain(self.moment, self.time, flags, packs))

    def chain(self, name: bytes) -> Chain | None:
        """A manifest's packs; None where it is not held."""
        return Chain.decode(self._txn.get(name, db=self._db.chains))

    def reflag(self, name: bytes, chain: Chain, flags: int) -> None:
        """Give a manifest other flags."""
        self._unlist(chain.order_key(name))
        self._put_chain(name, chain._replace(flags=flags))

    def remove_manifest(self, name: bytes, chain: Chain) -> None:
        """Forget a manifest."""
        self._unlist(chain.order_key(name))
        self._txn.delete(name, db=self._db.chains)

    def oldest(self, key: bytes = b"") -> Iterator[Candidate]:
        """What may be evicted, first to go first; it may change while this runs.

        :param key: of ``order``, from which on.
        """
        while (found := self._next(key)) is not None:
            if (candidate := self._candidate(found)) is None:
                self._unlist(found)
            else:
                yield candidate
            key = found + b"\0"

    def _candidate(self, found: bytes) -> Candidate | None:
        """What a key of ``order`` lists; None for one that is damaged, or that lists nothing."""
        if len(found) != ORDER_KEY.size:
            return None
        _, _, kind, name = ORDER_KEY.unpack(found)
        row = self.chain(name) if kind == MANIFEST else Use.decode(self._txn.get(name, db=self._db.uses))
        listed = row is not None and row.order_key(name) == found
        return Candidate(found, name, kind == MANIFEST, row.time) if row is not None and listed else None

    def count(self) -> None:
        """The moment is one: the next transaction has another. Else both have the same."""
        self._counts = True

    def finish(self) -> None:
        """Record the clock if the moment counts, or if the machine's clocks changed."""
        if self._counts or self._clock_changed:
            write_clock(self._transaction, self.moment, self._clock)

    def _next(self, key: bytes) -> bytes | None:
        with self._txn.cursor(self._db.order) as cursor:
            return bytes(cursor.key()) if cursor.set_range(key) else None

    def _put(self, name: bytes, use: Use) -> None:
        self._txn.put(name, use.encode(), db=self._db.uses)
        if not use.pins:
            self._txn.put(use.order_key(name), b"", db=self._db.order)

    def _put_chain(self, name: bytes, chain: Chain) -> None:
        self._txn.put(name, chain.encode(), db=self._db.chains)
        if not chain.pinned:
            self._txn.put(chain.order_key(name), b"", db=self._db.order)

    def _unlist(self, key: bytes) -> None:
        self._txn.delete(key, db=self._db.order)
