"""Retries, breaker and resumption of bodies, on top of single attempts.

1. An operation ends by its deadline, including attempts, pauses between them, and interrupted bodies.
2. Pauses have full jitter: each is the pause that the server requests, plus a random one below a bound that doubles.
3. Bytes of a body that arrived are valid and are not fetched again.
4. Every attempt counts towards the breaker; while it is open, operations fail at once, without an attempt.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from persistkv.errors import StoreError
from persistkv_s3.client.breaker import Breaker
from persistkv_s3.client.errors import BreakerOpenError, ObjectExistsError, S3Error
from persistkv_s3.client.transport import Body, Deadline, ListPage, ObjectInfo, Sink, Transport

T = TypeVar("T")

_FIRST_BOUND_S = 0.2
_LAST_BOUND_S = 5.0
_ATTEMPTS = 8  # bounds the requests to a server that fails fast


class RetryingTransport(Transport):
    """Transport with retries; see the top of this file."""

    def __init__(self, client: Transport, breaker: Breaker) -> None:
        self._client = client
        self.breaker = breaker
        self.retries = 0
        """Number of attempts beyond the first."""

    @property
    def requests(self) -> dict[str, int]:
        return self._client.requests

    def put(self, key: str, body: Body, deadline: Deadline, *, only_if_absent: bool = True) -> None:
        uncertain: list[bool] = []

        def attempt() -> None:
            try:
                self._client.put(key, body, deadline, only_if_absent=only_if_absent)
            except S3Error as error:
                if uncertain and isinstance(error, ObjectExistsError):
                    error.uncertain = True  # an earlier attempt may have created it
                if error.uncertain:
                    uncertain.append(True)
                raise

        self._run(attempt, deadline)

    def get(self, key: str, start: int | None, stop: int | None, sink: Sink, deadline: Deadline) -> None:
        first = sink.position

        def attempt() -> None:
            done = sink.position - first
            if not done:
                self._client.get(key, start, stop, sink, deadline)
            elif start is None and len(sink.room()):  # of a tail or a whole object: the remainder, counted from the end
                self._client.get(key, None, len(sink.room()), sink, deadline)
            elif start is not None and stop is not None and start + done < stop:
                self._client.get(key, start + done, stop, sink, deadline)

        self._run(attempt, deadline)

    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        return self._run(lambda: self._client.head(key, deadline), deadline)

    def list(self, prefix: str, page: str | None, deadline: Deadline) -> ListPage:
        return self._run(lambda: self._client.list(prefix, page, deadline), deadline)

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._run(lambda: self._client.delete(keys, deadline), deadline)

    def close(self) -> None:
        self._client.close()

    def _run(self, attempt: Callable[[], T], deadline: Deadline) -> T:
        bound = _FIRST_BOUND_S
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                return self._attempt(attempt)
            except S3Error as error:
                if not error.retryable or not attempts_left:
                    raise
                pause = error.pause_s + random.uniform(0, bound)
                if pause >= deadline.remaining:
                    raise
            time.sleep(pause)
            bound = min(2 * bound, _LAST_BOUND_S)
            self.retries += 1
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, attempt: Callable[[], T]) -> T:
        if not self.breaker.admit():
            raise BreakerOpenError("the object store failed or was slow; it is left alone for a while")
        begin = time.monotonic()
        well = False
        try:
            result = attempt()
            well = True
            return result
        except StoreError as error:
            well = not isinstance(error, S3Error) or error.healthy
            raise
        finally:
            self.breaker.record(well=well, seconds=time.monotonic() - begin)
