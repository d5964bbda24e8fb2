"""Objects of one namespace's index: how their content is sealed.

In a store with a key, each object is a record that the data key of the store seals. In it, what
belongs to a tenant, the tables of its packs and its requests, is a record that the tenant's data
key seals. Segments and bases seal that content with the same data key again: when the key is
destroyed, the content is unreadable in all objects, in their older versions and in copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import msgspec

from persistkv.errors import CorruptPackError
from persistkv.storage.blobs import BlobInfo
from persistkv.storage.catalogue.rows import decoded
from persistkv.storage.format.manifest import decode_manifest
from persistkv.storage.format.pack import PLAIN_KEY, table_head
from persistkv.storage.format.seal import record_key
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.forgetting.records import ForgottenTenants
from persistkv.storage.shared.format import (
    MAX_OBJECT_BYTES,
    Delta,
    ManifestEntry,
    PackEntry,
    TenantContent,
    decode_content,
    decode_delta,
    encode,
    record_name,
)


class IndexObjects:
    """Reads and writes the objects of one namespace's index. Thread-safe."""

    def __init__(self, medium: Medium, namespace: bytes) -> None:
        self._medium = medium
        self._namespace = namespace

    def body(self, name: str, delta: Delta) -> bytes:
        """Return the body of the object ``name`` with this content, without forgotten content.

        :raises StoreError: the medium failed.
        """
        if not self._medium.seal.encrypts:
            forgotten = self._medium.records.forgotten
            return encode(_without_forgotten(delta, forgotten))
        seal_with = self._medium.seal.sealed_with
        content_name = self._content_name(name)
        # write one record for each data key, so that its destruction affects only its own content
        sealed: list[bytes] = []
        for data_key, content in _by_data_key(delta).items():
            plain = encode(content)
            seal = partial(seal_with, data_key, content_name, plain)
            record = self._unless_destroyed(data_key, seal)
            if record is not None:
                sealed.append(record)
        stored = msgspec.structs.replace(
            delta,
            packs=(),
            manifests=(),
            sealed=sealed,
        )
        return encode(stored)

    def _unless_destroyed(
        self,
        data_key: bytes,
        call: Callable[[], bytes],
    ) -> bytes | None:
        """Return the result of a call that seals or opens with a data key; None: the key is
        destroyed, so the content counts as forgotten."""
        if not self._medium.keys.holds(data_key):
            return None
        try:
            return call()
        except CorruptPackError:
            # ask again: if the key was destroyed since, the content counts as forgotten; otherwise
            # the record is damaged
            if self._medium.keys.holds(data_key):
                raise
            return None

    def put(self, name: str, body: bytes) -> BlobInfo:
        """Write the object ``name`` with this body; see ``Medium.put_sealed``."""
        return self._medium.put_sealed(name, body, self._namespace)

    def read(self, info: BlobInfo) -> Delta:
        """Return the content of an object. In a store with a key, it lacks the content of forgotten
        tenants; in one without a key, the replica refuses to apply that content.

        :raises BlobMissingError: there is no such blob.
        :raises CorruptPackError: see ``Medium.sealed``; or the key of a tenant does not read.
        :raises StoreError: the medium failed.
        """
        if info.size > MAX_OBJECT_BYTES:
            raise CorruptPackError("index object", f"it has {info.size} bytes")
        body = self._medium.sealed(info.name, self._namespace, info.size)
        stored = decode_delta(body)
        # nothing is sealed in a store without a key, or in an object without packs and requests
        if not stored.sealed:
            return stored
        if not self._medium.seal.encrypts:
            raise CorruptPackError("index object", "data keys seal some of it")
        opened = self._medium.seal.opened
        content_name = self._content_name(info.name)
        packs: list[PackEntry] = []
        manifests: list[ManifestEntry] = []
        for record in stored.sealed:
            data_key = record_key(record)
            open_record = partial(opened, content_name, record)
            content_body = self._unless_destroyed(data_key, open_record)
            if content_body is not None:
                content = decode_content(content_body)
                packs += content.packs
                manifests += content.manifests
        return msgspec.structs.replace(
            stored, packs=packs, manifests=manifests, sealed=()
        )

    def _content_name(self, name: str) -> bytes:
        """Return the name under which the content of a tenant in an object is sealed."""
        return record_name(self._namespace, f"content of {name}")


def _by_data_key(delta: Delta) -> dict[bytes, TenantContent]:
    """Return packs and requests by the data keys of their tenants."""
    packs: defaultdict[bytes, list[PackEntry]] = defaultdict(list)
    manifests: defaultdict[bytes, list[ManifestEntry]] = defaultdict(list)
    for entry in delta.packs:
        head = table_head(entry.body)
        # skip an unreadable table (None), as readers do
        if head is not None:
            packs[head.data_key].append(entry)
    for manifest in delta.manifests:
        manifests[manifest.data_key].append(manifest)
    data_keys = packs.keys() | manifests.keys()
    contents: dict[bytes, TenantContent] = {}
    for data_key in sorted(data_keys):
        contents[data_key] = TenantContent(
            packs=packs[data_key],
            manifests=manifests[data_key],
        )
    return contents


def _without_forgotten(delta: Delta, forgotten: ForgottenTenants) -> Delta:
    """Return a delta of a store without a key, without content that is forgotten."""
    if not forgotten.tenants:
        return delta
    packs: list[PackEntry] = []
    for entry in delta.packs:
        tenant = _pack_tenant(entry)
        if not forgotten.covers(tenant, PLAIN_KEY, entry.time):
            packs.append(entry)
    manifests: list[ManifestEntry] = []
    for manifest in delta.manifests:
        tenant = _manifest_tenant(manifest)
        if not forgotten.covers(tenant, PLAIN_KEY, manifest.time):
            manifests.append(manifest)
    return msgspec.structs.replace(delta, packs=packs, manifests=manifests)


def _pack_tenant(entry: PackEntry) -> str:
    """Return the tenant of a pack; empty if its table is unreadable, so that it is kept."""
    head = table_head(entry.body)
    return "" if head is None else head.tenant


def _manifest_tenant(entry: ManifestEntry) -> str:
    """Return the tenant of a request; empty if its manifest is unreadable, so that it is kept."""
    manifest = decoded(decode_manifest, entry.head)
    return "" if manifest is None else manifest.tenant
