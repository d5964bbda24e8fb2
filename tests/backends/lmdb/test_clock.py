"""Ages go by a machine's clock, which may be wrong, and put right."""

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import tables
from persistkv.testing.samples import sample_manifest, sample_pack
from persistkv_lmdb import recency

DAY_S = 86_400


class Clock:
    def __init__(self):
        self.now = 2_000_000_000.0

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(recency, "time", found)
    return found


def put(backend, namespace, seed):
    pack = sample_pack(namespace, seed)
    backend.commit(namespace, CommitBatch([pack], [sample_manifest(f"r{seed}", seed, packs=[pack.pack_id])]))
    return pack.pack_id


def test_a_clock_that_was_ahead_keeps_nothing_for_years(open_store, identity, clock):
    backend = open_store("?ttl=1d")
    namespace = backend.open_namespace(identity).id
    clock.now += 3000 * DAY_S
    future = put(backend, namespace, 1)
    clock.now -= 3000 * DAY_S
    present = put(backend, namespace, 2)
    assert set(tables(backend, namespace)) == {future, present}, "nobody can tell when it was used"
    clock.now += 2 * DAY_S
    for seed in range(3, 6):
        put(backend, namespace, seed)
    assert {future, present}.isdisjoint(tables(backend, namespace))
    assert {manifest.id for manifest in backend.manifests(namespace)} == {"r3", "r4", "r5"}


def test_a_clock_that_goes_back_a_little_makes_nothing_younger(open_store, identity, clock):
    backend = open_store("?ttl=1h")
    namespace = backend.open_namespace(identity).id
    first = put(backend, namespace, 1)
    clock.now -= 600
    second = put(backend, namespace, 2)
    clock.now += 600 + 3601
    put(backend, namespace, 3)
    assert {first, second}.isdisjoint(tables(backend, namespace))
