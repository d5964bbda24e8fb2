"""One environment per process and store: sharing, remapping, forks, full disks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest

from persistkv.errors import CorruptStoreError, StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend, database
from tests import forked
from tests.backends.lmdb.conftest import Opener


def read_all(backend: LmdbBackend, namespace: bytes, pack: PackWriter) -> bytes:
    buffer = bytearray(len(payload_of(pack)))
    assert backend.read(
        namespace, [ReadSpan(pack.pack_id, 0, [memoryview(buffer)])]
    ) == [True]
    return bytes(buffer)


def run(code: str, *arguments: object) -> list[str]:
    done = forked.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout).split()


def test_open_different_paths_to_one_store_share_environment(
    open_store: Opener,
    path: Path,
    tmp_path: Path,
    identity: Identity,
) -> None:
    first = open_store()
    (tmp_path / "link").symlink_to(path)
    second = open_store(location=tmp_path / "link")
    third = open_store(location=f"{tmp_path}/./store")
    namespace = first.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    second.commit(namespace, CommitBatch([pack]))
    first.close()
    second.close()
    assert read_all(third, namespace, pack) == payload_of(pack)
    third.close()
    lmdb.open(str(path)).close()  # succeeds only if this process has closed the store


def test_open_for_writing_with_open_reader_shares_environment(
    open_store: Opener,
    identity: Identity,
) -> None:
    open_store().close()
    reader = open_store(read_only=True)
    writer = open_store()
    namespace = writer.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    writer.commit(namespace, CommitBatch([pack]))
    assert read_all(reader, namespace, pack) == payload_of(pack)
    with pytest.raises(StoreError, match="read-only"):
        reader.commit(namespace, CommitBatch())
    writer.close()
    assert read_all(reader, namespace, pack) == payload_of(pack)


def test_open_for_writing_waits_for_reads_and_readers_follow(
    open_store: Opener,
    closed_pack: PackWriter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Opening for writing closes the descriptors. A number held by a reader could then refer to
    another file."""
    reader = open_store(read_only=True)
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with reader.rows():
            inside.set()
            leave.wait()

    reading = threading.Thread(target=read)
    reading.start()
    inside.wait()
    opening = threading.Thread(target=open_store)
    opening.start()
    opening.join(0.2)
    assert opening.is_alive()
    leave.set()
    opening.join()
    reading.join()
    assert reader.disk_bytes() > 0
    assert read_all(reader, closed_pack.namespace, closed_pack) == payload_of(
        closed_pack
    )
    assert "replaced" not in caplog.text


def test_read_after_failed_open_for_writing_succeeds(
    open_store: Opener,
    monkeypatch: pytest.MonkeyPatch,
    closed_pack: PackWriter,
) -> None:
    reader = open_store(read_only=True)

    def refuse_writing(*_: object) -> None:
        raise CorruptStoreError("refused")

    monkeypatch.setattr(database, "create_databases", refuse_writing)
    with pytest.raises(CorruptStoreError, match="refused"):
        open_store()
    assert read_all(reader, closed_pack.namespace, closed_pack) == payload_of(
        closed_pack
    )


