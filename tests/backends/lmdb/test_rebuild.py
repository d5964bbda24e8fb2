"""A new catalogue from the packs in the segment files, after ``data.mdb`` was lost or damaged."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from persistkv.config import PAGE_BYTES, StoreUrl
from persistkv.errors import StoreBusyError, StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack_writer import NewPack, PackWriter
from persistkv.storage.identity import Identity
from persistkv.storage.stats import Rebuilt
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.payloads.allocator import read_extents
from persistkv_lmdb.payloads.segments import Extent
from tests import forked
from tests.backends.lmdb.conftest import IDENTITY, Opener
from tests.backends.lmdb.consistency import find_faults

OTHER = Identity.of({"weights": "def"})
INVALID = "overwritten or damaged"


@pytest.fixture(params=["extents"])
def placement(request: pytest.FixtureRequest) -> str:
    """Stores that can be rebuilt."""
    return str(request.param)


@pytest.fixture
def store(open_store: Opener) -> LmdbBackend:
    return open_store("?capacity=64MiB")


def rebuild(path: Path, options: str = "") -> Rebuilt:
    found = LmdbBackend.rebuild(
        StoreUrl.parse(f"lmdb://{path}{options}"), lambda done, total: None
    )
    assert found is not None
    return found


def add(backend: LmdbBackend, *packs: NewPack) -> None:
    for pack in packs:
        backend.commit(pack.namespace, CommitBatch([pack]))


def add_samples(
    backend: LmdbBackend,
    count: int,
    *,
    first: int = 0,
    identity: Identity = IDENTITY,
) -> list[PackWriter]:
    """Store packs of four blocks, eight packs per commit; return them."""
    namespace = backend.open_namespace(identity).id
    packs = [sample_pack(namespace, seed) for seed in range(first, first + count)]
    for start in range(0, count, 8):
        backend.commit(namespace, CommitBatch(packs[start : start + 8]))
    return packs


def held(backend: LmdbBackend, packs: list[PackWriter]) -> list[PackWriter]:
    """Return those of the packs that the store holds; check the bytes of each."""
    found = []
    for pack in packs:
        payload = payload_of(pack)
        buffer = bytearray(len(payload))
        if backend.read(
            pack.namespace, [ReadSpan(pack.pack_id, 0, [memoryview(buffer)])]
        ) == [True]:
            assert bytes(buffer) == payload
            assert backend.tables(pack.namespace, [pack.pack_id]) == [pack.table]
            found.append(pack)
    return found


def places(backend: LmdbBackend, pack: NewPack) -> list[Extent]:
    with backend.environment.transaction() as transaction:
        return read_extents(transaction, pack.namespace + pack.pack_id) or []


def place(backend: LmdbBackend, pack: NewPack) -> Extent:
    (extent,) = places(backend, pack)
    return extent


def lose_catalogue(backend: LmdbBackend, path: Path) -> None:
    backend.close()
    (path / "data.mdb").unlink()


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with (path / "segments" / "00000000.seg").open("r+b") as file:
        file.seek(offset)
        file.write(content)


def flip(path: Path, offset: int) -> None:
    with (path / "segments" / "00000000.seg").open("r+b") as file:
        file.seek(offset)
        before = file.read(1)
        file.seek(offset)
        file.write(bytes([before[0] ^ 1]))


def test_rebuild_lost_catalogue_finds_all_packs(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 40)
    lose_catalogue(store, path)

    found = rebuild(path)

    assert (found.packs, found.blocks, found.namespaces) == (40, 160, 1)
    assert not found.skipped
    assert found.damaged is None
    again = open_store()
    assert held(again, packs) == packs
    assert find_faults(again) == []
    assert [namespace.identity for namespace in again.namespaces()] == [IDENTITY]


def test_rebuild_of_two_namespaces_finds_packs_of_both(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = [*add_samples(store, 5), *add_samples(store, 5, identity=OTHER)]
    lose_catalogue(store, path)

    assert rebuild(path).namespaces == 2
    again = open_store()
    assert held(again, packs) == packs
    assert find_faults(again) == []


def test_rebuild_without_an_identity_skips_its_packs(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 5)
    lost = add_samples(store, 3, identity=OTHER)
    lose_catalogue(store, path)
    (path / "segments" / f"{OTHER.digest.hex()}.identity").unlink()

    found = rebuild(path)

    assert (found.packs, found.skipped) == (5, {"of an unknown identity": 3})
    again = open_store()
    assert held(again, [*packs, *lost]) == packs


def test_rebuilt_store_accepts_commits_and_evicts(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    add_samples(store, 100)
    lose_catalogue(store, path)
    rebuild(path, "?capacity=4MiB")

    again = open_store()
    later = add_samples(again, 200, first=1000)

    assert again.stats().capacity == 4 << 20
    assert again.disk_bytes() <= 4 << 20
    assert held(again, later[-8:]) == later[-8:]
    assert find_faults(again) == []


def test_rebuild_without_capacity_records_one_that_fits(
    store: LmdbBackend,
    path: Path,
) -> None:
    add_samples(store, 5)
    lose_catalogue(store, path)
    assert rebuild(path).capacity == 10 << 30


def test_rebuilt_order_evicts_deep_packs_first(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    namespace = store.open_namespace(IDENTITY).id
    deep = sample_pack(namespace, 1, blocks=64, depth=1000)
    shallow = sample_pack(namespace, 2, blocks=64)
    add(store, deep, shallow)  # the shallow one was used last
    lose_catalogue(store, path)
    rebuild(path, "?capacity=4MiB")

    again = open_store()
    seed = 10
    while held(again, [deep, shallow]) == [deep, shallow]:
        add(again, sample_pack(namespace, seed, blocks=64))
        seed += 1

    assert held(again, [deep, shallow]) == [shallow]


def test_rebuild_damaged_catalogue_keeps_it(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 20)
    store.close()
    size = (path / "data.mdb").stat().st_size
    damaged = os.urandom(size)
    (path / "data.mdb").write_bytes(damaged)

    found = rebuild(path)

    assert found.damaged is not None
    assert (Path(found.damaged) / "data.mdb").read_bytes() == damaged
    assert held(open_store(), packs) == packs


def test_rebuild_intact_catalogue_changes_nothing(
    store: LmdbBackend,
    path: Path,
) -> None:
    add_samples(store, 3)
    store.close()
    before = (path / "data.mdb").read_bytes()
    assert (
        LmdbBackend.rebuild(StoreUrl.parse(f"lmdb://{path}"), lambda done, total: None)
        is None
    )
    assert (path / "data.mdb").read_bytes() == before


def test_rebuild_of_renamed_files_makes_a_store_there(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 20)
    store.close()
    (path / "data.mdb").write_bytes(os.urandom((path / "data.mdb").stat().st_size))
    (path / "guard").write_text("open".ljust(31) + "\n")
    empty = open_store()  # renames the damaged files
    assert not held(empty, packs)
    (renamed,) = path.glob("damaged-*")

    assert rebuild(renamed).packs == 20
    assert held(open_store(location=renamed), packs) == packs


@pytest.mark.parametrize("is_bad", [False, True])
def test_rebuild_pack_repaired_by_one_commit_is_found(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
    is_bad: bool,
) -> None:
    (pack,) = add_samples(store, 1)
    again = sample_pack(pack.namespace, 0)
    gone = [pack.pack_id]
    store.commit(
        pack.namespace,
        CommitBatch([again], bad=gone)
        if is_bad
        else CommitBatch([again], deletions=gone),
    )
    store.close()
    (path / "data.mdb").unlink()
    assert rebuild(path).packs == 1
    assert held(open_store(), [pack]) == [pack]


DELETE_ONE = """
import sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv_lmdb import LmdbBackend

