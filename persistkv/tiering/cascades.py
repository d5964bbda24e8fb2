"""Cascades to one secondary tier, bounded by the tier's share of the primary tier's rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from persistkv.base import OffloadKey, ReqContext
from persistkv.tiering.requests import TieredRequest


@dataclass
class Cascade:
    """Readable blocks to submit to one secondary tier for storing. Before the submission, they may
    be evicted."""

    request: TieredRequest | None
    """None: the manager does not know the request."""
    context: ReqContext
    keys: list[OffloadKey]


class CascadeQueue:
    """Cascades, copies of blocks from the primary tier, to one tier: those that are not submitted
    yet, and the number of blocks in those that are.

    :param max_blocks: rows that submitted cascades may keep from eviction.
    """

    def __init__(self, max_blocks: float) -> None:
        self.num_submitted_blocks = 0
        """Blocks of store jobs in flight; updated by the manager."""
        self.waiting: deque[Cascade] = deque()
        """Cascades that are not submitted yet, oldest first."""
        self.num_waiting_blocks = 0
        """Blocks of ``waiting``."""
        self._max_blocks = max_blocks
        """May be a fraction, as a share of the rows."""

    def append(self, cascade: Cascade) -> None:
        self.waiting.append(cascade)
        self.num_waiting_blocks += len(cascade.keys)

    def popleft(self) -> Cascade:
        cascade = self.waiting.popleft()
        self.num_waiting_blocks -= len(cascade.keys)
        return cascade

    @property
    def has_room(self) -> bool:
        """Whether the oldest waiting cascade fits in the share."""
        # A cascade larger than the whole share is submitted alone; otherwise it would wait forever.
        if not self.num_submitted_blocks:
            return True
        num_blocks = self.num_submitted_blocks + len(self.waiting[0].keys)
        return num_blocks <= self._max_blocks
