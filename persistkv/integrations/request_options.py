"""Options of one request, the same for all engines."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from persistkv.base import REQUEST_PARAMETER, Priority, Retention, check_labels
from persistkv.config import parse_duration
from persistkv.errors import ConfigurationError
from persistkv.tenants import check_tenant

_WHERE = f"kv_transfer_params.{REQUEST_PARAMETER}"
"""Name of the options in errors."""


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
    """``Retention.pin``; ``persistkv unpin`` ends it."""
    ttl: str | None = None
    """``Retention.ttl_s`` as a duration such as ``30s`` or ``12h``."""
    priority: Priority = "normal"
    """``Retention.priority``."""
    tenant: str | None = None
    """Name of the tenant whose request it is, 1 to 128 characters: its blocks are not served to
    requests of other tenants. None: the default tenant, or none if the tier requires a name."""
    weights: str | None = None
    """Name of the weights that the request expects, for vLLM engines whose weights change while
    they run: a new name ends the use of the store for the earlier weights. None: those at the start
    of the engine. Other engines ignore it."""

    @property
    def retention(self) -> Retention:
        """How long the stored context is kept.

        :raises ConfigurationError: ``ttl`` is not a duration.
        """
        ttl_s = None
        if self.ttl is not None:
            ttl_s = parse_duration(self.ttl, name=f"{_WHERE}.ttl")
        return Retention(self.pin, ttl_s, self.priority)

    @classmethod
    def parse(cls, parameters: object) -> RequestOptions:
        """Return the options in ``kv_transfer_params``, as a caller gave it; the defaults if it is
        None or lacks ``persistkv``.

        :raises ConfigurationError: they are invalid.
        """
        if parameters is None:
            return cls()
        if not isinstance(parameters, Mapping):
            expected = (
                f'a mapping such as {{"{REQUEST_PARAMETER}": {{"store": false}}}}'
            )
            raise ConfigurationError("kv_transfer_params", parameters, expected)
        # absent options mean the same as ``true``: the defaults
        given = parameters.get(REQUEST_PARAMETER, True)
        if isinstance(given, bool):
            return cls(store=given, load=given)
        try:
            options = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            names = ", ".join(cls.__struct_fields__)
            expected = f"true, false, or an object with the options {names}: {error}"
            raise ConfigurationError(_WHERE, given, expected) from None
        _ = options.retention  # this raises if ``ttl`` is invalid
        check_labels(options.labels)
        if options.tenant is not None:
            check_tenant(f"{_WHERE}.tenant", options.tenant)
        return options