def test_open_store_deleted_under_open_handle_creates_new_store(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    old = open_store()
    namespace = old.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    cursor = old.commit(namespace, CommitBatch([pack])).cursor
    shutil.rmtree(path)
    new = open_store()
    assert list(new.namespaces()) == []
    assert tables(old, namespace) == {}  # the old handle continues in the new store
    new.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
    # the new store does not accept a cursor of the deleted one
    assert new.changes(namespace, cursor).reset
    old.commit(namespace, CommitBatch([pack]))
    assert read_all(new, namespace, pack) == payload_of(pack)


GROW = """
import sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.storage.policy import Policy
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import IDENTITY

backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
namespace = backend.open_namespace(IDENTITY).id
backend.set_policy(Policy(64 << 20, None, backend.policy().placement))
backend.commit(namespace, CommitBatch([sample_pack(namespace, 50, blocks=256, block_bytes=1 << 16)]))
"""


@pytest.mark.parametrize("read_only", [False, True])
def test_read_map_grown_by_other_process_returns_new_pack(
    open_store: Opener,
    path: Path,
    identity: Identity,
    read_only: bool,
) -> None:
    backend = open_store("?capacity=2MiB")
    namespace = backend.open_namespace(identity).id
    if read_only:
        backend.close()
        backend = open_store(read_only=True)
    run(GROW, f"lmdb://{path}")
    grown = sample_pack(namespace, 50, blocks=256, block_bytes=1 << 16)
    assert read_all(backend, namespace, grown) == payload_of(grown)
    assert list(backend.changes(namespace, None).added) == [grown.table]
    if not read_only:
        backend.commit(namespace, CommitBatch(deletions=[grown.pack_id]))
        assert backend.stats().packs == 0


FORK = """
import os, sys
from persistkv.config import StoreUrl
from persistkv.errors import StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend

url = StoreUrl.parse(sys.argv[1])
backend = LmdbBackend.open(url)
namespace = backend.open_namespace(Identity.of({})).id
backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
child = os.fork()
if not child:
    for attempt in (lambda: backend.changes(namespace, None), lambda: LmdbBackend.open(url)):
        try:
            attempt()
        except (StoreError, StoreUnavailableError) as error:
            print(type(error).__name__, flush=True)
    other = LmdbBackend.open(StoreUrl.parse(sys.argv[1] + "-other"))
    print(other.stats().packs, flush=True)
    other.close()
    backend.close()
    os._exit(0)
os.waitpid(child, 0)
backend.commit(namespace, CommitBatch([sample_pack(namespace, 2)]))
print(backend.stats().packs)
"""


def test_fork_child_use_raises_and_parent_continues(path: Path) -> None:
    assert run(FORK, f"lmdb://{path}") == [
        "StoreError",
        "StoreUnavailableError",
        "0",
        "2",
    ]


def test_remap_during_reads_returns_stored_bytes(
    open_store: Opener,
    identity: Identity,
) -> None:
    """Unmapping memory during a read would kill the process."""
    backend = open_store("?capacity=8MiB")
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 1, blocks=16, block_bytes=1 << 16)
    backend.commit(namespace, CommitBatch([pack]))
    expected = payload_of(pack)
    stop = threading.Event()
    wrong = []

    def read() -> None:
        reader = open_store(read_only=True)
        while not stop.is_set():
            if read_all(reader, namespace, pack) != expected:
                wrong.append(True)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(60):
        open_store(f"?capacity={8 + number % 3}MiB").close()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_set_policy_many_readers_is_not_starved(backend: LmdbBackend) -> None:
    shared = backend.environment
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with shared.transaction():
                stop.wait(0.002)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    changing = threading.Thread(
        target=backend.set_policy, args=(replace(backend.policy(), capacity=32 << 20),)
    )
    changing.start()
    changing.join(60)
    starved = changing.is_alive()
    stop.set()
    for thread in (*threads, changing):
        thread.join()
    assert not starved


def test_open_and_close_in_many_threads_keeps_all_commits(
    open_store: Opener,
    path: Path,
    identity: Identity,
) -> None:
    namespace = open_store().open_namespace(identity).id
    failures = []

    def work(number: int) -> None:
        try:
            for step in range(10):
                backend = open_store()
                backend.commit(
                    namespace,
                    CommitBatch([sample_pack(namespace, 100 * number + step)]),
                )
                backend.close()
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert open_store().stats().packs == 40


