"""Options of a ``lmdb://`` URL."""

from __future__ import annotations

import enum

import msgspec

from persistkv.config import parse_duration, parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage.extensions import Policy

DEFAULT_CAPACITY = 10 << 30  # 10 GiB
MIN_CAPACITY = 1 << 20  # 1 MiB
MAX_CAPACITY = 64 << 40  # 64 TiB: half of what a process can map on x86-64


class Placement(enum.Enum):
    """Where the payloads of new packs are stored."""

    INLINE = "inline"
    """In LMDB, as values."""
    EXTENTS = "extents"
    """In segment files; LMDB holds their extents."""


DEFAULT_PLACEMENT = Placement.EXTENTS


class Reads(enum.Enum):
    """How payloads in extents are read if the page cache does not hold them."""

    DIRECT = "direct"
    """With O_DIRECT, straight into rows: at the disk's speed, without displacing other pages from memory."""
    CACHED = "cached"
    """With the page cache: payloads that one or several engines promote repeatedly are read from a slow disk once."""


class LmdbOptions(msgspec.Struct, frozen=True):
    """Options of one open."""

    capacity: str | None = None
    """Bound on the bytes that a new store takes on disk, a size such as ``100GiB``. None: 10 GiB. An existing store
    keeps its recorded capacity (``persistkv set`` changes it)."""

    ttl: str | None = None
    """Time after its last use until content of a new store expires, a duration such as ``7d``. None: never. An existing
    store keeps its recorded ttl (``persistkv set`` changes it)."""

    placement: Placement | None = None
    """Where a new store puts payloads. None: ``extents``. An existing store keeps its placement."""

    reads: Reads = Reads.DIRECT
    """How payloads are read."""

    def __post_init__(self) -> None:
        size = self.capacity_bytes
        if size is not None and not MIN_CAPACITY <= size <= MAX_CAPACITY:
            raise ConfigurationError("lmdb option capacity", self.capacity, "a size from 1MiB to 64TiB")
        _ = self.ttl_s  # raises if it is invalid

    @property
    def capacity_bytes(self) -> int | None:
        """``capacity`` as a number of bytes.

        :raises ConfigurationError: it is not a positive size.
        """
        return None if self.capacity is None else parse_size(self.capacity, name="lmdb option capacity")

    @property
    def given(self) -> Policy:
        """Capacity, ttl and placement; None for options that were not given."""
        return Policy(self.capacity_bytes, self.ttl_s, None if self.placement is None else self.placement.value)

    @property
    def policy(self) -> Policy:
        """The policy of a store that is created with these options."""
        return Policy(self.capacity_bytes or DEFAULT_CAPACITY, self.ttl_s, (self.placement or DEFAULT_PLACEMENT).value)

    @property
    def ttl_s(self) -> float | None:
        """``ttl`` in seconds.

        :raises ConfigurationError: it is not a positive duration.
        """
        return None if self.ttl is None else parse_duration(self.ttl, name="lmdb option ttl")


def check_policy(policy: Policy) -> None:
    """Check the values of a policy.

    :raises ConfigurationError: a value is invalid; the error names the field, its value and the valid range.
    """
    if policy.capacity is None or not MIN_CAPACITY <= policy.capacity <= MAX_CAPACITY:
        raise ConfigurationError("capacity", policy.capacity, "a size from 1MiB to 64TiB")
