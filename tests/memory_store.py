"""Read and damage the content of a store in memory."""

from __future__ import annotations

from typing import Any

from persistkv.storage.catalog.rows import manifest_row
from persistkv.storage.shared.format import Names
from persistkv.testing import MemoryBackend


def memory_of(backend: Any) -> MemoryBackend:
    """Return the memory backend, without the wrappers that inject faults."""
    while not isinstance(backend, MemoryBackend):
        backend = backend.inner
    return backend


def payload(backend: Any, namespace: bytes, pack_id: bytes) -> bytes:
    """Return the payload of a pack, without the table that follows it."""
    memory = memory_of(backend)
    held = _replica(memory, namespace).blobs([pack_id])[pack_id]
    data = bytearray(held.table.payload_length)
    memory.blobs.read(
        _blob_of(memory, namespace, pack_id), 0, len(data), [memoryview(data)]
    )
    return bytes(data)


def set_payload(backend: Any, namespace: bytes, pack_id: bytes, data: bytes) -> None:
    """Replace the blob of a pack by bytes of any length."""
    memory = memory_of(backend)
    memory.blobs.put(_blob_of(memory, namespace, pack_id), [data])


def flip(
    backend: Any,
    namespace: bytes,
    pack_id: bytes,
    offset: int,
    mask: int = 1,
) -> None:
    """Flip bits in one byte of a payload."""
    data = bytearray(payload(backend, namespace, pack_id))
    data[offset] ^= mask
    set_payload(backend, namespace, pack_id, bytes(data))


def swap_payloads(backend: Any, namespace: bytes, one: bytes, other: bytes) -> None:
    """Exchange the payloads of two packs."""
    first, second = (payload(backend, namespace, pack_id) for pack_id in (one, other))
    set_payload(backend, namespace, one, second)
    set_payload(backend, namespace, other, first)


def set_table_row(backend: Any, namespace: bytes, pack_id: bytes, data: bytes) -> None:
    """Replace a pack's table."""
    with _replica(memory_of(backend), namespace).rows(write=True) as rows:
        rows.put("packs", namespace + pack_id, bytes(8) + data)


def set_manifest_row(
    backend: Any,
    namespace: bytes,
    manifest_id: str,
    table: str,
    data: bytes,
) -> None:
    """Replace a manifest's head (table ``manifests``) or the place of its keys (table
    ``manifest_keys``)."""
    with _replica(memory_of(backend), namespace).rows(write=True) as rows:
        rows.put(table, manifest_row(namespace, manifest_id), data)


def _replica(memory: MemoryBackend, namespace: bytes) -> Any:
    return memory._open(namespace).replica


def _blob_of(memory: MemoryBackend, namespace: bytes, pack_id: bytes) -> str:
    nonce: bytes = _replica(memory, namespace).blobs([pack_id])[pack_id].nonce
    return Names(namespace).pack(pack_id + nonce)
