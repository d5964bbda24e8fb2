"""Single attempts with boto3. All errors of botocore and urllib3 are translated into ``S3Error`` in
this file.

1. Bodies are uploaded from the caller's buffers and downloaded into the memory of a sink, without a
   copy.
2. An attempt exceeds its deadline by at most one socket timeout: an upload checks it between
   pieces, and a timer shuts down the connection of a download. The search for credentials ends by
   the deadline, too.
3. botocore makes no retries of its own: ``bucket`` does.
4. Exceptions of a sink, whose owner's code may run in it, pass unchanged.
5. An answer that no S3 server sends, such as the page of a proxy, is an error: never a written
   object or an empty list.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from persistkv.errors import ConfigurationError, MissingExtraError, StoreError
from persistkv.storage.backend import PlainMedium
from persistkv_s3.client.credentials import DeferredCredentials
from persistkv_s3.client.transport import (
    Body,
    BrokenError,
    Deadline,
    KeysRefusedError,
    LateError,
    ListPage,
    NoCredentialsError,
    ObjectInfo,
    ObjectMissingError,
    ObjectVersion,
    RangeError,
    RequestRefusedError,
    S3Error,
    Sink,
    ThrottledError,
    Transport,
    VersionPage,
)
from persistkv_s3.options import BucketPlace, S3Options

logger = logging.getLogger(__name__)

# 256 KiB: bytes of one read. Longer reads cause page faults, shorter reads more calls.
_READ_BYTES = 256 << 10
_CALLERS = 16  # number of callers' threads that make a single request themselves
_MOST_CAUSES = 10  # maximum length of a chain of causes of an error
_CONNECT_S = 5.0  # maximum seconds until a connection is established
_MOST_S = 30.0  # longest pause that a ``Retry-After`` header can request
# Codes of errors by their meaning, for ``_new_error``. Answers without a body, such as those to
# HEAD, have the status in place of the code.
_THROTTLES = frozenset(
    {
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "TooManyRequests",
    }
)
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
# codes for a setting of the bucket that was never set
_NOT_SET = frozenset(
    {"NoSuchLifecycleConfiguration", "ObjectLockConfigurationNotFoundError"}
)
_BEYOND_END = frozenset({"InvalidRange", "416"})
_BROKEN = frozenset(
    {
        "RequestTimeout",
        "InternalError",
        "OperationAborted",
        "ConditionalRequestConflict",
        "408",
        "409",
    }
)


class BotoClient(Transport):
    """``Transport`` with one boto3 client for all threads. Thread-safe."""

    def __init__(self, place: BucketPlace, options: S3Options) -> None:
        self._place = place
        self._target = _without_none(
            Bucket=place.bucket, ExpectedBucketOwner=options.expected_bucket_owner
        )
        """Arguments of all requests."""
        self._encryption = _without_none(
            ServerSideEncryption=options.sse,
            SSEKMSKeyId=options.sse_kms_key_id,
            BucketKeyEnabled=options.sse_bucket_key,
        )
        """Further arguments of uploads."""
        self._client, self._credentials = make_client(options)
        self._lock = threading.Lock()
        """Held while ``_counts`` is accessed."""
        self._counts: Counter[str] = Counter()
        """Requests sent so far, by HTTP method."""
        self._client.meta.events.register("before-send.s3", self._count_one)
        server = urlsplit(self._client.meta.endpoint_url)
        # errors show this name, so leave out a user and password that the endpoint may contain
        self._where = f"{place} at {server.scheme}://{server.netloc.rpartition('@')[2]}"
        self._versions_reported = False
        """Whether the warning about old versions was logged."""
        if server.scheme == "http" and not _is_loopback(server.hostname or ""):
            text = (
                "%s: connections are not encrypted, so the network can read and change "
                "content; use https://"
            )
            logger.warning(text, self._where)

    @property
    def requests(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _count_one(self, request: Any, **_: Any) -> None:
        """Count a request; botocore calls this before it sends one."""
        with self._lock:
            self._counts[request.method] += 1

    def put(
        self,
        key: str,
        body: Body,
        deadline: Deadline,
    ) -> float:
        """See ``Transport.put``. Warn once if the bucket keeps old versions."""
        target = {"Key": key, **self._target, **self._encryption}
        with self._request("PUT", key, deadline):
            answer = self._client.put_object(
                Body=body, ContentLength=len(body), **target
            )
        # an answer with a version shows that the bucket is versioned
        if "VersionId" in answer and not self._versions_reported:
            self._versions_reported = True
            logger.warning(
                "%s: the bucket keeps old versions, so deleted content takes space until a "
                "lifecycle rule "
                "expires noncurrent versions (docs/s3.md)",
                self._where,
            )
        # an answer without ETag, such as a page of a proxy with status 200, does not prove that
        # anything was written
        if "ETag" not in answer:
            raise BrokenError(
                f"{self._where}: PUT {key}: the answer is not that of an S3 server: it has no ETag"
            )
        date = _date_of(answer)
        return time.time() if date is None else date

    def get(
        self,
        key: str,
        start: int,
        stop: int,
        sink: Sink,
        deadline: Deadline,
    ) -> None:
        """See ``Transport.get``. The range, length and ETag of the answer are checked before its
        body is received."""
        # the last byte of an HTTP range is included
        wanted = f"bytes={start}-{stop - 1}"
        with self._request("GET", key, deadline):
            answer = self._client.get_object(**self._target, Key=key, Range=wanted)
        with closing(answer["Body"]) as body:
            self._check_range(answer, key, start, stop)
            etag = str(answer.get("ETag", ""))
            sink.expect(answer["ContentLength"], etag)
            with _cut_off(body, deadline):
                _receive_body(body, f"{self._where}: GET {key}", sink, deadline)

    def _check_range(
        self,
        answer: Any,
        key: str,
        start: int,
        stop: int,
    ) -> None:
        """Raise ``BrokenError`` unless the server sends the requested range, or its part before the
        end of the object: a proxy may ignore the range and send the whole object."""
        # for example "bytes 0-1023/5000", in which the last number is the size of the object
        found = answer.get("ContentRange", "")
        size = found.rpartition("/")[2]
        if not size.isdecimal():
            raise BrokenError(
                f"{self._where}: GET {key}: the server does not say which range it sends"
            )
        end = min(int(size), stop)
        is_range = found.startswith(f"bytes {start}-{end - 1}/")
        is_length = answer["ContentLength"] == end - start
        if not is_range or not is_length:
            raise BrokenError(
                f"{self._where}: GET {key}: the server sends {found} instead of {start}-{stop - 1}"
            )

    def head(self, key: str, deadline: Deadline) -> None:
        with self._request("HEAD", key, deadline):
            self._client.head_object(**self._target, Key=key)

    def list(
        self,
        prefix: str,
        page: str | None,
        deadline: Deadline,
        *,
        after: str = "",
    ) -> ListPage:
        """See ``Transport.list``."""
        more: dict[str, str] = {}
        # the token of a page continues behind ``after``, so only the first page needs it
        if page is not None:
            more["ContinuationToken"] = page
        elif after:
            more["StartAfter"] = after
        with self._request("LIST", prefix, deadline):
            answer = self._client.list_objects_v2(**self._target, Prefix=prefix, **more)
        with self._reading_list(f"LIST {prefix}"):
            objects: list[ObjectInfo] = []
            for entry in answer.get("Contents", ()):
                modified = entry["LastModified"].timestamp()
                objects.append(ObjectInfo(entry["Key"], entry["Size"], modified))
            next_page = None
            if answer["IsTruncated"]:
                next_page = answer["NextContinuationToken"]
        return ListPage(objects, next_page)

    @contextmanager
    def _reading_list(self, what: str) -> Iterator[None]:
        """Raise a BrokenError if the ``with`` statement does not find ``IsTruncated`` or a field of
        an entry in an answer: then the answer is no list. It may be a proxy's page with status 200.

        :param what: names the request.
        """
        try:
            yield
        except KeyError as error:
            raise BrokenError(
                f"{self._where}: {what}: the answer is no list: it has no {error}"
            ) from None

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        """See ``Transport.delete``. A single object is deleted with DELETE, several with one
        POST."""
        if len(keys) == 1:
            # S3 itself ignores a missing object; other servers may report it
            with (
                suppress(ObjectMissingError),
                self._request("DELETE", keys[0], deadline),
            ):
                self._client.delete_object(**self._target, Key=keys[0])
            return
        objects = [{"Key": key} for key in keys]
        # with ``Quiet``, the answer lists only the failures
        wanted = {"Objects": objects, "Quiet": True}
        what = f"{keys[0]} and {len(keys) - 1} more"
        with self._request("DELETE", what, deadline):
            answer = self._client.delete_objects(**self._target, Delete=wanted)
        self._check_deleted(answer.get("Errors", ()))

    def versions(
        self,
        prefix: str,
        after: ObjectVersion | None,
        deadline: Deadline,
    ) -> VersionPage:
        """See ``Transport.versions``. The markers of deletions are versions, too."""
        more: dict[str, str] = {}
        if after is not None:
            more = {"KeyMarker": after.key, "VersionIdMarker": after.version}
        with self._request("LIST versions of", prefix, deadline):
            answer = self._client.list_object_versions(
                **self._target, Prefix=prefix, **more
            )
        with self._reading_list(f"LIST versions of {prefix}"):
            found: list[ObjectVersion] = []
            for kind in ("Versions", "DeleteMarkers"):
                for entry in answer.get(kind, ()):
                    found.append(ObjectVersion(entry["Key"], entry["VersionId"]))
            last = None
            if answer["IsTruncated"]:
                last = ObjectVersion(
                    answer["NextKeyMarker"], answer["NextVersionIdMarker"]
                )
        return VersionPage(found, last)

    def delete_versions(
        self,
        versions: Sequence[ObjectVersion],
        deadline: Deadline,
    ) -> None:
        """See ``Transport.delete_versions``."""
        objects: list[dict[str, str]] = []
        for version in versions:
            objects.append({"Key": version.key, "VersionId": version.version})
        wanted = {"Objects": objects, "Quiet": True}
        what = f"versions of {versions[0].key} and {len(versions) - 1} more"
        with self._request("DELETE", what, deadline):
            answer = self._client.delete_objects(**self._target, Delete=wanted)
        self._check_deleted(answer.get("Errors", ()))

    def _check_deleted(self, errors: Sequence[Any]) -> None:
        """Raise an error if some keys of a batch were not deleted: a retryable one, if there is
        one, otherwise ``KeysRefusedError``. A missing object is no failure.

        :param errors: the failures that an answer lists.
        """
        refusals = []
        for entry in errors:
            what = f"{self._where}: DELETE {entry.get('Key')}"
            error = _error_of({"Error": entry}, what)
            if error.retryable:
                raise error
            if not isinstance(error, ObjectMissingError):
                refusals.append(error)
        if refusals:
            raise KeysRefusedError(
                f"{refusals[0]} ({len(refusals)} of the objects of this request)"
            )

    def setting(
        self,
        name: str,
        deadline: Deadline,
    ) -> Mapping[str, Any]:
        """See ``Transport.setting``."""
        try:
            with self._request("GET", name, deadline):
                # boto3 has a method for each operation; an old release may lack this one
                operation = getattr(self._client, name)
                return dict(operation(**self._target))
        except S3Error as error:
            # S3 answers with an error for some settings that were never set
            if error.code in _NOT_SET:
                return {}
            raise

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _request(
        self,
        verb: str,
        key: str,
        deadline: Deadline,
    ) -> Iterator[None]:
        """Ensure credentials for the request that the ``with`` statement makes, and translate its
        errors.

        :param verb: names the request in errors, together with ``key``.
        """
        what = f"{self._where}: {verb} {key}"
        with self._translated(f"{what}: search for credentials", deadline):
            self._credentials.ensure(deadline, what)
        with self._translated(what, deadline):
            yield

    @contextmanager
    def _translated(self, what: str, deadline: Deadline) -> Iterator[None]:
        """Translate exceptions within the ``with`` statement into ``S3Error``. After the deadline,
        raise ``LateError`` instead of beginning it.

        :param what: names the request in errors.
        """
        deadline.check(what)
        try:
            yield
        except StoreError:
            # this is an ``S3Error`` already, such as the ``LateError`` of a ``Body``
            raise
        except Exception as error:
            raise _as_s3_error(error, what, deadline) from None


class PlainBucket(BotoClient, PlainMedium):
    """Baseline of ``persistkv bench``: plain boto3, one object per ``write``, one request at a
    time, copied buffers."""

    def __init__(self, place: BucketPlace, options: S3Options) -> None:
        super().__init__(place, options)
        self._deadline_s = options.deadline_s
        self._written: list[str] = []
        """Keys of the objects that ``close`` deletes."""

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Upload the buffers, copied into one, as a new object."""
        key = f"{self._place.prefix}plain-{len(self._written)}"
        with self._request("PUT", key, Deadline(self._deadline_s)):
            self._client.put_object(
                Key=key, Body=b"".join(buffers), **self._target, **self._encryption
            )
        self._written.append(key)

    def read(self, buffers: Sequence[memoryview]) -> None:
        """Download the last object whole, and copy it into the buffers."""
        key = self._written[-1]
        with self._request("GET", key, Deadline(self._deadline_s)):
            answer = self._client.get_object(**self._target, Key=key)
            rest = memoryview(answer["Body"].read())
        for buffer in buffers:
            num_bytes = len(buffer)
            buffer[:] = rest[:num_bytes]
            rest = rest[num_bytes:]

    def close(self) -> None:
        try:
            if self._written:
                self.delete(self._written, Deadline(self._deadline_s))
                self._written = []
        finally:
            super().close()


