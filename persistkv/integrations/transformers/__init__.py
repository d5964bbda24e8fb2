"""A small engine for Hugging Face models. Needs the extra ``persistkv[transformers]``.

Names are resolved when they are first used, so that the demo's command can be listed without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persistkv.integrations.transformers.engine import Engine
    from persistkv.integrations.transformers.results import EngineStats, GenerateResult, RequestStats

__all__ = ["Engine", "EngineStats", "GenerateResult", "RequestStats"]

_HOMES = {"Engine": "engine", "EngineStats": "results", "GenerateResult": "results", "RequestStats": "results"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
