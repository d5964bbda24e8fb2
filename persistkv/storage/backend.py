"""Interface of storage drivers: eight methods that every driver implements. ``extensions`` has the optional ones.

All methods raise vendor exceptions as ``StoreError``s, and a ``StoreError`` after ``close``. Returned objects belong to
the caller. ``read`` and ``tables`` may be called from any thread, concurrently with themselves and any other call. The
other methods are called by one thread at a time.

**Eviction.** A store with a capacity evicts in ``commit``, across all its namespaces:

1. The order is by last use. Each commit that uses something (writes it, or names it in ``touches``) is one moment. At
   the same moment, packs of unknown depth are evicted first, then deeper packs before shallower ones, and manifests
   last. Moments are numbers of a counter, not times, if all handles see the same order.
2. Writing a manifest touches its whole chain: a prefix is never evicted before the packs that depend on it.
3. Deleting a pack deletes the manifests that name it. The remaining blocks of such a request are found by their keys,
   without a whole context. Packs after it in such a manifest are deleted, too, unless another manifest names them.
4. A manifest is used only when it is written; later use of its packs does not prolong its life.
5. Pinned manifests and their packs are never evicted and never expire. ``deletions`` and ``bad`` still delete them.
6. With a ttl, the next commits delete packs and manifests that were unused for that long, also if room is not needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from persistkv.config import MAX_PACK_BYTES, StoreUrl
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.format.pack_writer import NewPack
from persistkv.storage.identity import Identity


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a driver or of an open store."""

    persistent: bool = True
    """Committed data is available after the store is opened again, by any process."""
    shared: bool = True
    """Several processes may have the store open and write to it."""
    remote: bool = False
    """Calls use a network: latency is high, and many calls run concurrently."""
    writable: bool = True
    """``commit`` is possible; False: the handle was opened read-only."""
    placements: tuple[str, ...] = ()
    """Possible placements of payloads, one of which is chosen when a store is created."""


@dataclass(frozen=True)
class Namespace:
    """Everything that is stored under one identity."""

    identity: Identity
    created: float
    """Seconds since the epoch."""

    @property
    def id(self) -> bytes:
        """The identity's digest, 16 bytes."""
        return self.identity.digest


@dataclass(frozen=True)
class ManifestWrite:
    """A manifest to be written."""

    manifest: RequestManifest
    keys: ManifestKeys
    """For each KV cache group, the keys of the whole context in order."""
    packs: Sequence[bytes] = ()
    """Ids of the packs that hold the keys, from the beginning of the context on. They are touched."""


@dataclass(frozen=True)
class CommitBatch:
    """Content of one transaction."""

    packs: Sequence[NewPack] = ()
    """Packs to write. Each is streamed at most once per attempt. A pack that is held with an undamaged row is kept."""
    manifests: Sequence[ManifestWrite] = ()
    """Manifests to write. Each replaces the manifest with the same id and keeps its pin."""
    deletions: Sequence[bytes] = ()
    """Ids of packs to delete before ``packs`` are written. Here and below, ids that are not held are ignored."""
    bad: Sequence[bytes] = ()
    """Ids of packs whose bytes do not verify. They and the manifests that name them are deleted. Later packs of these
    manifests are kept: they are intact and become reachable again."""
    touches: Sequence[bytes] = ()
    """Ids of packs that were used, all at one moment: name a pack together with the packs that it depends on."""
    pins: Sequence[tuple[str, bool]] = ()
    """(manifest id, True to pin or False to unpin), applied after ``manifests``."""
    seen: bytes | None = None
    """Cursor of the caller's last ``changes``: the commit is stale if there are newer changes. None: do not check."""
    memory: int = MAX_PACK_BYTES
    """Bytes of encoded packs that a ``remote`` driver may hold at once; one pack is always allowed."""


@dataclass(frozen=True)
class CommitResult:
    """Result of a transaction."""

    cursor: bytes
    """Position after this commit; if the commit was stale, ``seen``."""
    evicted: Sequence[PackTable] = ()
    """Packs of all namespaces that were evicted or deleted, except damaged ones, which only ``changes`` reports."""
    stale: bool = False
    """Nothing was done: another commit followed ``seen``. Apply ``changes`` and retry."""


@dataclass(frozen=True)
class Changes:
    """Changes of a namespace's catalogue."""

    cursor: bytes
    """Argument of the next call."""
    added: Iterable[PackTable]
    """Packs that were added and are still held. Iterate once; with ``reset``, this may read, and raise a StoreError."""
    removed: Mapping[bytes, bytes] = field(default_factory=dict)
    """Id of each removed pack → ``PackedKeys.fingerprints``; empty if the driver does not know them. Apply before
    ``added``: a pack may be in both."""
    reset: bool = False
    """``added`` is the whole catalogue (the first call, or a cursor that is too old)."""
    blocks: int | None = None
    """With ``reset``: number of blocks of ``added``, if known."""


@dataclass(frozen=True)
class ReadSpan:
    """Consecutive bytes of one pack's payload, and the buffers to fill with them."""

    pack_id: bytes
    offset: int
    """Offset of the first byte in the pack."""
    buffers: Sequence[memoryview] = field(repr=False)
    """Writable and contiguous, filled one after the other; their total size is the number of bytes to read."""


class Backend(ABC):
    """One open store."""

    capabilities: Capabilities = Capabilities()

    @classmethod
    @abstractmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> Backend:
        """Open the store; create it if it is absent and not ``read_only``.

        :raises ConfigurationError: an option is invalid; nothing was created.
        :raises StoreUnavailableError: it cannot be opened (permission, blocked by a file, absent and ``read_only``).
        :raises CorruptStoreError: the location holds other data or a newer format; it was not changed.
        """

    @abstractmethod
    def namespaces(self) -> Iterator[Namespace]:
        """Iterate over all namespaces, in any order, except damaged ones."""

    @abstractmethod
    def open_namespace(self, identity: Identity) -> Namespace:
        """Return the namespace of this identity; create it durably if it is absent and the store is writable.

        :raises StoreFullError: there is no room for a new namespace.
        :raises StoreUnavailableError: the namespace is absent, and the store is read-only.
        """

    @abstractmethod
    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        """Apply the whole batch atomically. It is durable on return, and totals are exact.

        To make room, packs are evicted, except packs that the batch writes or its manifests name. Evictions,
        ``touches`` and the deletion of manifests of packs to be deleted may become durable before the rest.

        State after a failure or a kill: as before the call, except for the latter operations (``changes`` reports
        evicted packs). Totals are exact, the handle stays usable, and the next commit may succeed.

        :raises StoreFullError: the batch does not fit, even after all possible evictions.
        :raises StoreError: no such namespace, a pack of another namespace, or a store that is open read-only. Errors of
            a pack's stream are raised unchanged.
        """

    @abstractmethod
    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        """Return the packs that any process added or removed after ``cursor``; the whole catalogue for None. Damaged
        rows are left out: their blocks are misses.

        :raises StoreError: no such namespace, or the medium failed; the cursor stays valid for a retry.
        """

    @abstractmethod
    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        """Fill the spans' buffers with stored bytes, unverified; return for each span whether it was filled. False is a
        miss: the pack is absent or too short, and the buffers have undefined content.

        :raises StoreError: the medium failed; the content of all buffers is undefined.
        """

    @abstractmethod
    def tables(self, namespace: bytes, pack_ids: Sequence[bytes]) -> list[PackTable]:
        """Return the tables of packs, in order, without those that are not held or damaged."""

    @abstractmethod
    def close(self) -> None:
        """Release the store; idempotent. Committed data is kept."""
