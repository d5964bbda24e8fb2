"""Reads past the page cache whose pieces are used as they come, while others are on their way.

1. Nothing returns or raises here before the kernel has ended all that was begun: it writes into the caller's buffers.
2. A piece arrives once, as a whole. What does not come so is left to the caller, who reads it as ever, and so learns
   what is wrong.

A disk may tell of nothing before it has done all that it was given (virtio disks do, whose host serves a queue until it
is empty). So it is given a few reads at a time, and the next ones before what came is looked at: it reads while we
verify, and little is left to do behind the last byte.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from persistkv_lmdb.kernel_aio import Ended, Queue, Read

logger = logging.getLogger(__name__)

_IN_FLIGHT = 2
"""Reads that a thread gives the disk to do. Where it was given all but the last of 16 MiB, a virtual disk told of all
of them at once, and most of the verifying had no reading beside it (docs/benchmarks.md)."""
_AGAIN_S = 60.0
"""How long nobody asks a kernel again whose AIO others have taken up (``fs.aio-max-nr``): they may end. Other refusals
do not pass."""


class ArrivingReads:
    """Thread-safe: as many queues as there were ever threads inside."""

    def __init__(self) -> None:
        self._free: list[Queue] = []
        self._refused = False
        self._again_at = 0.0

    def prepare(self) -> None:
        """Have a queue ready, where the kernel gives one. The first takes 0.3 ms; ``close`` takes 30 for each."""
        queue = self._queue()
        if queue is not None:
            self._free.append(queue)

    def read(self, reads: Iterable[Read], arrived: Callable[[int], None]) -> list[Read]:
        """Read pieces, which are numbered; those that did not come, or not whole, in their order.

        :param reads: the first ones are begun before the next one is asked for, and some have come before the last are.
        :param arrived: called with the number of each that came. What it raises is raised here.
        """
        queue = self._queue()
        if queue is None:
            return list(reads)
        try:
            flight = _Flight(queue, arrived)
            flight.run(reads)
        except BaseException:
            queue.close()  # which waits; what is in flight may not even be known
            raise
        self._free.append(queue)
        return sorted(flight.left, key=attrgetter("number"))

    def close(self) -> None:
        """Nobody may be inside."""
        while self._free:
            self._free.pop().close()

    def _queue(self) -> Queue | None:
        if self._refused:
            return None
        try:
            return self._free.pop()
        except IndexError:
            if time.monotonic() < self._again_at:
                return None
        try:
            return Queue()
        except OSError as error:
            self._refused = error.errno not in (errno.EAGAIN, errno.ENOMEM)
            self._again_at = time.monotonic() + _AGAIN_S
            until = "" if self._refused else f" for {_AGAIN_S:g} s"
            logger.info("the kernel's asynchronous I/O is refused (%s); threads wait for the disk%s", error, until)
            return None


class _Flight:
    def __init__(self, queue: Queue, arrived: Callable[[int], None]) -> None:
        self._queue = queue
        self._arrived = arrived
        self._begun: dict[int, Read] = {}
        self._refused: Read | None = None
        """For which there was no room."""
        self.left: list[Read] = []

    def run(self, reads: Iterable[Read]) -> None:
        waiting = iter(reads)
        self._fill(waiting)
        while self._queue.in_flight:
            ended = self._queue.wait()
            self._fill(waiting)
            self._tell(ended)

    def _fill(self, waiting: Iterator[Read]) -> None:
        """Begin as many as the disk is to have; one that cannot be begun is left."""
        while self._queue.in_flight < _IN_FLIGHT:
            read = self._refused or next(waiting, None)
            self._refused = None
            if read is None:
                return
            try:
                self._queue.begin(read)
            except OSError as error:
                if error.errno == errno.EAGAIN and self._queue.in_flight:
                    self._refused = read
                    return
                self.left.append(read)
            else:
                self._begun[read.number] = read

    def _tell(self, ended: Iterable[Ended]) -> None:
        for number, result in ended:
            read = self._begun.pop(number)
            if result == read.length:
                self._arrived(number)
            else:
                self.left.append(read)
