"""``persistkv show``: the context of one request, and the prefix tree of its namespace.

A chain is the list of keys of one request in one KV cache group. A block's key covers all tokens
before it, so requests that begin alike have chains that begin with the same keys. Sorted chains are
a tree: what neighbours have in common is a node. Only nodes that are shown are made.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby, zip_longest
from typing import NamedTuple

import msgspec
from rich.tree import Tree

from persistkv.memory.budget import no_collections
from persistkv.storage.backend import Backend
from persistkv.storage.catalogue import Catalogue
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import Frame, PackTable
from persistkv.storage.inspection.pack_tables import keys_of
from persistkv.storage.inspection.requests import (
    FoundRequest,
    RequestView,
    find_request,
    request_ids,
    short_ids,
)
from persistkv_tools import render
from persistkv_tools.command import (
    REQUEST,
    URL,
    Command,
    add_flag,
    add_shared,
    number,
)
from persistkv_tools.options import opened

_SHOWN_PACKS = 40  # rows of the table
_SHARERS = 5  # ids of other requests to list for each pack
_KEY_DIGITS = 12  # enough to distinguish the keys of one store
_NAMES = 2  # ids of requests to list for each node in which they end
_BRANCHES = 8  # children of a node
_NODE_DIGITS = 8  # of the key that names a node


class _Chain(NamedTuple):
    """Keys of a request in one KV cache group. Sorted chains are in the order of their keys."""

    keys: list[bytes]
    request: str
    """Id of the request."""


class _BlockPlace(NamedTuple):
    """Location of a block: its pack, and the frame in it that contains the block."""

    table: PackTable
    frame: Frame


class KeyView(msgspec.Struct, frozen=True):
    """One block of a request."""

    depth: int
    """Number of blocks before this one."""
    key: str
    """First digits of the block's key."""
    pack: str | None
    """Id of a pack that holds the block; None: no pack holds it."""
    offset: int | None
    """Where the block's frame starts: bytes from the start of the pack's payload."""


class GroupView(msgspec.Struct, frozen=True):
    """Blocks of a request in one KV cache group."""

    group: int
    """Index of the group."""
    blocks: int
    missing: int
    """Part of ``blocks`` that no pack holds."""
    raw_bytes: int
    """Bytes of the held blocks, before the codec."""
    stored_bytes: int
    """Estimated bytes of the held blocks at rest."""
    keys: list[KeyView]
    """The first blocks of the request in this group."""


class PackView(msgspec.Struct, frozen=True):
    """One pack that holds blocks of the request."""

    id: str
    blocks: int
    """Blocks of the request that the pack holds."""
    pack_blocks: int
    """All blocks that the pack holds."""
    raw_bytes: int
    stored_bytes: int
    codec: str
    shared_with: int
    """Number of other requests that use some of ``blocks``."""
    sharers: list[str]
    """Ids of the first of these requests."""


class ContextView(msgspec.Struct, frozen=True):
    """One request's whole context."""

    url: str
    model: str
    request: RequestView
    groups: list[GroupView]
    packs: list[PackView]
    shared_blocks: int
    """Blocks of the request that other requests name, too."""
    copies: int
    """Requests with the same context and labels, this one included."""
    copies_hits: int | None
    """Hits of all copies; None: unknown."""


class TreeNode(msgspec.Struct):
    """Node of a prefix tree: a run of consecutive blocks that the same requests share."""

    start: int
    """Blocks before the node in each of its requests."""
    blocks: int
    key: str
    """First digits of the key of the first block."""
    requests: int
    """Requests that share the run."""
    ends: int
    """Part of ``requests``: those that end with the last block of the run."""
    names: list[str]
    """Ids of the first of the requests that end here."""
    chosen: bool
    """Whether the shown request is one of ``requests``."""
    children: list[TreeNode]
    hidden: int = 0
    """Children that are left out."""

    @property
    def end(self) -> int:
        """Depth of the first block behind the node."""
        return self.start + self.blocks


class PrefixTree(NamedTuple):
    """Prefix tree of the requests in one namespace."""

    top: TreeNode
    """Its root, which has no blocks."""
    group: int
    """Index of the KV cache group whose keys it is made of."""


