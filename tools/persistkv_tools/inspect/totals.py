"""``persistkv stat``: what a store holds in total, as values."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from persistkv.storage.backend import Backend, FreeSpace, Namespace
from persistkv.storage.codec import split_codecs
from persistkv.storage.pack import PackTable

_AGES = ((3600, "1h"), (86_400, "1d"), (7 * 86_400, "7d"), (30 * 86_400, "30d"), (90 * 86_400, "90d"))
_SIZES = ((1 << 20, "1MiB"), (16 << 20, "16MiB"), (256 << 20, "256MiB"), (1 << 30, "1GiB"), (16 << 30, "16GiB"))


class GroupTotals(msgspec.Struct):
    """One KV cache group in all packs of a namespace."""

    group: int
    blocks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    """Padding left out."""
    codec_ratio: float | None = None
    """Raw bytes per stored byte."""
    codecs: list[str] = []
    """Those that its frames are written with; ``raw`` where one did not shrink."""


class NamespaceTotals(msgspec.Struct, frozen=True):
    """One namespace."""

    id: str
    created: float
    requests: int
    packs: int
    blocks: int
    """In all packs; a block that lies in two is counted twice."""
    raw_bytes: int
    stored_bytes: int
    """Payloads, padding included."""
    codec_ratio: float | None
    referenced_blocks: int
    """Blocks of all requests; what requests share is counted for each."""
    dedup_ratio: float | None
    """Blocks referenced per block held."""
    groups: list[GroupTotals]


class Bin(msgspec.Struct):
    """One bar of a histogram of requests."""

    below: str | None
    """The bound, exclusive; None: everything above the others."""
    requests: int = 0
    raw_bytes: int = 0


class FreeTotals(msgspec.Struct, frozen=True):
    """What of ``disk_bytes`` holds nothing, and is written to again."""

    catalogue_bytes: int
    """Of the index; of all there is, where payloads lie in it."""
    payload_bytes: int
    """Of the files of payloads."""
    pieces: int
    """That the latter lies in."""
    largest_bytes: int
    """Of these pieces."""
    fragmentation: float | None
    """Share of the free payload space that lies outside of the largest piece; None where nothing is free."""

    @classmethod
    def of(cls, found: FreeSpace | None) -> FreeTotals | None:
        """What a backend says."""
        if found is None:
            return None
        outside = _ratio(found.payload_bytes - found.largest_bytes, found.payload_bytes)
        return cls(found.catalogue_bytes, found.payload_bytes, found.pieces, found.largest_bytes, outside)


class StoreTotals(msgspec.Struct, frozen=True):
    """A store."""

    url: str
    requests: int
    packs: int
    blocks: int
    raw_bytes: int
    stored_bytes: int
    codec_ratio: float | None
    """Raw bytes per stored byte; None for an empty store."""
    referenced_blocks: int
    dedup_ratio: float | None
    disk_bytes: int
    disk_ratio: float | None
    """Bytes on disk per stored byte: what index, requests and free space between packs add."""
    capacity: int | None
    fill: float | None
    """Share of the capacity that is taken."""
    free: FreeTotals | None
    """None where the medium has no space of its own, as a bucket has not."""
    namespaces: list[NamespaceTotals]
    """Oldest first."""
    ages: list[Bin]
    sizes: list[Bin]
    quarantined: tuple[str, ...]
    """Directories of damaged stores that were renamed; they count towards no capacity."""
    quarantined_bytes: int


def store_totals(url: str, backend: Backend) -> StoreTotals:
    """The totals of a store. Reads its tables and heads, no payload and no keys of requests."""
    ages, sizes = _Histogram(_AGES), _Histogram(_SIZES)
    namespaces = sorted(backend.namespaces(), key=lambda namespace: (namespace.created, namespace.id))
    totals = [_namespace_totals(backend, namespace, ages, sizes) for namespace in namespaces]
    stats = backend.stats()
    referenced = sum(found.referenced_blocks for found in totals)
    return StoreTotals(
        url,
        stats.requests,
        stats.packs,
        stats.blocks,
        stats.raw_bytes,
        stats.stored_bytes,
        _ratio(stats.raw_bytes, stats.stored_bytes),
        referenced,
        _ratio(referenced, stats.blocks),
        stats.disk_bytes,
        _ratio(stats.disk_bytes, stats.stored_bytes),
        stats.capacity,
        _ratio(stats.disk_bytes, stats.capacity or 0),
        FreeTotals.of(backend.free_space()),
        totals,
        ages.bins,
        sizes.bins,
        stats.quarantined,
        stats.quarantined_bytes,
    )


def _namespace_totals(backend: Backend, namespace: Namespace, ages: _Histogram, sizes: _Histogram) -> NamespaceTotals:
    now = time.time()
    requests = referenced = 0
    for manifest in backend.manifests(namespace.id):
        requests += 1
        referenced += manifest.blocks
        ages.add(now - manifest.created, manifest.raw_bytes)
        sizes.add(manifest.raw_bytes, manifest.raw_bytes)
    tables = backend.changes(namespace.id, None).added
    blocks = sum(len(table.keys) for table in tables)
    raw, stored = sum(table.raw_length for table in tables), sum(table.payload_length for table in tables)
    return NamespaceTotals(
        namespace.id.hex(),
        namespace.created,
        requests,
        len(tables),
        blocks,
        raw,
        stored,
        _ratio(raw, stored),
        referenced,
        _ratio(referenced, blocks),
        _group_totals(tables),
    )


def _group_totals(tables: Iterable[PackTable]) -> list[GroupTotals]:
    groups: dict[int, GroupTotals] = {}
    codecs: dict[int, set[str]] = {}
    for table in tables:
        names = ["raw", *split_codecs(table.codecs)]
        for frame in table.frames:
            group = groups.setdefault(frame.group, GroupTotals(frame.group))
            group.blocks += frame.block_count
            group.raw_bytes += frame.block_count * frame.block_bytes
            group.stored_bytes += frame.stored_length
            codecs.setdefault(frame.group, set()).add(names[frame.codec])
    for number, group in groups.items():
        group.codec_ratio = _ratio(group.raw_bytes, group.stored_bytes)
        group.codecs = sorted(codecs[number])
    return [groups[number] for number in sorted(groups)]


class _Histogram:
    def __init__(self, bounds: Sequence[tuple[int, str]]) -> None:
        self._bounds = [bound for bound, _ in bounds]
        self.bins = [Bin(name) for _, name in bounds] + [Bin(None)]

    def add(self, value: float, raw_bytes: int) -> None:
        found = self.bins[bisect_right(self._bounds, value)]
        found.requests += 1
        found.raw_bytes += raw_bytes


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
