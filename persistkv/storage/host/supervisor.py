"""Supervision of the host by the engine (start, watchdog, kill, restart), and the three hosts that run a store.

1. A host that owes an answer or is opening, and sends nothing, is killed, unless its loop answers that it waits for its
   medium.
2. From the end of its connection until it is certainly dead, the host's state is ``DYING``: it may still use rows.
"""

from __future__ import annotations

import enum
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from persistkv.errors import HostError
from persistkv.storage.executor import InPlaceExecutor
from persistkv.storage.host import protocol
from persistkv.storage.host.connection import Connection, QueueConnection, SocketConnection, discard
from persistkv.storage.host.protocol import ToEngine, ToStore
from persistkv.storage.host.server import StoreServer, serve

logger = logging.getLogger(__name__)

_PROGRAM = "import sys; sys.path[:] = {path!r}; from persistkv.storage.host.child import main; main{arguments!r}"
KILL_S = 5.0  # seconds to wait for the exit of a killed host
_CALL_PATIENCE = 10  # longest time of one call of the medium, as a multiple of the watchdog's limit
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 30.0
_SOCKET_BYTES = 4 << 20  # 4 MiB: space for hundreds of jobs while the host is in a commit


class Host(ABC):
    """Runs a store for an engine: start, kill, and detection of its exit."""

    name: ClassVar[str]
    restartable: ClassVar[bool]
    """Whether ``start`` may be called again after the host is dead."""
    idle_look_s: ClassVar[float]
    """Seconds between two polls while no answer is due, for changes such as keys that other processes stored."""

    @abstractmethod
    def start(self) -> Connection:
        """Start the host.

        :raises HostError: it cannot be started; nothing is left running.
        """

    @abstractmethod
    def dead(self) -> bool:
        """Whether the host has certainly ended and accesses no row. Never waits."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the host if possible. It has ended once ``dead`` returns True."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for the host's end; return whether it ended. The connection must be closed before."""

    def release(self) -> None:  # noqa: B027
        """Release the rows, so that they can be unmapped. Called once, after the host's end."""


class ProcessHost(Host):
    """A separate process: its I/O never holds the engine's GIL, and its death does not end the engine.

    It is started with ``subprocess``, not ``multiprocessing``, because an engine may itself be a daemonic process.
    """

    name = "process"
    restartable = True
    idle_look_s = 0.05  # a poll is a system call: with cold caches about 25 us of an engine's step

    def __init__(self, region_fd: int, region_bytes: int) -> None:
        """:param region_fd: descriptor of the primary tier's memory; the caller closes it."""
        self._region_fd = region_fd
        self._region_bytes = region_bytes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the last host that was started; None before the first start."""
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
    """A thread of the engine, used if the region's descriptor is unavailable. It shares the engine's GIL."""

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
        """Do nothing: a thread cannot be killed. It ends when the connection is closed and its work is done."""

    def wait(self, timeout_s: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def release(self) -> None:
        self._buffer = self._thread = None


class InlineHost(Host):
    """Runs on the caller's thread: each poll for answers first does the work. For tools and tests.

    Calls with a timeout check it between two units of work; one unit can be a whole commit.
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
        """Do nothing: nothing runs between calls."""

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
            with self._ends_on_error():
                self._server.handle(message)

    def receive(self) -> list[Any]:
        if not self._ended:
            with self._ends_on_error():
                self._server.step()
        answers = list(self._answers)
        self._answers.clear()
        return answers

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._server.close()
            discard(self._answers)

    @contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        """End the connection if an interrupt or an error leaves the block: the server's state is undefined then, and
        its current job would never end.
        """
        try:
            yield
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


class Look(enum.Enum):
    """Verdict of the watchdog on a host that owes an answer."""

    FINE = "fine"
    ASK = "ask"
    """Silent for half of the limit: send a ``Ping``."""
    SILENT = "silent"
    """Silent for the other half too."""


class Watchdog:
    """Watchdog of a host that owes an answer.

    :param patience_s: longest time that the host may be silent, in seconds.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._heard = 0.0
        self._asked: float | None = None

    def hear(self) -> None:
        """Restart the clock: the host sent a message, or no answer was due until now."""
        self._heard = time.monotonic()
        self._asked = None

    def look(self) -> Look:
        """Return the verdict on the host's silence so far. ``ASK`` is returned once per silence."""
        now = time.monotonic()
        if self._asked is None:
            if now - self._heard <= self._patience_s / 2:
                return Look.FINE
            self._asked = now
            return Look.ASK
        if now - self._asked <= self._patience_s / 2:
            return Look.FINE
        logger.error("the store's side has not answered for %.1f s; killing it", self._patience_s)
        return Look.SILENT

    def call_hangs(self, longest_s: float) -> bool:
        """Whether a call of the medium takes too long. The limit is longer, because the host's loop is alive."""
        hangs = longest_s > _CALL_PATIENCE * self._patience_s
        if hangs:
            logger.error("a call of the store's medium has not ended for %.0f s; killing its side", longest_s)
        return hangs


