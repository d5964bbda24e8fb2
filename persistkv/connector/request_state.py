"""Per-request state of the connector's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from persistkv.base import OffloadKey, OffloadPolicy, ReqContext, RequestDescription
from persistkv.connector.common import KVCacheGroupSpec

BlockTable = Sequence[int | None]
"""A request's device blocks of one group in order, from its first token on. None: the engine has no block there,
because the block has left a sliding window."""


@dataclass(frozen=True)
class GroupGeometry:
    """Division of one KV cache group's tokens into blocks, and the tokens that a context needs."""

    spec: KVCacheGroupSpec
    factor: int
    """Device blocks in an offloaded block."""

    @property
    def block_size(self) -> int:
        """Tokens in a device block."""
        return self.spec.block_size

    @property
    def offloaded_tokens(self) -> int:
        """Tokens in an offloaded block."""
        return self.spec.block_size * self.factor

    def first_needed(self, num_tokens: int, start: int = 0) -> int:
        """Return the first token, from ``start`` on, that the token after the first ``num_tokens`` attends to."""
        window = self.spec.sliding_window
        return start if window is None else min(max(start, num_tokens - window + 1), num_tokens)

    def device_blocks(self, num_tokens: int, start: int = 0) -> range:
        """Return the device blocks that a context of ``num_tokens`` needs from ``start`` on."""
        return range(self.first_needed(num_tokens, start) // self.block_size, num_tokens // self.block_size)

    def offloaded_blocks(self, num_tokens: int, start: int = 0) -> range:
        """Return the offloaded blocks that a context of ``num_tokens`` needs, even in part, from ``start`` on."""
        first = self.first_needed(num_tokens, start)
        if first == num_tokens:
            return range(0)
        return range(first // self.offloaded_tokens, -(-num_tokens // self.offloaded_tokens))


@dataclass(frozen=True)
class JobRecord:
    """Data that the manager needs when a job ends."""

    req_id: str
    keys: Sequence[OffloadKey]
    is_load: bool


@dataclass
class RequestOffloadState:
    """One request, from ``on_new_request`` until its last transfer ended."""

    context: ReqContext
    description: RequestDescription
    policy: OffloadPolicy
    stores: bool
    """Whether its blocks are stored. If not, the manager does not get the description, so that no context is kept."""
    block_tables: Sequence[BlockTable]
    """For each group, the device blocks of the context."""
    next_store: list[int]
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

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that are on the device once the load has ended."""
        return self.num_local_tokens + self.num_external_tokens

    @classmethod
    def make(
        cls, context: ReqContext, description: RequestDescription, policy: OffloadPolicy, *, stores: bool
    ) -> RequestOffloadState:
        """Create the state of a new request."""
        groups = len(description.group_keys)
        return cls(context, description, policy, stores, [[] for _ in range(groups)], [0] * groups)

    def skip_stores(self, geometries: Sequence[GroupGeometry], num_held_tokens: int) -> None:
        """If the policy is block-level, offer only the blocks after the first ``num_held_tokens``."""
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            self.next_store = [num_held_tokens // geometry.offloaded_tokens for geometry in geometries]
