"""The guard after unclean shutdowns, and damaged files. ``tests.crash.damage`` damages files at random."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest

from persistkv.errors import CorruptStoreError, StoreBusyError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import files, fsck, opening
from persistkv_lmdb.fsck import Finding, Verdict, inspect
from tests.backends.lmdb.conftest import Opener, stdout_of

DIES = """
import os, signal, sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend

class DyingPack:
    def __getattr__(self, name):
        return getattr(self.pack, name)
    def __init__(self, pack):
        self.pack = pack
    def stream(self):
        os.kill(os.getpid(), signal.SIGKILL)

backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
namespace = bytes.fromhex(sys.argv[2])
for number in range(int(sys.argv[3])):
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 500 + number)]))
if sys.argv[4] == "writing":
    backend.commit(namespace, CommitBatch([DyingPack(sample_pack(namespace, 600))]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def die(path: Path, namespace: bytes, *, commits: int = 0, where: str = "idle") -> None:
    """Run a process that opens the store for writing and is killed."""
    command = [sys.executable, "-c", DIES, f"lmdb://{path}", namespace.hex(), str(commits), where]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


def moved_aside(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.name.startswith("damaged-")]


def flip_root(path: Path) -> None:
    """Damage the root page of the main database."""
    data = bytearray((path / "data.mdb").read_bytes())
    newest = max((0, 4096), key=lambda meta: data[meta + 16 + 24 + 2 * 48 + 8 : meta + 160][::-1])
    (root,) = struct.unpack_from("<Q", data, newest + 16 + 24 + 48 + 40)
    data[root * 4096 + 10] ^= 0xFF
    (path / "data.mdb").write_bytes(data)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Results of the integrity checks so far."""
    found = []

    def counted(directory: Path) -> Any:
        found.append(inspect(directory))
        return found[-1]

    monkeypatch.setattr(opening, "inspect", counted)
    return found


@pytest.fixture
def filled(open_store: Opener, path: Path, identity: Identity) -> bytes:
    """Create a store with a pack and a request, and close it. Return its namespace."""
    backend = open_store("?capacity=64MiB")
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    backend.commit(namespace, CommitBatch([pack], [sample_manifest("r", packs=[pack.pack_id])]))
    backend.close()
    return namespace


def test_nobody_looks_after_a_clean_end(open_store: Opener, filled: bytes, walks: list[Finding]) -> None:
    for _ in range(3):
        open_store().close()
    assert walks == []


def test_store_of_a_killed_process_is_looked_at_and_kept(
    open_store: Opener, path: Path, filled: bytes, walks: list[Finding]
) -> None:
    die(path, filled, commits=3)
    backend = open_store()
    assert [found.verdict for found in walks] == [Verdict.FINE]
    assert len(tables(backend, filled)) == 4
    check_totals(backend)
    backend.close()
    open_store().close()
    assert len(walks) == 1


def test_damage_is_moved_aside_with_a_message(
    open_store: Opener, path: Path, filled: bytes, identity: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    die(path, filled)
    flip_root(path)
    before = (path / "data.mdb").read_bytes()
    backend = open_store()
    assert list(backend.namespaces()) == []
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 2)
    backend.commit(namespace, CommitBatch([pack]))
    assert read_pack(backend, namespace, pack.table) == payload_of(pack)
    (aside,) = moved_aside(path)
    assert (aside / "data.mdb").read_bytes() == before
    assert not aside.stat().st_mode & 0o077
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert str(aside) in warning
    assert f"{path} is damaged" in warning


def test_damage_after_a_clean_end_is_moved_aside_where_opening_finds_it(
    open_store: Opener, path: Path, filled: bytes, walks: list[Finding]
) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    data[16] ^= 0xFF  # LMDB's magic number
    (path / "data.mdb").write_bytes(data)
    assert list(open_store().namespaces()) == []
    assert [found.verdict for found in walks] == [Verdict.DAMAGED]
    assert len(moved_aside(path)) == 1


def test_a_look_ends_with_the_process_that_asked() -> None:
    """Without this, each host process that is killed while it opens a large store would leave a check running."""
    looking = """
import os, time
from persistkv_lmdb.fsck import end_with
end_with(os.getppid())
print("looking", flush=True)
time.sleep(600)
"""
    asking = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen([sys.executable, "-c", asking, looking], stdout=subprocess.PIPE) as asker:
        assert stdout_of(asker).readline() == b"looking\n"
        asker.kill()
        ended, _, _ = select.select([stdout_of(asker)], [], [], 60)
        assert ended
        assert stdout_of(asker).read() == b"", "the one that looks has ended, too"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_file_that_was_cut_after_a_clean_end_ends_nobody(
    open_store: Opener, path: Path, filled: bytes, share: float
) -> None:
    """Reading a mapped page that is missing from the file would kill the process with SIGBUS."""
    size = (path / "data.mdb").stat().st_size
    os.truncate(path / "data.mdb", int(share * size) // 4096 * 4096)
    code = """
import sys
from persistkv.config import StoreUrl
from persistkv.errors import CorruptStoreError
from persistkv_lmdb import LmdbBackend
for read_only in (True, False):
    try:
        backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]), read_only=read_only)
        print(len(list(backend.namespaces())))
    except CorruptStoreError as error:
        print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code, f"lmdb://{path}"], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["refused", "0"], done.stderr
    assert done.returncode == 0
    assert len(moved_aside(path)) == 1


