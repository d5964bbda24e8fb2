"""State of the tiering manager: promotions, the requests that wait for them, and jobs of secondary tiers."""

from __future__ import annotations

from dataclasses import dataclass, field

from persistkv.base import OffloadKey, ReqContext
from persistkv.tiering.isolated_tier import IsolatedTier


@dataclass
class PendingPromotion:
    """Blocks of one tier that one request looked up in this step, all groups together."""

    tier: IsolatedTier
    req_context: ReqContext
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    """In the order of the lookups."""
    since: float = 0.0
    """Monotonic seconds of the first lookup; bounds the time that the promotion waits for rows."""

    def in_prefix_order(self) -> list[OffloadKey]:
        """Return the keys by depth, groups interleaved: any first part of the list is a prefix of each group."""
        description = self.req_context.description
        keys = list(self.keys)
        if description is None:
            return keys
        return sorted(keys, key=lambda key: description.depth(key) or 0)


@dataclass
class TieringRequest:
    """One request, from its announcement, first lookup or first store until its end has reached the tiers."""

    context: ReqContext
    request_level_tiers: list[IsolatedTier] = field(default_factory=list)
    """Tiers that receive every block of the request, including prefix hits."""
    storing: int = 0
    """Blocks of the request that are being written to the primary tier."""
    awaiting: set[OffloadKey] = field(default_factory=set)
    """Blocks that the request offered while a promotion or another request was writing them. Its end reaches the tiers
    after these blocks do."""
    finished: bool = False
    missed: set[OffloadKey] = field(default_factory=set)
    """Blocks whose promotion failed or found no row: misses for this request, so that it does not retry forever."""
    held: set[OffloadKey] = field(default_factory=set)
    """Promoted blocks that stay referenced until the request loads them."""
    held_until: float = 0.0
    """Monotonic seconds."""
    received: dict[IsolatedTier, set[OffloadKey]] = field(default_factory=dict)
    """Promoted blocks that a request-level tier received for the request before the request offered them."""


@dataclass
class TierJob:
    """A job in flight in a secondary tier."""

    tier: IsolatedTier
    keys: list[OffloadKey]
    is_promotion: bool
    req_context: ReqContext
    epoch: int
    """Number of resets before its submission."""


@dataclass
class TieringStats:
    """Totals since the manager was created, in blocks."""

    cascaded_blocks: int = 0
    """Submitted to secondary tiers."""
    dropped_cascades: int = 0
    """Not submitted, because cascades already held their share of the primary tier."""
    failed_cascades: int = 0
    """Submitted and not stored."""
    promoted_blocks: int = 0
    """Loaded from a secondary tier and readable."""
    failed_promotions: int = 0
    """Submitted and not loaded."""
    declined_promotions: int = 0
    """Not submitted, because the primary tier had no row for them."""
    expired_holds: int = 0
    """Promoted and not loaded by their request before the deadline."""
