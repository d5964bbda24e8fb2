"""The S3 driver against the conformance suite."""

from __future__ import annotations

from typing import Any

import pytest

from persistkv.storage.backend import Backend, CommitBatch, ReadSpan
from persistkv.storage.extensions import read_frames
from persistkv.testing.conformance import BackendConformance, RawKind, RawStore
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_s3 import S3Backend
from persistkv_s3.authentication import TAG_BYTES
from persistkv_s3.log.layout import LogName, Names


class RawS3(RawStore):
    """Raw access with boto3.

    After a change, the handle under test reloads its index, as a fresh handle would. Otherwise it would not fetch an
    immutable object a second time.
    """

    def __init__(self, client: Any, bucket: str, backend: S3Backend) -> None:
        self.client = client
        self.bucket = bucket
        self.backend = backend

    def _names(self, namespace: bytes) -> Names:
        return self.backend.session(namespace).names

    def get(self, kind: RawKind, namespace: bytes, name: bytes) -> bytes:
        key, start, stop = self._place(kind, namespace, name)
        return self._object(key)[start:stop]

    def put(self, kind: RawKind, namespace: bytes, name: bytes, data: bytes) -> None:
        before = self.get(kind, namespace, name)
        for key in self._copies(kind, namespace, name):
            whole = self._object(key)
            assert before in whole
            body = self._signed_again(namespace, key, whole.replace(before, data))
            self.client.put_object(Bucket=self.bucket, Key=key, Body=body)
        self.backend.session(namespace).follower.load()

    def _signed_again(self, namespace: bytes, key: str, body: bytes) -> bytes:
        """Sign an index object again, since an object without a valid signature would be ignored as a whole."""
        names, authenticator = self._names(namespace), self.backend.session(namespace).objects.authenticator
        if not authenticator.key_id or not key.startswith(names.log_prefix):
            return body
        return b"".join(authenticator.signed(namespace, key.removeprefix(names.base), [body[:-TAG_BYTES]]))

    def _object(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def _place(self, kind: RawKind, namespace: bytes, name: bytes) -> tuple[str, int, int]:
        names, state = self._names(namespace), self.backend.session(namespace).state
        if kind in (RawKind.PAYLOAD, RawKind.TABLE):
            held = state.packs[name]
            end = held.table.payload_length
            key = names.pack(name, held.generation)
            return (key, 0, end) if kind is RawKind.PAYLOAD else (key, end, end + held.table_bytes)
        manifest = state.manifests[name.decode()]
        if kind is RawKind.MANIFEST_KEYS:
            return (
                names.manifest_keys(manifest.keys),
                manifest.row.keys_offset,
                manifest.row.keys_offset + manifest.row.keys_length,
            )
        (key,) = self._index_objects(namespace, manifest.stamp.writer)
        start = self._object(key).index(manifest.head)
        return key, start, start + len(manifest.head)

    def _copies(self, kind: RawKind, namespace: bytes, name: bytes) -> list[str]:
        key, _, _ = self._place(kind, namespace, name)
        if kind is not RawKind.TABLE:
            return [key]
        writer = self.backend.session(namespace).state.packs[name].stamp.writer
        return [key, *self._index_objects(namespace, writer)]

    def _index_objects(self, namespace: bytes, writer: bytes) -> list[str]:
        """Return the names of the index objects of a writer that committed once."""
        return [self._names(namespace).log(LogName(writer, 1))]


class TestS3Backend(BackendConformance):
    driver = S3Backend

    @pytest.fixture
    def url(self, endpoint: str, bucket: str) -> str:
        return f"s3://{bucket}/store?endpoint_url={endpoint}&refresh=0s"

    @pytest.fixture
    def raw(self, raw_client: Any, bucket: str, backend: Backend) -> RawS3:
        assert isinstance(backend, S3Backend)
        return RawS3(raw_client, bucket, backend)


class TestS3BackendWithKey(TestS3Backend):
    """The conformance suite for a store with a key."""

    @pytest.fixture
    def url(self, endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("PERSISTKV_TEST_KEY", "k" * 32)
        return f"s3://{bucket}/store?endpoint_url={endpoint}&refresh=0s&key_env=PERSISTKV_TEST_KEY"

    def test_bytes_come_as_they_lie_there(self, backend: Backend, namespace: bytes, raw: RawStore) -> None:
        """Damaged frames are not returned, unlike in the test without a key: their tags do not match."""
        pack = sample_pack(namespace, 1, blocks=30, block_bytes=70_000)
        backend.commit(namespace, CommitBatch([pack]))
        payload, (first, second, *_) = payload_of(pack), pack.table.frames
        raw.flip(RawKind.PAYLOAD, namespace, pack.pack_id, second.offset + 1)
        buffers = [bytearray(100), bytearray(100)]
        offsets = (first.offset, second.offset + 60_000)
        spans = [ReadSpan(pack.pack_id, at, [memoryview(buffer)]) for at, buffer in zip(offsets, buffers, strict=True)]
        assert backend.read(namespace, spans) == [True, False]
        assert buffers[0] == payload[:100]
        came: list[int] = []
        into = memoryview(bytearray(1 << 20))
        read_frames(backend, namespace, pack.pack_id, pack.table.frames, into, lambda number, _: came.append(number))
        assert came == [number for number in range(len(pack.table.frames)) if number != 1]