def _without_none(**options: str | bool | None) -> dict[str, str | bool]:
    """Return the options that are not None: boto3 accepts no None for its parameters."""
    return {name: value for name, value in options.items() if value is not None}


def _is_loopback(host: str) -> bool:
    """Return whether a host's name or address is that of this machine; names other than
    ``localhost`` are not resolved."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _receive_body(
    body: Any,
    what: str,
    sink: Sink,
    deadline: Deadline,
) -> None:
    """Write a body to a sink; ``what`` names the request in errors. Exceptions of the sink pass
    unchanged."""
    while len(room := sink.room()):
        # translate errors of the read only: exceptions of the sink are not those of the request
        try:
            count = body.readinto(room[:_READ_BYTES])
        except Exception as error:
            raise _as_s3_error(error, what, deadline) from None
        if not count:
            raise BrokenError(f"{what}: the body broke off")
        sink.advance(count)


def _date_of(answer: Any) -> float | None:
    """Return the ``Date`` of an answer in seconds since the epoch; None if it has none that is
    valid."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    date = headers.get("date")
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


@contextmanager
def _cut_off(body: Any, deadline: Deadline) -> Iterator[None]:
    """Shut down the connection of ``body`` at the deadline: a socket timeout never ends a body that
    arrives slowly."""

    def cut() -> None:
        with suppress(Exception):  # the connection may have just ended
            body._raw_stream.shutdown()

    watchdog = threading.Timer(max(0.0, deadline.remaining), cut)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def _as_s3_error(
    error: Exception,
    what: str,
    deadline: Deadline,
) -> S3Error:
    """Translate an error of the request ``what``. The result has no cause, which could hold request
    headers."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    if isinstance(error, boto.ClientError):
        return _error_of(error.response, what)
    if deadline.remaining <= 0:
        # the deadline explains any error after it, such as that of a connection that ``_cut_off``
        # shut down
        return LateError(f"{what} took longer than {deadline.seconds:g} s")
    without_credentials = (
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.TokenRetrievalError,
    )
    if isinstance(error, without_credentials):
        return NoCredentialsError(
            f"{what}: no credentials; they come from the environment, a profile or a role"
        )
    broken = (
        boto.HTTPClientError,
        boto.ConnectionError,
        boto.IncompleteReadError,
        boto.ResponseStreamingError,
        ResponseParserError,
        OSError,
    )
    if isinstance(error, broken):
        return BrokenError(f"{what}: {_describe_cause(error)}")
    return RequestRefusedError(f"{what}: {_describe_cause(error)}")


def _describe_cause(error: BaseException) -> str:
    """Describe an error by its type and the system error that caused it. Its message may hold
    request headers."""
    name = type(error).__name__
    first = _first_cause(error)
    if not isinstance(first, OSError) or not first.strerror:
        return name
    code = errno.errorcode.get(first.errno or 0, type(first).__name__)
    return f"{name}: {first.strerror} ({code})"


def _first_cause(error: BaseException) -> BaseException:
    """Follow the causes of an error to the first one; return the error itself if it has none."""
    # the number of steps is bounded, because the chain may have a cycle
    for _ in range(_MOST_CAUSES):
        # botocore keeps some causes in ``kwargs``
        kept = getattr(error, "kwargs", {}).get("error")
        cause = kept or error.__cause__ or error.__context__
        if cause is None:
            break
        error = cause
    return error


def _error_of(answer: Any, what: str) -> S3Error:
    """Return the error that an answer means.

    :param answer: the response as botocore parses it.
    :param what: the operation, for the message.
    """
    code = str(answer.get("Error", {}).get("Code", ""))
    error = _new_error(answer, what, code)
    # kept for callers that tell errors of one class apart, such as ``setting``
    error.code = code
    return error


def _new_error(
    answer: Any,
    what: str,
    code: str,
) -> S3Error:
    """Return the error of an answer: its type decides whether the request is repeated, and whether
    the breaker counts it."""
    metadata = answer.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    text = f"{what}: {status} {code}"
    if code in _MISSING:
        return ObjectMissingError(text)
    if code in _BEYOND_END or status == 416:
        return RangeError(text)
    if code in _THROTTLES or status in (429, 503):
        throttled = ThrottledError(text)
        throttled.pause_s = max(throttled.pause_s, _requested_pause_s(metadata))
        return throttled
    if status >= 500 or code in _BROKEN or status in (408, 409):
        broken = BrokenError(text)
        # 409 means that another request on this object is in progress, so the server works
        broken.healthy = status == 409
        return broken
    return RequestRefusedError(text)


def _requested_pause_s(metadata: Any) -> float:
    """Return the pause that the ``Retry-After`` header of an answer requests, at most 30 s; 0 if it
    has no such header, or one with a date.

    :param metadata: status and headers, as botocore returns them.
    """
    headers = metadata.get("HTTPHeaders", {})
    requested = str(headers.get("retry-after", ""))
    return min(float(requested), _MOST_S) if requested.isdecimal() else 0.0


def make_client(options: S3Options) -> tuple[Any, DeferredCredentials]:
    """Return a client of boto3 and its credentials, which must be ensured before each request."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise MissingExtraError("boto3", "s3") from None

    # Without the option, bodies are signed only if the connection does not protect them. This is
    # known once there is a client: the first one does not sign them, and may be replaced below.
    is_undecided = options.unsigned_payload is None
    is_unsigned = options.unsigned_payload is not False
    try:
        core, credentials = _make_session(options)
        session = boto3.session.Session(botocore_session=core)
        client = _new_client(session, options, unsigned=is_unsigned)
        # only a client knows the endpoint, which may come from boto3's configuration
        is_encrypted = client.meta.endpoint_url.startswith("https:")
        if is_undecided and not is_encrypted:
            client.close()
            client = _new_client(session, options, unsigned=False)
    except (BotoCoreError, ValueError) as error:
        raise ConfigurationError(
            "s3 url", options.endpoint_url, f"options that boto3 accepts ({error})"
        ) from None
    return client, credentials


