"""Single attempts with boto3. All errors of botocore and urllib3 are translated into ``S3Error`` in this file.

1. Bodies are uploaded from the caller's buffers and downloaded into the memory of a sink, without a copy.
2. An attempt exceeds its deadline by at most one socket timeout: an upload checks it between pieces, and a timer shuts
   down the connection of a download.
3. botocore makes no retries of its own: ``bucket`` does.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from persistkv.errors import ConfigurationError, MissingExtraError, StoreError
from persistkv.storage.extensions import PlainMedium
from persistkv_s3.client.transport import (
    ABSENT,
    Body,
    BrokenError,
    ConditionFailedError,
    Deadline,
    LateError,
    ListPage,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    S3Error,
    Sink,
    ThrottledError,
    Transport,
    UnchangedError,
)
from persistkv_s3.options import Place, S3Options

logger = logging.getLogger(__name__)

_READ_BYTES = 256 << 10  # 256 KiB: longer reads cause page faults, shorter ones more calls
_CALLERS = 16  # threads of callers, which make a single request themselves
_CONNECT_S = 5.0
_MOST_S = 30.0
_THROTTLES = frozenset(
    {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "ServiceUnavailable", "TooManyRequests"}
)
_MISSING = frozenset({"NoSuchKey", "404", "NotFound", "InvalidRange", "416"})
_BROKEN = frozenset({"RequestTimeout", "InternalError", "OperationAborted", "ConditionalRequestConflict", "408", "409"})


class BotoClient(Transport):
    """``Transport`` with one boto3 client for all threads. Thread-safe."""

    def __init__(self, place: Place, options: S3Options) -> None:
        self._place = place
        self._target = _given(Bucket=place.bucket, ExpectedBucketOwner=options.expected_bucket_owner)
        self._encryption = _given(
            ServerSideEncryption=options.sse,
            SSEKMSKeyId=options.sse_kms_key_id,
            BucketKeyEnabled=options.sse_bucket_key,
        )
        self._client = make_client(options)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._ahead_s: float | None = None
        """Server's clock minus ``time.monotonic`` in seconds, by the dates of answers; None: no answer yet. A greater
        value replaces it, because dates have whole seconds and answers take time; so does one that is smaller by 5 s or
        more, because the server's clock was changed."""
        self._client.meta.events.register("before-send.s3", self._count_one)
        self._client.meta.events.register("after-call.s3", self._compare_clocks)
        server = urlsplit(self._client.meta.endpoint_url)
        self._where = f"{place} at {server.scheme}://{server.netloc.rpartition('@')[2]}"
        self._versions_reported = False
        if server.scheme == "http" and not _is_loopback(server.hostname or ""):
            text = "%s: connections are not encrypted, so the network can read and change content; use https://"
            logger.warning(text, self._where)

    @property
    def requests(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _count_one(self, request: Any, **_: Any) -> None:
        with self._lock:
            self._counts[request.method] += 1

    def _compare_clocks(self, parsed: Any, **_: Any) -> None:
        date = parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        with suppress(TypeError, ValueError), self._lock:
            ahead_s = parsedate_to_datetime(date).timestamp() - time.monotonic()
            if self._ahead_s is None or not -5.0 < ahead_s - self._ahead_s <= 0.0:
                self._ahead_s = ahead_s

    def server_time(self) -> float:
        return time.time() if self._ahead_s is None else time.monotonic() + self._ahead_s

    def put(self, key: str, body: Body, deadline: Deadline, *, condition: str | None = None) -> str:
        conditions = {} if condition is None else {"IfNoneMatch" if condition == ABSENT else "IfMatch": condition}
        target = {"Key": key, **conditions, **self._target, **self._encryption}
        with self._translated("PUT", key, deadline):
            answer = self._client.put_object(Body=body, ContentLength=len(body), **target)
        if "VersionId" in answer and not self._versions_reported:
            self._versions_reported = True
            logger.warning(
                "%s: the bucket keeps old versions, so deleted content takes space until a lifecycle rule "
                "expires noncurrent versions (docs/s3.md)",
                self._where,
            )
        return str(answer.get("ETag", ""))

    def get(
        self, key: str, start: int | None, stop: int | None, sink: Sink, deadline: Deadline, *, known: str | None = None
    ) -> str:
        wanted = {} if known is None else {"IfNoneMatch": known}
        if start is not None and stop is not None:
            wanted["Range"] = f"bytes={start}-{stop - 1}"
        with self._translated("GET", key, deadline):
            answer = self._client.get_object(**self._target, Key=key, **wanted)
            with closing(answer["Body"]) as body:
                size = answer.get("ContentRange", "").rpartition("/")[2]
                if start is not None and stop is not None and size.isdigit() and int(size) < stop:
                    raise ObjectMissingError(f"{self._where}: {key} has {size} bytes instead of {stop} or more")
                sink.expect(answer["ContentLength"])
                with _cut_off(body, deadline):
                    _receive(body, sink)
        return str(answer.get("ETag", ""))

    def head(self, key: str, deadline: Deadline) -> ObjectInfo:
        with self._translated("HEAD", key, deadline):
            found = self._client.head_object(**self._target, Key=key)
        return ObjectInfo(key, found["ContentLength"], found["LastModified"].timestamp())

    def list(self, prefix: str, page: str | None, deadline: Deadline) -> ListPage:
        more = {} if page is None else {"ContinuationToken": page}
        with self._translated("LIST", prefix, deadline):
            answer = self._client.list_objects_v2(**self._target, Prefix=prefix, **more)
        entries = answer.get("Contents", ())
        found = [ObjectInfo(entry["Key"], entry["Size"], entry["LastModified"].timestamp()) for entry in entries]
        return ListPage(found, answer["NextContinuationToken"] if answer.get("IsTruncated") else None)

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        try:
            with self._translated("DELETE", f"{keys[0]} and {len(keys) - 1} more", deadline):
                answer = self._client.delete_objects(**self._target, Delete=wanted)
            for error in answer.get("Errors", ()):
                raise _of_answer({"Error": error}, f"{self._where}: DELETE {error.get('Key')}")
        except RefusedError:  # Ceph requires permission to delete the whole bucket for this
            for key in keys:
                with self._translated("DELETE", key, deadline):
                    self._client.delete_object(**self._target, Key=key)

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _translated(self, verb: str, key: str, deadline: Deadline) -> Iterator[None]:
        deadline.check(f"{self._where}: {verb} {key}")
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            raise _ours(error, f"{self._where}: {verb} {key}", deadline) from None


class PlainBucket(BotoClient, PlainMedium):
    """Baseline of ``persistkv bench``: plain boto3, one object per ``write``, one request at a time, copied buffers."""

    def __init__(self, place: Place, options: S3Options) -> None:
        super().__init__(place, options)
        self._deadline_s = options.deadline_s
        self._written: list[str] = []

    def write(self, buffers: Sequence[memoryview]) -> None:
        key = f"{self._place.prefix}plain-{len(self._written)}"
        with self._translated("PUT", key, Deadline(self._deadline_s)):
            self._client.put_object(Key=key, Body=b"".join(buffers), **self._target, **self._encryption)
        self._written.append(key)

    def read(self, buffers: Sequence[memoryview]) -> None:
        key = self._written[-1]
        with self._translated("GET", key, Deadline(self._deadline_s)):
            found = memoryview(self._client.get_object(**self._target, Key=key)["Body"].read())
        for buffer in buffers:
            buffer[:], found = found[: len(buffer)], found[len(buffer) :]

    def close(self) -> None:
        try:
            if self._written:
                self.delete(self._written, Deadline(self._deadline_s))
                self._written = []
        finally:
            super().close()


def _given(**options: str | bool | None) -> dict[str, str | bool]:
    return {name: value for name, value in options.items() if value is not None}


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _receive(body: Any, sink: Sink) -> None:
    while len(room := sink.room()):
        count = body.readinto(room[:_READ_BYTES])
        if not count:
            raise BrokenError("the body broke off")
        sink.advance(count)


@contextmanager
def _cut_off(body: Any, deadline: Deadline) -> Iterator[None]:
    """Shut down the connection of ``body`` at the deadline: a socket timeout never ends a body that arrives slowly."""

    def cut() -> None:
        with suppress(Exception):  # it has just ended
            body._raw_stream.shutdown()

    watchdog = threading.Timer(max(0.0, deadline.remaining), cut)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def _ours(error: Exception, what: str, deadline: Deadline) -> S3Error:
    """Translate an error of the request ``what``. The result has no cause, which could hold request headers."""
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        return _of_answer(error.response, what)
    if deadline.remaining <= 0:
        return LateError(f"{what} took longer than {deadline.seconds:g} s")
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.TokenRetrievalError)):
        return RefusedError(f"{what}: no credentials; they come from the environment, a profile or a role")
    if isinstance(error, (boto.HTTPClientError, boto.ConnectionError, boto.ResponseStreamingError, OSError)):
        return BrokenError(f"{what}: {_cause(error)}")
    return RefusedError(f"{what}: {_cause(error)}")


