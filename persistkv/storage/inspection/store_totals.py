"""Totals of a store."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter

import msgspec

from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.catalogue.quotas import TenantTotals
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.inspection.adoptions import AdoptionView, adoptions
from persistkv.storage.inspection.requests import chosen_namespaces
from persistkv.storage.inspection.savings import SavedTotals, saved_totals
from persistkv.storage.stats import BackendStats, FreeSpace

_AGES = (
    (3600, "1h"),
    (86_400, "1d"),
    (7 * 86_400, "7d"),
    (30 * 86_400, "30d"),
    (90 * 86_400, "90d"),
)
"""Upper bounds of the histogram of ages, in seconds, and how they are shown."""
_SIZES = (
    (1 << 20, "1MiB"),
    (16 << 20, "16MiB"),
    (256 << 20, "256MiB"),
    (1 << 30, "1GiB"),
    (16 << 30, "16GiB"),
)
"""Upper bounds of the histogram of sizes, in raw bytes, and how they are shown."""


class GroupTotals(msgspec.Struct):
    """Totals of one KV cache group over all packs of a namespace."""

    group: int
    blocks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    """Bytes of the group's encoded frames, without padding."""
    codec_ratio: float | None = None
    """Raw bytes per stored byte; None without blocks."""
    codecs: list[str] = []
    """Codecs of the group's frames; ``raw`` for frames that did not shrink."""


class ModelTotals(msgspec.Struct):
    """Totals over all namespaces of one model."""

    model: str
    """Name or path of the model, as the engines gave it; may be empty."""
    namespaces: int = 0
    requests: int = 0
    packs: int = 0
    blocks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0


class NamespaceTotals(msgspec.Struct):
    """Totals of one namespace."""

    id: str
    model: str
    """Name or path of the model, as given by the engine that created the namespace; may be
    empty."""
    created: float
    """When the namespace was created: seconds since the epoch."""
    requests: int = 0
    packs: int = 0
    blocks: int = 0
    """Number of blocks in all packs of the namespace; a block in two packs counts twice."""
    raw_bytes: int = 0
    stored_bytes: int = 0
    """Bytes of the payloads of the namespace's packs, padding included."""
    codec_ratio: float | None = None
    referenced_blocks: int = 0
    """Number of blocks that the namespace's requests name; a shared block counts once for each
    request."""
    dedup_ratio: float | None = None
    """``referenced_blocks`` divided by ``blocks``, above 1 if requests share blocks; None without
    blocks."""
    groups: list[GroupTotals] = []
    waiting_commits: int | None = None
    """Commits of a shared store that are not merged into its index yet; None for a local store."""
    oldest_waiting: float | None = None
    """When the oldest waiting commit was written: seconds since the epoch; None: none waits."""
    merged_by: str | None = None
    """Random name of the engine that merged last; None: it is not known."""
    merged_at: float | None = None
    """When that engine merged: seconds since the epoch; None: it is not known."""


class Bin(msgspec.Struct):
    """One bar of a histogram of requests."""

    below: str | None
    """Upper bound, exclusive, such as ``1d`` or ``16MiB``. None: the last bar, without a bound."""
    requests: int = 0
    raw_bytes: int = 0


@dataclass(frozen=True)
class FreeTotals(FreeSpace):
    """Free space within a store: the part of its bytes on disk that new content can reuse."""

    fragmentation: float | None
    """Share of the free payload space outside the largest extent, 0 to 1; None if no payload space
    is free."""


@dataclass(frozen=True, kw_only=True)
class StoreTotals(BackendStats):
    """Totals of a store, over all namespaces and for each one."""

    url: str
    codec_ratio: float | None
    """Raw bytes per stored byte; None for an empty store."""
    referenced_blocks: int
    """Number of blocks that the requests name; a shared block counts once for each request."""
    dedup_ratio: float | None
    """``referenced_blocks`` divided by the number of stored blocks; None without blocks."""
    disk_ratio: float | None
    """Bytes on disk per stored byte. The excess over 1 is index, requests and free space; None for
    an empty store."""
    fill: float | None
    """Share of the capacity that ``disk_bytes`` takes, 1 if all; None without a capacity."""
    free: FreeTotals | None
    """Free space within the store; None for a medium without such space, such as a bucket."""
    namespaces: list[NamespaceTotals]
    """Totals of each namespace, the oldest first."""
    models: list[ModelTotals]
    """Totals of each model, the one with the most stored bytes first."""
    tenants: list[TenantTotals]
    """Totals and quota of each tenant, the one with the most stored bytes first."""
    adoptions: list[AdoptionView]
    """Recorded verdicts: whether a namespace may use the blocks of another engine release's
    namespace."""
    ages: list[Bin]
    """Requests by the time since they were stored."""
    sizes: list[Bin]
    """Requests by their raw bytes."""
    savings: list[SavedTotals]
    """Tokens that requests have restored since the store was created: for each namespace, and for
    each label. At most a minute old, in a remote store five minutes."""


class _Histograms:
    """Requests of a store by age and by size."""

    def __init__(self) -> None:
        self.ages = _bins(_AGES)
        self.sizes = _bins(_SIZES)
        self._now = time.time()

    def add(self, manifest: RequestManifest) -> None:
        """Count a request in its bin of ages, and in its bin of sizes."""
        age = self._now - manifest.created
        size = manifest.raw_bytes
        # the bounds are exclusive: a value that equals a bound belongs to the next bin
        age_index = bisect_right(_AGES, age, key=itemgetter(0))
        size_index = bisect_right(_SIZES, size, key=itemgetter(0))
        for chosen in (self.ages[age_index], self.sizes[size_index]):
            chosen.requests += 1
            chosen.raw_bytes += size


