"""Options of a ``persistkv`` entry of ``secondary_tiers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from persistkv.base import check_labels
from persistkv.config import StoreUrl, convert_options, with_option
from persistkv.errors import ConfigurationError
from persistkv.tiering.persistent import PersistentTierOptions

_WHERE = "secondary tier persistkv"


class VllmTierOptions(PersistentTierOptions, frozen=True, kw_only=True):
    """Options of the tier ``persistkv`` in vLLM: those of ``PersistentTierOptions``, and the ones
    below."""

    host: Literal["process", "thread"] = "process"
    capacity: int | str | None = None
    """Maximum bytes on disk of a store that this engine creates; ``persistkv set`` changes that of
    an existing one. May be set in the URL instead. None: as in the URL."""
    ttl: str | None = None
    """Duration such as ``7d`` from the last use of content to its expiry, for a store that this
    engine creates; ``persistkv set`` changes that of an existing one. May be set in the URL
    instead. None: as in the URL."""
    deadline: str | None = None
    """Time limit of one operation of a remote store, including retries. May be set in the URL
    instead. None: as in the URL."""
    policy: Literal["request", "chunk"] = "request"
    """``request``: vLLM offers every chunk of a request to the tier, including prefix hits, and the
    store lists the whole context. ``chunk``: it offers newly computed chunks only."""
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Requests that have fewer tokens when their first chunks arrive are not persisted. 0: no
    minimum."""
    prefill_tokens_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    """Tokens per second, above 0, that the engine computes, for ``load_policy``. Of several stores,
    the first one's value applies. None: as measured."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Names and values that are stored with each context and shown by tools."""
    weights: str | None = None
    """A name for the weights, which must change whenever they change. Needed for weights that are
    not files on this machine. If it is set, the weights are not fingerprinted."""
    adapters: str | None = None
    """A name for the set of LoRA adapters, which must change whenever an adapter changes without a
    new name, because vLLM's keys distinguish adapters only by name. Required if LoRA is enabled."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Locality of the store in vLLM's events. None: ``REMOTE`` if the backend is remote, else
    ``LOCAL``."""

    def __post_init__(self) -> None:
        _ = self.tier_options  # this raises if an option of the tier is invalid
        check_labels(self.labels)

    @property
    def scheme(self) -> str:
        """The kind of store, e.g. ``lmdb``."""
        return StoreUrl.parse(self.url).scheme

    @property
    def tier_options(self) -> dict[str, Any]:
        """The options to pass to ``PersistentTier``; ``capacity``, ``ttl`` and ``deadline`` are
        added to its URL.

        :raises ConfigurationError: one of these three is set both in the URL and as an option.
        """
        url = self.url
        url_options = StoreUrl.parse(url).options
        added = {"capacity": self.capacity, "ttl": self.ttl, "deadline": self.deadline}
        for name, value in added.items():
            if value is None:
                continue
            # the option is given twice: it would be unclear which value counts
            if name in url_options:
                raise ConfigurationError(
                    f"{_WHERE} option {name}", value, "none: the url has it too"
                )
            url = with_option(url, name, value)
        options = {}
        for name in PersistentTierOptions.__struct_fields__:
            options[name] = getattr(self, name)
        options["url"] = url
        return options


def vllm_options(options: Mapping[str, Any]) -> VllmTierOptions:
    """Convert the options of a ``persistkv`` entry of ``secondary_tiers``; raise ConfigurationError
    if one is invalid.
    """
    return convert_options(VllmTierOptions, options, where=_WHERE)
