"""Interface of stores, which the LMDB driver and the shared store implement.

A feature that a kind of store lacks is plain data: fields of ``Capabilities``, None, or an empty
result. No caller asks for the type of a backend.

Methods raise vendor exceptions as ``StoreError``s; after ``close``, they raise a ``StoreError``.
The caller owns returned objects. Any thread may call ``read``, ``read_frames``, ``scan`` and
``tables``, concurrently with any other call; only one thread at a time may call the other methods.
A pack's payload is its frames as stored. *Held* means: contained in the store. The rules of
eviction are in ``storage.catalogue``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from persistkv.config import MAX_PACK_BYTES, StoreUrl
from persistkv.errors import StoreError
from persistkv.storage.checks import Check
from persistkv.storage.forgetting import Forgotten
from persistkv.storage.format.keys import StoreKey
from persistkv.storage.format.manifest import ManifestKeys, RequestManifest
from persistkv.storage.format.pack import Frame, PackTable
from persistkv.storage.format.pack_writer import NewPack
from persistkv.storage.format.seal import PLAIN, Seal
from persistkv.storage.identity import Identity
from persistkv.storage.policy import Policy
from persistkv.storage.stats import BackendStats, FreeSpace, MergeState, Rebuilt

if TYPE_CHECKING:
    from persistkv.storage.catalogue import Catalogue
    from persistkv.storage.catalogue.quotas import TenantTotals


@dataclass(frozen=True)
class Capabilities:
    """Properties of a kind of store, or of an open one, for its callers."""

    shared: bool = True
    """Several processes may have the store open and write to it. False: it ends with its handle."""
    remote: bool = False
    """Calls use a network: latency is high, and many calls run concurrently."""
    writable: bool = True
    """``commit`` is possible; False: the handle was opened read-only."""


@dataclass(frozen=True)
class Namespace:
    """Namespace of a store, which contains all that is stored under one identity.

    It begins with its first pack or manifest, and ends with its last. Without content it takes no
    room, except for notes that were written before.
    """

    identity: Identity
    created: float
    """Time of creation, when the process that stored the first content opened it: seconds since the
    epoch, on the clock of that process."""

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
    """Ids of the packs that hold the keys, from the beginning of the context on. The commit counts
    as their use."""


@dataclass(frozen=True)
class CommitBatch:
    """Content of one transaction."""

    packs: Sequence[NewPack] = ()
    """Packs to write, each streamed at most once per attempt. A pack that is held with an intact
    table is not written again, only marked used."""
    manifests: Sequence[ManifestWrite] = ()
    """Manifests to write. Each replaces the manifest with the same id and keeps its pin."""
    deletions: Sequence[bytes] = ()
    """Ids of packs to delete before ``packs`` are written. Ids that are not held are ignored."""
    bad: Sequence[bytes] = ()
    """Ids of packs to delete because their bytes do not verify, with the manifests that name them.
    Packs after them in these manifests are kept, unlike those after ``deletions``. Ids that are not
    held are ignored."""
    manifest_deletions: Sequence[str] = ()
    """Ids of manifests to delete before ``manifests`` are written. Their packs are kept. Ids that
    are not held are ignored."""
    touches: Sequence[bytes] = ()
    """Ids of packs that were used, all at one moment: name a pack together with the packs that it
    depends on. Ids that are not held are ignored."""
    pins: Sequence[tuple[str, bool]] = ()
    """(manifest id, True to pin or False to unpin), applied after ``manifests``; ids that are not
    held are ignored."""
    seen: bytes | None = None
    """Position up to which the caller knows the namespace's changes (``Changes.cursor``): newer
    changes make the commit stale. None: do not check."""
    needs: Sequence[bytes] | None = None
    """Ids of the packs that must still be held, if ``seen`` is given. A driver may accept newer
    changes as long as these packs are held (``CommitResult.interleaved``). None: newer changes make
    the commit stale."""
    memory: int = MAX_PACK_BYTES
    """Bytes of encoded packs that a ``remote`` driver may hold at once; one pack is always
    allowed."""


@dataclass(frozen=True)
class CommitResult:
    """Result of a transaction."""

    cursor: bytes
    """Argument for ``changes``: the position after this commit; if the commit was stale,
    ``seen``."""
    evicted: Sequence[PackTable] = ()
    """Tables of all packs that this commit removed, in any namespace, except those whose table is
    damaged."""
    stale: bool = False
    """True: the batch was not written, because another commit followed ``CommitBatch.seen``; packs
    may have been evicted. Apply ``changes`` and retry."""
    interleaved: bool = False
    """True: the batch was written, and other commits followed ``CommitBatch.seen`` before it. Apply
    ``changes``."""


@dataclass(frozen=True)
class Changes:
    """Changes of a namespace's catalogue, which lists its packs."""

    cursor: bytes
    """Position after these changes: the argument of the next call."""
    added: Iterable[PackTable]
    """Tables of added packs that are still held. Iterate once: with ``reset``, this may read and
    raise a StoreError."""
    removed: Mapping[bytes, bytes] = field(default_factory=dict)
    """Id of each removed pack → xxh3-64 of each key (``PackedKeys.fingerprints``); empty bytes if
    the driver does not know them. Apply before ``added``: a pack that was removed and written again
    is in both."""
    reset: bool = False
    """``added`` is the whole catalogue: there was no cursor, or it is too old or invalid."""
    blocks: int | None = None
    """Approximate number of blocks of ``added``; None: unknown, or no ``reset``."""


