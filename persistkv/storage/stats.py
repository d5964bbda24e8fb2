"""Reports of a store about its content: totals, the use of requests, free space; and the result of
a rebuild."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestUse:
    """Use of a stored request."""

    written: float
    """When the store wrote the request: seconds since the epoch."""
    last_used: float
    """Last use of the whole context, which is the last use of its last pack: seconds since the
    epoch, approximate."""
    reused: bool
    """Whether ``last_used`` is later than the writing of the request."""
    shared_by: int
    """Number of other requests whose manifests name the last pack of this request. They probably
    contain its whole context."""
    pinned: bool
    """Whether the manifest is pinned: its packs are not evicted then, and expire only by its own
    ttl."""
    hits: int = 0
    """Number of the requests counted by ``shared_by`` that restored tokens from the store and were
    written later than this one. Requests that are no longer held do not count."""
    packs_raw_bytes: int = 0
    """Bytes, before the codec, of all blocks in the packs that the manifest names, including other
    requests' blocks."""
    packs_stored_bytes: int = 0
    """Payload bytes of the packs that the manifest names, padding included."""

    def expires(
        self,
        own_ttl_s: float | None,
        store_ttl_s: float | None,
    ) -> float | None:
        """Return when the request expires, unless it is used before: seconds since the epoch; None:
        never. The next commit to the store after this time deletes it.

        :param own_ttl_s: ttl of the request, in seconds from its last use; None: none.
        :param store_ttl_s: ttl of the store, in seconds from the writing of the request; None:
            none.
        """
        times = []
        if own_ttl_s is not None:
            last_use = max(self.written, self.last_used)
            times.append(last_use + own_ttl_s)
        if store_ttl_s is not None and not self.pinned:
            times.append(self.written + store_ttl_s)
        return min(times, default=None)


@dataclass(frozen=True)
class BackendStats:
    """Totals over all namespaces of the store."""

    packs: int
    blocks: int
    """Blocks in all packs; a block in two packs counts twice."""
    requests: int
    """Number of manifests."""
    raw_bytes: int
    """Bytes of all blocks in all packs, before the codec."""
    stored_bytes: int
    """Bytes of all payloads, padding included."""
    disk_bytes: int
    """Bytes that the store takes on the medium, catalogue included."""
    capacity: int | None
    """Bound on ``disk_bytes``; None: unbounded."""
    quarantined: tuple[str, ...] = ()
    """Paths of the renamed directories of damaged stores. They are kept until ``persistkv prune
    --quarantined`` deletes them, and do not count towards the capacity."""
    quarantined_bytes: int = 0
    """Bytes that the directories in ``quarantined`` take on disk."""


@dataclass(frozen=True)
class FreeSpace:
    """Unused space within ``BackendStats.disk_bytes``. Later commits reuse it."""

    catalogue_bytes: int
    """Free bytes in the catalogue. Includes space freed by payloads if they are stored in the
    catalogue."""
    payload_bytes: int
    """Free bytes in separate payload files."""
    pieces: int
    """Number of contiguous free extents in separate payload files; together they have
    ``payload_bytes``."""
    largest_bytes: int
    """Size of the largest contiguous free extent. A larger payload is split."""


@dataclass(frozen=True)
class MergeState:
    """Commits of a namespace that no object of the index includes yet, and who merges them."""

    waiting: int
    """Number of commits in the inbox."""
    oldest: float | None
    """When the oldest commit in the inbox was written: seconds since the epoch; None: the inbox is
    empty."""
    merged_by: str | None
    """Random name of the handle that merged last, in hexadecimal; None: it is not known."""
    merged_at: float | None
    """When that handle merged last: seconds since the epoch; None: it is not known."""


@dataclass(frozen=True)
class Rebuilt:
    """Result of a rebuild (``Backend.rebuild``)."""

    packs: int
    """Packs in the new catalogue. 0: none was found, and nothing was changed."""
    blocks: int
    namespaces: int
    stored_bytes: int
    """Bytes of the payloads of ``packs``."""
    read_bytes: int
    """Bytes of the payload files."""
    skipped: Mapping[str, int]
    """Reason → number of traces of packs that the new catalogue does not contain."""
    capacity: int | None
    """Capacity that the new catalogue records; None: no bound."""
    damaged: str | None
    """Directory of the damaged catalogue, which was renamed; None: there was none."""
