"""Two processes on one store: if one is killed or stopped in a transaction, or grows the map, the
other continues."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, cast

import pytest

from persistkv.errors import StoreBusyError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend, files, opening
from persistkv_lmdb.payloads.allocator import Allocator, read_reserved
from persistkv_tools.packs import check_pack
from tests import forked
from tests.backends.lmdb.conftest import Opener, stdout_of
from tests.backends.lmdb.consistency import find_faults

PATIENCE_S = 60

OTHER = """
import os, signal, sys
from persistkv.config import StoreUrl
from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.catalogue import CatalogTransaction
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import read_pack
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.payloads.segments import SegmentFiles

namespace = bytes.fromhex(sys.argv[2])

class SignallingPack:
    def __init__(self, pack, number):
        self.pack, self.number = pack, number
    def __getattr__(self, name):
        return getattr(self.pack, name)
    def stream(self):
        for piece in self.pack.stream():
            yield piece
        say("inside")
        os.kill(os.getpid(), self.number)

signals, finish = [], CatalogTransaction.finish

def signalling_finish(self):
    finish(self)
    if self.grew and signals:
        say("inside")
        os.kill(os.getpid(), signals.pop())

CatalogTransaction.finish = signalling_finish
after_sync, sync = [], SegmentFiles.sync

def signalling_sync(self):
    sync(self)
    if after_sync:
        say("inside")
        os.kill(os.getpid(), after_sync.pop())

SegmentFiles.sync = signalling_sync

def say(text):
    os.write(1, text.encode() + b"\\n")

def do(command, seed):
    pack = sample_pack(namespace, seed)
    if command == "read":
        payload = payload_of(pack)
        return "right" if read_pack(backend, namespace, pack.table) == payload else "missing"
    number = signal.SIGSTOP if command.startswith("stop") else signal.SIGKILL
    if command in ("stop", "die"):
        signals.append(number)
    if command == "stop-written":
        after_sync.append(number)
    if command in ("stop-writing", "die-writing"):
        pack = SignallingPack(pack, number)
    backend.commit(namespace, CommitBatch([pack]))
    return "committed"

try:
    backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
    backend.open_namespace(Identity.of({"weights": "abc"}))
    say("open")
    for line in sys.stdin:
        command, _, seed = line.partition(" ")
        try:
            say(do(command, int(seed)))
        except StoreError as error:
            say(f"{type(error).__name__}: {error}")
    backend.close()
except StoreError as error:
    say(f"{type(error).__name__}: {error}")
"""


class OtherProcess:
    """Another process that has the store open."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid

    def send(self, command: str) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(command.encode() + b"\n")
        stdin.flush()

    def receive(self) -> str:
        ready, _, _ = select.select([stdout_of(self.process)], [], [], PATIENCE_S)
        assert ready, "the other process does not answer"
        return stdout_of(self.process).readline().decode().strip()

    def request(self, command: str) -> str:
        self.send(command)
        return self.receive()

    def stop_in_transaction(self, seed: int) -> None:
        self.stop(f"stop {seed}")

    def stop_while_writing(self, seed: int) -> None:
        """Stop the process when it has written most of a payload."""
        self.stop(f"stop-writing {seed}")

    def stop(self, command: str) -> None:
        assert self.request(command) == "inside"
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)


@pytest.fixture
def start(path: Path, namespace: bytes) -> Iterator[Callable[..., OtherProcess]]:
    """Start other processes, and end them after the test."""
    started = []

    def start(options: str = "") -> OtherProcess:
        command = [
            sys.executable,
            "-uc",
            OTHER,
            f"lmdb://{path}{options}",
            namespace.hex(),
        ]
        process = forked.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        started.append(process)
        return OtherProcess(process)

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def other(start: Callable[..., OtherProcess]) -> OtherProcess:
    other = start()
    assert other.receive() == "open"
    return other


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WRITING_PATIENCE_S", 0.5)
    monkeypatch.setattr(files, "OPENING_PATIENCE_S", 0.5)


def commit(backend: LmdbBackend, namespace: bytes, seed: int) -> PackTable:
    pack = sample_pack(namespace, seed)
    backend.commit(namespace, CommitBatch([pack]))
    return pack.table