class Backoff:
    """Delay before the next start. It doubles with each failure, up to a limit, until ``reset``."""

    def __init__(self) -> None:
        self._start_at = 0.0
        self._seconds = _FIRST_BACKOFF_S

    def reset(self) -> None:
        """Return to the shortest delay after a success."""
        self._seconds = _FIRST_BACKOFF_S

    def fail(self) -> float:
        """Record a death or a failed start; return the delay before the next start, in seconds."""
        seconds = self._seconds
        self._start_at = time.monotonic() + seconds
        self._seconds = min(_LONGEST_BACKOFF_S, 2 * seconds)
        return seconds

    @property
    def over(self) -> bool:
        """Whether the delay has passed, so that the host may be started."""
        return time.monotonic() >= self._start_at


class State(enum.Enum):
    """State of the host."""

    OPENING = "opening"
    """Started and reading its catalogue: lookups miss, jobs are refused."""
    OPEN = "open"
    DYING = "dying"
    """The connection has ended, the process may still run: jobs in flight are not answered yet."""
    DOWN = "down"
    """Dead; restarted when its backoff is over."""
    CLOSED = "closed"


class Supervisor:
    """See the top of this file."""

    def __init__(self, host: Host, hello: protocol.Hello, *, watchdog_s: float, least_start_s: float) -> None:
        """:param watchdog_s: as in ``StoreClient``, as is ``least_start_s``."""
        self.host = host
        self.hello = hello
        """First message after each start."""
        self.connection: Connection | None = None
        self.state = State.DOWN
        self._watchdog = Watchdog(watchdog_s)
        self._opening_watchdog = Watchdog(max(watchdog_s, least_start_s))
        self.backoff = Backoff()
        """Reset whenever a job is answered."""

    # Life

    def start(self) -> None:
        """Start the host and send the message that opens the store.

        :raises HostError: the host cannot be started.
        """
        self.connection = self.host.start()
        self.connection.send(self.hello)
        self.state = State.OPENING
        self._opening_watchdog.hear()

    def mark_lost(self) -> None:
        """Close the connection and kill the host, which may still use rows until ``has_exited``."""
        if self.connection is not None:
            self.connection.close()
        self.host.kill()
        self.state = State.DYING

    def has_exited(self) -> bool:
        """Return True the first time a lost host is seen dead."""
        if self.state is not State.DYING or not self.host.dead():
            return False
        self.state = State.DOWN
        seconds = self.backoff.fail()
        if self.host.restartable:
            logger.warning("the store's side died; lookups miss until it is back, in %.1f s", seconds)
        return True

    def maybe_restart(self) -> bool:
        """Start a dead host again once its backoff is over; return whether that was tried."""
        if self.state is not State.DOWN or not self.host.restartable or not self.backoff.over:
            return False
        try:
            self.start()
        except HostError as error:
            logger.error("%s", error)
            self.backoff.fail()
        return True

    def abandon(self) -> None:
        """Kill the host without finishing its work, wait for its exit, and release the rows."""
        if self.connection is not None:
            self.connection.close()
        self.host.kill()
        self.host.wait(KILL_S)
        self._release()

    def close(self, timeout_s: float) -> bool:
        """Have the host finish its work and exit; kill it after the timeout. Return whether it exited by itself."""
        if self.connection is not None:
            self.connection.close()
        self.state = State.CLOSED
        ended = self.host.wait(timeout_s)
        if not ended:
            self.host.kill()
            self.host.wait(KILL_S)
        self._release()
        return ended

    def _release(self) -> None:
        self.connection = None
        self.host.release()
        self.state = State.CLOSED

    # Messages

    def send(self, message: protocol.ToStore) -> None:
        """Send a message if there is a connection. Never waits."""
        if self.connection is not None:
            self.connection.send(message)

    def receive(self) -> list[Any]:
        """Return messages that have arrived, not always all of them."""
        messages: list[Any] = []
        if self.connection is not None:
            try:
                messages = self.connection.receive()
            except HostError as error:
                logger.error("the store's side sent garbage: %s", error)
        if messages:
            self._watchdog.hear()
            self._opening_watchdog.hear()
        return messages

    @property
    def congested(self) -> bool:
        """Whether there is no connection, or its outbox is congested."""
        return self.connection is None or self.connection.congested

    def expect_reply(self) -> None:
        """Start the watchdog: the host owes an answer from now on, and did not before."""
        self._watchdog.hear()

    def is_lost(self, *, owes: bool) -> bool:
        """Check the host; return whether it is lost. The caller must then call ``mark_lost``.

        :param owes: whether the host owes an answer.
        """
        if self.connection is None or self.state not in (State.OPENING, State.OPEN):
            return False
        if self.connection.ended:
            return True
        if not (owes or self.state is State.OPENING) or not self.host.restartable:
            return False
        look = self._watching.look()
        if look is Look.ASK:
            self.send(protocol.Ping())
        return look is Look.SILENT

    def hangs(self, longest_s: float) -> bool:
        """Whether the oldest call of the host's medium has been running for too long.

        :param longest_s: duration of this call so far, as reported by the host.
        """
        return self._watching.call_hangs(longest_s)

    @property
    def _watching(self) -> Watchdog:
        return self._opening_watchdog if self.state is State.OPENING else self._watchdog
