"""The geometry of vLLM's primary tier, as far as a secondary tier is told."""

from __future__ import annotations

from typing import Any

from persistkv.config import GroupLayout, RowLayout


def row_layout(offloading: Any, row_stride: int) -> RowLayout:
    """Every byte of a row, for every group: a tier is not told where workers' cells and groups' tensors begin.

    What is padding is less than a page per worker.

    :param offloading: vLLM's ``OffloadingConfig``.
    :param row_stride: bytes from one row to the next.
    """
    return RowLayout(row_stride, (GroupLayout(((0, row_stride),)),) * _num_groups(offloading))


def group_tokens(offloading: Any) -> tuple[int, ...]:
    """Tokens of one chunk, per group index that a key may have."""
    chunk = offloading.cache.blocks_per_chunk
    tokens: dict[int, int] = {group.group_id: group.tokens_per_block * chunk for group in offloading.groups}
    first = offloading.groups[0].tokens_per_block * chunk
    return tuple(tokens.get(index, first) for index in range(_num_groups(offloading)))


def _num_groups(offloading: Any) -> int:
    """A key's group index may be that of vLLM's own list of groups, of which not all need be offloaded."""
    last: int = max(group.group_id for group in offloading.groups)
    return max(len(offloading.groups), last + 1)
