"""Payload in a full store: the catalogue takes the space that it needs, and little space stays free."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from persistkv.errors import StoreFullError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import tables
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.environment import Environment
from tests.backends.lmdb.conftest import Opener

MIB = 1 << 20


@pytest.fixture
def placement() -> str:
    return "extents"


@pytest.fixture
def second_attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record each commit that needs a second attempt because space was lacking."""
    found = []
    age = Environment.age

    def counted(self: Environment) -> int:
        found.append(age(self))
        return found[-1]

    monkeypatch.setattr(Environment, "age", counted)
    return found


def turn_over(backend: LmdbBackend, namespace: bytes, count: int, together: int = 1, **kind: Any) -> int:
    """Commit ``count`` packs of a kind, ``together`` packs per commit. Return the maximum size on disk, in bytes."""
    most = 0
    for first in range(0, count, together):
        packs = [sample_pack(namespace, seed, **kind) for seed in range(first, first + together)]
        backend.commit(namespace, CommitBatch(packs))
        most = max(most, backend.stats().disk_bytes)
    return most


def test_full_store_is_mostly_payload(open_store: Opener, identity: Identity, second_attempts: list[int]) -> None:
    backend = open_store("?capacity=64MiB")
    namespace = backend.open_namespace(identity).id
    assert turn_over(backend, namespace, 500, blocks=4, block_bytes=64 << 10) <= 64 * MIB
    assert backend.stats().stored_bytes > 0.95 * 64 * MIB
    assert not second_attempts, "a commit like the ones before it waits for nothing"


def test_large_batches_of_small_packs_push_nothing_out_while_there_is_room(
    open_store: Opener, identity: Identity, second_attempts: list[int]
) -> None:
    """Each batch rewrites more catalogue pages than are left before the driver detects that the catalogue is full."""
    backend = open_store("?capacity=1GiB")
    namespace = backend.open_namespace(identity).id
    together, batches = 800, 6
    for first in range(0, batches * together, together):
        packs = [sample_pack(namespace, seed, blocks=20, block_bytes=512) for seed in range(first, first + together)]
        assert not backend.commit(namespace, CommitBatch(packs)).evicted
    assert backend.stats().packs == batches * together
    assert second_attempts == []


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("blocks", "stored"), [(96, True), (512, False)])
def test_what_found_no_room_at_once_is_not_kept(
    open_store: Opener, identity: Identity, second_attempts: list[int], no_collector: None, blocks: int, stored: bool
) -> None:
    """The commit drops its references to the rows when it ends, without a run of the garbage collector."""
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    turn_over(backend, namespace, 80, blocks=4, block_bytes=64 << 10)
    second_attempts.clear()
    pack = sample_pack(namespace, 1000, blocks=blocks, block_bytes=64 << 10)
    pack_id, alive = pack.pack_id, weakref.ref(pack)
    with suppress(StoreFullError):
        backend.commit(namespace, CommitBatch([pack]))
    del pack
    assert second_attempts or not stored
    assert alive() is None
    assert (pack_id in tables(backend, namespace)) is stored


@pytest.mark.slow
def test_catalogue_of_small_blocks_gets_what_it_needs(open_store: Opener, identity: Identity) -> None:
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    assert turn_over(backend, namespace, 3000, 10, blocks=2) <= 16 * MIB
    assert backend.stats().stored_bytes > 0.6 * 16 * MIB


@pytest.mark.slow
def test_catalogue_grows_where_blocks_become_small(open_store: Opener, identity: Identity) -> None:
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    turn_over(backend, namespace, 8, blocks=64, block_bytes=64 << 10)
    assert turn_over(backend, namespace, 3000, 10, blocks=2) <= 16 * MIB
    assert backend.stats().stored_bytes > 0.4 * 16 * MIB
