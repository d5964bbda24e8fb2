"""The prefix tree of a namespace's contexts, as much of it as one can look at.

Contexts that begin alike share keys (a block's key covers all tokens before it), so sorted chains of keys are a tree:
what neighbours have in common is a node. Nodes are only made where they are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from persistkv.storage.backend import Backend
from persistkv_tools.catalogue import keys_of

_Chain = tuple[list[bytes], str]


class TreeNode(msgspec.Struct):
    """A run of blocks that the same requests share."""

    start: int
    """Depth of the first block."""
    blocks: int
    key: str
    """Of the first block, the first digits, hexadecimal."""
    requests: int
    """Requests that go through it."""
    ends: int
    """Of these, the ones that end with its last block."""
    names: list[str]
    """Ids of some that end here."""
    chosen: bool
    """Whether the request that was asked for goes through it."""
    children: list[TreeNode]
    """First what the chosen request goes through, then those with most requests."""
    hidden: int = 0
    """Children that are not listed."""


_NAMES = 2
_BRANCHES = 8
_DIGITS = 8


def prefix_tree(
    backend: Backend, namespace: bytes, names: Iterable[str], chosen: str, *, group: int, node_limit: int
) -> TreeNode:
    """A node of no blocks above the roots. Children: first what the chosen request goes through, then the most used.

    :param names: of all requests of the namespace.
    :param chosen: a request's id.
    :param group: whose keys to go by.
    :param node_limit: nodes to make below it; of one node, 8 children at most.
    """
    chains: list[_Chain] = []
    for name, keys in keys_of(backend, namespace, names):
        if keys is not None and len(keys) > group and len(keys[group]):
            chains.append((keys[group].unpack(), name))
    chains.sort()
    top = TreeNode(0, 0, "", len(chains), 0, [], True, [])
    _grow(top, chains, chosen, node_limit)
    return top


def _grow(top: TreeNode, chains: Sequence[_Chain], chosen: str, node_limit: int) -> None:
    """What the chosen request goes through first, then breadth first: a bound cuts details and not whole branches."""
    waiting: list[tuple[TreeNode, list[_Chain]]] = [(top, list(chains))]
    left = node_limit
    while waiting:
        parent, below = waiting.pop(0)
        depth = parent.start + parent.blocks
        branches = [list(run) for _, run in groupby((c for c in below if len(c[0]) > depth), key=lambda c: c[0][depth])]
        branches.sort(key=lambda branch: (not _has(branch, chosen), -len(branch), branch[0][0][depth]))
        shown = branches[: min(left, _BRANCHES)]
        left -= len(shown)
        parent.hidden = len(branches) - len(shown)
        for branch in shown:
            node = _node(branch, depth, chosen)
            parent.children.append(node)
            waiting.insert(0 if node.chosen else len(waiting), (node, branch))


def _node(branch: Sequence[_Chain], depth: int, chosen: str) -> TreeNode:
    """:param branch: sorted chains with one key at ``depth``."""
    end = _common(branch[0][0], branch[-1][0])
    names = [name for keys, name in branch if len(keys) == end]
    names.sort(key=lambda name: name != chosen)
    first = branch[0][0][depth].hex()[:_DIGITS]
    return TreeNode(depth, end - depth, first, len(branch), len(names), names[:_NAMES], _has(branch, chosen), [])


def _common(first: list[bytes], last: list[bytes]) -> int:
    """How many keys two chains begin with alike; in between, so do all that are sorted between them."""
    for depth, (one, other) in enumerate(zip(first, last, strict=False)):
        if one != other:
            return depth
    return min(len(first), len(last))


def _has(branch: Sequence[_Chain], chosen: str) -> bool:
    return any(name == chosen for _, name in branch)
