"""The device's KV cache: pages that outlive requests, and the contiguous buffers that a model
uses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from persistkv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)
from persistkv.connector.common import KVCacheGroupSpec
from persistkv.connector.matching import GroupGeometry
from persistkv.cpu.layout import consecutive_runs
from persistkv.integrations.transformers.interface import Cache, DynamicLayer


@dataclass(frozen=True)
class KVGroupGeometry:
    """A KV cache group: layers whose KV has the same shape, data type, device and sliding
    window."""

    layers: tuple[int, ...]
    """Indices of the model's layers, ascending."""
    num_heads: int
    """Number of key-value heads."""
    head_dim: int
    """Numbers in the key, and in the value, of one head and token."""
    sliding_window: int | None
    """Number of tokens that a token attends to, including itself; None: full attention."""
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers of the group."""
        head_bytes = self.head_dim * self.dtype.itemsize
        return 2 * len(self.layers) * self.num_heads * head_bytes

    def blocks(self, block_size: int) -> GroupGeometry:
        """Return the group's division into blocks."""
        return GroupGeometry(
            KVCacheGroupSpec(block_size, self.sliding_window), block_size_factor=1
        )


KVGeometry = tuple[KVGroupGeometry, ...]
"""A model's KV cache groups; each layer is in exactly one."""


class RequestLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of a request's contiguous KV cache: views of a buffer that is allocated in advance.

    The buffer holds the KV of each token at the token's position. Tokens that have left the sliding
    window remain in the buffer, because they are copied to pages or a store later; the model does
    not receive them.

    :param buffer: shape (2, kv_heads, capacity, head_dim): keys, then values.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        sliding_window: int | None,
    ) -> None:
        super().__init__()
        # set the attributes that transformers expects of a layer; its own layers set some of them
        # in their first ``update``
        self.dtype = buffer.dtype
        self.device = buffer.device
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.is_initialized = True
        self.set_buffer(buffer, length=0)

    def set_buffer(self, buffer: torch.Tensor, length: int) -> None:
        """Use a buffer that holds the KV of ``length`` tokens."""
        # add a dimension for the only sequence: (2, 1, kv_heads, capacity, head_dim)
        self._buffer = buffer.unsqueeze(1)
        self.set_length(length)

    def set_length(self, length: int) -> None:
        """Set the number of tokens in the layer, and make views of those that the next token
        attends to."""
        self._length = length
        first = self._first_visible(length)
        visible = self._buffer[:, :, :, first:length]
        self.keys, self.values = visible

    def _first_visible(self, length: int) -> int:
        """Return the position of the first token that the token at position ``length`` attends
        to."""
        if self.sliding_window is None:
            return 0
        return max(0, length - self.sliding_window + 1)

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of tokens that ``update`` will return, and the position of the first of
        them."""
        first = self._first_visible(self._length)
        num_visible = self._length - first
        return num_visible + query_length, first

    def crop(self, max_length: int) -> None:
        """Keep the first ``max_length`` tokens; if it is negative, drop that many tokens from the
        end."""
        if max_length < 0:
            self.set_length(max(0, self._length + max_length))
        else:
            self.set_length(min(self._length, max_length))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass  # the buffer is allocated already

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the KV of new tokens, shape (1, kv_heads, tokens, head_dim) each. Return keys and
        values of all tokens that at least one of the new tokens attends to.
        """
        start = self._length
        stop = start + key_states.shape[-2]
        self._buffer[0, :, :, start:stop] = key_states
        self._buffer[1, :, :, start:stop] = value_states
        self.set_length(stop)
        # of the new tokens, the first one attends to the earliest token
        first = self._first_visible(start)
        visible = self._buffer[:, :, :, first:stop]
        keys, values = visible
        return keys, values