def _new_client(
    session: Any,
    options: S3Options,
    *,
    unsigned: bool,
) -> Any:
    """Return a client of a boto3 session.

    :param unsigned: whether signatures leave out the bodies of uploads.
    """
    from botocore.config import Config

    # signatures contain a region, also for servers that ignore it
    region = options.region or session.region_name or "us-east-1"
    return session.client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=region,
        config=Config(**_config_arguments(options, unsigned=unsigned)),
    )


def _config_arguments(
    options: S3Options,
    *,
    unsigned: bool,
) -> dict[str, Any]:
    """Return the arguments of botocore's ``Config`` for a client.

    :param unsigned: whether signatures leave out the bodies of uploads.
    """
    path_style = options.path_style
    # servers other than AWS rarely have a domain name for each bucket
    if path_style is None:
        path_style = options.endpoint_url is not None
    upload_checksum = "when_required"
    if options.checksum == "crc32":
        upload_checksum = "when_supported"
    s3 = {
        "payload_signing_enabled": not unsigned,
        "addressing_style": "path" if path_style else "auto",
    }
    # connections for the threads that read, for as many that write a commit at the same time, and
    # for requests that callers' threads make themselves
    num_connections = 2 * options.connections + _CALLERS
    return {
        "signature_version": "s3v4",
        "max_pool_connections": num_connections,
        "request_checksum_calculation": upload_checksum,
        # downloads need no checksums, because persistkv has its own
        "response_checksum_validation": "when_required",
        "s3": s3,
    }


def _make_session(options: S3Options) -> tuple[Any, DeferredCredentials]:
    """Return a session of botocore whose clients make one attempt per request, and the credentials
    of these clients."""
    import botocore.session
    from botocore.config import Config

    timeouts = Config(
        connect_timeout=min(_CONNECT_S, options.deadline_s),
        # a third of the deadline, so that a hang does not cost all of it
        read_timeout=max(1.0, options.deadline_s / 3),
        retries={"total_max_attempts": 1},
    )
    core = botocore.session.get_session()
    # set as the default, so that the timeouts also hold for the clients that botocore makes for STS
    core.set_default_client_config(timeouts)
    credentials = DeferredCredentials(
        core.get_component("credential_provider").load_credentials
    )
    # botocore asks this component for credentials when it makes a client: its own component would
    # search for them at once, without a deadline
    core.register_component(
        "credential_provider", SimpleNamespace(load_credentials=lambda: credentials)
    )
    return core, credentials
