"""``persistkv show``: the context of one request, and the prefix tree of its namespace.

A chain is the list of keys of one request in one KV cache group. A block's key covers all tokens before it, so requests
that begin alike have chains that begin with the same keys. Sorted chains are a tree: what neighbours have in common is
a node. Only nodes that are shown are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, groupby, repeat, takewhile, zip_longest
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.tree import Tree

from persistkv.memory.budget import no_collections
from persistkv.storage.extensions import InspectableBackend
from persistkv.storage.format.pack import Frame, PackTable
from persistkv_tools import options, render
from persistkv_tools.options import FoundRequest, RequestView, find_request, opened, short_id
from persistkv_tools.packs import keys_of

_SHOWN_PACKS = 40
_SHARERS = 5
_KEY_DIGITS = 12
_Chain = tuple[list[bytes], str]
_NAMES = 2
_BRANCHES = 8
_NODE_DIGITS = 8


class KeyView(msgspec.Struct, frozen=True):
    """One block of a request."""

    depth: int
    key: str
    """First digits of the block's key, hexadecimal."""
    pack: str | None
    """Id of the pack that holds the block, hexadecimal; None: no pack holds it."""
    offset: int | None
    """Offset in bytes of the block's frame in the payload of the pack; None: no pack holds the block."""


class GroupView(msgspec.Struct, frozen=True):
    """Blocks of a request in one KV cache group."""

    group: int
    blocks: int
    missing: int
    """Number of blocks of the request in this group that no pack holds."""
    raw_bytes: int
    stored_bytes: int
    """Encoded size of the blocks that packs hold: their share of the frames that hold them, without padding."""
    keys: list[KeyView]
    """The first blocks of the request in this group, as many as ``persistkv show`` was told to list."""


class PackView(msgspec.Struct, frozen=True):
    """One pack that holds blocks of the request."""

    id: str
    blocks: int
    """Number of blocks of the request in the pack."""
    pack_blocks: int
    """Number of all blocks in the pack."""
    raw_bytes: int
    """Bytes of all blocks in the pack before the codec."""
    stored_bytes: int
    codec: str
    shared_with: int
    """Number of other requests that name at least one of the blocks that ``blocks`` counts."""
    sharers: list[str]
    """Ids of up to 5 of the requests that ``shared_with`` counts."""


class ContextView(msgspec.Struct, frozen=True):
    """One request's whole context."""

    url: str
    model: str
    """Name or path of the model, as given by the engine that created the namespace; may be empty."""
    request: RequestView
    groups: list[GroupView]
    packs: list[PackView]
    """Packs that hold blocks of the request, in the order in which the context first uses them."""
    shared_blocks: int
    """Blocks of this request that other requests name, too. Only requests with packs in common are compared."""


class _Place(NamedTuple):
    """Location of a block: its pack, and the frame in it that contains the block."""

    pack: PackTable
    frame: Frame


class TreeNode(msgspec.Struct):
    """Node of a prefix tree: a run of consecutive blocks that the same requests share."""

    start: int
    """Depth of the first block: the number of blocks before it in the context."""
    blocks: int
    key: str
    """First digits of the first block's key, hexadecimal."""
    requests: int
    """Number of requests whose context contains the blocks of this node."""
    ends: int
    """Number of requests whose context ends with the last block of this node."""
    names: list[str]
    """Ids of up to 2 of the requests that ``ends`` counts."""
    chosen: bool
    """Whether the request that the command shows contains the blocks of this node."""
    children: list[TreeNode]
    """Nodes that continue this one: the one with the chosen request first, then those with most requests."""
    hidden: int = 0
    """Number of nodes that continue this one and are left out of ``children``."""


_GROUPS = render.columns(
    "group blocks missing raw=raw_bytes stored=stored_bytes ratio",
    ratio=lambda group: render.format_ratio(group.raw_bytes, group.stored_bytes),
)
_PACKS = render.columns(
    "pack=short own_blocks=blocks blocks=pack_blocks raw=raw_bytes stored=stored_bytes codec sharers=sharing",
    short=lambda pack: pack.id[:8],
    sharing=lambda pack: f"{pack.shared_with:,}" if pack.shared_with else "-",
)
_KEYS = render.columns("key depth pack=held_by frame_offset=offset", held_by=lambda key: (key.pack or "(none)")[:8])


def show(
    url: options.Url,
    request: options.RequestId,
    tree: Annotated[
        bool, typer.Option("--tree", help="Also draw the prefix tree of the namespace's contexts.")
    ] = False,
    nodes: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, help="Largest number of tree nodes to draw.")
    ] = 40,
    keys: Annotated[int, typer.Option(metavar="N", min=0, help="Keys to show of each group.")] = 4,
    namespace: options.InNamespace = None,
    json: options.Json = False,
) -> None:
    """Show one request: packs, keys, sizes, and blocks that it shares with other requests.

    Example: persistkv show lmdb:///var/cache/kv 0c4de6a0 --tree
    """
    with opened(url) as backend:
        found = find_request(backend, request, namespace)
        context = show_context(url, backend, found, key_limit=keys)
        longest = max(range(len(context.groups)), key=lambda group: context.groups[group].blocks, default=0)
        top = prefix_tree(backend, found, group=longest, node_limit=nodes) if tree else None
    if json:
        render.print_json({"context": context, "tree": top})
        return
    _print(context)
    if top is not None:
        tree_of = f"{render.count(top.requests, 'request')} in namespace {context.request.namespace[:8]}"
        render.console().print(_rich_tree(top, f"prefix tree of {tree_of} (keys of group {longest})"))


