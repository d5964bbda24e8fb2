"""Options of an lmdb URL, and what the store remembers of them."""

from contextlib import closing

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, StoreFullError
from persistkv.storage.backend import CommitBatch
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import LmdbBackend

GIB = 1 << 30


@pytest.mark.parametrize("capacity", ["-5", "0", "1023KiB", "65TiB", "lots", "", "1e9", "inf", "9" * 400 + "GiB"])
def test_bad_capacity_is_named_and_creates_nothing(open_store, path, capacity):
    with pytest.raises(ConfigurationError, match="lmdb option capacity") as caught:
        open_store(f"?capacity={capacity}")
    assert caught.value.value == capacity
    assert "\n" not in str(caught.value)
    assert not path.exists()


def test_path_with_nul(open_store):
    with pytest.raises(ConfigurationError, match="url"):
        open_store(location="/tmp/a%00b")


def test_capacity_is_remembered(open_store, path):
    first = open_store()
    assert first.stats().capacity == 10 * GIB
    first.close()
    second = open_store("?capacity=3GiB")
    assert second.stats().capacity == 3 * GIB
    second.close()
    assert open_store(read_only=True).stats().capacity == 3 * GIB
    assert open_store().stats().capacity == 3 * GIB


def test_second_handle_changes_the_capacity_of_both(open_store):
    first = open_store("?capacity=8MiB")
    open_store("?capacity=2MiB")
    assert first.stats().capacity == 2 << 20


def test_lowered_capacity_keeps_what_was_used_last(open_store, identity, placement):
    large = open_store("?capacity=32MiB")
    namespace = large.open_namespace(identity).id
    packs = [sample_pack(namespace, seed, blocks=16, block_bytes=1 << 16) for seed in range(12)]
    for pack in packs:
        large.commit(namespace, CommitBatch([pack]))
    held = large.stats().disk_bytes
    large.close()

    small = open_store("?capacity=4MiB")
    assert {table.pack_id for table in small.changes(namespace, None).added} == {pack.pack_id for pack in packs}
    assert not small.commit(namespace, CommitBatch(packs[11:])).evicted  # held already: nothing to write
    fresh = sample_pack(namespace, 40, blocks=16, block_bytes=1 << 16)
    evicted = small.commit(namespace, CommitBatch([fresh])).evicted
    gone = {"inline": 10, "extents": 11}[placement]  # extents leave 1/16 more for the commit that follows
    assert [table.pack_id for table in evicted] == [pack.pack_id for pack in packs[:gone]]
    kept = [*packs[gone:], fresh]
    assert {table.pack_id for table in small.changes(namespace, None).added} == {pack.pack_id for pack in kept}
    assert small.stats().disk_bytes <= held + (1 << 20)


def test_raised_capacity_gives_room_at_once(open_store, identity):
    small = open_store("?capacity=2MiB")
    namespace = small.open_namespace(identity).id
    pack = sample_pack(namespace, 1, blocks=64, block_bytes=1 << 16)
    with pytest.raises(StoreFullError):
        small.commit(namespace, CommitBatch([pack]))
    open_store("?capacity=16MiB")
    small.commit(namespace, CommitBatch([pack]))
    assert small.stats().stored_bytes == len(payload_of(pack))


def test_disk_bytes_stay_within_the_capacity_through_turnover(open_store, identity):
    backend = open_store("?capacity=12MiB")
    namespace = backend.open_namespace(identity).id
    evicted = 0
    for seed in range(80):
        pack = sample_pack(namespace, seed, blocks=1 + seed % 13, block_bytes=70_001)
        evicted += len(backend.commit(namespace, CommitBatch([pack])).evicted)
        assert backend.stats().disk_bytes <= 12 << 20
    assert 40 < evicted < 80
    assert backend.stats().stored_bytes > 8 << 20


@pytest.mark.parametrize("ttl", ["", "7", "-1d", "0s", "d", "1w", "1e3s", "inf", "9" * 400 + "d"])
def test_bad_ttl_is_named_and_creates_nothing(open_store, path, ttl):
    with pytest.raises(ConfigurationError, match="lmdb option ttl") as caught:
        open_store(f"?ttl={ttl}")
    assert caught.value.value == ttl
    assert not path.exists()


@pytest.mark.parametrize("value", ["", "tape", "INLINE"])
def test_bad_placement_is_named_and_creates_nothing(path, value):
    with pytest.raises(ConfigurationError, match="lmdb option placement"):
        LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}?placement={value}"))
    assert not path.exists()


def test_placement_is_remembered(path, placement):
    other = {"inline": "extents", "extents": "inline"}[placement]
    LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}?placement={placement}&capacity=2MiB")).close()
    with closing(LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}"))) as backend:
        assert backend._environment.placement.value == placement
        for read_only in (False, True):
            with pytest.raises(ConfigurationError, match=f"--to {other}") as caught:
                LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}?placement={other}&capacity=3MiB"), read_only=read_only)
            assert caught.value.field == "lmdb option placement"
        assert backend.stats().capacity == 2 << 20
