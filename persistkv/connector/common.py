"""Types exchanged between the connector's two sides and with the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from persistkv.base import TransferSpec
from persistkv.errors import ConfigurationError


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """KV cache group: layers that share one block table.

    :raises ConfigurationError: if a number is not positive.
    """

    block_size: int
    """Number of tokens in a device block."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to, including itself; None: full attention."""

    def __post_init__(self) -> None:
        expected = "a positive number of tokens"
        if self.block_size <= 0:
            raise ConfigurationError("block_size", self.block_size, expected)
        window = self.sliding_window
        if window is not None and window <= 0:
            raise ConfigurationError("sliding_window", window, expected)


class TransferJob(NamedTuple):
    """A transfer planned by the scheduler and run by the worker."""

    job_id: int
    """Unique within a scheduler."""
    spec: TransferSpec
    """Source and destination."""


@dataclass(frozen=True)
class ConnectorMetadata:
    """Transfers that the worker must start in this step, loads first."""

    loads: Sequence[TransferJob] = ()
    """Transfers from the primary tier to the device; requests wait for them."""
    stores: Sequence[TransferJob] = ()
    """Transfers from the device to the primary tier."""


@dataclass(frozen=True)
class LoadProgress:
    """Result of a request's load."""

    success: bool
    """False: the content of the device blocks is undefined, and the tokens must be computed."""
    num_tokens: int
    """Number of tokens that the load was to fill, also if it failed."""
    num_bytes: int
    """Bytes copied; 0 if the load failed."""


@dataclass
class ConnectorOutput:
    """Results of a step's finished transfers for the engine."""

    loads: dict[str, LoadProgress] = field(default_factory=dict)
    """Result of each load that ended, by request id."""
    released: list[str] = field(default_factory=list)
    """Ids of finished requests whose last transfer ended; their device blocks may be reused."""


@dataclass
class ConnectorStats:
    """Counters of one ``OffloadingConnectorScheduler`` since its creation."""

    stored_blocks: int = 0
    """Offloaded blocks whose store succeeded."""
    dropped_blocks: int = 0
    """Offloaded blocks that were not stored because the primary tier had no room for them, without
    those that are offered again."""
    failed_stores: int = 0
    """Store jobs that failed."""
    loaded_blocks: int = 0
    """Offloaded blocks whose load succeeded."""
    failed_loads: int = 0
    """Loads that failed, and loads that were not started because their blocks had been evicted
    since the match."""
    late_lookups: int = 0
    """Requests for which ``give_up_waiting`` was called."""