@dataclass(frozen=True)
class ReadSpan:
    """Consecutive bytes of one pack's payload, and the buffers to fill with them."""

    pack_id: bytes
    offset: int
    """Offset of the first byte in the pack's payload."""
    buffers: Sequence[memoryview] = field(repr=False)
    """Writable and contiguous, filled one after the other; their total size is the number of bytes
    to read."""


TakeFrame = Callable[[int, memoryview], None]
"""Receives a frame that ``Backend.read_frames`` has read: its index in ``frames``, and its stored
bytes, which are valid until the call returns. May raise, to end the read."""


class Backend(ABC):
    """Handle of one open store."""

    capabilities: Capabilities = Capabilities()
    status_interval_s: float | None = None
    """Seconds between status rows of an engine; None: engines publish no status."""

    @classmethod
    @abstractmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> Backend:
        """Open the store; create it if it is absent and not ``read_only``.

        :raises ConfigurationError: an option is invalid; nothing was created.
        :raises StoreUnavailableError: it cannot be opened (permission, blocked by a file, absent
            and ``read_only``).
        :raises CorruptStoreError: the location holds other data or a newer format; it was not
            changed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the store; idempotent. Committed data is kept."""

    # Content, for engines

    @property
    def seal(self) -> Seal:
        """Seal of the store, with which packs for ``commit`` are made, and their frames opened."""
        return PLAIN

    @abstractmethod
    def open_namespace(self, identity: Identity) -> Namespace:
        """Return the namespace of this identity. If it has no content, ``commit`` may begin it from
        now on, here or in another process; until then ``changes`` is empty and all reads are
        misses, also in a read-only store.

        :raises StoreUnavailableError: the namespace is absent, the store is read-only, and the
            driver (S3) cannot read it later.
        """

    @abstractmethod
    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        """Apply the whole batch atomically. On return, it is durable, and the totals of the store
        are exact. In a remote store, a batch of only ``touches`` may become durable later.

        To make room, packs are evicted, except those that the batch writes or its manifests name.
        Three steps may become durable earlier: evictions, ``touches``, and the deletion of
        manifests that name packs to be deleted.

        State after a failure or a kill: as before the call, except for these steps (``changes``
        reports the evicted packs). In a remote store, a commit whose answer was lost may also have
        taken effect as a whole. Totals are exact, the handle stays usable, and the next commit may
        succeed.

        :raises QuotaExceededError: packs of a tenant do not fit its quota, even after all possible
            evictions of its content; nothing of the batch was written.
        :raises StoreFullError: the batch does not fit, even after all possible evictions.
        :raises TenantForgottenError: tenants of the batch were forgotten since this handle was
            opened, or last raised this for them.
        :raises StoreError: content for a namespace that is neither held nor opened, a pack of
            another namespace, or a store that is open read-only. Errors of a pack's stream are
            raised unchanged.
        """

    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        """Return the packs that any process added or removed after ``cursor``; the whole catalogue
        for None. Packs with a damaged table are left out: their blocks are misses. Positions from
        before the end of a namespace are invalid (``Changes.reset``), also if it has begun again.

        :raises StoreError: the medium failed; the cursor stays valid for a retry. Drivers may raise
            it, too, for a namespace that is neither held nor opened.
        """
        return self.catalogue(namespace).changes(cursor)

    @abstractmethod
    def read(
        self,
        namespace: bytes,
        spans: Sequence[ReadSpan],
    ) -> list[bool]:
        """Fill the spans' buffers with stored bytes, unverified; return for each span whether it
        was filled. False is a miss: the pack is absent or too short, and the buffers have undefined
        content.

        :raises StoreError: the medium failed; the content of all buffers is undefined.
        """

    def read_frames(
        self,
        namespace: bytes,
        pack_id: bytes,
        frames: Sequence[Frame],
        buffer: memoryview,
        take: TakeFrame,
    ) -> None:
        """Read frames of a pack into one buffer, one after the other: stored bytes, unverified. A
        remote store reads neighbouring frames with one request. Frames that the store lacks are not
        passed to ``take``.

        :param frames: frames of the pack's table, ascending by offset.
        :param buffer: at least as large as the largest frame's stored bytes.
        :param take: called for each frame that was read.
        :raises StoreError: the medium failed; frames that were passed to ``take`` before are
            complete. Errors of ``take`` are raised unchanged, and end the read.
        """
        for number, frame in enumerate(frames):
            stored = buffer[: frame.stored_length]
            span = ReadSpan(pack_id, frame.offset, [stored])
            if self.read(namespace, [span]) == [True]:
                take(number, stored)

    def tables(
        self,
        namespace: bytes,
        pack_ids: Sequence[bytes],
    ) -> list[PackTable]:
        """Return the tables of these packs, in order, without packs that are not held or whose
        table is damaged."""
        return self.catalogue(namespace).tables(pack_ids)

    @abstractmethod
    def note(self, namespace: bytes, name: str) -> bytes | None:
        """Return the content of a note, a small record about a namespace; None if there is none, or
        if it is known to be damaged. Notes are not evicted, and not in ``BackendStats``. They may
        be deleted with the namespace's last content.
        """

    def notes(
        self,
        namespace: bytes,
        names: Sequence[str],
    ) -> list[bytes | None]:
        """Return the content of several notes, in order; None for each that is absent or
        known to be damaged."""
        return [self.note(namespace, name) for name in names]

    @abstractmethod
    def note_names(self, namespace: bytes) -> list[str]:
        """Return the names of the notes about a namespace, in any order."""

    @abstractmethod
    def put_note(
        self,
        namespace: bytes,
        name: str,
        content: bytes | None,
    ) -> None:
        """Write a note, replacing the one with the same name; None deletes it. It is durable on
        return.

        :param namespace: id of a namespace; sixteen zero bytes for a note about the store itself,
            which is not deleted with a namespace.
        :param name: 1 to 32 letters and digits.
        :param content: at most 64 KiB, which the store does not interpret.
        :raises StoreError: the store is open read-only, or the medium failed; the previous note is
            kept.
        """

    @abstractmethod
    def index_file(self, namespace: bytes) -> Path | None:
        """Return the path of a file in which an engine saves its index of a namespace for the next
        opening.

        The file is a cache: it may be deleted at any time, and is not part of
        ``BackendStats.disk_bytes``. None: the store has no directory on this machine, or a remote
        store has not answered since it was opened.
        """

    # Queries

    @abstractmethod
    def namespaces(self) -> Iterator[Namespace]:
        """Iterate over all namespaces with content, in any order, except damaged ones. A driver may
        list others too."""

    def holds(self, namespace: bytes) -> bool:
        """Return whether the store has a valid namespace with this id. May ask a server and wait
        for it. False also if the server has not answered since the store was opened.

        :raises StoreError: the medium failed later.
        """
        return any(found.id == namespace for found in self.namespaces())

    @abstractmethod
    def catalogue(self, namespace: bytes) -> Catalogue:
        """Return queries of a namespace's packs and requests, as they are now. Ask for them
        again after a pause: queries of a shared store end when the store is deleted or replaced.

        :raises StoreError: the medium failed. Drivers may raise it, too, for a namespace that is
            neither held nor opened.
        """

    def manifest_keys(
        self,
        namespace: bytes,
        manifest_ids: Sequence[str],
    ) -> list[ManifestKeys | None]:
        """Return the keys of each manifest, in order; None for keys that are damaged or not
        held."""
        return self.catalogue(namespace).manifest_keys(manifest_ids)

    @abstractmethod
    def stats(self) -> BackendStats:
        """Return the totals over all namespaces, without a scan of the packs. They are exact for
        all commits that this handle has read; a remote store reads those of other processes with a
        delay.
        """

    @abstractmethod
    def tenants(self) -> list[TenantTotals]:
        """Return the totals of each tenant with packs or a quota, by name, without a scan of the
        packs. They are exact as those of ``stats`` are.

        :raises StoreError: the medium failed.
        """

    def merge_state(self, namespace: bytes) -> MergeState | None:
        """Return the state of a namespace's inbox; None: the store has none, and each commit is in
        its catalogue.

        :raises StoreError: the medium failed.
        """
        return None

    # Status of engines, for other processes

    @abstractmethod
    def publish_status(self, engine: str, row: bytes | None) -> None:
        """Publish an engine's status row in place of its previous one; None deletes the row.

        Rows may be lost at any time, in particular by a crash.

        :param engine: unique name of the row, of letters and digits.
        :param row: content, which the store does not interpret.
        :raises StoreError: the row was not published; always raised if the store is open read-only.
        """

    @abstractmethod
    def statuses(self) -> dict[str, bytes]:
        """Return the rows of all engines, by name, unverified. The rows of killed engines
        remain."""

    @property
    def requests(self) -> Mapping[str, int]:
        """Number of requests sent since the store was opened, by HTTP method or other kind; empty
        if not counted."""
        return {}

    @property
    def breaker_state(self) -> str | None:
        """State of the medium's circuit breaker: ``closed``, ``open`` (no requests are sent) or
        ``half-open``; None: it has none.
        """
        return None

    # Policy

    @classmethod
    @abstractmethod
    def new_policy(cls, url: StoreUrl) -> Policy:
        """Return the policy of a store that ``open`` would create at this URL.

        :raises ConfigurationError: an option is invalid.
        """

    @abstractmethod
    def policy(self) -> Policy:
        """Return the store's recorded policy."""

    @abstractmethod
    def set_policy(self, policy: Policy) -> None:
        """Record another capacity and ttl, and other quotas. Open handles in all processes apply
        them from their next commit on. A local store evicts what exceeds a lower capacity or quota,
        and returns the disk space, before this call returns.

        :raises ConfigurationError: a value is out of range, or the placement differs; nothing
            changed.
        :raises StoreError: the store is open read-only (nothing changed), or the medium failed.
            ``policy`` tells whether the values were recorded; then later commits evict the rest.
        """

    # Maintenance

    def rotate_key(self, key: StoreKey) -> None:
        """Wrap the data keys of the store with another key of the user, which from then on opens it
        in place of the present one. No content is written. Handles that are open stay open, in all
        processes.

        If this call fails or is killed, at least one of the two keys opens the store. While the
        present one does, the call can be repeated.

        :raises ConfigurationError: the store has no key; ``key`` is its key already; its key was
            replaced since the store was opened; or ``key`` opens other content at this place.
            Nothing was changed.
        :raises StoreError: the store is open read-only, or the medium failed.
        """
        raise StoreError("stores of this kind have no keys")

    def forget(self, tenant: str) -> Forgotten:
        """Remove the content of a tenant in all namespaces, then destroy its data keys. Other
        processes may use the store meanwhile: they drop the data keys, and the content of the
        tenant that they have accepted and not committed yet. Content of the tenant that they accept
        later is stored under a new data key.

        If this call fails or is killed, some of the content is gone. It can be repeated, also when
        nothing is left.

        :raises ConfigurationError: the name is not valid.
        :raises StoreError: the store is open read-only, or its driver cannot forget; the medium
            failed; or engines store content of the tenant faster than it can be removed.
        """
        raise StoreError("stores of this kind cannot forget a tenant")

    def free_space(self) -> FreeSpace | None:
        """Return the free space within the store; None: its medium takes the space of deleted
        content at once."""
        return None

    def release_free(self) -> int:
        """Give the free space of separate payload files back to the file system, if it supports
        that; return the number of bytes by which the store shrank.

        Other processes may use the store meanwhile, and take space from the medium again. The
        content does not change.

        :raises StoreError: the store is open read-only, or the medium failed; what was returned
            stays returned.
        """
        return 0

    def delete_quarantined(self) -> int:
        """Delete the directories in ``BackendStats.quarantined``; return the bytes that they took
        on disk.

        :raises StoreError: the store is open read-only, or a directory cannot be deleted. Other
            directories may have been deleted before.
        """
        return 0

    @classmethod
    @abstractmethod
    def rebuild(
        cls,
        url: StoreUrl,
        progress: Callable[[int, int], None],
    ) -> Rebuilt | None:
        """Find the packs of a store whose catalogue is lost or damaged, by their traces in its
        payloads, and build a new catalogue of them.

        Each listed pack was verified. Requests are lost: their blocks are found by key. If this
        call fails or is killed, nothing is lost, and it can be repeated.

        :param progress: called with the number of payload bytes read so far, and with their total.
        :returns: None: the catalogue is not damaged, and nothing was changed.
        :raises ConfigurationError: an option is invalid.
        :raises StoreBusyError: another process has the store open for writing; shared stores may be
            in use.
        :raises StoreUnavailableError: there is no store, or its payloads are not in files of their
            own.
        :raises StoreError: the medium failed; the content is unchanged.
        """

    @classmethod
    def erase(cls, url: StoreUrl) -> None:
        """Delete the content of a store that no process uses. A store that is a directory is
        deleted with it instead.

        :raises StoreError: the medium failed, and some content may be left; or the driver's stores
            are directories.
        """
        raise StoreError(f"{url.scheme}://{url.location} is a directory: delete that")

    @classmethod
    def check_medium(cls, url: StoreUrl) -> Iterator[Check]:
        """Yield what ``Blobs.check`` finds on the medium of a shared store, which need not exist;
        nothing for a local store.

        :raises ConfigurationError: an option of the URL is invalid.
        """
        return iter(())

    @classmethod
    def plain_medium(cls, url: StoreUrl) -> PlainMedium | None:
        """Return the medium at this URL for plain reads and writes, apart from the store; None:
        there is no plain client, or the store is in a local directory, which needs none.

        :raises ConfigurationError: an option is invalid.
        """
        return None


class PlainMedium(ABC):
    """Direct access to a medium through the vendor's plain client, without a store: baseline of
    ``persistkv bench``."""

    @abstractmethod
    def write(self, buffers: Sequence[memoryview]) -> None:
        """Write the buffers' bytes in order, durably, apart from the store's data. ``close``
        deletes these bytes."""

    @abstractmethod
    def read(self, buffers: Sequence[memoryview]) -> None:
        """Read the bytes of the last ``write`` into buffers of the same lengths."""

    @abstractmethod
    def close(self) -> None:
        """Delete the written data and release the medium; idempotent."""
