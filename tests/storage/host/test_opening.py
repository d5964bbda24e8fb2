"""Opening a store: errors reach the engine unchanged, and restarts of the host process resolve the
recoverable ones."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import lmdb
import msgspec
import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.errors import (
    ConfigurationError,
    CorruptStoreError,
    FileError,
    HostError,
    IdentityMismatchError,
    MissingExtraError,
    PersistKVError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.connection import SocketConnection, discard
from persistkv.storage.host.protocol import (
    Hello,
    Opened,
    OpenFailed,
    Ping,
    Pong,
    ToEngine,
    ToStore,
)
from persistkv.storage.host.server import event_loop
from persistkv.storage.host.supervisor import State
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import (
    BLOCK,
    ENGINE_AS_INIT,
    KINDS,
    ScriptedHost,
    Served,
    SignalledHost,
    make_keys,
    wait_for,
)

HELLO = Hello(
    "lmdb:///absent",
    Identity.of({"weights": "w"}).encode(),
    RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),)),
    StoreOptions(),
)


class DriverError(StoreUnavailableError):
    """An error class that only the host's driver knows."""


def _store(hosted: Hosted, client: StoreClient) -> None:
    """Open the client, and store a block, so that the store lists the client's identity."""
    client.open()
    client.submit_store(1, "a", make_keys(1), range(1), None, BLOCK)
    hosted.finish(client, 1)
    assert client.flush(90)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StoreBusyError("busy"), StoreBusyError),
        (StoreError("failed"), StoreError),
        (StoreFullError("full"), StoreFullError),
        (CorruptStoreError("damaged"), CorruptStoreError),
        (DriverError("refused"), StoreUnavailableError),
        (MissingExtraError("boto3", "s3"), MissingExtraError),
        (FileError("read", Path("/key"), OSError("absent")), FileError),
        (ConfigurationError("capacity", -1, "a size"), ConfigurationError),
        (ValueError("a layout that does not fit"), ConfigurationError),
    ],
)
def test_open_failed_error_keeps_type_and_text_across_processes(
    error: PersistKVError | ValueError,
    kind: type[PersistKVError],
) -> None:
    ours, theirs = socket.socketpair()
    engine, host = SocketConnection(ours, ToEngine), SocketConnection(theirs, ToStore)
    host.send(OpenFailed.of(error))
    (message,) = engine.receive()
    received = message.error()
    assert type(received) is kind
    assert str(received) == str(error)
    assert vars(received).keys() >= vars(error).keys()
    engine.close()
    host.close()


@pytest.mark.parametrize("kind", KINDS)
def test_open_failure_raises_original_error_type_in_engine(
    hosted: Hosted,
    tmp_path: Path,
    kind: str,
) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"url scheme: 'nope' is not valid; expected one of .*lmdb",
    ):
        hosted.connect("nope:///x", kind).open()
    with pytest.raises(ConfigurationError, match="capacity"):
        hosted.connect(f"lmdb://{tmp_path}/a?capacity=-1", kind).open()
    with pytest.raises(ConfigurationError, match="codec"):
        hosted.connect(f"lmdb://{tmp_path}/a", kind, codec="none").open()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailableError, match="file"):
        hosted.connect(f"lmdb://{tmp_path}/file", kind).open()
    _store(hosted, hosted.connect(f"lmdb://{tmp_path}/b", kind))
    with pytest.raises(
        IdentityMismatchError, match="weights: 'other' here, 'w' stored"
    ) as caught:
        hosted.connect(
            f"lmdb://{tmp_path}/b",
            kind,
            identity={"weights": "other"},
            strict_identity=True,
        ).open()
    assert caught.value.differences[0].field == "weights"


