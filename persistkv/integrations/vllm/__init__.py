"""vLLM: persistkv as a secondary tier of its KV offloading. See docs/vllm.md.

If the package is installed in vLLM's environment, an entry ``{"type": "persistkv", …}`` of
``secondary_tiers`` enables it. Names are resolved when they are first used, because the rest of
this package does not need vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persistkv.integrations.vllm.prewarm import PersistKVPrewarm
    from persistkv.integrations.vllm.spec import PersistKVSpec
    from persistkv.integrations.vllm.tier import PersistKVTier

__all__ = ["PersistKVPrewarm", "PersistKVSpec", "PersistKVTier"]

_HOMES = {
    "PersistKVPrewarm": "prewarm",
    "PersistKVSpec": "spec",
    "PersistKVTier": "tier",
}
"""Exported name → module of this package that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
