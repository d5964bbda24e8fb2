"""The eviction order: what was used last, and what is evicted next.

1. A batch that uses anything is one moment, however many transactions are made for it. A pack is listed at the moment
   of its last use, a manifest at the moment at which it was written. At the same moment deeper packs come first, packs
   of unknown depth before all, and manifests last.
2. A request uses its whole chain at once, so a pack is never listed before those that depend on it.
3. The time of a use, on the store's clock, is greater than that of every use at an earlier moment: the order by moment
   is the order by time.

Whoever reads ``ORDER`` passes over what damage has listed twice or wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from persistkv.storage.catalog.clock import Reading
from persistkv.storage.catalog.records import MANIFEST, ORDER_KEY, Chain, Use, read_clock, write_clock
from persistkv.storage.catalog.rows import CHAINS, ORDER, USES, Rows
from persistkv.storage.pack import ID_BYTES

_SKEW_S = 1.0  # change of ``StoreClock.skew`` from which on a reading is recorded
_MAX_PINS = (1 << 32) - 1


class Candidate(NamedTuple):
    """Something that may be evicted."""

    name: bytes
    """Namespace and pack id, or namespace and digest of the manifest's id."""
    is_manifest: bool
    time: float
    """Seconds since the epoch when it was used last."""

    @property
    def namespace(self) -> bytes:
        """16 bytes."""
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
        """Whether the clock must be recorded although the moment does not count."""

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
        """Add to a pack's pins; does nothing if it is not held."""
        use = self._use(name)
        if use is not None:
            self._unlist(use.order_key(name))
            self._put(name, use._replace(pins=min(max(0, use.pins + count), _MAX_PINS)))

    def remove_pack(self, name: bytes) -> None:
        """Forget a pack."""
        use = self._use(name)
        if use is not None:
            self._unlist(use.order_key(name))
            self._rows.delete(USES, name)

    def add_manifest(self, name: bytes, flags: int, packs: tuple[bytes, ...]) -> None:
        """List a new manifest as used now."""
        self._put_chain(name, Chain(self.moment, self.time, flags, packs))

    def chain(self, name: bytes) -> Chain | None:
        """Return a manifest's packs; None if it is not held."""
        return Chain.decode(self._rows.get(CHAINS, name))

    def reflag(self, name: bytes, chain: Chain, flags: int) -> None:
        """Give a manifest other flags."""
        self._unlist(chain.order_key(name))
        self._put_chain(name, chain._replace(flags=flags))

    def remove_manifest(self, name: bytes, chain: Chain) -> None:
        """Forget a manifest."""
        self._unlist(chain.order_key(name))
        self._rows.delete(CHAINS, name)

    def oldest(self) -> Iterator[Candidate]:
        """Iterate over what may be evicted, the first to be evicted first. The order may change meanwhile."""
        key = b""
        while (found := self._rows.first(ORDER, key)) is not None:
            if (candidate := self._candidate(found)) is None:
                self._unlist(found)
            else:
                yield candidate
            key = found + b"\0"

    def count(self) -> None:
        """Make this transaction a moment: the next one has another. Otherwise both have the same."""
        self._counts = True

    def finish(self) -> None:
        """Record the clock if the moment counts, or if the machine's clocks changed."""
        if self._counts or self._clock_changed:
            write_clock(self._rows, self.moment, self._clock)

    def _candidate(self, found: bytes) -> Candidate | None:
        """Return what a key of ``ORDER`` lists; None if it is damaged, or lists nothing."""
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
