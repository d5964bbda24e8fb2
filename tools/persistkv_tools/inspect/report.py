"""``persistkv report``: one self-contained HTML page about a store.

A store keeps no history. The page computes the past from requests that are still held: for each one, the blocks that
earlier requests had named, and the blocks that it added.
"""

from __future__ import annotations

import html
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from persistkv import __version__
from persistkv.errors import FileError, printable
from persistkv.storage.extensions import InspectableBackend
from persistkv_tools import render
from persistkv_tools.inspect.show import TreeNode, prefix_tree
from persistkv_tools.inspect.stat import Bin, StoreTotals, store_totals
from persistkv_tools.inspect.top import EngineView, Watch, engine_name
from persistkv_tools.options import FoundRequest, Json, RequestView, Selection, Url, chosen_requests, opened
from persistkv_tools.packs import all_keys

_PERIODS = 48
_MOST = 10
_NODES = 60
_WIDTH, _HEIGHT = 720, 200
_LEFT, _BOTTOM, _TOP, _RIGHT = 72, 24, 10, 12
_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --panel: #f5f7fa; --text: #1c2733; --dim: #5b6b7b; --line: #d5dce4;
  --bar: #2563b0; --area: #2563b033; --hot: #b4540a; }
@media (prefers-color-scheme: dark) { :root { --back: #12181f; --panel: #1b232d; --text: #e4eaf0; --dim: #97a6b5;
  --line: #33404e; --bar: #6aa5ee; --area: #6aa5ee33; --hot: #f0a35e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 24px; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 4px 0 12px; color: var(--dim); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin: 16px 0; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.card b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; } .card span { color: var(--dim); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 0 28px; }
@media (max-width: 520px) { .columns { grid-template-columns: 1fr; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--dim); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
td.bar { width: 45%; text-align: left; }
td.bar i { display: block; height: 12px; border-radius: 2px; background: var(--bar); }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--dim); font-size: 12px; }
.track { position: relative; height: 14px; min-width: 260px; background: var(--panel); border-radius: 2px; }
.track i { position: absolute; top: 0; bottom: 0; min-width: 2px; border-radius: 2px; background: var(--bar); }
.track.chosen i { background: var(--hot); }
td.tree { width: 60%; }
footer { margin-top: 36px; color: var(--dim); }
"""


_NAMESPACES = render.columns(
    "namespace=short since requests packs blocks raw=raw_bytes stored=stored_bytes",
    short=lambda space: space.id[:8],
    since=lambda space: render.format_time(space.created),
)
_LARGEST = render.columns(
    "request=id stored_at tokens blocks raw=raw_bytes labels", stored_at=lambda found: render.format_time(found.created)
)
_ENGINES = render.columns(
    "engine seen hits=hit_rate written read evicted dropped",
    engine=engine_name,
    seen=lambda engine: render.format_time(engine.updated),
    written=lambda engine: render.format_size(engine.counters.stored_raw_bytes),
    read=lambda engine: render.format_size(engine.counters.loaded_bytes),
    evicted=lambda engine: f"{engine.counters.evicted_blocks:,}",
    dropped=lambda engine: f"{engine.counters.dropped_blocks:,}",
)


class Period(msgspec.Struct):
    """One interval of the time charts. All intervals have the same length."""

    start: float
    """Seconds since the epoch."""
    requests: int = 0
    """Requests that were created in the interval, are still held, and have readable keys."""
    blocks: int = 0
    """Blocks of these requests."""
    found_blocks: int = 0
    """Number of these blocks that an earlier request of the namespace had named."""
    added_bytes: int = 0
    """Raw bytes of the other blocks."""
    held_bytes: int = 0
    """Sum of ``added_bytes`` up to the end of the interval."""

    @property
    def hit_rate(self) -> float | None:
        """Share of ``blocks`` that an earlier request had named, 0 to 1; None without blocks."""
        return self.found_blocks / self.blocks if self.blocks else None


class ReportData(msgspec.Struct, frozen=True):
    """Content of the page."""

    url: str
    made: float
    """Seconds since the epoch."""
    totals: StoreTotals
    periods: list[Period]
    """Oldest first; empty if the store holds no requests."""
    largest: list[RequestView]
    tree: TreeNode | None
    """Prefix tree of the largest request's namespace; None if the store holds no requests."""
    group: int
    """KV cache group whose keys the tree is made of."""
    engines: list[EngineView]


def report(
    url: Url,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write; is replaced.")],
    json: Json = False,
) -> None:
    """Write a page about a store: ages, sizes, fill and hits over time, prefix tree, codecs. It needs no network.

    Example: persistkv report lmdb:///var/cache/kv -o report.html
    """
    with opened(url) as backend:
        made = report_page(report_data(url, backend)).encode()
    beside = output.with_name(output.name + ".part")
    try:
        beside.write_bytes(made)
        os.replace(beside, output)
    except OSError as error:
        raise FileError("write", output, error) from None
    if json:
        render.print_json({"url": url, "file": str(output), "bytes": len(made)})
    else:
        render.say(f"{output}: {render.format_size(len(made))}")


def report_data(url: str, backend: InspectableBackend) -> ReportData:
    """Read the data of a report. Reads the keys of all requests: some 150 bytes of memory for each block.

    :raises StoreError: the medium failed.
    """
    found = chosen_requests(backend, [], Selection(), None)
    found.sort(key=lambda request: (request.manifest.created, request.manifest.id))
    by_size = sorted(found, key=lambda request: -request.manifest.raw_bytes)[:_MOST]
    largest = [
        RequestView.of(space.id, manifest, backend.uses(space.id, [manifest.id])[0]) for space, manifest in by_size
    ]
    tree, group = None, 0
    if by_size:
        blocks = by_size[0].manifest.group_blocks
        group = max(range(len(blocks)), key=blocks.__getitem__, default=0)
        tree = prefix_tree(backend, by_size[0], group=group, node_limit=_NODES)
    periods, engines = _periods(backend, found), Watch(url, backend).look().engines
    return ReportData(url, time.time(), store_totals(url, backend), periods, largest, tree, group, engines)


def _periods(backend: InspectableBackend, found: list[FoundRequest]) -> list[Period]:
    """Return the intervals of the time charts; ``found`` is sorted by creation time."""
    if not found:
        return []
    first, last = found[0].manifest.created, found[-1].manifest.created
    length = max((last - first) / _PERIODS, 1.0)
    periods = [Period(first + number * length) for number in range(int((last - first) / length) + 1)]
    named: dict[bytes, set[bytes]] = {}
    for namespace, request in found:
        keys = backend.manifest_keys(namespace.id, [request.id])[0]
        if keys is None:
            continue
        seen, own = named.setdefault(namespace.id, set()), all_keys(keys)
        known = sum(key in seen for key in own)
        seen.update(own)
        period = periods[min(int((request.created - first) / length), len(periods) - 1)]
        period.requests += 1
        period.blocks += request.blocks
        period.found_blocks += known
        period.added_bytes += request.raw_bytes * (request.blocks - known) // max(1, request.blocks)
    held = 0
    for period in periods:
        held += period.added_bytes
        period.held_bytes = held
    return periods


def report_page(data: ReportData) -> str:
    """Return the report as one self-contained page of HTML."""
    return page(f"persistkv: {data.url}", _parts(data))


def _parts(data: ReportData) -> Iterator[str]:
    yield heading(data.url, 1)
    yield paragraph(f"as of {render.format_time(data.made)}")
    yield cards(_cards(data.totals))
    if data.totals.requests:
        yield columns(
            section("Age", "Requests by when they were stored.", _histogram("younger than", data.totals.ages)),
            section(
                "Size", "Requests by the raw bytes of their context.", _histogram("smaller than", data.totals.sizes)
            ),
        )
    if data.periods:
        yield columns(_fill(data.periods), _hits(data.periods))
    if data.tree is not None:
        yield _tree(data.tree, data.group, data.largest[0])
    yield section("Codecs", "Raw bytes per stored byte, for each KV cache group.", _groups(data.totals)) + section(
        "Namespaces", "One for each identity: model, dtype, layout.", table(_NAMESPACES, data.totals.namespaces)
    )
    if data.largest:
        yield section("Largest requests", "By raw bytes.", table(_LARGEST, data.largest))
    if data.engines:
        yield section("Engines", "Their last status.", table(_ENGINES, data.engines))
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
    return bars((header, "requests"), rows)


def _fill(periods: list[Period]) -> str:
    top = max(1, periods[-1].held_bytes)
    points = [
        (f"{render.format_size(period.held_bytes)}, {render.count(period.requests, 'request')}", period.held_bytes)
        for period in periods
    ]
    chart = steps(periods, points, top, render.format_size(top), label="raw bytes held, over time")
    return section("Fill over time", "Raw bytes that the requests of today had added by then.", chart)


def _hits(periods: list[Period]) -> str:
    points = [(f"{_share(period.hit_rate)} of {period.blocks:,} blocks", period.hit_rate) for period in periods]
    chart = steps(periods, points, 1.0, "100 %", label="share of blocks that were there, over time")
    blocks, found = (sum(getattr(period, name) for period in periods) for name in ("blocks", "found_blocks"))
    note = (
        f"Share of a request's blocks that an earlier one had named; {_share(found / blocks if blocks else None)} of"
        " all. Of the requests that are there still."
    )
    return section("Hit rate over time", note, chart)


def _tree(tree: TreeNode, group: int, request: RequestView) -> str:
    nodes = list(_walk(tree.children))
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
        f"Runs of blocks that the same requests share, by the keys of group {group} of namespace"
        f" {request.namespace[:8]}. The path of the largest request, {request.id}, is highlighted."
    )
    return section("Prefix tree of the largest contexts", note, tracks(("first key", "shared by"), rows))


