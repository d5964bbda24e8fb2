"""The program of the store's own process. Never imports torch.

It is given one end of a socket pair and the descriptor of the primary tier's memory, and ends by itself when the other
end closes, after it has committed what it was given.
"""

from __future__ import annotations

import logging
import os
import signal
import socket

from persistkv.storage.host.connection import SocketConnection
from persistkv.storage.host.loop import NoticeHandler, serve
from persistkv.storage.host.mapping import map_rows
from persistkv.storage.host.protocol import ToStore
from persistkv.storage.memory import keep_out_of_collections


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
