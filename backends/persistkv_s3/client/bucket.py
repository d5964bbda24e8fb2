"""One bucket as the driver uses it: operations with deadline, retries and breaker, and threads that run them.

1. An operation, including all attempts and the pauses between them, ends by its deadline, or at most one socket timeout
   later if the server hangs.
2. Pauses have full jitter: each is the pause that the server requests, plus a random one below a bound that doubles.
3. Bytes of a body that arrived are valid and are not fetched again.
4. Every attempt counts towards the breaker; while it is open, operations fail at once, without an attempt.

States of the breaker:

    closed     requests pass. Opens after 5 consecutive bad answers, or if 10 of the last 20 were bad
    open       no request passes, for a pause that doubles each time, up to 30 s
    half-open  one request passes. Good answer: closed. Bad answer: open again

A bad answer is a failure caused by the server, or an answer that took longer than ``slow_s`` plus the time that its
bytes take at 1 MiB/s.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Literal, TypeVar

from persistkv.errors import StoreError
from persistkv.storage.executor import ThreadPool
from persistkv.storage.format.codec import Buffer
from persistkv_s3.client.transport import (
    MOST_DELETED,
    Body,
    BreakerOpenError,
    Clock,
    ConditionFailedError,
    Deadline,
    LateError,
    ObjectInfo,
    S3Error,
    Sink,
    Take,
    Transport,
    WholeSink,
)

A = TypeVar("A")
R = TypeVar("R")
State = Literal["closed", "open", "half-open"]

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 8  # bounds the requests to a server that fails fast
_FIRST_BOUND_S = 0.2
_LAST_BOUND_S = 5.0
_SMALL_BYTES = 1 << 20  # 1 MiB: heads, identities, notes and statuses are smaller
_IN_A_ROW = 5
_WINDOW = 20
_SLOW_BYTES_PER_S = 1 << 20  # 1 MiB/s
_FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Breaker:
    """Circuit breaker, see the top of this file. Thread-safe. ``name`` is the server's name in the log."""

    def __init__(self, name: str, slow_s: float, clock: Clock) -> None:
        self._name = name
        self._slow_s = slow_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state: State = "closed"
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._pause_s = _FIRST_PAUSE_S
        self._wait_until = 0.0
        """While open: end of the pause. While half-open: when another request passes if the first has not ended."""

    @property
    def state(self) -> State:
        """Present state: ``half-open`` as soon as the pause of ``open`` has passed."""
        with self._lock:
            over = self._state == "open" and self._clock.monotonic() >= self._wait_until
            return "half-open" if over else self._state

    def admit(self) -> bool:
        """Return whether a request may be made now. Each admitted request must end with ``record``."""
        with self._lock:
            if self._state == "closed":
                return True
            now = self._clock.monotonic()
            if now < self._wait_until:
                return False
            self._state = "half-open"
            self._wait_until = now + LONGEST_PAUSE_S  # a probe whose thread died must not block it for ever
            return True

    def record(self, *, well: bool, seconds: float, num_bytes: int = 0) -> None:
        """Record that an admitted request has ended; ``well=False``: it failed because of the server."""
        bad = not well or seconds > self._slow_s + num_bytes / _SLOW_BYTES_PER_S
        with self._lock:
            self._recent.append(bad)
            recent = list(self._recent)
            if self._state == "open":
                return  # it was sent before the breaker opened
            if self._state == "half-open" and not bad:
                logger.warning("%s answers again", self._name)
                self._state = "closed"
                self._recent.clear()
                self._pause_s = _FIRST_PAUSE_S
            elif self._state == "half-open":
                self._open()
            elif recent[-_IN_A_ROW:] == [True] * _IN_A_ROW or (bad and sum(recent) * 2 >= _WINDOW):
                logger.warning("%s fails or is slow: requests are held back until it answers again", self._name)
                self._open()

    def _open(self) -> None:
        self._wait_until = self._clock.monotonic() + self._pause_s * (0.5 + 0.5 * self._clock.random.random())
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._state = "open"


