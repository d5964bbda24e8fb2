"""A bucket as a plain boto3 client uses it: what ``persistkv bench`` holds the driver against."""

from __future__ import annotations

from collections.abc import Sequence

from persistkv.storage.backend import PlainMedium
from persistkv_s3.client.boto import BotoClient
from persistkv_s3.client.transport import Deadline
from persistkv_s3.options import Place, S3Options


class PlainBucket(BotoClient, PlainMedium):
    """One object for each ``write``, one request at a time, bytes joined before and copied behind, nothing checked."""

    def __init__(self, place: Place, options: S3Options) -> None:
        super().__init__(place, options)
        self._deadline_s = options.deadline_s
        self._written: list[str] = []

    def write(self, buffers: Sequence[memoryview]) -> None:
        key = f"{self._place.prefix}plain-{len(self._written)}"
        with self._translated("PUT", key, Deadline(self._deadline_s)):
            self._client.put_object(Bucket=self._place.bucket, Key=key, Body=b"".join(buffers), **self._extra)
        self._written.append(key)

    def read(self, buffers: Sequence[memoryview]) -> None:
        key = self._written[-1]
        with self._translated("GET", key, Deadline(self._deadline_s)):
            found = memoryview(self._client.get_object(Bucket=self._place.bucket, Key=key)["Body"].read())
        for buffer in buffers:
            buffer[:], found = found[: len(buffer)], found[len(buffer) :]

    def close(self) -> None:
        try:
            if self._written:
                self.delete(self._written, Deadline(self._deadline_s))
                self._written.clear()
        finally:
            super().close()
