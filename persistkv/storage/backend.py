"""The driver of one storage medium: what a backend is asked, and nothing else.

Contract shared by all methods: vendor exceptions come out as ``StoreError``s, and after ``close`` every other call
raises one. What a method hands out is the caller's to keep. ``read``, ``read_frames`` and ``scan`` may be called from
any thread, by several at once and beside any other call; the other methods by one thread at a time.

**Eviction.** A store with a capacity makes room by itself, in ``commit``, over all its namespaces:

1. The order is that of the last use. Each commit that uses something (writes it, or names it in ``touches``) is one
   moment. Of what was used at the same moment, the packs that are deeper in their chains are evicted first, those of
   unknown depth before all, and manifests last. Moments are counted, not timed, so that clocks do not matter. (A driver
   whose handles hear of uses in different orders goes by the time of the last use instead.)
2. With a request's manifest its whole chain is touched: a prefix is never evicted before what depends on it.
3. A pack takes the manifests that name it with it: what is left of such a request is found by its keys, but it is not
   the whole context that a manifest promises. Packs that stand behind it in such a manifest cannot be reached without
   it, and go too where no other manifest names them. What cannot be reached and stands in no manifest is not used any
   more, and goes in its turn.
4. A manifest is used when it is written; packs that later requests use do not keep it.
5. Neither a pinned manifest nor its packs are evicted or expire. ``deletions`` and ``bad`` delete them all the same.
6. With a ttl, what was not used for so long goes with the next commits, whether room is needed or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError
from persistkv.storage.identity import Identity
from persistkv.storage.manifest import ManifestKeys, RequestManifest
from persistkv.storage.pack import MAX_PACK_BYTES, Frame, PackTable
from persistkv.storage.pack_writer import NewPack


@dataclass(frozen=True)
class Capabilities:
    """What a driver can do beyond the methods that all have. Tests and callers ask it."""

    persistent: bool = True
    """What was committed is there when the store is opened again, by any process."""
    shared: bool = True
    """Several processes may have the store open and write to it."""
    remote: bool = False
    """Calls go over a network: they take long, however little they move, and many go side by side. Nobody should lend
    them rows that he wants back soon. A commit takes no memory for what is stored raw, and ``CommitBatch.memory`` for
    the rest."""
    writable: bool = True
    """``commit`` writes. Else the handle was opened for looking and reading only: nobody should offer it anything."""
    placements: tuple[str, ...] = ()
    """Where a store may put payloads; fixed when it is created."""
    shows_status: bool = False
    """Rows of ``publish_status`` can be seen by others."""


@dataclass(frozen=True)
class Namespace:
    """All that a store holds under one identity."""

    identity: Identity
    created: float
    """Seconds since the epoch."""

    @property
    def id(self) -> bytes:
        """16 bytes: the identity's digest."""
        return self.identity.digest


@dataclass(frozen=True)
class ManifestWrite:
    """A manifest on its way to the store."""

    manifest: RequestManifest
    """The head."""
    keys: ManifestKeys
    """For each KV cache group, the keys of the whole context in order."""
    packs: Sequence[bytes] = ()
    """Ids of the packs that hold the keys, the ones nearest to the begin of the context first. They are touched."""


@dataclass(frozen=True)
class CommitBatch:
    """What one transaction does."""

    packs: Sequence[NewPack] = ()
    """Each is streamed at most once per attempt, and again where what was found in its stead went away. A pack whose id
    is held already is left as it is: the first wins. One whose catalogue row does not read is not held."""
    manifests: Sequence[ManifestWrite] = ()
    """A manifest whose id is held already is replaced; where that one was pinned, the new one is."""
    deletions: Sequence[bytes] = ()
    """Ids of packs to delete, before ``packs`` are written: a batch can replace a pack. Those that are not held are
    passed over."""
    bad: Sequence[bytes] = ()
    """Ids of packs whose bytes do not verify, deleted like ``deletions``, but alone: what stands behind them in
    manifests is good, and will be reached again. Manifests that name them go; ``manifests`` may hold shorter ones."""
    touches: Sequence[bytes] = ()
    """Ids of packs that were used; those that are not held are passed over. All of a batch are used at one moment: name
    a pack together with those that it depends on."""
    pins: Sequence[tuple[str, bool]] = ()
    """(manifest id, whether it is to be pinned), done after ``manifests``. Those that are not held are passed over."""
    seen: bytes | None = None
    """The cursor up to which the caller has applied changes: the commit is refused as stale where there are newer ones.
    None: commit whatever happened meanwhile."""
    memory: int = MAX_PACK_BYTES
    """Bytes of encoded packs that a ``remote`` driver holds at once; one pack is always allowed."""

    @property
    def uses_anything(self) -> bool:
        """Whether it is a moment of its own."""
        return bool(self.packs or self.manifests or self.touches)


