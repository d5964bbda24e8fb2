"""Eviction order of packs and manifests, and the store's clock, which measures ages and ttl.

The package's docstring has the rules of the order. A batch that uses anything is one moment, even
if it takes several transactions. The time of a use, on the store's clock, is greater than that of
every use at an earlier moment: the order by moment is also the order by time, within each priority.
Manifests with a ttl of their own are also listed in the table ``EXPIRIES``. Readers of the table
``ORDER`` skip entries that are duplicate or wrong because of damage.

A machine's wall clock may jump: a wrong RTC at boot, an NTP step, a restored snapshot. Therefore
the store has its own clock. It starts at the wall clock's time and advances by elapsed time that
two clocks confirm:

1. On the same boot, it advances with the wall clock. If the wall clock jumps, which a difference of
   more than one minute and 1 % from the clock since boot (``CLOCK_BOOTTIME``) shows, it advances by
   the smaller of the times elapsed on the two clocks. A jump therefore expires nothing, in either
   direction.
2. The time between two boots is measured by the wall clock alone. It counts only after the wall
   clock has run steadily for ``CONFIRMATION_S`` on the new boot; until then, expiry treats the
   machine's downtime as zero.
3. It never moves backwards.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from persistkv.errors import CorruptStoreError
from persistkv.storage.catalogue.rows import (
    CHAINS,
    EXPIRIES,
    EXPIRY_KEY,
    MANIFEST,
    MAX_COUNT,
    META,
    NAME_BYTES,
    NO_PRIORITY,
    ORDER,
    ORDER_KEY,
    TENANT_ORDER,
    USES,
    Chain,
    TableRows,
    Use,
)
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import ID_BYTES
from persistkv.tenants import DEFAULT_TENANT

logger = logging.getLogger(__name__)

# one hour after a boot, the wall clock counts as right: NTP corrects a wrong RTC within minutes
CONFIRMATION_S = 3600.0
# the wall clock jumped if it differs by more than this and _DRIFT from the clock since boot
_TOLERANCE_S = 60.0
# seconds per elapsed second: chrony and adjtime slew the wall clock by up to a few percent
_DRIFT = 0.01
_LATEST_S = float(1 << 40)  # seconds; a larger number in the clock's row is damage
_SKEW_S = 1.0  # seconds: a larger change of ``StoreClock.skew`` is recorded
_MAX_PINS = (1 << 32) - 1  # largest ``Use.pins``, which is recorded in 32 bits
# for ``TimedOrder``: a moment is a microsecond
_MOMENTS_PER_S = 1_000_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOCK_ROW = b"clock"
# row of the clock: number of the last moment, ``StoreClock.time``, the fields of ``Reading``, the
# other fields of ``StoreClock``
_CLOCK = struct.Struct("<Qddd16sdd")


class Reading(NamedTuple):
    """The machine's clocks at one moment."""

    wall: float  # seconds since the epoch
    since_boot: float  # seconds, suspended time included
    boot: bytes  # 16 bytes that identify the boot

    @classmethod
    def now(cls) -> Reading:
        """Read the clocks."""
        wall = time.time()
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        return cls(wall, since_boot, _boot())