def test_commit_two_processes_read_each_others_packs(
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
) -> None:
    for seed in range(0, 20, 2):
        commit(backend, namespace, seed)
        assert other.request(f"commit {seed + 1}") == "committed"
        assert other.request(f"read {seed}") == "right"
    found = tables(backend, namespace)
    assert len(found) == 20
    for seed in range(20):
        pack = sample_pack(namespace, seed)
        assert read_pack(backend, namespace, found[pack.pack_id]) == payload_of(pack)
    check_totals(backend)


HOLDER = """
import os, sys, time
from fcntl import LOCK_EX, LOCK_UN, flock

lock = os.open(sys.argv[1], os.O_RDWR)
flock(lock, LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
for turn in range(200):  # much work under the lock, little between
    time.sleep(0.01)
    flock(lock, LOCK_UN)
    time.sleep(0.0002)
    flock(lock, LOCK_EX)
    print(turn, flush=True)
"""


def test_commit_beside_busy_writer_gets_its_turn(
    backend: LmdbBackend,
    namespace: bytes,
    path: Path,
) -> None:
    commit(backend, namespace, 1)
    command = [sys.executable, "-c", HOLDER, str(path / files.WRITER_LOCK_FILE)]
    with forked.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as holder:
        assert stdout_of(holder).readline() == b"held\n"
        waiter = threading.Thread(target=commit, args=(backend, namespace, 2))
        waiter.start()
        assert holder.stdin is not None
        holder.stdin.write(b"go\n")
        waiter.join(PATIENCE_S)
        holder.kill()
        turns = stdout_of(holder).read().count(b"\n")
    assert turns <= 60, f"the other writer had {turns} turns first"
    assert len(tables(backend, namespace)) == 2


def test_commit_lock_granted_after_timeout_is_released(
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
    short_timeouts: None,
) -> None:
    other.stop_in_transaction(2)
    threads = threading.active_count()
    for _ in range(5):
        with pytest.raises(StoreBusyError):
            commit(backend, namespace, 3)
    assert threading.active_count() <= threads + 1, "attempts wait in one thread"
    os.kill(other.pid, signal.SIGCONT)
    assert other.receive() == "committed"
    assert other.request("commit 4") == "committed"
    commit(backend, namespace, 3)
    assert other.request("read 3") == "right"
    assert len(tables(backend, namespace)) == 3


