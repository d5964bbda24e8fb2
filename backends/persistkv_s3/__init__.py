"""The S3 driver: ``s3://bucket/prefix?region=eu-central-1``. Options, promises and limits are in docs/s3.md.

Importing it does not import boto3, so that a missing extra is one clear line when a store is opened.
"""

from persistkv_s3.backend import S3Backend
from persistkv_s3.options import S3Options

__all__ = ["S3Backend", "S3Options"]
