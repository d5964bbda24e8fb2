"""Plugin of the entry point group ``vllm.general_plugins``: vLLM calls it in each of its processes, repeatedly."""

from __future__ import annotations

from contextlib import suppress

from persistkv.integrations.vllm.regions import remove_leftovers

_PACKAGE = "persistkv.integrations.vllm"


def register() -> None:
    """Register the tiers by short names and the spec; remove the files of killed engines' primary tiers."""
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    for register_name, name, class_name in (
        (SecondaryTierFactory.register_tier, "persistkv", "PersistKVTier"),
        (SecondaryTierFactory.register_tier, "persistkv-prewarm", "PersistKVPrewarm"),
        (OffloadingSpecFactory.register_spec, "PersistKVSpec", "PersistKVSpec"),
    ):
        with suppress(ValueError):  # registered before
            register_name(name, _PACKAGE, class_name)
    remove_leftovers()