@dataclass(frozen=True)
class CommitResult:
    """How a transaction ended."""

    cursor: bytes
    """Behind this commit; behind nothing, where it was stale."""
    evicted: Sequence[PackTable] = ()
    """Packs of all namespaces that went, deleted ones included. Where rows of a pack did not read, it is missing here:
    ``changes`` names it."""
    stale: bool = False
    """Nothing was done: others committed after ``seen``. Apply ``changes`` and try again."""


@dataclass(frozen=True)
class Changes:
    """How a namespace's catalogue moved."""

    cursor: bytes
    """Where the next call goes on."""
    added: Sequence[PackTable]
    """Packs that came and are there now."""
    removed: Sequence[bytes] = ()
    """Pack ids. They went before ``added`` came: a pack may have gone and come again."""
    reset: bool = False
    """``added`` is the whole catalogue: forget what you knew (the first call, or a cursor that is too old)."""


@dataclass(frozen=True)
class ReadSpan:
    """Consecutive bytes of one pack's payload and where they go."""

    pack_id: bytes
    offset: int
    """First byte, counted from the pack's begin."""
    buffers: Sequence[memoryview] = field(repr=False)
    """Writable and contiguous, filled one after the other; together they decide how much is read."""


@dataclass(frozen=True)
class RequestUse:
    """What a store knows of the use of a request."""

    last_used: float
    """Seconds since the epoch, coarse: when the last of its packs was used last, hence all of its context."""
    reused: bool
    """Whether that was after the request was written."""
    shared_by: int
    """Other requests that name the last of its packs: as far as anybody can tell, their contexts hold all of it."""
    pinned: bool
    hits: int = 0
    """Of those, the ones that were written after it. Those that are not held any more are not counted."""
    packs_raw_bytes: int = 0
    """Of the packs that it names, whole, before the codec."""
    packs_stored_bytes: int = 0
    """The same at rest."""


@dataclass(frozen=True)
class BackendStats:
    """Totals over all namespaces of the store."""

    packs: int
    blocks: int
    """Blocks in all packs; one that lies in two counts twice."""
    requests: int
    """Manifests."""
    raw_bytes: int
    """Bytes of all blocks in all packs, before the codec."""
    stored_bytes: int
    """Bytes of all payloads, padding included."""
    disk_bytes: int
    """Bytes that the medium gives to the store, catalogue included."""
    capacity: int | None
    """The bound on ``disk_bytes``; None where there is none."""
    quarantined: tuple[str, ...] = ()
    """Directories of damaged stores that were renamed. They stay until a command deletes them, and count towards no
    capacity."""
    quarantined_bytes: int = 0
    """Bytes on disk of these directories."""


@dataclass(frozen=True)
class Policy:
    """What a store keeps. Recorded when the store is created; a URL changes nothing afterwards."""

    capacity: int | None
    """Bound on ``BackendStats.disk_bytes``; None: unbounded."""
    ttl_s: float | None
    """Seconds after their last use until packs and requests expire; None: they never do."""
    placement: str | None = None
    """One of ``Capabilities.placements``: where payloads are stored. Fixed; None: the driver has one placement."""

    def __post_init__(self) -> None:
        """:raises ConfigurationError: a capacity or ttl that is not positive."""
        if self.capacity is not None and self.capacity <= 0:
            raise ConfigurationError("capacity", self.capacity, "a positive size")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ConfigurationError("ttl", self.ttl_s, "a positive duration such as 7d, or none")

    def contradictions(self, given: Policy) -> str:
        """Describe where a URL's values differ from this recorded policy, with both values; empty where none does.

        :param given: None for each value that the URL leaves out.
        """
        found = []
        for name, ours, theirs, unit in (
            ("capacity", self.capacity, given.capacity, " bytes"),
            ("ttl", self.ttl_s, given.ttl_s, " s"),
            ("placement", self.placement, given.placement, ""),
        ):
            if theirs not in (None, ours):
                found.append(f"{name}={theirs}{unit} (recorded: {'none' if ours is None else f'{ours}{unit}'})")
        return " and ".join(found)