url, namespace, pack_id = sys.argv[1:]
backend = LmdbBackend.open(StoreUrl.parse(url))
batch = CommitBatch(deletions=[bytes.fromhex(pack_id)])
backend.commit(bytes.fromhex(namespace), batch)
backend.close()
"""


def test_rebuild_pack_repaired_while_another_is_deleted_is_found(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process deletes another pack while the repaired one is written."""
    damaged, other = add_samples(store, 2)
    namespace = damaged.namespace
    again = sample_pack(namespace, 0)
    stream = again.stream
    commands = [
        [
            sys.executable,
            "-c",
            DELETE_ONE,
            f"lmdb://{path}",
            namespace.hex(),
            other.pack_id.hex(),
        ]
    ]

    def late() -> Iterator[Buffer]:
        yield from stream()
        # only the first attempt: a second one finds nothing more to delete
        if commands:
            forked.run(commands.pop(), check=True)

    monkeypatch.setattr(again, "stream", late)
    store.commit(namespace, CommitBatch([again], bad=[damaged.pack_id]))
    assert held(store, [again, other]) == [again]
    lose_catalogue(store, path)

    rebuild(path)

    assert held(open_store(), [again, other]) == [again]


def test_rebuild_after_a_lost_list_of_erasures_keeps_later_deletions(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    gone, _, deleted = add_samples(store, 3)
    store.commit(gone.namespace, CommitBatch(deletions=[gone.pack_id]))
    (kept,) = add_samples(store, 1, first=10)
    store.close()
    for name in ("data.mdb", "segments/erased"):
        (path / name).unlink()
    rebuild(path)
    backend = open_store()
    backend.commit(
        kept.namespace, CommitBatch(deletions=[kept.pack_id, deleted.pack_id])
    )
    backend.close()
    (path / "data.mdb").unlink()
    rebuild(path)
    assert held(open_store(), [kept, deleted]) == []


@pytest.mark.parametrize("is_empty", [False, True])
def test_open_lost_catalogue_keeps_the_packs_for_a_rebuild(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
    caplog: pytest.LogCaptureFixture,
    is_empty: bool,
) -> None:
    packs = add_samples(store, 10)
    store.close()
    (path / "data.mdb").unlink()
    if is_empty:
        (path / "data.mdb").touch()
    fresh = open_store()
    assert held(fresh, packs) == []
    add_samples(fresh, 20, first=50)
    fresh.close()
    (damaged,) = path.glob("damaged-*")
    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ]
    assert "data.mdb is missing or empty" in warning
    assert f"persistkv rebuild lmdb://{damaged}" in warning
    assert rebuild(damaged).packs == 10
    assert held(open_store(location=damaged), packs) == packs
    assert len(list(path.glob("damaged-*"))) == 1


