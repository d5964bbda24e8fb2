"""persistkv keeps the KV cache of LLM inference on durable storage.

Importing it imports neither torch nor transformers. ``Engine`` needs the extra ``persistkv[transformers]``; it and
``open_store`` are imported at their first use.
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
    from persistkv_tools.options import Selection
    from persistkv_tools.store import Store, open_store

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "Engine",
    "EngineClosedError",
    "IdentityMismatchError",
    "PersistKVError",
    "PromptTooLongError",
    "Selection",
    "Store",
    "StoreError",
    "StoreUnavailableError",
    "UnsupportedModelError",
    "__version__",
    "open_store",
]

_LAZY = {
    "Engine": "persistkv.integrations.transformers.engine",
    "Selection": "persistkv_tools.options",
    "Store": "persistkv_tools.store",
    "open_store": "persistkv_tools.store",
}
"""The module of each name that is imported at its first use."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
