"""Options of an lmdb URL, and the policy that a store records."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, StoreError, StoreFullError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.storage.policy import Policy
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import Opener

GIB = 1 << 30


@pytest.mark.parametrize(
    "capacity",
    ["-5", "0", "1023KiB", "65TiB", "lots", "", "1e9", "inf", "9" * 400 + "GiB"],
)
def test_open_invalid_capacity_raises_and_creates_nothing(
    open_store: Opener,
    path: Path,
    capacity: str,
) -> None:
    with pytest.raises(ConfigurationError, match="lmdb option capacity") as caught:
        open_store(f"?capacity={capacity}")
    assert caught.value.value == capacity
    assert "\n" not in str(caught.value)
    assert not path.exists()


def test_open_path_with_nul_raises(open_store: Opener) -> None:
    with pytest.raises(ConfigurationError, match="url"):
        open_store(location="/tmp/a%00b")


@pytest.mark.parametrize("query", ["", "?capacity=3GiB"])
def test_new_policy_equals_policy_of_created_store(
    open_store: Opener,
    path: Path,
    query: str,
) -> None:
    expected = LmdbBackend.new_policy(StoreUrl.parse(f"lmdb://{path}{query}"))
    assert not path.exists()
    assert open_store(query).policy().capacity == expected.capacity


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the texts of the warnings so far."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]


def test_open_new_store_records_its_policy(open_store: Opener, placement: str) -> None:
    first = open_store("?capacity=3GiB&ttl=7d")
    first.close()
    for read_only in (False, True):
        backend = open_store(read_only=read_only)
        assert backend.policy() == Policy(3 * GIB, 7 * 86_400, placement)
        assert backend.stats().capacity == 3 * GIB


def test_open_new_store_without_options_records_defaults(path: Path) -> None:
    with closing(LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}"))) as backend:
        assert backend.policy() == Policy(10 * GIB, None, "extents")


@pytest.mark.parametrize(
    "option", ["capacity=2MiB", "capacity=40GiB", "ttl=1d", "capacity=2MiB&ttl=1d"]
)
def test_open_existing_store_other_policy_keeps_recorded_and_warns(
    open_store: Opener,
    caplog: pytest.LogCaptureFixture,
    identity: Identity,
    option: str,
) -> None:
    first = open_store("?capacity=64MiB&ttl=7d")
    namespace = first.open_namespace(identity).id
    packs = [
        sample_pack(namespace, seed, blocks=16, block_bytes=1 << 16)
        for seed in range(12)
    ]
    for pack in packs:
        first.commit(namespace, CommitBatch([pack]))
    first.close()
    second = open_store(f"?{option}")
    assert (second.policy().capacity, second.policy().ttl_s) == (64 << 20, 7 * 86_400)
    assert not second.commit(
        namespace, CommitBatch([sample_pack(namespace, 40)])
    ).evicted
    (warning,) = warnings_in(caplog)
    assert "persistkv set" in warning
    assert ("(recorded: 64MiB)" in warning) == ("capacity" in option)
    assert ("ttl=1d (recorded: 7d)" in warning) == ("ttl" in option)


def test_open_existing_store_other_placement_keeps_recorded_and_warns(
    path: Path,
    placement: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = {"inline": "extents", "extents": "inline"}[placement]
    LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}?placement={placement}")).close()
    with closing(
        LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}?placement={other}"))
    ) as backend:
        assert backend.policy().placement == placement
    (warning,) = warnings_in(caplog)
    assert f"placement={other} (recorded: {placement})" in warning


def test_open_recorded_policy_logs_no_warning(
    open_store: Opener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    open_store("?capacity=64MiB&ttl=7d").close()
    open_store("?capacity=65536KiB&ttl=168h")
    open_store("?capacity=1MiB", read_only=True)
    assert warnings_in(caplog) == []


def test_set_policy_applies_to_open_handles_of_the_process(open_store: Opener) -> None:
    first = open_store("?capacity=8MiB")
    second = open_store()
    second.set_policy(replace(second.policy(), capacity=2 << 20, ttl_s=60.0))
    assert first.stats().capacity == 2 << 20
    assert first.policy().ttl_s == 60.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity", None),
        ("capacity", 0),
        ("capacity", 1 << 19),
        ("capacity", 65 << 40),
        ("ttl_s", 0.0),
        ("ttl_s", -1),
    ],
)
def test_set_policy_out_of_range_changes_nothing(
    open_store: Opener,
    field: str,
    value: Any,
) -> None:
    backend = open_store("?capacity=8MiB&ttl=1h")
    before = backend.policy()
    with pytest.raises(ConfigurationError, match=field.removesuffix("_s")):
        backend.set_policy(replace(before, **{field: value}))
    assert backend.policy() == before


def test_set_policy_other_placement_is_refused(
    open_store: Opener,
    placement: str,
) -> None:
    backend = open_store()
    other = {"inline": "extents", "extents": "inline"}[placement]
    with pytest.raises(ConfigurationError, match="persistkv copy"):
        backend.set_policy(replace(backend.policy(), placement=other))
    assert backend.policy().placement == placement


def test_set_policy_read_only_is_refused(open_store: Opener) -> None:
    open_store("?capacity=8MiB").close()
    reader = open_store(read_only=True)
    with pytest.raises(StoreError, match="read-only"):
        reader.set_policy(replace(reader.policy(), capacity=16 << 20))


def test_set_policy_lower_capacity_evicts_oldest_at_once(
    open_store: Opener,
    identity: Identity,
) -> None:
    backend = open_store("?capacity=32MiB")
    namespace = backend.open_namespace(identity).id
    packs = [
        sample_pack(namespace, seed, blocks=16, block_bytes=1 << 16)
        for seed in range(12)
    ]
    for pack in packs:
        backend.commit(namespace, CommitBatch([pack]))
    held = backend.stats().disk_bytes

    backend.set_policy(replace(backend.policy(), capacity=4 << 20))
    kept = [table.pack_id for table in backend.changes(namespace, None).added]
    assert kept == [pack.pack_id for pack in packs[len(packs) - len(kept) :]]
    assert 2 <= len(kept) <= 3
    # already stored: nothing to write
    assert not backend.commit(namespace, CommitBatch(packs[11:])).evicted
    fresh = sample_pack(namespace, 40, blocks=16, block_bytes=1 << 16)
    backend.commit(namespace, CommitBatch([fresh]))
    assert fresh.pack_id in {
        table.pack_id for table in backend.changes(namespace, None).added
    }
    assert backend.stats().disk_bytes <= held + (1 << 20)


def test_set_policy_higher_capacity_admits_large_pack_at_once(
    open_store: Opener,
    identity: Identity,
) -> None:
    small = open_store("?capacity=2MiB")
    namespace = small.open_namespace(identity).id
    pack = sample_pack(namespace, 1, blocks=64, block_bytes=1 << 16)
    with pytest.raises(StoreFullError):
        small.commit(namespace, CommitBatch([pack]))
    small.set_policy(replace(small.policy(), capacity=16 << 20))
    small.commit(namespace, CommitBatch([pack]))
    assert small.stats().stored_bytes == len(payload_of(pack))


def test_commit_full_store_keeps_disk_bytes_within_capacity(
    open_store: Opener,
    identity: Identity,
) -> None:
    backend = open_store("?capacity=12MiB")
    namespace = backend.open_namespace(identity).id
    evicted = 0
    for seed in range(80):
        pack = sample_pack(namespace, seed, blocks=1 + seed % 13, block_bytes=70_001)
        evicted += len(backend.commit(namespace, CommitBatch([pack])).evicted)
        assert backend.stats().disk_bytes <= 12 << 20
    assert 40 < evicted < 80
    assert backend.stats().stored_bytes > 8 << 20


@pytest.mark.parametrize(
    "ttl", ["", "7", "-1d", "0s", "d", "1w", "1e3s", "inf", "9" * 400 + "d"]
)
def test_open_invalid_ttl_raises_and_creates_nothing(
    open_store: Opener,
    path: Path,
    ttl: str,
) -> None:
    with pytest.raises(ConfigurationError, match="lmdb option ttl") as caught:
        open_store(f"?ttl={ttl}")
    assert caught.value.value == ttl
    assert not path.exists()


@pytest.mark.parametrize("value", ["", "tape", "INLINE"])
def test_open_invalid_placement_raises_and_creates_nothing(
    path: Path,
    value: str,
) -> None:
    with pytest.raises(ConfigurationError, match="lmdb option placement"):
        LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}?placement={value}"))
    assert not path.exists()