@runtime_checkable
class SupportsPolicy(Protocol):
    """A store whose policy can be changed while other processes use it."""

    def policy(self) -> Policy:
        """Return the recorded policy.

        :raises StoreError: it cannot be read.
        """
        ...

    def set_policy(self, policy: Policy) -> None:
        """Record another capacity and ttl. Open handles follow with their next commit, in all processes.

        Nothing is evicted by this call: the next commits evict and expire what the new policy does not keep.

        :raises ConfigurationError: a value is out of range, or the placement is another one; nothing changed.
        :raises StoreError: the store is open read-only, or the medium failed; nothing changed.
        """
        ...


@runtime_checkable
class SupportsQuarantine(Protocol):
    """A store that renames damaged files instead of deleting them (``BackendStats.quarantined``)."""

    def delete_quarantined(self) -> int:
        """Delete the renamed directories; return the bytes on disk that they took.

        :raises StoreError: the store is open read-only, or a directory cannot be deleted; those before it are gone.
        """
        ...


@dataclass(frozen=True)
class FreeSpace:
    """What of ``disk_bytes`` holds nothing, and is written to again."""

    catalogue_bytes: int
    """Beside payloads: of the index; of all there is, where payloads lie in it."""
    payload_bytes: int
    pieces: int
    """That the latter lies in."""
    largest_bytes: int
    """Of these pieces. A payload that finds none as large is cut up."""


@dataclass(frozen=True)
class CompactProgress:
    """Progress of a compaction."""

    moved_bytes: int
    """Of payload."""
    total_bytes: int
    """Payload bytes that the compaction may move."""


class PlainMedium(ABC):
    """A medium without its driver, as the vendor's plain client uses it: what ``persistkv bench`` compares with."""

    @abstractmethod
    def write(self, buffers: Sequence[memoryview]) -> None:
        """Write these bytes, one after the other, durably, to a place of their own.

        :raises StoreError: the medium failed.
        """

    @abstractmethod
    def read(self, buffers: Sequence[memoryview]) -> None:
        """Read what was written last into buffers of the same lengths.

        :raises StoreError: the medium failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Remove what was written, and let go of the medium; idempotent."""


