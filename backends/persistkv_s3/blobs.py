"""``Blobs`` on a bucket. The key of an object is the prefix of the place and the blob's name.

1. An operation ends by the deadline of the options, or at most one socket timeout later: uploads
   and downloads as a whole, listings per page, deletions per request of up to 1,000 names. The
   search for credentials is part of it.
2. An upload has no condition, because names are unique or may be overwritten. A retry sends the
   same bytes.
3. A retry of a download fetches only the missing bytes, and only from the same object: an object
   that was replaced meanwhile ends the call with ``UnavailableError``.
4. Nothing is cached, and no thread outlives a call, except a search for credentials that does not
   answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from persistkv.errors import StoreError
from persistkv.storage.blobs import (
    BlobInfo,
    BlobMissingError,
    Blobs,
    RefusedError,
    UnavailableError,
    check_name,
    check_prefix,
    is_name,
)
from persistkv.storage.checks import CallsCheck, Check, Level
from persistkv.storage.format.codec import Buffer
from persistkv.storage.shared import Clock
from persistkv_s3.client import transport as client
from persistkv_s3.client.boto import BotoClient
from persistkv_s3.client.bucket import Breaker, Bucket
from persistkv_s3.options import BucketPlace, S3Options
from persistkv_s3.settings import check_settings

_DATE_S = 1.0  # seconds to which a ``Date`` header is rounded down
_ERRORS: Sequence[tuple[type[client.S3Error], type[StoreError]]] = (
    (client.ObjectMissingError, BlobMissingError),
    (client.RequestRefusedError, RefusedError),
    (client.S3Error, UnavailableError),
)
"""The first class of a failed request that matches gives the error of the medium."""
_POLICIES = "docs/s3.md, Policies"
_REMEDIES = {
    "list": f"grant s3:ListBucket on the bucket, as in {_POLICIES}; the bucket must exist",
    "put": f"grant s3:PutObject on the prefix ({_POLICIES}); an engine that only reads has "
    f"read_only=yes in its URL",
    "read": f"grant s3:GetObject on the prefix ({_POLICIES})",
    "delete": f"grant s3:DeleteObject on the prefix ({_POLICIES}): without it, the store "
    f"exceeds its capacity",
}
_THROTTLED = (
    "a longer refresh, larger packs (max_age_s) and fewer connections send fewer requests; S3 "
    "limits them for each "
    "prefix, so give each model a prefix of its own"
)


class S3Blobs(Blobs):
    """A bucket as a medium.

    Any number of threads may call it: those that load and those that maintain the store share one
    pool of connections and one breaker. The pool holds 2 × ``connections`` + 16 connections; a call
    beyond that opens one for itself.

    :param transport: client of the bucket, closed with the medium; None: boto3.
    :param clock: time and randomness of pauses, deadlines and the breaker.
    """

    latency_s = 0.03

    def __init__(
        self,
        place: BucketPlace,
        options: S3Options,
        transport: client.Transport | None = None,
        clock: Clock | None = None,
    ) -> None:
        transport = BotoClient(place, options) if transport is None else transport
        clock = Clock() if clock is None else clock
        self.connections = options.connections
        self._place = place
        self._transport = transport
        breaker = Breaker(str(place), options.slow_s, clock)
        self._bucket = Bucket(transport, breaker, options.deadline_s, clock)
        self._closed = False

    def put(self, name: str, pieces: Sequence[Buffer]) -> float:
        """See ``Blobs.put``. The time is that of the answer to the successful upload plus one
        second: the server rounds its ``Date`` down, so an earlier value could precede the effect.
        It is at most a second too late. If a server sends no date, it is this machine's time.
        """
        with self._calling():
            written = self._bucket.put(self._key(name), pieces)
        return written + _DATE_S

    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        """See ``Blobs.read``. The deadline, and the time after which an answer is slow, include the
        time that the iterable takes. Its exceptions pass unchanged.
        """
        with self._calling():
            if length:
                return self._bucket.read(self._key(name), offset, length, buffers)
            # HTTP has no range of 0 bytes: only find out whether the blob exists
            self._bucket.head(self._key(name))
        # exhaust the iterable, as every read does: an iterator may do its work while buffers are
        # taken
        for _ in buffers:
            pass
        return 0

    def delete(self, names: Sequence[str]) -> None:
        """See ``Blobs.delete``. Blobs after one that may not be deleted are deleted, too.

        :raises RefusedError: the server refuses to delete some, such as a locked object.
        """
        with self._calling():
            self._bucket.delete([self._key(name) for name in names])

    def erase(
        self,
        prefix: str,
        names: Collection[str],
    ) -> Sequence[str]:
        """See ``Blobs.erase``. Old versions are also deleted if the versioning of the bucket is
        suspended, because the bucket still keeps them."""
        check_prefix(prefix)
        left: list[str] = []
        # delete the objects first: in a versioned bucket, this adds markers, which are deleted
        # below
        try:
            self.delete(list(names))
        except RefusedError as error:
            left.append(f"objects that the bucket does not delete: {error}")
        keys = [self._key(name) for name in names]
        with self._calling():
            refusal = self._bucket.delete_versions(
                f"{self._place.prefix}{prefix}", keys
            )
        if refusal:
            left.append(f"old versions that the bucket does not delete: {refusal}")
        return left

    def list(
        self,
        prefix: str,
        after: str = "",
    ) -> Iterator[BlobInfo]:
        """See ``Blobs.list``. Objects whose keys are not names of blobs are skipped."""
        # check here, because the body of a generator begins at its first ``next``
        check_prefix(prefix)
        self._check_open()
        return self._listed(prefix, after)

    def _listed(self, prefix: str, after: str) -> Iterator[BlobInfo]:
        """Yield the blobs of a listing, without objects that are not those of blobs."""
        key_after = f"{self._place.prefix}{after}" if after else ""
        objects = self._bucket.list(f"{self._place.prefix}{prefix}", key_after)
        while True:
            # translate errors of the request only, not those of the code that iterates
            with self._calling():
                found = next(objects, None)
            if found is None:
                return
            name = found.key.removeprefix(self._place.prefix)
            # check again, because a server may ignore the start of a listing
            if name > after and is_name(name):
                yield BlobInfo(name, found.size, found.modified)

    def close(self) -> None:
        self._closed = True
        self._transport.close()

    def check(self, *, writes: bool) -> Iterator[Check]:
        """See ``Blobs.check``: the calls, throttling, and settings of the bucket."""
        calls = CallsCheck(self, _REMEDIES, writes=writes)
        before = self._bucket.throttled
        yield from calls.run()
        # without answers, each request for a setting would last until its deadline
        if not calls.answers:
            return
        throttled = self._bucket.throttled - before
        if throttled:
            found = f"the server has asked for fewer requests {throttled} times during this check"
            yield Check("throttling", Level.WARNING, found, _THROTTLED)
        else:
            yield Check(
                "throttling", Level.OK, "no request of this check was throttled"
            )
        yield from check_settings(self._bucket, self._place.prefix)

    def requests(self) -> Mapping[str, int]:
        """Return the number of requests by HTTP method: GET includes listings, POST is a deletion
        of several blobs."""
        return self._transport.requests

    def state(self) -> str:
        return self._bucket.breaker.state

    def _key(self, name: str) -> str:
        """Return the key of a blob's object; raise ConfigurationError if the name is not valid."""
        check_name(name)
        return f"{self._place.prefix}{name}"

    def _check_open(self) -> None:
        if self._closed:
            raise RefusedError(f"{self._place} is closed")

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Translate the errors of requests within the ``with`` statement, which must not begin
        after ``close``."""
        self._check_open()
        try:
            yield
        except client.S3Error as error:
            raise _translated(error) from None


def _translated(error: client.S3Error) -> StoreError:
    """Return the error of ``storage.blobs`` that a failed request means."""
    for kind, meaning in _ERRORS:
        if isinstance(error, kind):
            return meaning(str(error))
    raise AssertionError("S3Error is in the table")
