"""What passes between the connector's two sides, and from it to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from persistkv.base import TransferSpec
from persistkv.errors import ConfigurationError


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    :raises ConfigurationError: where a number is not positive.
    """

    block_size: int
    """Tokens in a device block."""
    sliding_window: int | None = None
    """Tokens that a token attends to, itself included; None: all before it."""

    def __post_init__(self) -> None:
        for name in ("block_size", "sliding_window"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(name, value, "a positive number of tokens")


class TransferJob(NamedTuple):
    """One transfer that the scheduler planned and the worker is to run."""

    job_id: int
    """Unique within a scheduler."""
    spec: TransferSpec
    """Source and destination."""


@dataclass(frozen=True)
class ConnectorMetadata:
    """What the worker is to start in this step."""

    loads: Sequence[TransferJob] = ()
    """Primary tier to device; somebody waits for them."""
    stores: Sequence[TransferJob] = ()
    """Device to primary tier."""


@dataclass(frozen=True)
class LoadProgress:
    """How a request's load ended."""

    success: bool
    """False: what the device blocks hold is undefined, and the tokens are to be computed."""
    num_tokens: int
    """Tokens that the load covered."""
    num_bytes: int
    """Bytes moved; 0 where it failed."""


@dataclass
class ConnectorOutput:
    """What a step's finished transfers mean to the engine."""

    loads: dict[str, LoadProgress] = field(default_factory=dict)
    """Requests whose load ended, by id."""
    released: list[str] = field(default_factory=list)
    """Finished requests whose last transfer ended: their device blocks may be reused."""


@dataclass
class ConnectorStats:
    """Totals since the scheduler was made."""

    stored_blocks: int = 0
    """Offloaded blocks whose store ended well."""
    dropped_blocks: int = 0
    """Offloaded blocks that were not stored because the primary tier had no room for them."""
    failed_stores: int = 0
    """Store jobs that failed."""
    loaded_blocks: int = 0
    """Offloaded blocks whose load ended well."""
    failed_loads: int = 0
    """Load jobs that failed, and prefixes that were gone when they were to be loaded."""
    late_lookups: int = 0
    """Requests that stopped waiting for blocks on their way."""