def _print(context: ContextView) -> None:
    request = context.request
    rows = {
        "request": request.id + f" (short: {request.short_id})" * (request.short_id != request.id),
        "model": context.model or "-",
        "namespace": request.namespace,
        "created": f"{render.format_time(request.created)} ({render.format_age(request.created)} ago)",
        "last used": "-" if request.last_used is None else f"{render.format_age(request.last_used)} ago",
        "pinned": "yes" if request.pinned else "no",
        "tokens": f"{request.tokens:,}",
        "raw size": render.format_size(request.raw_bytes),
        "stored size": "-" if request.stored_bytes is None else render.format_size(request.stored_bytes),
        "hits": "-" if request.hits is None else f"{request.hits:,} (later requests that contain the whole context)",
        "labels": render.format_labels(request.labels),
        "shared": f"{context.shared_blocks:,} of {request.blocks:,} blocks are also in other requests",
    }
    if request.ttl_s is not None:
        rows["ttl"] = f"{request.ttl_s:,.0f} s after its last use"
    if request.priority != "normal":
        rows["priority"] = request.priority
    render.show_pairs(rows)
    render.show_table(_GROUPS, context.groups)
    render.show_table(_PACKS, context.packs, left="codec", most=_SHOWN_PACKS)
    for group in context.groups:
        if group.keys:
            title = f"group {group.group}: the first {len(group.keys)} of {render.count(group.blocks, 'key')}"
            render.show_table(_KEYS, group.keys, title=title)


def _rich_tree(top: TreeNode, title: str) -> Tree:
    drawn = Tree(render.plain(title))
    waiting = [(drawn, top)]
    while waiting:
        branch, node = waiting.pop()
        for child in node.children:
            line = f"{child.key} blocks {child.start:,} to {child.start + child.blocks:,}"
            line += f", {render.count(child.requests, 'request')}" if child.requests > 1 else ""
            more = f" and {child.ends - len(child.names):,} more" if child.ends > len(child.names) else ""
            line += f"; ends here: {', '.join(map(short_id, child.names))}{more}" if child.names else ""
            waiting.append((branch.add(render.plain(line, "bold" if child.chosen else "")), child))
        if node.hidden:
            branch.add(render.plain(f"{node.hidden:,} more, not drawn (see --nodes)", "dim"))
    return drawn


def show_context(url: str, backend: InspectableBackend, found: FoundRequest, *, key_limit: int) -> ContextView:
    """Return the view of one request: its blocks by group, its packs, and the blocks it shares with other requests.

    :param key_limit: largest number of keys to list for each group.
    :raises NotFoundError: the request was deleted meanwhile, or its keys are unreadable.
    """
    namespace, manifest, keys = found.namespace.id, found.manifest, found.keys(backend)
    chains = [group.unpack() for group in keys]
    named = backend.chain(namespace, manifest.id) or []
    others = [head.id for head in backend.manifests_naming(namespace, named) if head.id != manifest.id]
    places = _places(backend, namespace, backend.tables(namespace, named), chains)
    sharers = _sharers(backend, namespace, others, chains)
    return ContextView(
        url,
        found.namespace.identity.model_name,
        found.view(backend),
        [_group_view(number, keys, places, key_limit) for number, keys in enumerate(chains)],
        _pack_views(chains, places, sharers),
        sum(key in sharers for key in chain.from_iterable(chains)),
    )


def _places(
    backend: InspectableBackend, namespace: bytes, named: Iterable[PackTable], chains: Sequence[list[bytes]]
) -> dict[bytes, _Place]:
    """Return the locations of the blocks of ``chains`` by key, without blocks that no pack holds.

    Searches the tables ``named``, then, if they lack blocks, all tables of the namespace.
    """
    wanted = set(chain.from_iterable(chains))
    places: dict[bytes, _Place] = {}

    def note(tables: Iterable[PackTable]) -> None:
        for table in tables:
            keys = table.keys.unpack()
            if not wanted.isdisjoint(keys):
                frames = chain.from_iterable(repeat(frame, frame.block_count) for frame in table.frames)
                for key, frame in zip(keys, frames, strict=True):
                    if key in wanted:
                        places.setdefault(key, _Place(table, frame))

    note(named)
    if len(places) < len(wanted):
        with no_collections():  # creates many objects that stay alive
            tables = backend.changes(namespace, None).added
        note(tables)
    return places


