"""The store's clock, which measures ages and ttl.

A machine's wall clock may jump: a wrong RTC at boot, an NTP step, a restored snapshot. Therefore the store has its own
clock. It starts at the wall clock's time and advances by elapsed time that two clocks confirm:

1. Since the last recorded reading on the same boot, it advances by the smaller of the times elapsed on the wall clock
   and on the clock since boot (``CLOCK_BOOTTIME``). A jump of the wall clock therefore expires nothing, in either
   direction.
2. The time between two boots is measured by the wall clock alone. It counts only after the wall clock has run steadily
   for ``CONFIRMATION_S`` on the new boot; until then, expiry treats the machine's downtime as zero.
3. It never moves backwards.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from pathlib import Path
from typing import NamedTuple

from persistkv.storage.format.codec import Buffer

logger = logging.getLogger(__name__)

CONFIRMATION_S = 3600.0  # one hour: NTP corrects a wrong RTC within minutes of a boot
_TOLERANCE_S = 60.0
_DRIFT = 0.01  # chrony and adjtime slew the wall clock by up to a few percent
_LATEST_S = float(1 << 40)  # seconds since the epoch; far beyond any clock
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROW = struct.Struct("<ddd16sdd")


class Reading(NamedTuple):
    """The machine's clocks at one moment."""

    wall: float
    """Seconds since the epoch."""
    since_boot: float
    """Seconds since boot, suspended time included."""
    boot: bytes
    """16 bytes that identify the boot."""

    @classmethod
    def now(cls) -> Reading:
        """Read the machine's clocks."""
        return cls(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), _boot())


class StoreClock(NamedTuple):
    """A recorded reading of the store's clock; see the module docstring."""

    time: float
    """The store's time, in seconds since the epoch."""
    at: Reading
    """The machine's clocks at that moment."""
    unconfirmed: float = 0.0
    """Seconds between two boots that are not counted yet."""
    unconfirmed_since: float = 0.0
    """``Reading.since_boot`` from which the confirmation of these seconds is timed."""

    @classmethod
    def starting(cls, now: Reading) -> StoreClock:
        """Return the clock of a new store."""
        return cls(now.wall, now)

    @property
    def skew(self) -> float:
        """Seconds by which the wall clock is ahead of the store's clock."""
        return self.at.wall - self.time

    def advanced(self, now: Reading) -> StoreClock:
        """Return the store's clock at a later reading of the machine's clocks."""
        wall = now.wall - self.at.wall
        if now.boot != self.at.boot or now.since_boot < self.at.since_boot:
            return StoreClock(self.time, now, max(0.0, wall), now.since_boot)
        elapsed = now.since_boot - self.at.since_boot
        unconfirmed, since = self.unconfirmed, self.unconfirmed_since
        if abs(wall - elapsed) > _TOLERANCE_S + _DRIFT * elapsed:
            logger.warning(
                "the wall clock moved by %+.0f s against the time since boot: ages and ttl follow elapsed time",
                wall - elapsed,
            )
            if unconfirmed:
                unconfirmed, since = max(0.0, unconfirmed + wall - elapsed), now.since_boot
            wall = min(wall, elapsed)
        moved = self.time + max(0.0, wall)
        if unconfirmed and now.since_boot - since >= CONFIRMATION_S:
            moved, unconfirmed = moved + unconfirmed, 0.0
        return StoreClock(moved, now, unconfirmed, since)

    def encode(self) -> bytes:
        """Return the row."""
        return _ROW.pack(
            self.time, self.at.wall, self.at.since_boot, self.at.boot, self.unconfirmed, self.unconfirmed_since
        )

    @classmethod
    def decode(cls, row: Buffer) -> StoreClock | None:
        """Return the clock of a row; None if the row is not valid."""
        if len(row) != _ROW.size:
            return None
        seconds, wall, since_boot, boot, unconfirmed, since = _ROW.unpack(row)
        values = (seconds, wall, since_boot, unconfirmed, since)
        if not all(math.isfinite(value) and 0 <= value <= _LATEST_S for value in values):
            return None
        return cls(seconds, Reading(wall, since_boot, boot), unconfirmed, since)


def _boot() -> bytes:
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))[:16]
    except (OSError, ValueError):  # no /proc: a new boot is only detected by a smaller time since boot
        return bytes(16)
