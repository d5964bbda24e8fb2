"""What a ``persistkv`` entry of ``secondary_tiers`` may set, and what a request may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from persistkv.config import StoreUrl, convert_options
from persistkv.errors import ConfigurationError

REQUEST_PARAMETER = "persistkv"
"""Where a request says something to this tier, among its ``kv_transfer_params``."""

_WHERE = "secondary tier persistkv"
_URL_OPTIONS = ("capacity", "ttl", "deadline")


class VllmTierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the tier."""

    url: str
    """The store, e.g. ``lmdb:///var/cache/kv`` or ``s3://bucket/prefix``, with options of its own."""
    capacity: int | str | None = None
    """The same as in the URL: bound on the bytes of the store."""
    ttl: str | None = None
    """The same as in the URL: how long what nobody uses is kept."""
    deadline: str | None = None
    """The same as in the URL, for a store behind a network: time for one operation, its retries included."""
    codec: str = "raw"
    """What new packs are written with: ``raw``, ``planes`` or ``zstd``."""
    durability: str = "commit"
    """``commit``, or ``interval:5s``."""
    policy: Literal["request", "chunk"] = "request"
    """``request``: every chunk of a request is offered, prefix hits included, and its context is listed as a whole.
    ``chunk``: newly computed chunks only."""
    min_tokens: int = 0
    """Requests that have fewer tokens when their first chunks arrive are not persisted."""
    io_threads: int = 2
    """Threads of the store's process that read, verify, encode and decode, beside the one that writes."""
    labels: dict[str, str] = {}
    """Shown with each context that is stored."""
    strict_identity: bool = False
    """Refuse a store that holds what other models left, and nothing of this one."""
    weights: str | None = None
    """A name for the weights, to be changed whenever they change. For weights that are not files on this machine, which
    are fingerprinted; where it is set, nothing is."""
    adapters: str | None = None
    """A name for the set of LoRA adapters, to be changed whenever one of them changes under its name: vLLM's keys
    tell adapters apart by name only. Required where LoRA is enabled."""
    host: Literal["process", "thread"] = "process"
    """Where the store runs."""
    queue_bytes: int | str = "1GiB"
    """Bound on the raw bytes of stores in flight; past it they are dropped."""
    staging_bytes: int | str = "256MiB"
    """Bound on the memory of the store's process beyond its index."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """vLLM's own: what events say of where the store is. None: ``REMOTE`` for ``s3://``, else ``LOCAL``."""

    def __post_init__(self) -> None:
        if self.min_tokens < 0:
            raise ConfigurationError(f"{_WHERE} option min_tokens", self.min_tokens, "0 tokens or more")

    @property
    def scheme(self) -> str:
        """The kind of store, e.g. ``lmdb``."""
        return StoreUrl.parse(self.url).scheme

    @property
    def full_url(self) -> str:
        """The URL with the options that stand beside it.

        :raises ConfigurationError: one stands in both places.
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
        return url


def tier_options(options: Mapping[str, Any]) -> VllmTierOptions:
    """Check the options of a tier's entry.

    :raises ConfigurationError: naming the option.
    """
    if "url" not in options:
        raise ConfigurationError(f"{_WHERE} option url", None, "a store's URL, e.g. lmdb:///var/cache/kv")
    checked = convert_options(VllmTierOptions, options, where=_WHERE)
    _ = checked.full_url
    return checked


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_transfer_params={"persistkv": {"store": false}}``; ``{"persistkv": false}`` is both."""

    store: bool = True
    """Whether the request's context may be persisted."""
    load: bool = True
    """Whether the request may be served from the store."""


BOTH = RequestOptions()
NEITHER = RequestOptions(store=False, load=False)


def request_options(parameters: Mapping[str, Any] | None) -> RequestOptions:
    """What a request asks for.

    :raises ConfigurationError: it is not understood.
    """
    asked = parameters.get(REQUEST_PARAMETER, True) if parameters else True
    if isinstance(asked, bool):
        return BOTH if asked else NEITHER
    try:
        return msgspec.convert(asked, RequestOptions)
    except msgspec.ValidationError:
        expected = 'true, false, or {"store": true, "load": true}'
        raise ConfigurationError(f"kv_transfer_params.{REQUEST_PARAMETER}", asked, expected) from None
