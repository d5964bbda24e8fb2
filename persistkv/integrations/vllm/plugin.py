"""Plugin of the entry point group ``vllm.general_plugins``: vLLM calls it in each of its processes, repeatedly."""

from __future__ import annotations

import logging
from collections.abc import Callable

from persistkv.integrations.vllm.regions import remove_leftovers

logger = logging.getLogger(__name__)

TIER_TYPE = "persistkv"
PREWARM_TYPE = "persistkv-prewarm"
_PACKAGE = "persistkv.integrations.vllm"


def register() -> None:
    """Register the tiers by short names and the spec as ``PersistKVSpec``; remove the files of killed engines' primary
    tiers. vLLM calls this in each of its processes, repeatedly.
    """
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    _register(SecondaryTierFactory.register_tier, TIER_TYPE, "PersistKVTier")
    _register(SecondaryTierFactory.register_tier, PREWARM_TYPE, "PersistKVPrewarm")
    _register(OffloadingSpecFactory.register_spec, "PersistKVSpec", "PersistKVSpec")
    remove_leftovers()


def _register(register_name: Callable[[str, str, str], None], name: str, class_name: str) -> None:
    try:
        register_name(name, _PACKAGE, class_name)
    except ValueError:
        logger.debug("%s was registered before", name)
