"""The three ways to run the store's side."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from persistkv.errors import HostError
from persistkv.storage.executor import InPlaceExecutor
from persistkv.storage.host.connection import Connection, QueueConnection, SocketConnection
from persistkv.storage.host.loop import serve
from persistkv.storage.host.protocol import ToEngine, ToStore
from persistkv.storage.host.server import StoreServer

_PROGRAM = "import sys; sys.path[:] = {path!r}; from persistkv.storage.host.child import main; main{arguments!r}"
_SOCKET_BYTES = 4 << 20  # 4 MiB: room for hundreds of jobs while the store's side is inside a commit


class Host(ABC):
    """Starts the store's side, and knows whether it is dead."""

    name: ClassVar[str]
    restartable: ClassVar[bool]
    """Whether ``start`` may be called again once it is dead."""
    idle_look_s: ClassVar[float]
    """While it owes nothing: seconds between two looks for news of it, such as what others stored or removed."""

    @abstractmethod
    def start(self) -> Connection:
        """Start it.

        :raises HostError: it cannot be started; nothing is left running.
        """

    @abstractmethod
    def dead(self) -> bool:
        """Whether it certainly runs no more and touches no row. Never waits."""

    @abstractmethod
    def kill(self) -> None:
        """End it without its consent, where that is possible. ``dead`` tells when it is done."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, for which the connection must be closed; tells whether it came."""

    def release(self) -> None:  # noqa: B027
        """Let go of the rows; called once, after the end. They can then be unmapped."""


class ProcessHost(Host):
    """A process of its own: its I/O never holds the engine's GIL, its death is not the engine's.

    It is started with ``subprocess``, not ``multiprocessing``: an engine may itself be a daemonic process.
    """

    name = "process"
    restartable = True
    idle_look_s = 0.05  # a look is a system call, with cold caches some 25 us of an engine's step

    def __init__(self, region_fd: int, region_bytes: int) -> None:
        """:param region_fd: descriptor of the primary tier's memory; stays the caller's."""
        self._region_fd = region_fd
        self._region_bytes = region_bytes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process, once it was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> Connection:
        ours, theirs = _socket_pair()
        with theirs:
            arguments = (os.getpid(), theirs.fileno(), self._region_fd, self._region_bytes)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM.format(path=sys.path, arguments=arguments), "persistkv-host"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self._region_fd),
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                )
            except OSError as error:
                ours.close()
                raise HostError(f"the store's process does not start: {error}") from error
        return SocketConnection(ours, ToEngine)

    def dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class ThreadHost(Host):
    """A thread of the engine's process, for when the region's descriptor cannot be had. It shares the engine's GIL."""

    name = "thread"
    restartable = False
    idle_look_s = 0.0

    def __init__(self, rows_buffer: memoryview) -> None:
        self._buffer: memoryview | None = rows_buffer
        self._thread: threading.Thread | None = None

    def start(self) -> Connection:
        if self._buffer is None:
            raise HostError("the rows were let go of")
        ours, theirs = QueueConnection.pair()
        self._thread = threading.Thread(target=serve, args=(theirs, self._buffer), name="persistkv-store", daemon=True)
        self._thread.start()
        return ours

    def dead(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def kill(self) -> None:
        """A thread cannot be killed: it ends when the connection is closed and its work is done."""

    def wait(self, timeout_s: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def release(self) -> None:
        self._buffer = self._thread = None


class InlineHost(Host):
    """The caller's own stack: each look for answers first does the work. For tools and tests.

    Waits check their limit between two pieces of work; one piece can be a whole commit.
    """

    name = "inline"
    restartable = False
    idle_look_s = 0.0

    def __init__(self, rows_buffer: memoryview) -> None:
        self._buffer: memoryview | None = rows_buffer

    def start(self) -> Connection:
        if self._buffer is None:
            raise HostError("the rows were let go of")
        return _InlineConnection(self._buffer)

    def dead(self) -> bool:
        return True

    def kill(self) -> None:
        """Nothing runs between calls."""

    def wait(self, timeout_s: float) -> bool:
        return True

    def release(self) -> None:
        self._buffer = None


class _InlineConnection(Connection):
    def __init__(self, rows_buffer: memoryview) -> None:
        self._answers: deque[Any] = deque()
        send: Callable[[ToEngine], None] = self._answers.append
        self._server = StoreServer(rows_buffer, send, lambda threads: InPlaceExecutor())
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def congested(self) -> bool:
        return False

    def send(self, message: ToStore | ToEngine) -> None:
        if not self._ended:
            self._run(lambda: self._server.handle(message))

    def receive(self) -> list[Any]:
        if not self._ended:
            self._run(self._server.step)
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._server.close()

    def _run(self, call: Callable[[], None]) -> None:
        """Let the server work. If an interrupt or an error ends the call, the connection has ended too: the server's
        state is undefined, and the job that it was working on would never end.
        """
        try:
            call()
        except BaseException:
            self._ended = True
            self._server.close(finish=False)
            raise


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    try:
        pair = socket.socketpair()
    except OSError as error:
        raise HostError(f"no socket for the store's side: {error}") from error
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return pair