def _sharers(
    backend: InspectableBackend, namespace: bytes, others: Iterable[str], chains: Sequence[list[bytes]]
) -> dict[bytes, list[str]]:
    """Return, for each key of ``chains`` that requests with an id in ``others`` name too, the ids of these requests."""
    wanted = [frozenset(chain) for chain in chains]
    found: dict[bytes, list[str]] = {}
    for other, groups in keys_of(backend, namespace, others):
        for among, group in zip(wanted, groups or (), strict=False):
            keys = group.unpack()
            if not among.isdisjoint(keys):  # most requests share nothing: this test halves the time
                for key in dict.fromkeys(key for key in keys if key in among):
                    found.setdefault(key, []).append(other)
    return found


def _group_view(number: int, keys: list[bytes], places: dict[bytes, _Place], key_limit: int) -> GroupView:
    held = [places[key].frame for key in keys if key in places]
    views = []
    for depth, key in enumerate(keys[:key_limit]):
        place = places.get(key)
        pack, offset = (None, None) if place is None else (place.pack.pack_id.hex(), place.frame.offset)
        views.append(KeyView(depth, key.hex()[:_KEY_DIGITS], pack, offset))
    raw_bytes = sum(frame.block_bytes for frame in held)
    stored_bytes = sum(frame.stored_length // frame.block_count for frame in held)
    return GroupView(number, len(keys), len(keys) - len(held), raw_bytes, stored_bytes, views)


def _pack_views(
    chains: Sequence[list[bytes]], places: dict[bytes, _Place], sharers: dict[bytes, list[str]]
) -> list[PackView]:
    keys_in: dict[bytes, list[bytes]] = {}
    for row in zip_longest(*chains):
        for key in row:
            if key in places:
                keys_in.setdefault(places[key].pack.pack_id, []).append(key)
    views = []
    for keys in keys_in.values():
        table = places[keys[0]].pack
        others = sorted({name for key in keys for name in sharers.get(key, ())})
        sizes = len(table.keys), table.raw_length, table.payload_length
        views.append(PackView(table.pack_id.hex(), len(keys), *sizes, table.codec, len(others), others[:_SHARERS]))
    return views


def prefix_tree(backend: InspectableBackend, found: FoundRequest, *, group: int, node_limit: int) -> TreeNode:
    """Return the prefix tree of all requests in a request's namespace.

    The top node has no blocks; its children are the nodes that begin at depth 0. Requests without readable keys in the
    group are left out.

    :param group: KV cache group whose keys the tree is made of.
    :param node_limit: largest number of nodes below the top node. Each node has at most 8 children.
    """
    namespace, chains = found.namespace.id, list[_Chain]()
    names = (manifest.id for manifest in backend.manifests(namespace))
    for name, keys in keys_of(backend, namespace, names):
        if keys is not None and len(keys) > group and len(keys[group]):
            chains.append((keys[group].unpack(), name))
    chains.sort()
    top = TreeNode(0, 0, "", len(chains), 0, [], True, [])
    _grow(top, chains, found.manifest.id, node_limit)
    return top


def _grow(top: TreeNode, chains: Sequence[_Chain], chosen: str, node_limit: int) -> None:
    """Add up to ``node_limit`` nodes below ``top``: first the path of the chosen request, then level by level."""
    waiting: list[tuple[TreeNode, Sequence[_Chain]]] = [(top, chains)]
    while waiting:
        parent, below = waiting.pop(0)
        depth = parent.start + parent.blocks
        longer = (chain for chain in below if len(chain[0]) > depth)
        branches = [list(run) for _, run in groupby(longer, key=lambda chain: chain[0][depth])]
        branches.sort(key=lambda branch: (not _has(branch, chosen), -len(branch), branch[0][0][depth]))
        shown = [(_node(branch, depth, chosen), branch) for branch in branches[: min(node_limit, _BRANCHES)]]
        node_limit -= len(shown)
        parent.hidden = len(branches) - len(shown)
        parent.children = [node for node, _ in shown]
        if shown and shown[0][0].chosen:
            waiting.insert(0, shown.pop(0))
        waiting += shown


def _node(branch: Sequence[_Chain], depth: int, chosen: str) -> TreeNode:
    """Return the node of the longest run of keys, from ``depth``, that all of these sorted chains share, still without
    its children.

    :param chosen: id of the request that the command shows.
    """
    ends = zip(branch[0][0], branch[-1][0], strict=False)  # what both begin with, so do the chains between them
    end = sum(1 for _ in takewhile(lambda keys: keys[0] == keys[1], ends))
    names = [name for keys, name in branch if len(keys) == end]
    names.sort(key=lambda name: name != chosen)
    first = branch[0][0][depth].hex()[:_NODE_DIGITS]
    return TreeNode(depth, end - depth, first, len(branch), len(names), names[:_NAMES], _has(branch, chosen), [])


def _has(branch: Sequence[_Chain], chosen: str) -> bool:
    return any(name == chosen for _, name in branch)
