"""Engines of a shared store in simulated time, on a bucket in memory that counts requests.

1. Each engine has a thread. One thread runs at a time: until its next request or pause, which take
   simulated time. The thread with the earliest time runs next, so the same seed gives the same
   result.
2. A request takes effect half of its latency after it was sent.
3. An engine makes one request after the other. Where a real one makes several at once, to read the
   inbox, each of them except the first takes an equal part of the time.
"""

from __future__ import annotations

import heapq
import random
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count

from persistkv.storage.blobs import BlobInfo, BlobMissingError, Blobs, RefusedError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.shared import Clock

START = 1_800_000_000.0
"""Time on the medium's clock at the beginning, in seconds since the epoch."""
PRICE_OF = {"PUT": 0.005, "LIST": 0.005, "GET": 0.0004, "DELETE": 0.0}
"""US dollars per 1,000 requests: S3 Standard in us-east-1, https://aws.amazon.com/s3/pricing/, as
of 2026."""
CONNECTIONS = 16
_PAGE = 1000  # names in one answer to LIST
_STACK_BYTES = 1 << 20  # 1 MiB: of a thread

Latency = Callable[[random.Random], float]
"""Returns the time of one request, in seconds."""


def usual_latency(draw: random.Random) -> float:
    """Return the time of a request: 30 ms in the median."""
    return draw.lognormvariate(-3.5, 0.4)


def dollars(requests: Mapping[str, float]) -> float:
    """Return the price of requests in US dollars."""
    return sum(PRICE_OF[kind] * number / 1000 for kind, number in requests.items())


class KilledError(BaseException):
    """The engine was killed."""


class World:
    """Simulated time, and the bucket.

    :param latency: of all requests.
    """

    def __init__(self, seed: int = 0, latency: Latency = usual_latency) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self.seed = seed
        self.latency = latency
        self.blobs: dict[str, tuple[bytes, float]] = {}
        """Content and time of writing of each blob. Packs are empty here: nobody reads them."""
        self.merger: Process | None = None
        """Who has written ``latest`` last."""
        self.sorted_names: list[str] = []
        self._events: list[tuple[float, int, Process]] = []
        self._numbers = count()
        self._until = 0.0
        self._processes: list[Process] = []
        self._idle = threading.Semaphore(0)
        self._failure: BaseException | None = None

    def run(self, until: float) -> None:
        """Let time pass.

        :raises BaseException: the error that has ended an engine.
        """
        self._until = until
        following = self._next()
        if following is not None:
            following.resume()
            self._idle.acquire()
        if self._failure is not None:
            raise self._failure
        self.now = max(self.now, until)

    def end(self) -> None:
        """Kill all engines. The world must not be used any more."""
        for process in self._processes:
            process.kill()
        self.run(float("inf"))

    def start(self, process: Process) -> None:
        self._processes.append(process)
        self.schedule(self.now, process)

    def schedule(self, when: float, process: Process) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), process))

    def wait(self, process: Process, when: float) -> None:
        """Let other processes run until a time; the calling thread is that of ``process``."""
        is_next = when <= self._until and (
            not self._events or when < self._events[0][0]
        )
        if is_next:
            self.now = when
            return
        self.schedule(when, process)
        self.hand_over()
        process.pause()

    def hand_over(self) -> None:
        """Let the next process run, or return to the caller of ``run``."""
        following = self._next()
        if following is None:
            self._idle.release()
        else:
            following.resume()

    def fail(self, error: BaseException) -> None:
        self._failure = error
        self._events.clear()

    def _next(self) -> Process | None:
        if not self._events or self._events[0][0] > self._until:
            return None
        self.now, _, process = heapq.heappop(self._events)
        return process