class RequestCache(Cache):  # type: ignore[misc]
    """The contiguous KV cache that is passed to a model for one request.

    :ivar buffers: for each KV cache group, a tensor of shape (layers, 2, kv_heads, capacity,
        head_dim).
    :param capacity: tokens for which buffers are allocated.
    """

    def __init__(self, geometry: KVGeometry, capacity: int) -> None:
        self._geometry = geometry
        self.buffers = self._allocate(capacity)
        layers: dict[int, RequestLayer] = {}
        for group, group_buffer in zip(geometry, self.buffers, strict=True):
            for layer_idx, buffer in zip(group.layers, group_buffer, strict=True):
                layers[layer_idx] = RequestLayer(buffer, group.sliding_window)
        # the layers of a group need not be consecutive, but a cache has them in the model's order
        in_order = [layers[layer_idx] for layer_idx in sorted(layers)]
        super().__init__(layers=in_order)

    def grow(self, capacity: int) -> None:
        """Move the KV to new buffers for ``capacity`` tokens, which must not be fewer than the
        present tokens."""
        old_buffers = self.buffers
        self.buffers = self._allocate(capacity)
        groups = zip(self._geometry, old_buffers, self.buffers, strict=True)
        for group, old_buffer, new_buffer in groups:
            layers = [self.layers[layer_idx] for layer_idx in group.layers]
            # during a forward pass, the layers that have run have more tokens than the later ones
            most_tokens = max(layer.get_seq_length() for layer in layers)
            kept = old_buffer[:, :, :, :most_tokens]
            new_buffer[:, :, :, :most_tokens] = kept
            for layer, buffer in zip(layers, new_buffer, strict=True):
                length = layer.get_seq_length()
                layer.set_buffer(buffer, length)

    def _allocate(self, capacity: int) -> list[torch.Tensor]:
        """Return new ``buffers`` for ``capacity`` tokens, with undefined content."""
        buffers = []
        for group in self._geometry:
            num_layers = len(group.layers)
            # dimension 1 has keys and values
            shape = (num_layers, 2, group.num_heads, capacity, group.head_dim)
            buffer = torch.empty(shape, dtype=group.dtype, device=group.device)
            buffers.append(buffer)
        return buffers

    def set_length(self, length: int) -> None:
        """Set the number of tokens in every layer; the buffers must hold their KV already."""
        for layer in self.layers:
            layer.set_length(length)


class BlockPool:
    """Reference counts of device blocks, with reuse by hash and LRU eviction of unreferenced
    blocks.

    A published block can be found and reused by its hash. Not thread-safe.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        """Blocks that are neither referenced nor published, as a stack: the lowest number is taken
        first."""
        self._references = [0] * num_blocks
        """For each block, the number of tables that use it."""
        self._by_hash: dict[bytes, int] = {}
        """Published blocks: hash of the tokens → block."""
        self._hashes: dict[int, bytes] = {}
        """Published blocks: block → hash of the tokens."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published blocks without references, in eviction order."""

    @property
    def num_available(self) -> int:
        """Number of blocks that ``allocate`` could return."""
        return len(self._free) + len(self._idle)

    def resident(self) -> dict[bytes, int]:
        """Return the published blocks, with or without references: a new dict from block hash to
        block index."""
        return dict(self._by_hash)

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def acquire(self, block_hash: bytes) -> int | None:
        """Add a reference to the block published under this hash and return its index; None if
        there is none."""
        block_id = self._by_hash.get(block_hash)
        if block_id is not None:
            # a block with references must not be evicted
            self._idle.pop(block_id, None)
            self._references[block_id] += 1
        return block_id

    def allocate(self, count: int) -> list[int] | None:
        """Return ``count`` blocks to write, each with one reference; evict published blocks without
        references as needed. If too few blocks are available, return None and change nothing.
        """
        if count > self.num_available:
            return None
        # evict only as many as needed, because an idle block may serve the next request
        while len(self._free) < count:
            block_id, _ = self._idle.popitem(last=False)
            self._unpublish(block_id)
        allocated = [self._free.pop() for _ in range(count)]
        for block_id in allocated:
            self._references[block_id] = 1
        return allocated

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Make a written block reusable under its hash; no effect if another block is published
        under that hash."""
        if block_hash not in self._by_hash:
            self._by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block. Pass the blocks in the request's order: the last ones
        are evicted first."""
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            # a published block can be reused until it is evicted
            if block_id in self._hashes:
                self._idle[block_id] = None
            else:
                self._free.append(block_id)

    def forget(self) -> None:
        """Free all published blocks without references, so that no later request can reuse them."""
        for block_id in self._idle:
            self._unpublish(block_id)
        self._idle.clear()

    def _unpublish(self, block_id: int) -> None:
        """Free a published block without references."""
        block_hash = self._hashes.pop(block_id)
        del self._by_hash[block_hash]
        self._free.append(block_id)


