"""Program of the host process. Never imports torch.

It inherits descriptors of the engine's pidfd, the socket to the engine, and the memory of the
primary tier. When the engine ends, it releases the memory, commits accepted work and exits. An
alarm of the kernel ends it if that takes too long: an orphan that hangs must keep neither memory
nor the writer lock, for which the next engine waits.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from persistkv.memory import libc
from persistkv.memory.budget import keep_out_of_collections
from persistkv.memory.pages import collapse, map_aligned
from persistkv.storage.host.connection import SocketConnection
from persistkv.storage.host.protocol import PID_BYTES, ToStore
from persistkv.storage.host.server.channel import Channel, NoticeHandler
from persistkv.storage.host.server.event_loop import Lifecycle, serve

# 16 MiB: bytes that are mapped at once, in 2 ms. Meanwhile, no other memory of this process can be
# mapped.
_STEP_BYTES = 16 << 20
_END_S = 20  # maximum seconds in which this process ends if the medium is local
_REMOTE_END_S = 60  # the same if the medium is on another machine
_IGNORED = (
    # these three signals are for the engine: this process commits and exits after the engine
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    # a terminal stops its background processes, such as this one, with these three
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
_RAISED_LIMITS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CPU,
    resource.RLIMIT_DATA,
    resource.RLIMIT_NOFILE,
)


def main(
    region_bytes: int,
    engine_pidfd: int,
    socket_fd: int,
    *region_fds: int,
) -> None:
    """Run the host process: serve the engine until it ends the connection or dies, then close the
    store and return.

    The descriptors are inherited.

    :param region_fds: the primary tier's memory, ``region_bytes`` bytes in all.
    """
    for fd in (engine_pidfd, socket_fd):
        os.set_inheritable(fd, False)
    # reset what this process has inherited from the engine
    _reset_signals()
    _reset_limits()
    _reset_scheduling()
    rows = map_rows(region_fds, region_bytes)
    engine = socket.socket(fileno=socket_fd)
    own_pidfd = os.pidfd_open(os.getpid())
    own_pid = os.getpid().to_bytes(PID_BYTES, "little")
    # The engine sends nothing before it has these descriptors. If it is gone, the event loop finds
    # the end of the connection.
    with suppress(BrokenPipeError):
        socket.send_fds(engine, [own_pid], [own_pidfd])
    os.close(own_pidfd)
    # The spawning program has set an alarm, which ends a process that does not get here. From now
    # on, the engine can kill this process.
    signal.alarm(0)
    connection = SocketConnection(engine, ToStore)
    serve(connection, rows, engine_pidfd, _HostProcess(rows))


class _HostProcess(Lifecycle):
    """Duties of the host process around the server: it prepares and unmaps the rows, forwards log
    records to the engine, and limits the time of its own end."""

    def __init__(self, rows: memoryview) -> None:
        self._address = libc.address_of(rows)
        self._num_bytes = len(rows)
        self._released = threading.Event()
        """Set when the rows are unmapped."""
        # use another thread, because the server must answer the engine meanwhile
        thread = threading.Thread(
            target=self._prepare_rows, name="persistkv-rows", daemon=True
        )
        thread.start()

    def connected(self, channel: Channel) -> None:
        # add the handler to the root logger, because drivers log under their own names
        logging.getLogger().addHandler(NoticeHandler(channel))
        logging.getLogger("persistkv").setLevel(logging.INFO)

    def opened(self) -> None:
        # keep no directory of the engine in use; the driver has resolved a relative path of the
        # store when it opened
        os.chdir("/")
        keep_out_of_collections()

    def ending(self, *, remote: bool) -> None:
        """Have the kernel end this process if the end takes too long: SIGALRM has its default
        action."""
        signal.alarm(_REMOTE_END_S if remote else _END_S)

    def released(self) -> None:
        self._released.set()  # this ends the thread that maps pages
        libc.unmap(self._address, self._num_bytes)

    def _prepare_rows(self) -> None:
        """Move the rows into huge pages if the engine did not, then map all their pages into this
        process's page table.

        Otherwise the first job that uses a row maps them: 32 MiB of rows took 10 ms, and the first
        promotion after a start matters most. Mapping a gigabyte of small pages takes 0.1 s, and 2
        MiB of page table, needed in any case.
        """
        collapse(self._address, self._num_bytes, threads=1)
        for begin in range(0, self._num_bytes, _STEP_BYTES):
            if self._released.is_set():
                return
            address = self._address + begin
            size = min(_STEP_BYTES, self._num_bytes - begin)
            # this call maps the pages, those of /dev/shm for writing
            failed = libc.madvise(address, size, libc.MADV_POPULATE_READ)
            # the kernel is older than 5.14: the first use of each page will map it
            if failed:
                return


def _reset_signals() -> None:
    """Give signals that the engine ignored their default actions again, then ignore those that must
    not end or stop this process."""
    ignored_by_python = {signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - ignored_by_python:
        # the engine ignored this signal, and this process has inherited that
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def _reset_limits() -> None:
    """Raise soft limits to the hard ones, and allow no core dump."""
    # raise soft limits that were set for the engine, such as a limit of its CPU time
    for limit in _RAISED_LIMITS:
        _, hard_limit = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard_limit, hard_limit))
    # write no core dumps, because the rows are large
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard_limit))


def _reset_scheduling() -> None:
    """Use all CPUs that are allowed, with the scheduling class SCHED_BATCH.

    With SCHED_BATCH, a message that wakes this process does not preempt the engine. On two busy
    cores, the engine's scheduler took 6 ms to send a job without it, and 0.2 ms with it (99th
    percentile; benchmarks.busy_scheduler).
    """
    try:
        # name all CPUs; the kernel omits those that are not allowed
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        logging.getLogger(__name__).info(
            "the host process keeps its CPU affinity or scheduling class: %s", error
        )


def map_rows(region_fds: Sequence[int], region_bytes: int) -> memoryview:
    """Map the primary tier's rows; return them as a writable view of bytes.

    :param region_fds: inherited descriptors; closed here, because they share the engine's flock and
        would keep it.
    """
    own = []
    # open the files again, because the engine's flock belongs to the inherited open files, not to
    # new ones
    for fd in region_fds:
        reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        own.append(reopened)
        os.close(fd)
    try:
        address = map_aligned(own, region_bytes)
    finally:
        for fd in own:
            os.close(fd)
    return libc.memory_at(address, region_bytes)