class Process(Clock):
    """The process of one engine, and its clock.

    :param program: runs in a thread of its own; ends by returning or with ``KilledError``.
    """

    def __init__(
        self,
        world: World,
        name: str,
        program: Callable[[Process], None],
    ) -> None:
        self.world = world
        self.name = name
        self.random = random.Random(f"{world.seed} {name}")
        self.is_dead = False
        self._turn = threading.Semaphore(0)
        threading.stack_size(_STACK_BYTES)
        self._thread = threading.Thread(
            target=self._run, args=(program,), name=name, daemon=True
        )
        self._is_started = False
        world.start(self)

    def monotonic(self) -> float:
        return self.world.now

    def wall(self) -> float:
        return START + self.world.now

    def lock(self) -> AbstractContextManager[object]:
        return nullcontext()  # an engine has one thread

    def sleep(self, seconds: float) -> None:
        """Let simulated time pass.

        :raises KilledError: the engine was killed meanwhile.
        """
        if not self.is_dead:
            self.world.wait(self, self.world.now + seconds)
        if self.is_dead:
            raise KilledError

    def kill(self) -> None:
        """End the engine at its next event: it vanishes without a word."""
        self.is_dead = True

    def resume(self) -> None:
        """Run the thread, in place of the calling one."""
        if self._is_started:
            self._turn.release()
            return
        self._is_started = True
        self._thread.start()

    def pause(self) -> None:
        self._turn.acquire()

    def _run(self, program: Callable[[Process], None]) -> None:
        try:
            if not self.is_dead:
                program(self)
        except KilledError:
            pass
        except BaseException as error:
            self.world.fail(error)
        self.world.hand_over()


class CountingBlobs(Blobs):
    """The bucket as one engine sees it; counts requests as S3 bills them."""

    latency_s = 0.03
    connections = 1  # one call after the other, in the engine's thread

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._counts: Counter[str] = Counter()
        # whether the last request has read a commit in the inbox
        self._is_reading = False
        self._is_closed = False

    def put(self, name: str, pieces: Sequence[Buffer]) -> float:
        data = b"" if "/packs/" in name else b"".join(pieces)
        after_s = self._begin("PUT")
        if name not in self._world.blobs:
            insort(self._world.sorted_names, name)
        written = START + self._world.now
        self._world.blobs[name] = (data, written)
        if name.endswith("/latest"):
            self._world.merger = self._process
        self._process.sleep(after_s)
        return written

    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        is_commit = "/inbox/" in name
        share = 1 / CONNECTIONS if is_commit and self._is_reading else 1.0
        after_s = self._begin("GET", share)
        self._is_reading = is_commit
        data, _ = self._world.blobs.get(name, (None, 0.0))
        self._process.sleep(after_s)
        if data is None:
            raise BlobMissingError(f"{name} does not exist")
        count = 0
        for buffer in buffers:
            part = data[offset + count : offset + count + buffer.nbytes]
            buffer.cast("B")[: len(part)] = part
            count += len(part)
            if len(part) < buffer.nbytes:
                break
        return count

    def delete(self, names: Sequence[str]) -> None:
        after_s = self._begin("DELETE")
        sorted_names = self._world.sorted_names
        for name in names:
            if self._world.blobs.pop(name, None) is not None:
                del sorted_names[bisect_left(sorted_names, name)]
        self._process.sleep(after_s)

    def _page(self, prefix: str, after: str) -> list[BlobInfo]:
        after_s = self._begin("LIST")
        names = self._world.sorted_names
        start = max(bisect_left(names, prefix), bisect_right(names, after))
        found: list[BlobInfo] = []
        for name in names[start : start + _PAGE]:
            if not name.startswith(prefix):
                break
            data, written = self._world.blobs[name]
            found.append(BlobInfo(name, len(data), written))
        self._process.sleep(after_s)
        return found

    def close(self) -> None:
        self._is_closed = True

    def requests(self) -> Mapping[str, int]:
        return self._counts

    def _begin(self, kind: str, share: float = 1.0) -> float:
        """Count a request, and let time pass until it takes effect; return the seconds from then to
        the answer."""
        if self._is_closed:
            raise RefusedError("the engine was killed")
        self._counts[kind] += 1
        self._is_reading = False
        latency_s = self._world.latency(self._process.random) * share
        self._process.sleep(latency_s / 2)
        return latency_s / 2

    def list(self, prefix: str, after: str = "") -> Iterator[BlobInfo]:
        found = self._page(prefix, after)
        yield from found
        while len(found) == _PAGE:
            found = self._page(prefix, found[-1].name)
            yield from found
