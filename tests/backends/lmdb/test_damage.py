"""Inspection after unclean shutdowns, and damaged files. ``tests.crash.damage`` damages files at
random."""

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

import lmdb
import pytest

from persistkv.errors import CorruptStoreError, StoreBusyError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import files, opening
from persistkv_lmdb.repair import fsck
from persistkv_lmdb.repair.fsck import CheckResult, Finding, inspect
from tests import forked
from tests.backends.lmdb.conftest import Opener, stdout_of

KILLED_WRITER = """
import os, signal, sys
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend

class KillingPack:
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
    backend.commit(namespace, CommitBatch([KillingPack(sample_pack(namespace, 600))]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_killed_writer(
    path: Path,
    namespace: bytes,
    *,
    commits: int = 0,
    where: str = "idle",
) -> None:
    """Run a process that opens the store for writing and is killed."""
    command = [
        sys.executable,
        "-c",
        KILLED_WRITER,
        f"lmdb://{path}",
        namespace.hex(),
        str(commits),
        where,
    ]
    assert forked.run(command).returncode == -signal.SIGKILL


def quarantined_copies(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.name.startswith("damaged-")]


def damage_root_page(path: Path) -> None:
    """Damage the root page of the main database."""
    data = bytearray((path / "data.mdb").read_bytes())
    newest = max(
        (0, 4096), key=lambda meta: data[meta + 16 + 24 + 2 * 48 + 8 : meta + 160][::-1]
    )
    (root,) = struct.unpack_from("<Q", data, newest + 16 + 24 + 48 + 40)
    data[root * 4096 + 10] ^= 0xFF
    (path / "data.mdb").write_bytes(data)


@pytest.fixture
def placement() -> str:
    """The one placement of the tests: damage is found in the catalogue, which both have."""
    return "extents"


@pytest.fixture
def inspections(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Results of the inspections so far."""
    found = []

    def counted(directory: Path) -> Finding:
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
    backend.commit(
        namespace, CommitBatch([pack], [sample_manifest("r", packs=[pack.pack_id])])
    )
    backend.close()
    return namespace


def test_open_after_clean_close_skips_inspection(
    open_store: Opener,
    filled: bytes,
    inspections: list[Finding],
) -> None:
    for _ in range(3):
        open_store().close()
    assert inspections == []


def test_open_after_killed_writer_inspects_once_and_keeps_content(
    open_store: Opener,
    path: Path,
    filled: bytes,
    inspections: list[Finding],
) -> None:
    run_killed_writer(path, filled, commits=3)
    backend = open_store()
    assert [found.result for found in inspections] == [CheckResult.FINE]
    assert len(tables(backend, filled)) == 4
    check_totals(backend)
    backend.close()
    open_store().close()
    assert len(inspections) == 1


def test_open_damaged_after_kill_quarantines_and_warns(
    open_store: Opener,
    path: Path,
    filled: bytes,
    identity: Identity,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_killed_writer(path, filled)
    damage_root_page(path)
    before = (path / "data.mdb").read_bytes()
    backend = open_store()
    assert list(backend.namespaces()) == []
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 2)
    backend.commit(namespace, CommitBatch([pack]))
    assert read_pack(backend, namespace, pack.table) == payload_of(pack)
    (copy,) = quarantined_copies(path)
    assert (copy / "data.mdb").read_bytes() == before
    assert not copy.stat().st_mode & 0o077
    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]
    assert str(copy) in warning
    assert f"{path} is damaged" in warning


def test_open_damaged_after_clean_close_quarantines(
    open_store: Opener,
    path: Path,
    filled: bytes,
    inspections: list[Finding],
) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    data[16] ^= 0xFF  # LMDB's magic number
    (path / "data.mdb").write_bytes(data)
    assert list(open_store().namespaces()) == []
    assert [found.result for found in inspections] == [CheckResult.DAMAGED]
    assert len(quarantined_copies(path)) == 1


