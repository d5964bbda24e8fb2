"""What ``persistkv doctor`` finds about a bucket: its calls, its clock and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.checks import Check, Level
from persistkv_s3 import S3Backend
from persistkv_s3.blobs import S3Blobs
from persistkv_s3.client.boto import BotoClient
from persistkv_s3.client.transport import Deadline
from persistkv_s3.options import parse_url
from tests.backends.s3.faults import FaultProxy

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import (
        LifecycleRuleTypeDef,
        ObjectLockConfigurationTypeDef,
    )

Examine = Callable[..., dict[str, Check]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a call takes seconds, which is no property of the server."""
    monkeypatch.setattr("persistkv.storage.checks.SLOW_S", 60.0)


@pytest.fixture
def examine(endpoint: str, bucket: str) -> Examine:
    """Return a function that checks the bucket, and returns the outcomes by check. Of several, it
    returns the worst."""

    def examine(options: str = "", proxy: FaultProxy | None = None) -> dict[str, Check]:
        where = endpoint if proxy is None else f"http://127.0.0.1:{proxy.port}"
        url = StoreUrl.parse(f"s3://{bucket}/team/kv?endpoint_url={where}{options}")
        found: dict[str, Check] = {}
        for check in S3Backend.check_medium(url):
            before = found.get(check.check)
            if before is None or list(Level).index(before.level) < list(Level).index(
                check.level
            ):
                found[check.check] = check
        return found

    return examine


def left(raw_client: S3Client, bucket: str) -> list[str]:
    """Return the keys of all objects, old versions included."""
    return [
        entry["Key"]
        for entry in raw_client.list_objects_v2(Bucket=bucket).get("Contents", ())
    ]


def test_check_intact_bucket_is_ok_and_leaves_nothing(
    examine: Examine,
    raw_client: S3Client,
    bucket: str,
) -> None:
    found = examine()
    calls = {"list", "missing object", "put", "read", "delete"}
    assert (
        calls
        | {"medium's clock", "throttling", "versioning", "lifecycle", "object lock"}
        == found.keys()
    )
    assert {check.level for check in found.values()} == {Level.OK}
    assert not any(check.todo for check in found.values())
    assert left(raw_client, bucket) == []


def test_check_read_only_writes_nothing(examine: Examine, proxy: FaultProxy) -> None:
    proxy.set("readonly")
    found = examine("&read_only=yes", proxy)
    assert "put" not in found
    assert "delete" not in found
    assert {check.level for check in found.values()} == {Level.OK}


@pytest.mark.parametrize(
    ("request_line", "check", "level", "remedy"),
    [
        ("^GET .*list-type=2", "list", Level.PROBLEM, "s3:ListBucket"),
        ("^PUT ", "put", Level.PROBLEM, "s3:PutObject"),
        ("^DELETE ", "delete", Level.WARNING, "s3:DeleteObject"),
    ],
)
def test_check_refused_call_names_permission(
    examine: Examine,
    proxy: FaultProxy,
    request_line: str,
    check: str,
    level: Level,
    remedy: str,
) -> None:
    proxy.set(f"forbid {request_line.replace(' ', '.')}")
    found = examine(proxy=proxy)
    assert found[check].level is level
    assert "403" in found[check].found
    assert remedy in found[check].todo


def test_check_refused_delete_names_the_object_that_is_left(
    examine: Examine,
    proxy: FaultProxy,
    raw_client: S3Client,
    bucket: str,
) -> None:
    proxy.set("forbid ^DELETE.")
    found = examine(proxy=proxy)["delete"].found
    (key,) = left(raw_client, bucket)
    assert key.removeprefix("team/kv/") in found


def test_check_missing_object_that_is_refused_is_problem(
    examine: Examine,
    proxy: FaultProxy,
) -> None:
    """As on S3 without s3:ListBucket: an engine would take each missing object for a refusal."""
    proxy.set("forbid ^GET.*/team/kv/probe-")
    found = examine("&read_only=yes", proxy)["missing object"]
    assert (found.level, "s3:ListBucket" in found.todo) == (Level.PROBLEM, True)


