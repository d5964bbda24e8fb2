"""A checked pack out of a store."""

from __future__ import annotations

from collections.abc import Callable

from persistkv.storage.backend import Backend
from persistkv.storage.pack import PackTable
from persistkv.storage.stored_pack import StoredPack
from persistkv_tools.pack_check import Finding, check_pack


def read_pack(
    backend: Backend, table: PackTable, took: Callable[[int], None]
) -> tuple[StoredPack | None, list[Finding]]:
    """A pack out of a store, checked; or what is wrong with it.

    :raises OtherReleaseError: this release cannot decode it.
    :raises StoreError: the medium failed.
    """
    payload = bytearray()
    findings = check_pack(backend, table, took, payload)
    return (None if findings else StoredPack(table, payload)), findings