class GroupPages:
    """Device memory of one KV cache group. A page is one block: ``block_size`` tokens of all
    layers, contiguous.

    :ivar page_bytes: bytes of one page.
    :ivar pool: which pages are in use, and their block hashes.
    :ivar blocks: the group's division of a sequence into blocks.
    :ivar pages: shape (num_blocks, layers, 2, kv_heads, block_size, head_dim).
    """

    def __init__(
        self,
        geometry: KVGroupGeometry,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.block_size = block_size
        self.page_bytes = geometry.token_bytes * block_size
        self.pool = BlockPool(num_blocks)
        self.blocks = geometry.blocks(block_size)
        shape = (
            num_blocks,
            len(geometry.layers),
            2,  # keys and values
            geometry.num_heads,
            block_size,
            geometry.head_dim,
        )
        self.pages = torch.zeros(shape, dtype=geometry.dtype, device=geometry.device)

    def gather(
        self,
        buffer: torch.Tensor,
        positions: Sequence[int],
        block_ids: Sequence[int],
    ) -> None:
        """Copy pages to a request's contiguous buffer.

        :param buffer: shape (layers, 2, kv_heads, capacity, head_dim).
        :param positions: for each of ``block_ids``, the index of the block in the request.
        """
        for paged, pages in self._runs(buffer, positions, block_ids):
            # move the dimension of blocks from the first place, where pages have it, to the place
            # before the tokens, where ``paged`` has it
            paged.copy_(pages.permute(1, 2, 3, 0, 4, 5))

    def scatter(
        self,
        buffer: torch.Tensor,
        positions: Sequence[int],
        block_ids: Sequence[int],
    ) -> None:
        """Copy full blocks of a request's buffer to pages; parameters as for ``gather``."""
        for paged, pages in self._runs(buffer, positions, block_ids):
            # move the dimension of blocks to the first place, where pages have it
            pages.copy_(paged.permute(3, 0, 1, 2, 4, 5))

    def _runs(
        self,
        buffer: torch.Tensor,
        positions: Sequence[int],
        block_ids: Sequence[int],
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a pair of views for each run of blocks that are consecutive both in the buffer and
        in ``pages``: shape (layers, 2, kv_heads, blocks, block_size, head_dim), and a part of
        ``pages``.
        """
        indices = np.array(positions, np.int64)
        pages = np.array(block_ids, np.int64)
        for run in consecutive_runs(indices, pages):
            count = run.stop - run.start
            start = positions[run.start] * self.block_size
            stop = start + count * self.block_size
            tokens = buffer[:, :, :, start:stop]
            # divide the tokens, dimension 3 of (layers, 2, kv_heads, tokens, head_dim), into blocks
            shape = (count, self.block_size)
            paged = tokens.unflatten(3, shape)  # type: ignore[no-untyped-call]
            first = block_ids[run.start]
            end = first + count
            yield paged, self.pages[first:end]


class PagedKVCache:
    """The pages of all KV cache groups. The groups have the same number of blocks; their blocks
    differ in size."""

    def __init__(
        self,
        geometry: KVGeometry,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = [GroupPages(group, num_blocks, block_size) for group in geometry]

    @property
    def block_bytes(self) -> int:
        """Sum over all groups of the bytes of one block."""
        return sum(group.page_bytes for group in self.groups)

    def specs(self) -> list[KVCacheGroupSpec]:
        return [group.blocks.spec for group in self.groups]

    def canonical(self) -> CanonicalKVCaches:
        """Return the pages in the form that offloading workers take: for each group, int8
        (num_blocks, page bytes)."""
        tensors = []
        refs = []
        for index, group in enumerate(self.groups):
            flat = group.pages.view(torch.int8)
            pages = flat.view(self.num_blocks, -1)
            tensor = CanonicalKVCacheTensor(pages, group.page_bytes)
            ref = CanonicalKVCacheRef(index, group.page_bytes)
            tensors.append(tensor)
            refs.append([ref])
        return CanonicalKVCaches(tensors, refs)
