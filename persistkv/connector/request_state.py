"""What the connector's scheduler remembers of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from persistkv.base import OffloadKey, OffloadPolicy, ReqContext, RequestDescription
from persistkv.connector.common import KVCacheGroupSpec

BlockTable = Sequence[int | None]
"""A request's device blocks of one group in order, from its first token on; None where the engine has none: a
sliding window has passed by."""


@dataclass(frozen=True)
class GroupGeometry:
    """How one KV cache group's tokens are cut, and which of them a context needs."""

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
        """The first token, from ``start`` on, whose KV the token behind the first ``num_tokens`` attends to."""
        window = self.spec.sliding_window
        return start if window is None else min(max(start, num_tokens - window + 1), num_tokens)

    def device_blocks(self, num_tokens: int, start: int = 0) -> range:
        """Which device blocks hold what the first ``num_tokens`` need from ``start`` on."""
        return range(self.first_needed(num_tokens, start) // self.block_size, num_tokens // self.block_size)

    def offloaded_blocks(self, num_tokens: int, start: int = 0) -> range:
        """Which offloaded blocks hold what the first ``num_tokens`` need from ``start`` on; parts of blocks count."""
        first = self.first_needed(num_tokens, start)
        if first == num_tokens:
            return range(0)
        return range(first // self.offloaded_tokens, -(-num_tokens // self.offloaded_tokens))


@dataclass(frozen=True)
class JobRecord:
    """What has to be told to the manager when a job ends."""

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
    """Whether its blocks are stored. Where not, the manager is not given the description: no context is to be kept."""
    block_tables: Sequence[BlockTable]
    """For each group, the device blocks of the context."""
    next_store: list[int]
    """For each group, the first offloaded block that was not yet offered to the manager."""
    num_local_tokens: int = 0
    """Tokens that the engine had on the device when it asked for more."""
    num_external_tokens: int = 0
    """Tokens that are being loaded behind them, or were."""
    num_computed_tokens: int = 0
    """Tokens whose KV lies in the device blocks."""
    promoted: set[OffloadKey] = field(default_factory=set)
    """Blocks that were not ready at the first look: a tier behind the primary one brought them."""
    jobs: set[int] = field(default_factory=set)
    """Transfers in flight."""
    gave_up_waiting: bool = False
    finished: bool = False

    @property
    def num_matched_tokens(self) -> int:
        """Tokens that are on the device once what is being loaded has arrived."""
        return self.num_local_tokens + self.num_external_tokens

    @classmethod
    def make(
        cls, context: ReqContext, description: RequestDescription, policy: OffloadPolicy, *, stores: bool
    ) -> RequestOffloadState:
        """The state of a request that nothing is known of but its description."""
        groups = len(description.group_keys)
        return cls(context, description, policy, stores, [[] for _ in range(groups)], [0] * groups)

    def skip_stores(self, geometries: Sequence[GroupGeometry], num_held_tokens: int) -> None:
        """Unless every block is wanted, offer only those behind the tokens that are held already."""
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            self.next_store = [num_held_tokens // geometry.offloaded_tokens for geometry in geometries]