def test_rebuild_of_an_open_store_is_refused(store: LmdbBackend, path: Path) -> None:
    add_samples(store, 3)
    (path / "data.mdb").unlink()
    with pytest.raises(StoreBusyError, match="open for writing"):
        rebuild(path)


def test_rebuild_of_an_inline_store_is_refused(path: Path) -> None:
    backend = LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}?placement=inline"))
    add_samples(backend, 3)
    lose_catalogue(backend, path)
    with pytest.raises(StoreUnavailableError, match="placement=inline"):
        rebuild(path)


def test_rebuild_of_no_store_is_refused(path: Path) -> None:
    with pytest.raises(StoreUnavailableError):
        rebuild(path)
    assert not path.exists()


def test_rebuild_without_packs_changes_nothing(store: LmdbBackend, path: Path) -> None:
    (pack,) = add_samples(store, 1)
    extent = place(store, pack)
    lose_catalogue(store, path)
    overwrite(path, (extent.end - 1) * PAGE_BYTES, bytes(PAGE_BYTES))
    assert rebuild(path).packs == 0
    assert not (path / "data.mdb").exists()


def test_rebuild_with_a_directory_among_the_segments_leaves_no_file_open(
    store: LmdbBackend,
    path: Path,
) -> None:
    add_samples(store, 1)
    lose_catalogue(store, path)
    (path / "segments" / "00000001.seg").mkdir()
    before = sorted(os.listdir("/proc/self/fd"))

    with pytest.raises(StoreError, match="no regular file"):
        rebuild(path)

    assert sorted(os.listdir("/proc/self/fd")) == before


# Deleted and evicted packs


def test_rebuild_deleted_packs_stay_deleted(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 8)
    deleted, bad = packs[2].pack_id, packs[5].pack_id
    store.commit(packs[0].namespace, CommitBatch(deletions=[deleted], bad=[bad]))
    lose_catalogue(store, path)

    found = rebuild(path)

    assert (found.packs, found.skipped) == (6, {"deleted": 2})
    assert held(open_store(), packs) == [
        pack for pack in packs if pack.pack_id not in (deleted, bad)
    ]


def test_rebuild_packs_deleted_with_a_request_stay_deleted(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 8)
    ids = [pack.pack_id for pack in packs]
    store.commit(
        packs[0].namespace,
        CommitBatch(manifests=[sample_manifest("request", packs=ids)]),
    )
    # and the packs after it
    store.commit(packs[0].namespace, CommitBatch(deletions=[ids[4]]))
    lose_catalogue(store, path)
    assert rebuild(path).packs == 4
    assert held(open_store(), packs) == packs[:4]


