"""Program of the host process. Never imports torch.

It receives one end of a socket pair and the descriptor of the primary tier's memory. When the other end closes, it
commits all accepted work and exits.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading

from persistkv.memory.budget import keep_out_of_collections
from persistkv.memory.libc import MADV_POPULATE_READ, madvise, memory_at
from persistkv.memory.pages import collapse, map_aligned
from persistkv.storage.host.connection import SocketConnection
from persistkv.storage.host.protocol import ToStore
from persistkv.storage.host.server import NoticeHandler, serve

_STEP_BYTES = 16 << 20  # 16 MiB: takes 2 ms, during which no other memory of this process can be mapped


def main(engine_pid: int, socket_fd: int, region_fd: int, region_bytes: int) -> None:
    """Serve until the engine closes the connection or dies."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the engine only: this process commits and exits after it
    _yield_to_the_engine()
    rows = map_rows(region_fd, region_bytes)
    connection = SocketConnection(socket.socket(fileno=socket_fd), ToStore)
    logging.getLogger().addHandler(NoticeHandler(connection))  # the root logger: drivers log under their own names
    logging.getLogger("persistkv").setLevel(logging.INFO)
    serve(connection, rows, _watch(engine_pid), keep_out_of_collections)


def _yield_to_the_engine() -> None:
    """Set a scheduling class that does not preempt the engine when one of its messages wakes this process.

    Without it, the kernel often ran this process instead of the sender. On two busy cores, sending a job then took the
    scheduler 6 ms at the 99th percentile, with it 0.2 ms; jobs took the same time (benchmarks.busy_scheduler).
    """
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        logging.getLogger(__name__).info("the store's process keeps its scheduling class: %s", error)


def _watch(engine_pid: int) -> int | None:
    """Return a descriptor that becomes readable when the engine dies; None if the kernel has no pidfd, or if the engine
    is dead already.

    The end of the socket usually reports the death too. If the engine forked, its child keeps the socket open.
    """
    try:
        watched = os.pidfd_open(engine_pid)
    except OSError:
        return None
    return watched if os.getppid() == engine_pid else None


def map_rows(region_fd: int, region_bytes: int) -> memoryview:
    """Map the rows for the lifetime of this process, and start a thread that populates the page table.

    :param region_fd: inherited descriptor, closed here: it shares the engine's flock and would keep it locked.
    :raises OSError: the rows cannot be mapped.
    """
    own = os.open(f"/proc/self/fd/{region_fd}", os.O_RDWR | os.O_CLOEXEC)
    os.close(region_fd)
    try:
        address = map_aligned(own, region_bytes)
    finally:
        os.close(own)
    threading.Thread(target=_ready, args=(address, region_bytes), name="persistkv-rows", daemon=True).start()
    return memory_at(address, region_bytes)


def _ready(address: int, num_bytes: int) -> None:
    """Collapse the region to huge pages if the engine did not, then enter all its pages into the page table.

    Otherwise the first job that uses a row does this: 32 MiB of rows took 10 ms, and the first promotion after a start
    matters most. A gigabyte of small pages takes 0.1 s, and 2 MiB of page table, which it needs in any case.
    """
    collapse(address, num_bytes, threads=1)
    for begin in range(0, num_bytes, _STEP_BYTES):
        # this also makes pages of /dev/shm writable
        if madvise(address + begin, min(_STEP_BYTES, num_bytes - begin), MADV_POPULATE_READ):
            return  # an older kernel: pages are entered at the first use of each row
