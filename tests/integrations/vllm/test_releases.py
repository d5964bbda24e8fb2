"""The interface of the installed vLLM release, compared with the plugin's methods; run with every
release."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

TIER_HOOKS = {
    "bp_detector",
    "build_metric_definitions",
    "block_size_bytes",
    "cache_hit_source",
    "config_info",
    "config_info_keys",
    "drain_jobs",
    "get_finished_jobs",
    "get_stats",
    "has_pending_work",
    "lookup",
    "medium",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "serve_external_requests",
    "shutdown",
    "submit_load",
    "submit_store",
    "take_events",
    "tolerates_off_thread_polling",
    "touch",
}
WORKER_HOOKS = {"get_finished", "shutdown", "submit_load", "submit_store", "wait"}


def classes() -> list[tuple[type[Any], type[Any], set[str]]]:
    from vllm.v1.kv_offload.base import OffloadingWorker
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from persistkv.integrations.vllm import PersistKVPrewarm, PersistKVTier
    from persistkv.integrations.vllm.spec import CPUOffloadingWorker

    return [
        (PersistKVTier, SecondaryTierManager, TIER_HOOKS),
        (PersistKVPrewarm, SecondaryTierManager, TIER_HOOKS),
        (CPUOffloadingWorker, OffloadingWorker, WORKER_HOOKS),
    ]


def public(kind: type[Any]) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


def test_vllm_base_classes_have_only_known_hooks() -> None:
    for _, base, known in classes():
        assert public(base) <= known, (
            f"decide what the plugin does with these hooks of {base.__name__}"
        )


def test_plugin_hooks_accept_arguments_of_vllm_base_classes() -> None:
    for ours, base, known in classes():
        for name in sorted(public(base) & known):
            theirs = getattr(base, name)
            if not callable(theirs) or name in ("medium",):
                continue
            accepted = inspect.signature(getattr(ours, name)).parameters
            for parameter in inspect.signature(theirs).parameters.values():
                assert parameter.name in accepted, (
                    f"{ours.__name__}.{name} lacks {parameter.name}"
                )
                assert accepted[parameter.name].default == parameter.default