def _cause(error: BaseException) -> str:
    """Describe an error by its type and the system error that caused it. Its message may hold request headers."""
    name, inner = type(error).__name__, error
    for _ in range(10):
        inner = getattr(inner, "kwargs", {}).get("error") or inner.__cause__ or inner.__context__ or inner
    if not isinstance(inner, OSError) or not inner.strerror:
        return name
    return f"{name}: {inner.strerror} ({errno.errorcode.get(inner.errno or 0, type(inner).__name__)})"


def _of_answer(answer: Any, what: str) -> S3Error:
    code = str(answer.get("Error", {}).get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = f"{what}: {status} {code}"
    if code in _MISSING:
        return ObjectMissingError(text)
    if status == 412:
        return ConditionFailedError(text)
    if status == 304:
        return UnchangedError(text)
    if code in _THROTTLES or status in (429, 503):
        found = ThrottledError(text)
        asked = str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", ""))
        found.pause_s = max(found.pause_s, min(float(asked), _MOST_S) if asked.isdigit() else 0.0)
        return found
    if status >= 500 or code in _BROKEN or status in (408, 409):
        return BrokenError(text)
    return RefusedError(text)


def make_client(options: S3Options) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise MissingExtraError("boto3", "s3") from None
    path_style = options.endpoint_url is not None if options.path_style is None else options.path_style
    session = boto3.session.Session()

    def make(*, unsigned: bool) -> Any:
        config = Config(
            signature_version="s3v4",
            connect_timeout=min(_CONNECT_S, options.deadline_s),
            read_timeout=max(1.0, options.deadline_s / 3),  # a hang costs a third of the deadline, not all of it
            retries={"total_max_attempts": 1},
            max_pool_connections=2 * options.connections + _CALLERS,  # reads run concurrently with a commit
            request_checksum_calculation="when_supported" if options.checksum == "crc32" else "when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": not unsigned, "addressing_style": "path" if path_style else "auto"},
        )
        region = options.region or session.region_name or "us-east-1"
        return session.client("s3", endpoint_url=options.endpoint_url, region_name=region, config=config)

    try:
        client = make(unsigned=options.unsigned_payload is not False)
        if options.unsigned_payload is None and not client.meta.endpoint_url.startswith("https:"):
            client.close()
            client = make(unsigned=False)  # nothing else would protect bodies in transit
    except (BotoCoreError, ValueError) as error:
        raise ConfigurationError("s3 url", options.endpoint_url, f"options that boto3 accepts ({error})") from None
    return client
