"""``persistkv stat``: totals of a store."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import msgspec

from persistkv.storage.catalogue.quotas import TenantTotals
from persistkv.storage.inspection.handle import open_store
from persistkv.storage.inspection.store_totals import (
    Bin,
    FreeTotals,
    GroupTotals,
    ModelTotals,
    NamespaceTotals,
    StoreTotals,
)
from persistkv.tenants import DEFAULT_TENANT
from persistkv_tools import render, savings
from persistkv_tools.command import Command
from persistkv_tools.options import show_adoptions

_MOST_ROWS = 20  # rows of a table of labels or tenants; --json has all


def _number(ratio: float | None) -> str:
    return render.or_dash(ratio, "{:.2f}".format)


def _model(totals: NamespaceTotals | ModelTotals) -> str:
    return render.format_model(totals.model)


def _quota(totals: TenantTotals) -> str:
    return "none" if totals.quota is None else render.format_size(totals.quota)


def _disk(store: StoreTotals) -> str:
    size = render.format_size(store.disk_bytes)
    if store.fill is None:
        return size
    return f"{size} ({store.fill:.1%} of the capacity)"


def _part_of_quota(totals: TenantTotals) -> str:
    if totals.quota is None:
        return "-"
    return f"{totals.stored_bytes / totals.quota:.1%}"


_TOTALS = render.columns(
    "requests packs blocks raw=raw_bytes stored=stored_bytes codec_ratio dedup_ratio=dedup "
    "on_disk=disk disk_ratio=more",
    dedup=lambda store: (
        f"{_number(store.dedup_ratio)} (blocks of all requests ÷ stored blocks)"
    ),
    disk=_disk,
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
TENANTS = render.columns(
    "tenant packs stored=stored_bytes quota=bound of_the_quota=part",
    bound=_quota,
    part=_part_of_quota,
)
"""Columns for the totals of tenants, which ``persistkv report`` shows, too."""
_GROUPS = render.columns(
    "namespace group blocks raw=raw_bytes stored=stored_bytes ratio=codec_ratio codecs"
)


def stat(url: str, *, json: bool) -> None:
    """Show the totals of a store: content, fill, and the savings of codecs and sharing.

    Example: persistkv stat lmdb:///var/cache/kv
    """
    with open_store(url) as store:
        totals = store.stats()
    if json:
        render.print_json(totals)
    else:
        _print(totals)


COMMAND = Command(stat)


def _free_rows(free: FreeTotals) -> dict[str, str]:
    """Return the lines about free space that a store reuses."""
    payload = render.format_size(free.payload_bytes)
    if free.payload_bytes:
        pieces = render.count(free.pieces, "piece")
        payload += f" in {pieces} (largest {render.format_size(free.largest_bytes)})"
    index = render.format_size(free.catalogue_bytes)
    rows = {"free space": f"{payload}; index {index}"}
    if free.fragmentation is not None:
        outside = "(free payload space outside the largest piece)"
        rows["fragmentation"] = f"{free.fragmentation:.0%} {outside}"
    return rows


def _print(store: StoreTotals) -> None:
    """Print the totals of a store: itself, its namespaces, models, tenants, labels and groups."""
    render.show_pairs(_rows(store), title=store.url)
    shown = _NAMESPACES if render.is_wide() else _NARROW_NAMESPACES
    columns = render.columns(
        shown,
        short=lambda namespace: namespace.id[:8],
        model=_model,
    )
    render.show_table(columns, store.namespaces, left="namespace")
    _print_merging(store.namespaces)
    # if each namespace has a model of its own, both tables would show the same totals
    if len(store.models) < len(store.namespaces):
        render.show_table(_MODELS, store.models)
    if has_tenants(store):
        render.show_table(TENANTS, store.tenants[:_MOST_ROWS], left="tenant")
    if store.savings:
        render.show_table(savings.COLUMNS, store.savings[:_MOST_ROWS], left="label")
    _print_groups(store.namespaces)
    show_adoptions(store.adoptions)
    if store.requests:
        _print_histogram("age of requests", "younger_than", store.ages)
        _print_histogram("raw size of requests", "smaller_than", store.sizes)


def has_tenants(store: StoreTotals) -> bool:
    """Return whether the store has content or a quota of another tenant than the default one."""
    return any(found.tenant != DEFAULT_TENANT for found in store.tenants)


def _rows(store: StoreTotals) -> dict[str, str]:
    """Return the totals of the whole store by name."""
    rows = render.pairs(_TOTALS, store)
    # None for a bucket, which has no free space to reuse
    if store.free is not None:
        rows |= _free_rows(store.free)
    rows["capacity"] = "none"
    if store.capacity is not None:
        rows["capacity"] = render.format_size(store.capacity)
    rows["saved"] = savings.summary(store.savings)
    if store.quarantined:
        size = render.format_size(store.quarantined_bytes)
        names = " ".join(store.quarantined)
        rows["damaged"] = (
            f"{size}, not counted in the capacity: {names};"
            " persistkv prune --quarantined deletes them"
        )
    return rows


def groups_of(
    namespaces: Iterable[NamespaceTotals],
) -> list[tuple[NamespaceTotals, GroupTotals]]:
    """Return all KV cache groups of the namespaces, each with its namespace."""
    groups = []
    for namespace in namespaces:
        for group in namespace.groups:
            groups.append((namespace, group))
    return groups


def _print_groups(namespaces: list[NamespaceTotals]) -> None:
    """Print one row for each KV cache group of each namespace."""
    rows = []
    for namespace, group in groups_of(namespaces):
        fields = msgspec.structs.asdict(group)
        rows.append(SimpleNamespace(namespace=namespace.id, **fields))
    render.show_table(_GROUPS, rows, left="codecs")


def _print_merging(namespaces: list[NamespaceTotals]) -> None:
    """Show the commits of a shared store that are not in its index yet, and who merged last."""
    # None for a local store, which has no inbox
    shared = [
        namespace for namespace in namespaces if namespace.waiting_commits is not None
    ]
    if not shared:
        return
    columns = render.columns(
        "namespace=short_id waiting=waiting_commits oldest=waiting_age merged=merge_age by=merger",
        short_id=lambda namespace: namespace.id[:8],
        waiting_age=lambda namespace: render.or_dash(
            namespace.oldest_waiting, render.format_age
        ),
        merge_age=lambda namespace: render.or_dash(
            namespace.merged_at, render.format_age
        ),
        merger=lambda namespace: (namespace.merged_by or "-")[:8],
    )
    render.show_table(columns, shared, left="namespace")


def _print_histogram(
    title: str,
    header: str,
    bins: list[Bin],
) -> None:
    """Print the requests and bytes of each bin, with a bar relative to the fullest one.

    :param header: header of the column with the upper bounds of the bins.
    """
    most_requests = max(found.requests for found in bins)
    # ``requests`` and ``raw_bytes`` are fields of a bin; the functions below return the other cells
    columns = render.columns(
        f"{header}=bound requests raw=raw_bytes share",
        bound=lambda found: found.below or "(more)",
        share=lambda found: render.bar(found.requests, most_requests),
    )
    render.show_table(columns, bins, title=title, left="share")
