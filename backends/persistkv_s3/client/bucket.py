"""One bucket as the driver uses it: operations with deadline, retries and breaker.

1. An operation, including all attempts and the pauses between them, ends by its deadline, or at
   most one socket timeout later if the server hangs.
2. Pauses have full jitter: each is the pause that the server requests, plus a random one below a
   bound that doubles.
3. Bytes of a body that arrived are valid and are not fetched again.
4. Every attempt counts towards the breaker; while it is open, operations fail at once, without an
   attempt.

States of the breaker:

    closed     requests pass. Opens after 5 consecutive bad answers, or if 10 of the last 20
               were bad
    open       no request passes, for a pause that doubles each time, up to 30 s
    half-open  one request passes. Good answer: closed. Bad answer: open again

A bad answer says something about the server: none came in time, the connection broke, the server
failed or asks for fewer requests, or the answer took longer than ``slow_s`` plus the time that its
bytes take at 1 MiB/s. One that concerns an object or the caller (missing, refused, replaced) is
good. An attempt that ended with an exception of the sink's owner, or with an interrupt, counts as
neither.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any, Literal, TypeVar

from persistkv.storage.format.codec import Buffer
from persistkv.storage.shared import Clock
from persistkv_s3.client.transport import (
    MOST_DELETED,
    Body,
    BreakerOpenError,
    Deadline,
    KeysRefusedError,
    LateError,
    ObjectInfo,
    ObjectReplacedError,
    ObjectVersion,
    RangeError,
    RequestRefusedError,
    S3Error,
    Sink,
    ThrottledError,
    Transport,
)

R = TypeVar("R")
BreakerState = Literal["closed", "open", "half-open"]

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 8  # maximum number of attempts, for a server that fails fast
# maximum seconds of the random pause after the first attempt, and after any later one
_FIRST_BOUND_S = 0.2
_LAST_BOUND_S = 5.0
# number of refused single deletions in a row after which the rest are not tried
_REFUSALS = 8
_IN_A_ROW = 5  # number of bad answers in a row that open the breaker
_WINDOW = 20  # number of last answers; the breaker opens if half of so many were bad
_SLOW_BYTES_PER_S = 1 << 20  # 1 MiB/s
# bounds of the seconds for which the breaker stays open, before jitter
_FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Breaker:
    """Circuit breaker: after bad answers it holds requests back for a pause, then admits one as a
    probe. The top of this file defines its states and bad answers. Thread-safe.

    :param name: name of the server in the log.
    :param slow_s: seconds after which an answer is bad; an answer with many bytes has more time.
    """

    def __init__(
        self,
        name: str,
        slow_s: float,
        clock: Clock,
    ) -> None:
        self._name = name
        self._slow_s = slow_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state: BreakerState = "closed"
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        """For each of the last answers, whether it was bad; cleared when the breaker closes."""
        self._pause_s = _FIRST_PAUSE_S
        """Length of the next pause, before jitter."""
        self._wait_until = 0.0
        """While open: end of the pause. While half-open: when another request passes if the first
        has not ended."""

    @property
    def state(self) -> BreakerState:
        """Present state: ``half-open`` as soon as the pause of ``open`` has passed."""
        with self._lock:
            if self._state == "open" and self._clock.monotonic() >= self._wait_until:
                return "half-open"
            return self._state

    def admit(self) -> bool:
        """Return whether a request may be made now. Each admitted request must end with ``record``
        or ``record_unknown``."""
        with self._lock:
            if self._state == "closed":
                return True
            now = self._clock.monotonic()
            if now < self._wait_until:
                return False
            # this request is the probe: no other request passes until it has ended
            self._state = "half-open"
            # if the probe never ends, because its thread died, another request passes after this
            # time
            self._wait_until = now + LONGEST_PAUSE_S
            return True

    def record(
        self,
        *,
        well: bool,
        seconds: float,
        num_bytes: int = 0,
    ) -> None:
        """Record that an admitted request has ended, and change the state if that is due.

        :param well: False: it failed because of the server.
        :param num_bytes: bytes that it transferred, for which a good answer may take longer.
        """
        allowed_s = self._slow_s + num_bytes / _SLOW_BYTES_PER_S
        is_slow = seconds > allowed_s
        bad = is_slow or not well
        with self._lock:
            self._recent.append(bad)
            # an open breaker ignores the answer: the request was sent before it opened
            if self._state == "open":
                return
            if self._state == "half-open":
                self._end_half_open(bad=bad)
            # a good answer never opens the breaker, whatever the earlier answers were
            elif bad and self._is_failing():
                logger.warning(
                    "%s fails or is slow: requests are held back until it answers again",
                    self._name,
                )
                self._open()

    def record_unknown(self) -> None:
        """Record that an admitted request has ended without a good or bad answer."""
        with self._lock:
            # this request may have been the probe: let the next request be one
            if self._state == "half-open":
                self._wait_until = self._clock.monotonic()

    def _is_failing(self) -> bool:
        """Return whether the last answers were bad: 5 in a row, or 10 of the last 20. The lock is
        held."""
        last = list(self._recent)[-_IN_A_ROW:]
        if len(last) == _IN_A_ROW and all(last):
            return True
        return 2 * sum(self._recent) >= _WINDOW

    def _end_half_open(self, *, bad: bool) -> None:
        """Open or close after the answer to the request that was admitted while half-open. The lock
        is held."""
        if bad:
            self._open()
            return
        logger.warning("%s answers again", self._name)
        self._state = "closed"
        self._recent.clear()
        self._pause_s = _FIRST_PAUSE_S

    def _open(self) -> None:
        """Hold requests back for a pause, and double the next one. The lock is held."""
        # between half and all of the pause, at random, so that engines do not all probe the server
        # at once
        part = 0.5 + 0.5 * self._clock.random.random()
        self._wait_until = self._clock.monotonic() + part * self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._state = "open"


class Bucket:
    """Operations on one bucket, with a deadline, retries and the breaker. Thread-safe. A failed
    operation raises an ``S3Error``, or the error of its sink. ``Transport`` specifies arguments and
    results.

    :param transport: client that makes the attempts; its owner closes it.
    :param deadline_s: deadline of each operation: seconds after its start, including retries.
    """

    def __init__(
        self,
        transport: Transport,
        breaker: Breaker,
        deadline_s: float,
        clock: Clock,
    ) -> None:
        self.breaker = breaker
        self._clock = clock
        self._transport = transport
        self._deadline_s = deadline_s
        self._last_failure = "none failed"
        """The last failure that the breaker has counted, for the error while it is open."""
        self.throttled = 0
        """Number of attempts that the server has refused because it wants fewer requests."""

    def put(self, key: str, pieces: Sequence[Buffer]) -> float:
        """Upload an object, which replaces any with this key; return the server's time of the
        attempt that succeeded (``Transport.put``)."""
        num_bytes = sum(memoryview(piece).nbytes for piece in pieces)

        # make a new body for each attempt, because an earlier one may have been read in part
        def attempt(deadline: Deadline) -> float:
            return self._transport.put(key, Body(pieces, deadline), deadline)

        return self._run_with_retries(attempt, transferred=lambda: num_bytes)

    def read(
        self,
        key: str,
        start: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        """Download ``length`` bytes from byte ``start`` on into buffers; see ``Sink``. A retry
        fetches only the missing bytes. Return the number of bytes that arrived: fewer only if the
        object ends.

        :raises ObjectReplacedError: the object was replaced between two attempts.
        """
        sink = Sink(length, buffers)

        def attempt(deadline: Deadline) -> None:
            try:
                self._transport.get(
                    key, start + sink.position, start + length, sink, deadline
                )
            except RangeError as error:
                # an earlier attempt got bytes of this range, so the object has been replaced by a
                # shorter one
                if sink.begun:
                    raise ObjectReplacedError(str(error)) from None
                # the object ends before the range, so there is nothing to read
                sink.end()

        self._run_with_retries(attempt, transferred=lambda: sink.position)
        # a generator that yields the buffers processes the last one now
        sink.exhaust()
        return sink.position

    def head(self, key: str) -> None:
        self._run_with_retries(partial(self._transport.head, key))

    def list(
        self,
        prefix: str,
        after: str = "",
    ) -> Iterator[ObjectInfo]:
        """Yield all objects whose keys start with ``prefix`` and are greater than ``after``, sorted
        by key. Each page has its own deadline."""
        list_page = partial(self._transport.list, prefix)
        # None: the first page
        page = self._run_with_retries(partial(list_page, None, after=after))
        yield from page.objects
        while page.next is not None:
            page = self._run_with_retries(partial(list_page, page.next))
            yield from page.objects

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; ignore missing ones. After an error some may be deleted. Each request has
        its own deadline.

        :raises RequestRefusedError: the server refuses to delete some of them. The others are
            deleted, unless it refuses all.
        """
        # a refusal is raised at the end, so that one locked object does not keep other objects from
        # being deleted
        refusal: RequestRefusedError | None = None
        for start in range(0, len(keys), MOST_DELETED):
            batch = keys[start : start + MOST_DELETED]
            refusal_of_some = self._delete_batch(batch)
            if refusal_of_some is not None:
                refusal = refusal_of_some
        if refusal is not None:
            raise refusal

    def _delete_batch(self, keys: Sequence[str]) -> RequestRefusedError | None:
        """Delete objects with one request, or with a request for each if the server refuses that.
        Return the last refusal; None: no object is refused.

        :raises RequestRefusedError: none of them is deleted, or probably none.
        """
        try:
            self._run_with_retries(partial(self._transport.delete, keys))
        except KeysRefusedError as error:
            return error
        except RequestRefusedError as error:
            # an error that is not healthy means that no request was made, because there are no
            # credentials
            is_final = len(keys) == 1 or not error.healthy
            if is_final:
                raise
            # Ceph requires permission to delete the whole bucket for a request with several keys: a
            # request for each key may be allowed.
            return self._delete_each(keys)
        return None

    def delete_versions(self, prefix: str, keys: Collection[str]) -> str:
        """Delete all versions of objects, also of deleted ones.

        :param prefix: all keys start with it; the versions of all such objects are listed.
        :returns: why the server keeps some versions, or may keep some; empty: none is left.
        """
        wanted = set(keys)
        refusal = ""
        after: ObjectVersion | None = None
        while True:
            try:
                page = self._run_with_retries(
                    partial(self._transport.versions, prefix, after)
                )
            except RequestRefusedError as error:
                # report the refusal: without a list, some versions may be left
                return str(error)
            found = [version for version in page.versions if version.key in wanted]
            refusal = self._delete_found(found) or refusal
            if page.next is None:
                return refusal
            after = page.next

    def _delete_found(self, found: Sequence[ObjectVersion]) -> str:
        """Delete versions; return why the server refuses to delete some, empty: it deletes all."""
        refusal = ""
        for start in range(0, len(found), MOST_DELETED):
            batch = found[start : start + MOST_DELETED]
            # continue with other versions if the server refuses to delete these
            try:
                self._run_with_retries(partial(self._transport.delete_versions, batch))
            except RequestRefusedError as error:
                refusal = str(error)
        return refusal

    def setting(self, name: str) -> Mapping[str, Any]:
        """Return a setting of the bucket; empty if it was never set."""
        return self._run_with_retries(partial(self._transport.setting, name))

    def _delete_each(self, keys: Sequence[str]) -> RequestRefusedError | None:
        """Delete objects with a request for each; return the last refusal, None: none is refused.

        :raises RequestRefusedError: 8 in a row are refused, so probably there is no permission for
            any. The rest is not tried.
        """
        refusal: RequestRefusedError | None = None
        refused_in_a_row = 0
        for key in keys:
            try:
                self._run_with_retries(partial(self._transport.delete, [key]))
                refused_in_a_row = 0
            except RequestRefusedError as error:
                refusal = error
                refused_in_a_row += 1
                if refused_in_a_row == _REFUSALS:
                    raise
        return refusal

    def _run_with_retries(
        self,
        attempt: Callable[[Deadline], R],
        transferred: Callable[[], int] = lambda: 0,
    ) -> R:
        """Call ``attempt`` until it succeeds, its error is not retryable, or no attempt or time is
        left.

        :param transferred: returns the bytes that all attempts so far have transferred: the breaker
            allows time for them.
        """
        deadline = Deadline(self._deadline_s, self._clock)
        most_jitter_s = _FIRST_BOUND_S  # maximum of the next random pause
        earlier_failure: S3Error | None = None
        for attempts_left in reversed(range(MOST_ATTEMPTS)):
            try:
                return self._attempt_once(attempt, deadline, transferred)
            except LateError as error:
                # the previous attempt has left little time, so the error also names its failure
                if earlier_failure is None:
                    raise
                raise LateError(
                    f"{error}; the attempt before failed: {earlier_failure}"
                ) from earlier_failure
            except S3Error as error:
                earlier_failure = error
                jitter_s = self._clock.random.uniform(0, most_jitter_s)
                pause_s = error.pause_s + jitter_s
                # do not begin a pause beyond the deadline, so that the caller learns the error now
                has_time = pause_s < deadline.remaining
                can_retry = error.retryable and attempts_left > 0 and has_time
                if not can_retry:
                    raise
            self._clock.sleep(pause_s)
            most_jitter_s = min(2 * most_jitter_s, _LAST_BOUND_S)
        raise AssertionError("the last attempt returns or raises")

    def _attempt_once(
        self,
        attempt: Callable[[Deadline], R],
        deadline: Deadline,
        transferred: Callable[[], int],
    ) -> R:
        """Make one attempt, unless the breaker is open, and record how it went.

        :param transferred: returns the bytes that all attempts so far have transferred.
        """
        if not self.breaker.admit():
            raise BreakerOpenError(
                f"no request is sent for a while after failures or slow answers; "
                f"{self._last_failure}"
            )
        begin = self._clock.monotonic()

        def record(*, well: bool) -> None:
            self.breaker.record(
                well=well,
                seconds=self._clock.monotonic() - begin,
                num_bytes=transferred(),
            )

        try:
            result = attempt(deadline)
        except S3Error as error:
            if isinstance(error, ThrottledError):
                self.throttled += 1
            if not error.healthy:
                self._last_failure = f"the last failure: {error}"
            record(well=error.healthy)
            raise
        except BaseException:
            # an error of the code that yields the sink's buffers, or an interrupt: it says nothing
            # about the server
            self.breaker.record_unknown()
            raise
        record(well=True)
        return result
