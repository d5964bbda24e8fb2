"""Options of the adapter, from ``adapter_params``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from persistkv.errors import MissingOptionError
from persistkv.integrations.block_options import BlockStoreOptions
from persistkv.tenants import UnnamedTenant

WHERE = "LMCache adapter persistkv"
NAME_OF_WEIGHTS = "name:"
"""Start of a value of ``models`` that is a name of the weights, not a directory."""


class LMCacheOptions(BlockStoreOptions, frozen=True, kw_only=True):
    """Options of the adapter ``persistkv`` for LMCache: those of ``BlockStoreOptions``, for each
    layout of objects, and the ones below."""

    models: dict[str, str]
    """Name of each model, as the engine sends it → directory of its checkpoint, whose weights are
    fingerprinted; or ``name:`` and a name that changes whenever the weights change. Other models
    are neither stored nor found."""
    engine: str
    """The engine, its release and its attention backend, e.g. ``vllm 0.32 FLASH_ATTN``: their KV
    may differ without notice."""
    lease_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """Seconds after which the lock of a lookup expires if it is not unlocked."""
    delete_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Time limit of a deletion, of a list, and of the opening at the start."""
    tenant: UnnamedTenant = "default"
    """Tenant of objects without a ``cache_salt``. ``default``: the default tenant. ``required``:
    these objects are neither stored nor found. Any other object's salt is its tenant's name."""

    def __post_init__(self) -> None:
        needed = {
            "models": "the directory of each model's checkpoint",
            "engine": "the engine, its release and its attention backend",
        }
        for name, meaning in needed.items():
            if not getattr(self, name):
                raise MissingOptionError(f"{WHERE} option {name}", meaning)
