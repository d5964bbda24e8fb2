"""Contexts that are promoted before anyone asks for them: which, and when it is the next one's turn."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Protocol, runtime_checkable

from persistkv.base import OffloadKey

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_LOOK_S = 5.0  # between looks for what somebody wants warmed up: a listing of small rows by the store's process


@runtime_checkable
class RecentContexts(Protocol):
    """A tier that knows what was used last; see ``PersistentTier``."""

    def ask_recent(self, max_blocks: int, *, only_asked: bool = False) -> bool:
        """Ask; False: not yet."""
        ...

    def take_recent(self) -> list[list[OffloadKey]] | None:
        """The answer, once it is there."""
        ...


class Prewarming:
    """One context after the other, the last used first; after that, those that ``persistkv warm`` asks for meanwhile.

    :param max_blocks: how many blocks to promote in all, and of what is asked for later each time.
    """

    def __init__(self, tier: RecentContexts, max_blocks: int) -> None:
        self._tier = tier
        self._max_blocks = max_blocks
        self._contexts: deque[list[OffloadKey]] = deque()
        self._asked_at: float | None = None
        self._next_look = time.monotonic()
        self._gives_up = self._next_look + _PATIENCE_S
        self._learned = False
        self.ended = max_blocks <= 0
        """Whether those used last were handed over; or the tier has not answered for a minute, since an engine must not
        take steps for ever because of it."""

    def next_context(self) -> list[OffloadKey] | None:
        """The keys of the next context; None: there is none, or not yet. Call it when the one before has ended."""
        if not self._contexts and self._max_blocks > 0:
            self.ended = self.ended or self._learned
            self._learn()
        return self._contexts.popleft() if self._contexts else None

    @property
    def is_due(self) -> bool:
        """Whether ``next_context`` may have something to do: cheap, for each step of an engine."""
        waits = self._asked_at is not None or bool(self._contexts)
        return waits or not self.ended or time.monotonic() >= self._next_look

    def _learn(self) -> None:
        now = time.monotonic()
        if self._asked_at is None and now >= self._next_look:
            self._asked_at = now if self._tier.ask_recent(self._max_blocks, only_asked=self.ended) else None
        recent = None if self._asked_at is None else self._tier.take_recent()
        if recent is not None:
            self._contexts.extend(recent)
            self._learned, self._asked_at, self._next_look = True, None, now + _LOOK_S
            self.ended = self.ended or not recent
            if recent:
                logger.info("promoting %d blocks before they are asked for", sum(map(len, recent)))
        elif self._asked_at is not None and now > self._asked_at + _PATIENCE_S:  # the store's process may be another
            self._asked_at = None
        if not self.ended and not self._learned and now > self._gives_up:
            logger.warning("what was used last is not known after %.0f s: nothing is promoted", _PATIENCE_S)
            self.ended = True
