"""Tenants in a store on each driver: names, keys, packs, requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from persistkv.base import get_offload_group_idx
from persistkv.errors import ConfigurationError
from persistkv.storage.blocking import BlockingStore
from persistkv.storage.tenants import DEFAULT_TENANT, check_tenant, tenant_key
from tests.storage.stores import end, manifests, refill

Keys = Callable[..., list[bytes]]
OpenStore = Callable[..., BlockingStore]


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
                assert tenant == DEFAULT_TENANT or len(found) == 36
                made.add(found)
    assert len(made) == 3 * 2 * len(tenants)


def test_put_equal_prefixes_of_tenants_are_stored_apart(
    store_url: str, open_store: OpenStore, keys: Keys
) -> None:
    """Small blocks of one request id are staged together, and become packs of one tenant each."""
    store = open_store(store_url)
    prefix = keys(4)
    stored: dict[str, list[bytes]] = {}
    places = {DEFAULT_TENANT: 0, "anna": 10, "berta": 20}
    for tenant, place in places.items():
        names = [tenant_key(tenant, key) for key in prefix]
        stored[tenant] = names
        # one block after the other, as an engine decodes
        for depth, name in enumerate(names):
            assert store.put("r", [name], [place + depth], [depth], tenant)
        store.end_request(end(f"r-{tenant}", names, tenant=tenant))
    store.flush()
    backend = store.catalogue.backend
    tables = backend.tables(store.namespace, store.index.pack_ids())
    assert {table.tenant: table.keys.unpack() for table in tables} == stored
    assert len(tables) == 3
    found = {head.id: head.tenant for head in manifests(store)}
    assert found == {f"manifest-r-{tenant}": tenant for tenant in places}
    before = refill(store)
    for tenant, place in places.items():
        assert store.read(stored[tenant], range(4)) == []
        assert (store.rows.array[:4] == before[place : place + 4]).all()


def test_end_request_writes_only_packs_of_its_tenant(
    store_url: str, open_store: OpenStore, keys: Keys
) -> None:
    store = open_store(store_url, max_age_s=100.0)
    first, second = keys(2), keys(2)
    store.put("r", first, [0, 1], [0, 1], "anna")
    store.put("r", second, [2, 3], [0, 1], "berta")
    store.end_request(end("r", first, tenant="anna"))
    transactions = store.store.queue.take(everything=False)
    (pack,) = transactions[0].packs
    assert (pack.tenant, pack.keys.unpack()) == ("anna", first)
    store.store.committer.drop([pack])


def test_put_blocks_from_rows_make_pack_of_tenant(
    store_url: str, open_store: OpenStore, keys: Keys
) -> None:
    store = open_store(store_url)
    names = keys(64)
    assert not store.put("r", names, range(64), range(64), "anna")
    store.flush()
    backend = store.catalogue.backend
    (table,) = backend.tables(store.namespace, store.index.pack_ids())
    assert table.tenant == "anna"


@pytest.mark.parametrize("tenant", ["", "a\nb", "x" * 129])
def test_put_and_end_request_invalid_tenant_raise_and_store_nothing(
    store_url: str, open_store: OpenStore, keys: Keys, tenant: str
) -> None:
    store = open_store(store_url)
    names = keys(1)
    with pytest.raises(ConfigurationError, match="tenant"):
        store.put("r", names, [0], [0], tenant)
    with pytest.raises(ConfigurationError, match="tenant"):
        store.end_request(end("r", names, tenant=tenant))
    store.flush()
    assert store.counters.stored_blocks == 0
    assert manifests(store) == []
