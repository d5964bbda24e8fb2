"""S3 server for a test run: moto in this process, or the server that PERSISTKV_S3_ENDPOINT names
(make test-ceph)."""

from __future__ import annotations

import functools
import logging
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock
from urllib.parse import urlsplit

import boto3
import botocore.session
import pytest
from botocore.awsrequest import AWSPreparedRequest

from persistkv.config import StoreUrl
from persistkv_s3 import S3Backend
from persistkv_s3.blobs import S3Blobs
from persistkv_s3.client.boto import BotoClient
from persistkv_s3.options import BucketPlace, S3Options, parse_url
from tests.backends.s3.faults import FaultProxy
from tests.storage.host.conftest import hosted  # noqa: F401

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

ACCESS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "testsecret",
    "AWS_EC2_METADATA_DISABLED": "true",
}


PAGE_OF_MOTO = 100
"""Names per page of a listing. A real server has 1,000."""


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """URL of the server."""
    given = os.environ.get("PERSISTKV_S3_ENDPOINT")
    if given:
        yield given
        return
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    pages = {"MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE_OF_MOTO)}
    with mock.patch.dict(os.environ, pages):
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def proxy(endpoint: str) -> Iterator[FaultProxy]:
    """A proxy before the server that injects faults."""
    running = FaultProxy(urlsplit(endpoint).port or 80)
    yield running
    running.close()


@pytest.fixture(autouse=True)
def credentials(tmp_path: Path) -> Iterator[None]:
    """Credentials and a separate cache directory for each test, in the environment that child
    processes inherit."""
    with mock.patch.dict(
        os.environ, {**ACCESS, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def parsed_models() -> Iterator[None]:
    """Let all clients share the parsed description of S3: to parse it takes longer than most
    tests."""
    shared = functools.cache(botocore.session.create_loader)
    with mock.patch.object(botocore.session, "create_loader", shared):
        yield


@pytest.fixture(scope="session")
def raw_client(endpoint: str) -> Iterator[S3Client]:
    """boto3 client that bypasses the driver."""
    with mock.patch.dict(os.environ, ACCESS):
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    yield client
    client.close()


@pytest.fixture
def bucket(raw_client: S3Client) -> str:
    """A new bucket for this test."""
    name = f"test-{uuid.uuid4().hex}"
    raw_client.create_bucket(Bucket=name)
    return name


class CountingClient(BotoClient):
    """Client that counts requests and calls ``before`` with the verb and URL of each request."""

    def __init__(self, place: BucketPlace, options: S3Options) -> None:
        super().__init__(place, options)
        self.counts: Counter[str] = Counter()
        self.sent: list[tuple[str, dict[str, str]]] = []
        """Method and headers of each request."""
        self.before: Callable[[str, str], None] = lambda verb, key: None
        self._client.meta.events.register("before-send.s3", self._count)

    def _count(self, request: AWSPreparedRequest, **_: object) -> None:
        self.counts[request.method] += 1
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            headers[name] = value.decode() if isinstance(value, bytes) else value
        self.sent.append((request.method, headers))
        self.before(request.method, request.url)

    def take(self) -> dict[str, int]:
        """Return the number of requests by verb since the last call."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)


class Handle(NamedTuple):
    """A backend and its client."""

    backend: S3Backend
    client: CountingClient


Opener = Callable[..., Handle]


@pytest.fixture
def open_store(endpoint: str, bucket: str) -> Iterator[Opener]:
    """Open handles on one store, whose background work the test runs. Close the open handles after
    the test."""
    opened: list[S3Backend] = []

    def open_store(
        options: str = "refresh=0s",
        *,
        port: int | None = None,
        bucket: str = bucket,
        read_only: bool = False,
    ) -> Handle:
        where = endpoint if port is None else f"http://127.0.0.1:{port}"
        url = StoreUrl.parse(f"s3://{bucket}/store?endpoint_url={where}&{options}")
        shared, own = S3Backend.split_options(url)
        place, parsed = parse_url(url, own)
        client = CountingClient(place, parsed)
        blobs = S3Blobs(place, parsed, client)
        opened.append(
            S3Backend(blobs, shared, str(place), read_only=read_only, background=False)
        )
        client.take()
        return Handle(opened[-1], client)

    yield open_store
    for backend in opened:
        backend.close()
