"""Readers and writers need no permissions other than those in docs/s3.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest
from botocore.model import OperationModel

from persistkv.config import GroupLayout, RowLayout, StoreUrl
from persistkv.errors import StoreError
from persistkv.memory.rows import Rows
from persistkv.storage.backend import CommitBatch
from persistkv.storage.policy import Policy
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.tenants import DEFAULT_TENANT
from persistkv.testing.conformance.suite import (
    check_totals,
    read_pack,
    sample_identity,
    tables,
)
from persistkv.testing.samples import (
    payload_of,
    sample_blocks,
    sample_keys,
    sample_manifest,
    sample_pack,
)
from persistkv_s3 import S3Backend
from persistkv_s3.blobs import S3Blobs
from persistkv_s3.client.boto import BotoClient
from persistkv_s3.options import parse_url
from persistkv_tools.cli import main
from tests.backends.s3.conftest import Opener
from tests.backends.s3.faults import FaultProxy

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import LifecycleRuleTypeDef

NAMESPACE = sample_identity().digest
DOCS = Path(__file__).parents[3] / "docs" / "s3.md"
CEPH = os.environ.get("PERSISTKV_S3_CEPH")


@pytest.fixture
def proxy(endpoint: str) -> Iterator[FaultProxy]:
    """A proxy that rejects every request that would change the bucket."""
    running = FaultProxy(urlsplit(endpoint).port or 80)
    running.set("readonly")
    yield running
    running.close()


def fill(backend: S3Backend) -> list[bytes]:
    """Store one pack of four blocks and its request. Return the keys of the blocks."""
    backend.open_namespace(sample_identity())
    pack = sample_pack(NAMESPACE, 1)
    backend.commit(
        NAMESPACE, CommitBatch([pack], [sample_manifest("r", packs=[pack.pack_id])])
    )
    return list(pack.sections[0].keys)


def read_everything(reader: S3Backend) -> None:
    """Read a store in all the ways that the commands use."""
    pack = sample_pack(NAMESPACE, 1)
    payload = payload_of(pack)
    assert [namespace.id for namespace in reader.namespaces()] == [NAMESPACE]
    assert set(tables(reader, NAMESPACE)) == {pack.pack_id}
    assert read_pack(reader, NAMESPACE, pack.table) == payload
    assert [manifest.id for manifest in reader.catalogue(NAMESPACE).manifests()] == [
        "r"
    ]
    assert reader.manifest_keys(NAMESPACE, ["r"])[0] == sample_manifest("r").keys
    assert reader.catalogue(NAMESPACE).uses(["r"])[0] is not None
    assert reader.statuses() == {}
    check_totals(reader)
    with pytest.raises(StoreError, match="read-only"):
        reader.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 2)]))
    assert reader.breaker_state == "closed"


def test_read_only_handle_sends_only_get_and_head(
    open_store: Opener,
    proxy: FaultProxy,
) -> None:
    fill(open_store().backend)
    with pytest.raises(StoreError, match="403"):
        open_store(port=proxy.port).backend.commit(
            NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 2)])
        )
    reader, client = open_store(port=proxy.port, read_only=True)
    read_everything(reader)
    assert set(client.take()) <= {"GET", "HEAD"}


@pytest.mark.parametrize("command", [("ls",), ("stat",), ("show", "r"), ("verify",)])
def test_inspect_commands_need_only_read_permissions(
    open_store: Opener,
    proxy: FaultProxy,
    endpoint: str,
    bucket: str,
    command: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(open_store().backend)
    name, *rest = command
    ends = []
    for where in (endpoint, f"http://127.0.0.1:{proxy.port}"):
        with pytest.raises(SystemExit) as ended:
            main([name, f"s3://{bucket}/store?endpoint_url={where}&cache=no", *rest])
        ends.append((ended.value.code, capsys.readouterr().err))
    assert ends[0] == ends[1], "what may be written makes no difference"


def test_read_only_engine_promotes_and_writes_nothing(
    open_store: Opener,
    proxy: FaultProxy,
) -> None:
    keys = fill(open_store().backend)
    backend, client = open_store("refresh=0s&read_only=yes", port=proxy.port)
    rows = Rows(
        memoryview(bytearray(8 * 4096)), RowLayout(4096, (GroupLayout(((0, 4096),)),))
    )
    store = BlockingStore(
        backend, sample_identity(), rows, StoreOptions(refresh_s=0.0), url="s3://test"
    )
    assert store.read(keys, range(4)) == []
    assert np.array_equal(rows.array[:4], sample_blocks(1, 4, 4096))

    fresh = sample_keys(2, 4)
    assert store.put("q", [*keys, *fresh], range(8), range(8)), "the rows are free"
    store.end_request(RequestEnd("q", "manifest", ([*keys, *fresh],), 128, 16))
    assert store.store.queue.is_empty
    assert store.take_report().persisted == [("q", False)]
    store.work()
    store.flush()
    assert set(client.take()) <= {"GET", "HEAD"}, "nothing was even tried"
    assert backend.breaker_state == "closed"


def test_read_only_engine_corrupt_pack_is_dropped_locally(
    open_store: Opener,
    proxy: FaultProxy,
    raw_client: S3Client,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = fill(open_store().backend)
    (key,) = [
        entry["Key"]
        for entry in raw_client.list_objects_v2(Bucket=bucket)["Contents"]
        if "/packs/" in entry["Key"]
    ]
    body = bytearray(raw_client.get_object(Bucket=bucket, Key=key)["Body"].read())
    body[5000] ^= 1
    raw_client.put_object(Bucket=bucket, Key=key, Body=bytes(body))
    backend, client = open_store("refresh=0s&read_only=yes", port=proxy.port)
    rows = Rows(
        memoryview(bytearray(4 * 4096)), RowLayout(4096, (GroupLayout(((0, 4096),)),))
    )
    store = BlockingStore(
        backend, sample_identity(), rows, StoreOptions(), url="s3://test"
    )
    assert sorted(store.read(keys, range(4))) == sorted(keys)
    assert not store.contains(keys[0])
    store.refresh()
    assert not store.contains(keys[0])
    assert set(client.take()) <= {"GET", "HEAD"}
    assert "dropped" not in caplog.text


# The policies of docs/s3.md


class Policies(NamedTuple):
    """The JSON documents of docs/s3.md, for the bucket ``my-bucket`` and the prefix ``kv``."""

    writer: str
    reader: str
    doctor: str
    forget: str
    lifecycle: str


def documented_policies() -> Policies:
    return Policies(*re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL))


ACTIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListObjectVersions": "s3:ListBucketVersions",
    "GetBucketVersioning": "s3:GetBucketVersioning",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "GetObjectLockConfiguration": "s3:GetBucketObjectLockConfiguration",
    "ListBucketIntelligentTieringConfigurations": "s3:GetIntelligentTieringConfiguration",
}
"""Permission that S3 requires for each operation of the driver."""


class Call(NamedTuple):
    """What a policy must allow."""

    action: str
    resource: str
    prefix: str | None
    """Of a listing."""


class RecordingClient(BotoClient):
    """Client that records the calls which it makes."""

    def __init__(self, url: StoreUrl) -> None:
        super().__init__(*parse_url(url, S3Backend.split_options(url)[1]))
        self.calls: set[Call] = set()
        self._client.meta.events.register("before-parameter-build.s3", self._record)

    def _record(
        self, params: dict[str, Any], model: OperationModel, **_: object
    ) -> None:
        keys = (
            [params["Key"]]
            if "Key" in params
            else [one["Key"] for one in params.get("Delete", {}).get("Objects", ())]
        )
        places = [f"arn:aws:s3:::{params['Bucket']}/{key}" for key in keys] or [
            f"arn:aws:s3:::{params['Bucket']}"
        ]
        action = ACTIONS[model.name]
        if any(
            "VersionId" in one for one in params.get("Delete", {}).get("Objects", ())
        ):
            action = "s3:DeleteObjectVersion"
        for place in places:
            self.calls.add(Call(action, place, params.get("Prefix")))


def allows(statement: dict[str, Any], call: Call) -> bool:
    """Evaluate a statement as IAM does."""
    assert statement["Effect"] == "Allow"
    if call.action not in as_list(statement["Action"]):
        return False
    if not any(
        fnmatchcase(call.resource, pattern)
        for pattern in as_list(statement["Resource"])
    ):
        return False
    for operator, wanted in statement.get("Condition", {}).items():
        assert operator == "StringLikeIfExists"
        assert wanted.keys() == {"s3:prefix"}
        if call.prefix is not None and not fnmatchcase(
            call.prefix, wanted["s3:prefix"]
        ):
            return False
    return True


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def check_policy(calls: set[Call], *documents: str) -> None:
    """Check that policies allow these calls, need each of their actions, and reach nothing outside
    of the prefix."""
    statements = [
        statement
        for document in documents
        for statement in json.loads(document)["Statement"]
    ]
    for call in calls:
        assert any(allows(statement, call) for statement in statements), call
    granted = {
        action for statement in statements for action in as_list(statement["Action"])
    }
    assert granted == {call.action for call in calls}
    elsewhere = "arn:aws:s3:::my-bucket/other/object"
    for action in granted:
        assert not any(
            allows(statement, Call(action, elsewhere, None)) for statement in statements
        )
    listing = Call("s3:ListBucket", "arn:aws:s3:::my-bucket", "other/")
    assert not any(allows(statement, listing) for statement in statements)


@pytest.fixture
def policy_url(endpoint: str, raw_client: S3Client) -> Iterator[StoreUrl]:
    """URL of a store at the place of which the policies speak, in an empty bucket."""
    raw_client.create_bucket(Bucket="my-bucket")
    yield StoreUrl.parse(
        f"s3://my-bucket/kv?endpoint_url={endpoint}&refresh=0s&cache=no&slow=1h"
    )
    found = raw_client.list_object_versions(Bucket="my-bucket")
    for entry in [*found.get("Versions", ()), *found.get("DeleteMarkers", ())]:
        raw_client.delete_object(
            Bucket="my-bucket", Key=entry["Key"], VersionId=entry["VersionId"]
        )
    raw_client.delete_bucket(Bucket="my-bucket")


def open_recorded(
    url: StoreUrl,
    *,
    read_only: bool = False,
) -> tuple[S3Backend, RecordingClient]:
    client = RecordingClient(url)
    shared, own = S3Backend.split_options(url)
    blobs = S3Blobs(*parse_url(url, own), client)
    return S3Backend(
        blobs, shared, str(url.location), read_only=read_only, background=False
    ), client


def merge_all(backend: S3Backend, raw_client: S3Client) -> None:
    """Work in the background until the inbox is empty."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        backend.step()
        entries = raw_client.list_objects_v2(Bucket="my-bucket", Prefix="kv/").get(
            "Contents", ()
        )
        if not any("/inbox/" in entry["Key"] for entry in entries):
            return
        time.sleep(0.2)
    raise TimeoutError("commits remain in the inbox")


