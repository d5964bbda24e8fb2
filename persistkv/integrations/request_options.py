"""Options of one request, the same for all engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from persistkv.errors import ConfigurationError

REQUEST_PARAMETER = "persistkv"
"""Key of these options in a request's ``kv_transfer_params``."""


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that one request passes as ``kv_transfer_params={"persistkv": {"store": false}}``.

    ``{"persistkv": false}`` sets ``store`` and ``load`` to false.
    """

    store: bool = True
    """Whether the request's context may be persisted."""
    load: bool = True
    """Whether stored KV may be loaded for the request."""
    labels: dict[str, str] = {}
    """Names and values that are stored with the request's context and shown by ``persistkv ls``."""
    pin: bool = False
    """Whether the stored context is kept until ``persistkv unpin``: it is neither evicted nor does it expire."""

    @classmethod
    def parse(cls, parameters: Mapping[str, Any] | None) -> RequestOptions:
        """Return the options in ``kv_transfer_params``; the defaults if it has none.

        :raises ConfigurationError: they are invalid.
        """
        given = parameters.get(REQUEST_PARAMETER, True) if parameters else True
        if isinstance(given, bool):
            return cls(given, given)
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError:
            expected = 'true, false, or {"store": true, "load": true, "labels": {"name": "value"}, "pin": false}'
            raise ConfigurationError(f"kv_transfer_params.{REQUEST_PARAMETER}", given, expected) from None
