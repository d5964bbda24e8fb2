"""Options of an ``s3://`` URL. They never include credentials, which come from the AWS chain or the
environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from persistkv.config import StoreUrl, convert_options, parse_duration
from persistkv.errors import ConfigurationError, MissingOptionError
from persistkv.storage.shared.options import SHARED_NAMES

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()\-/]*")
_MAX_PREFIX = 256
# parts that a prefix must not have between slashes
_INVALID_PARTS = frozenset({"", ".", ".."})
_ACCOUNT = re.compile(r"[0-9]{12}")
# names of options that may hold a secret
_CREDENTIAL = re.compile(
    "key|secret|token|password|credential|signature", re.IGNORECASE
)
_ENDPOINT = "https://host:port or http://host:port, without user, path or query"
_DURATIONS = ("deadline", "slow")  # names of the options that are durations


class S3Options(msgspec.Struct, frozen=True):
    """Options of an opened store, which ``parse_url`` reads from its URL; docs/s3.md describes them
    for users. Durations (``…_s``) are in seconds. The options of every shared store are in
    ``persistkv.storage.shared``.
    """

    endpoint_url: str | None = None
    """Server; None: that of boto3's configuration, by default AWS."""
    region: str | None = None
    """None: that of boto3's configuration, else us-east-1."""
    path_style: bool | None = None
    """Whether the bucket's name is in the path of requests instead of the host; None: if there is
    an ``endpoint_url``."""
    checksum: Literal["when_required", "crc32"] = "when_required"
    """``when_required``: only uploads for which S3 requires it carry a CRC32. persistkv's own
    checksums cover bytes at rest in any case."""
    unsigned_payload: bool | None = None
    """Whether signatures leave out the bodies of uploads, which saves time; None: with https."""
    sse: Literal["AES256", "aws:kms"] | None = None
    """Server-side encryption; None: as the bucket is configured."""
    sse_kms_key_id: str | None = None
    """Key of KMS; None: the default key of the account."""
    sse_bucket_key: bool | None = None
    """Whether one request to KMS serves many objects; None: as the bucket is configured."""
    expected_bucket_owner: str | None = None
    """Account that must own the bucket, 12 digits; None: any."""
    deadline_s: float = msgspec.field(default=30.0, name="deadline")
    """For one operation (upload, download, page of a listing), including retries. The last attempt
    may exceed it by a socket timeout: a third of it, at least 1 s."""
    slow_s: float = msgspec.field(default=10.0, name="slow")
    """Time after which an answer counts as slow for the breaker, plus that of its bytes at 1
    MiB/s."""
    connections: int = 8
    """From 1 to 64. Concurrent calls share this number of threads."""

    def __post_init__(self) -> None:
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)
        kms_options = {
            "sse_kms_key_id": self.sse_kms_key_id,
            "sse_bucket_key": self.sse_bucket_key,
        }
        for name, value in kms_options.items():
            if value is not None and self.sse != "aws:kms":
                raise MissingOptionError(f"s3 option {name}", "sse=aws:kms")
        owner = self.expected_bucket_owner
        if owner is not None and not _ACCOUNT.fullmatch(owner):
            raise ConfigurationError(
                "s3 option expected_bucket_owner", owner, "12 digits"
            )
        if not 1 <= self.connections <= 64:
            raise ConfigurationError(
                "s3 option connections", self.connections, "a number from 1 to 64"
            )


class BucketPlace(msgspec.Struct, frozen=True):
    """Location of a store: bucket and prefix."""

    bucket: str
    prefix: str
    """Start of the S3 keys of all objects of the store: empty, or ending in a slash."""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


def parse_url(
    url: StoreUrl,
    bucket_options: Mapping[str, str] | None = None,
) -> tuple[BucketPlace, S3Options]:
    """Return location and options of a bucket; raise ``ConfigurationError`` with the name of an
    invalid part.

    :param bucket_options: the URL's options that concern the bucket; None: all of them do.
    """
    given = url.options if bucket_options is None else bucket_options
    _check_names(given)
    values: dict[str, str | int | float] = {**given}
    for name in _DURATIONS:
        if name in given:
            values[name] = parse_duration(given[name], name=f"s3 option {name}")
    options = convert_options(S3Options, values, where="s3", others=SHARED_NAMES)
    return _parse_place(url.location), options


def _check_names(options: Mapping[str, str]) -> None:
    """Raise a ``ConfigurationError`` that does not reveal the value, if an option is a secret.
    Called first: errors of other checks may show values."""
    for name in options:
        if _CREDENTIAL.search(name) and name not in S3Options.__struct_fields__:
            expected = "no credentials in URLs: see docs/s3.md, Credentials"
            raise ConfigurationError(f"s3 option {name}", "…", expected)


def _parse_place(location: str) -> BucketPlace:
    """Return the bucket and the prefix that a URL names."""
    bucket, _, prefix = location.partition("/")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        expected = "a bucket's name: 3 to 63 of a-z, 0-9, dot and hyphen"
        raise ConfigurationError("url", f"s3://{bucket}", expected)
    prefix = prefix.strip("/")
    if not prefix:
        return BucketPlace(bucket, "")
    parts = prefix.split("/")
    has_invalid_part = not _INVALID_PARTS.isdisjoint(parts)
    is_too_long = len(prefix) > _MAX_PREFIX
    if has_invalid_part or is_too_long or not _PREFIX.fullmatch(prefix):
        text = f"a prefix of at most {_MAX_PREFIX} letters, digits and !_.*'()-"
        raise ConfigurationError("url", location, text + ", in parts split by /")
    return BucketPlace(bucket, f"{prefix}/")


def _check_endpoint(endpoint: str) -> None:
    """Raise ConfigurationError unless this is an http or https URL of a host, which contains no
    credentials."""
    # replace the errors, which show the endpoint: it may contain a password
    try:
        parts = urlsplit(endpoint)
        host = parts.hostname
        _ = parts.port  # accessing the port checks it
    except ValueError:
        raise ConfigurationError("s3 option endpoint_url", "…", _ENDPOINT) from None
    if "@" in parts.netloc:
        raise ConfigurationError(
            "s3 option endpoint_url", f"{parts.scheme}://…", _ENDPOINT
        )
    is_host = parts.scheme in ("http", "https") and bool(host)
    has_path = bool(parts.path.strip("/"))
    if not is_host or has_path or parts.query or parts.fragment:
        raise ConfigurationError("s3 option endpoint_url", endpoint, _ENDPOINT)
