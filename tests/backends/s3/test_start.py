"""A bucket that refuses an engine at its start costs time, never the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from persistkv.errors import ConfigurationError, StoreUnavailableError
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.supervisor import State
from tests.backends.s3.faults import FaultProxy
from tests.storage.host.hosted import Hosted
from tests.storage.host.jobs import BLOCK, make_keys, wait_for

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client


def works(hosted: Hosted, client: StoreClient) -> bool:
    """Store four blocks; return whether lookups find them."""
    keys = make_keys(4)
    client.submit_store(1, "a", keys, range(4), None, 4 * BLOCK)
    stored = hosted.finish(client, 1)
    assert client.flush(90)
    client.poll()
    return not stored.failed and client.table.prefix(keys) == 4


def test_open_not_required_missing_bucket_attaches_when_it_exists(
    hosted: Hosted,
    endpoint: str,
    raw_client: S3Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"s3://test-absent-bucket/store?endpoint_url={endpoint}"
    with pytest.raises(StoreUnavailableError, match="NoSuchBucket"):
        hosted.connect(url).open()
    client = hosted.connect(url)
    client.open(required=False)
    assert client.state is not State.OPEN
    assert caplog.text.count("the store does not open") == 1
    raw_client.create_bucket(Bucket="test-absent-bucket")
    wait_for(client, State.OPEN)
    assert works(hosted, client)


def test_open_not_required_refused_requests_attach_when_allowed(
    hosted: Hosted,
    bucket: str,
    proxy: FaultProxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy.set("readonly")  # 403 for each request that writes
    url = f"s3://{bucket}/store?endpoint_url=http://127.0.0.1:{proxy.port}"
    with pytest.raises(StoreUnavailableError, match="403"):
        hosted.connect(url).open()
    client = hosted.connect(url)
    client.open(required=False)
    assert client.state is not State.OPEN
    assert caplog.text.count("the store does not open") == 1
    proxy.set("none")
    wait_for(client, State.OPEN)
    assert works(hosted, client)


def test_open_not_required_without_credentials_attaches_with_them(
    hosted: Hosted,
    bucket: str,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"s3://{bucket}/store?endpoint_url={endpoint}"
    with monkeypatch.context() as without:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            without.delenv(name)
        with pytest.raises(StoreUnavailableError, match="no credentials"):
            hosted.connect(url).open()
        client = hosted.connect(url)
        client.open(required=False)
        assert caplog.text.count("the store does not open") == 1
    wait_for(client, State.OPEN)
    assert works(hosted, client)


@pytest.mark.parametrize(
    "option",
    ["endpoint_url=nope", "connections=0", "key_file=/absent", "secret=x", "typo=1"],
)
def test_open_not_required_invalid_option_raises(
    hosted: Hosted,
    bucket: str,
    option: str,
) -> None:
    with pytest.raises(ConfigurationError):
        hosted.connect(f"s3://{bucket}/store?{option}").open(required=False)
