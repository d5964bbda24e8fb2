"""Tenants in a store on each driver: packs and requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from persistkv.errors import ConfigurationError
from persistkv.storage.store.blocking import BlockingStore
from persistkv.tenants import DEFAULT_TENANT, tenant_key
from tests.storage.stores import end, manifests, refill

Keys = Callable[..., list[bytes]]
OpenStore = Callable[..., BlockingStore]


def test_put_equal_prefixes_of_tenants_are_stored_apart(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
) -> None:
    """Small blocks of one request id are staged together, and become packs of one tenant each."""
    store = open_store(store_url)
    prefix = keys(4)
    stored: dict[str, list[bytes]] = {}
    places = {DEFAULT_TENANT: 0, "anna": 10, "berta": 20}
    for tenant, place in places.items():
        names: list[bytes] = [tenant_key(tenant, key) for key in prefix]
        stored[tenant] = names
        # one block after the other, as an engine decodes
        for depth, name in enumerate(names):
            assert store.put("r", [name], [place + depth], [depth], tenant)
        store.end_request(end(f"r-{tenant}", names, tenant=tenant))
    store.flush()
    backend = store.view.backend
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
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store(store_url, max_age_s=100.0)
    first, second = keys(2), keys(2)
    store.put("r", first, [0, 1], [0, 1], "anna")
    store.put("r", second, [2, 3], [0, 1], "berta")
    store.end_request(end("r", first, tenant="anna"))
    transactions = store.store.queue.take(everything=False)
    (pack,) = transactions[0].packs
    assert (pack.tenant, pack.keys.unpack()) == ("anna", first)
    store.store.committer.drop_packs([pack])


def test_put_blocks_from_rows_make_pack_of_tenant(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
) -> None:
    store = open_store(store_url)
    names = keys(64)
    assert not store.put("r", names, range(64), range(64), "anna")
    store.flush()
    backend = store.view.backend
    (table,) = backend.tables(store.namespace, store.index.pack_ids())
    assert table.tenant == "anna"


@pytest.mark.parametrize("tenant", ["", "a\nb", "x" * 129])
def test_put_and_end_request_invalid_tenant_raise_and_store_nothing(
    store_url: str,
    open_store: OpenStore,
    keys: Keys,
    tenant: str,
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