def live_as_writer(backend: S3Backend, raw_client: S3Client) -> None:
    """Do all that an engine does with a store."""
    fill(backend)
    gone = sample_pack(NAMESPACE, 3)
    backend.commit(NAMESPACE, CommitBatch([gone]))
    backend.commit(NAMESPACE, CommitBatch(deletions=[gone.pack_id]))
    backend.set_policy(Policy(capacity=1 << 30, ttl_s=86_400.0))
    backend.put_note(NAMESPACE, "warm", b"note")
    for row in (b"status", None):
        backend.publish_status("engine", row)
    merge_all(backend, raw_client)
    backend.opened_namespace(NAMESPACE).sweep()
    backend.rebuild_index(lambda done, total: None)
    assert read_pack(backend, NAMESPACE, gone.table) is None


def test_documented_policies_allow_exactly_the_calls_of_writer_and_reader(
    policy_url: StoreUrl,
    raw_client: S3Client,
) -> None:
    policies = documented_policies()
    writer, calls = open_recorded(policy_url)
    live_as_writer(writer, raw_client)
    writer.close()
    check_policy(calls.calls, policies.writer)

    reader, calls = open_recorded(policy_url, read_only=True)
    read_everything(reader)
    reader.close()
    check_policy(calls.calls, policies.reader)