FULL_DISK = """
import sys
from persistkv.config import StoreUrl
from persistkv.errors import StoreFullError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend

backend = LmdbBackend.open(StoreUrl.parse(f"lmdb://{sys.argv[1]}/store?capacity=64MiB&placement={sys.argv[-1]}"))
namespace = backend.open_namespace(Identity.of({})).id
held = sample_pack(namespace, 1)
backend.commit(namespace, CommitBatch([held]))
for _ in range(3):
    try:
        large = sample_pack(namespace, 2, blocks=128, block_bytes=1 << 16)
        backend.commit(namespace, CommitBatch([large], [sample_manifest("r")], [held.pack_id]))
    except StoreFullError:
        print("full")
assert list(backend.changes(namespace, None).added) == [held.table]
backend.commit(namespace, CommitBatch([sample_pack(namespace, 3)]))
print(backend.stats().packs, backend.stats().requests)
"""


def test_commit_full_disk_raises_store_full_and_keeps_content(
    tmp_path: Path,
    placement: str,
) -> None:
    mounted = 'mount -t tmpfs -o size=4m tmpfs "$1" && exec "$2" -c "$3" "$1" "$4"'
    command = ["unshare", "-rm", "sh", "-c", mounted, "sh", str(tmp_path)]
    if (
        not shutil.which("unshare")
        or subprocess.run([*command, "true", ""], capture_output=True).returncode
    ):
        pytest.skip("cannot mount a tmpfs here")
    done = subprocess.run(
        [*command, sys.executable, FULL_DISK, placement], capture_output=True, text=True
    )
    assert done.stdout.split() == ["full", "full", "full", "2", "0"], done.stderr


FULL_STORE_CANNOT_GROW = """
import os, pathlib, resource, sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend

backend = LmdbBackend.open(StoreUrl.parse(f"lmdb://{sys.argv[1]}/store?capacity=64MiB&placement={sys.argv[-1]}"))
namespace = backend.open_namespace(Identity.of({})).id
for seed in range(40):
    backend.commit(namespace, CommitBatch([sample_pack(namespace, seed, blocks=2, block_bytes=1 << 16)]))
before = backend.stats().disk_bytes
slack = 0
if sys.argv[2] == "disk":  # another program fills the disk
    with open(f"{sys.argv[1]}/other", "wb", 0) as other:
        try:
            while True:
                other.write(bytes(4096))
        except OSError:
            pass
else:
    longest = max(entry.stat().st_size for entry in pathlib.Path(f"{sys.argv[1]}/store").rglob("*.*"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest, longest))
    slack = 2 << 20  # the shorter of two files may grow to its bound
evicted, held = 0, []
for seed in range(100, 160):
    pack = sample_pack(namespace, seed, blocks=2 + seed % 4, block_bytes=1 << 16)
    evicted += len(backend.commit(namespace, CommitBatch([pack])).evicted)
    held.append(backend.stats().packs)
print(evicted > 50, sum(held) / len(held) > 10, backend.stats().disk_bytes <= before + 65536 + slack)
"""