def test_commit_interrupted_while_waiting_takes_no_lock(
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    other.stop_in_transaction(2)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            commit(backend, namespace, 3)
    finally:
        signal.signal(signal.SIGALRM, before)
    os.kill(other.pid, signal.SIGCONT)
    assert other.receive() == "committed"
    for seed in range(4, 10):
        assert other.request(f"commit {seed}") == "committed"
    commit(backend, namespace, 3)


def test_commit_lock_granted_after_fork_is_not_held_by_child(
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
    short_timeouts: None,
) -> None:
    other.stop_in_transaction(2)
    with pytest.raises(StoreBusyError):
        commit(backend, namespace, 3)
    child = os.fork()
    if not child:
        signal.pause()
    try:
        os.kill(other.pid, signal.SIGCONT)
        assert other.receive() == "committed"
        for seed in range(4, 10):
            assert other.request(f"commit {seed}") == "committed"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_commit_after_writer_killed_in_transaction_discards_its_pack(
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
) -> None:
    first = commit(backend, namespace, 1)
    assert other.request("die 2") == "inside"
    assert other.process.wait(PATIENCE_S) == -signal.SIGKILL
    assert set(tables(backend, namespace)) == {first.pack_id}
    second = commit(backend, namespace, 3)
    assert set(tables(backend, namespace)) == {first.pack_id, second.pack_id}
    check_totals(backend)


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_commit_writer_stopped_while_writing_payload_is_not_blocked(
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
    placement: str,
    short_timeouts: None,
    end: signal.Signals,
) -> None:
    """Others fill and evict the store meanwhile. What the stopped process writes is in nobody's
    way."""
    if placement == "inline":
        pytest.skip("inline payloads are written in the transaction")
    other.stop_while_writing(2)
    for seed in range(3, 40):
        pack = sample_pack(namespace, seed, blocks=32, block_bytes=1 << 16)
        backend.commit(namespace, CommitBatch([pack]))
    assert find_faults(backend) == []
    before = tables(backend, namespace)
    os.kill(other.pid, end)
    if end == signal.SIGCONT:
        assert other.receive() == "committed"
        pack = sample_pack(namespace, 2)
        assert read_pack(
            backend, namespace, tables(backend, namespace)[pack.pack_id]
        ) == payload_of(pack)
    else:
        other.process.wait(PATIENCE_S)
    for seed in range(40, 60):
        backend.commit(
            namespace,
            CommitBatch([sample_pack(namespace, seed, blocks=32, block_bytes=1 << 16)]),
        )
    assert find_faults(backend) == []
    after = tables(backend, namespace)
    for pack_id, table in before.items():
        if pack_id in after:
            assert check_pack(backend, table) == [], pack_id.hex()


def test_commit_after_writer_killed_while_writing_releases_its_reservation(
    open_store: Opener,
    backend: LmdbBackend,
    namespace: bytes,
    start: Callable[..., OtherProcess],
    placement: str,
) -> None:
    if placement == "inline":
        pytest.skip("inline payloads reserve nothing")
    for seed in range(3):
        other = start()
        assert other.receive() == "open"
        assert other.request(f"commit {seed}") == "committed"
        assert other.request(f"die-writing {100 + seed}") == "inside"
        assert other.process.wait(PATIENCE_S) == -signal.SIGKILL
    assert len(tables(backend, namespace)) == 3
    with backend.environment.transaction() as transaction:
        assert Allocator(transaction).writers() == [0]
    commit(backend, namespace, 200)
    assert find_faults(backend) == []


def test_commit_after_close_releases_reservation_of_closed_store(
    open_store: Opener,
    backend: LmdbBackend,
    namespace: bytes,
    placement: str,
) -> None:
    if placement == "inline":
        pytest.skip("inline payloads reserve nothing")
    commit(backend, namespace, 1)
    with backend.environment.transaction() as transaction:
        before = read_reserved(transaction, 0)
    assert before
    backend.close()
    again = open_store()
    commit(again, namespace, 2)
    with again.environment.transaction() as transaction:
        assert Allocator(transaction).writers() == [0]
        assert read_reserved(transaction, 0) != before
    assert find_faults(again) == []


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_commit_writer_stopped_in_transaction_raises_busy_and_reads_work(
    open_store: Opener,
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
    short_timeouts: None,
    end: signal.Signals,
) -> None:
    held = commit(backend, namespace, 1)
    other.stop_in_transaction(2)
    with pytest.raises(
        StoreBusyError,
        match=f"process {other.pid} has held its lock for writing for more than 0.5 s",
    ):
        commit(backend, namespace, 3)
    # after one timeout, later waits are short
    with pytest.raises(StoreBusyError, match=r"more than 0\.2 s"):
        commit(backend, namespace, 3)
    for identity in ({"another": "one"}, {"weights": "abc"}):
        backend.open_namespace(Identity.of(identity))
    assert read_pack(backend, namespace, held) == payload_of(sample_pack(namespace, 1))
    assert set(tables(backend, namespace)) == {held.pack_id}
    backend.stats()
    reader = open_store(read_only=True)
    assert set(tables(reader, namespace)) == {held.pack_id}

    os.kill(other.pid, end)
    if end == signal.SIGCONT:
        assert other.receive() == "committed"
    else:
        other.process.wait(PATIENCE_S)
    third = commit(backend, namespace, 3)
    expected = {held.pack_id, third.pack_id}
    if end == signal.SIGCONT:
        expected.add(sample_pack(namespace, 2).pack_id)
    assert set(tables(backend, namespace)) == expected
    check_totals(backend)


def test_set_policy_writer_stopped_in_transaction_raises_busy(
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
    short_timeouts: None,
) -> None:
    larger = replace(backend.policy(), capacity=128 << 20)
    other.stop_in_transaction(2)
    with pytest.raises(StoreBusyError):
        backend.set_policy(larger)
    other.process.kill()
    other.process.wait()
    backend.set_policy(larger)
    assert backend.stats().capacity == 128 << 20


def test_open_for_writing_writer_stopped_in_transaction_raises_busy(
    open_store: Opener,
    path: Path,
    namespace: bytes,
    backend: LmdbBackend,
    other: OtherProcess,
    short_timeouts: None,
) -> None:
    backend.close()
    other.stop_in_transaction(2)
    with pytest.raises(StoreBusyError, match=f"process {other.pid}"):
        open_store()
    reader = open_store(read_only=True)
    assert tables(reader, namespace) == {}
    with pytest.raises(StoreBusyError):
        open_store()
    assert tables(reader, namespace) == {}
    other.process.kill()
    other.process.wait()
    writer = open_store()
    writer.open_namespace(Identity.of({"weights": "abc"}))
    commit(writer, namespace, 3)
    assert len(tables(reader, namespace)) == 1


class WaitingPack:
    """A pack whose stream waits for an event, which keeps its transaction open."""

    def __init__(self, pack: PackWriter) -> None:
        self.pack = pack
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self.pack, name)

    def stream(self) -> Iterator[Buffer]:
        self.inside.set()
        assert self.go_on.wait(PATIENCE_S)
        yield from self.pack.stream()


