"""In the engine's process: a persistent tier that serves and stores only KV of the weights in its
identity."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from persistkv.base import OffloadKey, ReqContext, StoredContext
from persistkv.integrations.vllm.weights.watch import WeightsWatch
from persistkv.tiering.base import JobMetadata, JobResult
from persistkv.tiering.persistent import PersistentTier

logger = logging.getLogger(__name__)

_IDLE_S = 1.0  # seconds without a step after which earlier comparisons no longer count


class _GuardedLoad(NamedTuple):
    """A load job whose result waits for a comparison of the weights."""

    ticket: int
    """Ticket of the comparison (``WeightsWatch.ask``)."""
    num_blocks: int
    """Blocks of the load."""


class GuardedTier:
    """A persistent tier that is given jobs only for KV of the weights in its identity.

    From a change of the weights on, lookups miss and jobs fail. When a request names the new
    weights, a thread shuts the tier down and opens one of their identity, which then serves.
    """

    def __init__(
        self,
        make_tier: Callable[[str | None], PersistentTier],
        watch: WeightsWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """:param make_tier: opens a tier for the weights of this name; None: those at the start of
        the engine.
        :param clock: returns seconds.
        """
        self.watch = watch
        self._clock = clock
        self._make_tier = make_tier
        named_weights = None if watch.is_initial else watch.weights
        self.tier = make_tier(named_weights)
        """The tier that was opened last: that of the present weights, unless it is detached. Must
        not be used while ``is_opening``."""
        self._epoch = watch.epoch
        """Epoch of ``tier``, or of the one that is being opened."""
        self._is_detached = False
        """Whether ``tier`` is out of use: from a change of the weights until the tier of the
        newly named weights is open."""
        self._opening: threading.Thread | None = None
        """The thread that opens a tier; set until the engine's thread has seen its end. None: no
        tier is being opened."""
        self._opened_tier: PersistentTier | None = None
        """The tier that the thread has opened, until the engine's thread takes it."""
        self._others_loaded = False
        """Whether other stores of the engine have loaded blocks while this one was not in use."""
        self._followed_at = clock()
        """Time of the last ``follow_weights``. If it is long ago, the engine has taken no step
        since."""

        # jobs that wait until the weights are known
        self._held: deque[JobMetadata | ReqContext] = deque()
        """Stores, and the ends of requests (contexts) that follow them, in their order."""
        self._loads: dict[int, _GuardedLoad] = {}
        """Load jobs that have not been reported to vLLM, by id."""
        self._ended_loads: list[JobResult] = []
        """Results of load jobs that have ended, and wait for their comparisons."""
        self._finished: list[JobResult] = []
        """Results for the next ``get_finished_jobs``."""
        self.dropped_blocks = 0
        """Blocks in flight that were not stored or not served, because the weights had changed or
        might have."""

    def follow_weights(self) -> bool:
        """Act on what the watch has noticed since the last call: detach the tier after a change,
        use the tier of newly named weights if it is open by now, and begin to open the next one.

        :returns: whether the tier is detached: lookups miss, and all jobs fail.
        """
        now = self._clock()
        has_been_idle = now - self._followed_at > _IDLE_S
        self._followed_at = now
        # while the engine takes no steps, another process may write the parameters
        if has_been_idle:
            self.watch.require_comparison()
        # handle a new name before a change, because a new epoch resets ``watch.change``
        is_named_anew = self._epoch != self.watch.epoch
        if is_named_anew or self._opening is not None:
            self._advance_opening()
        if not self._is_detached and self.watch.change is not None:
            self._detach(self.watch.change)
        return self._is_detached

    def _detach(self, reason: str) -> None:
        """Stop using the tier, because the weights have changed: drop the stores that wait, and log
        it."""
        self._is_detached = True
        self.tier.detach()
        # Count the blocks in flight before they are given up. Entries that are no jobs are ends of
        # requests, which have no blocks.
        stored_blocks = 0
        for entry in self._held:
            if isinstance(entry, JobMetadata):
                stored_blocks += len(entry.keys)
        loaded_blocks = sum(load.num_blocks for load in self._loads.values())
        logger.error(
            "weights changed while the engine runs (%s): persistkv is detached. Lookups miss, "
            "and nothing is stored. In flight: %d blocks are not stored, %d are not served. To use "
            "the store again, restart the engine or name the new weights (docs/vllm.md, weights "
            "that change)",
            reason,
            stored_blocks,
            loaded_blocks,
        )
        self._give_up_held()

    @property
    def is_opening(self) -> bool:
        """Whether a thread shuts ``tier`` down and opens that of new weights. No other thread may
        use ``tier`` meanwhile."""
        return self._opening is not None

    @property
    def is_in_use(self) -> bool:
        """Whether ``tier`` serves the present weights, as of the last ``follow_weights``."""
        return not self._is_detached and not self.is_opening

    def _advance_opening(self) -> None:
        """Open the tier of the present epoch, and use it once it is open."""
        if self._opening is not None:
            if self._opening.is_alive():
                return
            self._opening = None
            self._use_opened()
        if self._epoch != self.watch.epoch:
            self._begin_opening()

    def _use_opened(self) -> None:
        """Use the tier that the thread has opened; if it could not open any, stay detached."""
        if self._opened_tier is None:
            return
        self.tier = self._opened_tier
        self._opened_tier = None
        # If a request has named other weights since the opening began, the tier stays detached:
        # that of the present name will replace it.
        if self._epoch != self.watch.epoch:
            return
        self._is_detached = False
        # An empty list tells the tier that unknown blocks were loaded, so it takes none for
        # computed. The caches are empty when the next weights are named, so these loads do not
        # matter to later tiers.
        if self._others_loaded:
            self.tier.loaded_elsewhere([])
        self._others_loaded = False
        logger.warning(
            "persistkv continues with the weights %s, under their own identity",
            self.watch.weights,
        )

    def _begin_opening(self) -> None:
        """Detach the tier; if it has no jobs, start a thread that opens that of the new weights. If
        it has some, the next call tries again."""
        if not self._is_detached:
            self._detach(f"a request names the weights {self.watch.weights}")
        # The shutdown of the old tier frees the rows of its jobs, so all of them must have ended,
        # and no load may wait for its comparison.
        has_jobs = self.tier.has_pending_work() or self._ended_loads
        if has_jobs:
            return
        self._epoch = self.watch.epoch
        self._opening = threading.Thread(
            target=self._open_next_tier,
            args=(self.tier, self.watch.weights),
            name="persistkv-epoch",
        )
        self._opening.start()

    def _open_next_tier(self, old: PersistentTier, weights: str | None) -> None:
        """Shut the old tier down and open that of the new weights."""
        # the shutdown takes time, because the host of the old tier commits accepted blocks before
        # it ends
        try:
            old.shutdown()
            self._opened_tier = self._make_tier(weights)
        except Exception:
            logger.exception(
                "the store does not open for the weights %s: persistkv stays detached",
                weights,
            )

    def shutdown(self) -> None:
        """Wait for a tier that is being opened, and shut the tier down."""
        if self._opening is not None:
            self._opening.join()
            self._use_opened()
        self._give_up_held()
        self.tier.shutdown()

    def _give_up_held(self) -> None:
        """Fail the stores that wait for a comparison; pass on the ends of requests among them."""
        for entry in self._take_held():
            if isinstance(entry, JobMetadata):
                self._fail_job(entry)
            else:
                self.tier.on_request_finished(entry)

    def _fail_job(self, job: JobMetadata) -> None:
        """Fail a job that is not passed to the tier, because its KV may be of other weights."""
        self.dropped_blocks += len(job.keys)
        self._finished.append(JobResult(job.job_id, success=False))

    def begin_request(self, weights: str | None) -> int | None:
        """Return the epoch of a request that begins; None: it may neither use nor fill the store.

        :param weights: name of the weights that the request expects; None: those at the start of
            the engine.
        """
        watch = self.watch
        is_expected = watch.is_initial
        if weights is not None:
            # a new name begins an epoch
            is_expected = watch.name_weights(weights)
        # vLLM computes the request and caches its KV, whichever weights the request expects
        watch.on_request()
        if not is_expected:
            return None
        is_detached = self.follow_weights()
        return None if is_detached else watch.epoch

    def holds(self, key: OffloadKey, epoch: int | None) -> bool:
        """Return whether the store of the present weights holds a block.

        :param epoch: epoch of the request that asks. This method, and all below that have this
            parameter, refuse requests of earlier epochs.
        """
        # A detached tier holds nothing, so it needs no check. The epoch needs one: when a request
        # has named new weights, ``tier`` remains that of the old ones until its jobs have ended.
        is_present = epoch == self._epoch == self.watch.epoch
        if self.is_opening or not is_present:
            return False
        return self.tier.holds(key)

    def submit_store(self, job: JobMetadata, epoch: int | None) -> None:
        """Submit a store, now or once the weights are known; fail it if they have changed."""
        is_detached = self.follow_weights()
        if is_detached or epoch != self.watch.epoch:
            self._fail_job(job)
        # hold the job while anything is held: stores and ends of requests keep their order
        elif self._held or not self.watch.is_sure:
            self._held.append(job)
        else:
            self.tier.submit_store(job)

    def submit_load(self, job: JobMetadata, epoch: int | None) -> None:
        """Submit a load, whose result waits for a comparison that begins after this call; fail it
        if the weights have changed."""
        is_detached = self.follow_weights()
        if is_detached or epoch != self.watch.epoch:
            self._fail_job(job)
            return
        # ask now, so that the comparison and the load run at the same time
        ticket = self.watch.ask()
        self._loads[job.job_id] = _GuardedLoad(ticket, len(job.keys))
        self.tier.submit_load(job)

    def loaded_elsewhere(self, keys: Sequence[OffloadKey]) -> None:
        """Report that another store of the engine loads these blocks, so that the tier does not
        take them for computed. While the tier is not in use, the keys are not kept, and the next
        tier takes no block for computed."""
        if self.is_in_use:
            self.tier.loaded_elsewhere(keys)
        else:
            self._others_loaded = True

    def touch(
        self,
        keys: Sequence[OffloadKey],
        context: ReqContext,
    ) -> None:
        if self.is_in_use:
            self.tier.touch(keys, context)

    def on_restored(
        self,
        keys: Sequence[OffloadKey],
        context: ReqContext,
        epoch: int | None,
    ) -> None:
        if epoch == self._epoch and not self.is_opening:
            self.tier.on_restored(keys, context)

    def on_request_finished(self, context: ReqContext, epoch: int | None) -> None:
        """Pass the end of a request on, after its stores that wait."""
        # the tier of the request was shut down, or is not open yet
        has_nothing_stored = epoch != self._epoch or self.is_opening
        if has_nothing_stored:
            return
        if self._held:
            self._held.append(context)
        else:
            self.tier.on_request_finished(context)

    def get_finished_jobs(self) -> list[JobResult]:
        self._advance_jobs()
        finished = self._finished
        self._finished = []
        return finished

    def _advance_jobs(self) -> None:
        """Collect results. Submit held stores once the weights are known, and report to vLLM the
        loads whose comparison has ended."""
        self._collect()
        # follow the weights first: after a change, this fails the stores that wait
        is_detached = self.follow_weights()
        if self._held and self.watch.is_sure:
            self._submit_held()
        results = self._ended_loads
        self._ended_loads = []
        for result in results:
            if is_detached:
                self._fail_load(result)
            elif self._is_verified(result):
                del self._loads[result.job_id]
                self._finished.append(result)
            else:
                # keep the result, because its comparison has not ended
                self._ended_loads.append(result)

    def _collect(self) -> None:
        """Take the results of the tier. Results of loads then wait for their comparisons."""
        # while a tier is being opened, there are no jobs, and only the opening thread may use it
        if self.is_opening:
            return
        for result in self.tier.get_finished_jobs():
            if result.job_id in self._loads:
                self._ended_loads.append(result)
            else:
                self._finished.append(result)

    def _is_verified(self, result: JobResult) -> bool:
        """Return whether the comparison that a load waits for has ended without a difference."""
        load = self._loads[result.job_id]
        return self.watch.is_answered(load.ticket) and self.watch.is_sure

    def _fail_load(self, result: JobResult) -> None:
        """Fail a load whose blocks may be KV of other weights."""
        load = self._loads.pop(result.job_id)
        self.dropped_blocks += load.num_blocks
        failed = JobResult(result.job_id, success=False, seconds=result.seconds)
        self._finished.append(failed)

    def _submit_held(self) -> None:
        """Pass the stores and ends of requests that wait on to the tier, in their order."""
        for entry in self._take_held():
            if isinstance(entry, JobMetadata):
                self.tier.submit_store(entry)
            else:
                self.tier.on_request_finished(entry)

    def _take_held(self) -> Iterable[JobMetadata | ReqContext]:
        """Remove and return the stores and ends of requests that wait."""
        held = self._held
        self._held = deque()
        return held

    # Contexts to promote (``RecentContexts``): there are none while the tier is not in use

    def ask_recent(
        self,
        max_blocks: int,
        *,
        prefetched: bool = False,
    ) -> bool:
        if not self.is_in_use:
            return False
        return self.tier.ask_recent(max_blocks, prefetched=prefetched)

    def take_recent(self) -> list[StoredContext] | None:
        # an empty list ends the question: a tier out of use will not answer any more
        return self.tier.take_recent() if self.is_in_use else []

    @property
    def prefetch_waits(self) -> bool:
        """Whether the engine has queued contexts with ``PersistentTier.prefetch``."""
        return self.is_in_use and self.tier.prefetch_waits

    def has_pending_work(self) -> bool:
        if self._finished or self._held or self._ended_loads:
            return True
        return not self.is_opening and self.tier.has_pending_work()

    def drain_jobs(self, timeout_s: float) -> bool:
        """End all jobs, for a reset of the engine's cache: those that wait for a comparison fail,
        because the engine takes no step meanwhile. Return False if one has not ended after
        ``timeout_s`` seconds.
        """
        # Held stores are submitted or fail before the wait: after it, their rows must be free.
        self._advance_jobs()
        self._give_up_held()
        # while a tier is being opened, there are no jobs
        drained = self.is_opening or self.tier.drain_jobs(timeout_s)
        # collect the results of the jobs that have ended
        self._advance_jobs()
        # fail the loads that still wait for a comparison, which would take a step of the engine
        for result in self._ended_loads:
            self._fail_load(result)
        self._ended_loads.clear()
        return drained
