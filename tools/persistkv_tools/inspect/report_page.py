"""``persistkv report``: its page."""

from __future__ import annotations

from collections.abc import Iterator

from persistkv import __version__
from persistkv_tools import render
from persistkv_tools.inspect import page
from persistkv_tools.inspect.reporting import LargestContexts, Period, ReportData
from persistkv_tools.inspect.totals import Bin, StoreTotals
from persistkv_tools.inspect.tree import TreeNode
from persistkv_tools.inspect.watching import EngineView


def report_page(data: ReportData) -> str:
    """One self-contained page of HTML."""
    return page.page(f"persistkv: {data.url}", _parts(data))


def _parts(data: ReportData) -> Iterator[str]:
    yield page.heading(data.url, 1)
    yield page.paragraph(f"as of {render.format_time(data.made)}")
    yield page.cards(_cards(data.totals))
    if data.totals.requests:
        yield page.columns(
            page.section("Age", "Requests by when they were stored.", _histogram("younger than", data.totals.ages)),
            page.section(
                "Size", "Requests by the raw bytes of their context.", _histogram("smaller than", data.totals.sizes)
            ),
        )
    if data.periods:
        yield page.columns(_fill(data.periods), _hits(data.periods))
    if data.contexts is not None:
        yield _tree(data.contexts)
    yield page.section(
        "Codecs", "Raw bytes per stored byte, for each KV cache group.", _groups(data.totals)
    ) + page.section("Namespaces", "One for each identity: model, dtype, layout.", _namespaces(data.totals))
    if data.largest:
        yield page.section("Largest requests", "By raw bytes.", _largest(data))
    if data.engines:
        yield page.section("Engines", "What they said of themselves last.", _engines(data.engines))
    yield f"<footer>persistkv {__version__}</footer>"


def _cards(totals: StoreTotals) -> Iterator[tuple[str, str]]:
    yield "requests", f"{totals.requests:,}"
    yield "packs", f"{totals.packs:,}"
    yield "blocks", f"{totals.blocks:,}"
    yield "raw", render.format_size(totals.raw_bytes)
    yield "stored", render.format_size(totals.stored_bytes)
    yield "on disk", render.format_size(totals.disk_bytes)
    yield "of the capacity", "no bound" if totals.fill is None else f"{totals.fill:.1%}"
    yield "codec ratio", render.format_ratio(totals.raw_bytes, totals.stored_bytes)
    yield "blocks named ÷ held", "-" if totals.dedup_ratio is None else f"{totals.dedup_ratio:.2f}"


def _histogram(header: str, bins: list[Bin]) -> str:
    rows = [(found.below or "(more)", float(found.requests), f"{found.requests:,}") for found in bins]
    return page.bars((header, "requests"), rows)


def _fill(periods: list[Period]) -> str:
    top = max(1, periods[-1].held_bytes)
    points: list[tuple[str, float | None]] = [
        (
            f"{render.format_time(period.start)}: {render.format_size(period.held_bytes)},"
            f" {render.count(period.requests, 'request')}",
            period.held_bytes,
        )
        for period in periods
    ]
    chart = page.steps(points, top, render.format_size(top), _ends(periods), label="raw bytes held, over time")
    return page.section("Fill over time", "Raw bytes that the requests of today had added by then.", chart)


def _hits(periods: list[Period]) -> str:
    points = [
        (f"{render.format_time(period.start)}: {_share(period.hit_rate)} of {period.blocks:,} blocks", period.hit_rate)
        for period in periods
    ]
    chart = page.steps(points, 1.0, "100 %", _ends(periods), label="share of blocks that were there, over time")
    blocks, found = (sum(getattr(period, name) for period in periods) for name in ("blocks", "found_blocks"))
    note = (
        f"Share of a request's blocks that an earlier one had named; {_share(found / blocks if blocks else None)} of"
        " all. Of the requests that are there still."
    )
    return page.section("Hit rate over time", note, chart)


def _ends(periods: list[Period]) -> tuple[str, str]:
    return render.format_time(periods[0].start), render.format_time(periods[-1].start) if len(periods) > 1 else ""


def _tree(contexts: LargestContexts) -> str:
    nodes = list(_walk(contexts.tree))
    deepest = max((node.start + node.blocks for _, node in nodes), default=1)
    rows = [
        (
            level,
            node.key,
            f"{render.count(node.blocks, 'block')}, {render.count(node.requests, 'request')}"
            + (f", {node.hidden:,} more below" if node.hidden else ""),
            node.start / deepest,
            (node.start + node.blocks) / deepest,
            node.chosen,
        )
        for level, node in nodes
    ]
    note = (
        f"Runs of blocks that the same requests share, by the keys of group {contexts.group} of namespace"
        f" {contexts.request.namespace[:8]}. What the largest request, {contexts.request.id}, goes through stands out."
    )
    return page.section("Prefix tree of the largest contexts", note, page.tracks(("first key", "shared by"), rows))


def _walk(top: TreeNode) -> Iterator[tuple[int, TreeNode]]:
    """All nodes below it, each before its children, with their levels."""
    waiting = [(0, node) for node in reversed(top.children)]
    while waiting:
        level, node = waiting.pop()
        yield level, node
        waiting += [(level + 1, child) for child in reversed(node.children)]


def _groups(totals: StoreTotals) -> str:
    rows = [
        (
            f"{namespace.id[:8]}, group {group.group}: {' '.join(group.codecs)}",
            group.codec_ratio or 0.0,
            f"{render.format_ratio(group.raw_bytes, group.stored_bytes)}"
            f" ({render.format_size(group.raw_bytes)} in {render.format_size(group.stored_bytes)})",
        )
        for namespace in totals.namespaces
        for group in namespace.groups
    ]
    return page.bars(("namespace and group", "ratio"), rows)


def _namespaces(totals: StoreTotals) -> str:
    rows = [
        [
            found.id[:8],
            render.format_time(found.created),
            f"{found.requests:,}",
            f"{found.packs:,}",
            f"{found.blocks:,}",
            render.format_size(found.raw_bytes),
            render.format_size(found.stored_bytes),
        ]
        for found in totals.namespaces
    ]
    return page.table(("namespace", "since", "requests", "packs", "blocks", "raw", "stored"), rows)


def _largest(data: ReportData) -> str:
    rows = [
        [
            request.id,
            render.format_time(request.created),
            f"{request.tokens:,}",
            f"{request.blocks:,}",
            render.format_size(request.raw_bytes),
            render.format_labels(request.labels),
        ]
        for request in data.largest
    ]
    return page.table(("request", "stored at", "tokens", "blocks", "raw", "labels"), rows)


def _engines(engines: list[EngineView]) -> str:
    rows = [
        [
            f"{engine.host}:{engine.pid}" + ("" if engine.live else " (gone)"),
            render.format_time(engine.updated),
            _share(engine.hit_rate),
            render.format_size(engine.counters.stored_raw_bytes),
            render.format_size(engine.counters.loaded_bytes),
            f"{engine.counters.evicted_blocks:,}",
            f"{engine.counters.dropped_blocks:,}",
        ]
        for engine in engines
    ]
    return page.table(("engine", "seen", "hits", "written", "read", "evicted", "dropped"), rows)


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"
