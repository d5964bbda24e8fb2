"""Conversion of tokens to keys and device blocks: stateless arithmetic over the groups' geometries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from persistkv.base import GPULoadStoreSpec, OffloadKey
from persistkv.connector.request_state import BlockTable, GroupGeometry, RequestOffloadState


class Offer(NamedTuple):
    """Offloaded blocks of one group that could be stored."""

    keys: Sequence[OffloadKey]
    positions: Sequence[int]
    """Index of each block among the group's offloaded blocks; ascending."""

    def front_half(self) -> Offer:
        """Return the first half, rounded down."""
        half = len(self.keys) // 2
        return Offer(self.keys[:half], self.positions[:half])

    def only(self, wanted: Collection[OffloadKey]) -> Offer:
        """Return the blocks whose keys are in ``wanted``."""
        kept = [(key, position) for key, position in zip(*self, strict=True) if key in wanted]
        return Offer([key for key, _ in kept], [position for _, position in kept])


def check_tables(geometries: Sequence[GroupGeometry], device_block_ids: Sequence[BlockTable], num_tokens: int) -> None:
    """Check that the block tables cover ``num_tokens``.

    :raises ValueError: if they do not.
    """
    if len(device_block_ids) != len(geometries):
        raise ValueError(f"{len(device_block_ids)} block tables for {len(geometries)} KV cache groups")
    for group, (table, geometry) in enumerate(zip(device_block_ids, geometries, strict=True)):
        if len(table) < num_tokens // geometry.block_size:
            raise ValueError(f"group {group}: {len(table)} device blocks do not cover {num_tokens} tokens")


def group_without_blocks(
    geometries: Sequence[GroupGeometry], tables: Sequence[BlockTable], start: int, stop: int
) -> int | None:
    """Return the first group whose table lacks a block that tokens up to ``stop`` need from ``start`` on, or None."""
    for group, (table, geometry) in enumerate(zip(tables, geometries, strict=True)):
        needed = geometry.device_blocks(stop, start)
        if None in table[needed.start : needed.stop]:
            return group
    return None


def needed_keys(
    geometries: Sequence[GroupGeometry], chains: Sequence[Sequence[OffloadKey]], start: int, stop: int
) -> list[OffloadKey]:
    """Return the keys of the offloaded blocks that tokens up to ``stop`` need from ``start`` on, in order of groups."""
    needed: list[OffloadKey] = []
    for keys, geometry in zip(chains, geometries, strict=True):
        blocks = geometry.offloaded_blocks(stop, start)
        needed += keys[blocks.start : blocks.stop]
    return needed


def load_target(geometries: Sequence[GroupGeometry], state: RequestOffloadState) -> GPULoadStoreSpec:
    """Return the device blocks to load; of a sliding-window group, only the blocks in the window.

    The first of them may start within an offloaded block.
    """
    block_ids: list[int] = []
    sizes, indices = [], []
    for table, geometry in zip(state.block_tables, geometries, strict=True):
        needed = geometry.device_blocks(state.num_matched_tokens, state.num_local_tokens)
        blocks = [block for block in table[needed.start : needed.stop] if block is not None]
        block_ids += blocks
        sizes.append(len(blocks))
        indices.append(needed.start)
    return GPULoadStoreSpec(block_ids, sizes, indices)


def num_promoted_tokens(geometries: Sequence[GroupGeometry], state: RequestOffloadState) -> int:
    """Return how many of a request's external tokens were promoted from a secondary tier.

    The first full-attention group is counted. If there is none, a window group is: the state of its first block then
    counts for the tokens before the window.
    """
    full = (group for group, geometry in enumerate(geometries) if geometry.spec.sliding_window is None)
    group = next(full, 0)
    size, chain = geometries[group].offloaded_tokens, state.description.group_keys[group]
    blocks = geometries[group].offloaded_blocks(state.num_matched_tokens, state.num_local_tokens)
    promoted = [position for position in blocks if chain[position] in state.promoted]
    num_tokens = len(promoted) * size
    if promoted and promoted[0] == blocks.start:
        num_tokens += blocks.start * size - state.num_local_tokens
    return min(num_tokens, state.num_external_tokens)


def filled_blocks(geometries: Sequence[GroupGeometry], state: RequestOffloadState) -> list[Offer]:
    """Return, for each group, the offloaded blocks that became full since the last call and have device blocks.

    Blocks that left a sliding window before they could be stored are never returned.
    """
    offers = []
    for group, geometry in enumerate(geometries):
        chain, first, factor = state.description.group_keys[group], state.next_store[group], geometry.factor
        table = state.block_tables[group]
        computed = state.num_computed_tokens // geometry.offloaded_tokens
        filled = max(first, min(computed, len(chain), len(table) // factor))
        state.next_store[group] = filled
        table = table[first * factor : filled * factor]
        if None not in table:
            offers.append(Offer(chain[first:filled], range(first, filled)))
            continue
        is_whole = [None not in table[begin : begin + factor] for begin in range(0, len(table), factor)]
        positions = [first + offset for offset, whole in enumerate(is_whole) if whole]
        offers.append(Offer([chain[position] for position in positions], positions))
    return offers


def store_source(
    geometries: Sequence[GroupGeometry], state: RequestOffloadState, offers: Sequence[Offer]
) -> GPULoadStoreSpec:
    """Return the device blocks of whole offloaded blocks.

    Each group starts at a multiple of the factor and skips no device block of an offloaded block.
    """
    block_ids: list[int] = []
    sizes, indices = [], []
    for offer, table, geometry in zip(offers, state.block_tables, geometries, strict=True):
        positions, factor = offer.positions, geometry.factor
        first, last = (positions[0], positions[-1]) if positions else (0, -1)
        blocks = table[first * factor : (last + 1) * factor]
        if len(blocks) > len(positions) * factor:
            blocks = [block for at in positions for block in table[at * factor : (at + 1) * factor]]
        block_ids += [block for block in blocks if block is not None]
        sizes.append(len(blocks))
        indices.append(first * factor)
    return GPULoadStoreSpec(block_ids, sizes, indices)