def _walk(nodes: Iterable[TreeNode], level: int = 0) -> Iterator[tuple[int, TreeNode]]:
    """Yield (level, node) of all nodes, each before its children."""
    for node in nodes:
        yield level, node
        yield from _walk(node.children, level + 1)


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
    return bars(("namespace and group", "ratio"), rows)


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def escape(text: str) -> str:
    """Return a text as HTML, with special and unprintable characters escaped: it may come from other processes."""
    return html.escape(printable(text))


def page(title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def section(title: str, note: str, *parts: str) -> str:
    """Return the HTML of a section: a heading, a note that explains it, and content."""
    return "<section>" + heading(title) + paragraph(note) + "".join(parts) + "</section>"


def columns(*parts: str) -> str:
    """Return HTML that shows the parts side by side if the window is wide enough."""
    return f'<div class="columns">{"".join(parts)}</div>'


def cards(values: Iterable[tuple[str, str]]) -> str:
    """Return the HTML of cards, each with a (name, figure) pair."""
    inner = "".join(
        f'<div class="card"><b>{escape(figure)}</b><span>{escape(name)}</span></div>' for name, figure in values
    )
    return f'<div class="cards">{inner}</div>'


def table(columns: render.Columns, records: Iterable[object]) -> str:
    """Return an HTML table of records; the first column is left-aligned."""
    return _table(columns, ([f"<td>{escape(cell)}</td>" for cell in row] for row in render.cells(columns, records)))


def bars(headers: Sequence[str], rows: Sequence[tuple[str, float, str]]) -> str:
    """Return an HTML bar chart with a row for each (name, value, text of the value)."""
    largest = max((value for _, value, _ in rows), default=0.0)
    return _table(
        (*headers, ""),
        (
            [
                f"<td>{escape(name)}</td><td>{escape(text)}</td>",
                f'<td class="bar"><i style="width:{100 * value / largest if largest else 0:.2f}%"></i></td>',
            ]
            for name, value, text in rows
        ),
    )


def tracks(headers: Sequence[str], rows: Iterable[tuple[int, str, str, float, float, bool]]) -> str:
    """Return an HTML table of bars from (indent, name, text, begin, end, highlighted); begin and end are 0 to 1."""
    return _table(
        (*headers, ""),
        (
            [
                f'<td>{"&nbsp;" * 2 * level}{escape(name)}</td><td>{escape(text)}</td><td class="tree">',
                f'<div class="track{" chosen" if chosen else ""}">',
                f'<i style="left:{100 * begin:.3f}%;width:{100 * (end - begin):.3f}%"></i></div></td>',
            ]
            for level, name, text, begin, end, chosen in rows
        ),
    )


def _table(headers: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def steps(
    periods: Sequence[Period], points: Sequence[tuple[str, float | None]], top: float, top_text: str, *, label: str
) -> str:
    """Return an SVG chart with a column for each period.

    :param points: (tooltip, value) of each column; a value of None leaves a gap.
    :param top: value of a column of full height, above 0.
    :param top_text: label of this value on the axis.
    :param label: description for screen readers.
    """
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    step, base, marks = width / len(periods), _TOP + height, []
    for place, (period, (text, value)) in enumerate(zip(periods, points, strict=True)):
        if value is not None:
            tall = height * min(1.0, value / top)
            marks.append(
                f'<rect x="{_LEFT + place * step:.1f}" y="{base - tall:.1f}" width="{max(1.0, step - 1):.1f}"'
                f' height="{tall:.1f}" fill="var(--bar)">'
                f"<title>{escape(f'{render.format_time(period.start)}: {text}')}</title></rect>"
            )
    texts = [(_LEFT - 6, _TOP + 10, "end", top_text), (_LEFT - 6, base, "end", "0")]
    texts.append((_LEFT, _HEIGHT - 6, "start", render.format_time(periods[0].start)))
    if len(periods) > 1:
        texts.append((_WIDTH - _RIGHT, _HEIGHT - 6, "end", render.format_time(periods[-1].start)))
    labels = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>' for x, y, anchor, text in texts
    )
    axis = f'<path d="M{_LEFT} {_TOP}V{base}H{_WIDTH - _RIGHT}" fill="none" stroke="var(--line)"/>'
    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}"'
    return f"<svg {view}>{axis}{''.join(marks)}{labels}</svg>"
