"""persistkv keeps the KV cache of LLM inference on durable storage.

Importing it imports neither torch nor transformers: all names except the errors are imported at
their first use. ``Engine``, ``load`` and ``save`` need the extra ``persistkv[transformers]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from persistkv.errors import (
    ConfigurationError,
    EngineClosedError,
    IdentityMismatchError,
    MissingExtraError,
    PersistKVError,
    PromptTooLongError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedModelError,
    UnsupportedReleaseError,
)

if TYPE_CHECKING:
    from persistkv.integrations.transformers.engine import Engine
    from persistkv.integrations.transformers.persistent_cache import (
        PersistentCache,
        load,
        save,
    )
    from persistkv.storage.blocks import BlockIdentity, BlockStore, CompletionQueue
    from persistkv.storage.inspection.handle import StoreHandle, open_store
    from persistkv.storage.inspection.selection import Selection

__version__ = "0.1.0"

__all__ = [
    "BlockIdentity",
    "BlockStore",
    "CompletionQueue",
    "ConfigurationError",
    "Engine",
    "EngineClosedError",
    "IdentityMismatchError",
    "MissingExtraError",
    "PersistKVError",
    "PersistentCache",
    "PromptTooLongError",
    "Selection",
    "StoreError",
    "StoreHandle",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "UnsupportedModelError",
    "UnsupportedReleaseError",
    "__version__",
    "load",
    "open_store",
    "save",
]

_LAZY = {
    "BlockIdentity": "persistkv.storage.blocks",
    "BlockStore": "persistkv.storage.blocks",
    "CompletionQueue": "persistkv.storage.blocks",
    "Engine": "persistkv.integrations.transformers.engine",
    "PersistentCache": "persistkv.integrations.transformers.persistent_cache",
    "Selection": "persistkv.storage.inspection.selection",
    "StoreHandle": "persistkv.storage.inspection.handle",
    "load": "persistkv.integrations.transformers.persistent_cache",
    "open_store": "persistkv.storage.inspection.handle",
    "save": "persistkv.integrations.transformers.persistent_cache",
}
"""The module of each name that is imported at its first use."""


_EXTRAS = {"torch": "transformers", "transformers": "transformers"}
"""The extra that installs each optional package which a module of ``_LAZY`` imports."""


def __getattr__(name: str) -> Any:
    """Import a name at its first use; raise MissingExtraError if it needs a package of an extra
    that is not installed."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        # the absence of any other module is a defect of the installation
        if error.name not in _EXTRAS:
            raise
        raise MissingExtraError(error.name, _EXTRAS[error.name]) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