_GROUPS = render.columns(
    "group blocks missing raw=raw_bytes stored=stored_bytes ratio",
    ratio=lambda group: render.format_ratio(group.raw_bytes, group.stored_bytes),
)
_PACKS = render.columns(
    "pack=short own_blocks=blocks blocks=pack_blocks raw=raw_bytes stored=stored_bytes codec "
    "sharers=sharing",
    short=lambda pack: pack.id[:8],
    sharing=lambda pack: f"{pack.shared_with:,}" if pack.shared_with else "-",
)
_KEYS = render.columns(
    "key depth pack=held_by frame_offset=offset",
    held_by=lambda key: (key.pack or "(none)")[:8],
)


def show(
    url: str,
    request: str,
    *,
    tree: bool,
    nodes: int,
    keys: int,
    namespace: str | None,
    json: bool,
) -> None:
    """Show one request: packs, keys, sizes, and blocks that it shares with other requests.

    Example: persistkv show lmdb:///var/cache/kv 0c4de6a0 --tree
    """
    shorts: Mapping[str, str] = {}
    with opened(url) as backend:
        found = find_request(backend, request, namespace)
        # read short ids only for the tree, which names other requests by them
        if tree:
            shorts = short_ids(request_ids(backend, found.namespace.id))
        context = show_context(url, backend, found, key_limit=keys)
        drawn = prefix_tree(backend, found, nodes) if tree else None
    if json:
        top = None if drawn is None else drawn.top
        render.print_json({"context": context, "tree": top})
        return
    _print(context)
    if drawn is not None:
        requests = render.count(drawn.top.requests, "request")
        namespace = context.request.namespace[:8]
        title = f"prefix tree of {requests} in namespace {namespace} (keys of group {drawn.group})"
        render.console().print(_rich_tree(drawn.top, title, shorts))


def _add_options(parser: ArgumentParser) -> None:
    add_flag(parser, "--tree", "Also draw the prefix tree of the namespace's contexts.")
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=number(least=1, most=10_000),
        default=40,
        help="Largest number of tree nodes to draw.",
    )
    parser.add_argument(
        "--keys",
        metavar="N",
        type=number(least=0),
        default=4,
        help="Keys to show of each group.",
    )
    add_shared(parser, "--namespace")


COMMAND = Command(show, (URL, REQUEST), _add_options)


def _print(context: ContextView) -> None:
    """Print a request, its KV cache groups, its packs and the first keys of each group."""
    render.show_pairs({**_rows(context), **_optional_rows(context)})
    render.show_table(_GROUPS, context.groups)
    render.show_table(_PACKS, context.packs, left="codec", most=_SHOWN_PACKS)
    for group in context.groups:
        if group.keys:
            keys = render.count(group.blocks, "key")
            title = f"group {group.group}: the first {len(group.keys)} of {keys}"
            render.show_table(_KEYS, group.keys, title=title)


def _rows(context: ContextView) -> dict[str, str]:
    """Return the properties that every request has, by name."""
    request = context.request
    name = request.id
    if request.short_id != request.id:
        name += f" (short: {request.short_id})"
    created = render.format_time(request.created)
    return {
        "request": name,
        "model": context.model or "-",
        "namespace": request.namespace,
        "created": f"{created} ({render.format_age(request.created)} ago)",
        "last used": render.or_dash(request.last_used, _ago),
        "pinned": "yes" if request.pinned else "no",
        "tokens": f"{request.tokens:,}",
        "raw size": render.format_size(request.raw_bytes),
        "stored size": render.or_dash(request.stored_bytes, render.format_size),
        "hits": render.or_dash(request.hits, _hits),
        "labels": render.format_labels(request.labels),
        "shared": f"{context.shared_blocks:,} of {request.blocks:,} blocks are also in other"
        " requests",
    }


def _optional_rows(context: ContextView) -> dict[str, str]:
    """Return the properties that only some requests have, by name."""
    request = context.request
    rows: dict[str, str] = {}
    if context.copies > 1:
        hits = render.or_dash(context.copies_hits, str)
        rows["copies"] = (
            f"{context.copies:,} requests of this context and labels, one row of ls; hits of "
            f"all: {hits}"
        )
    if request.ttl_s is not None:
        rows["ttl"] = f"{request.ttl_s:,.0f} s after its last use"
    if request.expires is not None:
        rows["expires"] = render.format_expiry(request.expires)
    if request.priority != "normal":
        rows["priority"] = request.priority
    return rows


