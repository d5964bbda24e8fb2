"""What a ``lmdb://`` URL may set."""

from __future__ import annotations

import enum

import msgspec

from persistkv.config import parse_duration, parse_size
from persistkv.errors import ConfigurationError

DEFAULT_CAPACITY = 10 << 30  # 10 GiB
MIN_CAPACITY = 1 << 20  # 1 MiB
MAX_CAPACITY = 64 << 40  # 64 TiB: half of what a process can map on x86-64


class Placement(enum.Enum):
    """Where the payloads of new packs lie."""

    INLINE = "inline"
    """In LMDB, as values."""
    EXTENTS = "extents"
    """In segment files; LMDB says where."""


DEFAULT_PLACEMENT = Placement.EXTENTS


class Reads(enum.Enum):
    """How payloads in extents are read that the page cache does not hold already."""

    DIRECT = "direct"
    """Past it, straight into rows: at the disk's speed, and nothing else is driven out of memory."""
    CACHED = "cached"
    """Through it: what several engines of a machine promote, or one again and again, is read from a slow disk once."""


class LmdbOptions(msgspec.Struct, frozen=True):
    """Options of one open."""

    capacity: str | None = None
    """The bound on the bytes that the store takes on disk, a size such as ``100GiB``. None: what the store was opened
    with last, or 10 GiB for a new one."""

    ttl: str | None = None
    """How long what nobody uses is kept, a duration such as ``7d``. None: as long as there is room."""

    placement: Placement | None = None
    """Where the payloads of a new store lie. None: as recorded, or the default for a new one."""

    reads: Reads = Reads.DIRECT
    """How payloads are read."""

    def __post_init__(self) -> None:
        size = self.capacity_bytes
        if size is not None and not MIN_CAPACITY <= size <= MAX_CAPACITY:
            raise ConfigurationError("lmdb option capacity", self.capacity, "a size from 1MiB to 64TiB")
        _ = self.ttl_s  # raises where it is none

    @property
    def capacity_bytes(self) -> int | None:
        """``capacity`` as a number.

        :raises ConfigurationError: where it is no positive size.
        """
        return None if self.capacity is None else parse_size(self.capacity, name="lmdb option capacity")

    @property
    def ttl_s(self) -> float | None:
        """``ttl`` in seconds.

        :raises ConfigurationError: where it is no positive duration.
        """
        return None if self.ttl is None else parse_duration(self.ttl, name="lmdb option ttl")
