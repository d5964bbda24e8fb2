"""Two KV connectors in one vLLM engine, of which one is active at a time.

Their costs are compared within one process, on the same weights, KV tensors and memory pages.

Both are vLLM's own ``OffloadingConnector`` with a CPU tier of its own; one of them has a secondary
tier behind it. Every call is forwarded to the active connector and timed, at the same small cost
for both. The active connector may change while no request runs and no store is in flight.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

from benchmarks.vllm_rig import BARE_FIRST

FOR_BOTH = (
    "register_kv_caches",
    "set_host_xfer_buffer_ops",
    "bind_kv_cache_manager",
    "bind_gpu_block_pool",
    "shutdown",
)
"""Methods that are called once, before or after all requests, on both connectors."""
TIERS = "secondary_tiers"


class SwitchConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The configured connector, and the same connector without secondary tiers.

    With ``"bare_first": true`` in the configuration, the latter is built first.
    """

    tiered = False
    """Whether the connector with secondary tiers is active, for scheduler and worker."""
    seconds: ClassVar[dict[bool, float]] = {False: 0.0, True: 0.0}
    """Seconds in calls of each connector, by ``tiered``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        bare_first = vllm_config.kv_transfer_config.kv_connector_extra_config[
            BARE_FIRST
        ]
        both = {
            tiered: OffloadingConnector(
                _config_of(vllm_config, tiered=tiered), role, kv_cache_config
            )
            for tiered in (not bare_first, bare_first)
        }
        object.__setattr__(self, "_both", both)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            # tiers look for vLLM's objects on the stack, also while this one is being built
            return object.__getattribute__(self, name)
        both = object.__getattribute__(self, "_both")
        if name in FOR_BOTH:
            return lambda *arguments, **options: [
                getattr(each, name)(*arguments, **options) for each in both.values()
            ]
        found = getattr(both[SwitchConnector.tiered], name)
        return _timed(found) if callable(found) else found


def _timed(call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            SwitchConnector.seconds[SwitchConnector.tiered] += (
                time.perf_counter() - begin
            )

    return timed


def _config_of(vllm_config: Any, *, tiered: bool) -> Any:
    """Return the engine's configuration for one connector; each has its own file of rows, by its
    engine id."""
    transfer = vllm_config.kv_transfer_config
    extra = {
        name: value
        for name, value in transfer.kv_connector_extra_config.items()
        if name != BARE_FIRST
    }
    mine = copy.copy(vllm_config)
    mine.kv_transfer_config = dataclasses.replace(
        transfer,
        engine_id=f"{transfer.engine_id}-{'tiered' if tiered else 'bare'}",
        kv_connector_extra_config=extra if tiered else extra | {TIERS: []},
    )
    return mine
