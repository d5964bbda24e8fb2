"""``persistkv stat``: totals of a store."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import asdict, dataclass
from operator import itemgetter
from types import SimpleNamespace

import msgspec

from persistkv import open_store
from persistkv.storage.backend import Backend, Namespace
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.stats import BackendStats, FreeSpace
from persistkv_tools import options, render
from persistkv_tools.options import AdoptionView, adoptions, show_adoptions

_AGES = (
    (3600, "1h"),
    (86_400, "1d"),
    (7 * 86_400, "7d"),
    (30 * 86_400, "30d"),
    (90 * 86_400, "90d"),
)
_SIZES = (
    (1 << 20, "1MiB"),
    (16 << 20, "16MiB"),
    (256 << 20, "256MiB"),
    (1 << 30, "1GiB"),
    (16 << 30, "16GiB"),
)


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
    """When the oldest of them was written: seconds since the epoch; None: there is none."""
    merged_by: str | None = None
    """Random name of the engine that merged last; None: it is not known."""
    merged_at: float | None = None
    """When it did: seconds since the epoch."""


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
    dedup_ratio: float | None
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
    adoptions: list[AdoptionView]
    """Recorded verdicts: whether a namespace may use the blocks of another engine release's
    namespace."""
    ages: list[Bin]
    sizes: list[Bin]


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _model(totals: NamespaceTotals | ModelTotals) -> str:
    return render.format_model(totals.model)


_TOTALS = render.columns(
    "requests packs blocks raw=raw_bytes stored=stored_bytes codec_ratio dedup_ratio=dedup "
    "on_disk=disk"
    " disk_ratio=more",
    dedup=lambda store: (
        f"{_number(store.dedup_ratio)} (blocks of all requests ÷ stored blocks)"
    ),
    disk=lambda store: (
        render.format_size(store.disk_bytes)
        + ("" if store.fill is None else f" ({store.fill:.1%} of the capacity)")
    ),
    more=lambda store: (
        f"{_number(store.disk_ratio)} (on disk ÷ stored; includes index and free space)"
    ),
)
_NAMESPACES = (
    "model namespace=short age=created requests packs blocks raw=raw_bytes "
    "stored=stored_bytes dedup=dedup_ratio"
)
_NARROW_NAMESPACES = "model namespace=short requests packs blocks stored=stored_bytes"
_MODELS = render.columns(
    "model namespaces requests packs blocks raw=raw_bytes stored=stored_bytes",
    model=_model,
)
_GROUPS = render.columns(
    "namespace group blocks raw=raw_bytes stored=stored_bytes ratio=codec_ratio codecs"
)


def stat(url: options.Url, json: options.Json = False) -> None:
    """Show the totals of a store: content, fill, and the savings of codecs and sharing.

    Example: persistkv stat lmdb:///var/cache/kv
    """
    with open_store(url) as store:
        totals = store.stats()
    if json:
        render.print_json(totals)
    else:
        _print(totals)


def _print(store: StoreTotals) -> None:
    rows = render.pairs(_TOTALS, store)
    if (free := store.free) is not None:
        payload = render.format_size(free.payload_bytes)
        if free.payload_bytes:
            payload += (
                f" in {render.count(free.pieces, 'piece')} (largest "
                f"{render.format_size(free.largest_bytes)})"
            )
        rows["free space"] = (
            f"{payload}; index {render.format_size(free.catalogue_bytes)}"
        )
        if free.fragmentation is not None:
            rows["fragmentation"] = (
                f"{free.fragmentation:.0%} (free payload space outside the largest piece)"
            )
    rows["capacity"] = (
        "none" if store.capacity is None else render.format_size(store.capacity)
    )
    if store.quarantined:
        size, names = (
            render.format_size(store.quarantined_bytes),
            " ".join(store.quarantined),
        )
        rows["damaged"] = (
            f"{size}, not counted in the capacity: {names}; persistkv prune --quarantined "
            f"deletes them"
        )
    render.show_pairs(rows, title=store.url)
    shown = _NAMESPACES if render.is_wide() else _NARROW_NAMESPACES
    columns = render.columns(shown, short=lambda space: space.id[:8], model=_model)
    render.show_table(columns, store.namespaces, left="namespace")
    _print_merging(
        [space for space in store.namespaces if space.waiting_commits is not None]
    )
    if len(store.models) < len(store.namespaces):
        render.show_table(_MODELS, store.models)
    groups = [
        SimpleNamespace(namespace=space.id, **msgspec.structs.asdict(group))
        for space in store.namespaces
        for group in space.groups
    ]
    render.show_table(_GROUPS, groups, left="codecs")
    show_adoptions(store.adoptions)
    if store.requests:
        _print_histogram("age of requests", "younger_than", store.ages)
        _print_histogram("raw size of requests", "smaller_than", store.sizes)


def _print_merging(namespaces: list[NamespaceTotals]) -> None:
    """Show the commits of a shared store that are not in its index yet, and who merged last."""
    columns = render.columns(
        "namespace=short waiting=waiting_commits oldest merged by",
        short=lambda space: space.id[:8],
        oldest=lambda space: _age(space.oldest_waiting),
        merged=lambda space: _age(space.merged_at),
        by=lambda space: (space.merged_by or "-")[:8],
    )
    render.show_table(columns, namespaces, left="namespace")


def _age(time: float | None) -> str:
    return "-" if time is None else render.format_age(time)


def _print_histogram(title: str, header: str, bins: list[Bin]) -> None:
    largest = max(found.requests for found in bins)
    columns = render.columns(
        f"{header}=bound requests raw=raw_bytes share",
        bound=lambda found: found.below or "(more)",
        share=lambda found: render.bar(found.requests, largest),
    )
    render.show_table(columns, bins, title=title, left="share")


def store_totals(url: str, backend: Backend) -> StoreTotals:
    """Return totals of a store. Reads pack tables and manifest heads; no payloads, and no keys of
    requests."""
    ages, sizes = (
        [Bin(name) for _, name in (*bounds, (0, None))] for bounds in (_AGES, _SIZES)
    )
    spaces = [
        _namespace_totals(backend, space, ages, sizes)
        for space in options.chosen_namespaces(backend, None)
    ]
    stats = backend.stats()
    referenced = sum(found.referenced_blocks for found in spaces)
    models: dict[str, ModelTotals] = {}
    for space in spaces:
        totals = models.setdefault(space.model, ModelTotals(space.model))
        totals.namespaces += 1
        for name in ("requests", "packs", "blocks", "raw_bytes", "stored_bytes"):
            setattr(totals, name, getattr(totals, name) + getattr(space, name))
    free = None
    extents = backend.free_space()
    if extents is not None:
        outside = _ratio(
            extents.payload_bytes - extents.largest_bytes, extents.payload_bytes
        )
        free = FreeTotals(**asdict(extents), fragmentation=outside)
    return StoreTotals(
        **asdict(stats),
        url=url,
        codec_ratio=_ratio(stats.raw_bytes, stats.stored_bytes),
        referenced_blocks=referenced,
        dedup_ratio=_ratio(referenced, stats.blocks),
        disk_ratio=_ratio(stats.disk_bytes, stats.stored_bytes),
        fill=_ratio(stats.disk_bytes, stats.capacity or 0),
        free=free,
        namespaces=spaces,
        models=sorted(
            models.values(), key=lambda totals: totals.stored_bytes, reverse=True
        ),
        adoptions=adoptions(backend),
        ages=ages,
        sizes=sizes,
    )


def _namespace_totals(
    backend: Backend, namespace: Namespace, ages: list[Bin], sizes: list[Bin]
) -> NamespaceTotals:
    """Return totals of a namespace; add its requests to the bins."""
    now = time.time()
    totals = NamespaceTotals(
        namespace.id.hex(), namespace.identity.model_name, namespace.created
    )
    for manifest in backend.catalogue(namespace.id).manifests():
        totals.requests += 1
        totals.referenced_blocks += manifest.blocks
        for bins, bounds, value in (
            (ages, _AGES, now - manifest.created),
            (sizes, _SIZES, manifest.raw_bytes),
        ):
            found = bins[bisect_right(bounds, value, key=itemgetter(0))]
            found.requests += 1
            found.raw_bytes += manifest.raw_bytes
    groups: dict[int, GroupTotals] = {}
    for table in backend.changes(namespace.id, None).added:
        totals.packs += 1
        totals.blocks += len(table.keys)
        totals.raw_bytes += table.raw_length
        totals.stored_bytes += table.payload_length
        for frame in table.frames:
            group = groups.setdefault(frame.group, GroupTotals(frame.group))
            group.blocks += frame.block_count
            group.raw_bytes += frame.block_count * frame.block_bytes
            group.stored_bytes += frame.stored_length
            group.codec_ratio = _ratio(group.raw_bytes, group.stored_bytes)
            group.codecs = sorted(
                {*group.codecs, table.codec if frame.encoded else RawCodec.name}
            )
    state = backend.merge_state(namespace.id)
    if state is not None:
        totals.waiting_commits, totals.oldest_waiting = state.waiting, state.oldest
        totals.merged_by, totals.merged_at = state.merged_by, state.merged_at
    totals.codec_ratio = _ratio(totals.raw_bytes, totals.stored_bytes)
    totals.dedup_ratio = _ratio(totals.referenced_blocks, totals.blocks)
    totals.groups = [groups[number] for number in sorted(groups)]
    return totals


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
