"""State of one request in the connector's scheduler, and the conversion of its tokens to keys and device blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from persistkv.base import GPULoadStoreSpec, OffloadKey, OffloadPolicy, ReqContext, RequestDescription
from persistkv.connector.matching import GroupGeometry

BlockTable = Sequence[int | None]
"""A request's device blocks of one group in order, from its first token on. None: the engine has no block there,
because the block has left a sliding window."""


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


@dataclass
class RequestOffloadState:
    """One request, from ``on_new_request`` until its last transfer ended."""

    geometries: Sequence[GroupGeometry]
    context: ReqContext
    description: RequestDescription
    policy: OffloadPolicy
    stores: bool
    """Whether its blocks are stored. If not, the manager does not get the description, so that no context is kept."""
    block_tables: Sequence[BlockTable] = ()
    """For each group, the device blocks of the context; set by ``set_tables``."""
    next_store: list[int] = field(default_factory=list)
    """For each group, the index of the first offloaded block that was not offered to the manager yet."""
    num_local_tokens: int = 0
    """Tokens that the engine had on the device at its last call of ``get_num_new_matched_tokens``."""
    num_external_tokens: int = 0
    """Tokens after the local ones that are being loaded, or were loaded."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the device blocks."""
    promoted: set[OffloadKey] = field(default_factory=set)
    """Blocks that were not ready at their first lookup, and so were promoted from a secondary tier."""
    jobs: set[int] = field(default_factory=set)
    """Transfers in flight."""
    gave_up_waiting: bool = False
    finished: bool = False

    def __post_init__(self) -> None:
        self.block_tables = [[] for _ in self.geometries]
        self.next_store = [0] * len(self.geometries)

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that are on the device once the load has ended."""
        return self.num_local_tokens + self.num_external_tokens

    @property
    def external_keys(self) -> list[OffloadKey]:
        """Keys of the offloaded blocks to load, in order of groups."""
        return self.keys(self.num_local_tokens, self.num_matched_tokens)

    def keys(self, start: int, stop: int) -> list[OffloadKey]:
        """Return the keys of the offloaded blocks that tokens up to ``stop`` need from ``start`` on."""
        needed: list[OffloadKey] = []
        for chain, geometry in zip(self.description.group_keys, self.geometries, strict=True):
            blocks = geometry.offloaded_blocks(stop, start)
            needed += chain[blocks.start : blocks.stop]
        return needed

    def check_tables(self, tables: Sequence[BlockTable], num_tokens: int) -> None:
        """Check that block tables cover ``num_tokens``.

        :raises ValueError: if they do not.
        """
        if len(tables) != len(self.geometries):
            raise ValueError(f"{len(tables)} block tables for {len(self.geometries)} KV cache groups")
        for group, (table, geometry) in enumerate(zip(tables, self.geometries, strict=True)):
            if len(table) < num_tokens // geometry.block_size:
                raise ValueError(f"group {group}: {len(table)} device blocks do not cover {num_tokens} tokens")

    def group_without_blocks(self, tables: Sequence[BlockTable], stop: int) -> int | None:
        """Return the first group whose table lacks a block that tokens up to ``stop`` need after the local ones."""
        for group, (table, geometry) in enumerate(zip(tables, self.geometries, strict=True)):
            needed = geometry.device_blocks(stop, self.num_local_tokens)
            if None in table[needed.start : needed.stop]:
                return group
        return None

    def skip_stores(self, num_held_tokens: int) -> None:
        """If the policy is block-level, offer only the blocks after the first ``num_held_tokens``."""
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            self.next_store = [num_held_tokens // geometry.offloaded_tokens for geometry in self.geometries]

    def load_target(self) -> GPULoadStoreSpec:
        """Return the device blocks to load; of a sliding-window group, only the blocks in the window.

        The first of them may start within an offloaded block.
        """
        block_ids: list[int] = []
        sizes, indices = [], []
        for table, geometry in zip(self.block_tables, self.geometries, strict=True):
            needed = geometry.device_blocks(self.num_matched_tokens, self.num_local_tokens)
            blocks = [block for block in table[needed.start : needed.stop] if block is not None]
            block_ids += blocks
            sizes.append(len(blocks))
            indices.append(needed.start)
        return GPULoadStoreSpec(block_ids, sizes, indices)

    def num_promoted_tokens(self) -> int:
        """Return how many external tokens were promoted from a secondary tier.

        The first full-attention group is counted. If there is none, a window group is: the state of its first block
        then counts for the tokens before the window.
        """
        full = (group for group, geometry in enumerate(self.geometries) if geometry.spec.sliding_window is None)
        group = next(full, 0)
        size, chain = self.geometries[group].offloaded_tokens, self.description.group_keys[group]
        blocks = self.geometries[group].offloaded_blocks(self.num_matched_tokens, self.num_local_tokens)
        promoted = [position for position in blocks if chain[position] in self.promoted]
        num_tokens = len(promoted) * size
        if promoted and promoted[0] == blocks.start:
            num_tokens += blocks.start * size - self.num_local_tokens
        return min(num_tokens, self.num_external_tokens)

    def filled_blocks(self) -> list[Offer]:
        """Return, for each group, the offloaded blocks that became full since the last call and have device blocks.

        Blocks that left a sliding window before they could be stored are never returned.
        """
        offers = []
        for group, geometry in enumerate(self.geometries):
            chain, table, factor = self.description.group_keys[group], self.block_tables[group], geometry.factor
            computed = self.num_computed_tokens // geometry.offloaded_tokens
            first = self.next_store[group]
            filled = max(first, min(computed, len(chain), len(table) // factor))
            self.next_store[group] = filled
            if None not in table[first * factor : filled * factor]:
                offers.append(Offer(chain[first:filled], range(first, filled)))
                continue
            positions = [at for at in range(first, filled) if None not in table[at * factor : (at + 1) * factor]]
            offers.append(Offer([chain[position] for position in positions], positions))
        return offers

    def store_source(self, offers: Sequence[Offer]) -> GPULoadStoreSpec:
        """Return the device blocks of whole offloaded blocks.

        Each group starts at a multiple of the factor and skips no device block of an offloaded block.
        """
        block_ids: list[int] = []
        sizes, indices = [], []
        for (_, positions), table, geometry in zip(offers, self.block_tables, self.geometries, strict=True):
            factor = geometry.factor
            first, last = (positions[0], positions[-1]) if positions else (0, -1)
            blocks = table[first * factor : (last + 1) * factor]
            if len(blocks) > len(positions) * factor:
                blocks = [block for at in positions for block in table[at * factor : (at + 1) * factor]]
            block_ids += [block for block in blocks if block is not None]
            sizes.append(len(blocks))
            indices.append(first * factor)
        return GPULoadStoreSpec(block_ids, sizes, indices)
