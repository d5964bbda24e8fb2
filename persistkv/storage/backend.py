"""The driver of one storage medium: the eight methods that all have. ``extensions`` has what some offer beyond them.

Contract shared by all methods: vendor exceptions come out as ``StoreError``s, and after ``close`` every other call
raises one. What a method hands out is the caller's to keep. ``read`` may be called from any thread, by several at once
and beside any other call; the other methods by one thread at a time.

**Eviction.** A store with a capacity makes room by itself, in ``commit``, over all its namespaces:

1. The order is that of the last use. Each commit that uses something (writes it, or names it in ``touches``) is one
   moment. Of what was used at the same moment, the packs that are deeper in their chains are evicted first, those of
   unknown depth before all, and manifests last. Moments are counted, not timed, if all handles see the same order.
2. With a request's manifest its whole chain is touched: a prefix is never evicted before what depends on it.
3. With a pack, the manifests that name it are deleted: what is left of such a request is found by its keys, but it is
   not the whole context. Packs behind it in such a manifest are deleted, too, if no other manifest names them.
4. A manifest is used when it is written; packs that later requests use do not keep it.
5. Neither a pinned manifest nor its packs are evicted or expire. ``deletions`` and ``bad`` delete them all the same.
6. With a ttl, what was not used for so long is deleted with the next commits, whether room is needed or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from persistkv.config import StoreUrl
from persistkv.storage.identity import Identity
from persistkv.storage.manifest import ManifestKeys, RequestManifest
from persistkv.storage.pack import MAX_PACK_BYTES, PackTable
from persistkv.storage.pack_writer import NewPack


@dataclass(frozen=True)
class Capabilities:
    """What a driver can do."""

    persistent: bool = True
    """What was committed is there when the store is opened again, by any process."""
    shared: bool = True
    """Several processes may have the store open and write to it."""
    remote: bool = False
    """Calls go over a network: each takes long, and many run side by side."""
    writable: bool = True
    """``commit`` writes; otherwise the handle was opened read-only."""
    placements: tuple[str, ...] = ()
    """Where a store may put payloads; fixed when it is created."""


@dataclass(frozen=True)
class Namespace:
    """All that a store holds under one identity."""

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
    """Ids of the packs that hold the keys, the ones nearest to the begin of the context first. They are touched."""


@dataclass(frozen=True)
class CommitBatch:
    """What one transaction does."""

    packs: Sequence[NewPack] = ()
    """Each is streamed at most once per attempt. A pack that is held, with an undamaged row, is left as it is."""
    manifests: Sequence[ManifestWrite] = ()
    """Each replaces the manifest of the same id, and takes over its pin."""
    deletions: Sequence[bytes] = ()
    """Ids of packs to delete, before ``packs`` are written. Here and below, what is not held is passed over."""
    bad: Sequence[bytes] = ()
    """Ids of packs whose bytes do not verify. They and the manifests that name them are deleted, but not the packs
    behind them: these are good, and will be reached again."""
    touches: Sequence[bytes] = ()
    """Ids of packs that were used, all at one moment: name a pack together with those that it depends on."""
    pins: Sequence[tuple[str, bool]] = ()
    """(manifest id, whether it is to be pinned), done after ``manifests``."""
    seen: bytes | None = None
    """The cursor of the caller's last ``changes``: if there are newer ones, the commit is stale. None: do not check."""
    memory: int = MAX_PACK_BYTES
    """Bytes of encoded packs that a ``remote`` driver holds at once; always one pack."""


@dataclass(frozen=True)
class CommitResult:
    """How a transaction ended."""

    cursor: bytes
    """The position after this commit; if it was stale, ``seen``."""
    evicted: Sequence[PackTable] = ()
    """Packs of all namespaces that were evicted or deleted, except damaged ones: ``changes`` names these."""
    stale: bool = False
    """Nothing was done: others committed after ``seen``. Apply ``changes`` and try again."""


@dataclass(frozen=True)
class Changes:
    """How a namespace's catalogue moved."""

    cursor: bytes
    """Argument of the next call."""
    added: Sequence[PackTable]
    """Packs that were added and are held now."""
    removed: Sequence[bytes] = ()
    """Ids of packs, removed before ``added`` were added: a pack may be in both."""
    reset: bool = False
    """``added`` is the whole catalogue (the first call, or a cursor that is too old)."""


@dataclass(frozen=True)
class ReadSpan:
    """Consecutive bytes of one pack's payload and where they go."""

    pack_id: bytes
    offset: int
    """First byte, counted from the pack's begin."""
    buffers: Sequence[memoryview] = field(repr=False)
    """Writable and contiguous, filled one after the other; their sum is the number of bytes to read."""


class Backend(ABC):
    """One open store."""

    capabilities: Capabilities = Capabilities()

    @classmethod
    @abstractmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> Backend:
        """Open the store; create it if it is absent and not ``read_only``.

        :raises ConfigurationError: an option is wrong; nothing was created.
        :raises StoreUnavailableError: it cannot be opened (permission, a file in the way, absent and ``read_only``).
        :raises CorruptStoreError: there is something else, or a newer format; it was not changed.
        """

    @abstractmethod
    def namespaces(self) -> Iterator[Namespace]:
        """Iterate over all namespaces, in any order, except damaged ones."""

    @abstractmethod
    def open_namespace(self, identity: Identity) -> Namespace:
        """Return the namespace of this identity; create it durably if it is absent and the store is writable.

        :raises StoreFullError: there is no room for it.
        :raises StoreUnavailableError: absent, and the store is read-only.
        """

    @abstractmethod
    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        """Do all of the batch, or nothing. What it did is durable on return, and totals are exact.

        If there is no room, packs are evicted, but none that the batch writes or that its manifests name. Evictions,
        ``touches`` and manifests of packs to be deleted may be durable before the rest.

        State after failure, also after a process was killed in here: as before the call, but for these (``changes``
        names what was evicted), with exact totals; the handle stays usable and the next commit may succeed.

        :raises StoreFullError: it does not fit, whatever may be evicted.
        :raises StoreError: no such namespace, a pack of another one, a store that is open read-only. An error of a
            pack's stream is raised as it is.
        """

    @abstractmethod
    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        """Return packs that were added and removed after ``cursor``, by anyone; the whole catalogue for None.

        Damaged rows are left out: their blocks are misses.
        :raises StoreError: no such namespace, or the medium failed; the cursor is good for another try.
        """

    @abstractmethod
    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        """Fill the spans' buffers with stored bytes, unverified; return for each span whether it was filled.

        False is a miss: the pack is gone, or shorter. The buffers of a span that was not filled hold anything.

        :raises StoreError: the medium failed; nothing of the spans may be used then.
        """

    @abstractmethod
    def tables(self, namespace: bytes, pack_ids: Sequence[bytes]) -> list[PackTable]:
        """Return the tables of packs, in order, without those that are not held or damaged."""

    @abstractmethod
    def close(self) -> None:
        """Release the store; idempotent. What was committed stays."""
