"""A server for a test run: moto, in this process; or, where PERSISTKV_S3_ENDPOINT is set, a real one (make test-ceph).
A server for a test run: moto, in this process; or, where PERSISTKV_S3_ENDPOINT is set, a real one (make test-ceph)."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

boto3 = pytest.importorskip("boto3")

ACCESS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """Where the server is."""
    given = os.environ.get("PERSISTKV_S3_ENDPOINT")
    if given:
        yield given
        return
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def credentials() -> Iterator[None]:
    """In the environment, as users have them; child processes inherit it."""
    with mock.patch.dict(os.environ, ACCESS):
        yield


@pytest.fixture
def raw_client(endpoint: str) -> Iterator[Any]:
    """boto3, without the driver."""
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    yield client
    client.close()


@pytest.fixture
def bucket(raw_client: Any) -> str:
    """A bucket of the test's own."""
    name = f"test-{uuid.uuid4().hex}"
    raw_client.create_bucket(Bucket=name)
    return name
