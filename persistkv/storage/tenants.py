"""Tenants: whose content a store holds.

Blocks of one tenant are never served to another. A tier gives the store each tenant's blocks under
keys of their own (``tenant_key``), so that equal prefixes of two tenants are stored twice; a pack
holds blocks of one tenant only, and its table names it.
"""

from __future__ import annotations

import unicodedata
from hashlib import blake2b

from persistkv.base import (
    GROUP_INDEX_BYTES,
    get_offload_block_hash,
)
from persistkv.errors import ConfigurationError

DEFAULT_TENANT = "default"
"""Tenant of requests that name none."""
MAX_TENANT_CHARACTERS = 128
_HASH_BYTES = 32
_SHOWN = 40  # characters of an invalid name in errors


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
    # control characters, and surrogates, which UTF-8 does not encode
    categories = map(unicodedata.category, name)
    return {"Cc", "Cs"}.isdisjoint(categories)


def tenant_key(tenant: str, key: bytes) -> bytes:
    """Return the key under which a store holds a block of a tenant: keys of different tenants
    differ, also for equal tokens.

    Keys of the default tenant stay as they are. In those of others, a digest of 32 bytes replaces
    the block's hash; the index of the KV cache group stays.

    :param tenant: a valid name.
    :param key: an ``OffloadKey``.
    """
    if tenant == DEFAULT_TENANT:
        return key
    # of fixed length: a name may be longer than the key of a digest
    own = blake2b(tenant.encode(), digest_size=_HASH_BYTES).digest()
    block_hash = get_offload_block_hash(key)
    digest = blake2b(block_hash, digest_size=_HASH_BYTES, key=own).digest()
    return digest + key[-GROUP_INDEX_BYTES:]
