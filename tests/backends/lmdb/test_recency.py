"""Details of the eviction order that the conformance tests do not cover."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalog.rows import Use
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_manifest, sample_pack
from tests.backends.lmdb.conftest import Opener

HOUR_S = 3600


@pytest.fixture
def edit(path: Path) -> Any:
    """Return a function that edits named databases of the closed store."""

    def edit(change: Callable[..., Any], *names: str) -> Any:
        with lmdb.open(str(path), max_dbs=32, map_size=64 << 20) as env:
            opened = [env.open_db(name.encode()) for name in names]
            with env.begin(write=True) as txn:
                return change(txn, *opened)

    return edit


def test_commit_damaged_use_in_future_is_reset_to_current_moment(
    open_store: Opener,
    closed_pack: PackWriter,
    edit: Callable[..., Any],
) -> None:
    """Otherwise, the damaged row would protect the pack from eviction forever."""
    name = closed_pack.namespace + closed_pack.pack_id

    def damage(txn: lmdb.Transaction[bytes], uses: Any, order: Any) -> None:
        row = txn.get(name, db=uses)
        assert row is not None
        txn.put(name, struct.pack("<Q", 1 << 63) + row[8:], db=uses)
        ((key, _),) = txn.cursor(db=order)
        txn.delete(key, db=order)
        txn.put(key[:1] + struct.pack(">Q", 1 << 63) + key[9:], b"", db=order)

    edit(damage, "uses", "order")
    backend = open_store()
    backend.commit(closed_pack.namespace, CommitBatch(touches=[closed_pack.pack_id]))
    backend.close()
    ((key, _),) = edit(lambda txn, order: list(txn.cursor(db=order)), "order")
    assert struct.unpack_from(">BQ", key) == (1, 2)


def test_commit_with_evictions_advances_clock_by_one_moment(
    open_store: Opener,
    identity: Identity,
    edit: Callable[..., Any],
) -> None:
    backend = open_store("?capacity=4MiB")
    namespace = backend.open_namespace(identity).id
    kept = sample_pack(namespace, 1)
    evicted = len(backend.commit(namespace, CommitBatch([kept])).evicted)
    # large and small packs alternate; a large one fills most of the store
    for seed in range(2, 20):
        blocks = 28 if seed % 2 else 1
        batch = CommitBatch(
            [sample_pack(namespace, seed, blocks=blocks, block_bytes=80_000)],
            touches=[kept.pack_id],
        )
        evicted += len(backend.commit(namespace, batch).evicted)
    assert evicted > 10
    backend.close()
    clock = edit(lambda txn, meta: txn.get(b"clock", db=meta), "meta")
    assert struct.unpack_from("<Q", clock) == (19,)


def test_uses_touch_within_same_second_counts_as_reuse(
    open_store: Opener,
    identity: Identity,
) -> None:
    backend = open_store()
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([pack]))
    backend.commit(
        namespace, CommitBatch(manifests=[sample_manifest("r", packs=[pack.pack_id])])
    )
    (use,) = backend.catalogue(namespace).uses(["r"])
    assert use is not None
    assert not use.reused, "only the request that stored the pack names it"
    backend.commit(namespace, CommitBatch(touches=[pack.pack_id]))
    (use,) = backend.catalogue(namespace).uses(["r"])
    assert use is not None
    assert use.reused


def test_commit_of_many_uses_records_them_in_short_transactions_at_one_moment(
    open_store: Opener,
    identity: Identity,
) -> None:
    """Other engines wait for a transaction, and recording a use takes about 20 µs."""
    backend = open_store("?capacity=64MiB")
    namespace = backend.open_namespace(identity).id
    packs = [
        sample_pack(namespace, seed, blocks=1, block_bytes=1) for seed in range(300)
    ]
    backend.commit(namespace, CommitBatch(packs))
    ids = [pack.pack_id for pack in packs]
    with backend.rows() as rows:
        before = rows.txn.id()
    backend.commit(namespace, CommitBatch(touches=ids[:290]))
    moments: list[int] = []
    with backend.rows() as rows:
        transactions = rows.txn.id() - before
        for pack_id in ids:
            use = Use.decode(rows.get("uses", namespace + pack_id))
            assert use is not None
            moments.append(use.moment)
    assert transactions == 3
    assert moments == [2] * 290 + [1] * 10
