"""Engine that tests kill: it stores jobs, forks a child, and waits after all jobs have been
accepted.

``python -m tests.storage.host.engine_program URL FIRST_KEY SIZES``: one job for each number of
blocks in SIZES, such as ``100,3``. It writes the PID of its host process to standard output.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from persistkv.config import GroupLayout, RowLayout
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.hosts import ProcessHost
from persistkv.storage.host.protocol import Hello
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from tests.storage.host.jobs import BLOCK, make_keys


def main(url: str, first: str, sizes: str) -> None:
    """Run until killed."""
    # the host process must not inherit any of these four settings
    for signum in (signal.SIGCHLD, signal.SIGALRM):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    counts = list(map(int, sizes.split(",")))
    fd = os.memfd_create("rows")
    for number in range(int(first), int(first) + sum(counts)):
        os.write(fd, content(number))
    host = ProcessHost((fd,), sum(counts) * BLOCK)
    layout = RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),))
    hello = Hello(
        url, Identity.of({"weights": "w"}).encode(), layout, StoreOptions(max_age_s=1e6)
    )
    client = StoreClient(host, hello, max_queue_bytes=1 << 30)
    client.open()
    if os.fork() == 0:  # the child keeps the engine's end of the socket open
        time.sleep(600)
        os._exit(0)
    row = 0
    for job, count in enumerate(counts):
        keys = make_keys(count, int(first) + row)
        client.submit_store(
            job, "a", keys, range(row, row + count), None, count * BLOCK
        )
        row += count
    answered = 0
    while answered < len(counts):
        for outcome in client.poll():
            assert not outcome.failed
            answered += 1
    os.write(1, f"{host.pid}\n".encode())
    time.sleep(600)


def content(number: int) -> bytes:
    """Return the content of the block whose key has this number."""
    return number.to_bytes(8, "little") * (BLOCK // 8)


if __name__ == "__main__":
    main(*sys.argv[1:])