def test_commit_full_disk_evicts_for_new_packs(tmp_path: Path, placement: str) -> None:
    mounted = 'mount -t tmpfs -o size=8m tmpfs "$1" && exec "$2" -c "$3" "$1" disk "$4"'
    command = ["unshare", "-rm", "sh", "-c", mounted, "sh", str(tmp_path)]
    if (
        not shutil.which("unshare")
        or subprocess.run([*command, "true", ""], capture_output=True).returncode
    ):
        pytest.skip("cannot mount a tmpfs here")
    done = subprocess.run(
        [*command, sys.executable, FULL_STORE_CANNOT_GROW, placement],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


def test_commit_file_size_limit_evicts_for_new_packs(
    tmp_path: Path,
    placement: str,
) -> None:
    assert run(FULL_STORE_CANNOT_GROW, tmp_path, "limit", placement) == [
        "True",
        "True",
        "True",
    ]


DELETES_SHARED = """
import pathlib, resource, sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.consistency import find_faults

backend = LmdbBackend.open(StoreUrl.parse(f"lmdb://{sys.argv[1]}/store?capacity=64MiB&placement={sys.argv[2]}"))
namespace = backend.open_namespace(Identity.of({})).id
shared, requests = sample_pack(namespace, 1), int(sys.argv[3])
backend.commit(namespace, CommitBatch([shared]))
for first in range(0, requests, 100):
    packs = [sample_pack(namespace, 10 + number) for number in range(first, first + 100)]
    named = [sample_manifest(f"r{pack.pack_id.hex()}", 5, packs=[shared.pack_id, pack.pack_id]) for pack in packs]
    backend.commit(namespace, CommitBatch(packs, named))
size = pathlib.Path(f"{sys.argv[1]}/store/data.mdb").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))  # the catalogue cannot grow any more, as on a full disk
new = [sample_pack(namespace, 5000)] if sys.argv[4] == "replace" else []
backend.commit(namespace, CommitBatch(new, deletions=[shared.pack_id]))
print([table.pack_id for table in backend.changes(namespace, None).added] == [pack.pack_id for pack in new])
print(backend.stats().requests, find_faults(backend))
"""


@pytest.mark.parametrize("batch", ["delete", "replace"])
@pytest.mark.parametrize("requests", [500, pytest.param(3000, marks=pytest.mark.slow)])
def test_commit_full_disk_deletes_shared_pack(
    tmp_path: Path,
    placement: str,
    requests: int,
    batch: str,
) -> None:
    assert run(DELETES_SHARED, tmp_path, placement, requests, batch) == [
        "True",
        "0",
        "[]",
    ]


def test_reads_hold_no_snapshot_and_freed_pages_are_reused(
    backend: LmdbBackend,
    namespace: bytes,
    open_store: Opener,
) -> None:
    """A read transaction that stays open would prevent the reuse of freed pages, and the file would
    grow."""
    reader = open_store(read_only=True)
    backend.commit(
        namespace,
        CommitBatch(manifests=[sample_manifest(f"r{number}") for number in range(5)]),
    )
    iterators = []
    pack = sample_pack(namespace, 0, blocks=16, block_bytes=1 << 16)
    for _ in range(15):
        backend.commit(namespace, CommitBatch([pack]))
        reader.changes(namespace, None)
        read_all(reader, namespace, pack)
        iterators.append(iter(reader.catalogue(namespace).manifests()))
        next(iterators[-1])
        reader.stats()
        backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
    assert backend.stats().disk_bytes < 6 << 20


def test_open_after_killed_reader_clears_its_slot(
    open_store: Opener,
    path: Path,
) -> None:
    open_store().close()
    code = """
import lmdb, os, sys
env = lmdb.open(sys.argv[1], readonly=True)
txn = env.begin()
txn.get(b"x")
os.kill(os.getpid(), 9)
"""
    forked.run([sys.executable, "-c", code, str(path)])
    backend = open_store()
    assert backend.stats().packs == 0
    code = (
        "import lmdb, sys; print(lmdb.open(sys.argv[1], readonly=True).reader_check())"
    )
    assert run(code, path) == ["0"]  # opening the store has cleared the slot already


def test_read_float16_buffer_receives_stored_bytes(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    pack = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([pack]))
    rows = np.zeros(pack.raw_length // 2, np.float16)
    assert backend.read(namespace, [ReadSpan(pack.pack_id, 0, [rows.data])]) == [True]
    assert rows.tobytes() == payload_of(pack)


def test_open_lmdb_out_of_memory_raises_unavailable(
    open_store: Opener,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        error = lmdb.MemoryError("mdb_env_open")
        vars(error).update(code=12, reason="Cannot allocate memory")
        raise error

    monkeypatch.setattr(lmdb, "open", fail)
    with pytest.raises(StoreUnavailableError, match=f"{path}: Cannot allocate memory"):
        open_store()
    assert {entry.name: entry.stat().st_size for entry in path.iterdir()} == {
        "guard": 0,
        "writer.lock": 0,
    }