def test_documented_policy_of_forget_allows_exactly_its_other_calls(
    policy_url: StoreUrl,
    raw_client: S3Client,
) -> None:
    raw_client.put_bucket_versioning(
        Bucket="my-bucket", VersioningConfiguration={"Status": "Enabled"}
    )
    policies = documented_policies()
    operator, calls = open_recorded(policy_url)
    fill(operator)
    assert operator.forget(DEFAULT_TENANT).packs == 1
    operator.close()
    check_policy(calls.calls, policies.writer, policies.forget)


def test_documented_policy_of_doctor_allows_exactly_its_other_calls(
    policy_url: StoreUrl,
    raw_client: S3Client,
) -> None:
    rule: LifecycleRuleTypeDef = {
        "ID": "cold",
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "Transitions": [{"Days": 30, "StorageClass": "INTELLIGENT_TIERING"}],
    }
    raw_client.put_bucket_lifecycle_configuration(
        Bucket="my-bucket", LifecycleConfiguration={"Rules": [rule]}
    )
    policies = documented_policies()
    client = RecordingClient(policy_url)
    with closing(
        S3Blobs(*parse_url(policy_url, S3Backend.split_options(policy_url)[1]), client)
    ) as blobs:
        list(blobs.check(writes=True))
    check_policy(client.calls, policies.writer, policies.doctor)


