"""The two kinds of host of a store: a process of its own, or a thread of the engine."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from persistkv.errors import HostError
from persistkv.storage.host import protocol
from persistkv.storage.host.connection import (
    Connection,
    SocketConnection,
    ThreadConnection,
)
from persistkv.storage.host.protocol import ToEngine
from persistkv.storage.host.server.event_loop import serve

_PROGRAM = """
import os, signal, sys
if os.fork(): os._exit(0)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
signal.alarm({start_s})
sys.path[:] = {path!r}
from persistkv.storage.host.server.child import main
main{arguments!r}
"""
"""Program of the spawned process. It forks the host process and exits, so that the host is no child
of the engine and is not killed with the engine's process tree.

The host has a process group of its own, but the engine's session, and with it the engine's
autogroup. In a session of its own, next to two busy workers on two cores, Linux 6.18 let no process
run for up to two minutes."""
# seconds until an orphan that does not reach its main loop is ended by the kernel
_START_S = 60
KILL_S = 5.0  # seconds to wait for the exit of a killed host
# 4 MiB: space for hundreds of jobs while the host is in a commit
_SOCKET_BYTES = 4 << 20


class Host(ABC):
    """Execution environment of a store, seen from the engine."""

    name: ClassVar[str]
    restartable: ClassVar[bool]
    """Whether ``start`` may be called again after the host is dead."""
    idle_look_s: ClassVar[float]
    """Seconds between two polls while no answer is due. These polls find keys that other processes
    stored."""

    @abstractmethod
    def start(self) -> Connection:
        """Start the host and return the engine's end of the connection to it.

        :raises OSError, HostError: the host cannot be started; nothing is left running.
        """

    def ready(self) -> bool:
        """Return whether messages may be sent to the host. Never waits."""
        return True

    def kill(self) -> None:  # noqa: B027
        """Kill the host if possible, without waiting for its exit."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds until the host has ended and accesses no row; return
        whether it has."""

    def cpu_wait_s(self) -> float:
        """Return how long the host has waited for a CPU since its start, in seconds; 0 if
        unknown."""
        return 0.0

    @abstractmethod
    def release(self) -> None:
        """Release the primary tier's rows, so that they can be unmapped. Called once, at the
        end."""


class ProcessHost(Host):
    """Runs the store in a separate process: its I/O never holds the engine's GIL, and each survives
    the other.

    The host inherits the engine's pidfd, and sends its own with its PID.

    :raises OSError: the kernel has no pidfds (Linux before 5.3).
    """

    name = "process"
    restartable = True
    # a look is a system call, which takes about 25 us of an engine's step with cold caches
    idle_look_s = 0.05

    def __init__(self, region_fds: Sequence[int], region_bytes: int) -> None:
        """:param region_fds: descriptors of the primary tier's memory, ``region_bytes`` bytes in
        all, see ``map_aligned``; the caller closes them after the last start.
        """
        self.pid: int | None = None
        """Process id of the last host process that became ready."""
        self._region_fds = tuple(region_fds)
        self._region_bytes = region_bytes
        self._engine_pidfd = os.pidfd_open(os.getpid())
        self._pidfd: int | None = None
        """Pidfd of the host process, received from it; None: none was received, so the process was
        sent no message and uses no rows."""
        self._socket: socket.socket | None = None
        """The engine's end of the connection, as long as the pidfd may still arrive on it; None:
        the pidfd has arrived, the host has closed its end, or there is no host."""
        self._spawner: subprocess.Popen[bytes] | None = None
        """The started interpreter, whose child is the host."""

    def start(self) -> Connection:
        """Spawn an interpreter that forks the host (``_PROGRAM``). The host is ready when its pidfd
        has arrived on the connection (``ready``)."""
        self._forget_process()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            # with a small buffer, a sender would soon have to queue messages in its own memory
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        # the host computes nothing with these libraries, whose threads would only take memory
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # close the engine's copy of the host's end, so that the exit of the host ends the
        # connection
        with theirs:
            inherited = (self._engine_pidfd, theirs.fileno(), *self._region_fds)
            arguments = (self._region_bytes, *inherited)
            # make the paths absolute, because the host changes its directory, and imports modules
            # later
            path = [os.path.abspath(entry) for entry in sys.path]
            program = _PROGRAM.format(start_s=_START_S, path=path, arguments=arguments)
            try:
                self._spawner = subprocess.Popen(
                    [sys.executable, "-I", "-c", program, "persistkv-host"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=inherited,
                    # use a group of its own, so that ``killpg`` of the engine's group does not
                    # reach the host
                    process_group=0,
                    env=environment,
                )
            except OSError:
                ours.close()
                raise
        self._socket = ours
        return SocketConnection(ours, ToEngine)

    def ready(self) -> bool:
        """Return whether the host's pidfd has arrived. If the host has closed its socket, return
        True, too: then the connection reports the end.
        """
        self._receive_pidfd()
        return self._socket is None

    def _receive_pidfd(self) -> None:
        """Receive the host's pidfd and PID if they have just arrived."""
        if self._socket is None:
            return
        max_fds = 1
        try:
            pid, pidfds, _, _ = socket.recv_fds(
                self._socket, protocol.PID_BYTES, max_fds, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            # treat a broken connection like an end: no bytes have arrived
            pid, pidfds = b"", []
        # from now on, only messages arrive, which the connection receives
        self._socket = None
        if pidfds:
            self.pid = int.from_bytes(pid, "little")
            self._pidfd = pidfds[0]
            self._reap_spawner()

    def kill(self) -> None:
        """Kill the host process, if its pidfd has arrived, and its spawner."""
        # the pidfd, without which the host cannot be killed, may have arrived since the last look
        self._receive_pidfd()
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._reap_spawner()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the host has ended, or accesses no row; return whether that is so
        (``Host.wait``)."""
        # The host is started by a spawner, and its pidfd arrives later. Before that, it has read no
        # message, so it accesses no row.
        if self._pidfd is None:
            self._reap_spawner()
            return True
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            return False
        # The host is an orphan, which the init process reaps. An engine that is PID 1 itself, or a
        # subreaper, has to reap it here.
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        return True

    def cpu_wait_s(self) -> float:
        """Return how long the host has waited for a CPU since its start, in seconds; 0 if
        unknown."""
        try:
            statistics = Path(f"/proc/{self.pid}/schedstat").read_text()
            # nanoseconds on a CPU, nanoseconds of waiting for one, number of time slices
            waited_ns = statistics.split()[1]
        except (OSError, IndexError):
            # the process has ended, or the kernel does not count CPU time
            return 0.0
        return int(waited_ns) / 1e9

    def release(self) -> None:
        self._forget_process()
        os.close(self._engine_pidfd)
        self._engine_pidfd = -1

    def _forget_process(self) -> None:
        """Release what belongs to the last host process: its spawner and its pidfd."""
        self._reap_spawner()
        # do not close the socket, because the connection owns and closes it
        self._socket = None
        pidfd = self._pidfd
        self._pidfd = None
        if pidfd is not None:
            os.close(pidfd)

    def _reap_spawner(self) -> None:
        """End the helper process that forks the host if it has not exited."""
        spawner = self._spawner
        self._spawner = None
        if spawner is not None:
            # this ends a spawner that hangs; the host process that it has forked continues to run
            spawner.kill()
            spawner.wait()


class ThreadHost(Host):
    """Runs the store in a thread of the engine, which shares its GIL and cannot be killed. Used if
    a host process is not possible, and by tools and tests."""

    name = "thread"
    restartable = False
    idle_look_s = 0.0

    def __init__(self, rows_buffer: memoryview) -> None:
        self._buffer: memoryview | None = rows_buffer
        """The rows; None: ``release`` was called."""
        self._thread: threading.Thread | None = None

    def start(self) -> Connection:
        """Start the thread, a daemon: it does not keep the interpreter from exiting."""
        if self._buffer is None:
            raise HostError("the host has released its rows")
        ours, theirs = ThreadConnection.pair()
        thread = threading.Thread(
            target=serve,
            args=(theirs, self._buffer),
            name="persistkv-store",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:  # the system can start no further thread
            ours.close()
            theirs.close()
            raise
        self._thread = thread
        return ours

    def wait(self, timeout_s: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def release(self) -> None:
        self._buffer = None
        self._thread = None  # drop the thread, which references the rows