def test_rebuild_pack_evicted_then_stored_then_deleted_stays_deleted(
    open_store: Opener,
    path: Path,
) -> None:
    store = open_store("?capacity=16MiB")
    namespace = store.open_namespace(IDENTITY).id
    pack = sample_pack(namespace, 1)
    add(store, pack)
    first = place(store, pack)
    raw = (path / "segments" / "00000000.seg").read_bytes()
    evicted = raw[first.page * PAGE_BYTES : first.end * PAGE_BYTES]
    seed = 2
    while held(store, [pack]):
        add(store, sample_pack(namespace, seed, blocks=64))
        seed += 1
    add(store, pack)
    store.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
    lose_catalogue(store, path)
    # as if nothing had been stored there since
    overwrite(path, first.page * PAGE_BYTES, evicted)

    found = rebuild(path)

    assert found.skipped["deleted"] >= 1
    assert held(open_store(), [pack]) == []


def test_rebuild_pack_stored_again_after_its_deletion_is_found(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 3)
    store.commit(packs[0].namespace, CommitBatch(deletions=[packs[1].pack_id]))
    add(store, packs[1])
    lose_catalogue(store, path)
    assert rebuild(path).packs == 3
    again = open_store()
    assert held(again, packs) == packs
    again.commit(packs[0].namespace, CommitBatch(deletions=[packs[1].pack_id]))
    lose_catalogue(again, path)
    assert rebuild(path).packs == 2


def test_rebuild_namespace_that_ended_and_began_again_is_found(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 3)
    identity = path / "segments" / f"{IDENTITY.digest.hex()}.identity"
    store.commit(
        packs[0].namespace, CommitBatch(deletions=[pack.pack_id for pack in packs])
    )
    assert not identity.exists()
    later = add_samples(store, 2, first=100)
    lose_catalogue(store, path)
    assert rebuild(path).packs == 2
    assert held(open_store(), [*packs, *later]) == later


def test_rebuild_overwritten_pack_is_skipped(open_store: Opener, path: Path) -> None:
    store = open_store("?capacity=4MiB")
    packs = add_samples(store, 400)
    survivors = [pack for pack in held(store, packs) if len(places(store, pack)) == 1]
    assert 100 < len(survivors) < 300
    lose_catalogue(store, path)

    found = rebuild(path)

    again = open_store()
    still = held(again, packs)
    assert {pack.pack_id for pack in survivors} <= {pack.pack_id for pack in still}
    assert found.packs == len(still)
    assert find_faults(again) == []


# Damage of the segments


@pytest.mark.parametrize("at", ["payload", "table", "trailer", "magic", "padding"])
def test_rebuild_pack_with_a_flipped_bit_is_skipped(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
    at: str,
) -> None:
    namespace = store.open_namespace(IDENTITY).id
    packs = [
        sample_pack(namespace, seed, blocks=3, block_bytes=5000) for seed in range(4)
    ]
    add(store, *packs)
    extent = place(store, packs[1])
    lose_catalogue(store, path)
    end = extent.end * PAGE_BYTES
    offsets = {
        "payload": extent.page * PAGE_BYTES + 5001,
        "padding": extent.page * PAGE_BYTES + 15_001,
        "table": end - 100,
        "trailer": end - 30,
        "magic": end - 1,
    }
    flip(path, offsets[at])

    found = rebuild(path)

    assert found.packs == 3
    assert found.skipped == ({} if at == "magic" else {INVALID: 1})
    assert held(open_store(), packs) == [packs[0], *packs[2:]]


def test_rebuild_truncated_segment_finds_the_packs_before(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 40)
    cut = place(store, packs[20])
    before = [pack for pack in packs if place(store, pack).end <= cut.page]
    lose_catalogue(store, path)
    os.truncate(path / "segments" / "00000000.seg", cut.page * PAGE_BYTES + 100)

    assert rebuild(path).packs == len(before)
    again = open_store()
    assert held(again, packs) == before
    assert find_faults(again) == []
    later = add_samples(again, 8, first=500)
    assert held(again, later) == later


