"""``persistkv report``: one self-contained HTML page about a store.

A store keeps no history. The page computes the past from requests that are still held: for each
one, the blocks that earlier requests had named, and the blocks that it added.
"""

from __future__ import annotations

import html
import time
from argparse import ArgumentParser
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

import msgspec

from persistkv import __version__
from persistkv.errors import printable
from persistkv.storage.backend import Backend
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.inspection.pack_tables import all_keys
from persistkv.storage.inspection.requests import (
    FoundRequest,
    RequestView,
    chosen_requests,
)
from persistkv.storage.inspection.selection import Selection
from persistkv.storage.inspection.store_totals import Bin, StoreTotals, store_totals
from persistkv_tools import options, render, savings
from persistkv_tools.command import URL, Command
from persistkv_tools.inspect.show import PrefixTree, TreeNode, prefix_tree
from persistkv_tools.inspect.stat import TENANTS, groups_of, has_tenants
from persistkv_tools.inspect.top import EngineView, Watch, engine_name
from persistkv_tools.options import opened

_PERIODS = 48  # intervals of a chart, whose columns can still be distinguished
_MOST = 10  # rows of a table
_LONG_TABLE = 60  # rows of the prefix tree and of the table of tenants: two screens
_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --panel: #f5f7fa; --text: #1c2733;
  --dim: #5b6b7b; --line: #d5dce4;
  --bar: #2563b0; --hot: #b4540a; }
@media (prefers-color-scheme: dark) { :root { --back: #12181f; --panel: #1b232d;
  --text: #e4eaf0; --dim: #97a6b5;
  --line: #33404e; --bar: #6aa5ee; --hot: #f0a35e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 24px; background: var(--back);
  color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px;
  margin: 32px 0 8px; }
p { margin: 4px 0 12px; color: var(--dim); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr));
  gap: 10px; margin: 16px 0; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px; }
.card b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; } .card
  span { color: var(--dim); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr));
  gap: 0 28px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--dim); font-weight: 500; } th:first-child, td:first-child {
  text-align: left; }
td.bar { width: 45%; } td.tree { width: 60%; }
.chart { display: flex; align-items: end; gap: 1px; height: 120px; border-bottom: 1px
  solid var(--line); }
.chart i { flex: 1; background: var(--bar); }
.ends { display: flex; justify-content: space-between; color: var(--dim); font-size:
  12px; }
.track { position: relative; height: 13px; border-radius: 2px; }
td.tree .track { min-width: 260px; background: var(--panel); }
.track i { position: absolute; top: 0; bottom: 0; border-radius: 2px; background:
  var(--bar); }
td.tree i { min-width: 2px; }
.track.chosen i { background: var(--hot); }
footer { margin-top: 36px; color: var(--dim); }
@media (max-width: 520px) {
  body { padding: 14px; }
  h1 { font-size: 18px; }
  .card b { font-size: 16px; white-space: nowrap; }
  .columns { grid-template-columns: minmax(0, 1fr); }
  .cards { grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); }
  th, td { padding: 4px 6px; }
  th, tr:has(.track) td { white-space: normal; }
  tr:has(.track) td:nth-child(2) { min-width: 92px; }
  td.tree { width: 45%; }
  td.tree .track { min-width: 90px; }
}
"""


_CARDS = render.columns(
    "requests packs blocks raw=raw_bytes stored=stored_bytes on_disk=disk_bytes "
    "of_the_capacity=part"
    " codec_ratio dedup_ratio",
    part=lambda totals: "no limit" if totals.fill is None else f"{totals.fill:.1%}",
)
_NAMESPACES = render.columns(
    "model=name namespace=short created_at=since requests packs blocks raw=raw_bytes "
    "stored=stored_bytes",
    name=lambda namespace: namespace.model or "-",
    short=lambda namespace: namespace.id[:8],
    since=lambda namespace: render.format_time(namespace.created),
)
_LARGEST = render.columns(
    "request=id stored_at tokens blocks raw=raw_bytes labels",
    stored_at=lambda found: render.format_time(found.created),
)
_ENGINES = render.columns(
    "engine seen hits=hit_rate written=counters.stored_raw_bytes read=counters.loaded_bytes"
    " evicted=counters.evicted_blocks dropped=counters.dropped_blocks",
    engine=engine_name,
    seen=lambda engine: render.format_time(engine.updated),
)


class Period(msgspec.Struct):
    """One interval of the time charts of a report. All intervals have the same length, at least 1
    s."""

    start: float
    """Seconds since the epoch."""
    requests: int = 0
    """Requests that were created in the interval, are still held, and have readable keys."""
    blocks: int = 0
    """Blocks of the requests that ``requests`` counts; a shared block counts once for each of
    them."""
    found_blocks: int = 0
    """Part of ``blocks`` that are also blocks of an earlier request of the namespace."""
    added_bytes: int = 0
    """Estimated raw bytes of the part of ``blocks`` that belongs to no earlier request of the
    namespace: all blocks of a request count as equally large."""
    held_bytes: int = 0
    """Sum of ``added_bytes`` of this and all earlier intervals."""

    def add(self, request: RequestManifest, num_found: int) -> None:
        """Count a request of which earlier requests had ``num_found`` blocks."""
        self.requests += 1
        self.blocks += request.blocks
        self.found_blocks += num_found
        if request.blocks:
            num_added = request.blocks - num_found
            self.added_bytes += request.raw_bytes * num_added // request.blocks


class ReportData(msgspec.Struct, frozen=True):
    """Content of the page that ``persistkv report`` writes."""

    url: str
    made: float
    """When the data was read: seconds since the epoch."""
    totals: StoreTotals
    periods: list[Period]
    """Intervals of the time charts, oldest first; empty if the store holds no requests."""
    largest: list[RequestView]
    """The largest requests by raw bytes, largest first."""
    tree: PrefixTree | None
    """Prefix tree of the largest request's namespace; None if the store holds no requests."""
    engines: list[EngineView]