@pytest.mark.parametrize(
    ("mode", "relation"), [("date 31536000", "ahead of"), ("date -7200", "behind")]
)
def test_check_wrong_clock_of_server_is_warning(
    examine: Examine,
    proxy: FaultProxy,
    mode: str,
    relation: str,
) -> None:
    proxy.set(mode)
    found = examine(proxy=proxy)["medium's clock"]
    assert found.level is Level.WARNING
    assert relation in found.found
    assert "NTP" in found.todo


def test_check_throttled_requests_are_warning(
    examine: Examine,
    proxy: FaultProxy,
) -> None:
    proxy.set("s503 2")
    found = examine(proxy=proxy)
    assert found["throttling"].level is Level.WARNING
    assert "2 times" in found["throttling"].found
    assert found["put"].level is Level.OK


def test_check_server_that_hangs_ends_after_one_call(
    examine: Examine,
    proxy: FaultProxy,
) -> None:
    proxy.set("hang")
    found = examine("&deadline=1s", proxy)
    assert found.keys() == {"list"}
    assert (found["list"].level, "network" in found["list"].todo) == (
        Level.PROBLEM,
        True,
    )


@pytest.mark.parametrize(
    ("query", "check", "permission"),
    [
        ("versioning", "versioning", "s3:GetBucketVersioning"),
        ("lifecycle", "lifecycle", "s3:GetLifecycleConfiguration"),
        ("object-lock", "object lock", "s3:GetBucketObjectLockConfiguration"),
    ],
)
def test_check_setting_without_permission_is_not_checked_and_no_error(
    examine: Examine,
    proxy: FaultProxy,
    query: str,
    check: str,
    permission: str,
) -> None:
    proxy.set(f"forbid [?]{query}")
    found = examine(proxy=proxy)
    assert (found[check].level, found[check].found) == (
        Level.NOTE,
        f"not checked: needs {permission}",
    )
    others = {other.level for name, other in found.items() if name != check}
    assert others == {Level.OK}


# Settings


def expire_versions(raw_client: S3Client, bucket: str, prefix: str) -> None:
    rule: LifecycleRuleTypeDef = {
        "ID": "old",
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
    }
    raw_client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [rule]}
    )


@pytest.mark.parametrize(
    ("prefix", "level"),
    [
        (None, Level.WARNING),
        ("other/", Level.WARNING),
        ("team/kv/deeper/", Level.WARNING),
        ("team/", Level.OK),
        ("", Level.OK),
    ],
)
def test_check_versioning_is_warning_unless_rule_expires_old_versions(
    examine: Examine,
    raw_client: S3Client,
    bucket: str,
    prefix: str | None,
    level: Level,
) -> None:
    raw_client.put_bucket_versioning(
        Bucket=bucket, VersioningConfiguration={"Status": "Enabled"}
    )
    if prefix is not None:
        expire_versions(raw_client, bucket, prefix)
    found = examine()
    assert found["versioning"].level is level
    assert found["lifecycle"].level is Level.OK


def rule(prefix: str, content: LifecycleRuleTypeDef) -> LifecycleRuleTypeDef:
    """Return an enabled rule for names with this prefix, which does what ``content`` says."""
    return {**content, "ID": "rule-1", "Filter": {"Prefix": prefix}}


ARCHIVE: LifecycleRuleTypeDef = {
    "Status": "Enabled",
    "Transitions": [{"Days": 30, "StorageClass": "GLACIER"}],
}
DEEP: LifecycleRuleTypeDef = {
    "Status": "Enabled",
    "Transitions": [{"Days": 180, "StorageClass": "DEEP_ARCHIVE"}],
}
INFREQUENT: LifecycleRuleTypeDef = {
    "Status": "Enabled",
    "Transitions": [{"Days": 30, "StorageClass": "STANDARD_IA"}],
}
EXPIRY: LifecycleRuleTypeDef = {
    "Status": "Enabled",
    "Expiration": {"Days": 7},
}
PACKS = "team/kv/0123456789abcdef0123456789abcdef-plain/packs/"
TAGGED = {"And": {"Prefix": "team/", "Tags": [{"Key": "a", "Value": "b"}]}}


