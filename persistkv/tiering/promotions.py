"""Blocks that are being promoted, the requests that wait for them, and the promotions that are not
submitted yet."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from persistkv.base import OffloadKey, ReqContext
from persistkv.tiering.isolated_tier import IsolatedTier

_TierRequest = tuple[IsolatedTier, str]
"""Place of a promotion in the queue: its tier and the id of its request."""


@dataclass
class Promotion:
    """Blocks to load from one secondary tier for one request, all KV cache groups together."""

    tier: IsolatedTier
    context: ReqContext
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    """Ordered set of keys, in the order of their lookups."""
    created_at: float = field(default_factory=time.monotonic)
    """``time.monotonic`` time of creation. It bounds how long the promotion waits for rows."""

    def keys_by_depth(self) -> list[OffloadKey]:
        """Return the keys in the order of their depth in the request: if the list is cut, each
        group keeps a prefix. Without a description, the order is that of the lookups."""
        keys = list(self.keys)
        description = self.context.description
        if description is not None:
            # a key that the description lacks counts as a key at the start
            depths = {key: description.depth(key) or 0 for key in keys}
            keys.sort(key=depths.__getitem__)
        return keys


class PromotionQueue:
    """Promotions, loads of blocks into the primary tier, of the current step: at most one for each
    tier and request. Also the requests that wait for promoted blocks. Not thread-safe.

    A block has waiters from its lookup until its promotion ends, so no block is promoted twice at
    the same time.
    """

    def __init__(self) -> None:
        self.waiters: dict[OffloadKey, set[str]] = {}
        """Ids of the requests that wait for a block, by the block's key."""
        self.lost: set[OffloadKey] = set()
        """Blocks whose promotion was given up, because its deadline has passed or its tier cannot
        be polled: misses, although their rows stay reserved until the tier reports the job."""
        self.queued: dict[_TierRequest, Promotion] = {}
        """Promotions that are not submitted yet."""

    def add(
        self,
        tier: IsolatedTier,
        key: OffloadKey,
        context: ReqContext,
    ) -> None:
        """Queue the promotion of a block that has no waiters, for a request that waits for it."""
        place = (tier, context.req_id)
        promotion = self.queued.get(place)
        if promotion is None:
            promotion = Promotion(tier, context)
            self.queued[place] = promotion
        promotion.keys[key] = None
        self.waiters[key] = {context.req_id}

    def take_waiters(self, key: OffloadKey) -> set[str]:
        """Remove and return the ids of the requests that wait for a block."""
        return self.waiters.pop(key, set())

    def take_queued(self) -> list[Promotion]:
        """Remove and return all queued promotions; their blocks keep their waiters."""
        promotions = list(self.queued.values())
        self.queued = {}
        return promotions

    def put_back(self, promotion: Promotion) -> None:
        """Queue a promotion again that had no rows."""
        place = (promotion.tier, promotion.context.req_id)
        self.queued[place] = promotion

    def has_queued(self, req_id: str) -> bool:
        """Return whether a promotion of the request is queued."""
        return bool(self._queued_of(req_id))

    def abandon(self, req_id: str) -> None:
        """Remove a request from the waiters of its queued blocks. Blocks that no other request
        waits for are not promoted.

        Promotions that are submitted already continue, because their rows are in use.
        """
        for promotion in self._queued_of(req_id):
            for key in list(promotion.keys):
                waiters = self.waiters[key]
                waiters.discard(req_id)
                if not waiters:
                    del self.waiters[key]
                    del promotion.keys[key]
            if not promotion.keys:
                del self.queued[promotion.tier, req_id]

    def _queued_of(self, req_id: str) -> list[Promotion]:
        """Return the queued promotions of a request."""
        promotions = []
        for (_, owner), promotion in self.queued.items():
            if owner == req_id:
                promotions.append(promotion)
        return promotions

    def clear(self) -> None:
        """Forget queued promotions and all waiters. Lost blocks stay: their jobs still use rows."""
        self.queued.clear()
        self.waiters.clear()