def test_end_with_killed_parent_ends_inspecting_process() -> None:
    """Without this, each host process that is killed while it opens a large store would leave an
    inspection running."""
    inspecting = """
import os, time
from persistkv_lmdb.repair.fsck import end_with
end_with(os.getppid())
print("inspecting", flush=True)
time.sleep(600)
"""
    parent = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    )
    with forked.Popen(
        [sys.executable, "-c", parent, inspecting], stdout=subprocess.PIPE
    ) as process:
        assert stdout_of(process).readline() == b"inspecting\n"
        process.kill()
        ended, _, _ = select.select([stdout_of(process)], [], [], 60)
        assert ended
        assert stdout_of(process).read() == b"", (
            "the inspecting process is still running"
        )


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_open_truncated_after_clean_close_quarantines_without_sigbus(
    open_store: Opener,
    path: Path,
    filled: bytes,
    share: float,
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
    done = forked.run(
        [sys.executable, "-c", code, f"lmdb://{path}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["refused", "0"], done.stderr
    assert done.returncode == 0
    assert len(quarantined_copies(path)) == 1


def test_open_short_file_that_passes_inspection_keeps_content(
    open_store: Opener,
    path: Path,
    filled: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("persistkv_lmdb.files.is_cut_short", lambda _: True)
    assert len(list(open_store().namespaces())) == 1


def test_open_after_transaction_found_damage_quarantines(
    open_store: Opener,
    path: Path,
    filled: bytes,
    identity: Identity,
) -> None:
    with lmdb.open(str(path), max_dbs=16) as env, env.begin(write=True) as txn:
        txn.put(filled, b"short", db=env.open_db(b"states", txn=txn))
    backend = open_store()
    with pytest.raises(CorruptStoreError, match="state"):
        backend.changes(filled, None)
    backend.close()
    backend = open_store()
    assert list(backend.namespaces()) == []
    assert len(quarantined_copies(path)) == 1


def test_quarantined_stores_remain_until_delete_quarantined(
    open_store: Opener,
    path: Path,
    filled: bytes,
    identity: Identity,
) -> None:
    for _ in range(2):
        backend = open_store()
        backend.open_namespace(identity)
        backend.close()
        run_killed_writer(path, filled)
        damage_root_page(path)
        open_store().close()
    assert len(quarantined_copies(path)) == 2
    backend = open_store()
    stats = backend.stats()
    assert stats.quarantined == tuple(map(str, sorted(quarantined_copies(path))))
    assert backend.delete_quarantined() == stats.quarantined_bytes > 0
    assert quarantined_copies(path) == []
    assert backend.stats().quarantined == ()


def test_open_after_kill_with_store_in_use_elsewhere_skips_inspection(
    open_store: Opener,
    path: Path,
    filled: bytes,
    inspections: list[Finding],
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
    with forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert stdout_of(other).readline() == b"open\n"
        run_killed_writer(path, filled)
        backend = open_store()
        assert len(tables(backend, filled)) == 1
        backend.close()
        assert (path / "guard").read_text().split() == ["open"]
    assert inspections == []
    open_store().close()
    assert inspections == []  # the other process closed the store cleanly
    assert (path / "guard").read_text().split() == ["clean"]


def test_open_busy_store_leaves_guard_unclean_and_next_open_inspects(
    open_store: Opener,
    path: Path,
    filled: bytes,
    inspections: list[Finding],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_killed_writer(path, filled)
    monkeypatch.setattr(files, "OPENING_PATIENCE_S", 0.2)
    with (path / "writer.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreBusyError):
            open_store()
    assert (path / "guard").read_text().split()[0] == "open"
    open_store()
    assert len(inspections) == 1


@pytest.mark.parametrize("placement", ["inline", "extents"])
def test_open_after_many_killed_writers_keeps_content(
    open_store: Opener,
    path: Path,
    filled: bytes,
) -> None:
    """A writer that is killed repeatedly, for example at its memory limit, does not damage the
    store."""
    for _ in range(3):
        run_killed_writer(path, filled, where="writing")
    backend = open_store()
    assert len(tables(backend, filled)) == 1
    assert [manifest.id for manifest in backend.catalogue(filled).manifests()] == ["r"]
    assert not quarantined_copies(path)


def test_open_after_kills_during_open_keeps_content(
    open_store: Opener,
    path: Path,
    filled: bytes,
) -> None:
    killed_while_opening = """
import os, signal, sys
from persistkv.config import StoreUrl
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb import database
database.create_databases = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
"""
    for _ in range(2):
        forked.run([sys.executable, "-c", killed_while_opening, f"lmdb://{path}"])
    assert len(tables(open_store(), filled)) == 1
    assert not quarantined_copies(path)


@pytest.mark.parametrize("content", [b"open", b"clean x", b"\xff" * 40])
def test_open_unreadable_guard_inspects_store(
    open_store: Opener,
    path: Path,
    filled: bytes,
    inspections: list[Finding],
    content: bytes,
) -> None:
    (path / "guard").write_bytes(content)
    assert len(tables(open_store(), filled)) == 1
    assert len(inspections) == 1


def test_open_foreign_environment_raises_and_never_quarantines(
    open_store: Opener,
    path: Path,
    inspections: list[Finding],
) -> None:
    with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    before = (path / "data.mdb").read_bytes()
    for _ in range(3):
        with pytest.raises(CorruptStoreError, match="something else"):
            open_store()
    damage_root_page(path)
    damaged = (path / "data.mdb").read_bytes()
    assert damaged != before
    with pytest.raises(CorruptStoreError):
        open_store()
    assert (path / "data.mdb").read_bytes() == damaged
    assert not quarantined_copies(path)
    assert inspections == []


def test_inspect_child_cannot_start_returns_unknown_and_keeps_store(
    open_store: Opener,
    path: Path,
    filled: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_killed_writer(path, filled)
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert inspect(path).result is CheckResult.UNKNOWN
    assert len(tables(open_store(), filled)) == 1


@pytest.mark.parametrize(
    ("program", "finding"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGBUS)",
            (CheckResult.DAMAGED, "SIGBUS"),
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            (CheckResult.UNKNOWN, "-9"),
        ),
        ("import time; time.sleep(600)", (CheckResult.UNKNOWN, "did not end")),
        ("raise MemoryError", (CheckResult.UNKNOWN, "exit code 1")),
        ("raise SystemExit(3)", (CheckResult.UNKNOWN, "exit code 3")),
    ],
)
def test_inspect_child_exit_determines_result(
    path: Path,
    filled: bytes,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    finding: tuple[CheckResult, str],
) -> None:
    monkeypatch.setattr(fsck, "PROGRAM", program)
    if "sleep" in program:
        monkeypatch.setattr(fsck, "PATIENCE_S", 2.0)
    found: Finding = inspect(path)
    assert found.result is finding[0]
    assert finding[1] in found.reason


def test_fsck_main_never_imports_torch(path: Path, filled: bytes) -> None:
    code = f"""
import atexit, os, sys
from persistkv_lmdb.repair import fsck
os._exit = lambda code: sys.exit("torch" in sys.modules)
fsck.main({str(path)!r}, os.getppid())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1 packs in 1 namespaces\n"), (
        done.stderr
    )


def change_rows(path: Path, database: bytes, row: bytes) -> None:
    with lmdb.open(str(path), max_dbs=16) as env, env.begin(write=True) as txn:
        rows = env.open_db(database, txn=txn)
        for key in [key for key, _ in txn.cursor(rows)]:
            txn.put(key, row, db=rows)


@pytest.mark.parametrize(
    ("database", "row", "expected"),
    [
        (b"packs", b"no table", CheckResult.FINE),
        (b"uses", b"", CheckResult.FINE),
        (b"chains", b"odd", CheckResult.FINE),
        (b"manifests", b"\xc1", CheckResult.FINE),
        (b"manifest_keys", b"\xc1", CheckResult.FINE),
        (b"namespaces", b"{}", CheckResult.FINE),
        (b"states", b"", CheckResult.DAMAGED),
        (b"states", bytes(56), CheckResult.FINE),
        (b"states", b"\xff" * 56, CheckResult.DAMAGED),
    ],
)
def test_open_unreadable_row_quarantines_only_for_namespace_state(
    open_store: Opener,
    path: Path,
    filled: bytes,
    identity: Identity,
    database: bytes,
    row: bytes,
    expected: CheckResult,
) -> None:
    """If the bad row only describes content whose loss is a cache miss, the store is kept and
    accepts new content."""
    change_rows(path, database, row)
    assert inspect(path).result is expected
    before = open_store()
    before.environment.mark_suspect()
    before.close()
    backend = open_store()
    assert len(quarantined_copies(path)) == (expected is CheckResult.DAMAGED)
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 1)
    payload = payload_of(pack)
    backend.commit(
        namespace, CommitBatch([pack], [sample_manifest("r", packs=[pack.pack_id])])
    )
    assert read_pack(backend, namespace, pack.table) == payload
    backend.commit(namespace, CommitBatch(deletions=[pack.pack_id]))
    assert tables(backend, namespace) == {}


@pytest.mark.parametrize(
    "row",
    [
        b"",
        bytes(15),
        b"\xff" * 16,
        struct.pack("<Qddd16sdd", 1, float("nan"), 0, 0, b"", 0, 0),
    ],
)
def test_commit_unreadable_clock_raises_and_next_open_quarantines(
    open_store: Opener,
    path: Path,
    filled: bytes,
    row: bytes,
) -> None:
    with lmdb.open(str(path), max_dbs=16) as env, env.begin(write=True) as txn:
        txn.put(b"clock", row, db=env.open_db(b"meta", txn=txn))
    backend = open_store()
    with pytest.raises(CorruptStoreError, match="clock"):
        backend.commit(filled, CommitBatch([sample_pack(filled, 9)]))
    backend.close()
    assert list(open_store().namespaces()) == []


@pytest.mark.parametrize("row", [b"", bytes(8), b"\xff" * 8])
def test_open_invalid_recorded_capacity_uses_default(
    open_store: Opener,
    path: Path,
    filled: bytes,
    row: bytes,
) -> None:
    with lmdb.open(str(path), max_dbs=16) as env, env.begin(write=True) as txn:
        txn.put(b"capacity", row, db=env.open_db(b"meta", txn=txn))
    backend = open_store()
    assert backend.stats().capacity == 10 << 30
    assert len(tables(backend, filled)) == 1


def test_open_unreadable_placement_raises_then_quarantines(
    open_store: Opener,
    path: Path,
    filled: bytes,
) -> None:
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        txn.put(b"placement", b"extentz", db=env.open_db(b"meta", txn=txn))
    with pytest.raises(CorruptStoreError, match="placement"):
        open_store()
    assert list(open_store().namespaces()) == []
    assert len(quarantined_copies(path)) == 1


@pytest.mark.parametrize("ended", ["clean", "killed"])
@pytest.mark.parametrize("database", [None, b"packs"])
def test_open_damaged_format_row_or_missing_database_quarantines(
    open_store: Opener,
    path: Path,
    filled: bytes,
    database: bytes,
    ended: bool,
) -> None:
    """The guard shows that this was a store. Rejected as another program's directory, it could not
    be opened again."""
    if ended == "killed":
        run_killed_writer(path, filled)
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        if database is None:
            txn.put(b"format", b"PKVLMDB0" + bytes(4), db=env.open_db(b"meta", txn=txn))
        else:
            txn.drop(env.open_db(database, txn=txn))
    assert list(open_store().namespaces()) == []
    assert len(quarantined_copies(path)) == 1


@pytest.mark.parametrize("ended", ["clean", "killed"])
def test_open_newer_format_raises_and_never_quarantines(
    open_store: Opener,
    path: Path,
    filled: bytes,
    ended: bool,
) -> None:
    if ended == "killed":
        run_killed_writer(path, filled)
    with lmdb.open(str(path), max_dbs=32) as env, env.begin(write=True) as txn:
        txn.put(
            b"format", b"PKVLMDB1" + b"\x03\0\0\0", db=env.open_db(b"meta", txn=txn)
        )
    for _ in range(2):
        with pytest.raises(CorruptStoreError, match="format is 3"):
            open_store()
    assert not quarantined_copies(path)
