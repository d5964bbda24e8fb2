"""``S3Blobs`` on a server, through a proxy that breaks connections, and against scripted
answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.blobs import BlobMissingError, RefusedError, UnavailableError
from persistkv_s3.blobs import S3Blobs
from persistkv_s3.options import parse_url
from tests.backends.s3.conftest import CountingClient
from tests.backends.s3.faults import FaultProxy

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_MIB = 1 << 20
_YEAR_S = 365 * 86_400.0
_SLACK_S = 20.0  # the machine that runs the tests may be slow

CONTENT = (bytes(range(251)) * (4 * _MIB // 251 + 1))[: 4 * _MIB]


class Handle(S3Blobs):
    """A medium whose requests are counted."""

    def __init__(self, url: str) -> None:
        place, options = parse_url(StoreUrl.parse(url))
        self.client = CountingClient(place, options)
        super().__init__(place, options, self.client)


Opener = Callable[..., Handle]


@pytest.fixture
def open_blobs(endpoint: str, bucket: str) -> Iterator[Opener]:
    """Open media on one place, which are closed after the test."""
    opened: list[Handle] = []

    def open_blobs(options: str = "deadline=20s", *, port: int | None = None) -> Handle:
        where = endpoint if port is None else f"http://127.0.0.1:{port}"
        opened.append(Handle(f"s3://{bucket}/store?endpoint_url={where}&{options}"))
        return opened[-1]

    yield open_blobs
    for blobs in opened:
        blobs.close()


class Script:
    """A server that answers each request as ``answer`` says: with status, headers and body."""

    def __init__(self) -> None:
        self.answer: Callable[[str, str], tuple[int, dict[str, str], bytes]]
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request."""
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                script.requests.append((self.command, self.path))
                status, headers, body = script.answer(self.command, self.path)
                self.send_response_only(status)
                for name, value in {
                    "Content-Length": str(len(body)),
                    **headers,
                }.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"s3://bucket/store?endpoint_url=http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def script() -> Iterator[Script]:
    with closing(Script()) as script:
        yield script


