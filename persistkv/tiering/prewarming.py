"""Contexts that are promoted before anyone asks for them: which, and when it is the next one's turn."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Protocol, runtime_checkable

from persistkv.base import OffloadKey

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0


@runtime_checkable
class RecentContexts(Protocol):
    """A tier that knows what was used last; see ``PersistentTier``."""

    def ask_recent(self, max_blocks: int) -> bool:
        """Ask; False: not yet."""
        ...

    def take_recent(self) -> list[list[OffloadKey]] | None:
        """The answer, once it is there."""
        ...


class Prewarming:
    """One context after the other, the last used first. It ends when all were handed over; or when the tier has not
    answered for a minute, since an engine must not take steps for ever because of it.

    :param max_blocks: how many blocks to promote in all.
    """

    def __init__(self, tier: RecentContexts, max_blocks: int) -> None:
        self._tier = tier
        self._max_blocks = max_blocks
        self._asked = False
        self._contexts: deque[list[OffloadKey]] | None = None
        self._gives_up = time.monotonic() + _PATIENCE_S
        self.ended = max_blocks <= 0

    def next_context(self) -> list[OffloadKey] | None:
        """The keys of the next context; None: there is none, or not yet. Call it when the one before has ended."""
        if self.ended:
            return None
        if self._contexts is None and not self._learn():
            return None
        if self._contexts:
            return self._contexts.popleft()
        self.ended = True
        return None

    def _learn(self) -> bool:
        if not self._asked:
            self._asked = self._tier.ask_recent(self._max_blocks)
        recent = self._tier.take_recent() if self._asked else None
        if recent is not None:
            self._contexts = deque(recent)
            logger.info("promoting %d blocks of the contexts used last", sum(map(len, recent)))
        elif time.monotonic() > self._gives_up:
            logger.warning("what was used last is not known after %.0f s: nothing is promoted", _PATIENCE_S)
            self.ended = True
        return recent is not None
