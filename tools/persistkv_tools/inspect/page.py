"""The parts of an HTML page that needs nothing beside itself: no script, no font, no network. Light or dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from persistkv.printable import printable

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


def escape(text: str) -> str:
    """Text as HTML; it comes from stores and from other processes."""
    return html.escape(printable(text))


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page."""
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    """A heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    """Text for a person."""
    return f"<p>{escape(text)}</p>"


def section(title: str, note: str, *parts: str) -> str:
    """A heading, what it means, and what is below it."""
    return "<section>" + heading(title) + paragraph(note) + "".join(parts) + "</section>"


def columns(*parts: str) -> str:
    """Side by side where there is room."""
    return f'<div class="columns">{"".join(parts)}</div>'


def cards(values: Iterable[tuple[str, str]]) -> str:
    """(name, figure) each."""
    inner = "".join(
        f'<div class="card"><b>{escape(figure)}</b><span>{escape(name)}</span></div>' for name, figure in values
    )
    return f'<div class="cards">{inner}</div>'


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Text, the first column left."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def bars(headers: Sequence[str], rows: Sequence[tuple[str, float, str]]) -> str:
    """(name, value, how the value is written) each, with a bar."""
    largest = max((value for _, value, _ in rows), default=0.0)
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(
        f'<tr><td>{escape(name)}</td><td>{escape(text)}</td><td class="bar">'
        f'<i style="width:{100 * value / largest if largest else 0:.2f}%"></i></td></tr>'
        for name, value, text in rows
    )
    return f'<div class="scroll"><table><tr>{head}<th></th></tr>{body}</table></div>'


def steps(
    points: Sequence[tuple[str, float | None]], top: float, top_text: str, ends: tuple[str, str], *, label: str
) -> str:
    """A column for each of equal steps; None leaves a gap.

    :param points: (what the step shows, in words; its value).
    :param top: the largest value that fits, above 0.
    :param ends: what stands below the first and the last step.
    :param label: what it shows, for who cannot see it.
    """
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    step = width / max(1, len(points))
    marks = []
    for place, (name, value) in enumerate(points):
        if value is not None:
            tall = height * min(1.0, value / top)
            marks.append(
                f'<rect x="{_LEFT + place * step:.1f}" y="{_TOP + height - tall:.1f}" width="{max(1.0, step - 1):.1f}"'
                f' height="{tall:.1f}" fill="var(--bar)"><title>{escape(name)}</title></rect>'
            )
    base = _TOP + height
    axis = (
        f'<path d="M{_LEFT} {_TOP}V{base}H{_WIDTH - _RIGHT}" fill="none" stroke="var(--line)"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 10}" text-anchor="end">{escape(top_text)}</text>'
        f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>'
    )
    below = (
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{escape(ends[0])}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{escape(ends[1])}</text>'
    )
    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}"'
    return f"<svg {view}>{axis}{''.join(marks)}{below}</svg>"


def tracks(headers: Sequence[str], rows: Iterable[tuple[int, str, str, float, float, bool]]) -> str:
    """(level, name, text, begin, end, whether it is the chosen one) each; begin and end are shares of the track."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(
        f'<tr><td>{"&nbsp;" * 2 * level}{escape(name)}</td><td>{escape(text)}</td><td class="tree">'
        f'<div class="track{" chosen" if chosen else ""}">'
        f'<i style="left:{100 * begin:.3f}%;width:{100 * (end - begin):.3f}%"></i></div></td></tr>'
        for level, name, text, begin, end, chosen in rows
    )
    return f'<div class="scroll"><table><tr>{head}<th></th></tr>{body}</table></div>'