def test_a_store_whose_end_was_never_written_is_no_damage(
    open_store: Opener, path: Path, filled: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persistkv_lmdb.opening.is_cut_short", lambda _: True)
    assert len(list(open_store().namespaces())) == 1


def test_damage_that_a_transaction_met_is_looked_at_by_the_next_to_open(
    open_store: Opener, path: Path, filled: bytes, identity: Identity
) -> None:
    with lmdb.open(str(path), max_dbs=16) as env, env.begin(write=True) as txn:
        txn.put(filled, b"short", db=env.open_db(b"states", txn=txn))
    backend = open_store()
    with pytest.raises(CorruptStoreError, match="state"):
        backend.changes(filled, None)
    backend.close()
    backend = open_store()
    assert list(backend.namespaces()) == []
    assert len(moved_aside(path)) == 1


def test_damaged_stores_stay_until_a_command_deletes_them(
    open_store: Opener, path: Path, filled: bytes, identity: Identity
) -> None:
    for _ in range(3):
        backend = open_store()
        backend.open_namespace(identity)
        backend.close()
        die(path, filled)
        flip_root(path)
        open_store().close()
    assert len(moved_aside(path)) == 3
    backend = open_store()
    stats = backend.stats()
    assert stats.quarantined == tuple(map(str, sorted(moved_aside(path))))
    assert backend.delete_quarantined() == stats.quarantined_bytes > 0
    assert moved_aside(path) == []
    assert backend.stats().quarantined == ()


def test_nothing_moves_while_somebody_alive_has_it_open(
    open_store: Opener, path: Path, filled: bytes, walks: list[Finding]
) -> None:
    holds = """
import sys
from persistkv.config import StoreUrl
from persistkv_lmdb import LmdbBackend
backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
backend.close()
"""
    command = [sys.executable, "-c", holds, f"lmdb://{path}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert stdout_of(other).readline() == b"open\n"
        die(path, filled)
        backend = open_store()
        assert len(tables(backend, filled)) == 1
        backend.close()
        assert (path / "guard").read_text().split() == ["open"]
    assert walks == []
    open_store().close()
    assert walks == []  # the other process closed the store cleanly
    assert (path / "guard").read_text().split() == ["clean"]


def test_whoever_does_not_get_to_open_it_says_nothing_about_its_end(
    open_store: Opener, path: Path, filled: bytes, walks: list[Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    die(path, filled)
    monkeypatch.setattr(files, "OPENING_PATIENCE_S", 0.2)
    with (path / "writer.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreBusyError):
            open_store()
    assert (path / "guard").read_text().split()[0] == "open"
    open_store()
    assert len(walks) == 1


def test_open_after_many_deaths_keeps_content(open_store: Opener, path: Path, filled: bytes) -> None:
    """A crash loop caused by a memory limit is no damage."""
    for _ in range(7):
        die(path, filled, where="writing")
    backend = open_store()
    assert len(tables(backend, filled)) == 1
    assert [manifest.id for manifest in backend.manifests(filled)] == ["r"]
    assert not moved_aside(path)


def test_open_after_deaths_while_opening_keeps_content(open_store: Opener, path: Path, filled: bytes) -> None:
    dies = """
import os, signal, sys
from persistkv.config import StoreUrl
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb import environment
environment.create_databases = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
"""
    for _ in range(4):
        subprocess.run([sys.executable, "-c", dies, f"lmdb://{path}"], check=False)
    assert len(tables(open_store(), filled)) == 1
    assert not moved_aside(path)


@pytest.mark.parametrize("content", [b"open", b"???", b"clean x", b"\xff" * 40])
def test_guard_that_does_not_read_means_a_look(
    open_store: Opener, path: Path, filled: bytes, walks: list[Finding], content: bytes
) -> None:
    (path / "guard").write_bytes(content)
    assert len(tables(open_store(), filled)) == 1
    assert len(walks) == 1


def test_environment_of_something_else_is_nobodys_to_move(open_store: Opener, path: Path, walks: list[Finding]) -> None:
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    before = (path / "data.mdb").read_bytes()
    for _ in range(3):
        with pytest.raises(CorruptStoreError, match="something else"):
            open_store()
    flip_root(path)
    damaged = (path / "data.mdb").read_bytes()
    assert damaged != before
    with pytest.raises(CorruptStoreError):
        open_store()
    assert (path / "data.mdb").read_bytes() == damaged
    assert not moved_aside(path)
    assert walks == []


def test_child_that_cannot_run_says_nothing_about_the_store(
    open_store: Opener, path: Path, filled: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(path, filled)
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert inspect(path).verdict is Verdict.UNKNOWN
    assert len(tables(open_store(), filled)) == 1


@pytest.mark.parametrize(
    ("program", "finding"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", (Verdict.DAMAGED, "SIGBUS")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", (Verdict.UNKNOWN, "-9")),
        ("import time; time.sleep(600)", (Verdict.UNKNOWN, "did not end")),
        ("while True: pass", (Verdict.DAMAGED, "SIGXCPU")),
        ("raise MemoryError", (Verdict.UNKNOWN, "exit code 1")),
        ("raise SystemExit(3)", (Verdict.UNKNOWN, "exit code 3")),
    ],
)
def test_how_the_child_ends(
    path: Path, filled: bytes, monkeypatch: pytest.MonkeyPatch, program: str, finding: tuple[Verdict, str]
) -> None:
    monkeypatch.setattr(fsck, "PROGRAM", program)
    if "sleep" in program or "while" in program:
        monkeypatch.setattr(fsck, "LEAST_CPU_S", 1)
        monkeypatch.setattr(fsck, "PATIENCE", 2 if "sleep" in program else 1000)
    found: Finding = inspect(path)
    assert found.verdict is finding[0]
    assert finding[1] in found.reason


def test_walk_never_imports_torch(path: Path, filled: bytes) -> None:
    code = f"""
import atexit, os, sys
from persistkv_lmdb import fsck
os._exit = lambda code: sys.exit("torch" in sys.modules)
fsck.main({str(path)!r}, os.getppid())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 packs in 1 namespaces\n"), done.stderr


def change_rows(path: Path, database: bytes, row: bytes) -> None:
    with lmdb.open(str(path), max_dbs=16) as env, env.begin(write=True) as txn:
        rows = env.open_db(database, txn=txn)
        for key in [key for key, _ in txn.cursor(rows)]:
            txn.put(key, row, db=rows)


@pytest.mark.parametrize(
    ("database", "row", "verdict"),
    [
        (b"packs", b"no table", Verdict.FINE),
        (b"uses", b"", Verdict.FINE),
        (b"chains", b"odd", Verdict.FINE),
        (b"manifests", b"\xc1", Verdict.FINE),
        (b"manifest_keys", b"\xc1", Verdict.FINE),
        (b"namespaces", b"{}", Verdict.FINE),
        (b"states", b"", Verdict.DAMAGED),
        (b"states", bytes(56), Verdict.DAMAGED),
        (b"states", b"\xff" * 56, Verdict.DAMAGED),
    ],
)
def test_rows_that_do_not_read(
    open_store: Opener, path: Path, filled: bytes, identity: Identity, database: bytes, row: bytes, verdict: Verdict
) -> None:
    """If the bad row only describes content whose loss is a cache miss, the store is kept and accepts new content."""
    change_rows(path, database, row)
    assert inspect(path).verdict is verdict
    before = open_store()
    before.environment.suspect()
    before.close()
    backend = open_store()
    assert len(moved_aside(path)) == (verdict is Verdict.DAMAGED)
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    payload = payload_of(pack)
    backend.commit(namespace, CommitBatch([pack], [sample_manifest("r", packs=[pack.pack_id])]))
    assert read_pack(backend, namespace, pack.table) == payload
    backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
    assert tables(backend, namespace) == {}


@pytest.mark.parametrize(
    "row", [b"", bytes(15), b"\xff" * 16, struct.pack("<Qddd16sdd", 1, float("nan"), 0, 0, b"", 0, 0)]
)
def test_clock_that_does_not_read(open_store: Opener, path: Path, filled: bytes, row: bytes) -> None:
    with lmdb.open(str(path), max_dbs=16) as env, env.begin(write=True) as txn:
        txn.put(b"clock", row, db=env.open_db(b"meta", txn=txn))
    backend = open_store()
    with pytest.raises(CorruptStoreError, match="clock"):
        backend.commit(filled, CommitBatch([sample_pack(filled, 9)]))
    backend.close()
    assert list(open_store().namespaces()) == []


@pytest.mark.parametrize("row", [b"", bytes(8), b"\xff" * 8])
def test_capacity_that_cannot_be(open_store: Opener, path: Path, filled: bytes, row: bytes) -> None:
    with lmdb.open(str(path), max_dbs=16) as env, env.begin(write=True) as txn:
        txn.put(b"capacity", row, db=env.open_db(b"meta", txn=txn))
    backend = open_store()
    assert backend.stats().capacity == 10 << 30
    assert len(tables(backend, filled)) == 1


def test_placement_that_does_not_read(open_store: Opener, path: Path, filled: bytes) -> None:
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        txn.put(b"placement", b"extentz", db=env.open_db(b"meta", txn=txn))
    with pytest.raises(CorruptStoreError, match="placement"):
        open_store()
    assert list(open_store().namespaces()) == []
    assert len(moved_aside(path)) == 1


@pytest.mark.parametrize("ended", ["clean", "killed"])
@pytest.mark.parametrize("database", [None, b"packs"])
def test_what_a_store_is_told_by_does_not_read(
    open_store: Opener, path: Path, filled: bytes, database: bytes, ended: bool
) -> None:
    """The guard shows that this was a store. Treated as another program's directory, it could never be opened again."""
    if ended == "killed":
        die(path, filled)
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        if database is None:
            txn.put(b"format", b"PKVLMDB0" + bytes(4), db=env.open_db(b"meta", txn=txn))
        else:
            txn.drop(env.open_db(database, txn=txn))
    assert list(open_store().namespaces()) == []
    assert len(moved_aside(path)) == 1


@pytest.mark.parametrize("ended", ["clean", "killed"])
def test_store_of_another_release_is_never_moved(open_store: Opener, path: Path, filled: bytes, ended: bool) -> None:
    if ended == "killed":
        die(path, filled)
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"PKVLMDB1" + b"\x03\0\0\0", db=env.open_db(b"meta", txn=txn))
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match="format is 3"):
            open_store()
    assert not moved_aside(path)
