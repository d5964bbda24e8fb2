"""The program of the store's own process. Never imports torch.

It is given one end of a socket pair and the descriptor of the primary tier's memory, and ends by itself when the other
end closes, after it has committed what it was given.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading

from persistkv.huge_pages import collapse, map_aligned
from persistkv.libc import MADV_POPULATE_READ, madvise, memory_at
from persistkv.storage.host.connection import SocketConnection
from persistkv.storage.host.protocol import ToStore
from persistkv.storage.host.server import NoticeHandler, serve
from persistkv.storage.memory import keep_out_of_collections

_STEP_BYTES = 16 << 20  # 16 MiB: 2 ms, in which nothing else of this process's memory can be mapped


def main(engine_pid: int, socket_fd: int, region_fd: int, region_bytes: int) -> None:
    """Serve until the engine is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are the engine's; we end, with all committed, when it does
    _yield_to_the_engine()
    rows = map_rows(region_fd, region_bytes)
    connection = SocketConnection(socket.socket(fileno=socket_fd), ToStore)
    logging.getLogger().addHandler(NoticeHandler(connection))  # drivers log under names of their own
    logging.getLogger("persistkv").setLevel(logging.INFO)
    serve(connection, rows, _watch(engine_pid), keep_out_of_collections)


def _yield_to_the_engine() -> None:
    """Not to take the engine's processor when a message of its wakes us.

    Without this, the kernel often ran this process in the sender's place: on two busy cores, sending a job took the
    scheduler 6 ms at the 99th percentile, and 0.2 ms with it, jobs taking as long (benchmarks.busy_scheduler).
    """
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        logging.getLogger(__name__).info("the store's process keeps its scheduling class: %s", error)


def _watch(engine_pid: int) -> int | None:
    """A descriptor that becomes readable when the engine dies; None where the kernel has no pidfd, or it died already.

    The socket tells of an ordinary death too; this one is for engines that forked.
    """
    try:
        watched = os.pidfd_open(engine_pid)
    except OSError:
        return None
    return watched if os.getppid() == engine_pid else None


def map_rows(region_fd: int, region_bytes: int) -> memoryview:
    """Map the rows as long as this process lives, and ready them in a thread of its own.

    :param region_fd: inherited, and closed here: it shares the engine's flock, and would keep it.
    :raises OSError: they cannot be mapped.
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
    """Huge pages where the engine did not see to them, and then all that there is entered into our page table.

    Else the first job that uses a row does it: 32 MiB of rows took 10 ms, and the first promotion after a start is the
    one that counts. A gigabyte of small pages takes 0.1 s, and 2 MiB of page table that it takes anyhow.
    """
    collapse(address, num_bytes, threads=1)
    for begin in range(0, num_bytes, _STEP_BYTES):
        # pages of /dev/shm become writable by it, too
        if madvise(address + begin, min(_STEP_BYTES, num_bytes - begin), MADV_POPULATE_READ):
            return  # an older kernel: the first use of each row does it