def report(
    url: str,
    *,
    output: Path,
    json: bool,
) -> None:
    """Write an HTML page about a store: ages, sizes, fill and hits over time, prefix tree, codecs.
    It needs no network.

    Example: persistkv report lmdb:///var/cache/kv -o report.html
    """
    with opened(url) as backend:
        data = report_data(url, backend)
    page = report_page(data).encode()
    options.write_file(output, page)
    if json:
        render.print_json(
            {
                "url": url,
                "file": str(output),
                "bytes": len(page),
            }
        )
    else:
        render.say(f"{output}: {render.format_size(len(page))}")


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        type=Path,
        required=True,
        help="HTML file to write; an existing one is replaced.",
    )


COMMAND = Command(report, (URL,), _add_options)


def report_data(url: str, backend: Backend) -> ReportData:
    """Read the data of a report. Reads the keys of all requests: some 150 bytes of memory for each
    block."""
    found = chosen_requests(backend, [], Selection(), namespace=None)
    found.sort(key=attrgetter("manifest.created", "manifest.id"))
    by_size = sorted(found, key=lambda request: -request.manifest.raw_bytes)
    largest = by_size[:_MOST]
    tree = None
    # the tree is that of the largest request's namespace, and highlights the path of this request
    if largest:
        tree = prefix_tree(backend, largest[0], node_limit=_LONG_TABLE)
    return ReportData(
        url=url,
        made=time.time(),
        totals=store_totals(url, backend),
        periods=_periods(backend, found),
        largest=[request.view(backend) for request in largest],
        tree=tree,
        engines=Watch(url, backend).snapshot().engines,
    )


def _periods(backend: Backend, found: list[FoundRequest]) -> list[Period]:
    """Return the intervals of the time charts; ``found`` is sorted by creation time."""
    if not found:
        return []
    periods = _empty_periods(
        first=found[0].manifest.created,
        last=found[-1].manifest.created,
    )
    starts = [period.start for period in periods]
    # keep keys by namespace id, because equal keys mean equal tokens only within one namespace
    keys_seen: dict[bytes, set[bytes]] = {}
    for request in found:
        namespace = request.namespace.id
        (keys,) = backend.manifest_keys(namespace, [request.manifest.id])
        # None: the keys are damaged, or the request was deleted meanwhile
        if keys is None:
            continue
        seen = keys_seen.setdefault(namespace, set())
        request_keys = all_keys(keys)
        num_found = sum(key in seen for key in request_keys)
        seen.update(request_keys)
        # the last interval that starts before the request, or with it
        number = bisect_right(starts, request.manifest.created) - 1
        periods[number].add(request.manifest, num_found)
    _sum_up(periods)
    return periods


def _empty_periods(first: float, last: float) -> list[Period]:
    """Return intervals of equal length that cover the time from ``first`` to ``last``."""
    length = max((last - first) / _PERIODS, 1.0)
    # add one interval, because the last request is at the end of the last full one
    count = int((last - first) / length) + 1
    return [Period(first + number * length) for number in range(count)]


def _sum_up(periods: Iterable[Period]) -> None:
    """Set the ``held_bytes`` of intervals, which are given oldest first."""
    held_bytes = 0
    for period in periods:
        held_bytes += period.added_bytes
        period.held_bytes = held_bytes