def error_body(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code></Error>'.encode()


def read(
    blobs: S3Blobs,
    name: str,
    offset: int = 0,
    length: int = len(CONTENT),
    step: int = _MIB,
) -> bytes:
    """Return up to ``length`` bytes of a blob, read into buffers of ``step`` bytes."""
    found = bytearray(length)
    views = [
        memoryview(found)[start : start + step] for start in range(0, length, step)
    ]
    count = blobs.read(name, offset, length, views)
    return bytes(found[:count])


# put


def test_put_writes_object_below_prefix(
    open_blobs: Opener,
    raw_client: S3Client,
    bucket: str,
) -> None:
    open_blobs().put("packs/a-1", [b"one", memoryview(b"two")])
    assert (
        raw_client.get_object(Bucket=bucket, Key="store/packs/a-1")["Body"].read()
        == b"onetwo"
    )


def test_put_sends_one_request_without_condition(open_blobs: Opener) -> None:
    blobs = open_blobs()
    blobs.put("a", [b"data"])
    blobs.put("a", [b"other"])
    assert [method for method, _ in blobs.client.sent] == ["PUT", "PUT"]
    assert not [
        headers
        for _, headers in blobs.client.sent
        if {"If-Match", "If-None-Match"} & set(headers)
    ]
    assert blobs.requests() == {"PUT": 2}


def test_put_returns_time_after_modification(open_blobs: Opener) -> None:
    blobs = open_blobs()
    times = [blobs.put("a", [b"data"]) for _ in range(3)]
    modified = next(blobs.list("")).time
    assert modified <= times[-1] <= modified + _SLACK_S


@pytest.mark.parametrize("offset_s", [_YEAR_S, -_YEAR_S])
def test_put_returns_date_of_its_own_answer(script: Script, offset_s: float) -> None:
    """Other answers have other dates: nothing but the answer to the upload counts."""
    date = float(int(time.time() + offset_s))
    other = {"Date": formatdate(0.0, usegmt=True)}

    def answer(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if method == "PUT":
            return 200, {"Date": formatdate(date, usegmt=True), "ETag": '"e"'}, b""
        return 404, other, error_body("NoSuchKey")

    script.answer = answer
    with closing(Handle(script.url)) as blobs:
        with pytest.raises(BlobMissingError):
            read(blobs, "a")
        assert blobs.put("a", [b"data"]) == date + 1.0


def test_put_answer_without_date_returns_local_time(script: Script) -> None:
    script.answer = lambda method, path: (200, {"ETag": '"e"'}, b"")
    with closing(Handle(script.url)) as blobs:
        begin = time.time()
        assert begin + 1.0 <= blobs.put("a", [b"data"]) <= time.time() + 1.0


def test_put_answer_of_no_s3_server_raises_unavailable(script: Script) -> None:
    script.answer = lambda method, path: (200, {}, b"<html>please log in</html>")
    with (
        closing(Handle(f"{script.url}&deadline=1s")) as blobs,
        pytest.raises(UnavailableError, match="ETag"),
    ):
        blobs.put("a", [b"data"])


def test_put_lost_reply_is_repeated_with_same_bytes(
    open_blobs: Opener,
    proxy: FaultProxy,
) -> None:
    blobs = open_blobs(port=proxy.port)
    proxy.set("lose_reply1")
    blobs.put("a", [CONTENT[:_MIB], CONTENT[_MIB:]])
    assert blobs.client.counts["PUT"] == 2
    assert read(open_blobs(), "a") == CONTENT


@pytest.mark.parametrize(
    "fault", ["lose_reply", "hang_reply", "hang", "rst", "s503 1000"]
)
def test_put_lasting_fault_raises_unavailable_by_deadline(
    open_blobs: Opener,
    proxy: FaultProxy,
    fault: str,
) -> None:
    blobs = open_blobs("deadline=3s", port=proxy.port)
    proxy.set(fault)
    begin = time.monotonic()
    with pytest.raises(UnavailableError):
        blobs.put("a", [b"data"])
    assert time.monotonic() - begin < 3 + 1 + _SLACK_S
    proxy.set("ok")


def test_put_slow_down_is_repeated(open_blobs: Opener, proxy: FaultProxy) -> None:
    blobs = open_blobs(port=proxy.port)
    proxy.set("s503 2")
    blobs.put("a", [b"data"])
    assert read(open_blobs(), "a") == b"data"


# read


def test_read_sends_one_request_for_its_range(open_blobs: Opener) -> None:
    blobs = open_blobs()
    blobs.put("a", [CONTENT])
    blobs.client.sent.clear()
    assert read(blobs, "a", 10, 1000, step=7) == CONTENT[10:1010]
    [(method, headers)] = blobs.client.sent
    assert (method, headers["Range"]) == ("GET", "bytes=10-1009")


def test_read_takes_buffer_when_previous_is_full(open_blobs: Opener) -> None:
    blobs = open_blobs()
    blobs.put("a", [CONTENT])
    exhausted = []

    def buffers() -> Iterator[memoryview]:
        end = 5
        for length in (1, 0, 300_000, 0, 4096):
            buffer = bytearray(length)
            yield memoryview(buffer)
            assert buffer == CONTENT[end : end + length]
            end += length
        exhausted.append(end)

    assert blobs.read("a", 5, 304_097, buffers()) == 304_097
    assert exhausted == [5 + 304_097]


@pytest.mark.parametrize(
    ("offset", "step", "expected"),
    [(0, 3, 10), (0, 5, 10), (4, 100, 6), (9, 1, 1), (10, 4, 0), (1 << 40, 4, 0)],
)
def test_read_short_blob_returns_count(
    open_blobs: Opener,
    offset: int,
    step: int,
    expected: int,
) -> None:
    blobs = open_blobs()
    blobs.put("a", [b"0123456789"])
    assert read(blobs, "a", offset, 100, step) == b"0123456789"[offset:]
    assert len(b"0123456789"[offset:]) == expected
    assert blobs.client.counts["GET"] == 1
    assert blobs.state() == "closed"


def test_read_empty_blob_returns_zero(open_blobs: Opener) -> None:
    blobs = open_blobs()
    blobs.put("a", [])
    assert read(blobs, "a", 0, 10) == b""


def test_read_no_bytes_checks_that_blob_exists(open_blobs: Opener) -> None:
    blobs = open_blobs()
    blobs.put("a", [b"data"])
    assert blobs.read("a", 2, 0, []) == 0
    with pytest.raises(BlobMissingError):
        blobs.read("b", 2, 0, [])


@pytest.mark.parametrize("length", [9, 11])
def test_read_length_unlike_buffers_raises_value_error(
    open_blobs: Opener,
    length: int,
) -> None:
    blobs = open_blobs()
    blobs.put("a", [CONTENT])
    with pytest.raises(ValueError, match="buffers hold"):
        blobs.read("a", 0, length, [memoryview(bytearray(10))])


def test_read_exception_of_iterable_passes_and_leaves_breaker_closed(
    open_blobs: Opener,
) -> None:
    blobs = open_blobs()
    blobs.put("a", [CONTENT])

    def buffers() -> Iterator[memoryview]:
        yield memoryview(bytearray(4096))
        raise OSError("raised by the caller")

    for _ in range(40):
        with pytest.raises(OSError, match="raised by the caller"):
            blobs.read("a", 0, len(CONTENT), buffers())
    assert blobs.state() == "closed"
    assert read(blobs, "a") == CONTENT


def test_read_reset_body_resumes_at_missing_bytes(
    open_blobs: Opener,
    proxy: FaultProxy,
) -> None:
    blobs = open_blobs(port=proxy.port)
    blobs.put("a", [CONTENT])
    proxy.set("rst_after 1500000")
    blobs.client.sent.clear()
    taken = []

    def buffers() -> Iterator[memoryview]:
        for start in range(0, len(CONTENT), 500_000):
            buffer = bytearray(min(500_000, len(CONTENT) - start))
            yield memoryview(buffer)
            assert buffer == CONTENT[start : start + len(buffer)]
            taken.append(start)

    assert blobs.read("a", 0, len(CONTENT), buffers()) == len(CONTENT)
    assert taken == list(range(0, len(CONTENT), 500_000))
    starts = [
        int(headers["Range"].split("=")[1].split("-")[0])
        for _, headers in blobs.client.sent
    ]
    assert len(set(starts)) >= 2
    assert starts == sorted(starts), (
        "each attempt begins where the one before broke off"
    )


def test_read_reset_body_of_short_blob_returns_count(
    open_blobs: Opener,
    proxy: FaultProxy,
) -> None:
    blobs = open_blobs(port=proxy.port)
    blobs.put("a", [CONTENT])
    proxy.set("rst_after 1500000")
    assert read(blobs, "a", 100, len(CONTENT) + 1000) == CONTENT[100:]


@pytest.mark.parametrize("length", [len(CONTENT), len(CONTENT) - 1, 10])
def test_read_blob_replaced_between_attempts_raises_instead_of_mixing(
    open_blobs: Opener,
    proxy: FaultProxy,
    length: int,
) -> None:
    blobs, other = open_blobs(port=proxy.port), open_blobs()
    blobs.put("latest", [CONTENT])
    proxy.set("rst_after 1500000")

    taken: list[bytearray] = []

    def buffers() -> Iterator[memoryview]:
        for _ in range(0, len(CONTENT), 65_536):
            taken.append(bytearray(65_536))
            yield memoryview(taken[-1])

    def replace(verb: str, url: str) -> None:
        if verb == "GET" and len(taken) > 1:
            other.put("latest", [bytes(length)])

    blobs.client.before = replace
    with pytest.raises(UnavailableError):
        blobs.read("latest", 0, len(CONTENT), buffers())
    assert CONTENT.startswith(b"".join(taken[:-1])), "no byte of the new object"
    assert blobs.state() == "closed"


def test_read_trickling_body_raises_by_deadline(
    open_blobs: Opener,
    proxy: FaultProxy,
) -> None:
    blobs = open_blobs("deadline=3s", port=proxy.port)
    open_blobs().put("a", [CONTENT])
    proxy.set("rate 100000")
    begin = time.monotonic()
    with pytest.raises(UnavailableError):
        read(blobs, "a")
    assert time.monotonic() - begin < 3 + _SLACK_S, "at this rate, the body takes 40 s"
    proxy.set("ok")


def test_read_body_that_ends_early_is_repeated(script: Script) -> None:
    """The server closes the connection, as a restarted proxy does."""

    def answer(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        start = 0 if len(script.requests) == 1 else 40
        end = 40 if len(script.requests) == 1 else 100
        headers = {
            "ETag": '"e"',
            "Content-Range": f"bytes {start}-99/1000",
            "Connection": "close",
        }
        return 206, {**headers, "Content-Length": str(100 - start)}, CONTENT[start:end]

    script.answer = answer
    with closing(Handle(script.url)) as blobs:
        assert read(blobs, "a", 0, 100, 7) == CONTENT[:100]
        assert len(script.requests) == 2


@pytest.mark.parametrize(
    ("content_range", "num_bytes", "error"),
    [
        ("bytes 0-49/1000", 50, "0-49"),
        # ``str.isdigit`` accepts a superscript two, ``int`` does not
        ("bytes 0-99/\u00b2", 100, "range"),
    ],
)
def test_read_answer_with_other_range_raises_unavailable(
    script: Script,
    content_range: str,
    num_bytes: int,
    error: str,
) -> None:
    """A part of the range is no short blob, and a size may be no number."""
    headers = {"ETag": '"e"', "Content-Range": content_range}
    script.answer = lambda method, path: (206, headers, CONTENT[:num_bytes])
    with (
        closing(Handle(f"{script.url}&deadline=1s")) as blobs,
        pytest.raises(UnavailableError, match=error),
    ):
        read(blobs, "a", 0, 100)


def test_throttled_answer_with_pause_that_is_no_number_raises_unavailable(
    script: Script,
) -> None:
    script.answer = lambda method, path: (503, {"Retry-After": "\u00b2"}, b"")
    with (
        closing(Handle(f"{script.url}&deadline=1s")) as blobs,
        pytest.raises(UnavailableError, match="503"),
    ):
        read(blobs, "a", 0, 100)


@pytest.mark.parametrize("offset", [0, 50])
def test_read_server_without_ranges_raises_unavailable(
    script: Script,
    offset: int,
) -> None:
    """The answer could also be the page of a proxy."""
    script.answer = lambda method, path: (200, {"ETag": '"e"'}, CONTENT[:100])
    with (
        closing(Handle(f"{script.url}&deadline=1s")) as blobs,
        pytest.raises(UnavailableError, match="range"),
    ):
        read(blobs, "a", offset, 200)


def test_read_missing_blobs_keep_breaker_closed(open_blobs: Opener) -> None:
    blobs = open_blobs()
    for _ in range(30):
        with pytest.raises(BlobMissingError):
            read(blobs, "a")
    assert blobs.state() == "closed"
    assert blobs.client.counts["GET"] == 30


# delete


def test_delete_sends_requests_of_1000_names(
    open_blobs: Opener,
    raw_client: S3Client,
    bucket: str,
) -> None:
    blobs = open_blobs("deadline=60s")
    names = [f"packs/{number:04}" for number in range(2001)]
    for name in (names[0], names[1500], names[2000]):
        blobs.put(name, [b"data"])
    blobs.put("packs/other", [b"data"])
    blobs.client.take()
    blobs.delete(names)
    assert blobs.client.take() == {"POST": 2, "DELETE": 1}
    blobs.delete(names[-1:])
    blobs.delete([])
    assert [
        entry["Key"] for entry in raw_client.list_objects_v2(Bucket=bucket)["Contents"]
    ] == ["store/packs/other"]


def test_delete_refused_key_raises_after_other_batches(script: Script) -> None:
    """The first batch has a locked object; the second one is deleted, too."""
    locked = "<Error><Key>store/5</Key><Code>AccessDenied</Code></Error>"
    missing = "<Error><Key>store/6</Key><Code>NoSuchKey</Code></Error>"
    bodies = [
        f"<DeleteResult>{missing}{locked}</DeleteResult>",
        "<DeleteResult></DeleteResult>",
    ]
    script.answer = lambda method, path: (
        200,
        {},
        bodies[len(script.requests) - 1].encode(),
    )
    with closing(Handle(script.url)) as blobs:
        with pytest.raises(RefusedError, match="store/5: 0 AccessDenied"):
            blobs.delete([str(number) for number in range(1500)])
        assert [method for method, _ in script.requests] == ["POST", "POST"]
        assert blobs.state() == "closed"


def test_delete_key_that_fails_is_repeated(script: Script) -> None:
    failed = "<Error><Key>store/5</Key><Code>InternalError</Code></Error>"
    bodies = [f"<DeleteResult>{failed}</DeleteResult>", "<DeleteResult></DeleteResult>"]
    script.answer = lambda method, path: (
        200,
        {},
        bodies[len(script.requests) - 1].encode(),
    )
    with closing(Handle(script.url)) as blobs:
        blobs.delete(["1", "5"])
    assert len(script.requests) == 2


def test_delete_batch_refused_deletes_singly(script: Script) -> None:
    """Ceph refuses requests with several keys unless the whole bucket may be deleted; one object is
    forbidden."""

    def answer(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if method == "POST" or path.endswith("/3"):
            return 403, {}, error_body("AccessDenied")
        return 204, {}, b""

    script.answer = answer
    with closing(Handle(script.url)) as blobs:
        with pytest.raises(RefusedError, match="store/3"):
            blobs.delete([str(number) for number in range(20)])
        assert [method for method, _ in script.requests] == ["POST", *["DELETE"] * 20]
        assert blobs.state() == "closed"


def test_delete_without_permission_stops_early(script: Script) -> None:
    script.answer = lambda method, path: (403, {}, error_body("AccessDenied"))
    with closing(Handle(script.url)) as blobs, pytest.raises(RefusedError, match="403"):
        blobs.delete([str(number) for number in range(1000)])
    assert len(script.requests) < 20


# list


def test_list_after_name_begins_there(
    open_blobs: Opener,
    raw_client: S3Client,
    bucket: str,
) -> None:
    names = [f"index/{number:04}" for number in range(30)]
    for name in names:
        raw_client.put_object(Bucket=bucket, Key=f"store/{name}", Body=b"data")
    blobs = open_blobs()
    assert [info.name for info in blobs.list("index/")] == names
    assert blobs.client.take() == {"GET": 1}
    assert [info.name for info in blobs.list("index/", names[10])] == names[11:]
    assert blobs.client.take() == {"GET": 1}
    assert [info.name for info in blobs.list("index/", "a")] == names
    assert list(blobs.list("index/", "z")) == []


def test_list_objects_without_name_are_skipped(
    open_blobs: Opener,
    raw_client: S3Client,
    bucket: str,
) -> None:
    for key in (
        "store/a/b",
        "store/a/",
        "store/A",
        "store/a//b",
        "store/a.b",
        "store/é",
        "other/a",
        "store-a",
    ):
        raw_client.put_object(Bucket=bucket, Key=key, Body=b"12345")
    [info] = open_blobs().list("")
    assert (info.name, info.size) == ("a/b", 5)
    assert abs(info.time - time.time()) < _SLACK_S


@pytest.mark.parametrize(
    "first", ["", "<ListBucketResult><Contents>", "<html>please log in</html>", "busy"]
)
def test_list_garbled_answer_is_repeated(script: Script, first: str) -> None:
    entry = "<Contents><Key>store/a</Key><Size>3</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
    whole = (
        f"<ListBucketResult><IsTruncated>false</IsTruncated>{entry}</ListBucketResult>"
    )
    script.answer = lambda method, path: (
        200,
        {},
        (first if len(script.requests) == 1 else whole).encode(),
    )
    with closing(Handle(script.url)) as blobs:
        assert [info.name for info in blobs.list("")] == ["a"]
    assert len(script.requests) == 2


@pytest.mark.parametrize("first", ["", "<html>please log in</html>"])
def test_erase_garbled_list_of_versions_is_repeated(script: Script, first: str) -> None:
    """A page of a proxy, taken for an empty list, would leave old versions, and report success."""
    version = "<Version><Key>store/a</Key><VersionId>v1</VersionId></Version>"
    whole = (
        f"<ListVersionsResult><IsTruncated>false</IsTruncated>{version}"
        f"</ListVersionsResult>"
    )
    lists: list[str] = []

    def answer(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if method == "DELETE":
            return 204, {}, b""
        if method == "POST":
            return 200, {}, b"<DeleteResult/>"
        lists.append(path)
        return 200, {}, (first if len(lists) == 1 else whole).encode()

    script.answer = answer
    with closing(Handle(script.url)) as blobs:
        assert blobs.erase("", ["a"]) == []
    assert len(lists) == 2
    assert "POST" in [method for method, _ in script.requests], "the version is deleted"


def test_list_fault_raises_unavailable(open_blobs: Opener, proxy: FaultProxy) -> None:
    blobs = open_blobs("deadline=1s", port=proxy.port)
    proxy.set("rst")
    with pytest.raises(UnavailableError):
        next(blobs.list(""))


# errors and the breaker


def test_refused_writes_raise_and_keep_breaker_closed(
    open_blobs: Opener,
    proxy: FaultProxy,
) -> None:
    blobs = open_blobs(port=proxy.port)
    open_blobs().put("a", [b"data"])
    proxy.set("readonly")
    for _ in range(30):
        with pytest.raises(RefusedError, match="403"):
            blobs.put("b", [b"data"])
    with pytest.raises(RefusedError, match="403"):
        blobs.delete(["a"])
    assert blobs.state() == "closed"
    assert read(blobs, "a") == b"data"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "AccessDenied"),
        (403, "InvalidObjectState"),
        (400, "KMS.DisabledException"),
        (404, "NoSuchBucket"),
    ],
)
def test_refused_reads_keep_breaker_closed(
    script: Script,
    status: int,
    code: str,
) -> None:
    script.answer = lambda method, path: (status, {}, error_body(code))
    with closing(Handle(script.url)) as blobs:
        for _ in range(30):
            with pytest.raises(RefusedError, match=f"{status} {code}"):
                read(blobs, "a")
        assert blobs.state() == "closed"
    assert len(script.requests) == 30


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_failing_server_opens_breaker(script: Script, status: int) -> None:
    script.answer = lambda method, path: (status, {}, b"")
    with closing(Handle(f"{script.url}&deadline=1s")) as blobs:
        for _ in range(5):
            with pytest.raises(UnavailableError):
                read(blobs, "a")
        assert blobs.state() == "open"
        sent = len(script.requests)
        with pytest.raises(UnavailableError, match="no request is sent"):
            blobs.put("a", [b"data"])
        assert len(script.requests) == sent


def test_deleted_bucket_raises_refused_instead_of_missing(
    open_blobs: Opener,
    raw_client: S3Client,
    bucket: str,
) -> None:
    blobs = open_blobs()
    raw_client.delete_bucket(Bucket=bucket)
    for call in (
        lambda: read(blobs, "a"),
        lambda: blobs.put("a", [b"data"]),
        lambda: list(blobs.list("")),
    ):
        with pytest.raises(RefusedError, match="NoSuchBucket"):
            call()


def test_calls_start_no_lasting_threads(open_blobs: Opener) -> None:
    blobs = open_blobs("connections=64")
    blobs.put("a", [b"data"])
    read(blobs, "a")
    assert not [
        thread.name for thread in threading.enumerate() if "persistkv-s3" in thread.name
    ]
    assert blobs.connections == 64


def test_methods_after_close_raise(open_blobs: Opener) -> None:
    blobs = open_blobs()
    blobs.put("a", [b"data"])
    listing = blobs.list("")
    blobs.close()
    blobs.close()
    calls: list[Callable[[], object]] = [
        lambda: blobs.put("a", [b"data"]),
        lambda: read(blobs, "a"),
        lambda: blobs.delete(["a"]),
        lambda: blobs.list(""),
        lambda: next(listing),
    ]
    for call in calls:
        with pytest.raises(RefusedError, match="closed"):
            call()
    assert blobs.client.take() == {"PUT": 1}