@pytest.mark.parametrize("kind", KINDS)
def test_open_not_required_unusable_store_is_attached_when_it_opens(
    hosted: Hosted,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    blocked = tmp_path / "store"
    blocked.write_text("in the way")
    client = hosted.connect(f"lmdb://{blocked}", kind)
    client.open(required=False)
    keys = make_keys(4)
    assert client.table.prefix(keys) == 0
    client.submit_store(1, "a", keys, range(4), None, 4 * BLOCK)
    assert hosted.finish(client, 1).refused
    assert client.counters.refused_jobs == 1
    while client.counters.restarts < 2:  # further attempts that fail add no lines
        client.poll()
    assert caplog.text.count("the store does not open") == 1
    assert "is a file" in caplog.text

    blocked.unlink()
    wait_for(client, State.OPEN)
    assert caplog.text.count("the store does not open") == 1
    client.submit_store(2, "a", keys, range(4), None, 4 * BLOCK)
    assert hosted.finish(client, 2).failed == []
    assert client.flush(90)
    client.poll()
    assert client.table.prefix(keys) == 4


def test_open_not_required_configuration_mistakes_raise(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigurationError, match="capacity"):
        hosted.connect(f"lmdb://{tmp_path}/a?capacity=-1").open(required=False)
    with pytest.raises(ConfigurationError, match="codec"):
        hosted.connect(f"lmdb://{tmp_path}/a", codec="none").open(required=False)
    _store(hosted, hosted.connect(f"lmdb://{tmp_path}/b"))
    other = hosted.connect(
        f"lmdb://{tmp_path}/b", identity={"weights": "v"}, strict_identity=True
    )
    with pytest.raises(IdentityMismatchError):
        other.open(required=False)


def test_open_not_required_dying_hosts_are_restarted_in_background(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    hello = hosted.connect(f"lmdb://{tmp_path}/store").supervisor.hello
    host = SignalledHost((hosted.fd,), len(hosted.memory), signal.SIGKILL, 5)
    client = StoreClient(host, hello, max_queue_bytes=1 << 30)
    hosted.clients.append(client)
    client.open(required=False)
    assert client.state is not State.OPEN
    wait_for(client, State.OPEN)
    assert client.flush(90)


LOCK_HOLDER = """
import sys
from pathlib import Path
from persistkv_lmdb import files
lock = files.WriterLock(Path(sys.argv[1]))
with lock.held():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_open_store_locked_by_stopped_process_is_busy_then_attached(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("persistkv_lmdb.files.OPENING_PATIENCE_S", 0.2)  # 30 s
    path = tmp_path / "store"
    creator = hosted.connect(f"lmdb://{path}")
    creator.open()
    creator.close()
    command = [sys.executable, "-c", LOCK_HOLDER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreBusyError, match="busy"):
            hosted.connect(f"lmdb://{path}", "thread").open()
        client = hosted.connect(f"lmdb://{path}", "thread")
        client.open(required=False)
        assert caplog.text.count("the store does not open") == 1
        holder.kill()
    wait_for(client, State.OPEN)
    assert f"lmdb://{path} is open now" in caplog.text


def test_open_identity_notice_reaches_engine_once(
    hosted: Hosted,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    _store(hosted, hosted.connect(url))
    client = hosted.connect(url, identity={"weights": "v2"})
    with caplog.at_level(logging.WARNING):
        client.open()
    assert len(client.notices) == 1
    assert "other weights); see persistkv why" in client.notices[0]
    assert caplog.text.count("see persistkv why") == 1


@pytest.mark.parametrize("deaths", [1, 3, 4])
def test_open_host_killed_during_open_restarts_up_to_three_times(
    hosted: Hosted,
    tmp_path: Path,
    deaths: int,
) -> None:
    template = hosted.connect(f"lmdb://{tmp_path}/store")
    host = SignalledHost((hosted.fd,), len(hosted.memory), signal.SIGKILL, deaths)
    client = StoreClient(host, template.supervisor.hello, max_queue_bytes=1 << 30)
    hosted.clients.append(client)
    if deaths < 4:
        client.open()
        assert client.flush(90)
    else:
        with pytest.raises(HostError, match="died while it opened"):
            client.open()
        assert host.wait(1)
    assert host.started == min(deaths + 1, 4)


def test_open_unreadable_store_restarts_with_empty_store(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    """An unreadable row ends the first open; the restarted host checks the store, and the engine
    gets an empty one."""
    url = f"lmdb://{tmp_path}/store"
    client = hosted.connect(url)
    client.open()
    client.submit_store(1, "a", make_keys(70), range(70), None, 70 * BLOCK)
    assert client.close()
    with (
        lmdb.open(f"{tmp_path}/store", max_dbs=32) as env,
        env.begin(write=True) as txn,
    ):
        txn.put(b"placement", b"extentz", db=env.open_db(b"meta", txn=txn))
    again = hosted.connect(url)
    again.open()
    assert len(again) == 0
    assert again.flush(90)


def test_open_past_timeout_misses_until_store_is_open(
    hosted: Hosted,
    tmp_path: Path,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    client = hosted.connect(url)
    client.open()
    client.submit_store(1, "a", make_keys(70), range(70), None, 70 * BLOCK)
    assert client.close()

    host = SignalledHost((hosted.fd,), len(hosted.memory), signal.SIGSTOP, 1)
    again = StoreClient(host, client.supervisor.hello, max_queue_bytes=1 << 30)
    hosted.clients.append(again)
    again.open(timeout_s=0.2)
    assert again.state is State.OPENING
    assert not again.contains(make_keys(1)[0])
    again.submit_load(1, make_keys(1), [0])
    assert hosted.finish(again, 1).refused
    assert host.pid is not None
    os.kill(host.pid, signal.SIGCONT)
    wait_for(again, State.OPEN)
    assert all(map(again.contains, make_keys(70)))
    again.submit_load(2, make_keys(1), [0])
    assert hosted.finish(again, 2).failed == []


def test_open_hanging_host_is_killed_and_restarted(
    hosted: Hosted,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = SignalledHost((hosted.fd,), len(hosted.memory), signal.SIGSTOP, 1)
    hello = hosted.connect(f"lmdb://{tmp_path}/store").supervisor.hello
    client = StoreClient(
        host, hello, max_queue_bytes=1 << 30, watchdog_s=0.2, least_start_s=0.2
    )
    hosted.clients.append(client)
    client.open(timeout_s=0.0)
    assert client.state is State.OPENING
    wait_for(client, State.DOWN)
    assert "has not answered for 0.2 s; killing it" in caplog.text
    client.supervisor.opening_watchdog_s = 60.0  # the second process may take any time
    wait_for(client, State.OPEN)
    assert (host.started, client.counters.restarts) == (2, 1)
    assert client.flush(90)


def open_slowly() -> tuple[StoreClient, ScriptedHost]:
    """Return a client that waits for its store to open, with a watchdog's limit of 0.2 s."""
    host = ScriptedHost()
    client = StoreClient(
        host, HELLO, max_queue_bytes=1 << 30, watchdog_s=0.2, least_start_s=0.2
    )
    client.open(timeout_s=0.0)
    return client, host


def test_open_answering_host_gets_ten_times_watchdog_limit() -> None:
    client, host = open_slowly()
    for longest_s in (0.5, 1.9):
        while Ping() not in host.connection.receive():
            client.poll()
        assert client.state is State.OPENING
        host.connection.send(Pong(longest_s))
        client.poll()
        assert client.state is State.OPENING, "its loop is alive"
    host.connection.send(Pong(2.1))
    client.poll()
    assert client.state is not State.OPENING
    host.connection.close()
    client.close()


def block_open_backend(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Prevent stores from opening before the returned event is set."""
    gate = threading.Event()

    def late(url: str) -> Backend:
        assert gate.wait(90)
        return open_backend(url)

    monkeypatch.setattr(event_loop, "open_backend", late)
    return gate


def test_serve_answers_ping_while_store_opens(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = block_open_backend(monkeypatch)
    served = Served(memoryview(hosted.memory))
    hello = msgspec.structs.replace(HELLO, url=f"lmdb://{tmp_path}/store")
    served.connection.send(hello)
    served.connection.send(Ping())
    assert [type(message) for message in served.receive_until(Pong)] == [Pong]
    gate.set()
    discard(served.receive_until(Opened))
    served.close()


def test_serve_closed_during_open_closes_store_cleanly(
    hosted: Hosted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = block_open_backend(monkeypatch)
    served = Served(memoryview(hosted.memory))
    served.connection.send(hosted.connect(f"lmdb://{tmp_path}/store").supervisor.hello)
    threading.Timer(0.05, gate.set).start()
    served.close()
    assert (tmp_path / "store" / "guard").read_text().split()[0] == "clean"


IN_CONTAINER = (
    ENGINE_AS_INIT
    + """
print("open", flush=True)
sys.stdin.read()
client.close()
"""
)


@pytest.mark.skipif(
    subprocess.run(
        ["unshare", "--pid", "--fork", "true"], capture_output=True, check=False
    ).returncode
    != 0,
    reason="PID namespaces need privileges",
)
def test_open_host_with_pid_in_use_gets_other_pid(tmp_path: Path) -> None:
    """Containers share a store, and their host processes start with the same PID."""
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        sys.executable,
        "-c",
        IN_CONTAINER,
    ]
    with ExitStack() as containers:
        for _ in range(3):
            container = containers.enter_context(
                subprocess.Popen(
                    [*command, f"lmdb://{tmp_path}/store"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            containers.callback(container.kill)
            assert container.stdout is not None
            assert container.stdout.readline() == "open\n"


def test_client_ignores_opened_store_of_host_that_it_has_killed() -> None:
    """Both messages arrive at once if the engine polls late."""
    client, host = open_slowly()
    while Ping() not in host.connection.receive():
        client.poll()
    host.connection.send(Pong(2.1))
    host.send_opened()
    client.poll()
    assert client.state in (State.DYING, State.DOWN)
    assert len(client) == 0
    host.connection.close()
    client.close()


@pytest.mark.parametrize("kind", KINDS)
def test_client_open_after_failed_open_or_close_raises_host_error(
    hosted: Hosted,
    tmp_path: Path,
    kind: str,
) -> None:
    (tmp_path / "file").touch()
    client = hosted.connect(f"lmdb://{tmp_path}/file/store", kind)
    with pytest.raises(StoreError):
        client.open()
    for _ in range(2):
        with pytest.raises(HostError, match="closed"):
            client.open()
        assert client.close()
