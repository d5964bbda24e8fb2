"""Names of tenants, and the keys of their blocks."""

from __future__ import annotations

from typing import Any

import pytest

from persistkv.base import get_offload_group_idx
from persistkv.errors import ConfigurationError
from persistkv.tenants import (
    DEFAULT_TENANT,
    check_tenant,
    engine_key,
    request_tenant,
    tenant_key,
)


@pytest.mark.parametrize("name", ["a", "default", "Zoë & co.", "x" * 128, "a/b=c"])
def test_check_tenant_valid_name_is_returned(name: str) -> None:
    assert check_tenant("tenant", name) == name


@pytest.mark.parametrize(
    "name", ["", "x" * 129, "a\nb", "a\0", "\x7f", "\ud800", b"bytes", 7, None]
)
def test_check_tenant_invalid_name_raises_and_names_field_and_range(
    name: object,
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_tenant("hint tenant", name)
    assert caught.value.field == "hint tenant"
    assert "1 to 128 characters" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_tenant_key_differs_by_tenant_and_keeps_group() -> None:
    tenants = [DEFAULT_TENANT, "anna", "berta", "x" * 128]
    made: set[bytes] = set()
    for block_hash in (b"short", bytes(32), bytes(31) + b"\1"):
        for group in (0, 7):
            key = block_hash + group.to_bytes(4, "big")
            assert tenant_key(DEFAULT_TENANT, key) == key
            for tenant in tenants:
                found = tenant_key(tenant, key)
                assert found == tenant_key(tenant, key)
                assert get_offload_group_idx(found) == group
                assert engine_key(found, len(key)) == key
                made.add(found)
    assert len(made) == 3 * 2 * len(tenants)


def test_engine_key_of_other_length_is_returned_unchanged() -> None:
    key = bytes(36)
    assert engine_key(key, 36) == key
    assert engine_key(key, 20) == bytes(20), (
        "that of a tenant whose hashes have 16 bytes"
    )
    assert engine_key(b"another engine's", 36) == b"another engine's"


@pytest.mark.parametrize("parameters", [["tenant"], "tenant", 7, []])
def test_request_tenant_parameters_of_another_type_raise(parameters: Any) -> None:
    with pytest.raises(ConfigurationError, match="kv_transfer_params"):
        request_tenant(None, parameters)
    with pytest.raises(ConfigurationError, match="kv_transfer_params"):
        request_tenant("anna", parameters)
