"""The medium on S3 against the conformance suite of media."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.blobs import Blobs
from persistkv.testing.conformance.blobs import BlobsConformance, RawBlobs
from persistkv_s3.blobs import S3Blobs
from persistkv_s3.options import parse_url
from tests.backends.s3.conftest import PAGE_OF_MOTO

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_PREFIX = "some/store/"


class RawBucket(RawBlobs):
    """Objects of a bucket, through a client of boto3."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def get(self, name: str) -> bytes:
        found = self._client.get_object(Bucket=self._bucket, Key=f"{_PREFIX}{name}")
        return bytes(found["Body"].read())

    def put(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=f"{_PREFIX}{name}", Body=data)

    def names(self) -> Sequence[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket
        )
        entries = [entry for page in pages for entry in page.get("Contents", ())]
        return [entry["Key"].removeprefix(_PREFIX) for entry in entries]


def open_blobs(url: str) -> Blobs:
    return S3Blobs(*parse_url(StoreUrl.parse(url)))


class TestS3Blobs(BlobsConformance):
    # more than a page
    large_listing = 1100 if "PERSISTKV_S3_ENDPOINT" in os.environ else PAGE_OF_MOTO + 10

    @pytest.fixture
    def opener(self, endpoint: str, bucket: str) -> Callable[[], Blobs]:
        return partial(
            open_blobs, f"s3://{bucket}/{_PREFIX}?endpoint_url={endpoint}&deadline=60s"
        )

    @pytest.fixture
    def raw(self, raw_client: S3Client, bucket: str) -> RawBucket:
        return RawBucket(raw_client, bucket)