def _ago(time: float) -> str:
    return f"{render.format_age(time)} ago"


def _hits(number: int) -> str:
    return f"{number:,} (later requests with the whole context that restored tokens)"


def _rich_tree(
    top: TreeNode,
    title: str,
    shorts: Mapping[str, str],
) -> Tree:
    """Return the prefix tree as the terminal shows it.

    :param shorts: short ids of the namespace's requests by id.
    """
    drawn = Tree(render.plain(title))
    # nodes that were drawn without their children, which are still to be drawn
    to_grow = [(drawn, top)]
    while to_grow:
        branch, node = to_grow.pop()
        for child in node.children:
            style = "bold" if child.chosen else ""
            line = render.plain(_node_line(child, shorts), style)
            child_branch = branch.add(line)
            to_grow.append((child_branch, child))
        if node.hidden:
            hidden = f"{node.hidden:,} more, not drawn (see --nodes)"
            branch.add(render.plain(hidden, "dim"))
    return drawn


def _node_line(node: TreeNode, shorts: Mapping[str, str]) -> str:
    """Return the text of a node. As in a Python range, its blocks exclude the second number.

    :param shorts: short ids of requests by id.
    """
    line = f"{node.key} blocks {node.start:,} to {node.end:,}"
    if node.requests > 1:
        line += f", {render.count(node.requests, 'request')}"
    if node.names:
        names = [shorts.get(name, name) for name in node.names]
        line += f"; ends here: {', '.join(names)}"
    # only the first of the requests that end here are in ``names``
    num_unnamed = node.ends - len(node.names)
    if num_unnamed:
        line += f" and {num_unnamed:,} more"
    return line


def show_context(
    url: str,
    backend: Backend,
    found: FoundRequest,
    *,
    key_limit: int,
) -> ContextView:
    """Return the view of one request, with at most ``key_limit`` keys of each group.

    :raises NotFoundError: the request was deleted meanwhile, or its keys are unreadable.
    """
    namespace = found.namespace.id
    manifest = found.manifest
    keys = found.keys(backend)
    keys_by_group = [group.unpack() for group in keys]
    catalogue = backend.catalogue(namespace)
    # search the packs that the manifest names first: they nearly always hold all blocks
    named_packs = catalogue.chain(manifest.id) or []
    named_tables = backend.tables(namespace, named_packs)
    places = _places(backend, namespace, named_tables, keys_by_group)
    # requests that name one of the same packs may share blocks with this one
    candidates = {head.id for head in catalogue.manifests_naming(named_packs)}
    candidates.discard(manifest.id)
    sharers = _sharers(backend, namespace, sorted(candidates), keys_by_group)
    groups = []
    for group, group_keys in enumerate(keys_by_group):
        view = _group_view(group, group_keys, places, key_limit)
        groups.append(view)
    all_keys = chain.from_iterable(keys_by_group)
    num_shared = sum(key in sharers for key in all_keys)
    copies = found.copies(backend)
    copies_hits = _hits_of_copies(catalogue, copies)
    return ContextView(
        url=url,
        model=found.namespace.identity.model_name,
        request=found.view(backend),
        groups=groups,
        packs=_pack_views(keys_by_group, places, sharers),
        shared_blocks=num_shared,
        copies=len(copies),
        copies_hits=copies_hits,
    )


def _hits_of_copies(
    catalogue: Catalogue,
    copies: Sequence[RequestManifest],
) -> int | None:
    """Return the hits of all copies of a request, which are given oldest first; None: unknown."""
    # Each later request with the same context counts as a hit of the oldest copy, and not of the
    # others. So the hits of the oldest copy are those of all copies.
    (oldest_use,) = catalogue.uses([copies[0].id])
    return None if oldest_use is None else oldest_use.hits