def _bins(bounds: Sequence[tuple[int, str]]) -> list[Bin]:
    """Return an empty bin below each bound, and one without a bound."""
    bins = [Bin(name) for _, name in bounds]
    return [*bins, Bin(None)]


def store_totals(url: str, backend: Backend) -> StoreTotals:
    """Return totals of a store. Reads pack tables and manifest heads; no payloads, and no keys of
    requests."""
    histograms = _Histograms()
    spaces = []
    # this also adds the requests to the histograms
    for space in chosen_namespaces(backend, wanted=None):
        spaces.append(_namespace_totals(backend, space, histograms))
    stats = backend.stats()
    referenced = sum(found.referenced_blocks for found in spaces)
    return StoreTotals(
        **asdict(stats),
        url=url,
        codec_ratio=_ratio(stats.raw_bytes, stats.stored_bytes),
        referenced_blocks=referenced,
        dedup_ratio=_ratio(referenced, stats.blocks),
        disk_ratio=_ratio(stats.disk_bytes, stats.stored_bytes),
        # without a capacity, this is None, too
        fill=_ratio(stats.disk_bytes, stats.capacity or 0),
        free=_free_totals(backend),
        namespaces=spaces,
        models=_model_totals(spaces),
        tenants=sorted(backend.tenants(), key=lambda found: -found.stored_bytes),
        adoptions=adoptions(backend),
        ages=histograms.ages,
        sizes=histograms.sizes,
        savings=saved_totals(backend),
    )


def _free_totals(backend: Backend) -> FreeTotals | None:
    """Return the free space within a store; None for a medium without such space."""
    free = backend.free_space()
    if free is None:
        return None
    outside_largest = free.payload_bytes - free.largest_bytes
    fragmentation = _ratio(outside_largest, free.payload_bytes)
    return FreeTotals(**asdict(free), fragmentation=fragmentation)


def _model_totals(spaces: Sequence[NamespaceTotals]) -> list[ModelTotals]:
    """Return the totals of each model, the largest first."""
    models: dict[str, ModelTotals] = {}
    for space in spaces:
        totals = models.setdefault(space.model, ModelTotals(space.model))
        totals.namespaces += 1
        totals.requests += space.requests
        totals.packs += space.packs
        totals.blocks += space.blocks
        totals.raw_bytes += space.raw_bytes
        totals.stored_bytes += space.stored_bytes
    return sorted(models.values(), key=lambda totals: -totals.stored_bytes)


def _namespace_totals(
    backend: Backend,
    namespace: Namespace,
    histograms: _Histograms,
) -> NamespaceTotals:
    """Return totals of a namespace; add its requests to the histograms."""
    totals = NamespaceTotals(
        namespace.id.hex(), namespace.identity.model_name, namespace.created
    )
    # read the heads only: totals need no keys, which are most of the bytes
    for manifest in backend.catalogue(namespace.id).manifests():
        totals.requests += 1
        totals.referenced_blocks += manifest.blocks
        histograms.add(manifest)

    # read the tables of all packs: without a cursor, the changes are the whole catalogue
    tables = backend.changes(namespace.id, cursor=None).added
    _add_packs(totals, tables)

    # In a shared store, the content of commits that wait is not part of the totals above. A local
    # store has no such state.
    state = backend.merge_state(namespace.id)
    if state is not None:
        totals.waiting_commits = state.waiting
        totals.oldest_waiting = state.oldest
        totals.merged_by = state.merged_by
        totals.merged_at = state.merged_at
    totals.dedup_ratio = _ratio(totals.referenced_blocks, totals.blocks)
    return totals


def _add_packs(totals: NamespaceTotals, tables: Iterable[PackTable]) -> None:
    """Add all packs of a namespace to its totals, and to those of its KV cache groups."""
    groups: dict[int, GroupTotals] = {}
    for table in tables:
        totals.packs += 1
        totals.blocks += len(table.keys)
        totals.raw_bytes += table.raw_length
        totals.stored_bytes += table.payload_length
        _add_frames(groups, table)
    for group in groups.values():
        group.codec_ratio = _ratio(group.raw_bytes, group.stored_bytes)
        group.codecs.sort()
    totals.codec_ratio = _ratio(totals.raw_bytes, totals.stored_bytes)
    totals.groups = [groups[number] for number in sorted(groups)]


def _add_frames(groups: dict[int, GroupTotals], table: PackTable) -> None:
    """Add the frames of a pack to the totals of their KV cache groups."""
    for frame in table.frames:
        group = groups.setdefault(frame.group, GroupTotals(frame.group))
        group.blocks += frame.block_count
        group.raw_bytes += frame.block_count * frame.block_bytes
        group.stored_bytes += frame.stored_length
        # a frame that the codec does not make smaller is stored raw
        codec = table.codec if frame.encoded else RawCodec.name
        if codec not in group.codecs:
            group.codecs.append(codec)


def _ratio(part: int, whole: int) -> float | None:
    """Return ``part / whole``; None, undefined, if ``whole`` is 0."""
    return round(part / whole, 4) if whole else None
