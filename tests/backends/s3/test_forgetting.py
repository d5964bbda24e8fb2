"""Forgetting of a tenant in a bucket: all versions of all objects are read afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.forgetting import Forgotten
from persistkv.storage.format.keys import StoreKey
from persistkv.testing.conformance.suite import sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_s3.client.boto import BotoClient
from persistkv_s3.client.transport import RequestRefusedError
from tests.storage.shared.disclosure import Reader, Version

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.literals import BucketVersioningStatusType

NAMESPACE = sample_identity().digest
SECRET = "0123456789abcdef" * 4
KEY = "PERSISTKV_TEST_KEY"
REQUESTS = 10
BLOCKS = 50  # of a request


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, SECRET)


@pytest.fixture(params=["Enabled", "Suspended", ""])
def versioned(request: pytest.FixtureRequest, raw_client: S3Client, bucket: str) -> str:
    """A bucket that keeps all versions, those of some time, or none."""
    if request.param:
        set_versioning(raw_client, bucket, "Enabled")
    return bucket


def set_versioning(
    raw_client: S3Client, bucket: str, status: BucketVersioningStatusType
) -> None:
    raw_client.put_bucket_versioning(
        Bucket=bucket, VersioningConfiguration={"Status": status}
    )


@pytest.fixture
def url(endpoint: str, versioned: str, tmp_path: Path) -> str:
    options = (
        f"endpoint_url={endpoint}&region=us-east-1&key_env={KEY}&cache={tmp_path}/r"
    )
    return f"s3://{versioned}/store?{options}"


def store_one(backend: Backend, tenant: str, seed: int) -> set[bytes]:
    """Store a pack and a request of a tenant; return plaintexts in them."""
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, seed, seal=backend.seal, blocks=BLOCKS, tenant=tenant)
    name = f"planted-by-{tenant}-{seed}"
    request = sample_manifest(
        name, seed, labels={"user": name}, packs=[pack.pack_id], tenant=tenant
    )
    backend.commit(NAMESPACE, CommitBatch([pack], [request]))
    payload = payload_of(pack)
    planted = {payload[4096 * block : 4096 * block + 24] for block in range(BLOCKS)}
    return {*planted, *pack.keys.unpack(), name.encode()}


def all_versions(raw_client: S3Client, bucket: str) -> Iterator[Version]:
    """Yield all versions of all objects."""
    pages = raw_client.get_paginator("list_object_versions").paginate(Bucket=bucket)
    for page in pages:
        for entry in page.get("Versions", ()):
            found = raw_client.get_object(
                Bucket=bucket, Key=entry["Key"], VersionId=entry["VersionId"]
            )
            name = entry["Key"].removeprefix("store/")
            yield Version(name, found["Body"].read())


def reader(keys: Collection[Version]) -> Reader:
    """Return a reader with the user's key and the wrapped keys in versions of objects."""
    requests: list[str] = []
    for tenant, seed in itertools.product(("anna", "berta"), range(2 * REQUESTS)):
        requests.append(f"planted-by-{tenant}-{seed}")
    return Reader(StoreKey(SECRET.encode()), keys, NAMESPACE, requests)


def test_forget_leaves_nothing_of_1000_plaintexts_in_all_versions(
    url: str,
    raw_client: S3Client,
    versioned: str,
    request: pytest.FixtureRequest,
) -> None:
    """Whoever has all objects and versions from before, but the keys of afterwards, reads
    nothing."""
    anna: set[bytes] = set()
    berta: set[bytes] = set()
    with closing(open_backend(url)) as backend:
        for number in range(REQUESTS):
            anna |= store_one(backend, "anna", number)
            berta |= store_one(backend, "berta", REQUESTS + number)
    assert len(anna) >= 1000
    if "Suspended" in request.node.name:
        set_versioning(raw_client, versioned, "Suspended")
        with closing(open_backend(url)) as backend:
            anna |= store_one(backend, "anna", REQUESTS - 1)
    before = list(all_versions(raw_client, versioned))
    assert reader(before).found(before, anna) == len(anna), "the search works"

    with closing(open_backend(url)) as backend:
        done = backend.forget("anna")
    assert len(done.key_ids) == 1
    assert not versions_left(done)
    after = list(all_versions(raw_client, versioned))
    with_keys_of_after = reader(after)
    assert with_keys_of_after.found([*before, *after], anna) == 0
    assert with_keys_of_after.found(after, berta) == len(berta)
    packs = [version for version in after if "/packs/" in version.name]
    assert len(packs) == REQUESTS
    with closing(open_backend(url)) as backend:
        shown = tables(backend, NAMESPACE)
        assert {table.tenant for table in shown.values()} == {"berta"}


@pytest.mark.parametrize("action", ["ListBucketVersions", "DeleteObjectVersion"])
def test_forget_names_versions_that_it_must_not_delete(
    url: str,
    raw_client: S3Client,
    versioned: str,
    action: str,
    request: pytest.FixtureRequest,
) -> None:
    if "Enabled" not in request.node.name:
        pytest.skip("the bucket keeps no versions")
    with closing(open_backend(url)) as backend:
        store_one(backend, "anna", 1)
        with refused(action):
            done = backend.forget("anna")
        assert len(done.key_ids) == 1
        assert versions_left(done)
        # with the permission, it can be completed
        assert not versions_left(backend.forget("anna"))
    assert not [v for v in all_versions(raw_client, versioned) if "/tenants/" in v.name]


def versions_left(done: Forgotten) -> list[str]:
    return [text for text in done.out_of_reach if "old versions" in text]


@contextmanager
def refused(action: str) -> Iterator[None]:
    """Let the server refuse requests that need a permission."""
    method = {
        "ListBucketVersions": "versions",
        "DeleteObjectVersion": "delete_versions",
    }

    def refuse(self: BotoClient, *arguments: object, **options: object) -> None:
        raise RequestRefusedError("403 AccessDenied")

    with mock.patch.object(BotoClient, method[action], refuse):
        yield
