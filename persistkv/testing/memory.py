"""A store in memory, for tests: the shortest correct driver.

Each open is a store of its own, which ends with its handle.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from persistkv.config import StoreUrl, convert_options, parse_duration, parse_size
from persistkv.errors import CorruptPackError, StoreError, StoreFullError, StoreUnavailableError
from persistkv.storage.backend import (
    Backend,
    BackendStats,
    Capabilities,
    Changes,
    CommitBatch,
    CommitResult,
    Namespace,
    ReadSpan,
    RequestUse,
)
from persistkv.storage.identity import Identity
from persistkv.storage.manifest import (
    ManifestKeys,
    RequestManifest,
    decode_manifest,
    decode_manifest_keys,
)
from persistkv.testing.memory_commit import CHANGES_KEPT, Draft, Space, StoredPack


class MemoryOptions(msgspec.Struct, frozen=True):
    """What a URL such as ``memory://test?capacity=64MiB`` may set."""

    capacity: str | None = None
    """Bytes of payloads, tables and manifests; None: no bound."""
    ttl: str | None = None
    """How long what nobody uses is kept, a duration such as ``7d``; None: as long as there is room."""


class MemoryBackend(Backend):
    """The driver. ``spaces`` is open to tests that damage what lies there."""

    capabilities = Capabilities(persistent=False, shared=False)
    changes_kept = CHANGES_KEPT

    def __init__(self, capacity: int | None = None, ttl_s: float | None = None) -> None:
        self.capacity = capacity
        self._ttl_s = ttl_s
        self._moment = 0
        self._time = 0.0
        self.spaces: dict[bytes, Space] = {}
        self._closed = False

    @classmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> MemoryBackend:
        options = convert_options(MemoryOptions, url.options, where="memory")
        capacity = None if options.capacity is None else parse_size(options.capacity, name="memory option capacity")
        ttl_s = None if options.ttl is None else parse_duration(options.ttl, name="memory option ttl")
        if read_only:
            raise StoreUnavailableError(f"memory://{url.location} is new with each open: there is nothing to read")
        return cls(capacity, ttl_s)

    def namespaces(self) -> Iterator[Namespace]:
        self._check_open()
        return iter([space.namespace for space in self.spaces.values()])

    def open_namespace(self, identity: Identity) -> Namespace:
        self._check_open()
        fresh = Space(Namespace(identity, time.time()))
        return self.spaces.setdefault(identity.digest, fresh).namespace

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        space = self._space(namespace)
        if batch.seen is not None and batch.seen != space.cursor:
            return CommitResult(batch.seen, stale=True)
        if any(pack.namespace != namespace for pack in batch.packs):
            raise StoreError(f"a pack of another namespace than {namespace.hex()}")
        self._time = max(self._time, time.time())  # the clock of a machine may go back
        draft = Draft(self.spaces, namespace, self._moment + 1, self._time, batch)
        draft.apply()
        if self._ttl_s is not None:
            draft.expire(self._ttl_s)
        if (batch.packs or batch.manifests) and not draft.evict(self._fits):
            raise StoreFullError(f"the commit does not fit {self.capacity} bytes")
        self._moment += batch.uses_anything
        self.spaces.update(draft.spaces)
        return CommitResult(draft.space.cursor, draft.evicted)

    def _fits(self, held_bytes: int) -> bool:
        return self.capacity is None or held_bytes <= self.capacity

    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        space = self._space(namespace)
        behind = space.changed + 1
        if cursor is not None and len(cursor) == len(space.cursor):
            behind = space.changed - int.from_bytes(cursor, "big")
        if not 0 <= behind <= len(space.log):
            tables = [table for pack in space.packs.values() for table in pack.readable()]
            return Changes(space.cursor, tables, reset=True)
        moved = space.log[len(space.log) - behind :]
        added = {pack_id: space.packs[pack_id] for pack_id, came in moved if came and pack_id in space.packs}
        removed = [pack_id for pack_id, came in moved if not came]
        return Changes(space.cursor, [table for pack in added.values() for table in pack.readable()], removed)

    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        space = self._space(namespace)
        return [_fill(space.packs.get(span.pack_id), span) for span in spans]

    def manifests(self, namespace: bytes) -> Iterator[RequestManifest]:
        for row in list(self._space(namespace).manifests.values()):
            try:
                yield decode_manifest(row.head)
            except CorruptPackError:
                continue

    def manifests_naming(self, namespace: bytes, packs: Sequence[bytes]) -> list[RequestManifest]:
        space = self._space(namespace)
        names = {name for pack in packs for name in space.naming(pack)}
        return [head for head in self.manifests(namespace) if head.id in names]

    def manifest_keys(self, namespace: bytes, manifest_id: str) -> ManifestKeys | None:
        row = self._space(namespace).manifests.get(manifest_id)
        try:
            return None if row is None else decode_manifest_keys(row.keys)
        except CorruptPackError:
            return None

    def uses(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[RequestUse | None]:
        space = self._space(namespace)
        return [space.request_use(manifest_id) for manifest_id in manifest_ids]

    def stats(self) -> BackendStats:
        self._check_open()
        packs = [pack for space in self.spaces.values() for pack in space.packs.values()]
        tables = [table for pack in packs for table in pack.readable()]
        return BackendStats(
            packs=len(packs),
            blocks=sum(len(table.keys) for table in tables),
            requests=sum(len(space.manifests) for space in self.spaces.values()),
            raw_bytes=sum(table.raw_length for table in tables),
            stored_bytes=sum(len(pack.payload) for pack in packs),
            disk_bytes=sum(space.held_bytes for space in self.spaces.values()),
            capacity=self.capacity,
        )

    def close(self) -> None:
        self._closed = True
        self.spaces.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("this memory store is closed")

    def _space(self, namespace: bytes) -> Space:
        self._check_open()
        if namespace not in self.spaces:
            raise StoreError(f"no namespace {namespace.hex()} in this memory store")
        return self.spaces[namespace]


def _fill(pack: StoredPack | None, span: ReadSpan) -> bool:
    if pack is None or span.offset + sum(buffer.nbytes for buffer in span.buffers) > len(pack.payload):
        return False
    start = span.offset
    for buffer in span.buffers:
        buffer.cast("B")[:] = memoryview(pack.payload)[start : start + buffer.nbytes]
        start += buffer.nbytes
    return True
