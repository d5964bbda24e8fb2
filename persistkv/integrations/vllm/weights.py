"""Detection of weights that change while an engine runs, so that no KV meets weights that have not computed it.

vLLM tells a tier nothing about updates of weights. Two things notice them:

1. **The parameters.** Each worker compares a sample of its parameters with the sample from its start, and publishes the
   result in a word of shared memory, which the engine's process reads. A worker compares before it copies KV to the
   primary tier, unless it has done so just before, and in each step in which the engine has asked for it.
2. **The calls.** The engine's process sees each ``collective_rpc``. Some methods are proof of a change. During and
   after an unknown one the engine is not sure of the weights until all workers have compared.

Consequences, in ``GuardedTier``: the result of a load is passed on only after a comparison that began after the load's
submission. While the engine is not sure, stores wait for the next comparison. A change detaches the tier until a
request names the new weights.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from persistkv.base import OffloadKey, ReqContext
from persistkv.cpu.region_file import SHARED_MEMORY_DIRECTORY
from persistkv.integrations.vllm.regions import WEIGHTS_PREFIX
from persistkv.tiering.base import JobMetadata, JobResult
from persistkv.tiering.persistent import PersistentTier

logger = logging.getLogger(__name__)

_WORD_BYTES = 4 * 8
_SAMPLES = 16  # elements of each parameter
_COST_FACTOR = 50  # a comparison before a copy follows the last one after 50 times its duration: 2 % of the time
_LONGEST_PAUSE_S = 1.0
_IDLE_S = 1.0  # without a step: then earlier comparisons say nothing

_PROOF = frozenset(
    {
        "finish_weight_update",
        "load_model",
        "load_weights",
        "reload_weights",
        "reset_weights",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weights",
    }
)
"""Methods of workers that change weights, whatever a sample says."""
_HARMLESS = frozenset(
    {
        "add_lora",  # without load_inplace: keys contain the adapter's name and path
        "check_health",
        "compile_or_warm_up_model",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "execute_model",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "initialize_from_config",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "save_sharded_state",
        "set_kv_cache_layout",
        "shutdown",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
        "update_max_model_len",
    }
)
"""Methods of workers that do not change weights."""
_SLEEP = frozenset({"sleep", "discard", "checkpoint_prepare"})
"""Methods after which the parameters may not be readable, until ``_WAKE``."""
_WAKE = frozenset({"wake_up", "checkpoint_restore"})

Rpc = Callable[..., Any]
"""An executor's ``collective_rpc``."""


class WeightsWord:
    """Memory that one worker shares with the engine's process: four numbers, each written by one side only."""

    def __init__(self, file: int) -> None:
        """:param file: descriptor of the word's file; the caller closes it."""
        self._numbers = memoryview(mmap.mmap(file, _WORD_BYTES)).cast("Q")

    @classmethod
    def create(cls, engine_id: str, rank: int, directory: str = SHARED_MEMORY_DIRECTORY) -> WeightsWord:
        """Create the word of a worker, in place of one that an earlier engine left.

        :raises OSError: the file cannot be created.
        """
        path = _path(engine_id, rank, directory)
        with suppress(FileNotFoundError):
            path.unlink()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(file, _WORD_BYTES)
            return cls(file)
        finally:
            os.close(file)

    @classmethod
    def attach(cls, engine_id: str, rank: int, directory: str = SHARED_MEMORY_DIRECTORY) -> WeightsWord:
        """Map the word that a worker of this engine has created, and remove its file.

        :raises OSError: there is none, or it is another user's.
        """
        path = _path(engine_id, rank, directory)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            status = os.fstat(file)
            if status.st_uid != os.geteuid() or status.st_size != _WORD_BYTES:
                raise PermissionError(f"{path} is not a file of this user's engine")
            word = cls(file)
        finally:
            os.close(file)
        path.unlink()
        return word

    @property
    def asked(self) -> int:
        """Number of the engine's last request for a comparison. Written by the engine."""
        return self._numbers[0]

    @asked.setter
    def asked(self, number: int) -> None:
        self._numbers[0] = number

    @property
    def answered(self) -> int:
        """Value of ``asked`` when the last comparison began. Written by the worker, after ``changed``."""
        return self._numbers[1]

    @answered.setter
    def answered(self, number: int) -> None:
        self._numbers[1] = number

    @property
    def epoch(self) -> int:
        """Number of weights that the engine has known. The first comparison in an epoch only takes the sample with
        which later ones compare. Written by the engine.
        """
        return self._numbers[2]

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._numbers[2] = number

    @property
    def changed(self) -> int:
        """One more than the last epoch in which the weights changed; 0: none. Written by the worker."""
        return self._numbers[3]

    @changed.setter
    def changed(self, number: int) -> None:
        self._numbers[3] = number


