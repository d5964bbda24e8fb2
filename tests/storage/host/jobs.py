"""Keys, messages and waiting functions for the tests of clients."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence

from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.connection import (
    Connection,
    SocketConnection,
    ThreadConnection,
    discard,
)
from persistkv.storage.host.hosts import ProcessHost, ThreadHost
from persistkv.storage.host.protocol import End, Opened, Table, ToEngine, ToStore
from persistkv.storage.host.server.event_loop import Lifecycle, serve
from persistkv.storage.host.supervisor import State
from persistkv.storage.records import RequestEnd
from persistkv.storage.store.index import Index
from tests.storage.host.hosted import Hosted

KINDS = ["process", "thread"]
BLOCK = 64 << 10


def make_keys(count: int, start: int = 0) -> list[bytes]:
    return [
        number.to_bytes(32, "little") + bytes(4)
        for number in range(start, start + count)
    ]


def end(request: str, keys: list[bytes]) -> RequestEnd:
    return RequestEnd(request, f"m-{request}", (keys,), 16 * len(keys), 16)


def pid_of(hosted: Hosted) -> int:
    host = hosted.hosts[-1]
    assert isinstance(host, ProcessHost)
    assert host.pid is not None
    return host.pid


class SignalledHost(ProcessHost):
    """Host whose first processes receive a signal as soon as they are ready."""

    started = 0

    def __init__(
        self,
        region_fds: Sequence[int],
        region_bytes: int,
        number: signal.Signals,
        processes: int,
    ) -> None:
        super().__init__(region_fds, region_bytes)
        self._number = number
        self._processes = processes

    def start(self) -> Connection:
        connection = super().start()
        self.started += 1
        if self.started <= self._processes:
            deadline = time.monotonic() + 60
            while not self.ready():
                assert time.monotonic() < deadline, "the host process does not start"
                time.sleep(0.001)
            assert self.pid is not None
            os.kill(self.pid, self._number)
        return connection


def wait_for(client: StoreClient, state: State, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while client.state is not state:
        assert time.monotonic() < deadline, f"still {client.state}"
        client.poll()
        time.sleep(0.001)


class ScriptedHost(ThreadHost):
    """Host that answers nothing itself: a test receives and sends its messages."""

    restartable = True

    def __init__(self) -> None:
        super().__init__(memoryview(b""))
        ours, theirs = socket.socketpair()
        self._engine = SocketConnection(ours, ToEngine)
        self.connection = SocketConnection(theirs, ToStore)
        """The host's end."""

    def start(self) -> Connection:
        return self._engine

    def send_opened(self) -> None:
        """Tell the engine that a store without content is open."""
        fd, slots = Index().share()
        self.connection.send(Opened(Table(slots, fd), ""))


class Served:
    """The engine's end of a server in a thread."""

    def __init__(
        self,
        rows: memoryview,
        engine_pidfd: int | None = None,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        self.connection, theirs = ThreadConnection.pair()
        self._thread = threading.Thread(
            target=serve, args=(theirs, rows, engine_pidfd, lifecycle)
        )
        self._thread.start()

    def receive_until(self, kind: type, timeout_s: float = 90.0) -> list[ToEngine]:
        """Return the messages that arrive up to one of this kind."""
        received: list[ToEngine] = []
        deadline = time.monotonic() + timeout_s
        while not any(isinstance(message, kind) for message in received):
            assert time.monotonic() < deadline, f"got only {received}"
            received += self.connection.receive()
            time.sleep(0.001)
        return received

    def close(self) -> None:
        """End the server."""
        self.connection.send(End())
        self.wait()

    def wait(self) -> None:
        """Wait for the end of the server."""
        self._thread.join(90)
        assert not self._thread.is_alive()
        discard(self.connection.receive_rest())
        self.connection.close()


ENGINE_AS_INIT = """
import os, sys
from persistkv.config import GroupLayout, RowLayout
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.protocol import Hello
from persistkv.storage.host.hosts import ProcessHost
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
assert os.getpid() == 1
fd = os.memfd_create("rows")
os.ftruncate(fd, 1 << 20)
layout = RowLayout(1 << 16, (GroupLayout(((0, 1 << 16),)),))
hello = Hello(sys.argv[1], Identity.of({"weights": "w"}).encode(), layout, StoreOptions())
client = StoreClient(ProcessHost((fd,), 1 << 20), hello, max_queue_bytes=1 << 30)
client.open()
"""
"""Beginning of a program that is PID 1 of its namespace and opens the store of its first
argument."""
