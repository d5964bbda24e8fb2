"""``persistkv stat``."""

from __future__ import annotations

from rich.table import Table

from persistkv_tools import render
from persistkv_tools.inspect.totals import Bin, FreeTotals, StoreTotals, store_totals
from persistkv_tools.options import Json, Url, opened


def stat(url: Url, json: Json = False) -> None:
    """Show what a store holds in total, how full it is, and what codecs and sharing save.

    Example: persistkv stat lmdb:///var/cache/kv
    """
    with opened(url) as backend:
        totals = store_totals(url, backend)
    if json:
        render.print_json(totals)
    else:
        _print(totals)


def _print(store: StoreTotals) -> None:
    console = render.console()
    full = "" if store.fill is None else f" ({store.fill:.1%} of the capacity)"
    rows = {
        "requests": f"{store.requests:,}",
        "packs": f"{store.packs:,}",
        "blocks": f"{store.blocks:,}",
        "raw": render.format_size(store.raw_bytes),
        "stored": render.format_size(store.stored_bytes),
        "codec ratio": _number(store.codec_ratio),
        "dedup ratio": f"{_number(store.dedup_ratio)} (blocks that requests name ÷ blocks held)",
        "on disk": render.format_size(store.disk_bytes) + full,
        "disk ratio": f"{_number(store.disk_ratio)} (on disk ÷ stored: index, requests, space between packs)",
        **_free(store.free),
        "capacity": "none" if store.capacity is None else render.format_size(store.capacity),
    }
    if store.quarantined:
        size = render.format_size(store.quarantined_bytes)
        rows["damaged"] = (
            f"{size} outside of the capacity in {' '.join(store.quarantined)}; prune --quarantined deletes them"
        )
    console.print(render.pairs(rows, title=store.url))
    console.print(_namespaces(store))
    console.print(_groups(store))
    if store.requests:
        console.print(_histogram("age of requests", "younger than", store.ages))
        console.print(_histogram("raw size of requests", "smaller than", store.sizes))


def _free(found: FreeTotals | None) -> dict[str, str]:
    if found is None:
        return {}
    payload = render.format_size(found.payload_bytes)
    if found.payload_bytes:
        payload += f" in {render.count(found.pieces, 'piece')}, the largest {render.format_size(found.largest_bytes)}"
    rows = {"free within": f"{payload}; in the index {render.format_size(found.catalogue_bytes)}"}
    if found.fragmentation is not None:
        rows["fragmentation"] = (
            f"{found.fragmentation:.0%} (of the free space for payloads, outside of the largest piece)"
        )
    return rows


def _namespaces(store: StoreTotals) -> Table:
    rows = [
        [
            found.id[:8],
            render.format_age(found.created),
            f"{found.requests:,}",
            f"{found.packs:,}",
            f"{found.blocks:,}",
            render.format_size(found.raw_bytes),
            render.format_size(found.stored_bytes),
            _number(found.dedup_ratio),
        ]
        for found in store.namespaces
    ]
    return render.table(("namespace", "age", "requests", "packs", "blocks", "raw", "stored", "dedup"), rows)


def _groups(store: StoreTotals) -> Table:
    rows = [
        [
            found.id[:8],
            str(group.group),
            f"{group.blocks:,}",
            render.format_size(group.raw_bytes),
            render.format_size(group.stored_bytes),
            _number(group.codec_ratio),
            " ".join(group.codecs),
        ]
        for found in store.namespaces
        for group in found.groups
    ]
    return render.table(("namespace", "group", "blocks", "raw", "stored", "ratio", "codecs"), rows, left="codecs")


def _histogram(title: str, header: str, bins: list[Bin]) -> Table:
    largest = max(found.requests for found in bins)
    rows = [
        [
            found.below or "(more)",
            f"{found.requests:,}",
            render.format_size(found.raw_bytes),
            render.bar(found.requests, largest),
        ]
        for found in bins
    ]
    return render.table((header, "requests", "raw", "share"), rows, title=title, left="share")


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
