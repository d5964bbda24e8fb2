"""Accounts, proxies, encryption and warnings of the boto3 client, on requests that reach a
server."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_s3 import S3Backend
from persistkv_s3.client.boto import BotoClient
from persistkv_s3.options import parse_url
from tests.backends.s3.conftest import Opener

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.literals import BucketVersioningStatusType

NAMESPACE = sample_identity().digest

moto_only = pytest.mark.skipif(
    "PERSISTKV_S3_ENDPOINT" in os.environ, reason="the server has no such service"
)


def store_and_read(backend: S3Backend) -> None:
    """Store a pack, read it, and delete it."""
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1)
    backend.commit(NAMESPACE, CommitBatch([pack]))
    assert set(tables(backend, NAMESPACE)) == {pack.pack_id}
    assert read_pack(backend, NAMESPACE, pack.table) == payload_of(pack)
    backend.commit(NAMESPACE, CommitBatch(deletions=[pack.pack_id]))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]


def test_expected_bucket_owner_is_sent_with_every_request(open_store: Opener) -> None:
    backend, client = open_store("refresh=0s&expected_bucket_owner=012345678901")
    store_and_read(backend)
    backend.publish_status("engine", b"row")
    backend.publish_status("engine", None)
    assert {"GET", "PUT", "DELETE"} <= {method for method, _ in client.sent}
    assert {
        headers.get("x-amz-expected-bucket-owner") for _, headers in client.sent
    } == {"012345678901"}


def test_expected_bucket_owner_unset_sends_no_header(open_store: Opener) -> None:
    backend, client = open_store()
    store_and_read(backend)
    assert not [
        headers
        for _, headers in client.sent
        if "x-amz-expected-bucket-owner" in headers
    ]


@moto_only
def test_kms_options_encrypt_every_object_with_key(
    open_store: Opener,
    raw_client: S3Client,
    bucket: str,
) -> None:
    backend, _ = open_store(
        "refresh=0s&sse=aws:kms&sse_kms_key_id=my-key&sse_bucket_key=yes"
    )
    store_and_read(backend)
    for entry in raw_client.list_objects_v2(Bucket=bucket)["Contents"]:
        found = raw_client.head_object(Bucket=bucket, Key=entry["Key"])
        assert (found["ServerSideEncryption"], found["SSEKMSKeyId"]) == (
            "aws:kms",
            "my-key",
        )
        assert found["BucketKeyEnabled"]


@pytest.mark.skipif(
    "PERSISTKV_S3_ENDPOINT" in os.environ,
    reason="Ceph 16 ignores If-None-Match in buckets with versions: refused",
)
@pytest.mark.parametrize("status", ["Enabled", "Suspended"])
def test_versioned_bucket_warns_only_while_versioning_enabled(
    open_store: Opener,
    raw_client: S3Client,
    bucket: str,
    status: BucketVersioningStatusType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raw_client.put_bucket_versioning(
        Bucket=bucket, VersioningConfiguration={"Status": status}
    )
    backend, _ = open_store()
    store_and_read(backend)
    found = [text for text in warnings(caplog) if "keeps old versions" in text]
    assert len(found) == (status == "Enabled")
    assert all(bucket in text and "lifecycle rule" in text for text in found)


def test_unversioned_bucket_logs_no_warning(
    open_store: Opener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store_and_read(open_store().backend)
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("server", "warned"),
    [
        ("http://ceph.internal:7480", True),
        ("http://10.0.0.1", True),
        ("https://ceph.internal:7480", False),
        ("http://localhost:7480", False),
        ("http://127.0.0.2:7480", False),
        ("http://[::1]:7480", False),
    ],
)
def test_boto_client_plain_http_beyond_loopback_warns(
    server: str,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    BotoClient(
        *parse_url(StoreUrl.parse(f"s3://bucket/p?endpoint_url={server}"))
    ).close()
    found = warnings(caplog)
    assert [
        text for text in found if server in text and "not encrypted" in text
    ] == found
    assert bool(found) == warned


@moto_only
def test_http_proxy_variable_routes_every_request(
    endpoint: str,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name of the server does not resolve, so each request that succeeds came through the
    proxy."""
    monkeypatch.setenv("HTTP_PROXY", endpoint)
    monkeypatch.setenv("NO_PROXY", "")
    url = StoreUrl.parse(
        f"s3://{bucket}/store?endpoint_url=http://storage:9000&refresh=0s&cache=no"
    )
    backend = S3Backend.open(url)
    store_and_read(backend)
    backend.close()


def test_no_proxy_variable_bypasses_proxy(
    open_store: Opener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    store_and_read(open_store().backend)


@moto_only
def test_web_identity_token_signs_requests_with_session_token(
    open_store: Opener,
    endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubernetes mounts a token and names it in the environment; STS exchanges it for temporary
    credentials."""
    token = tmp_path / "token"
    token.write_text("token of the pod")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/kv-writer")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    backend, client = open_store()
    store_and_read(backend)
    assert client.sent
    assert all(headers.get("X-Amz-Security-Token") for _, headers in client.sent)
