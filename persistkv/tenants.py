"""Tenants: whose content a store holds.

Blocks of one tenant are never served to another. The keys of each tenant's blocks are its own
(``tenant_key``), so that equal prefixes of two tenants are stored twice; a pack holds blocks of one
tenant only, and its table names it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, TypeVar, get_args

from persistkv.base import GROUP_INDEX_BYTES, REQUEST_PARAMETER, OffloadKey
from persistkv.errors import ConfigurationError

DEFAULT_TENANT = "default"
"""Tenant of requests that name none."""
UnnamedTenant = Literal["default", "required"]
"""Setting for requests that name no tenant. ``default``: they belong to the default tenant;
``required``: they neither use nor fill a store."""
TENANT_OPTIONS: tuple[UnnamedTenant, ...] = get_args(UnnamedTenant)
MAX_TENANT_CHARACTERS = 128
TAG_BYTES = 16
"""Bytes by which the keys of a named tenant are longer than the engine's."""
K = TypeVar("K", bytes, OffloadKey)
_SHOWN = 40  # maximum number of characters of an invalid name that an error shows
_KNOWN_DIGESTS = 4096  # maximum number of digests that ``tenant_digest`` caches


def check_tenant(field: str, value: object) -> str:
    """Return the name of a tenant, after checking it.

    :param field: name of the setting or argument that has the value.
    :raises ConfigurationError: it is not text of 1 to 128 characters, or has control characters or
        lone surrogates.
    """
    if isinstance(value, str) and is_tenant(value):
        return value
    expected = f"1 to {MAX_TENANT_CHARACTERS} characters without control characters"
    shown = value
    if isinstance(value, str) and len(value) > _SHOWN:
        expected += f", not {len(value)}"
        shown = f"{value[:_SHOWN]}…"
    raise ConfigurationError(field, shown, expected)


def is_tenant(name: str) -> bool:
    """Return whether a text is a valid name of a tenant."""
    if not 1 <= len(name) <= MAX_TENANT_CHARACTERS:
        return False
    # refuse control characters (Cc), and surrogates (Cs), which UTF-8 cannot encode
    categories = map(unicodedata.category, name)
    return {"Cc", "Cs"}.isdisjoint(categories)


def request_tenant(
    given: str | None,
    kv_transfer_params: Mapping[str, Any] | None,
) -> str | None:
    """Return the tenant of a request; None: it names none.

    :param given: the argument ``tenant`` of the request; None: not given.
    :param kv_transfer_params: parameters of the request, which may name a tenant as
        ``{"persistkv": {"tenant": NAME}}``; None: there are none.
    :raises ConfigurationError: a name is invalid (``check_tenant``), the two names differ, or the
        parameters are no mapping.
    """
    parameters = {} if kv_transfer_params is None else kv_transfer_params
    if not isinstance(parameters, Mapping):
        raise ConfigurationError("kv_transfer_params", parameters, "a mapping")
    options = parameters.get(REQUEST_PARAMETER)
    named = None
    if isinstance(options, Mapping):
        named = options.get("tenant")
    if named is not None:
        check_tenant(f"kv_transfer_params.{REQUEST_PARAMETER}.tenant", named)
    if given is None:
        return named
    check_tenant("tenant", given)
    if named not in (None, given):
        expected = f"{named}, which kv_transfer_params name: a request has one tenant"
        raise ConfigurationError("tenant", given, expected)
    return given


def tenant_key(tenant: str, key: K) -> K:
    """Return the key under which a store holds a block of a tenant: keys of different tenants
    differ, also for equal tokens.

    Keys of the default tenant stay as they are. In the keys of another tenant, a digest of its name
    follows the block's hash; the index of the KV cache group stays at the end.

    :param tenant: a valid name.
    :param key: an ``OffloadKey`` of the engine. All keys of an engine have the same length.
    """
    if tenant == DEFAULT_TENANT:
        return key
    block_hash = key[:-GROUP_INDEX_BYTES]
    group_index = key[-GROUP_INDEX_BYTES:]
    return block_hash + tenant_digest(tenant) + group_index  # type: ignore[return-value]


class TenantKeys(dict[OffloadKey, OffloadKey]):
    """``tenant_key`` of one tenant by the engine's keys, for callers that ask for a key again and
    again."""

    def __init__(self, tenant: str) -> None:
        super().__init__()
        self._tenant = tenant

    def __missing__(self, key: OffloadKey) -> OffloadKey:
        own = tenant_key(self._tenant, key)
        self[key] = own
        return own


def engine_key(key: bytes, key_bytes: int) -> OffloadKey:
    """Return the engine's own key of a block from the key of any tenant; the reverse of
    ``tenant_key``.

    :param key_bytes: length of the engine's keys.
    """
    has_tag = len(key) == key_bytes + TAG_BYTES
    if not has_tag:
        return OffloadKey(key)
    block_hash = key[: key_bytes - GROUP_INDEX_BYTES]
    group_index = key[-GROUP_INDEX_BYTES:]
    return OffloadKey(block_hash + group_index)


@lru_cache(_KNOWN_DIGESTS)
def tenant_digest(tenant: str, secret: bytes = b"") -> bytes:
    """Return a digest of a tenant's name: 16 bytes in place of a name of any length.

    :param secret: up to 64 bytes, without which guesses of the name cannot be tested.
    """
    digest = blake2b(tenant.encode(), digest_size=TAG_BYTES, key=secret)
    return digest.digest()
