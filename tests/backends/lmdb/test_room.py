"""What a full store has for payload: the catalogue takes what it needs, and little is kept free."""

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import committing

MIB = 1 << 20


@pytest.fixture
def placement():
    return "extents"


@pytest.fixture
def second_attempts(monkeypatch):
    """Counts the commits that found no room at once."""
    found = []
    make_room = committing.Committing._make_room

    def counted(self, more):
        found.append(more)
        return make_room(self, more)

    monkeypatch.setattr(committing.Committing, "_make_room", counted)
    return found


def turn_over(backend, namespace, count, together=1, **kind):
    """Commit so many packs of a kind, some in each commit; the most that the store ever took on disk."""
    most = 0
    for first in range(0, count, together):
        packs = [sample_pack(namespace, seed, **kind) for seed in range(first, first + together)]
        backend.commit(namespace, CommitBatch(packs))
        most = max(most, backend.stats().disk_bytes)
    return most


def test_full_store_is_mostly_payload(open_store, identity, second_attempts):
    backend = open_store("?capacity=64MiB")
    namespace = backend.open_namespace(identity).id
    assert turn_over(backend, namespace, 500, blocks=4, block_bytes=64 << 10) <= 64 * MIB
    assert backend.stats().stored_bytes > 0.95 * 64 * MIB
    assert not second_attempts, "a commit like the ones before it waits for nothing"


@pytest.mark.slow
def test_catalogue_of_small_blocks_gets_what_it_needs(open_store, identity):
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    assert turn_over(backend, namespace, 3000, 10, blocks=2) <= 16 * MIB
    assert backend.stats().stored_bytes > 0.6 * 16 * MIB


@pytest.mark.slow
def test_catalogue_grows_where_blocks_become_small(open_store, identity):
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    turn_over(backend, namespace, 8, blocks=64, block_bytes=64 << 10)
    assert turn_over(backend, namespace, 3000, 10, blocks=2) <= 16 * MIB
    assert backend.stats().stored_bytes > 0.4 * 16 * MIB
