"""Contract of a secondary tier: any store of blocks behind the rows of the primary tier."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from persistkv.base import (
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from persistkv.config import OffloadingConfig
from persistkv.tiering.load_cost import LoadDecision


@dataclass(frozen=True)
class JobMetadata:
    """A job of a secondary tier: blocks to copy between rows of the primary tier and the tier."""

    job_id: int
    """Unique within the manager."""
    keys: Sequence[OffloadKey]
    """Keys of the blocks, of one or more KV cache groups. May be empty."""
    block_ids: npt.NDArray[np.int64]
    """For each key, the number of its row in the primary tier; int64, shape (number of keys,)."""
    is_promotion: bool
    """True: a load, which fills the rows; False: a store, which reads them."""
    req_context: ReqContext
    """The request to which the job belongs."""
    deadline: float | None = None
    """``time.monotonic`` time at which the blocks of a load fail that are not being read yet; None:
    no deadline."""
    decision: LoadDecision | None = None
    """Why the request loads; None: a store, or a load that was not compared with computing."""


@dataclass(frozen=True)
class JobResult:
    """Result of a job. The tier no longer uses the rows of the job."""

    job_id: int
    success: bool
    """True: except for ``failed_keys``, the tier accepted the blocks of a store, durable or not, or
    filled the rows of a load. False: all keys have failed."""
    failed_keys: Collection[OffloadKey] = ()
    """Keys that failed although ``success`` is True. If ``success`` is False, all keys have
    failed."""
    num_bytes: int = field(default=0, compare=False)
    """Raw bytes of the blocks that were stored or loaded; 0 if the tier does not count them."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds from the submission to the end of the job; 0 if the tier does not measure it."""
    is_late: bool = field(default=False, compare=False)
    """Whether blocks of a load failed because its deadline had passed."""


class SecondaryTierManager(ABC):
    """Interface of one secondary tier.

    Called from the scheduler's thread. Except for ``drain_jobs`` and ``shutdown``, no call waits
    for I/O, the network, or a lock that is held during I/O. **Every submitted job gets exactly one
    result**, including empty jobs and jobs whose medium failed. From the submission until
    ``get_finished_jobs`` returns the result, the tier may read the rows of a store and write the
    rows of a load.

    The manager logs the exceptions of a tier and continues with the others. Consequences of an
    exception:

    - ``submit_store`` and ``submit_load``: the job has failed. The tier must not use its rows and
      must not report it.
    - ``get_finished_jobs``: requests stop waiting for the tier's jobs. Their rows stay reserved
      until the tier reports them, and until a poll succeeds the tier gets no lookups and no jobs.
    - ``reset_cache`` for changed weights: the tier gets no lookups and no jobs until such a reset
      succeeds.
    """

    load_deadline_s: float = math.inf
    """Most seconds that a load may take; then the engine computes its blocks."""

    def __init__(self, config: OffloadingConfig, primary_kv_view: memoryview) -> None:
        """Open the tier; may wait. If it raises, all resources are released.

        :param primary_kv_view: the primary tier's rows, (num_blocks, row_stride) bytes, writable.
        """
        self.config = config
        self.primary_kv_view = primary_kv_view

    @staticmethod
    @abstractmethod
    def get_tier_type() -> str:
        """Return the name of the tier type in configurations and metrics."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return whether a load of the block may succeed; None: retry in a later step. Must take
        about 1 µs."""

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int:
        """Return the number of keys before the first one for which ``lookup`` does not return
        True."""
        count = 0
        for key in keys:
            if not self.lookup(key, req_context):
                break
            count += 1
        return count

    @abstractmethod
    def submit_store(self, job_metadata: JobMetadata) -> None:
        """Start to store the blocks that are in the job's rows. Failures of the medium are reported
        in the result."""

    @abstractmethod
    def submit_load(self, job_metadata: JobMetadata) -> None:
        """Start to load the job's blocks into its rows. Failures of the medium are reported in the
        result.

        Blocks that the tier does not hold fail; the others are loaded. The content of a failed
        key's row is undefined.
        """

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return results of the jobs that ended since the last call, once each. Called once per
        step: before rows are allocated for stores, if there are any.
        """

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:  # noqa: B027
        """Count a use of the blocks; keys that are not held are ignored."""

    def expected_load_s(self, num_bytes: int) -> float | None:
        """Return the expected seconds of a load of so many bytes that begins now, to compare them
        with those of computing; 0: not known yet; infinite: no load ends. None: load whatever it
        takes. Called a few times per request: arithmetic only.
        """
        return None

    def on_load_declined(  # noqa: B027
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        decision: LoadDecision,
    ) -> None:
        """Learn that the engine computes blocks that the tier holds, because their load is expected
        to take longer. The tier may find out in the background when it is fast again.

        :param keys: the first of these blocks.
        """

    def on_faster_tier(self, keys: Sequence[OffloadKey]) -> None:  # noqa: B027
        """Learn that a later tier loads blocks that this one holds, because that is expected to be
        faster. The tier may find out in the background when it is faster again.

        :param keys: the first of these blocks.
        """

    def on_load_abandoned(self, job_id: int) -> None:  # noqa: B027
        """Learn that the engine computes the blocks of a load in flight, because its deadline has
        passed. The job still needs a result, which frees its rows."""

    def on_restored(  # noqa: B027
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Learn that a request uses blocks that the tier has loaded, instead of computing them.
        Called before the request's end, at most once for each block and request."""

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Announce a request; called once, before its first lookup. Return which of its blocks the
        tier must receive to store.
        """

    def on_request_finished(self, req_context: ReqContext) -> None:  # noqa: B027
        """End a request; called once, after the request's last store job was submitted."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the blocks that the tier stored (durably, if it is durable) or removed since the
        last call."""
        return ()

    def reset_cache(self, weights_changed: bool) -> None:  # noqa: B027
        """Process a reset of the engine's cache.

        :param weights_changed: True: all blocks that the tier holds or is storing must become
            misses. False: they remain valid.
        """

    def has_pending_work(self) -> bool:
        """Return whether the tier has work in progress that needs engine steps even if no request
        runs."""
        return False

    @abstractmethod
    def drain_jobs(self, timeout_s: float) -> bool:
        """Wait until every submitted job has a result, which the next ``get_finished_jobs``
        returns.

        :returns: False if a job has no result after ``timeout_s`` seconds; it continues.
        """

    def shutdown(self) -> None:  # noqa: B027
        """Stop using rows and release all resources; idempotent. Jobs without a result get none."""