def report_page(data: ReportData) -> str:
    """Return the report as one self-contained page of HTML."""
    title = _escape(f"persistkv: {data.url}")
    body = "\n".join(_parts(data))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n"
        f"</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _parts(data: ReportData) -> Iterator[str]:
    """Yield the HTML of the report's body, section by section."""
    yield f"<h1>{_escape(data.url)}</h1><p>as of {_escape(render.format_time(data.made))}</p>"
    yield _cards(data.totals)
    # without requests, there are no ages and sizes to show
    if data.totals.requests:
        ages = _histogram("younger than", data.totals.ages)
        sizes = _histogram("smaller than", data.totals.sizes)
        yield _columns(
            _section("Age", "Requests by age.", ages),
            _section("Size", "Requests by raw size.", sizes),
        )
    if data.periods:
        yield _columns(_fill(data.periods), _hits(data.periods))
    if data.tree is not None:
        # the tree is that of the largest request
        largest_request = data.largest[0]
        yield _tree(data.tree, largest_request)
    yield _section(
        "Codecs",
        "Raw bytes per stored byte, for each KV cache group.",
        _groups(data.totals),
    )
    namespaces = _records(_NAMESPACES, data.totals.namespaces)
    yield _section(
        "Namespaces", "One for each identity (model, dtype, layout).", namespaces
    )
    if has_tenants(data.totals):
        note = "The most stored bytes first. A tenant above its quota evicts its own content."
        tenants = _records(TENANTS, data.totals.tenants[:_LONG_TABLE])
        yield _section("Tenants", note, tenants)
    note = f"Restored instead of computed: {savings.summary(data.totals.savings)}."
    yield from _listed("Savings", note, savings.COLUMNS, data.totals.savings)
    yield from _listed("Largest requests", "By raw size.", _LARGEST, data.largest)
    yield from _listed("Engines", "Last published status.", _ENGINES, data.engines)
    yield f"<footer>persistkv {__version__}</footer>"


def _cards(totals: StoreTotals) -> str:
    """Return the figures of the whole store, each in a box with its name."""
    cards = []
    for name, figure in render.pairs(_CARDS, totals).items():
        card = f"<b>{_escape(figure)}</b><span>{name}</span>"
        cards.append(f'<div class="card">{card}</div>')
    return f'<div class="cards">{"".join(cards)}</div>'


def _listed(
    title: str,
    note: str,
    columns: render.Columns,
    records: Sequence[object],
) -> Iterator[str]:
    """Yield a section with a table of records; nothing if there are none."""
    if records:
        yield _section(title, note, _records(columns, records))


def _histogram(header: str, bins: list[Bin]) -> str:
    """Return a table of the requests in each bin, with bars relative to the fullest bin."""
    # at least 1, because ``largest`` is a divisor, and all bins of an empty store are 0
    largest = max(1, *(found.requests for found in bins))
    rows = []
    for found in bins:
        name = found.below or "(more)"
        share = found.requests / largest
        rows.append(_bar(name, f"{found.requests:,}", end=share))
    return _table((header, "requests", ""), rows)


def _fill(periods: list[Period]) -> str:
    """Return the chart of the stored bytes over time, relative to those of the last period."""
    top = max(1, periods[-1].held_bytes)
    texts = []
    shares = []
    for period in periods:
        size = render.format_size(period.held_bytes)
        texts.append(f"{size}, {render.count(period.requests, 'request')}")
        shares.append(period.held_bytes / top)
    note = "Cumulative raw bytes of the stored requests, by creation time."
    return _chart(
        "Fill over time", note, periods, shares, texts, render.format_size(top)
    )


def _hits(periods: list[Period]) -> str:
    """Return the chart of the hit rate over time."""
    rates = []
    texts = []
    found_blocks = 0
    blocks = 0
    for period in periods:
        rates.append(period.found_blocks / max(1, period.blocks))
        share = _share(period.found_blocks, period.blocks)
        texts.append(f"{share} of {period.blocks:,} blocks")
        found_blocks += period.found_blocks
        blocks += period.blocks
    overall = _share(found_blocks, blocks)
    note = (
        f"Share of blocks that earlier requests had stored; overall {overall}. Deleted "
        f"requests are not counted."
    )
    return _chart("Hit rate over time", note, periods, rates, texts, "100 %")


def _tree(tree: PrefixTree, request: RequestView) -> str:
    """Return the section of the prefix tree: a bar for each node, from its first to its last
    block."""
    nodes = list(_walk(tree.top.children))
    # depth at the right end of the bars
    ends = [node.end for _, node in nodes]
    deepest = max(ends, default=1)
    rows = []
    for level, node in nodes:
        blocks = render.count(node.blocks, "block")
        requests = render.count(node.requests, "request")
        text = f"{blocks}, {requests}"
        if node.hidden:
            text += f", {node.hidden:,} more below, not shown"
        bar = _bar(
            node.key,
            text,
            end=node.end / deepest,
            begin=node.start / deepest,
            kind="tree",
            level=level,
            chosen=node.chosen,
        )
        rows.append(bar)
    note = (
        f"Runs of blocks that the same requests share (keys of group {tree.group} of namespace"
        f" {request.namespace[:8]}). The path of the largest request, {request.id}, is highlighted."
    )
    return _section(
        "Prefix tree of the largest contexts",
        note,
        _table(("first key", "shared by", ""), rows),
    )


