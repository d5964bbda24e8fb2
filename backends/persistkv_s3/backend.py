"""The driver of ``s3://`` URLs: a shared store in a bucket."""

from __future__ import annotations

from collections.abc import Mapping

from persistkv.config import StoreUrl
from persistkv.storage.blobs import Blobs
from persistkv.storage.shared import SharedBackend
from persistkv_s3.blobs import S3Blobs
from persistkv_s3.client.boto import PlainBucket
from persistkv_s3.options import parse_url


class S3Backend(SharedBackend):
    """Shared store in a bucket, below a prefix, such as ``s3://bucket/prefix``."""

    @classmethod
    def open_blobs(
        cls,
        url: StoreUrl,
        options: Mapping[str, str],
        *,
        read_only: bool,
    ) -> Blobs:
        return S3Blobs(*parse_url(url, options))

    @classmethod
    def check_options(
        cls,
        url: StoreUrl,
        options: Mapping[str, str],
    ) -> None:
        parse_url(url, options)

    @classmethod
    def plain_medium(cls, url: StoreUrl) -> PlainBucket:
        _, own_options = cls.split_options(url)
        place, options = parse_url(url, own_options)
        return PlainBucket(place, options)
