"""Options of the backend: an object in the value of ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from persistkv.config import convert_options
from persistkv.errors import MissingOptionError
from persistkv.integrations.block_options import BlockStoreOptions
from persistkv.tenants import DEFAULT_TENANT, check_tenant

WHERE = "SGLang backend persistkv"
SECTION = "persistkv"
"""Name of the object with these options."""


class SGLangOptions(BlockStoreOptions, frozen=True, kw_only=True):
    """Options of the backend ``persistkv`` for SGLang's HiCache: those of ``BlockStoreOptions``,
    for each pool, and the ones below."""

    model_path: str | None = None
    """Directory of the model's checkpoint, whose weights are fingerprinted."""
    weights: str | None = None
    """A name for the weights, which must change whenever they change. If it is set, the weights are
    not fingerprinted, and ``model_path`` is not needed."""
    attention_backend: str
    """Attention backend of the engine, such as ``fa3``: KV of another backend may differ."""
    kv_cache_dtype: str | None = None
    """Type of the numbers in the KV cache, such as ``fp8_e4m3``. Required if SGLang's pools show
    only ``uint8``."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """Time limit of each call that reads or writes. After it, pages are misses, or not stored."""
    tenant: str = DEFAULT_TENANT
    """Name of the tenant whose pages these are, 1 to 128 characters: SGLang does not tell backends
    whose request a page belongs to. Pages of other tenants are misses."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Names and values that are stored with each context."""

    def __post_init__(self) -> None:
        check_tenant(f"{WHERE} option tenant", self.tenant)
        if not self.attention_backend:
            raise MissingOptionError(
                f"{WHERE} option attention_backend",
                "the name of the engine's attention backend",
            )


def sglang_options(extra_config: Mapping[str, Any] | None) -> SGLangOptions:
    """Return the options in SGLang's ``extra_config``; raise ConfigurationError if they are missing
    or invalid."""
    section = (extra_config or {}).get(SECTION)
    if not isinstance(section, Mapping):
        raise MissingOptionError(
            WHERE, f'an object "{SECTION}" in --hicache-storage-backend-extra-config'
        )
    return convert_options(SGLangOptions, section, where=WHERE)