class StoreClock(NamedTuple):
    """A recorded reading of the store's own clock, which measures ages and ttl and ignores jumps of
    the wall clock. The time between two boots is *unconfirmed* until the wall clock has run
    steadily for a while."""

    time: float  # time of the store at the reading: seconds since the epoch
    at: Reading
    """The machine's clocks at the reading."""
    unconfirmed_s: float = 0.0
    """Seconds between two boots that ``time`` does not include, because the wall clock has not
    confirmed them yet."""
    confirming_since: float = 0.0
    """``Reading.since_boot`` at which the confirmation of ``unconfirmed_s`` began."""

    @property
    def skew(self) -> float:
        """Seconds by which the wall clock is ahead of the store's clock."""
        return self.at.wall - self.time

    def advanced(self, now: Reading) -> StoreClock:
        """Return the store's clock at a later reading of the machine's clocks.

        If the wall clock jumped against the time since boot, log a warning, and advance by the
        smaller of the two elapsed times.
        """
        has_same_boot_id = now.boot == self.at.boot
        # compare the times since boot, too, because all boots have the same id without /proc
        if not has_same_boot_id or now.since_boot < self.at.since_boot:
            return self._after_boot(now)
        wall_s = now.wall - self.at.wall  # negative if the wall clock was set back
        since_boot_s = now.since_boot - self.at.since_boot
        jump_s = wall_s - since_boot_s
        has_jumped = abs(jump_s) > _TOLERANCE_S + _DRIFT * since_boot_s
        elapsed_s = min(wall_s, since_boot_s) if has_jumped else wall_s
        time = self.time + max(0.0, elapsed_s)
        clock = self._replace(time=time, at=now)
        if has_jumped:
            logger.warning(
                "the wall clock moved by %+.0f s against the time since boot: ages and ttl "
                "follow elapsed time",
                jump_s,
            )
            clock = clock._corrected_by(jump_s)
        return clock._confirmed()

    def _corrected_by(self, jump_s: float) -> StoreClock:
        """Return this clock with its unconfirmed time corrected by a jump of the wall clock, which
        has measured this time. The result must be confirmed again."""
        if not self.unconfirmed_s:
            return self
        unconfirmed_s = max(0.0, self.unconfirmed_s + jump_s)
        return self._replace(
            unconfirmed_s=unconfirmed_s,
            confirming_since=self.at.since_boot,
        )

    def _confirmed(self) -> StoreClock:
        """Return this clock with its unconfirmed time included, if the wall clock has run steadily
        for ``CONFIRMATION_S``."""
        steady_s = self.at.since_boot - self.confirming_since
        if not self.unconfirmed_s or steady_s < CONFIRMATION_S:
            return self
        time = self.time + self.unconfirmed_s
        return self._replace(time=time, unconfirmed_s=0.0)

    def _after_boot(self, now: Reading) -> StoreClock:
        """Return the store's clock at the first reading after a boot.

        Only the wall clock has measured the time between the boots, and it may be wrong: the
        store's clock excludes it until ``CONFIRMATION_S`` of steady running. An earlier unconfirmed
        time is dropped.
        """
        downtime_s = max(0.0, now.wall - self.at.wall)
        return StoreClock(
            self.time,
            now,
            unconfirmed_s=downtime_s,
            confirming_since=now.since_boot,
        )


@cache  # the file cannot change while this process runs
def _boot() -> bytes:
    """Return 16 bytes that identify the present boot."""
    try:
        text = _BOOT_ID.read_text().strip()
        return bytes.fromhex(text.replace("-", ""))[:16]
    except (OSError, ValueError):
        # without /proc, all boots have the same id
        return bytes(16)


def read_clock(rows: TableRows) -> tuple[int, StoreClock]:
    """Return the number of the last moment (batch that used a pack or manifest) and the clock at
    that moment; in a new store 0 and the present time.

    :raises CorruptStoreError: the row is damaged, so the number of the next moment is unknown.
    """
    encoded = rows.get(META, _CLOCK_ROW)
    if encoded is None:
        now = Reading.now()
        return 0, StoreClock(now.wall, now)
    if len(encoded) != _CLOCK.size:
        raise _unreadable_clock(encoded)
    moment, time, wall, since_boot, boot, *confirmation = _CLOCK.unpack(encoded)
    # ``confirmation`` has the fields ``unconfirmed_s`` and ``confirming_since``
    clock = StoreClock(time, Reading(wall, since_boot, boot), *confirmation)
    if moment > MAX_COUNT:
        raise _unreadable_clock(encoded)
    for seconds in (time, wall, since_boot, *confirmation):
        # compare with ``not … <=``, which also refuses NaN
        if not 0 <= seconds <= _LATEST_S:
            raise _unreadable_clock(encoded)
    return moment, clock


def _unreadable_clock(row: Buffer) -> CorruptStoreError:
    return CorruptStoreError(f"unreadable clock: {bytes(row).hex()}")