class Backend(ABC):
    """One open store."""

    capabilities: Capabilities = Capabilities()
    status_interval_s: float | None = None
    """How often engines are to publish what they do; None: never."""

    @classmethod
    @abstractmethod
    def open(cls, url: StoreUrl, *, read_only: bool = False) -> Backend:
        """Open the store, creating it where it is absent and not ``read_only``.

        :raises ConfigurationError: an option is wrong; nothing was created.
        :raises StoreUnavailableError: it cannot be opened (permission, a file in the way, absent and ``read_only``).
        :raises CorruptStoreError: something else lies there, or a newer format; it was not changed.
        """

    @classmethod
    def new_capacity(cls, url: StoreUrl) -> int | None:
        """Return the capacity of a store that ``open`` would create at this URL; None: it has no bound.

        :raises ConfigurationError: an option is wrong.
        """
        return None

    @classmethod
    def plain_medium(cls, url: StoreUrl) -> PlainMedium | None:
        """The medium of this URL for plain reads and writes beside the store; None where there is no such thing.

        :raises ConfigurationError: an option is wrong.
        """
        return None

    @abstractmethod
    def namespaces(self) -> Iterator[Namespace]:
        """All namespaces, in any order; those whose row does not read are left out."""

    @abstractmethod
    def open_namespace(self, identity: Identity) -> Namespace:
        """The namespace of this identity, created durably where it is absent (never on a read-only store).

        :raises StoreFullError: there is no room for it.
        :raises StoreUnavailableError: absent, and the store is read-only.
        """

    @abstractmethod
    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        """Do all of the batch, or nothing. What it did is durable on return, and totals are exact.

        Where there is no room, packs are evicted, but none that the batch writes or that its manifests name. That, and
        ``touches``, may be durable before the rest.

        State after failure: as before the call, but for these (``changes`` names what was evicted); the handle stays
        usable and the next commit may succeed. After a process was killed in here: all of the batch, or nothing, and
        totals are exact.

        :raises StoreFullError: it does not fit, whatever may be evicted. The store tried twice.
        :raises StoreError: anything else: no such namespace, a pack of another one, a store that is open read-only.
            What a pack's stream raises comes through as it is.
        """

    @abstractmethod
    def changes(self, namespace: bytes, cursor: bytes | None) -> Changes:
        """Packs that were added and removed after ``cursor``, by anyone; the whole catalogue for None.

        A catalogue row that does not read is left out, never raised: its blocks are misses.

        :raises StoreError: no such namespace, or the medium failed; the cursor is good for another try.
        """

    @abstractmethod
    def read(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        """Fill the spans' buffers; for each span, whether it was filled. False: the pack is gone, or shorter. A miss.

        Bytes are handed over as they lie there, unverified. What a buffer holds after False is undefined.

        :raises StoreError: the medium failed; nothing of the spans may be used then.
        """

    def read_frames(
        self,
        namespace: bytes,
        pack_id: bytes,
        frames: Sequence[Frame],
        buffer: memoryview,
        take: Callable[[int, memoryview], None],
    ) -> None:
        """Bring frames of a pack through one buffer, one after the other, as they lie there, unverified.

        A driver for which each call takes long makes one of neighbours. For any thread, as ``read``.

        :param frames: as the pack's table has them, ascending.
        :param buffer: with room for the largest.
        :param take: called with the number of a frame among ``frames`` and its stored bytes, which lie in the buffer
            until it returns. Never called for one that is not there: a miss. It raises nothing.
        :raises StoreError: the medium failed; what was taken before is right.
        """
        for number, frame in enumerate(frames):
            stored = buffer[: frame.stored_length]
            if self.read(namespace, [ReadSpan(pack_id, frame.offset, [stored])]) == [True]:
                take(number, stored)

    def scan(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        """As ``read``, for who reads much, and once: what others' reads find in caches stays there, and spans in the
        order of ``scan_order`` are read together, where the medium is faster so.

        Whole pages of 4 KiB, from multiples of that on, into buffers that begin at such, are read best.
        """
        return self.read(namespace, spans)

    def scan_order(self, namespace: bytes, pack_ids: Sequence[bytes]) -> list[bytes]:
        """The same packs in the order in which ``scan`` is fastest; as they are given where there is no difference."""
        return list(pack_ids)

    @abstractmethod
    def manifests(self, namespace: bytes) -> Iterable[RequestManifest]:
        """The heads of all manifests, in any order; damaged ones are left out. Holds no snapshot between items: what
        others write or delete meanwhile may be there or not.
        """

    @abstractmethod
    def manifest_keys(self, namespace: bytes, manifest_id: str) -> ManifestKeys | None:
        """The keys of one manifest; None where it is gone or damaged."""

    def many_manifest_keys(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[ManifestKeys | None]:
        """The same for many manifests, in their order."""
        return [self.manifest_keys(namespace, manifest_id) for manifest_id in manifest_ids]

    def manifests_naming(self, namespace: bytes, packs: Sequence[bytes]) -> list[RequestManifest]:
        """The heads of the manifests that name any of these packs; none where the driver cannot tell."""
        return []

    def named_packs(self, namespace: bytes, manifest_id: str) -> list[PackTable] | None:
        """The tables of the packs that a manifest names, those nearest to the begin of the context first; those that do
        not read are left out. None: it is not held, or the driver cannot tell. Who tells this, tells
        ``manifests_naming`` too.
        """
        return None

    def uses(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[RequestUse | None]:
        """What is known of the use of these requests; None for one that is not held, or where nothing is known."""
        return [None] * len(manifest_ids)

    @abstractmethod
    def stats(self) -> BackendStats:
        """Totals, without a scan; exact after each commit.

        :raises StoreError: they do not read.
        """

    def free_space(self) -> FreeSpace | None:
        """What is free within the store; None where the medium has no such thing, as a bucket has not.

        :raises StoreError: it does not read.
        """
        return None

    def compact(self) -> Iterator[CompactProgress]:
        """Give free space within the store back to the medium, as far as it can, step by step while this is iterated.

        Others may use the store meanwhile. Its content does not change. One that ended early leaves part of it done.

        :raises StoreFullError: there is no room to move anything.
        """
        return iter(())

    @property
    def requests(self) -> Mapping[str, int]:
        """What was sent to a remote medium so far, by kind of request; empty where nobody counts."""
        return {}

    @property
    def breaker_state(self) -> str | None:
        """``closed``, ``open`` or ``half-open``: whether the medium is asked at all just now. None: it always is."""
        return None

    def publish_status(self, engine: str, row: bytes | None) -> None:  # noqa: B027
        """Show others what an engine does, in place of its row before; None takes the row away.

        Nothing of it is promised to be there later, least of all after a crash.

        :param engine: a name that is its own, of letters and digits.
        :raises StoreError: it was not shown; always, where the store is open read-only.
        """

    def statuses(self) -> dict[str, bytes]:
        """The rows of all engines, by name, unverified. Engines that were killed leave theirs.

        :raises StoreError: the medium failed.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release the store; idempotent. What was committed stays."""
