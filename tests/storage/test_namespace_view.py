"""A store that other handles change, and the damaged packs that a handle deletes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from persistkv.base import Retention
from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.records import RequestEnd
from persistkv.storage.store.blocking import BlockingStore
from tests.storage.stores import flip_reads, inject_faults

Keys = Callable[..., list[bytes]]
OpenStore = Callable[..., BlockingStore]


@pytest.mark.parametrize("bad", [0, 1])
def test_read_damaged_pack_shortens_manifest_and_keeps_other_packs(
    open_store: OpenStore,
    store_url: str,
    keys: Keys,
    bad: int,
) -> None:
    store = open_store(store_url)
    names, rows = keys(12), range(12)
    for part in (slice(0, 4), slice(4, 8), slice(8, 12)):
        store.put("r", names[part], rows[part], rows[part])
        store.flush()
    retention = Retention(pin=True, ttl_s=3600.0, priority="low")
    store.end_request(RequestEnd("r", "m", (names,), 12 * 16, 16, retention=retention))
    store.flush()
    backend = inject_faults(store)
    (before,) = backend.catalogue(store.namespace).manifests()
    lost = names[4 * bad : 4 * bad + 4]
    (where,) = store.index.candidates(lost[0])
    flip_reads(backend, where)
    assert store.read(names, rows) == lost
    backend.clear_faults()
    good = [key for key in names if key not in lost]
    assert store.read(good, rows[:8]) == []
    found = list(backend.catalogue(store.namespace).manifests())
    if bad:
        assert [(head.group_blocks, head.tokens, head.created) for head in found] == [
            ((4,), 64, before.created)
        ]
        assert [(head.ttl_s, head.priority) for head in found] == [(3600.0, "low")]
        assert [
            use is None or use.pinned
            for use in backend.catalogue(store.namespace).uses(["m"])
        ] == [True]
    else:
        assert found == [], "nothing of its context can be restored"
    store.put("r", lost, rows[:4], None)
    store.flush()
    assert store.read(names, rows) == []


def replace(store: BlockingStore, names: list[bytes]) -> None:
    """Delete the pack of these keys and store other bytes under the same keys, and so under the
    same pack ID."""
    tables = store.view.backend.changes(store.namespace, None).added
    store.view.backend.commit(
        store.namespace, CommitBatch(deletions=[table.pack_id for table in tables])
    )
    store.refresh()
    store.rows.array[:] ^= 0xFF
    store.put("r", names, range(64), None)
    store.flush()


def test_read_damaged_pack_unreadable_catalogue_deletes_nothing(
    open_store: OpenStore,
    store_url: str,
    keys: Keys,
) -> None:
    """Without the catalogue, a damaged pack cannot be distinguished from a replaced one."""
    store = open_store(store_url)
    names = keys(64)
    store.put("r", names, range(64), None)
    store.flush()
    backend = inject_faults(store)
    flip_reads(backend)
    backend.fail("changes", StoreError("it does not answer"))
    assert store.read(names, range(64))
    backend.clear_faults()
    assert all(map(store.contains, names))
    assert store.read(names, range(64)) == []


def test_read_damaged_pack_replaced_before_deletion_is_kept(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    ours, theirs = open_store(url), open_store(url)
    names = keys(64)
    ours.put("r", names, range(64), None)
    ours.flush()
    backend = inject_faults(ours)
    left = [True]

    def replace_before(namespace: bytes, batch: CommitBatch) -> None:
        if batch.bad and left:
            left.clear()
            replace(theirs, names)

    flip_reads(backend)
    backend.before("commit", replace_before)
    assert ours.read(names, range(64))
    backend.clear_faults()
    assert not left
    assert all(map(theirs.contains, names))
    assert theirs.read(names, range(64)) == []
    assert ours.read(names, range(64)) == []


def test_read_deleted_pack_misses_and_counts_no_damage(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    ours, theirs = open_store(url), open_store(url)
    names = keys(64)
    ours.put("r", names, range(64), None)
    ours.flush()
    (table,) = theirs.view.backend.changes(theirs.namespace, None).added
    theirs.view.backend.commit(theirs.namespace, CommitBatch(deletions=[table.pack_id]))
    assert ours.read(names, range(64)) == names
    assert "do not verify" not in caplog.text
    assert ours.counters.verification_failures == 0
    ours.put("r", names, range(64), None)
    ours.flush()
    assert ours.read(names, range(64)) == []


def test_commit_without_cursor_refresh_finds_blocks_of_others(
    open_store: OpenStore,
    keys: Keys,
    tmp_path: Path,
) -> None:
    """A commit without a cursor succeeds regardless of other commits; the handle must still apply
    them."""
    url = f"lmdb://{tmp_path}/store"
    ours, theirs = open_store(url), open_store(url)
    foreign, mine = keys(1), keys(64)
    ours.view.cursor = None
    theirs.put("r", foreign, [0], None)
    theirs.flush()
    ours.put("r", mine, range(64), None)
    ours.flush()
    ours.refresh()
    assert all(map(ours.contains, mine + foreign))