def write_clock(
    rows: TableRows,
    moment: int,
    clock: StoreClock,
) -> None:
    """Record the number of the last moment and the clock at that moment."""
    row = _CLOCK.pack(
        moment,
        clock.time,
        *clock.at,
        clock.unconfirmed_s,
        clock.confirming_since,
    )
    rows.put(META, _CLOCK_ROW, row)


def _expiring(rows: TableRows, entry: bytes) -> Chain | None:
    """Return the chain of the manifest that a key of ``EXPIRIES`` lists; None if the key is damaged
    or out of date."""
    name = entry[-NAME_BYTES:]
    chain = Chain.decode(rows.get(CHAINS, name))
    if chain is None or chain.ttl_s <= 0:
        return None
    # a key with another time than the chain's comes from damage
    expected = EXPIRY_KEY.pack(chain.expires, name)
    return chain if entry == expected else None


def _expiry(
    rows: TableRows,
    name: bytes,
    chain: Chain,
) -> float:
    """Return the time at which a manifest expires, unless it is used again: its ttl after the last
    use of its last pack, or ``chain.expires`` if this use is unknown.

    :param name: key of the row with the chain.
    """
    # a manifest without packs is used only when it is written, and ``expires`` counts from then
    if not chain.packs:
        return chain.expires
    namespace = name[:ID_BYTES]
    last_pack = namespace + chain.packs[-1]
    use = Use.decode(rows.get(USES, last_pack))
    if use is None:
        return chain.expires
    return max(chain.expires, use.time + chain.ttl_s)


def _entries(
    name: bytes,
    row: Use | Chain,
) -> Iterator[tuple[str, bytes]]:
    """Yield (table, key) for each entry that lists the pack or manifest with the key ``name`` and
    the row ``row``."""
    if isinstance(row, Chain) and row.ttl_s:
        yield EXPIRIES, EXPIRY_KEY.pack(row.expires, name)
    # pinned packs and manifests are no candidates for an eviction
    if row.pinned:
        return
    order_key = row.order_key(name)
    yield ORDER, order_key
    if row.tenant:
        yield TENANT_ORDER, row.tenant + order_key