@pytest.mark.parametrize(
    ("found", "level", "part"),
    [
        (rule("team/", EXPIRY), Level.PROBLEM, "after 7 days"),
        (rule("", EXPIRY), Level.PROBLEM, "on all objects"),
        (rule("team/kv/plain/", EXPIRY), Level.PROBLEM, "rule-1"),
        (rule(PACKS, EXPIRY), Level.NOTE, "expires packs"),
        (rule("team/kv/", ARCHIVE), Level.PROBLEM, "GLACIER"),
        (rule(PACKS, DEEP), Level.PROBLEM, "DEEP_ARCHIVE"),
        (rule("team/", INFREQUENT), Level.NOTE, "STANDARD_IA"),
        (rule("others/", EXPIRY), Level.OK, "no rule"),
        (rule("team/kv-old/", ARCHIVE), Level.OK, "no rule"),
        ({**rule("", EXPIRY), "Status": "Disabled"}, Level.OK, "no rule"),
        ({**rule("", EXPIRY), "Filter": TAGGED}, Level.OK, "no rule"),
    ],
)
def test_check_lifecycle_rule_that_expires_or_moves_objects_is_found(
    examine: Examine,
    raw_client: S3Client,
    bucket: str,
    found: LifecycleRuleTypeDef,
    level: Level,
    part: str,
) -> None:
    raw_client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [found]}
    )
    outcome = examine()["lifecycle"]
    assert outcome.level is level
    assert part in outcome.found
    assert bool(outcome.todo) == (level is not Level.OK)


class TieringClient(BotoClient):
    """Client of a bucket with this answer about Intelligent-Tiering, which moto does not keep."""

    answer: Mapping[str, Any] = {}

    def setting(self, name: str, deadline: Deadline) -> Mapping[str, Any]:
        if name == "list_bucket_intelligent_tiering_configurations":
            return self.answer
        return super().setting(name, deadline)


@pytest.mark.parametrize("archives", [True, False])
def test_check_intelligent_tiering_with_archive_access_is_problem(
    endpoint: str,
    raw_client: S3Client,
    bucket: str,
    archives: bool,
) -> None:
    moving = rule(
        "",
        {
            "Status": "Enabled",
            "Transitions": [{"Days": 1, "StorageClass": "INTELLIGENT_TIERING"}],
        },
    )
    raw_client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [moving]}
    )
    place, options = parse_url(
        StoreUrl.parse(f"s3://{bucket}/team/kv?endpoint_url={endpoint}")
    )
    client = TieringClient(place, options)
    if archives:
        tiers = {
            "Id": "cold",
            "Status": "Enabled",
            "Tierings": [{"Days": 90, "AccessTier": "ARCHIVE_ACCESS"}],
        }
        client.answer = {"IntelligentTieringConfigurationList": [tiers]}
    with closing(S3Blobs(place, options, client)) as blobs:
        found = {check.check: check for check in blobs.check(writes=False)}
    assert found["archive tiers"].level is (Level.PROBLEM if archives else Level.OK)


@pytest.mark.parametrize("retains", [True, False])
def test_check_object_lock_is_found(
    examine: Examine,
    raw_client: S3Client,
    bucket: str,
    retains: bool,
) -> None:
    raw_client.delete_bucket(Bucket=bucket)
    raw_client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    if retains:
        configuration: ObjectLockConfigurationTypeDef = {
            "ObjectLockEnabled": "Enabled",
            "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 3}},
        }
        raw_client.put_object_lock_configuration(
            Bucket=bucket, ObjectLockConfiguration=configuration
        )
    found = examine()["object lock"]
    assert found.level is (Level.WARNING if retains else Level.NOTE)
    assert ("3 days" in found.found) == retains
