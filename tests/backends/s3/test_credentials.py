"""Credentials whose source hangs, fails or renews them: no call waits past its deadline, and valid
ones are used."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from botocore.credentials import Credentials, DeferredRefreshableCredentials

from persistkv.config import StoreUrl
from persistkv.errors import StoreError
from persistkv.storage.blobs import RefusedError, UnavailableError
from persistkv_s3.blobs import S3Blobs
from persistkv_s3.client.credentials import DeferredCredentials
from persistkv_s3.client.transport import Deadline, LateError, NoCredentialsError
from persistkv_s3.options import parse_url

_DEADLINE_S = 2.0
_SLACK_S = 15.0  # the machine that runs the tests may be slow


@pytest.fixture
def hung_port() -> Iterator[int]:
    """Port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def open_blobs(endpoint: str, bucket: str, deadline: str = "30s") -> S3Blobs:
    url = f"s3://{bucket}/store?endpoint_url={endpoint}&deadline={deadline}"
    return S3Blobs(*parse_url(StoreUrl.parse(url)))


def use_hung_sts(monkeypatch: pytest.MonkeyPatch, directory: Path, port: int) -> None:
    token = directory / "token"
    token.write_text("token of the pod")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/kv-writer")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{port}")


def use_hung_metadata_server(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    port: int,
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{port}/")
    monkeypatch.setenv("AWS_METADATA_SERVICE_TIMEOUT", "60")


def use_hung_container_server(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    port: int,
) -> None:
    monkeypatch.setenv(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{port}/credentials"
    )


def use_hung_program(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    port: int,
) -> None:
    program = f"{sys.executable} -c 'import time; time.sleep(20)'"
    (directory / "config").write_text(f"[default]\ncredential_process = {program}\n")


@pytest.mark.parametrize(
    "use_hung_source",
    [
        use_hung_sts,
        use_hung_metadata_server,
        use_hung_container_server,
        use_hung_program,
    ],
)
@pytest.mark.usefixtures("no_credentials")
def test_calls_hung_source_of_credentials_raise_by_deadline(
    endpoint: str,
    hung_port: int,
    use_hung_source: Callable[[pytest.MonkeyPatch, Path, int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    use_hung_source(monkeypatch, tmp_path, hung_port)
    begin = time.monotonic()
    with closing(open_blobs(endpoint, "bucket", f"{_DEADLINE_S:g}s")) as blobs:
        with pytest.raises(UnavailableError):
            blobs.put("a", [b"data"])
        with pytest.raises(UnavailableError):
            list(blobs.list(""))
        assert not blobs.requests(), "nothing was sent to the bucket"
    assert time.monotonic() - begin < 2 * (_DEADLINE_S + 1) + _SLACK_S


@pytest.mark.usefixtures("no_credentials")
def test_calls_hung_sts_open_breaker(
    endpoint: str,
    hung_port: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    use_hung_sts(monkeypatch, tmp_path, hung_port)
    with closing(open_blobs(endpoint, "bucket", "1s")) as blobs:
        for _ in range(6):
            with pytest.raises(UnavailableError):
                blobs.put("a", [b"data"])
        assert blobs.state() != "closed"


@pytest.mark.usefixtures("no_credentials")
def test_calls_without_credentials_raise_refused(endpoint: str) -> None:
    with (
        closing(open_blobs(endpoint, "bucket")) as blobs,
        pytest.raises(RefusedError, match="no credentials"),
    ):
        blobs.delete(["a", "b", "c"])


@pytest.mark.usefixtures("bucket", "no_credentials")
def test_credentials_that_appear_later_are_found(
    endpoint: str,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(open_blobs(endpoint, bucket)) as blobs:
        with pytest.raises(RefusedError):
            blobs.put("a", [b"data"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
        blobs.put("a", [b"data"])


class Source:
    """A source of credentials that expire. It can hang or fail."""

    def __init__(self) -> None:
        self.lifetime_s = 3600.0
        self.searches = 0
        self.answers = threading.Event()
        """Cleared: searches hang."""
        self.answers.set()
        self.error: Exception | None = None

    def find(self) -> Credentials:
        self.searches += 1
        number = self.searches
        self.answers.wait(60)
        if self.error is not None:
            raise self.error
        expiry = datetime.now(UTC) + timedelta(seconds=self.lifetime_s)
        answer = {
            "access_key": f"id-{number}",
            "secret_key": "secret",
            "token": "token",
            "expiry_time": expiry.isoformat(),
        }
        return DeferredRefreshableCredentials(lambda: answer, "test")


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.answers.set()


def access_key(credentials: DeferredCredentials) -> str:
    credentials.ensure(Deadline(_SLACK_S), "test")
    return str(credentials.get_frozen_credentials().access_key)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _SLACK_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_credentials_are_searched_once_for_many_threads(source: Source) -> None:
    credentials = DeferredCredentials(source.find)
    source.answers.clear()
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(access_key(credentials)))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    source.answers.set()
    for thread in threads:
        thread.join()
    assert (found, source.searches) == (["id-1"] * 16, 1)


def test_credentials_without_expiry_are_searched_once() -> None:
    searches: list[None] = []

    def find() -> Credentials:
        searches.append(None)
        return Credentials("id", "secret")

    credentials = DeferredCredentials(find)
    assert {access_key(credentials) for _ in range(5)} == {"id"}
    assert len(searches) == 1


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches follow each other at once."""
    monkeypatch.setattr("persistkv_s3.client.credentials.PAUSE_S", 0.0)


@pytest.mark.usefixtures("no_pause")
def test_expiring_credentials_are_used_while_source_hangs(source: Source) -> None:
    credentials = DeferredCredentials(source.find)
    source.lifetime_s = 300
    assert access_key(credentials) == "id-1"
    source.answers.clear()
    begin = time.monotonic()
    for _ in range(100):
        assert access_key(credentials) == "id-1"
    assert time.monotonic() - begin < _SLACK_S / 2
    assert source.searches == 2, "one search at a time"

    source.lifetime_s = 3600
    source.answers.set()
    wait_for(lambda: access_key(credentials) == "id-2")
    assert source.searches == 2


def test_expiring_credentials_are_renewed_at_most_once_a_minute(source: Source) -> None:
    credentials = DeferredCredentials(source.find)
    source.lifetime_s = 300
    assert {access_key(credentials) for _ in range(100)} == {"id-1"}
    assert source.searches == 1


@pytest.mark.usefixtures("no_pause")
def test_expiring_credentials_are_used_while_source_fails(
    source: Source,
    caplog: pytest.LogCaptureFixture,
) -> None:
    credentials = DeferredCredentials(source.find)
    source.lifetime_s = 300
    assert access_key(credentials) == "id-1"
    source.error = OSError("secret text")
    for _ in range(10):
        assert access_key(credentials) == "id-1"
    wait_for(lambda: "cannot be renewed (OSError)" in caplog.text)
    assert "secret text" not in caplog.text


def test_expired_credentials_are_not_used(source: Source) -> None:
    credentials = DeferredCredentials(source.find)
    source.lifetime_s = 30
    assert access_key(credentials) == "id-1"
    source.lifetime_s = 3600
    assert access_key(credentials) == "id-2"

    source.lifetime_s = 30
    other = DeferredCredentials(source.find)
    access_key(other)
    source.answers.clear()
    with pytest.raises(LateError, match="source of credentials"):
        other.ensure(Deadline(0.1), "test")


def test_abandoned_search_is_replaced(
    source: Source,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    credentials = DeferredCredentials(source.find)
    source.answers.clear()
    for _ in range(5):
        with pytest.raises(LateError):
            credentials.ensure(Deadline(0.01), "test")
    assert source.searches == 1
    monkeypatch.setattr("persistkv_s3.client.credentials.ABANDON_S", 0.0)
    with pytest.raises(LateError):
        credentials.ensure(Deadline(0.01), "test")
    assert source.searches == 2


def test_failed_search_is_repeated_by_next_call(source: Source) -> None:
    credentials = DeferredCredentials(source.find)
    source.error = OSError("no route")
    for _ in range(2):
        with pytest.raises(OSError, match="no route"):
            credentials.ensure(Deadline(_SLACK_S), "test")
    source.error = None
    assert access_key(credentials) == "id-3"


def test_missing_credentials_raise_store_error() -> None:
    with pytest.raises(NoCredentialsError, match="PUT a: no credentials") as caught:
        DeferredCredentials(lambda: None).ensure(Deadline(_SLACK_S), "PUT a")
    assert isinstance(caught.value, StoreError)
