"""State of one request in the tiering manager."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from persistkv.base import OffloadKey, ReqContext
from persistkv.tiering.isolated_tier import IsolatedTier
from persistkv.tiering.load_cost import LoadDecision, Reason


@dataclass
class TieredRequest:
    """A request from its first call until the tiers have received ``on_request_finished`` for
    it."""

    context: ReqContext
    request_level_tiers: list[IsolatedTier]
    """Tiers with ``OffloadPolicy.REQUEST_LEVEL``: they receive every block of the request,
    including prefix hits."""
    num_being_written: int = 0
    """Number of blocks of the request that are being written to the primary tier."""
    num_waiting_cascades: int = 0
    """Cascades of the request that wait for earlier ones to end. The tiers receive them before
    ``on_request_finished``."""
    awaited_writes: set[OffloadKey] = field(default_factory=set)
    """Blocks that the request offered for storing while a promotion or another request was writing
    them. The tiers receive these blocks before ``on_request_finished``."""
    finished: bool = False
    """Whether the engine has ended the request; its blocks may still be written or cascaded."""
    missed: set[OffloadKey] = field(default_factory=set)
    """Blocks whose promotion failed or found no row: misses for this request, so that it does not
    retry forever."""
    decision: LoadDecision | None = None
    """Runs to load from the secondary tiers; None: not decided yet."""
    load_reason: Reason | None = None
    """Use of the blocks that secondary tiers held for the request; None: they held none, or
    their load has not ended."""
    held: dict[OffloadKey, IsolatedTier] = field(default_factory=dict)
    """Promoted blocks that stay referenced until the request loads them, with the tier that they
    come from."""
    held_until: float = 0.0
    """``time.monotonic`` time at which ``held`` blocks are released."""
    received: dict[IsolatedTier, set[OffloadKey]] = field(default_factory=dict)
    """For each request-level tier, promoted blocks that it received before the request offered them
    for storing."""

    def reopen(self) -> None:
        """Begin a new request of the same id while stores of the finished one are in flight."""
        self.finished = False
        self.missed.clear()
        self.decision = None
        self.load_reason = None

    @property
    def is_declined(self) -> bool:
        """Whether the request loads nothing from the secondary tiers, although they hold blocks."""
        return self.decision is not None and not self.decision.num_runs

    def not_received(
        self,
        tier: IsolatedTier,
        keys: Iterable[OffloadKey],
    ) -> list[OffloadKey]:
        """Return the blocks that the tier did not receive when they were promoted."""
        received = self.received.get(tier, ())
        return [key for key in keys if key not in received]
