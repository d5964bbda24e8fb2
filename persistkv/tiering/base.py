"""The contract of a secondary tier: anything behind the primary tier's rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from persistkv.base import OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext
from persistkv.config import OffloadingConfig


@dataclass(frozen=True)
class JobMetadata:
    """Blocks to be moved between rows and a tier, in one job."""

    job_id: int
    """Unique within the manager."""
    keys: Sequence[OffloadKey]
    """Of one or more KV cache groups."""
    block_ids: Sequence[int]
    """For each key, its row."""
    is_promotion: bool
    """True: the tier fills the rows; False: it reads them."""
    req_context: ReqContext
    """The request that it is for."""


@dataclass(frozen=True)
class JobResult:
    """The rows of a job are no longer used by the tier."""

    job_id: int
    success: bool
    """Store: the bytes were taken, which says nothing of durability. Load: the rows hold what was asked for."""
    failed_keys: Collection[OffloadKey] = ()
    """Of a job with ``success``, the keys it does not hold for. Without ``success`` it holds for none."""
    num_bytes: int = field(default=0, compare=False)
    """Raw bytes that were moved, as far as the tier knows."""
    seconds: float = field(default=0.0, compare=False)
    """From the submission to the end, likewise."""


class SecondaryTierManager(ABC):
    """One tier.

    Called from the scheduler's thread; nothing here waits for I/O, the network, or a lock held over them, but
    ``drain_jobs`` and ``shutdown``. **Every submitted job gets exactly one result**, also one with nothing to do, also
    when the medium failed. Rows of a store job are the tier's to read, those of a load job its to write, from the
    submission until the result has been handed over.
    """

    def __init__(self, config: OffloadingConfig, primary_kv_view: memoryview) -> None:
        """Open the tier. May wait; what cannot be opened raises, and leaves nothing behind.

        :param primary_kv_view: the primary tier's rows, (num_blocks, row_stride) bytes, writable.
        """
        self.config = config
        self.primary_kv_view = primary_kv_view

    @staticmethod
    @abstractmethod
    def get_tier_type() -> str:
        """The name that configurations and metrics use."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Whether a load of the block may succeed; None: ask again in a later step. Must cost about a microsecond."""

    @abstractmethod
    def submit_store(self, job: JobMetadata) -> None:
        """Take blocks out of their rows. Does not raise for what the medium does: that is in the result."""

    @abstractmethod
    def submit_load(self, job: JobMetadata) -> None:
        """Fill rows. Does not raise for what the medium does: that is in the result. What a row of a failed key holds
        afterwards is undefined.
        """

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that ended since the last call, each once. Called once a step."""

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """The blocks were used. Keys that are not held are passed over."""

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Learn of a request before its first lookup, and say which of its blocks the tier wants."""

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """The request's last store was submitted."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that came to the tier (durably, where it is durable) or left it since the last call."""
        return ()

    def reset_cache(self, weights_changed: bool) -> None:  # noqa: B027
        """The engine forgot what it had. With changed weights, what is held under the old ones misses from now on."""

    def has_pending_work(self) -> bool:
        """Whether the engine should go on taking steps although no request runs."""
        return False

    @abstractmethod
    def drain_jobs(self, timeout_s: float) -> bool:
        """Wait until every submitted job has a result to be handed over; False where the time was too short."""

    def shutdown(self) -> None:  # noqa: B027
        """Touch no row any more and release what is held; idempotent. Jobs without a result get none."""
