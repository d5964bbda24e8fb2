"""State of the workers' weights, in the engine's process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from persistkv.integrations.vllm.weights.word import WeightsWord

logger = logging.getLogger(__name__)

_CHANGING = frozenset(
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
        # harmless without load_inplace, because keys contain the adapter's name and path
        "add_lora",
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
"""Methods that end the sleep."""

Rpc = Callable[..., Any]
"""An executor's ``collective_rpc``."""


class WeightsWatch:
    """State of the workers' weights, in the engine's process. Must be used from its scheduler's
    thread.

    When it asks, each worker compares a sample of its parameters with an earlier one, and answers
    in its ``WeightsWord``. The number of a question is its *ticket*. An *epoch* is the time for
    which the weights have one name.

    :param words: the words of all workers; empty if any is missing. Changes are then noticed by
        calls alone, and the call of an unknown method counts as a change.
    :param weights: name of the weights at the start; None: those of the checkpoint.
    :param is_only_source: whether all of vLLM's KV comes from its workers and these tiers.
    """

    def __init__(
        self,
        words: Sequence[WeightsWord],
        weights: str | None = None,
        *,
        is_only_source: bool = True,
    ) -> None:
        self.weights = weights
        """Name of the present weights; None: those of the checkpoint."""
        self._unusable_names: set[str | None] = set()
        """Names of earlier weights, and names that were refused."""
        self._may_hold_kv = False
        """Whether vLLM's own caches may hold KV: there was a request since they were last empty."""
        self._is_only_source = is_only_source
        """Whether all of vLLM's KV comes from its workers and these tiers: only then can it be
        known that no KV of earlier weights is left."""
        self._words = tuple(words)
        # the words may have served an earlier watch: continue from its ticket and its epoch
        self._last_ticket = max((word.asked for word in words), default=0)
        """Ticket of the last comparison that was asked for."""
        self._required_ticket = 0
        """Ticket of the comparison that must end before ``is_sure`` can be true."""
        self._num_calls = 0
        """Number of calls in progress that may change the weights."""
        self.is_asleep = False
        """Whether the workers sleep: their parameters and their KV may not be readable."""
        self.epoch = max((word.epoch for word in words), default=0)
        """Number of times that a request has named new weights; 0: they are those of the start."""
        self._reason: str | None = None
        """Why the weights count as changed in this epoch; None: no reason is known."""

    @property
    def is_initial(self) -> bool:
        """Whether no request has named new weights: they have the name of the engine's start."""
        return self.epoch == 0

    @property
    def change(self) -> str | None:
        """Reason for which the weights count as changed in this epoch; None: they have not
        changed."""
        if self._reason is not None:
            return self._reason
        # workers publish one more than the epoch: 0 means that no change was ever published
        changed_now = self.epoch + 1
        for rank, word in enumerate(self._words):
            if word.changed == changed_now:
                self._reason = (
                    f"parameters of worker {rank} differ from those at the start"
                )
                break
        return self._reason

    @property
    def is_sure(self) -> bool:
        """Whether the weights are those of the epoch: they have not changed, and nothing has
        happened since the last comparison after which they may be others."""
        if self._num_calls or not self.is_answered(self._required_ticket):
            return False
        # Read the change after the answers. A worker publishes a change before it answers, so only
        # this order shows the changes that the answers have found.
        return self.change is None

    def ask(self) -> int:
        """Ask all workers to compare. Return a ticket for ``is_answered``."""
        self._last_ticket += 1
        # parameters of a sleeping worker may not be readable; the call that wakes it asks again
        if not self.is_asleep:
            self._publish_ticket()
        return self._last_ticket

    def _publish_ticket(self) -> None:
        """Show the workers how many comparisons were asked for."""
        for word in self._words:
            word.asked = self._last_ticket

    def is_answered(self, ticket: int) -> bool:
        """Return whether each worker has ended a comparison that began after this ``ask``."""
        return all(word.answered >= ticket for word in self._words)

    def require_comparison(self) -> None:
        """Be unsure of the weights until the workers have compared."""
        self._required_ticket = self.ask()

    def on_request(self) -> None:
        """Note that a request begins, whose KV vLLM keeps in its own caches."""
        self._may_hold_kv = True

    def on_no_kv(self) -> None:
        """Note that neither vLLM's own caches nor a request hold any KV."""
        self._may_hold_kv = False

    def name_weights(self, weights: str) -> bool:
        """Declare the name of the present weights. A new name begins an epoch, unless vLLM may hold
        KV of earlier weights: then an error is logged.

        :returns: whether this is the name of the present weights now. It never is if it was the
            name of earlier weights, or was refused.
        """
        if weights == self.weights:
            return True
        if weights in self._unusable_names:
            return False
        may_hold_old_kv = self._may_hold_kv or not self._is_only_source
        # during a call that may change them, it is not known which weights the name is meant for
        may_change_now = self._num_calls > 0
        if may_hold_old_kv or may_change_now:
            self._refuse_name(weights)
            return False
        self._unusable_names.add(self.weights)
        self.weights = weights
        self._begin_epoch()
        return True

    def _refuse_name(self, weights: str) -> None:
        """Refuse a name for good, and log it: before vLLM has removed all KV of earlier weights,
        the weights may change again, and the name would be that of outdated weights."""
        self._unusable_names.add(weights)
        other_sources = ""
        if not self._is_only_source:
            other_sources = (
                ", because other connectors or tiers than persistkv's provide KV"
            )
        logger.error(
            "requests with the weights %s neither use nor fill the store: vLLM may hold KV "
            "of earlier weights%s. After an update, call "
            "reset_prefix_cache(reset_connector=True) while no request runs; the next "
            "request must then have the new name, another than this",
            weights,
            other_sources,
        )

    def _begin_epoch(self) -> None:
        """Accept the present weights as those of a new epoch."""
        self.epoch += 1
        self._reason = None
        for word in self._words:
            word.epoch = self.epoch
        # each worker answers with a sample, with which it compares in this epoch
        self.require_comparison()

    def watch_calls(self, executor: Any) -> None:
        """Observe all later calls of ``executor.collective_rpc``."""
        rpc: Rpc = executor.collective_rpc

        def observed(
            method: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            call = _WorkerCall(method, args, kwargs)
            if call.is_harmless:
                return rpc(method, *args, **kwargs)
            return self._call_watched(rpc, call)

        executor.collective_rpc = observed

    def _call_watched(self, rpc: Rpc, call: _WorkerCall) -> Any:
        """Make a call that may change the weights; note when it has ended."""
        # set the reason before the call, because a load that ends during the call must not be
        # served
        if self._reason is None:
            self._reason = self._reason_of(call)
        if call.method in _SLEEP:
            self.is_asleep = True
        self.require_comparison()
        self._num_calls += 1
        try:
            result = rpc(call.method, *call.args, **call.kwargs)
        except BaseException:
            self._on_call_end(call)
            raise
        # a call that does not block changes the weights later
        if call.kwargs.get("non_block") and hasattr(result, "add_done_callback"):
            result.add_done_callback(lambda _: self._on_call_end(call))
        else:
            self._on_call_end(call)
        return result

    def _reason_of(self, call: _WorkerCall) -> str | None:
        """Return why the weights count as changed by a call; None: the comparison decides."""
        if call.changes_weights:
            return f"call of {call.name}"
        if self._words:
            return None
        # workers that sleep and wake have the same weights, unless another call loads new ones
        # meanwhile
        if call.method in _SLEEP or call.method in _WAKE:
            return None
        # an unknown method counts as a change, because no worker compares
        return f"call of {call.name}, with workers that report nothing"

    def _on_call_end(self, call: _WorkerCall) -> None:
        """Note that a call that may change the weights has ended."""
        self._num_calls -= 1
        if call.wakes_weights:
            self.is_asleep = False
        # ask again, because the comparison that was asked for before the call may have ended before
        # the weights changed
        self.require_comparison()


class _WorkerCall(NamedTuple):
    """A call of ``collective_rpc``."""

    method: Any
    """Name of a method of the workers, or a function."""
    args: tuple[Any, ...]
    """Arguments of ``collective_rpc`` after ``method``."""
    kwargs: dict[str, Any]
    """Named arguments of ``collective_rpc``."""

    @property
    def name(self) -> str:
        if isinstance(self.method, str):
            return self.method
        return str(getattr(self.method, "__name__", "a function"))

    @property
    def is_harmless(self) -> bool:
        """Whether the call changes no weights, whatever a sample says."""
        is_known = isinstance(self.method, str) and self.method in _HARMLESS
        return is_known and not self._loads_in_place

    @property
    def changes_weights(self) -> bool:
        """Whether the call changes weights, whatever a sample says."""
        is_known = isinstance(self.method, str) and self.method in _CHANGING
        return is_known or self._loads_in_place

    @property
    def wakes_weights(self) -> bool:
        """Whether the parameters can be read after the call: vLLM can wake the KV cache alone."""
        if self.method not in _WAKE:
            return False
        _, named = self._worker_arguments()
        tags = named.get("tags")
        # without tags, everything wakes
        if not tags:
            return True
        return "weights" in tags

    @property
    def _loads_in_place(self) -> bool:
        """Whether the call replaces the weights of an adapter that is loaded."""
        if self.method != "add_lora":
            return False
        positional, named = self._worker_arguments()
        for request in (*positional, *named.values()):
            if getattr(request, "load_inplace", False):
                return True
        return False

    def _worker_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the named arguments of the worker's method."""
        # ``collective_rpc(method, timeout, args, kwargs)``, of which callers name some
        names = ("timeout", "args", "kwargs")
        given = dict(zip(names, self.args, strict=False))
        given |= self.kwargs
        positional = tuple(given.get("args") or ())
        named = dict(given.get("kwargs") or {})
        return positional, named


def attach_watch(
    spec: Any,
    executor: Any,
    weights: str | None,
    *,
    is_only_source: bool,
) -> WeightsWatch:
    """Return the watch of an engine, one for all of its tiers.

    :param spec: vLLM's ``OffloadingSpec``, which keeps the watch.
    :param executor: vLLM's ``Executor``; None if unknown.
    :param weights: name of the weights at the start; None: those of the checkpoint.
    :param is_only_source: whether all of vLLM's KV comes from its workers and these tiers.
    """
    # keep one watch: the memory of a worker can be attached once, and one observer of the calls
    # suffices
    known = vars(spec).get("_persistkv_watch")
    if isinstance(known, WeightsWatch):
        return known
    words = _attach_words(spec)
    watch = WeightsWatch(words, weights, is_only_source=is_only_source)
    if executor is not None:
        watch.watch_calls(executor)
    vars(spec)["_persistkv_watch"] = watch
    return watch


def _attach_words(spec: Any) -> list[WeightsWord]:
    """Map the memory in which each worker publishes its comparisons; return none, with a warning,
    if a worker has none."""
    words: list[WeightsWord] = []
    try:
        for rank in range(spec.config.parallel.world_size):
            word = WeightsWord.attach(spec.config.engine_id, rank)
            words.append(word)
    except OSError:
        logger.warning(
            "not all workers report changes of their weights: calls of collective_rpc alone "
            "are noticed. Install persistkv in the environment of each worker, on this host"
        )
        # use none of the words: the weights of a worker without one could change unnoticed
        return []
    return words
