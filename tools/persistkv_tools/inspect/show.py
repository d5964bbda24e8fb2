"""``persistkv show``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from persistkv_tools import render
from persistkv_tools.inspect.context import ContextView, GroupView, PackView, show_context
from persistkv_tools.inspect.tree import TreeNode, prefix_tree
from persistkv_tools.options import InNamespace, Json, Request, Url, opened
from persistkv_tools.selection import find_request

_PACKS = ("pack", "blocks", "of", "raw", "stored", "codecs", "shared with")
_KEYS = ("key", "depth", "pack", "frame at")
_SHOWN_PACKS = 40


def show(
    url: Url,
    request: Request,
    tree: Annotated[
        bool, typer.Option("--tree", help="Also draw the prefix tree of the namespace's contexts.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="Nodes of the tree to draw at most.")] = 40,
    keys: Annotated[int, typer.Option(min=0, help="Keys to name of each group.")] = 4,
    namespace: InNamespace = None,
    json: Json = False,
) -> None:
    """Show one context: its packs and keys, its sizes, and what it shares with other requests.

    Example: persistkv show lmdb:///var/cache/kv 0c4de6a0 --tree
    """
    with opened(url) as backend:
        names: dict[bytes, list[str]] = {}
        found = find_request(backend, request, namespace, names)
        others = names[found.namespace.id]
        context = show_context(url, backend, found, others, key_limit=keys)
        longest = max(range(len(context.groups)), key=lambda group: context.groups[group].blocks, default=0)
        top = None
        if tree:
            top = prefix_tree(backend, found.namespace.id, others, found.manifest.id, group=longest, node_limit=nodes)
    if json:
        render.print_json({"context": context, "tree": top})
        return
    _print(context)
    if top is not None:
        requests = render.count(top.requests, "request")
        title = (
            f"prefix tree of {requests} of namespace {context.request.namespace[:8]}, by the keys of group {longest}"
        )
        render.console().print(_drawn(top, title))


def _print(context: ContextView) -> None:
    console, request = render.console(), context.request
    sharing = f"{context.shared_blocks:,} of {request.blocks:,} blocks are in other requests too"
    rows = {
        "request": request.id,
        "namespace": request.namespace,
        "made": f"{render.format_time(request.created)} ({render.format_age(request.created)} ago)",
        "used": "-" if request.last_used is None else f"{render.format_age(request.last_used)} ago",
        "pinned": "yes" if request.pinned else "no",
        "tokens": f"{request.tokens:,}",
        "raw": render.format_size(request.raw_bytes),
        "stored": "-" if request.stored_bytes is None else render.format_size(request.stored_bytes),
        "hits": "-" if request.hits is None else f"{request.hits:,}, of requests that are held",
        "labels": render.format_labels(request.labels),
        "shared": sharing,
    }
    console.print(render.pairs(rows))
    columns = ("group", "blocks", "missing", "raw", "stored", "ratio")
    console.print(render.table(columns, map(_group_cells, context.groups)))
    console.print(render.table(_PACKS, map(_pack_cells, context.packs[:_SHOWN_PACKS]), left="codecs"))
    if len(context.packs) > _SHOWN_PACKS:
        render.say(f"and {len(context.packs) - _SHOWN_PACKS:,} more packs; --json lists all")
    for group in context.groups:
        if group.keys:
            title = f"group {group.group}: the first {len(group.keys)} of {render.count(group.blocks, 'key')}"
            cells = [
                [
                    key.key,
                    f"{key.depth:,}",
                    (key.pack or "(none)")[:8],
                    "-" if key.offset is None else f"{key.offset:,}",
                ]
                for key in group.keys
            ]
            console.print(render.table(_KEYS, cells, title=title))


def _group_cells(group: GroupView) -> list[str]:
    return [
        str(group.group),
        f"{group.blocks:,}",
        f"{group.missing:,}",
        render.format_size(group.raw_bytes),
        render.format_size(group.stored_bytes),
        render.format_ratio(group.raw_bytes, group.stored_bytes),
    ]


def _pack_cells(pack: PackView) -> list[str]:
    return [
        pack.id[:8],
        f"{pack.blocks:,}",
        f"{pack.pack_blocks:,}",
        render.format_size(pack.raw_bytes),
        render.format_size(pack.stored_bytes),
        pack.codecs,
        render.count(pack.shared_with, "request") if pack.shared_with else "-",
    ]


def _drawn(top: TreeNode, title: str) -> Tree:
    drawn = Tree(render.plain(title))
    waiting = [(drawn, top)]
    while waiting:
        branch, node = waiting.pop()
        waiting += [(branch.add(_label(child)), child) for child in node.children]
        if node.hidden:
            branch.add(render.plain(f"{node.hidden:,} more not drawn (--nodes)", "dim"))
    return drawn


def _label(node: TreeNode) -> Text:
    line = f"{node.key} blocks {node.start:,} to {node.start + node.blocks:,}"
    if node.requests > 1:
        line += f", {render.count(node.requests, 'request')}"
    more = f" and {node.ends - len(node.names):,} more" if node.ends > len(node.names) else ""
    if node.names:
        line += f"; ends {', '.join(node.names)}{more}"
    return render.plain(line, "bold" if node.chosen else "")