class EvictionOrder:
    """The eviction order within one write transaction, which is one moment. A *name* is the key of
    a pack's row in ``USES``, or of a manifest's row in ``CHAINS``.

    The time of the moment is that of the store's own clock.

    :raises CorruptStoreError: the row of the clock is damaged.
    """

    def __init__(self, rows: TableRows) -> None:
        self._rows = rows
        last_moment, last_clock = read_clock(rows)
        self.moment = last_moment + 1
        """Number of this transaction's moment (see the module)."""
        clock = last_clock.advanced(Reading.now())
        # The time must be later than all recorded uses, even if the clocks show the same time as at
        # the last commit, so that the order by time is the order by moment.
        earliest = math.nextafter(last_clock.time, math.inf)
        later_time = max(clock.time, earliest)
        self._clock = clock._replace(time=later_time)
        """The store's clock in this transaction."""
        self.is_moment = False
        """Set by the caller: whether this transaction uses anything. If not, ``finish`` does not
        record ``moment``, and the next transaction gets the same number."""
        is_skewed = abs(clock.skew - last_clock.skew) > _SKEW_S
        is_rebooted = clock.at.boot != last_clock.at.boot
        self._clock_changed = is_skewed or is_rebooted
        """Whether ``finish`` must record the clock even if the transaction is no moment: readers
        need the new skew, and the next transaction the new boot."""

    @property
    def time(self) -> float:
        """The store's time in this transaction: seconds since the epoch, later than every recorded
        use."""
        return self._clock.time

    def add_pack(
        self,
        name: bytes,
        depth: int,
        pins: int,
        priority: int,
        tenant: str,
    ) -> None:
        """List a new pack of a tenant as used now. ``depth``, ``pins`` and ``priority`` are the
        fields of its ``Use``."""
        digest = b""
        if tenant != DEFAULT_TENANT:
            digest = self._rows.tenant_digest(tenant)
        use = Use(
            moment=self.moment,
            time=self.time,
            depth=depth,
            pins=pins,
            priority=priority,
            tenant=digest,
        )
        self.put(name, use)

    def touch(self, name: bytes, priority: int = NO_PRIORITY) -> bool:
        """Record that a pack was used now; return False if it is not listed.

        :param priority: of a manifest that names the pack now; ``NO_PRIORITY``: none does.
        """
        use = self.use(name)
        if use is None:
            return False
        updated = self._used_now(use)
        if priority > use.priority:
            updated = updated._replace(priority=priority)
        # a second touch by the same commit changes nothing
        if updated != use:
            self.put(name, updated, before=use)
        return True

    def _used_now(self, use: Use) -> Use:
        """Return the row that replaces ``use``, because the pack is used now. A recorded use is
        earlier, unless its row is damaged. In ``TimedOrder``, a recorded use may be later."""
        return use._replace(moment=self.moment, time=self.time)

    def use(self, name: bytes) -> Use | None:
        """Return a pack's last use; None if it is not held or its row is damaged."""
        return Use.decode(self._rows.get(USES, name))

    def add_pins(self, name: bytes, count: int) -> None:
        """Add ``count``, which may be negative, to a pack's ``Use.pins``."""
        use = self.use(name)
        if use is None:
            return
        # bound the number, because it may come from a damaged row, and must fit 32 bits
        pins = max(0, use.pins + count)
        pins = min(pins, _MAX_PINS)
        updated = use._replace(pins=pins)
        self.put(name, updated, before=use)

    def remove_pack(self, name: bytes) -> None:
        """Remove a pack from the order; a name that is not listed is ignored."""
        use = self.use(name)
        if use is not None:
            self._unlist(name, use)
            self._rows.delete(USES, name)

    def add_manifest(
        self,
        name: bytes,
        flags: int,
        ttl_s: float,
        packs: tuple[bytes, ...],
    ) -> Chain:
        """List a new manifest as written now; return its chain, with these flags, ttl and packs.

        :param ttl_s: seconds without a use after which the manifest expires; 0: never.
        """
        expires = self.time + ttl_s if ttl_s else 0.0
        chain = Chain(
            moment=self.moment,
            time=self.time,
            flags=flags,
            ttl_s=ttl_s,
            expires=expires,
            packs=packs,
        )
        self.put(name, chain)
        return chain

    def chain(self, name: bytes) -> Chain | None:
        """Return a manifest's chain; None if it is not held or its row is damaged."""
        return Chain.decode(self._rows.get(CHAINS, name))

    def remove_manifest(self, name: bytes, chain: Chain) -> None:
        """Remove a manifest, whose present chain is ``chain``."""
        self._unlist(name, chain)
        self._rows.delete(CHAINS, name)

    def expired(self) -> Iterator[tuple[bytes, Chain]]:
        """Iterate over the names and chains of manifests whose own ttl has passed. The caller may
        remove them meanwhile.

        List manifests that were used again under their new time of expiry, and delete damaged
        entries of ``EXPIRIES``.
        """
        rows = self._rows
        start = b""
        # search for each entry, because changes of the table would move a cursor
        while (entry := rows.first(EXPIRIES, start)) is not None:
            start = entry + b"\0"
            chain = _expiring(rows, entry)
            if chain is None:
                rows.delete(EXPIRIES, entry)
                continue
            # all further entries expire later
            if chain.expires > self.time:
                return
            name = entry[-NAME_BYTES:]
            expires = _expiry(rows, name, chain)
            if expires <= self.time:
                yield name, chain
                continue
            # a later use of its packs has delayed the expiry: list the manifest under the later
            # time
            renewed = chain._replace(expires=expires)
            self.put(name, renewed, before=chain)

    def oldest(self, low: bool | None = None) -> Iterator[tuple[bytes, Use | Chain]]:
        """Iterate over the names and rows of packs and manifests in eviction order, and delete
        damaged entries. The caller may change the order meanwhile.

        :param low: True: only candidates of low priority; False: only candidates of normal
            priority; None: all.
        """
        if low is None:
            return self._listed(ORDER)
        # keys begin with the byte 0 for low priority, with the byte 1 for normal priority
        priority_byte = b"\0" if low else b"\1"
        return self._listed(ORDER, priority_byte=priority_byte)

    def oldest_of(self, tenant: bytes) -> Iterator[tuple[bytes, Use | Chain]]:
        """Iterate over the packs of a tenant as ``oldest`` does; ``tenant`` is ``Use.tenant``."""
        return self._listed(TENANT_ORDER, tenant=tenant)

    def _listed(
        self,
        table: str,
        *,
        tenant: bytes = b"",
        priority_byte: bytes = b"",
    ) -> Iterator[tuple[bytes, Use | Chain]]:
        """Iterate over the names and rows that a table lists, and delete damaged entries.

        :param tenant: ``Use.tenant``, with which keys of ``TENANT_ORDER`` begin; empty for
            ``ORDER``.
        :param priority_byte: priority of the wanted entries, the next byte of a key; empty: any.
        """
        prefix = tenant + priority_byte
        start = prefix
        # search for each entry, because changes of the table would move a cursor
        while (entry := self._rows.first(table, start)) is not None:
            if not entry.startswith(prefix):
                return
            start = entry + b"\0"
            name = entry[-NAME_BYTES:]
            row = self._row_of(entry)
            # a key that does not match its row comes from damage
            if row is None or entry != tenant + row.order_key(name):
                self._rows.delete(table, entry)
                continue
            yield name, row

    def _row_of(self, entry: bytes) -> Use | Chain | None:
        """Return the row of the pack or manifest in a key that lists it; None if it is damaged or
        missing."""
        if len(entry) < ORDER_KEY.size:
            return None
        # a key ends with the kind (one byte) and the name
        kind = entry[-NAME_BYTES - 1]
        name = entry[-NAME_BYTES:]
        return self.chain(name) if kind == MANIFEST else self.use(name)

    def finish(self) -> None:
        """Record the clock if the transaction used anything, after a reboot, or if the skew
        changed."""
        if self.is_moment or self._clock_changed:
            write_clock(self._rows, self.moment, self._clock)

    def put(
        self,
        name: bytes,
        row: Use | Chain,
        before: Use | Chain | None = None,
    ) -> None:
        """Write the row of a pack or manifest, and list it in the tables of the order.

        :param before: its present row, under which it is listed; None: it is not listed yet.
        """
        if before is not None:
            self._unlist(name, before)
        table = USES if isinstance(row, Use) else CHAINS
        self._rows.put(table, name, row.encode())
        for listing, key in _entries(name, row):
            self._rows.put(listing, key, b"")

    def _unlist(self, name: bytes, row: Use | Chain) -> None:
        """Remove a pack or manifest from the tables that list it."""
        for listing, key in _entries(name, row):
            self._rows.delete(listing, key)