def test_rebuild_copy_of_a_pack_within_a_payload_is_skipped(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    (inner,) = add_samples(store, 1)
    extent = place(store, inner)
    raw = (path / "segments" / "00000000.seg").read_bytes()
    content = raw[extent.page * PAGE_BYTES : extent.end * PAGE_BYTES]
    outer = sample_pack(inner.namespace, 2, blocks=1, block_bytes=len(content))
    outer.sections[0].source.gather(0, 1)[:] = memoryview(content)
    add(store, outer)
    store.commit(inner.namespace, CommitBatch(deletions=[inner.pack_id]))
    lose_catalogue(store, path)

    found = rebuild(path)

    assert (found.packs, found.skipped) == (1, {INVALID: 1, "deleted": 1})
    assert held(open_store(), [outer]) == [outer]


def test_rebuild_payload_that_imitates_a_pack_at_its_own_place_is_not_taken_for_one(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    # both stores write their first pack to the same place, so the imitation's trailer fits
    elsewhere = path.with_name("elsewhere")
    other = open_store("?capacity=64MiB", location=elsewhere)
    (imitated,) = add_samples(other, 1)
    extent = place(other, imitated)
    raw = (elsewhere / "segments" / "00000000.seg").read_bytes()
    content = raw[extent.page * PAGE_BYTES : extent.end * PAGE_BYTES]
    namespace = store.open_namespace(IDENTITY).id
    outer = sample_pack(namespace, 2, blocks=1, block_bytes=len(content))
    outer.sections[0].source.gather(0, 1)[:] = memoryview(content)
    add(store, outer)
    assert place(store, outer).page == extent.page
    lose_catalogue(store, path)

    found = rebuild(path)

    assert (found.packs, found.skipped) == (1, {"overlapping": 1})
    again = open_store()
    assert held(again, [outer]) == [outer]
    assert held(again, [imitated]) == []


def test_rebuild_pack_in_several_extents_is_counted(
    open_store: Opener,
    path: Path,
) -> None:
    store = open_store("?capacity=4MiB")
    packs = add_samples(store, 200)
    there = held(store, packs)
    store.commit(
        packs[0].namespace, CommitBatch(deletions=[pack.pack_id for pack in there[::2]])
    )
    large = sample_pack(packs[0].namespace, 1000, blocks=128)
    add(store, large)
    assert len(places(store, large)) > 1
    lose_catalogue(store, path)

    assert rebuild(path).skipped["in several extents"] == 1
    assert held(open_store(), [large]) == []


# Interruptions


_REBUILD = """
import sys, time
from persistkv.config import StoreUrl
from persistkv_lmdb import LmdbBackend
def progress(done, total):
    print("reading", flush=True)
LmdbBackend.rebuild(StoreUrl.parse(sys.argv[1]), progress)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1])
def test_rebuild_killed_can_be_repeated(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
    delay_s: float,
) -> None:
    packs = add_samples(store, 400)
    lose_catalogue(store, path)
    child = forked.Popen(
        [sys.executable, "-c", _REBUILD, f"lmdb://{path}"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(delay_s)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()

    if not (path / "data.mdb").exists():
        rebuild(path)

    assert not (path / "data.mdb.rebuild").exists()
    again = open_store()
    assert held(again, packs) == packs
    assert find_faults(again) == []


def test_rebuild_after_its_interruption_deletes_the_incomplete_catalogue(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 5)
    lose_catalogue(store, path)
    (path / "data.mdb.rebuild").write_bytes(b"incomplete")
    rebuild(path)
    assert not (path / "data.mdb.rebuild").exists()
    assert held(open_store(), packs) == packs


def test_rebuild_of_a_copied_store_finds_all_packs(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 20)
    store.close()
    copy = path.with_name("copy")
    shutil.copytree(path / "segments", copy / "segments")
    assert rebuild(copy).packs == 20
    assert held(open_store(location=copy), packs) == packs


def test_rebuild_two_thousand_packs_finds_their_blocks(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    namespace = store.open_namespace(IDENTITY).id
    packs = [
        sample_pack(namespace, seed, blocks=2, block_bytes=1024) for seed in range(2000)
    ]
    for start in range(0, 2000, 100):
        store.commit(namespace, CommitBatch(packs[start : start + 100]))
    lose_catalogue(store, path)
    assert rebuild(path).blocks == 4000
    assert find_faults(open_store()) == []


def test_rebuild_on_a_full_disk_leaves_the_store_as_it_was(
    store: LmdbBackend,
    path: Path,
    open_store: Opener,
) -> None:
    packs = add_samples(store, 100)
    lose_catalogue(store, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        with pytest.raises(StoreError):
            rebuild(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not (path / "data.mdb").exists()
    assert not (path / "data.mdb.rebuild").exists()

    assert rebuild(path).packs == 100
    assert held(open_store(), packs) == packs


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rebuild_hundred_thousand_packs_finds_their_blocks(
    open_store: Opener,
    path: Path,
) -> None:
    store = open_store("?capacity=4GiB")
    namespace = store.open_namespace(IDENTITY).id
    for start in range(0, 100_000, 500):
        packs = [
            sample_pack(namespace, seed, blocks=2, block_bytes=1024)
            for seed in range(start, start + 500)
        ]
        store.commit(namespace, CommitBatch(packs))
    stored = store.stats().blocks
    lose_catalogue(store, path)
    assert rebuild(path).blocks >= 0.99 * stored
    assert find_faults(open_store()) == []
