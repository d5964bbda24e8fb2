"""Options of an s3 URL, credentials, and the error if boto3 is missing."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.policy import Policy
from persistkv.testing.conformance.suite import sample_identity
from persistkv.testing.samples import sample_pack
from persistkv_s3 import S3Backend
from persistkv_s3.client.boto import make_client
from persistkv_s3.options import BucketPlace, S3Options, parse_url
from persistkv_tools.cli import main
from tests.backends.s3.conftest import Opener


def parse(url: str) -> tuple[BucketPlace, S3Options]:
    return parse_url(StoreUrl.parse(url))


def test_default_options_use_https_and_no_boto_retries() -> None:
    place, options = parse("s3://bucket/some/prefix/")
    assert (place.bucket, place.prefix, str(place)) == (
        "bucket",
        "some/prefix/",
        "s3://bucket/some/prefix",
    )
    assert parse("s3://bucket")[0].prefix == ""
    client, _ = make_client(options)
    config = client.meta.config
    assert client.meta.endpoint_url.startswith("https://")
    assert config.s3 == {"payload_signing_enabled": False, "addressing_style": "auto"}
    assert config.request_checksum_calculation == "when_required"
    assert config.retries["total_max_attempts"] == 1
    client.close()


@pytest.mark.parametrize(
    ("options", "signed", "style"),
    [
        ("endpoint_url=http://127.0.0.1:1", True, "path"),
        ("endpoint_url=https://127.0.0.1:1", False, "path"),
        (
            "endpoint_url=http://127.0.0.1:1&unsigned_payload=yes&path_style=no",
            False,
            "auto",
        ),
        ("unsigned_payload=no", True, "auto"),
    ],
)
def test_client_signs_payload_over_plain_http_unless_option_set(
    options: str,
    signed: bool,
    style: str,
) -> None:
    client, _ = make_client(parse(f"s3://bucket/p?{options}")[1])
    assert client.meta.config.s3 == {
        "payload_signing_enabled": signed,
        "addressing_style": style,
    }
    client.close()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ("endpoint_url=ftp://x", "endpoint_url"),
        ("endpoint_url=http://x/path", "endpoint_url"),
        ("endpoint_url=http://x:port", "endpoint_url"),
        ("endpoint_url=", "endpoint_url"),
        ("checksum=md5", "checksum"),
        ("sse=none", "sse"),
        ("sse=AES256&sse_kms_key_id=k", "sse_kms_key_id"),
        ("sse=AES256&sse_bucket_key=yes", "sse_bucket_key"),
        ("expected_bucket_owner=me", "expected_bucket_owner"),
        ("deadline=0s", "deadline"),
        ("deadline=soon", "deadline"),
        ("slow=-1s", "slow"),
        ("connections=0", "connections"),
        ("connections=many", "connections"),
        ("path_style=maybe", "path_style"),
        ("access_key=x", "access_key"),
        ("typo=1", "typo"),
    ],
)
def test_parse_invalid_option_raises_and_names_it(options: str, field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"s3 option {field}") as caught:
        parse(f"s3://bucket/p?{options}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "option",
    [
        "refresh=2",
        "read_only=maybe",
        "capacity=much",
        "key_env=A&key_file=b",
        "typo=1",
    ],
)
def test_new_policy_invalid_option_raises_and_names_it(option: str) -> None:
    field = option.partition("=")[0]
    with pytest.raises(ConfigurationError, match=f"s3 option {field}|^key_env"):
        S3Backend.new_policy(StoreUrl.parse(f"s3://bucket/p?{option}"))


@pytest.mark.parametrize(
    "location",
    [
        "ab",
        "UPPER/x",
        "b..d/x",
        "bucket/a//b",
        "bucket/../x",
        "bucket/ä",
        "bucket/" + "x" * 300,
    ],
)
def test_parse_invalid_bucket_or_prefix_raises(location: str) -> None:
    with pytest.raises(ConfigurationError, match="url"):
        parse(f"s3://{location}")


def test_client_endpoint_from_environment_enables_payload_signing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    client, _ = make_client(parse("s3://bucket/p")[1])
    assert client.meta.config.s3["payload_signing_enabled"]
    client.close()


def test_parse_endpoint_with_credentials_raises_without_showing_them() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse("s3://bucket/p?endpoint_url=https://user:hunter2@host")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAXXXX:hunter2@bucket/p",
        "s3://bucket/p?secret_access_key=hunter2",
        "s3://bucket/p?aws_session_token=hunter2",
        "s3://bucket/p?key=hunter2",
        "s3://bucket/p?X-Amz-Signature=hunter2",
        "s3://bucket/p?endpoint_url=https://user:hunter2@host:port",
    ],
)
def test_parse_url_with_secret_raises_without_showing_it(
    url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(url)
    assert "hunter2" not in str(caught.value) + repr(caught.value)
    with pytest.raises(SystemExit):
        main(["ls", url])
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err


def test_backend_credentials_are_absent_from_errors_repr_and_log(
    open_store: Opener,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, client = open_store()
    namespace = backend.open_namespace(sample_identity()).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    with pytest.raises(StoreUnavailableError) as caught:
        open_store(bucket="no-such-bucket-anywhere")
    said = [
        str(caught.value),
        repr(caught.value),
        repr(backend),
        repr(client),
        repr(vars(backend)),
        caplog.text,
    ]
    assert not [
        text for text in said if "testsecret" in text or "Authorization" in text
    ]
    assert caught.value.__cause__ is None
    assert "NoSuchBucket" in str(caught.value)


def test_unreachable_server_errors_name_endpoint_and_cause(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{unused.getsockname()[1]}"
    url = f"s3://bucket/p?endpoint_url={server}&deadline=5s"
    with pytest.raises(StoreUnavailableError) as caught:
        S3Backend.open(StoreUrl.parse(url), read_only=True)
    with pytest.raises(SystemExit):
        main(["ls", url])
    backend = S3Backend.open(StoreUrl.parse(url))
    namespace = backend.open_namespace(sample_identity()).id
    with pytest.raises(StoreUnavailableError) as refused:
        backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    backend.close()
    for text in (
        str(caught.value),
        capsys.readouterr().err,
        caplog.text,
        str(refused.value),
    ):
        assert server in text
        assert "ECONNREFUSED" in text
        assert "connection refused" in text.lower()


@pytest.mark.skipif(
    "PERSISTKV_S3_ENDPOINT" not in os.environ, reason="moto accepts any secret"
)
def test_open_wrong_secret_raises_403(
    open_store: Opener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreUnavailableError, match="403"):
        open_store()


def test_open_without_credentials_raises(
    endpoint: str,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreUnavailableError, match="no credentials"):
        S3Backend.open(StoreUrl.parse(f"s3://{bucket}/p?endpoint_url={endpoint}"))


def test_cli_without_boto3_prints_package_to_install() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('boto3', 'botocore'))); "
        "from persistkv_tools.cli import main; sys.argv = ['persistkv', 'ls', "
        "'s3://bucket/prefix']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "persistkv[s3]" in done.stderr
    assert "Traceback" not in done.stderr


def test_import_driver_does_not_import_boto3() -> None:
    program = (
        "import sys, persistkv, persistkv_s3, persistkv_tools.cli; sys.exit('boto3' in "
        "sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", program], timeout=60, check=False
        ).returncode
        == 0
    )


def test_open_with_other_policy_keeps_recorded_policy_and_warns(
    open_store: Opener,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, _ = open_store("capacity=10GiB&ttl=7d")
    assert first.policy() == Policy(10 << 30, 604_800.0)
    second, _ = open_store("capacity=40MiB")
    assert second.policy() == Policy(10 << 30, 604_800.0)
    (notice,) = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]
    assert "capacity=40MiB (recorded: 10GiB)" in notice


def test_set_policy_applies_to_other_handles(open_store: Opener) -> None:
    (one, _), (two, _) = open_store("capacity=10GiB"), open_store()
    one.set_policy(Policy(20 << 30, None))
    assert two.policy() == Policy(20 << 30, None)
    reader, _ = open_store(read_only=True)
    with pytest.raises(StoreError, match="read-only"):
        reader.set_policy(Policy(1 << 30, None))
    assert two.policy() == Policy(20 << 30, None)


def test_make_client_missing_profile_raises_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nonexistent")
    with pytest.raises(ConfigurationError, match="nonexistent"):
        make_client(parse("s3://bucket/p")[1])
