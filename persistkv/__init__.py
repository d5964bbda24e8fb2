"""persistkv keeps the KV cache of LLM inference on durable storage.

Importing it imports neither torch nor transformers: ``Engine``, which needs the extra ``persistkv[transformers]``, is
imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from persistkv.errors import (
    ConfigurationError,
    EngineClosedError,
    IdentityMismatchError,
    PersistKVError,
    PromptTooLongError,
    StoreError,
    StoreUnavailableError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from persistkv.integrations.transformers.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "Engine",
    "EngineClosedError",
    "IdentityMismatchError",
    "PersistKVError",
    "PromptTooLongError",
    "StoreError",
    "StoreUnavailableError",
    "UnsupportedModelError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("persistkv.integrations.transformers.engine").Engine