def _path(engine_id: str, rank: int, directory: str) -> Path:
    name = hashlib.blake2b(engine_id.encode(), digest_size=16).hexdigest()
    return Path(directory) / f"{WEIGHTS_PREFIX}{name}_{rank}"


# In a worker


class WeightsProbe:
    """Compares a worker's parameters with those of the epoch's beginning, and publishes the result in its word."""

    def __init__(
        self, sample: Callable[[], bytes], word: WeightsWord, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """:param sample: returns the same bytes as long as the weights are the same.
        :param clock: returns seconds.
        """
        self._sample = sample
        self._word = word
        self._clock = clock
        self._epoch = word.epoch
        self._known = sample()
        self._next_due = 0.0

    def check(self) -> None:
        """Compare, and publish the result."""
        begin = self._clock()
        asked, epoch = self._word.asked, self._word.epoch
        sample = self._sample()
        if epoch != self._epoch:
            self._epoch, self._known = epoch, sample
        elif sample != self._known:
            self._word.changed = epoch + 1
        self._word.answered = asked
        end = self._clock()
        self._next_due = end + min(_LONGEST_PAUSE_S, _COST_FACTOR * (end - begin))

    def check_if_asked(self) -> None:
        if self._word.asked != self._word.answered:
            self.check()

    def check_if_due(self) -> None:
        """Compare, unless the last comparison is recent and the engine has not asked for another."""
        if self._word.asked != self._word.answered or self._clock() >= self._next_due:
            self.check()


def watch_worker(worker: Any, probe: WeightsProbe) -> None:
    """Let ``probe`` compare before each copy of vLLM's ``OffloadingWorker``, and in each step if the engine asks."""
    submit_store, submit_load, get_finished = worker.submit_store, worker.submit_load, worker.get_finished

    def checked_store(*args: Any, **kwargs: Any) -> Any:
        probe.check_if_due()
        return submit_store(*args, **kwargs)

    def checked_load(*args: Any, **kwargs: Any) -> Any:
        probe.check_if_due()
        return submit_load(*args, **kwargs)

    def checked_finished() -> Any:
        probe.check_if_asked()
        return get_finished()

    worker.submit_store, worker.submit_load, worker.get_finished = checked_store, checked_load, checked_finished


def sample_parameters(modules: Iterable[Any], *, experts: bool = True) -> bytes:
    """Return a digest of 16 elements of each parameter of these ``torch.nn.Module`` objects.

    :param experts: whether the parameters of experts count: a load balancer moves them, which changes no KV.
    """
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    samples: dict[tuple[Any, Any], list[Any]] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if not experts and "experts" in name:
                continue
            tensor = parameter.data
            kind = integers.get(tensor.element_size())
            if tensor.numel() == 0 or tensor.device.type == "meta" or kind is None:
                continue
            count = min(_SAMPLES, tensor.numel())
            step = (tensor.numel() - 1) // count or 1
            if not tensor.is_contiguous():
                room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
                step = max(1, min(step, (room - 1) // count))
                count = min(count, room)
            picked = tensor.as_strided((count,), (step,)).view(kind)
            samples.setdefault((tensor.device, kind), []).append(picked)
    digest = hashlib.blake2b(digest_size=16)
    for group in samples.values():
        digest.update(torch.cat(group).cpu().numpy().tobytes())
    return digest.digest()


# In the engine's process


class WeightsWatch:
    """What the engine's process knows about the weights of its workers. Must be used from its scheduler's thread.

    :param words: those of all workers; empty if they are not known. Then calls alone notice changes, and an unknown
        method counts as a change.
    :param weights: name of the weights at the start; None: those of the checkpoint.
    :param is_only_source: whether vLLM has KV from nobody else than its workers and these tiers.
    """

    def __init__(
        self, words: Sequence[WeightsWord], weights: str | None = None, *, is_only_source: bool = True
    ) -> None:
        self.weights = weights
        """Name of the present weights; None: those of the checkpoint."""
        self._left: set[str | None] = set()
        """Names of earlier weights, and names that were refused."""
        self._may_hold_kv = False
        """Whether vLLM's own caches may hold KV: there was a request since they were last empty."""
        self._is_only_source = is_only_source
        self._words = tuple(words)
        self._asked = max((word.asked for word in words), default=0)
        self._suspected = 0
        self._calls = 0
        self._asleep = False
        self._epoch = max((word.epoch for word in words), default=0)
        self._reason: str | None = None

    @property
    def epoch(self) -> int:
        """Number of times that a request has named new weights."""
        return self._epoch

    @property
    def change(self) -> str | None:
        """What has changed the weights in this epoch; None: nothing."""
        if self._reason is None:
            for rank, word in enumerate(self._words):
                if word.changed == self._epoch + 1:
                    self._reason = f"parameters of worker {rank} differ from those at the start"
                    break
        return self._reason

    @property
    def is_sure(self) -> bool:
        """Whether nothing has happened since the last comparison after which the weights may be others."""
        return not self._calls and self.is_answered(self._suspected)

    def ask(self) -> int:
        """Ask all workers to compare. Return a ticket for ``is_answered``."""
        self._asked += 1
        if not self._asleep:
            self._publish()
        return self._asked

    def _publish(self) -> None:
        for word in self._words:
            word.asked = self._asked

    def is_answered(self, ticket: int) -> bool:
        """Return whether each worker has ended a comparison that began after this ``ask``."""
        return all(word.answered >= ticket for word in self._words)

    def suspect(self) -> None:
        """Be unsure of the weights until the workers have compared."""
        self._suspected = self.ask()

    def on_request(self) -> None:
        """Note that a request begins, whose KV vLLM keeps in its own caches."""
        self._may_hold_kv = True

    def on_empty(self) -> None:
        """Note that neither vLLM's own caches nor a request hold any KV."""
        self._may_hold_kv = False

    def name_weights(self, weights: str) -> bool:
        """Declare the name of the present weights. A new name begins an epoch, unless vLLM may hold KV of earlier
        weights: then an error is logged.

        :returns: whether this is the name of the present weights now. A name that was left or refused never is.
        """
        if weights == self.weights or weights in self._left:
            return weights == self.weights
        if self._may_hold_kv or self._calls or not self._is_only_source:
            self._left.add(weights)  # the weights may change again before vLLM holds no KV
            logger.error(
                "requests with the weights %s neither use nor fill the store: vLLM may hold KV of earlier weights%s. "
                "After an update, call reset_prefix_cache(reset_connector=True) while no request runs; the next "
                "request must then have the new name, another than this",
                weights,
                "" if self._is_only_source else ", because other connectors or tiers than persistkv's provide KV",
            )
            return False
        self._left.add(self.weights)
        self.weights = weights
        self._begin_epoch()
        return True

    def _begin_epoch(self) -> None:
        """Accept the present weights as those of a new epoch."""
        self._epoch += 1
        self._reason = None
        for word in self._words:
            word.epoch = self._epoch
        self.suspect()

    def watch_calls(self, executor: Any) -> None:
        """Observe all later calls of ``executor.collective_rpc``."""
        rpc: Rpc = executor.collective_rpc

        def observed(method: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(method, str) and method in _HARMLESS and not _loads_in_place(method, args, kwargs):
                return rpc(method, *args, **kwargs)
            return self._observe(rpc, method, args, kwargs)

        executor.collective_rpc = observed

    def _observe(self, rpc: Rpc, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        if isinstance(method, str) and (method in _PROOF or _loads_in_place(method, args, kwargs)):
            self._reason = self._reason or f"call of {name}"
        if not self._words and method not in _SLEEP and method not in _WAKE:
            self._reason = self._reason or f"call of {name}, with workers that report nothing"
        if method in _SLEEP:
            self._asleep = True
        self.suspect()
        self._calls += 1
        try:
            result = rpc(method, *args, **kwargs)
        except BaseException:
            self._ended(method, args, kwargs)
            raise
        if kwargs.get("non_block") and hasattr(result, "add_done_callback"):
            result.add_done_callback(lambda _: self._ended(method, args, kwargs))
        else:
            self._ended(method, args, kwargs)
        return result

    def _ended(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls -= 1
        tags = _arguments(args, kwargs)[1].get("tags")
        if method in _WAKE and (not tags or "weights" in tags):
            self._asleep = False
        self.suspect()


def _loads_in_place(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the call replaces the weights of an adapter that is loaded."""
    if method != "add_lora":
        return False
    given, named = _arguments(args, kwargs)
    return any(getattr(request, "load_inplace", False) for request in (*given, *named.values()))


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the worker's method, from those of ``collective_rpc`` after ``method``."""
    positional = dict(zip(("timeout", "args", "kwargs"), args, strict=False))
    given = positional | kwargs
    return tuple(given.get("args") or ()), dict(given.get("kwargs") or {})


class GuardedTier:
    """A persistent tier that is given jobs only for KV of the weights in its identity.

    When a request has named new weights, a thread shuts the tier down and opens one of another identity. Meanwhile
    lookups miss and jobs fail, as they do between a change and that request.
    """

    def __init__(
        self,
        make_tier: Callable[[str | None], PersistentTier],
        watch: WeightsWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """:param make_tier: opens a tier for the weights of this name; None: those at the start of the engine.
        :param clock: returns seconds.
        """
        self.tier = make_tier(watch.weights if watch.epoch else None)
        """The tier of the present weights, or the last one. Must not be used while ``is_opening``."""
        self.watch = watch
        self._make_tier = make_tier
        self._opening: threading.Thread | None = None
        self._opened: PersistentTier | None = None
        self._clock = clock
        self._called = clock()
        self.dropped_blocks = 0
        """Blocks in flight that were not stored or not served, because the weights had changed or might have."""
        self._epoch = watch.epoch
        """Epoch of ``tier``, or of the one that is being opened."""
        self._held: deque[JobMetadata | ReqContext] = deque()
        """Stores, and ends of requests among them, that wait until the weights are known."""
        self._tickets: dict[int, tuple[int, int]] = {}
        """By load job: ticket of the comparison to wait for, and its blocks."""
        self._loaded: list[JobResult] = []
        """Results of loads that wait for their comparisons."""
        self._finished: list[JobResult] = []
        self._is_detached = False

    @property
    def is_detached(self) -> bool:
        """Whether the weights have changed: lookups miss, and all jobs fail."""
        now = self._clock()
        if now - self._called > _IDLE_S:  # another process may have written the parameters
            self.watch.suspect()
        self._called = now
        if self._opening is not None or self._epoch != self.watch.epoch:
            self._follow()
        if not self._is_detached and self.watch.change is not None:
            self._detach(self.watch.change)
        return self._is_detached

    def _detach(self, reason: str) -> None:
        self._is_detached = True
        self.tier.detach()
        stores = sum(len(entry.keys) for entry in self._held if isinstance(entry, JobMetadata))
        loads = sum(num_blocks for _, num_blocks in self._tickets.values())
        logger.error(
            "weights changed while the engine runs (%s): persistkv is detached. Lookups miss, and nothing is stored. "
            "In flight: %d blocks are not stored, %d are not served. To use the store again, restart the engine or "
            "name the new weights (docs/vllm.md, weights that change)",
            reason,
            stores,
            loads,
        )
        self._give_up_held()

    @property
    def is_opening(self) -> bool:
        """Whether a thread uses ``tier``, to open that of new weights."""
        return self._opening is not None

    def _follow(self) -> None:
        """Open the tier of the present epoch, and use it once it is open."""
        if self._opening is not None:
            if self._opening.is_alive():
                return
            self._opening = None
            self._use_opened()
        if self._epoch != self.watch.epoch:
            self._begin_opening()

    def _use_opened(self) -> None:
        if self._opened is None:
            return
        self.tier, self._opened = self._opened, None
        if self._epoch == self.watch.epoch:  # else the weights have another name by now
            self._is_detached = False
            logger.warning("persistkv continues with the weights %s, under their own identity", self.watch.weights)

    def _begin_opening(self) -> None:
        if not self._is_detached:
            self._detach(f"a request names the weights {self.watch.weights}")
        if self.tier.has_pending_work() or self._loaded:
            return
        self._epoch = self.watch.epoch
        arguments = (self.tier, self.watch.weights)
        self._opening = threading.Thread(target=self._open, args=arguments, name="persistkv-epoch")
        self._opening.start()

    def _open(self, old: PersistentTier, weights: str | None) -> None:
        try:
            old.shutdown()
            self._opened = self._make_tier(weights)
        except Exception:
            logger.exception("the store does not open for the weights %s: persistkv stays detached", weights)

    def shutdown(self) -> None:
        """Wait for a tier that is being opened, and shut the tier down."""
        if self._opening is not None:
            self._opening.join()
            self._use_opened()
        self._give_up_held()
        self.tier.shutdown()

    def _give_up_held(self) -> None:
        """Fail the stores that wait for a comparison."""
        held, self._held = self._held, deque()
        for entry in held:
            if isinstance(entry, JobMetadata):
                self.dropped_blocks += len(entry.keys)
                self._finished.append(JobResult(entry.job_id, False))
            else:
                self.tier.on_request_finished(entry)

    def begin_request(self, weights: str | None) -> int | None:
        """Return the epoch of a request that begins; None: it may neither use nor fill the store.

        :param weights: name of the weights that the request expects; None: those at the start of the engine.
        """
        watch = self.watch
        fits = watch.epoch == 0 if weights is None else watch.name_weights(weights)
        watch.on_request()
        return watch.epoch if fits and not self.is_detached else None

    def lookup(self, key: OffloadKey, context: ReqContext, epoch: int | None) -> bool:
        """Return whether the store of the present weights holds a block.

        :param epoch: of the request, here and in the methods below, which refuse those of earlier epochs.
        """
        if epoch != self._epoch or self._epoch != self.watch.epoch or self.is_opening:
            return False
        return bool(self.tier.lookup(key, context))

    def submit_store(self, job: JobMetadata, epoch: int | None) -> None:
        if self.is_detached or epoch != self.watch.epoch:
            self.dropped_blocks += len(job.keys)
            self._finished.append(JobResult(job.job_id, False))
        elif self._held or not self.watch.is_sure:
            self._held.append(job)
        else:
            self.tier.submit_store(job)

    def submit_load(self, job: JobMetadata, epoch: int | None) -> None:
        if self.is_detached or epoch != self.watch.epoch:
            self.dropped_blocks += len(job.keys)
            self._finished.append(JobResult(job.job_id, False))
            return
        self._tickets[job.job_id] = self.watch.ask(), len(job.keys)
        self.tier.submit_load(job)

    def on_request_finished(self, context: ReqContext, epoch: int | None) -> None:
        if epoch != self._epoch or self.is_opening:
            return
        if self._held:
            self._held.append(context)
        else:
            self.tier.on_request_finished(context)

    def get_finished_jobs(self) -> list[JobResult]:
        self._advance()
        finished, self._finished = self._finished, []
        return finished

    def _advance(self) -> None:
        for result in () if self.is_opening else self.tier.get_finished_jobs():
            target = self._loaded if result.job_id in self._tickets else self._finished
            target.append(result)
        detached = self.is_detached
        if self._held and self.watch.is_sure:
            self._submit_held()
        waiting, self._loaded = self._loaded, []
        for result in waiting:
            ticket, num_blocks = self._tickets[result.job_id]
            if detached:
                self.dropped_blocks += num_blocks
                self._finished.append(JobResult(result.job_id, False, (), 0, result.seconds))
            elif self.watch.is_answered(ticket) and self.watch.is_sure:
                self._finished.append(result)
            else:
                self._loaded.append(result)
                continue
            del self._tickets[result.job_id]

    def _submit_held(self) -> None:
        held, self._held = self._held, deque()
        for entry in held:
            if isinstance(entry, JobMetadata):
                self.tier.submit_store(entry)
            else:
                self.tier.on_request_finished(entry)

    def has_pending_work(self) -> bool:
        if self._finished or self._held or self._loaded:
            return True
        return not self.is_opening and self.tier.has_pending_work()

    def drain_jobs(self, timeout_s: float) -> bool:
        """End all jobs, for a reset of the engine's cache: those that wait for a comparison fail, because the engine
        takes no step meanwhile. Return False if one has not ended after ``timeout_s`` seconds.
        """
        drained = self.is_opening or self.tier.drain_jobs(timeout_s)
        self._advance()
        self._give_up_held()
        for result in self._loaded:
            _, num_blocks = self._tickets.pop(result.job_id)
            self.dropped_blocks += num_blocks
            self._finished.append(JobResult(result.job_id, False, (), 0, result.seconds))
        self._loaded.clear()
        return drained


def watch_weights(offloading_worker: Any, spec: Any, worker: Any) -> None:
    """Let a worker compare its weights, for the engine of ``spec``; do nothing if no persistkv tier is configured.

    :param offloading_worker: vLLM's ``OffloadingWorker``, which copies the KV.
    :param spec: vLLM's ``OffloadingSpec``.
    :param worker: vLLM's ``WorkerBase``, with its model; None if unknown: the engine then watches calls alone.
    """
    tiers = spec.config.extra_config.get("secondary_tiers") or ()
    if worker is None or not any(str(tier.get("type", "")).lower().startswith("persistkv") for tier in tiers):
        return
    if getattr(offloading_worker, "watches_weights", False):
        return
    moves_experts = bool(getattr(worker.vllm_config.parallel_config, "enable_eplb", False))

    def sample() -> bytes:
        return sample_parameters(_modules(worker), experts=not moves_experts)

    try:
        word = WeightsWord.create(spec.config.engine_id, spec.config.parallel.rank)
        probe = WeightsProbe(sample, word)
    except (OSError, RuntimeError) as error:
        logger.warning("the weights of this worker are not watched: %s", error)
        return
    watch_worker(offloading_worker, probe)
    offloading_worker.watches_weights = True


def _modules(worker: Any) -> list[Any]:
    """Return the modules with the parameters of a worker: its model, and a draft model if it has one."""
    runner = worker.model_runner
    modules = [getattr(runner, "model", None)]
    for name in ("drafter", "speculator"):
        modules.append(getattr(getattr(runner, name, None), "model", None))
    return [module for module in modules if hasattr(module, "named_parameters")]


def attach_watch(spec: Any, executor: Any, weights: str | None, *, is_only_source: bool) -> WeightsWatch:
    """Return the watch of an engine, one for all of its tiers.

    :param spec: vLLM's ``OffloadingSpec``, which keeps the watch.
    :param executor: vLLM's ``Executor``; None if unknown.
    :param weights: name of the weights at the start; None: those of the checkpoint.
    :param is_only_source: see ``WeightsWatch``.
    """
    known = vars(spec).get("_persistkv_watch")
    if isinstance(known, WeightsWatch):
        return known
    words: list[WeightsWord] = []
    try:
        for rank in range(spec.config.parallel.world_size):
            words.append(WeightsWord.attach(spec.config.engine_id, rank))
    except OSError:
        words = []
        logger.warning(
            "not all workers report changes of their weights: calls of collective_rpc alone are noticed. Install "
            "persistkv in the environment of each worker, on this host"
        )
    watch = WeightsWatch(words, weights, is_only_source=is_only_source)
    if executor is not None:
        watch.watch_calls(executor)
    vars(spec)["_persistkv_watch"] = watch
    return watch
