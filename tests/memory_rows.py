"""Read and damage the content of a memory store."""

from __future__ import annotations

from typing import Any

from persistkv.storage.catalog.rows import RowPayloads, manifest_row
from persistkv.testing.memory import MemoryBackend


def memory_of(backend: Any) -> MemoryBackend:
    """Return the memory backend, without the wrappers that inject faults."""
    while type(backend) is not MemoryBackend:
        backend = backend.inner
    assert isinstance(backend, MemoryBackend)
    return backend


def payload(backend: Any, namespace: bytes, pack_id: bytes) -> bytes:
    """Return the payload of a pack."""
    with memory_of(backend).rows() as rows:
        return b"".join(bytes(value) for _, value in rows.starting_with("pieces", namespace + pack_id))


def set_payload(backend: Any, namespace: bytes, pack_id: bytes, data: bytes) -> None:
    """Replace the payload of a pack by bytes of any length."""
    with memory_of(backend).rows(write=True) as rows:
        payloads = RowPayloads(rows)
        payloads.delete(namespace + pack_id)
        payloads.write(namespace + pack_id, iter([data]), len(data))


def flip(backend: Any, namespace: bytes, pack_id: bytes, offset: int, mask: int = 1) -> None:
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
    with memory_of(backend).rows(write=True) as rows:
        rows.put("packs", namespace + pack_id, bytes(8) + data)


def set_manifest_row(backend: Any, namespace: bytes, manifest_id: str, table: str, data: bytes) -> None:
    """Replace a manifest's head (table ``manifests``) or keys (table ``manifest_keys``)."""
    with memory_of(backend).rows(write=True) as rows:
        rows.put(table, manifest_row(namespace, manifest_id), data)