def _places(
    backend: Backend,
    namespace: bytes,
    named: Iterable[PackTable],
    keys_by_group: Sequence[list[bytes]],
) -> dict[bytes, _BlockPlace]:
    """Return the locations of blocks by key, without blocks that no pack holds.

    :param named: tables to search before all others of the namespace.
    """
    wanted = set(chain.from_iterable(keys_by_group))
    places: dict[bytes, _BlockPlace] = {}

    def add_places(tables: Iterable[PackTable]) -> None:
        """Add the wanted blocks of these packs to ``places``; the first pack of a block counts."""
        for table in tables:
            # most packs hold no wanted block: skip them before their frames are read
            if wanted.isdisjoint(table.keys.unpack()):
                continue
            for placed in table.placed_frames():
                place = _BlockPlace(table, placed.frame)
                for key in wanted.intersection(placed.keys):
                    places.setdefault(key, place)

    add_places(named)
    # search all packs for the remaining blocks: a block that was deleted and stored again is in a
    # pack that the manifest does not name
    if len(places) < len(wanted):
        # without garbage collections, which would scan the many long-lived tables again and again
        with no_collections():
            tables = backend.changes(namespace, None).added
        add_places(tables)
    return places


def _sharers(
    backend: Backend,
    namespace: bytes,
    others: Iterable[str],
    keys_by_group: Sequence[list[bytes]],
) -> dict[bytes, list[str]]:
    """Return, for each of a request's keys that other requests name too, the ids of these requests.

    :param others: ids of the requests to compare with.
    :param keys_by_group: keys of the request, one list for each KV cache group.
    """
    request_keys = [frozenset(keys) for keys in keys_by_group]
    sharers: dict[bytes, list[str]] = {}
    for other, groups in keys_of(backend, namespace, others):
        # None: the keys of the request are damaged, or were deleted meanwhile
        if groups is None:
            continue
        for group_keys, packed in zip(request_keys, groups, strict=False):
            other_keys = packed.unpack()
            # most requests share nothing, and skipping them here halves the time of this function
            if group_keys.isdisjoint(other_keys):
                continue
            for key in group_keys.intersection(other_keys):
                sharers.setdefault(key, []).append(other)
    return sharers