class Bucket:
    """Operations on one bucket, see the top of this file. Thread-safe. A failed operation raises an ``S3Error``, or the
    error of its sink. ``Transport`` specifies arguments and results.

    :param transport: closed with the bucket.
    :param deadline_s: deadline of each operation: seconds after its start, including retries.
    :param connections: maximum number of concurrent operations in one call of ``all``.
    """

    def __init__(
        self, transport: Transport, breaker: Breaker, deadline_s: float, connections: int, clock: Clock
    ) -> None:
        self.breaker = breaker
        self.clock = clock
        self._connections = connections
        self._transport = transport
        self._deadline_s = deadline_s
        self._last_failure = "none failed"
        self._readers = ThreadPool(connections, "persistkv-s3-read")
        self._writers = ThreadPool(connections, "persistkv-s3-write")

    @property
    def requests(self) -> dict[str, int]:
        return self._transport.requests

    def now(self) -> float:
        return self._transport.server_time()

    def all(self, what: Callable[[A], R], things: Iterable[A], *, writes: bool = False) -> list[R]:
        """Call ``what`` with each thing, at most ``connections`` at a time; return the results in order.

        All calls have ended when it returns or raises the error of the first thing whose call failed. KeyboardInterrupt
        is raised at once: queued calls never start, and running ones end by their deadline.

        :param writes: use other threads, so that reads do not wait behind uploads.
        """
        todo = list(things)
        if min(len(todo), self._connections) <= 1:
            return [what(thing) for thing in todo]
        pool = self._writers if writes else self._readers
        futures = [pool.submit(what, thing) for thing in todo]
        try:
            wait(futures)  # no call uses the caller's memory after the return
        finally:
            for future in futures:
                future.cancel()
        return [future.result() for future in futures]

    def each(self, what: Callable[[A], R], things: Sequence[A], at_once: int) -> Iterator[tuple[A, R]]:
        """Yield each thing with the result of ``what``, in order; call ``all`` for ``at_once`` things at a time."""
        for start in range(0, len(things), at_once):
            some = things[start : start + at_once]
            yield from zip(some, self.all(what, some), strict=True)

    def put(self, key: str, pieces: Sequence[Buffer], *, condition: str | None = None) -> str:
        """Upload an object; return its ETag. If an error is ``uncertain``, the object may have been written: for
        ``ConditionFailedError``, by an earlier attempt of this call.
        """
        uncertain = False

        def attempt(deadline: Deadline) -> str:
            nonlocal uncertain
            try:
                return self._transport.put(key, Body(pieces, deadline), deadline, condition=condition)
            except S3Error as error:
                if isinstance(error, ConditionFailedError):
                    error.uncertain = uncertain
                uncertain = uncertain or error.uncertain
                raise

        num_bytes = sum(memoryview(piece).nbytes for piece in pieces)
        return self._run(attempt, lambda: num_bytes)

    def get_if_changed(self, key: str, known: str | None) -> tuple[bytearray, str]:
        """Download a whole object of at most 1 MiB, which may change at any time; return its bytes and ETag."""

        def attempt(deadline: Deadline) -> tuple[bytearray, str]:
            sink = WholeSink(_SMALL_BYTES)  # the object may be another one than at the previous attempt
            etag = self._transport.get(key, None, None, sink, deadline, known=known)
            return sink.data, etag

        return self._run(attempt)

    def get(self, key: str, limit: int = _SMALL_BYTES) -> bytearray:
        """Download a whole object; raise ``CorruptPackError`` if it is larger than ``limit`` bytes."""
        sink = WholeSink(limit)
        self._get(key, None, None, sink)
        return sink.data

    def fill(self, key: str, start: int, buffers: Sequence[memoryview], take: Take | None = None) -> None:
        """Download bytes of an object, from byte ``start`` on, into buffers; see ``Sink``. After an error, buffers that
        were not passed to ``take`` have undefined content.
        """
        self._get(key, start, start + sum(buffer.nbytes for buffer in buffers), Sink(buffers, take))

    def _get(self, key: str, start: int | None, stop: int | None, sink: Sink) -> None:
        """Download bytes as ``Transport.get`` does. A retry fetches only the missing bytes."""

        def attempt(deadline: Deadline) -> None:
            done = sink.position
            if not done:
                self._transport.get(key, start, stop, sink, deadline)
            elif rest := sink.length - done:
                begin = (start or 0) + done
                self._transport.get(key, begin, begin + rest, sink, deadline)

        self._run(attempt, lambda: sink.position)

    def head(self, key: str) -> ObjectInfo:
        return self._run(partial(self._transport.head, key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects whose keys start with ``prefix``, sorted by key. Each page has its own deadline."""
        page = self._run(partial(self._transport.list, prefix, None))
        yield from page.objects
        while (token := page.next) is not None:
            page = self._run(partial(self._transport.list, prefix, token))
            yield from page.objects

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; ignore missing ones. After an error some may be deleted."""
        for start in range(0, len(keys), MOST_DELETED):
            self._run(partial(self._transport.delete, keys[start : start + MOST_DELETED]))

    def _run(self, attempt: Callable[[Deadline], R], num_bytes: Callable[[], int] = int) -> R:
        """Call ``attempt`` until it succeeds, its error is not retryable, or no attempt or time is left.

        :param num_bytes: returns the bytes that all attempts so far have transferred.
        """
        deadline = Deadline(self._deadline_s, self.clock)
        bound = _FIRST_BOUND_S
        cause: S3Error | None = None
        for attempts_left in reversed(range(MOST_ATTEMPTS)):
            try:
                return self._attempt(attempt, deadline, num_bytes)
            except LateError as error:
                if cause is None:
                    raise
                raise LateError(f"{error}; the attempt before failed: {cause}") from cause
            except S3Error as error:
                cause = error
                pause = error.pause_s + self.clock.random.uniform(0, bound)
                if not error.retryable or not attempts_left or pause >= deadline.remaining:
                    raise
            self.clock.sleep(pause)
            bound = min(2 * bound, _LAST_BOUND_S)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, attempt: Callable[[Deadline], R], deadline: Deadline, num_bytes: Callable[[], int]) -> R:
        if not self.breaker.admit():
            raise BreakerOpenError(
                f"no request is sent for a while after failures or slow answers; {self._last_failure}"
            )
        begin, well = self.clock.monotonic(), False
        try:
            result = attempt(deadline)
            well = True
            return result
        except StoreError as error:
            well = not isinstance(error, S3Error) or error.healthy
            if not well:
                self._last_failure = f"the last failure: {error}"
            raise
        finally:
            self.breaker.record(well=well, seconds=self.clock.monotonic() - begin, num_bytes=num_bytes())

    def close(self) -> None:
        """Release connections; idempotent. Does not wait for calls that an interrupt left running."""
        self._readers.shutdown(wait=False)
        self._writers.shutdown(wait=False)
        self._transport.close()
