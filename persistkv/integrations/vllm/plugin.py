"""Plugin of the entry point group ``vllm.general_plugins``: vLLM calls it in each of its processes,
repeatedly."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from persistkv.integrations.vllm.logs import use_vllm_logging
from persistkv.integrations.vllm.regions import remove_leftovers

_PACKAGE = "persistkv.integrations.vllm"


def register() -> None:
    """Register the tiers by short names and the spec, let workers watch their weights, log as vLLM
    does, and remove the files that killed engines left in shared memory.
    """
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    tiers = {"persistkv": "PersistKVTier", "persistkv-prewarm": "PersistKVPrewarm"}
    for name, class_name in tiers.items():
        with suppress(ValueError):  # ValueError means that it was registered before
            SecondaryTierFactory.register_tier(name, _PACKAGE, class_name)
    with suppress(ValueError):
        OffloadingSpecFactory.register_spec("PersistKVSpec", _PACKAGE, "PersistKVSpec")
    _watch_workers()
    # show this package's log records, because vLLM configures only its own loggers
    use_vllm_logging("persistkv")
    remove_leftovers()


def _watch_workers() -> None:
    """Replace the method with which vLLM's own spec makes a worker, so that the worker compares its
    weights, see ``persistkv.integrations.vllm.weights``. vLLM has no hook for this."""
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    get_worker = TieringOffloadingSpec.get_worker
    # an earlier call in this process has replaced the method
    if hasattr(get_worker, "persistkv"):
        return

    def watched(self: Any, kv_caches: Any) -> Any:
        # imported here, because processes without a worker, such as the front end, do not need it
        from persistkv.integrations.vllm.identity import find_worker
        from persistkv.integrations.vllm.weights.probe import watch_weights

        worker = get_worker(self, kv_caches)
        watch_weights(worker, self, find_worker())
        return worker

    # mark the replacement for later calls
    watched.persistkv = True  # type: ignore[attr-defined]
    TieringOffloadingSpec.get_worker = watched
