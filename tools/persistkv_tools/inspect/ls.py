"""``persistkv ls``: list the requests of a store, page by page.

The JSON output has the fields of the structs below; the table is made from them, too.
"""

from __future__ import annotations

from argparse import ArgumentParser
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
    SELECTION,
    URL,
    Command,
    add_flag,
    add_shared,
    number,
)

_PAGE = 50  # rows of a table without --limit
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
    expired: bool,
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
        label,
        older_than,
        newer_than,
        larger_than,
        smaller_than,
        never_hit=never_hit,
        expired=expired,
    )
    if ids + csv + json > 1:
        raise ConfigurationError(
            "output format", "several", "at most one of --ids, --csv and --json"
        )
    # programs get all requests, each as one row; people get a page, with copies merged into one row
    for_programs = ids or csv or json
    most = _most_rows(limit, for_programs=for_programs)
    with open_store(url) as store:
        page = store.requests(
            selection,
            namespace=namespace,
            sort=sort,
            reverse=reverse,
            offset=offset,
            limit=most,
            merge_copies=not for_programs,
        )
    if json:
        render.print_json(page)
    elif ids:
        names = [f"{printable(request.id)}\n" for request in page.requests]
        render.print_exact("".join(names))
    elif csv:
        render.print_exact(_csv(page))
    else:
        _print(page)


def _most_rows(limit: int | None, *, for_programs: bool) -> int | None:
    """Return how many rows to show; None: all.

    :param limit: value of --limit; 0: all; None: it is not given.
    :param for_programs: whether a program reads the output: it gets all rows by default.
    """
    if limit is None:
        return None if for_programs else _PAGE
    return limit or None


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--sort",
        metavar="FIELD",
        choices=[field.value for field in Sort],
        default=Sort.CREATED.value,
        help=_SORT_HELP,
    )
    add_flag(parser, "--reverse", "Reverse the order.")
    add_shared(parser, *SELECTION, "--newer-than")
    parser.add_argument(
        "--smaller-than",
        metavar="SIZE",
        help="Only requests with fewer raw bytes, e.g. 1GiB.",
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=number(least=0),
        help=_LIMIT_HELP,
    )
    parser.add_argument(
        "--offset",
        metavar="N",
        type=number(least=0),
        default=0,
        help="Requests to skip.",
    )
    add_flag(parser, "--ids", "Print only the full ids, one per line.")
    csv_help = "Print comma-separated values with a header; sizes in bytes."
    add_flag(parser, "--csv", csv_help)


COMMAND = Command(ls, (URL,), _add_options)


def _csv(page: Page) -> str:
    """Return the page as comma-separated values, with a header."""
    text = StringIO()
    # leave out the number of copies, because copies are rows of their own here
    columns = [name for name in RequestView.__struct_fields__ if name != "copies"]
    writer = DictWriter(
        text, [*columns, "model"], extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    models = {namespace.id: namespace.model for namespace in page.namespaces}
    for request in page.requests:
        row = asdict(request)
        row["group_blocks"] = "+".join(map(str, request.group_blocks))
        row["labels"] = render.format_labels(request.labels)
        row["model"] = models[request.namespace]
        writer.writerow(row)
    return text.getvalue()


def _print(page: Page) -> None:
    """Print the page as a table, with the columns that fit the terminal."""
    models = {}
    for namespace in page.namespaces:
        models[namespace.id] = render.format_model(namespace.model)
    model_names = set(models.values())
    # a column of models that shows the same model in each row would only take room
    has_model_column = len(model_names) > 1
    # if namespaces have the same model, its name does not tell them apart
    models_are_ambiguous = len(models) > len(model_names)

    # a word for each column; see ``render.columns``
    shown = "request=short_id age=created"
    if render.is_wide():
        shown += " used=last_used tokens blocks by_group size=raw_bytes"
        shown += " stored=stored_bytes"
    else:
        shown += " tokens size=raw_bytes"
    shown += " expires copies hits pinned labels"
    if has_model_column:
        shown += " model"
    if render.is_wide() and models_are_ambiguous:
        shown += " namespace"
    columns = render.columns(
        shown,
        by_group=_blocks_by_group,
        copies=_copies,
        hits=lambda request: render.or_dash(request.hits, "{:,}".format),
        model=lambda request: models[request.namespace],
    )
    render.show_table(
        columns,
        page.requests,
        left="pinned,labels,model,namespace",
        optional="by group,stored,expires,copies,hits,pinned,labels",
    )
    only_model = ""
    # without a column of models, the store has at most one model
    if not has_model_column:
        only_model = next(iter(model_names), "")
    _print_counts(page, only_model)


def _copies(request: RequestView) -> str:
    """Return the number of copies; empty for one, so that a column without copies is left out."""
    return f"{request.copies:,}" if request.copies > 1 else ""


def _blocks_by_group(request: RequestView) -> str:
    """Return the blocks of each KV cache group, such as ``12+3``; empty if there is one group."""
    if len(request.group_blocks) == 1:
        return ""
    return "+".join(f"{blocks:,}" for blocks in request.group_blocks)


def _print_counts(page: Page, model: str) -> None:
    """Print how many requests there are and which rows were shown.

    :param model: the only model of the store; ``-`` or empty: none.
    """
    requests = render.count(page.total, "request")
    namespaces = render.count(len(page.namespaces), "namespace")
    line = f"{requests} in {namespaces} of {page.url}"
    if model not in ("", "-"):
        line += f", model {model}"
    if page.matched != page.total:
        line += f"; {page.matched:,} match the filters"
    render.say(line)
    end = page.offset + len(page.requests)
    has_more = end < page.rows
    if page.requests and (page.offset or has_more):
        following = f"; next page: --offset {end}" if has_more else ""
        render.say(f"rows {page.offset + 1:,} to {end:,} of {page.rows:,}{following}")
