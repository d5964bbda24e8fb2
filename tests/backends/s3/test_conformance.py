"""The S3 driver against the conformance suite and the rules of the catalogue.

Slow on a simulated server, and the store is the same on each medium: the short runs are those of
``test_sqlite_example``, and with a key of the store in a directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from persistkv.storage.catalogue.rows import MANIFESTS, PACKS, manifest_row
from persistkv.storage.shared.replica import Replica
from persistkv.testing.conformance import (
    BackendConformance,
    RawKind,
    RawStore,
)
from persistkv_s3 import S3Backend
from tests.backends.catalogue_rules import CatalogueRules
from tests.backends.eviction_rules import EvictionRules

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client


class RawS3(RawStore):
    """Raw access with boto3, and to the rows of the local catalogue."""

    def __init__(self, client: S3Client, bucket: str, backend: S3Backend) -> None:
        self.client = client
        self.bucket = bucket
        self.backend = backend

    def get(self, kind: RawKind, namespace: bytes, name: bytes) -> bytes:
        if kind in (RawKind.TABLE, RawKind.MANIFEST):
            with self._replica(namespace).rows() as rows:
                return bytes(rows.get(*self._row(kind, namespace, name)) or b"")
        key, start, stop = self._place(kind, namespace, name)
        return self._object(key)[start:stop]

    def put(self, kind: RawKind, namespace: bytes, name: bytes, data: bytes) -> None:
        if kind in (RawKind.TABLE, RawKind.MANIFEST):
            with self._replica(namespace).rows(write=True) as rows:
                rows.put(*self._row(kind, namespace, name), data)
            return
        key, start, stop = self._place(kind, namespace, name)
        whole = self._object(key)
        self.client.put_object(
            Bucket=self.bucket, Key=key, Body=whole[:start] + data + whole[stop:]
        )

    def _replica(self, namespace: bytes) -> Replica:
        return self.backend.opened_namespace(namespace).replica

    def _row(self, kind: RawKind, namespace: bytes, name: bytes) -> tuple[str, bytes]:
        if kind is RawKind.TABLE:
            return PACKS, namespace + name
        return MANIFESTS, manifest_row(namespace, name.decode())

    def _object(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def _place(
        self,
        kind: RawKind,
        namespace: bytes,
        name: bytes,
    ) -> tuple[str, int, int]:
        opened = self.backend.opened_namespace(namespace)
        replica, names = opened.replica, opened.names
        if kind is RawKind.PAYLOAD:
            held = replica.blobs([name])[name]
            return (
                f"store/{names.pack(name + held.nonce)}",
                0,
                held.table.payload_length,
            )
        place = replica.keys_place(name.decode())
        assert place is not None
        return (
            f"store/{names.keys_blob(place.nonce)}",
            place.offset,
            place.offset + place.length,
        )


@pytest.mark.slow
class TestS3Backend(BackendConformance, CatalogueRules, EvictionRules):
    driver = S3Backend
    ends_namespaces = False

    @pytest.fixture
    def url(self, endpoint: str, bucket: str) -> str:
        return f"s3://{bucket}/store?endpoint_url={endpoint}&refresh=0s"

    @pytest.fixture
    def raw(self, raw_client: S3Client, bucket: str, backend: S3Backend) -> RawS3:
        return RawS3(raw_client, bucket, backend)


@pytest.mark.slow
class TestS3BackendWithKey(BackendConformance):
    """The conformance suite for a store with a key. The rules of the catalogue know packs by ids
    that follow from their keys, and those of a store with a key are random.
    """

    driver = S3Backend
    ends_namespaces = False

    @pytest.fixture
    def url(self, endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("PERSISTKV_TEST_KEY", "k" * 32)
        return f"s3://{bucket}/store?endpoint_url={endpoint}&refresh=0s&key_env=PERSISTKV_TEST_KEY"

    @pytest.fixture
    def raw(self, raw_client: S3Client, bucket: str, backend: S3Backend) -> RawS3:
        return RawS3(raw_client, bucket, backend)
