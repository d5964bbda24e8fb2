"""Eviction order of packs and manifests.

1. A batch that uses anything is one moment, even if it takes several transactions. A pack is listed at the moment of
   its last use, a manifest at the moment at which it was written. At the same moment, packs of unknown depth precede
   all others, deeper packs precede shallower ones, and manifests are last.
2. A request uses its whole chain at one moment, so a pack is never listed before the packs that depend on it.
3. The time of a use, on the store's clock, is greater than that of every use at an earlier moment. Therefore the order
   by moment is also the order by time.

Readers skip entries of ``ORDER`` that are duplicate or wrong because of damage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from persistkv.storage.catalog.clock import Reading
from persistkv.storage.catalog.records import MANIFEST, ORDER_KEY, Chain, Use, read_clock, write_clock
from persistkv.storage.catalog.rows import CHAINS, ORDER, USES, Rows
from persistkv.storage.format.pack import ID_BYTES

_SKEW_S = 1.0  # seconds: a larger change of ``StoreClock.skew`` is recorded
_MAX_PINS = (1 << 32) - 1


class Candidate(NamedTuple):
    """A pack or manifest that may be evicted."""

    name: bytes
    """Namespace and pack id, or namespace and digest of the manifest's id."""
    is_manifest: bool
    time: float
    """Last use on the store's clock: seconds since the epoch."""

    @property
    def namespace(self) -> bytes:
        """Id of the namespace, 16 bytes."""
        return self.name[:ID_BYTES]


class EvictionOrder:
    """The eviction order within one write transaction."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        moment, before = read_clock(rows)
        self.moment = moment + 1
        clock = before.advanced(Reading.now())
        self._clock = clock._replace(time=max(clock.time, math.nextafter(before.time, math.inf)))
        self._counts = False
        self._clock_changed = clock.at.boot != before.at.boot or abs(clock.skew - before.skew) > _SKEW_S
        """Whether the clock must be recorded even if the moment does not count."""

    @property
    def time(self) -> float:
        """The store's time."""
        return self._clock.time

    def add_pack(self, name: bytes, depth: int, pins: int) -> None:
        """List a new pack as used now."""
        self._put(name, Use(self.moment, self.time, depth, pins))

    def touch(self, name: bytes) -> bool:
        """Record that a pack was used now; return False if it is not listed."""
        use = self._use(name)
        if use is None:
            return False
        if (use.moment, use.time) != (self.moment, self.time):
            self._unlist(use.order_key(name))
            self._put(name, use._replace(moment=self.moment, time=self.time))
        return True

    def pin(self, name: bytes, count: int) -> None:
        """Add ``count``, which may be negative, to a pack's pins; do nothing if the pack is not held."""
        use = self._use(name)
        if use is not None:
            self._unlist(use.order_key(name))
            self._put(name, use._replace(pins=min(max(0, use.pins + count), _MAX_PINS)))

    def remove_pack(self, name: bytes) -> None:
        """Delete a pack's rows of the eviction order."""
        use = self._use(name)
        if use is not None:
            self._unlist(use.order_key(name))
            self._rows.delete(USES, name)

    def add_manifest(self, name: bytes, flags: int, packs: tuple[bytes, ...]) -> None:
        """List a new manifest as written now."""
        self._put_chain(name, Chain(self.moment, self.time, flags, packs))

    def chain(self, name: bytes) -> Chain | None:
        """Return a manifest's chain; None if it is not held or its row is damaged."""
        return Chain.decode(self._rows.get(CHAINS, name))

    def reflag(self, name: bytes, chain: Chain, flags: int) -> None:
        """Replace a manifest's flags."""
        self._unlist(chain.order_key(name))
        self._put_chain(name, chain._replace(flags=flags))

    def remove_manifest(self, name: bytes, chain: Chain) -> None:
        """Delete a manifest's rows of the eviction order."""
        self._unlist(chain.order_key(name))
        self._rows.delete(CHAINS, name)

    def oldest(self) -> Iterator[Candidate]:
        """Iterate over the candidates in eviction order. The order may change during the iteration."""
        key = b""
        while (found := self._rows.first(ORDER, key)) is not None:
            if (candidate := self._candidate(found)) is None:
                self._unlist(found)
            else:
                yield candidate
            key = found + b"\0"

    def count(self) -> None:
        """Count this transaction as a moment, so that the next one gets a new moment; otherwise both share one."""
        self._counts = True

    def finish(self) -> None:
        """Record the clock if the moment counts, or if the machine's clocks changed."""
        if self._counts or self._clock_changed:
            write_clock(self._rows, self.moment, self._clock)

    def _candidate(self, found: bytes) -> Candidate | None:
        """Return the candidate that a key of ``ORDER`` lists; None if the key is damaged or out of date."""
        if len(found) != ORDER_KEY.size:
            return None
        _, _, kind, name = ORDER_KEY.unpack(found)
        row = self.chain(name) if kind == MANIFEST else self._use(name)
        listed = row is not None and row.order_key(name) == found
        return Candidate(name, kind == MANIFEST, row.time) if row is not None and listed else None

    def _use(self, name: bytes) -> Use | None:
        return Use.decode(self._rows.get(USES, name))

    def _put(self, name: bytes, use: Use) -> None:
        self._rows.put(USES, name, use.encode())
        if not use.pins:
            self._rows.put(ORDER, use.order_key(name), b"")

    def _put_chain(self, name: bytes, chain: Chain) -> None:
        self._rows.put(CHAINS, name, chain.encode())
        if not chain.pinned:
            self._rows.put(ORDER, chain.order_key(name), b"")

    def _unlist(self, key: bytes) -> None:
        self._rows.delete(ORDER, key)