class TimedOrder(EvictionOrder):
    """The eviction order of a catalogue whose uses carry their own times and arrive in any order:
    of several uses of a pack, the latest counts. ``set_time`` sets the time of the next uses.

    It neither reads nor records the store's clock, unlike the base class. The number of a moment is
    its time in microseconds.
    """

    def __init__(self, rows: TableRows) -> None:
        self._rows = rows
        # ``finish`` records the clock if one of these is True: this order has no clock to record
        self.is_moment = False
        self._clock_changed = False
        self.set_time(0.0)

    def set_time(self, at: float) -> None:
        """Set the time of the next uses, in seconds since the epoch: ``time`` and ``moment``."""
        self.moment = int(at * _MOMENTS_PER_S)
        # this clock is never recorded: it only holds ``time``
        self._clock = StoreClock(at, Reading(at, 0.0, b""))

    @staticmethod
    def time_of(moment: int) -> float:
        """Return the end of a moment, a microsecond: seconds since the epoch."""
        return (moment + 1) / _MOMENTS_PER_S

    def _used_now(self, use: Use) -> Use:
        """Return the row with the later one of the recorded use and the use at ``time``."""
        moment = max(use.moment, self.moment)
        time = max(use.time, self.time)
        return use._replace(moment=moment, time=time)
