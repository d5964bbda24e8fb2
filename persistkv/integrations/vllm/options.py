"""Options of a ``persistkv`` entry of ``secondary_tiers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from persistkv.config import StoreUrl, convert_options
from persistkv.errors import ConfigurationError
from persistkv.tiering.persistent import PersistentTierOptions

_WHERE = "secondary tier persistkv"
_URL_OPTIONS = ("capacity", "ttl", "deadline")


class VllmTierOptions(PersistentTierOptions, frozen=True, kw_only=True):
    """Options of the tier: those of ``PersistentTier``, and these."""

    host: Literal["process", "thread"] = "process"
    capacity: int | str | None = None
    """The same as in the URL: bound on the bytes of the store."""
    ttl: str | None = None
    """The same as in the URL: time after its last use until content expires."""
    deadline: str | None = None
    """The same as in the URL, for a remote store: time limit of one operation, including its retries."""
    policy: Literal["request", "chunk"] = "request"
    """``request``: every chunk of a request is offered, including prefix hits, and its whole context is listed.
    ``chunk``: newly computed chunks only."""
    min_tokens: int = 0
    """Requests that have fewer tokens when their first chunks arrive are not persisted."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Stored with each context and shown by tools."""
    weights: str | None = None
    """A name for the weights, which must change whenever they change. Needed for weights that are not files on this
    machine. If it is set, the weights are not fingerprinted."""
    adapters: str | None = None
    """A name for the set of LoRA adapters, which must change whenever an adapter changes without a new name, because
    vLLM's keys distinguish adapters only by name. Required if LoRA is enabled."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Locality of the store in vLLM's events. None: ``REMOTE`` if the backend is remote, else ``LOCAL``."""

    def __post_init__(self) -> None:
        if self.min_tokens < 0:
            raise ConfigurationError(f"{_WHERE} option min_tokens", self.min_tokens, "0 tokens or more")

    @property
    def scheme(self) -> str:
        """The kind of store, e.g. ``lmdb``."""
        return StoreUrl.parse(self.url).scheme

    @property
    def tier_options(self) -> dict[str, Any]:
        """The options of ``PersistentTier``. The URL gets the options that are set outside of it.

        :raises ConfigurationError: an option is set both in the URL and outside of it.
        """
        known = StoreUrl.parse(self.url).options
        url = self.url
        for name in _URL_OPTIONS:
            value = getattr(self, name)
            if value is None:
                continue
            if name in known:
                raise ConfigurationError(f"{_WHERE} option {name}", value, "none: the url has it too")
            url += f"{'&' if '?' in url else '?'}{name}={quote(str(value))}"
        return {name: getattr(self, name) for name in PersistentTierOptions.__struct_fields__} | {"url": url}


def vllm_options(options: Mapping[str, Any]) -> VllmTierOptions:
    """Check the options of a tier's entry.

    :raises ConfigurationError: an option is invalid; the error names it.
    """
    checked = convert_options(VllmTierOptions, options, where=_WHERE)
    _ = checked.tier_options
    return checked
