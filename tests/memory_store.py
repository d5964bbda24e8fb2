"""Read and damage the content of a store in memory."""

from __future__ import annotations

from persistkv.storage.backend import Backend
from persistkv.storage.catalogue.rows import manifest_row
from persistkv.storage.shared.namespace import SharedNamespace
from persistkv.testing import FaultyBackend, MemoryBackend


def memory_of(backend: Backend) -> MemoryBackend:
    """Return the memory backend, without the wrappers that inject faults."""
    while isinstance(backend, FaultyBackend):
        backend = backend.inner
    assert isinstance(backend, MemoryBackend)
    return backend


def payload(backend: Backend, namespace: bytes, pack_id: bytes) -> bytes:
    """Return the payload of a pack, without the table that follows it."""
    held = _opened(backend, namespace).replica.blobs([pack_id])[pack_id]
    data = bytearray(held.table.payload_length)
    name = _blob_of(backend, namespace, pack_id)
    memory_of(backend).blobs.read(name, 0, len(data), [memoryview(data)])
    return bytes(data)


def set_payload(
    backend: Backend,
    namespace: bytes,
    pack_id: bytes,
    data: bytes,
) -> None:
    """Replace the blob of a pack by bytes of any length."""
    name = _blob_of(backend, namespace, pack_id)
    memory_of(backend).blobs.put(name, [data])


def flip(
    backend: Backend,
    namespace: bytes,
    pack_id: bytes,
    offset: int,
    mask: int = 1,
) -> None:
    """Flip bits in one byte of a payload."""
    data = bytearray(payload(backend, namespace, pack_id))
    data[offset] ^= mask
    set_payload(backend, namespace, pack_id, bytes(data))


def swap_payloads(backend: Backend, namespace: bytes, one: bytes, other: bytes) -> None:
    """Exchange the payloads of two packs."""
    first, second = (payload(backend, namespace, pack_id) for pack_id in (one, other))
    set_payload(backend, namespace, one, second)
    set_payload(backend, namespace, other, first)


def set_table_row(
    backend: Backend,
    namespace: bytes,
    pack_id: bytes,
    data: bytes,
) -> None:
    """Replace a pack's table."""
    with _opened(backend, namespace).replica.rows(write=True) as rows:
        rows.put("packs", namespace + pack_id, bytes(8) + data)


def set_manifest_row(
    backend: Backend,
    namespace: bytes,
    manifest_id: str,
    table: str,
    data: bytes,
) -> None:
    """Replace a manifest's head (table ``manifests``) or the place of its keys (table
    ``manifest_keys``)."""
    with _opened(backend, namespace).replica.rows(write=True) as rows:
        rows.put(table, manifest_row(namespace, manifest_id), data)


def _opened(backend: Backend, namespace: bytes) -> SharedNamespace:
    return memory_of(backend).opened_namespace(namespace)


def _blob_of(backend: Backend, namespace: bytes, pack_id: bytes) -> str:
    """Return the name of the blob that holds a pack."""
    opened = _opened(backend, namespace)
    nonce = opened.replica.blobs([pack_id])[pack_id].nonce
    return opened.names.pack(pack_id + nonce)
