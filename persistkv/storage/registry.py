"""Backends by URL scheme, over the entry points of group ``persistkv.backends``. The core names none of them."""

from __future__ import annotations

from importlib.metadata import entry_points

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError
from persistkv.storage.backend import Backend

ENTRY_POINT_GROUP = "persistkv.backends"


def backend_class(scheme: str) -> type[Backend]:
    """The driver of a URL scheme.

    :raises ConfigurationError: where there is none (the error names those there are), or it does not import.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if scheme not in found:
        raise ConfigurationError(
            "url scheme", scheme, f"one of {', '.join(sorted(found)) or 'none: no backend installed'}"
        )
    try:
        backend = found[scheme].load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError("url scheme", scheme, f"an installed driver ({error})") from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise ConfigurationError("url scheme", scheme, f"a driver; {found[scheme].value} is no Backend")
    return backend


def open_backend(url: str, *, read_only: bool = False) -> Backend:
    """Open the store that a URL names; errors as in ``Backend.open``."""
    parsed = StoreUrl.parse(url)
    return backend_class(parsed.scheme).open(parsed, read_only=read_only)