@contextmanager
def in_a_transaction(
    backend: LmdbBackend,
    namespace: bytes,
    seed: int,
) -> Iterator[None]:
    """Keep a thread of this process in a write transaction until the end of the block."""
    pack = WaitingPack(sample_pack(namespace, seed))
    thread = threading.Thread(
        target=backend.commit, args=(namespace, CommitBatch([cast(PackWriter, pack)]))
    )
    thread.start()
    assert pack.inside.wait(PATIENCE_S)
    try:
        yield
    finally:
        pack.go_on.set()
        thread.join()


def test_commit_other_thread_in_transaction_raises_busy(
    open_store: Opener,
    backend: LmdbBackend,
    namespace: bytes,
    short_timeouts: None,
) -> None:
    second = open_store()
    with in_a_transaction(backend, namespace, 1):
        with pytest.raises(StoreBusyError, match="another thread of this process"):
            commit(second, namespace, 2)
        assert tables(second, namespace) == {}
    commit(second, namespace, 2)
    assert len(tables(second, namespace)) == 2


def test_open_slow_store_does_not_block_opening_other_stores(
    open_store: Opener,
    tmp_path: Path,
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process is stopped in a transaction, and a thread here waits to open its store. Other
    stores open at once."""
    monkeypatch.setattr(files, "OPENING_PATIENCE_S", 0.5)
    location = tmp_path / "store"
    backend.close()
    other.stop_in_transaction(2)
    entered, go_on = threading.Event(), threading.Event()
    errors = []

    def slow(*_: object) -> NoReturn:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        raise StoreBusyError("it took too long")

    def open_it() -> None:
        with suppress(StoreBusyError):
            open_store()
            errors.append("it opened")

    with monkeypatch.context() as patch:
        patch.setattr(opening.Guard, "open", slow)
        thread = threading.Thread(target=open_it)
        thread.start()
        assert entered.wait(PATIENCE_S)
    try:
        elsewhere = open_store(location=tmp_path / "another")
        commit(
            elsewhere, elsewhere.open_namespace(Identity.of({"another": "one"})).id, 1
        )
        with pytest.raises(
            StoreBusyError,
            match=r"another thread of this process has been opening it for more than 0\.5",
        ):
            open_store(location=location)
    finally:
        go_on.set()
        thread.join()
    assert errors == []
    os.kill(other.pid, signal.SIGCONT)
    assert other.receive() == "committed"
    assert len(tables(open_store(), namespace)) == 1


def test_commit_deleted_lock_file_recreates_it_and_stays_serialized(
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
) -> None:
    """LMDB's own lock still serializes the writes. The next transactions use the new lock file."""
    with in_a_transaction(backend, namespace, 1):
        (path / "writer.lock").unlink()
        other.send("commit 2")
    assert other.receive() == "committed"
    commit(backend, namespace, 3)
    assert len(tables(backend, namespace)) == 3
    other.stop_in_transaction(4)
    assert (path / "writer.lock").exists()
    os.kill(other.pid, signal.SIGCONT)
    assert other.receive() == "committed"
    check_totals(backend)


def test_fork_of_killed_writer_holds_no_lock_guard_or_number(
    open_store: Opener,
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
    other: OtherProcess,
    placement: str,
) -> None:
    """A process forks during a write and is killed. Its live fork holds neither lock, so others can
    use the store."""
    code = """
import os, sys, time
from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv_lmdb import LmdbBackend
backend = LmdbBackend.open(StoreUrl.parse(sys.argv[1]))
with backend.environment.transaction(write=True) as transaction:
    payloads = backend.environment.prepare_payloads(transaction)
    taken = () if backend.environment.database.shares.inline else payloads.allocate(16)
    writer = backend.environment.claim_writer(transaction)
    payloads.allocator.reserve(writer, taken)
with backend.environment.transaction(write=True):
    child = os.fork()
    if not child:
        os.write(1, b"forked\\n")
        time.sleep(600)
    os.write(1, f"{child}\\n".encode())
    sys.stdin.readline()
os._exit(0)
"""
    command = [sys.executable, "-uc", code, f"lmdb://{path}"]
    with forked.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as forking:
        said = {stdout_of(forking).readline().strip() for _ in range(2)}
        (child,) = (int(word) for word in said if word != b"forked")
        try:
            forking.kill()
            forking.wait()
            commit(backend, namespace, 1)
            if placement == "extents":
                with backend.environment.transaction() as rows:
                    assert Allocator(rows).writers() == [0], (
                        "the dead process's number is taken"
                    )
            assert other.request("commit 2") == "committed"
            backend.close()
            other.process.kill()
            other.process.wait()
            assert (path / "guard").read_text().split()[0] == "open"
            again = open_store()
            assert len(tables(again, namespace)) == 2
            again.close()
            # no other process holds it, including the fork
            assert (path / "guard").read_text().split()[0] == "clean"
        finally:
            os.kill(child, signal.SIGKILL)


def active_readers(path: Path) -> list[str]:
    """List the processes that hold a snapshot. A child process reads the list: LMDB opens a store
    once per process."""
    code = "import lmdb, sys; print(lmdb.open(sys.argv[1], readonly=True).readers())"
    listed = forked.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = listed.stdout.splitlines()[1:]
    return [
        line.split()[0]
        for line in lines
        if len(line.split()) == 3 and line.split()[2] != "-"
    ]


def test_ls_blocked_output_pipe_holds_no_snapshot(
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    """``persistkv ls | less`` with a full pipe: writers continue."""
    writes = [
        sample_manifest(f"request {number:06} " + "x" * 200, number)
        for number in range(1500)
    ]
    backend.commit(namespace, CommitBatch(manifests=writes))
    command = [
        sys.executable,
        "-m",
        "persistkv_tools",
        "ls",
        f"lmdb://{path}",
        "--limit",
        "0",
    ]
    with forked.Popen(command, stdout=subprocess.PIPE) as listing:
        ready, _, _ = select.select([stdout_of(listing)], [], [], PATIENCE_S)
        assert ready
        deadline = time.monotonic() + PATIENCE_S
        # a snapshot that is held while the pipe is full would be held forever
        while active_readers(path):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        commit(backend, namespace, 1)
        assert len(stdout_of(listing).read()) > 1 << 16, "the pipe was never full"


def test_manifests_and_namespaces_hold_no_snapshot_between_items(
    open_store: Opener,
    path: Path,
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    backend.commit(
        namespace,
        CommitBatch(manifests=[sample_manifest(f"r{number}") for number in range(600)]),
    )
    reader = open_store(read_only=True)
    for iterator in (reader.catalogue(namespace).manifests(), reader.namespaces()):
        next(iter(iterator))
        assert active_readers(path) == []