# The policies of docs/s3.md, on a server that enforces them


class Users:
    """Users of a Ceph server, created with ``radosgw-admin``."""

    def __init__(self, bucket: str, root: S3Client) -> None:
        self.bucket = bucket
        self._root = root
        self._statements: list[dict[str, Any]] = []

    def add(self, policy: str) -> dict[str, str]:
        """Create a user with its own policy. Return its credentials."""
        name = f"user{uuid.uuid4().hex}"
        words = [
            "user",
            "create",
            f"--uid={name}",
            f"--display-name={name}",
            f"--access-key={name}",
            "--secret-key=hid",
        ]
        environment = {**os.environ, "CEPH_CONF": f"{CEPH}/ceph.conf"}
        log = subprocess.DEVNULL
        subprocess.run(
            ["radosgw-admin", *words],
            env=environment,
            stdout=log,
            stderr=log,
            check=True,
            timeout=60,
        )
        for statement in json.loads(policy.replace("my-bucket", self.bucket))[
            "Statement"
        ]:
            self._statements.append(
                {**statement, "Principal": {"AWS": [f"arn:aws:iam:::user/{name}"]}}
            )
        document = json.dumps({"Version": "2012-10-17", "Statement": self._statements})
        self._root.put_bucket_policy(Bucket=self.bucket, Policy=document)
        return {"AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": "hid"}


@pytest.mark.skipif(
    CEPH is None, reason="PERSISTKV_S3_CEPH names no server whose users can be made"
)
def test_documented_policies_grant_exactly_needed_permissions(
    endpoint: str,
    raw_client: S3Client,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policies = documented_policies()
    lifecycle = json.loads(policies.lifecycle)
    raw_client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration=lifecycle
    )
    users = Users(bucket, raw_client)
    url = StoreUrl.parse(
        f"s3://{bucket}/kv?endpoint_url={endpoint}&refresh=0s&cache=no&slow=1h"
    )

    def use_credentials(credentials: dict[str, str]) -> None:
        for name, value in credentials.items():
            monkeypatch.setenv(name, value)

    use_credentials(users.add(policies.writer))
    writer = S3Backend.open(url)
    fill(writer)
    gone = sample_pack(NAMESPACE, 3)
    writer.commit(NAMESPACE, CommitBatch([gone]))
    writer.commit(NAMESPACE, CommitBatch(deletions=[gone.pack_id]))
    writer.step()
    assert read_pack(writer, NAMESPACE, gone.table) is None, (
        "a missing object is a miss, not an error"
    )
    with pytest.raises(StoreError, match="403"):
        S3Backend.open(
            StoreUrl.parse(f"s3://{bucket}/elsewhere?endpoint_url={endpoint}")
        )

    use_credentials(users.add(policies.reader))
    read_everything(S3Backend.open(url, read_only=True))
    refused = S3Backend.open(url)
    with pytest.raises(StoreError, match="403"):
        refused.commit(NAMESPACE, CommitBatch([sample_pack(NAMESPACE, 2)]))
    for backend in (writer, refused):
        backend.close()
