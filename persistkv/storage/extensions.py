"""What a backend may offer beyond ``Backend``: small protocols, which callers query with ``isinstance``.

As for ``Backend``, vendor exceptions come out as ``StoreError``s. ``scan`` and ``read_frames`` may be called from any
thread, by several at once and beside any other call; the other methods by one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError
from persistkv.storage.backend import Backend, ReadSpan
from persistkv.storage.manifest import ManifestKeys, RequestManifest
from persistkv.storage.pack import Frame


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


class InspectableBackend(Backend):
    """A backend that tells what it holds: requests, their use, and totals. Tools need one."""

    @abstractmethod
    def manifests(self, namespace: bytes) -> Iterable[RequestManifest]:
        """Iterate over the heads of all manifests, in any order; damaged ones are left out. Holds no snapshot between
        items: what others write or delete meanwhile may be there or not.
        """

    @abstractmethod
    def manifest_keys(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[ManifestKeys | None]:
        """Return the keys of manifests, in their order; None for one that is not held, or damaged."""

    @abstractmethod
    def manifests_naming(self, namespace: bytes, packs: Sequence[bytes]) -> list[RequestManifest]:
        """Return the heads of the manifests that name any of these packs."""

    @abstractmethod
    def chain(self, namespace: bytes, manifest_id: str) -> list[bytes] | None:
        """Return the ids of the packs that a manifest names, those nearest to the begin of the context first; None if
        it is not held.
        """

    @abstractmethod
    def uses(self, namespace: bytes, manifest_ids: Sequence[str]) -> list[RequestUse | None]:
        """Return what is known of the use of these requests; None for one that is not held, or of which nothing is
        known.
        """

    @abstractmethod
    def stats(self) -> BackendStats:
        """Return totals, without a scan; exact after each commit.

        :raises StoreError: they do not read.
        """


@runtime_checkable
class SupportsStatus(Protocol):
    """A store that shows others what the engines do that use it."""

    status_interval_s: float | None
    """How often engines are to publish what they do; None: never."""

    def publish_status(self, engine: str, row: bytes | None) -> None:
        """Show others what an engine does, in place of its row before; None removes the row.

        Rows may be lost at any time, above all by a crash.

        :param engine: a name that is its own, of letters and digits.
        :raises StoreError: it was not shown; always, if the store is open read-only.
        """

    def statuses(self) -> dict[str, bytes]:
        """Return the rows of all engines, by name, unverified. Engines that were killed leave theirs.

        :raises StoreError: the medium failed.
        """
        ...


@runtime_checkable
class SupportsScan(Protocol):
    """A medium that reads much at once faster in an order of its own."""

    def scan(self, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
        """As ``Backend.read``, for who reads much, and once: what others' reads find in caches stays there, and spans
        in the order of ``scan_order`` are read together.

        Whole pages of 4 KiB, from multiples of that on, into buffers that begin at such, are read best.
        """
        ...

    def scan_order(self, namespace: bytes, pack_ids: Sequence[bytes]) -> list[bytes]:
        """Return the same packs in the order in which ``scan`` is fastest."""
        ...


@runtime_checkable
class SupportsFrames(Protocol):
    """A medium on which each call takes long, and which makes one of neighbours."""

    def read_frames(
        self,
        namespace: bytes,
        pack_id: bytes,
        frames: Sequence[Frame],
        buffer: memoryview,
        take: Callable[[int, memoryview], None],
    ) -> None:
        """Bring frames of a pack through one buffer, one after the other, as they are stored, unverified.

        :param frames: as the pack's table has them, ascending.
        :param buffer: with room for the largest.
        :param take: called with the number of a frame among ``frames`` and its stored bytes, which are in the buffer
            until it returns. Never called for one that is missing. It raises nothing.
        :raises StoreError: the medium failed; what was taken before is right.
        """


@runtime_checkable
class SupportsCounters(Protocol):
    """A remote medium that counts its requests, and may not be asked at all for a while."""

    @property
    def requests(self) -> Mapping[str, int]:
        """Requests that were sent so far, by kind."""
        ...

    @property
    def breaker_state(self) -> str:
        """``closed``, ``open`` or ``half-open``: whether the medium is asked at all just now."""
        ...


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

    @classmethod
    def new_policy(cls, url: StoreUrl) -> Policy:
        """Return the policy of a store that ``Backend.open`` would create at this URL.

        :raises ConfigurationError: an option is wrong.
        """
        ...

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


@runtime_checkable
class SupportsCompaction(Protocol):
    """A store that holds free space, and can give it back to the medium."""

    def free_space(self) -> FreeSpace:
        """Return what is free within the store.

        :raises StoreError: it does not read.
        """
        ...

    def compact(self) -> Iterator[CompactProgress]:
        """Give free space back to the medium, as far as it can, step by step while this is iterated.

        Others may use the store meanwhile. Its content does not change. One that ended early leaves part of it done.

        :raises StoreFullError: there is no room to move anything.
        """
        ...


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


@runtime_checkable
class SupportsPlainMedium(Protocol):
    """A driver that can use its medium without a store."""

    @classmethod
    def plain_medium(cls, url: StoreUrl) -> PlainMedium:
        """Return the medium of this URL for plain reads and writes beside the store.

        :raises ConfigurationError: an option is wrong.
        """
        ...


def scan(backend: Backend, namespace: bytes, spans: Sequence[ReadSpan]) -> list[bool]:
    """Read as ``SupportsScan.scan`` does, from any backend."""
    return backend.scan(namespace, spans) if isinstance(backend, SupportsScan) else backend.read(namespace, spans)


def scan_order(backend: Backend, namespace: bytes, pack_ids: Sequence[bytes]) -> list[bytes]:
    """Return packs in the order in which ``scan`` is fastest; as they are given if there is no difference."""
    return backend.scan_order(namespace, pack_ids) if isinstance(backend, SupportsScan) else list(pack_ids)


def read_frames(
    backend: Backend,
    namespace: bytes,
    pack_id: bytes,
    frames: Sequence[Frame],
    buffer: memoryview,
    take: Callable[[int, memoryview], None],
) -> None:
    """Read as ``SupportsFrames.read_frames`` does, from any backend."""
    if isinstance(backend, SupportsFrames):
        backend.read_frames(namespace, pack_id, frames, buffer, take)
        return
    for number, frame in enumerate(frames):
        stored = buffer[: frame.stored_length]
        if backend.read(namespace, [ReadSpan(pack_id, frame.offset, [stored])]) == [True]:
            take(number, stored)


def statuses(backend: Backend) -> dict[str, bytes]:
    """Return the rows of ``SupportsStatus.statuses``; none if the backend shows nothing."""
    return backend.statuses() if isinstance(backend, SupportsStatus) else {}
