"""The S3 driver: ``s3://bucket/prefix?region=eu-central-1``. docs/s3.md has options, guarantees and
limits.

Importing it does not import boto3: if boto3 is missing (extra ``s3``), opening a store raises
``MissingExtraError``.
"""

from persistkv_s3.backend import S3Backend
from persistkv_s3.options import S3Options

__all__ = ["S3Backend", "S3Options"]
