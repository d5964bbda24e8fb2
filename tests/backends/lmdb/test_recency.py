"""Details of the eviction order that the conformance tests do not cover."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import lmdb
import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue.rows import Use
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_manifest, sample_pack
from tests.backends.lmdb.conftest import Opener

HOUR_S = 3600


class Tables:
    """Named databases of a closed store, in one transaction."""

    def __init__(self, env: lmdb.Environment, txn: lmdb.Transaction[bytes]) -> None:
        self._env = env
        self._txn = txn

    def rows(self, table: str) -> dict[bytes, bytes]:
        return dict(self._txn.cursor(db=self._open(table)))

    def put(self, table: str, key: bytes, row: bytes) -> None:
        self._txn.put(key, row, db=self._open(table))

    def delete(self, table: str, key: bytes) -> None:
        assert self._txn.delete(key, db=self._open(table))

    def _open(self, table: str) -> lmdb._Database:
        return self._env.open_db(table.encode(), txn=self._txn)


Edit = Callable[[], AbstractContextManager[Tables]]


@pytest.fixture
def edit(path: Path) -> Edit:
    """Return a function that opens the tables of the closed store."""

    @contextmanager
    def edit() -> Iterator[Tables]:
        with (
            lmdb.open(str(path), max_dbs=32, map_size=64 << 20) as env,
            env.begin(write=True) as txn,
        ):
            yield Tables(env, txn)

    return edit


def test_commit_damaged_use_in_future_is_reset_to_current_moment(
    open_store: Opener,
    closed_pack: PackWriter,
    edit: Edit,
) -> None:
    """Otherwise, the damaged row would protect the pack from eviction forever."""
    name = closed_pack.namespace + closed_pack.pack_id
    with edit() as tables:
        row = tables.rows("uses")[name]
        tables.put("uses", name, struct.pack("<Q", 1 << 63) + row[8:])
        (key,) = tables.rows("order")
        tables.delete("order", key)
        tables.put("order", key[:1] + struct.pack(">Q", 1 << 63) + key[9:], b"")
    backend = open_store()
    backend.commit(closed_pack.namespace, CommitBatch(touches=[closed_pack.pack_id]))
    backend.close()
    with edit() as tables:
        (key,) = tables.rows("order")
    assert struct.unpack_from(">BQ", key) == (1, 2)


def test_commit_with_evictions_advances_clock_by_one_moment(
    open_store: Opener,
    identity: Identity,
    edit: Edit,
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
    with edit() as tables:
        clock = tables.rows("meta")[b"clock"]
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
