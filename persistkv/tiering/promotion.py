"""What the tiering manager remembers of promotions and of the requests that wait for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from persistkv.base import OffloadKey, ReqContext
from persistkv.tiering.base import SecondaryTierManager


@dataclass
class PendingPromotion:
    """Blocks of one tier that one request asked for in this step, all groups together."""

    tier: SecondaryTierManager
    req_context: ReqContext
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    """In the order they were asked for."""
    since: float = 0.0
    """Monotonic seconds of the first lookup: a promotion that finds no room waits only so long."""

    def in_prefix_order(self) -> list[OffloadKey]:
        """The keys by depth, all groups beside each other, so that cutting the list leaves a prefix of each."""
        description = self.req_context.description
        keys = list(self.keys)
        if description is None:
            return keys
        return sorted(keys, key=lambda key: description.depth(key) or 0)


@dataclass
class TieringRequest:
    """One request between ``on_new_request`` and its end."""

    context: ReqContext
    request_level_tiers: list[SecondaryTierManager] = field(default_factory=list)
    """The tiers that want every block of it, prefix hits included."""
    storing: int = 0
    """Blocks that are being written to the primary tier."""
    awaiting: set[OffloadKey] = field(default_factory=set)
    """Of its blocks, those that another request is writing: its end is told after they were handed on."""
    finished: bool = False
    missed: set[OffloadKey] = field(default_factory=set)
    """Blocks whose promotion failed or found no room: misses for this request, so that it does not try for ever."""
    held: set[OffloadKey] = field(default_factory=set)
    """Promoted blocks that stay referenced until the request loads them."""
    held_until: float = 0.0
    """Monotonic seconds."""


@dataclass
class TierJob:
    """A job that a secondary tier works on."""

    tier: SecondaryTierManager
    keys: list[OffloadKey]
    is_promotion: bool
    req_context: ReqContext
    epoch: int
    """Count of resets when it was submitted."""


@dataclass
class TieringStats:
    """Totals since the manager was made, in blocks."""

    cascaded_blocks: int = 0
    """Handed to secondary tiers."""
    dropped_cascades: int = 0
    """Not handed on, because cascades held their share of the primary tier already."""
    failed_cascades: int = 0
    """Handed on and not taken."""
    promoted_blocks: int = 0
    """Brought back and readable."""
    failed_promotions: int = 0
    declined_promotions: int = 0
    """Not asked for, because the primary tier had no room."""
    expired_holds: int = 0
    """Promoted and not loaded before their deadline."""