def _group_view(
    number: int,
    keys: list[bytes],
    places: dict[bytes, _BlockPlace],
    key_limit: int,
) -> GroupView:
    """Return the totals of one KV cache group of the request, and its first ``key_limit`` keys.

    :param number: index of the group.
    :param places: locations of blocks by key; a key that no pack holds is absent.
    """
    frames = [places[key].frame for key in keys if key in places]
    views = []
    for depth, key in enumerate(keys[:key_limit]):
        place = places.get(key)
        digits = key.hex()[:_KEY_DIGITS]
        view = KeyView(depth, digits, pack=None, offset=None)
        if place is not None:
            view = msgspec.structs.replace(
                view,
                pack=place.table.pack_id.hex(),
                offset=place.frame.offset,
            )
        views.append(view)
    num_missing = len(keys) - len(frames)
    raw_bytes = sum(frame.block_bytes for frame in frames)
    # a frame holds several blocks, and each of them counts with the mean size
    stored_bytes = sum(frame.stored_length // frame.block_count for frame in frames)
    return GroupView(
        group=number,
        blocks=len(keys),
        missing=num_missing,
        raw_bytes=raw_bytes,
        stored_bytes=stored_bytes,
        keys=views,
    )


def _pack_views(
    keys_by_group: Sequence[list[bytes]],
    places: dict[bytes, _BlockPlace],
    sharers: dict[bytes, list[str]],
) -> list[PackView]:
    """Return the packs of a request, in the order in which its context uses them.

    :param keys_by_group: for each KV cache group, the keys of the context.
    :param sharers: key → the other requests that have it.
    """
    # go block by block over all groups, because an engine needs all groups of a prefix together
    keys_in: dict[bytes, list[bytes]] = {}
    for key in chain.from_iterable(zip_longest(*keys_by_group)):
        if key in places:
            pack_id = places[key].table.pack_id
            keys_in.setdefault(pack_id, []).append(key)
    views = []
    for pack, keys in keys_in.items():
        table = places[keys[0]].table
        # ids of other requests that share one of the pack's blocks
        names: set[str] = set()
        for key in keys:
            names.update(sharers.get(key, ()))
        others = sorted(names)
        view = PackView(
            id=pack.hex(),
            blocks=len(keys),
            pack_blocks=len(table.keys),
            raw_bytes=table.raw_length,
            stored_bytes=table.payload_length,
            codec=table.codec,
            shared_with=len(others),
            sharers=others[:_SHARERS],
        )
        views.append(view)
    return views


def prefix_tree(
    backend: Backend,
    found: FoundRequest,
    node_limit: int,
) -> PrefixTree:
    """Return the prefix tree of all requests in a request's namespace, made of the keys of one KV
    cache group: the one with the most blocks of the request. Requests without readable keys in it
    are left out.

    :param node_limit: largest number of nodes below the top node. Each node has at most 8 children.
    """
    chosen = found.manifest.id
    group = _largest_group(found.manifest.group_blocks)
    chains = _chains_of_group(backend, found.namespace.id, group)
    top = TreeNode(
        start=0,
        blocks=0,
        key="",
        requests=len(chains),
        ends=0,
        names=[],
        chosen=True,
        children=[],
    )
    nodes_left = node_limit
    # nodes whose children are still to be made, each with the chains that begin with its path
    to_grow: deque[tuple[TreeNode, Sequence[_Chain]]] = deque()
    to_grow.append((top, chains))
    while to_grow:
        parent, below = to_grow.popleft()
        branches = _branches(below, parent.end, chosen)
        most_children = min(nodes_left, _BRANCHES)
        shown = branches[:most_children]
        nodes_left -= len(shown)
        parent.hidden = len(branches) - len(shown)
        for branch in shown:
            child = _node(branch, parent.end, chosen)
            parent.children.append(child)
            # grow the path of the chosen request first, because the number of nodes is limited
            if child.chosen:
                to_grow.appendleft((child, branch))
            else:
                to_grow.append((child, branch))
    return PrefixTree(top, group)


def _largest_group(group_blocks: Sequence[int]) -> int:
    """Return the index of the KV cache group with the most blocks; the first one of several."""
    if not group_blocks:
        return 0
    return group_blocks.index(max(group_blocks))


def _chains_of_group(
    backend: Backend,
    namespace: bytes,
    group: int,
) -> list[_Chain]:
    """Return the keys of each request in one KV cache group with the request's id, sorted."""
    chains: list[_Chain] = []
    names = request_ids(backend, namespace)
    for name, keys in keys_of(backend, namespace, names):
        # None: the keys are damaged, or the request was deleted meanwhile
        if keys is None or group >= len(keys):
            continue
        if len(keys[group]) > 0:
            chains.append(_Chain(keys[group].unpack(), name))
    chains.sort()
    return chains


def _branches(
    chains: Sequence[_Chain],
    depth: int,
    chosen: str,
) -> list[Sequence[_Chain]]:
    """Divide sorted chains by their key at ``depth``: the branch of the chosen request first, then
    the largest. Shorter chains are left out."""
    longer = [chain for chain in chains if len(chain.keys) > depth]
    branches: list[Sequence[_Chain]] = []
    # the chains are sorted and share all keys before ``depth``, so equal keys are neighbours
    for _, branch in groupby(longer, key=lambda chain: chain.keys[depth]):
        branches.append(list(branch))

    def order(branch: Sequence[_Chain]) -> tuple[bool, int, bytes]:
        is_other = not _contains_request(branch, chosen)
        return is_other, -len(branch), branch[0].keys[depth]

    branches.sort(key=order)
    return branches


def _node(
    branch: Sequence[_Chain],
    depth: int,
    chosen: str,
) -> TreeNode:
    """Return the longest run of keys, from ``depth``, that all of these sorted chains share,
    without its children."""
    first_keys = branch[0].keys
    last_keys = branch[-1].keys
    # the chains are sorted, so all of them share the keys that the first and the last one share
    end = _common_length(first_keys, last_keys)
    names = [chain.request for chain in branch if len(chain.keys) == end]
    # put the chosen request first, because only the first names are shown
    names.sort(key=lambda name: name != chosen)
    return TreeNode(
        start=depth,
        blocks=end - depth,
        key=first_keys[depth].hex()[:_NODE_DIGITS],
        requests=len(branch),
        ends=len(names),
        names=names[:_NAMES],
        chosen=_contains_request(branch, chosen),
        children=[],
    )


def _common_length(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Return the number of keys with which both begin."""
    length = 0
    for first_key, second_key in zip(first, second, strict=False):
        if first_key != second_key:
            break
        length += 1
    return length


def _contains_request(branch: Sequence[_Chain], request: str) -> bool:
    return any(chain.request == request for chain in branch)
