"""The geometry of vLLM's primary tier, limited to the data that a secondary tier receives."""

from __future__ import annotations

from typing import Any

from persistkv.config import GroupLayout, RowLayout


def row_layout(offloading: Any, row_stride: int) -> RowLayout:
    """Return a layout in which every group uses the whole row.

    A tier does not know the offsets of workers' cells and groups' tensors. The padding is less than a page per worker.

    :param offloading: vLLM's ``OffloadingConfig``.
    :param row_stride: bytes from one row to the next.
    """
    return RowLayout(row_stride, (GroupLayout(((0, row_stride),)),) * _num_groups(offloading))


def group_tokens(offloading: Any) -> tuple[int, ...]:
    """Return the tokens of one chunk, for each group index that a key may have."""
    chunk = offloading.cache.blocks_per_chunk
    tokens: dict[int, int] = {group.group_id: group.tokens_per_block * chunk for group in offloading.groups}
    first = offloading.groups[0].tokens_per_block * chunk
    return tuple(tokens.get(index, first) for index in range(_num_groups(offloading)))


def _num_groups(offloading: Any) -> int:
    """Return the number of group indices. A key's index may refer to all groups of vLLM, offloaded or not."""
    last: int = max(group.group_id for group in offloading.groups)
    return max(len(offloading.groups), last + 1)
