"""Namespaces begin with their first content and end with their last: identities that were used once
cost nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend
from tests import forked
from tests.backends.lmdb.conftest import Opener
from tests.backends.lmdb.consistency import find_faults

IDENTITIES = 300  # a store of 32 MiB once refused the 213th


def identity_of(number: int) -> Identity:
    """Return an identity as large as that of a usual model."""
    config = {f"parameter_{position}": position for position in range(150)}
    return Identity.of({"weights": f"sha256:{number:064x}", "config": config})


def used_bytes(backend: LmdbBackend) -> int:
    """Return the bytes of the catalogue's pages in use."""
    with backend.environment.transaction() as transaction:
        return transaction.used_bytes()


def use_once(backend: LmdbBackend, number: int) -> None:
    """Store a request under an identity, and delete it."""
    namespace = backend.open_namespace(identity_of(number)).id
    pack = sample_pack(namespace, number)
    backend.commit(
        namespace, CommitBatch([pack], [sample_manifest("r", packs=[pack.pack_id])])
    )
    backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))


def test_identities_used_once_leave_store_as_empty_as_before(
    open_store: Opener,
) -> None:
    backend = open_store("?capacity=32MiB")
    use_once(backend, 0)
    empty = used_bytes(backend)
    for number in range(1, IDENTITIES):
        use_once(backend, number)
    assert used_bytes(backend) == empty
    assert list(backend.namespaces()) == []
    last = backend.open_namespace(identity_of(IDENTITIES)).id
    pack = sample_pack(last, 1)
    backend.commit(last, CommitBatch([pack]))
    assert read_pack(backend, last, pack.table) == payload_of(pack)
    assert find_faults(backend) == []


def test_open_namespace_many_identities_without_content_writes_nothing(
    open_store: Opener,
) -> None:
    backend = open_store("?capacity=32MiB")
    with backend.environment.transaction() as transaction:
        before = transaction.txn.id()
    for number in range(IDENTITIES):
        backend.open_namespace(identity_of(number))
    with backend.environment.transaction() as transaction:
        assert transaction.txn.id() == before


def test_identities_with_content_evict_those_before(open_store: Opener) -> None:
    backend = open_store("?capacity=4MiB")
    for number in range(IDENTITIES):
        namespace = backend.open_namespace(identity_of(number)).id
        pack = sample_pack(namespace, number)
        backend.commit(
            namespace, CommitBatch([pack], [sample_manifest("r", packs=[pack.pack_id])])
        )
    held = [space.identity for space in backend.namespaces()]
    assert 1 < len(held) < IDENTITIES
    assert {identity.digest for identity in held} == {
        identity_of(number).digest
        for number in range(IDENTITIES - len(held), IDENTITIES)
    }
    check_totals(backend)
    assert find_faults(backend) == []


def test_commit_large_identity_in_full_store_evicts_for_it(open_store: Opener) -> None:
    backend = open_store("?capacity=4MiB")
    usual = backend.open_namespace(identity_of(0)).id
    seed = 0
    while not backend.commit(usual, CommitBatch([sample_pack(usual, seed)])).evicted:
        seed += 1
    large = Identity.of(
        {"weights": "sha256:1", "config": {"names": ["x" * 100] * 1500}}
    )
    namespace = backend.open_namespace(large).id
    pack = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([pack]))
    assert read_pack(backend, namespace, pack.table) == payload_of(pack)
    assert large in [space.identity for space in backend.namespaces()]
    check_totals(backend)


OTHER = """
import sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv_lmdb import LmdbBackend

backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
namespace = bytes.fromhex(sys.argv[2])
held = [table.pack_id for table in backend.changes(namespace, None).added]
backend.commit(namespace, CommitBatch(deletions=held))
assert list(backend.namespaces()) == []
backend.close()
"""


def delete_elsewhere(path: Path, namespace: bytes) -> None:
    """Delete all packs of a namespace in another process, which has not opened it, as ``persistkv
    prune`` does."""
    forked.run(
        [sys.executable, "-c", OTHER, f"lmdb://{path}", namespace.hex()],
        check=True,
        timeout=120,
    )


def test_commit_to_namespace_ended_by_other_process_begins_it_again(
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
) -> None:
    old, needed, new = (sample_pack(namespace, seed) for seed in range(3))
    cursor = backend.commit(namespace, CommitBatch([old, needed])).cursor
    delete_elsewhere(path, namespace)
    assert read_pack(backend, namespace, old.table) is None
    stale = CommitBatch(
        [new],
        [sample_manifest("r", packs=[needed.pack_id])],
        seen=cursor,
        needs=[needed.pack_id],
    )
    assert backend.commit(namespace, stale).stale
    gone = backend.changes(namespace, cursor)
    assert (gone.reset, list(gone.added)) == (True, [])

    interleaved = backend.commit(namespace, CommitBatch([new], seen=cursor, needs=[]))
    assert interleaved.interleaved, "the position before the end is not the present one"
    assert backend.changes(namespace, cursor).reset
    assert list(backend.changes(namespace, gone.cursor).added) == [new.table]
    assert set(tables(backend, namespace)) == {new.pack_id}
    assert [space.id for space in backend.namespaces()] == [namespace]
    assert find_faults(backend) == []


def test_namespace_ended_loses_its_files(
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
) -> None:
    def files() -> list[str]:
        return [file.name for file in path.rglob(f"*{namespace.hex()}*")]

    before = files()
    for seed in range(2):  # the second time, it begins again
        pack = sample_pack(namespace, seed)
        backend.commit(namespace, CommitBatch([pack]))
        begun = files()
        backend.index_file(namespace).write_bytes(b"saved")
        backend.commit(namespace, CommitBatch(touches=[pack.pack_id]))
        assert sorted(files()) == sorted([*begun, f"index-{namespace.hex()}"])
        backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
        assert files() == before == []
    if backend.policy().placement == "extents":
        assert begun == [f"{namespace.hex()}.identity"], "a rebuild needs it"


def test_set_policy_lower_capacity_ends_namespaces_without_content(
    open_store: Opener,
) -> None:
    backend = open_store("?capacity=64MiB")
    for number in range(40):
        namespace = backend.open_namespace(identity_of(number)).id
        backend.commit(
            namespace,
            CommitBatch(
                [sample_pack(namespace, number, blocks=16, block_bytes=1 << 16)]
            ),
        )
        backend.index_file(namespace).write_bytes(b"saved")
    backend.set_policy(replace(backend.policy(), capacity=4 << 20))
    held = {space.id for space in backend.namespaces()}
    for number in range(40):
        namespace = identity_of(number).digest
        assert (
            (namespace in held)
            == bool(tables(backend, namespace))
            == backend.index_file(namespace).exists()
        )
    assert len(held) < 40
    assert find_faults(backend) == []


def test_commit_rolled_back_keeps_namespace(
    backend: LmdbBackend,
    namespace: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = sample_pack(namespace, 1)
    cursor = backend.commit(namespace, CommitBatch([pack])).cursor
    backend.index_file(namespace).write_bytes(b"saved")

    def fail() -> None:
        raise OSError("sync")

    with monkeypatch.context() as patched:
        patched.setattr(backend.environment.files, "sync_growth", fail)
        with pytest.raises(Exception, match="sync"):
            backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
    assert [space.id for space in backend.namespaces()] == [namespace]
    assert backend.index_file(namespace).exists()
    assert not backend.changes(namespace, cursor).reset
    assert read_pack(backend, namespace, pack.table) == payload_of(pack)
