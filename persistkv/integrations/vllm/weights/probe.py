"""In a worker: comparison of its parameters with those of the start."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from persistkv.integrations.vllm.weights.word import WeightsWord

logger = logging.getLogger(__name__)

_SAMPLES = 16  # number of elements of each parameter in a sample
# pause between two comparisons before copies, as a multiple of the duration of the first one: they
# take 2 % of the time
_COST_FACTOR = 50
_LONGEST_PAUSE_S = 1.0  # maximum seconds of this pause


class WeightsProbe:
    """Compares a worker's parameters with those of the epoch's beginning, and publishes the result
    in its ``WeightsWord``, the memory that it shares with the engine's process."""

    def __init__(
        self,
        sample: Callable[[], bytes],
        word: WeightsWord,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """:param sample: returns the same bytes as long as the weights are the same.
        :param clock: returns seconds.
        """
        self._take_sample = sample
        self._word = word
        self._clock = clock
        self._epoch = word.epoch
        """Epoch at whose beginning ``_expected_sample`` was taken."""
        self._expected_sample = sample()
        """Sample of this epoch's weights, with which later samples are compared."""
        self._next_due = 0.0
        """Time from which on ``check_if_due`` compares even if the engine has not asked."""

    def check(self) -> None:
        """Compare, and publish the result."""
        begin = self._clock()
        # read ``asked`` before the sample, because the answer must not cover questions that arrive
        # during the comparison
        asked = self._word.asked
        epoch = self._word.epoch
        sample = self._take_sample()
        if epoch != self._epoch:
            # The engine began another epoch: it has given the present weights a name. Later samples
            # are compared with this one.
            self._epoch = epoch
            self._expected_sample = sample
        elif sample != self._expected_sample:
            # publish one more than the epoch, because 0 means that no change was ever published
            self._word.changed = epoch + 1
        # answer after ``changed`` is written: the engine trusts the weights once it sees the answer
        self._word.answered = asked
        end = self._clock()
        pause_s = _COST_FACTOR * (end - begin)
        self._next_due = end + min(_LONGEST_PAUSE_S, pause_s)

    @property
    def _is_asked(self) -> bool:
        """Whether the engine has asked for a comparison since the last one."""
        return self._word.asked != self._word.answered

    def check_if_asked(self) -> None:
        """Compare if the engine has asked for it since the last comparison."""
        if self._is_asked:
            self.check()

    def check_if_due(self) -> None:
        """Compare, unless the last comparison is recent and the engine has not asked for
        another."""
        if self._is_asked or self._clock() >= self._next_due:
            self.check()


def watch_worker(worker: Any, probe: WeightsProbe) -> None:
    """Let ``probe`` compare before each copy of vLLM's ``OffloadingWorker``, and in each step if
    the engine asks.

    A difference is only published: the engine acts on it. An error of the probe is raised in vLLM's
    worker.
    """
    submit_store = worker.submit_store
    submit_load = worker.submit_load
    get_finished = worker.get_finished

    def checked_store(*args: Any, **kwargs: Any) -> Any:
        probe.check_if_due()
        return submit_store(*args, **kwargs)

    def checked_load(*args: Any, **kwargs: Any) -> Any:
        probe.check_if_due()
        return submit_load(*args, **kwargs)

    def checked_finished() -> Any:
        probe.check_if_asked()
        return get_finished()

    worker.submit_store = checked_store
    worker.submit_load = checked_load
    worker.get_finished = checked_finished


def sample_parameters(
    modules: Iterable[Any],
    *,
    experts: bool = True,
) -> bytes:
    """Return a digest of 16 elements of each parameter of these ``torch.nn.Module`` objects.

    :param experts: whether the parameters of experts count: a load balancer moves them, which
        changes no KV.
    """
    import torch

    samples: dict[tuple[Any, Any], list[Any]] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if not experts and "experts" in name:
                continue
            picked = _sample_of(parameter.data)
            if picked is None:
                continue
            # group by device and dtype, because only such tensors can be joined
            kind = (picked.device, picked.dtype)
            samples.setdefault(kind, []).append(picked)
    digest = hashlib.blake2b(digest_size=16)
    for samples_of_kind in samples.values():
        # join the samples of a kind, so that one copy from the device suffices for them
        joined = torch.cat(samples_of_kind).cpu()
        elements = joined.numpy()
        digest.update(elements.tobytes())
    return digest.digest()


def _sample_of(tensor: Any) -> Any:
    """Return elements of a tensor as a tensor of integers, without a copy; None if it has no bytes,
    or if no integer has the size of its elements."""
    import torch

    # compare bits, because a float that is NaN differs from itself
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    element_bytes = tensor.element_size()
    integer = integers.get(element_bytes)
    has_bytes = tensor.numel() > 0 and tensor.device.type != "meta"
    if not has_bytes or integer is None:
        return None
    # The sample ignores the strides of the tensor: it is taken from consecutive elements of the
    # storage, as many as the tensor has. The storage of a tensor that repeats elements (stride 0)
    # has fewer.
    num_elements = tensor.numel()
    if not tensor.is_contiguous():
        storage_elements = tensor.untyped_storage().nbytes() // element_bytes
        following_elements = storage_elements - tensor.storage_offset()
        num_elements = min(num_elements, following_elements)
    # take elements equally far apart, from the first element to one of the last
    count = min(_SAMPLES, num_elements)
    step = max(1, (num_elements - 1) // count)
    sample = tensor.as_strided((count,), (step,))
    return sample.view(integer)


def watch_weights(
    offloading_worker: Any,
    spec: Any,
    worker: Any,
) -> None:
    """Let a worker compare its weights, for the engine of ``spec``; do nothing if no persistkv tier
    is configured.

    :param offloading_worker: vLLM's ``OffloadingWorker``, which copies the KV.
    :param spec: vLLM's ``OffloadingSpec``.
    :param worker: vLLM's ``WorkerBase``, with its model; None if unknown: the engine then watches
        calls alone.
    """
    if worker is None or not _has_tier(spec):
        return
    # the worker is watched since an earlier call, whose sample is from the worker's start
    if getattr(offloading_worker, "watches_weights", False):
        return
    parallel = worker.vllm_config.parallel_config
    # a load balancer swaps experts while the engine runs
    moves_experts = bool(getattr(parallel, "enable_eplb", False))

    def sample() -> bytes:
        return sample_parameters(_modules(worker), experts=not moves_experts)

    rank = spec.config.parallel.rank
    try:
        word = WeightsWord.create(spec.config.engine_id, rank)
        probe = WeightsProbe(sample, word)
    except (OSError, RuntimeError) as error:
        logger.warning("the weights of this worker are not watched: %s", error)
        return
    watch_worker(offloading_worker, probe)
    offloading_worker.watches_weights = True


def _has_tier(spec: Any) -> bool:
    """Return whether a tier of this package is configured."""
    tiers = spec.config.extra_config.get("secondary_tiers") or ()
    for tier in tiers:
        name = str(tier.get("type", ""))
        if name.lower().startswith("persistkv"):
            return True
    return False


def _modules(worker: Any) -> list[Any]:
    """Return the modules with the parameters of a worker: its model, and a draft model if it has
    one."""
    runner = worker.model_runner
    modules = [getattr(runner, "model", None)]
    for name in ("drafter", "speculator"):
        drafter = getattr(runner, name, None)
        modules.append(getattr(drafter, "model", None))
    return [module for module in modules if hasattr(module, "named_parameters")]
