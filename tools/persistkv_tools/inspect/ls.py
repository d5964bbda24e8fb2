"""``persistkv ls``: list the requests of a store, page by page.

The JSON output has the fields of the structs below; the table is made from them, too.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from csv import DictWriter
from io import StringIO

from msgspec.structs import asdict

from persistkv.errors import ConfigurationError, printable
from persistkv.storage.inspection.handle import open_store
from persistkv.storage.inspection.listing import Page, Sort
from persistkv.storage.inspection.requests import RequestView
from persistkv.storage.inspection.selection import Selection
from persistkv_tools import render
from persistkv_tools.command import (
    URL,
    Command,
    add_flag,
    add_labels,
    add_larger_than,
    add_namespace,
    add_never_hit,
    add_newer_than,
    add_older_than,
    number,
)

_PAGE = 50
_SORT_HELP = (
    "Newest or largest first: created, used, tokens, blocks, size, hits. "
    "Alphabetically: id, namespace."
)
_LIMIT_HELP = (
    f"Requests to show; 0: all. By default {_PAGE} in the table, otherwise all."
)


def ls(
    url: str,
    *,
    sort: str,
    reverse: bool,
    namespace: str | None,
    label: list[str] | None,
    older_than: str | None,
    newer_than: str | None,
    larger_than: str | None,
    smaller_than: str | None,
    never_hit: bool,
    limit: int | None,
    offset: int,
    ids: bool,
    csv: bool,
    json: bool,
) -> None:
    """List the requests of a store, newest first. Requests with the same context and labels are one
    row of the table.

    Example: persistkv ls lmdb:///var/cache/kv --sort size --label user=anna
    """
    selection = Selection.parse(
        label, older_than, newer_than, larger_than, smaller_than, never_hit=never_hit
    )
    if ids + csv + json > 1:
        raise ConfigurationError(
            "output format", "several", "at most one of --ids, --csv and --json"
        )
    for_programs = ids or csv or json
    shown = (None if for_programs else _PAGE) if limit is None else limit or None
    with open_store(url) as store:
        page = store.requests(
            selection,
            namespace=namespace,
            sort=sort,
            reverse=reverse,
            offset=offset,
            limit=shown,
            merge_copies=not for_programs,
        )
    if json:
        render.print_json(page)
    elif ids:
        render.print_exact(
            "".join(f"{printable(request.id)}\n" for request in page.requests)
        )
    elif csv:
        render.print_exact(_csv(page))
    else:
        _print(page)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--sort",
        metavar="FIELD",
        choices=[field.value for field in Sort],
        default=Sort.CREATED.value,
        help=_SORT_HELP,
    )
    add_flag(parser, "--reverse", "Reverse the order.")
    add_namespace(parser)
    add_labels(parser)
    add_older_than(parser)
    add_newer_than(parser)
    add_larger_than(parser)
    parser.add_argument(
        "--smaller-than",
        metavar="SIZE",
        help="Only requests with fewer raw bytes, e.g. 1GiB.",
    )
    add_never_hit(parser)
    parser.add_argument("--limit", metavar="N", type=number(0), help=_LIMIT_HELP)
    parser.add_argument(
        "--offset", metavar="N", type=number(0), default=0, help="Requests to skip."
    )
    add_flag(parser, "--ids", "Print only the full ids, one per line.")
    csv_help = "Print comma-separated values with a header; sizes in bytes."
    add_flag(parser, "--csv", csv_help)


COMMAND = Command(ls, (URL,), _add_options)


def _csv(page: Page) -> str:
    text, columns = (
        StringIO(),
        [name for name in RequestView.__struct_fields__ if name != "copies"],
    )
    writer = DictWriter(
        text, [*columns, "model"], extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    models = {space.id: space.model for space in page.namespaces}
    for request in page.requests:
        blocks, labels = (
            "+".join(map(str, request.group_blocks)),
            render.format_labels(request.labels),
        )
        writer.writerow(
            {
                **asdict(request),
                "group_blocks": blocks,
                "labels": labels,
                "model": models[request.namespace],
            }
        )
    return text.getvalue()


def _print(page: Page) -> None:
    wide, models = (
        render.is_wide(),
        {space.id: render.format_model(space.model) for space in page.namespaces},
    )
    distinct, shorts = (
        len(set(models.values())),
        Counter(request.short_id for request in page.requests),
    )
    columns = render.columns(
        "request=short age=created"
        + " used=last_used" * wide
        + " tokens"
        + " blocks by_group" * wide
        + " size=raw_bytes"
        + " stored=stored_bytes" * wide
        + " copies hits pinned labels"
        + " model" * (distinct > 1)
        + " namespace" * (wide and len(models) > distinct),
        short=lambda request: (
            request.short_id if shorts[request.short_id] == 1 else request.id
        ),
        by_group=lambda request: (
            "+".join(f"{n:,}" for n in request.group_blocks)
            * (len(request.group_blocks) > 1)
        ),
        copies=lambda request: f"{request.copies:,}" * (request.copies > 1),
        hits=_hits,
        model=lambda request: models[request.namespace],
    )
    optional = "by group,stored,copies,hits,pinned,labels"
    render.show_table(
        columns, page.requests, left="pinned,labels,model,namespace", optional=optional
    )
    held = (
        f"{render.count(page.total, 'request')} in {render.count(len(models), 'namespace')} "
        f"of {page.url}"
    )
    if distinct == 1 and (name := next(space.model for space in page.namespaces)):
        held += f", model {render.format_model(name)}"
    matched = (
        "" if page.matched == page.total else f"; {page.matched:,} match the filters"
    )
    render.say(held + matched)
    end = page.offset + len(page.requests)
    if page.requests and (page.offset or end < page.rows):
        following = f"; next page: --offset {end}" if end < page.rows else ""
        render.say(f"rows {page.offset + 1:,} to {end:,} of {page.rows:,}{following}")


def _hits(request: RequestView) -> str:
    """Return the number of requests that reused a row's context, its further copies included; ``-``
    if unknown.

    It is at least 1 if the context was ever reused, even by a deleted request.
    """
    if request.hits is None:
        return "-"
    return f"{max(request.hits + request.copies - 1, int(request.reused or False)):,}"
