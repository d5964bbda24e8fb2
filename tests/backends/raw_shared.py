"""Access to the content of a shared store around its driver, on any medium."""

from __future__ import annotations

from typing import NamedTuple

from persistkv.storage.blobs import Blobs
from persistkv.storage.catalogue.rows import MANIFESTS, PACKS, manifest_row
from persistkv.storage.shared import SharedBackend
from persistkv.testing.conformance import RawKind, RawStore


class _Place(NamedTuple):
    """Part of a blob."""

    blob: str
    start: int
    stop: int


class RawShared(RawStore):
    """Blobs, through another handle of the medium, and the rows of a store's replica."""

    def __init__(self, blobs: Blobs, backend: SharedBackend) -> None:
        self.blobs = blobs
        self.backend = backend

    def get(self, kind: RawKind, namespace: bytes, name: bytes) -> bytes:
        if kind in (RawKind.TABLE, RawKind.MANIFEST):
            replica = self.backend.opened_namespace(namespace).replica
            with replica.rows() as rows:
                return bytes(rows.get(*_row(kind, namespace, name)) or b"")
        place = self._place(kind, namespace, name)
        return self._read(place.blob)[place.start : place.stop]

    def put(self, kind: RawKind, namespace: bytes, name: bytes, data: bytes) -> None:
        if kind in (RawKind.TABLE, RawKind.MANIFEST):
            replica = self.backend.opened_namespace(namespace).replica
            with replica.rows(write=True) as rows:
                rows.put(*_row(kind, namespace, name), data)
            return
        place = self._place(kind, namespace, name)
        whole = self._read(place.blob)
        self.blobs.put(place.blob, [whole[: place.start], data, whole[place.stop :]])

    def _read(self, blob: str) -> bytes:
        folder = blob.rpartition("/")[0] + "/"
        (size,) = [info.size for info in self.blobs.list(folder) if info.name == blob]
        content = bytearray(size)
        self.blobs.read(blob, 0, size, [memoryview(content)])
        return bytes(content)

    def _place(self, kind: RawKind, namespace: bytes, name: bytes) -> _Place:
        opened = self.backend.opened_namespace(namespace)
        replica, names = opened.replica, opened.names
        if kind is RawKind.PAYLOAD:
            held = replica.blobs([name])[name]
            return _Place(names.pack(name + held.nonce), 0, held.table.payload_length)
        keys = replica.keys_place(name.decode())
        assert keys is not None
        return _Place(
            names.keys_blob(keys.nonce), keys.offset, keys.offset + keys.length
        )


def _row(kind: RawKind, namespace: bytes, name: bytes) -> tuple[str, bytes]:
    if kind is RawKind.TABLE:
        return PACKS, namespace + name
    return MANIFESTS, manifest_row(namespace, name.decode())