def _walk(
    nodes: Iterable[TreeNode],
    level: int = 0,
) -> Iterator[tuple[int, TreeNode]]:
    """Yield (level, node) of all nodes, each before its children."""
    for node in nodes:
        yield level, node
        yield from _walk(node.children, level + 1)


def _groups(totals: StoreTotals) -> str:
    """Return a table of the codec ratios of all KV cache groups, with bars relative to the best."""
    groups = groups_of(totals.namespaces)
    # a group without blocks has no ratio
    ratios = [group.codec_ratio or 0.0 for _, group in groups]
    best_ratio = max(ratios, default=0.0)
    rows = []
    for namespace, group in groups:
        codecs = " ".join(group.codecs)
        name = f"{namespace.id[:8]}, group {group.group}: {codecs}"
        raw = render.format_size(group.raw_bytes)
        stored = render.format_size(group.stored_bytes)
        ratio = render.format_ratio(group.raw_bytes, group.stored_bytes)
        length = 0.0
        if group.codec_ratio:
            length = group.codec_ratio / best_ratio
        text = f"{ratio} ({raw} in {stored})"
        rows.append(_bar(name, text, end=length))
    return _table(("namespace and group", "ratio", ""), rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _escape(text: str) -> str:
    """Return a text as HTML, with special and unprintable characters escaped: it may come from
    other processes."""
    return html.escape(printable(text))


def _section(
    title: str,
    note: str,
    content: str,
) -> str:
    return f"<section><h2>{title}</h2><p>{_escape(note)}</p>{content}</section>"


def _columns(*parts: str) -> str:
    """Return HTML that shows the parts side by side if the window is wide enough."""
    return f'<div class="columns">{"".join(parts)}</div>'


def _records(columns: render.Columns, records: Iterable[object]) -> str:
    """Return an HTML table of records."""
    rows = []
    for row in render.cells(columns, records):
        rows.append("".join(f"<td>{_escape(cell)}</td>" for cell in row))
    return _table(columns, rows)


def _bar(
    name: str,
    text: str,
    end: float,
    begin: float = 0.0,
    *,
    kind: str = "bar",
    level: int = 0,
    chosen: bool = False,
) -> str:
    """Return a table row with a bar between two positions from 0 (left) to 1 (right), its name
    indented by ``level``.

    :param text: text between the name and the bar.
    :param kind: CSS class of the bar: ``bar`` or ``tree``.
    :param chosen: whether to highlight the bar.
    """
    indent = "&nbsp;" * 2 * level
    track = "track chosen" if chosen else "track"
    left = 100 * begin
    width = 100 * (end - begin)
    bar = f'<i style="left:{left:.3f}%;width:{width:.3f}%"></i>'
    return (
        f"<td>{indent}{_escape(name)}</td><td>{_escape(text)}</td>"
        f'<td class="{kind}"><div class="{track}">{bar}</div></td>'
    )


def _table(headers: Iterable[str], rows: Iterable[str]) -> str:
    """Return an HTML table.

    :param rows: for each row, the HTML of its cells: ``<td>`` elements.
    """
    head = "".join(f"<th>{header}</th>" for header in headers)
    body = "</tr><tr>".join(rows)
    return f'<div class="scroll"><table><tr>{head}</tr><tr>{body}</tr></table></div>'


def _chart(
    title: str,
    note: str,
    periods: Sequence[Period],
    shares: Sequence[float],
    texts: Sequence[str],
    top: str,
) -> str:
    """Return a section with a chart, which has one column for each period.

    :param shares: heights of the columns: parts of the full height, 0 to 1.
    :param texts: texts of the columns' tooltips.
    :param top: label of the full height.
    """
    times = [render.format_time(period.start) for period in periods]
    columns = []
    for begin, share, text in zip(times, shares, texts, strict=True):
        tooltip = _escape(f"{begin}: {text}")
        height = f"{100 * share:.1f}%"
        columns.append(f'<i style="height:{height}" title="{tooltip}"></i>')
    chart = (
        f'<div class="chart" role="img" aria-label="{title}">{"".join(columns)}</div>'
    )
    last_time = times[-1] if len(times) > 1 else ""
    ends = f"<span>{times[0]}</span><span>{last_time}</span>"
    content = f'<div class="ends">{top}</div>{chart}<div class="ends">{ends}</div>'
    return _section(title, note, content)
