"""Prewarming: contexts that are promoted before a request looks them up."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Protocol, runtime_checkable

from persistkv.base import StoredContext

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0  # seconds to wait for an answer of the tier


@runtime_checkable
class RecentContexts(Protocol):
    """Optional interface of a tier that lists recently used contexts; see ``PersistentTier``."""

    def ask_recent(self, max_blocks: int, *, prefetched: bool = False) -> bool:
        """Ask for keys of recently used requests, at most ``max_blocks`` in all, which
        ``take_recent`` returns. Return False if nothing was asked for; the caller may ask again.

        :param prefetched: ask only for the contexts of an entry that the engine has queued with
            ``PersistentTier.prefetch``.
        """
        ...

    def take_recent(self) -> list[StoredContext] | None:
        """Return the answer to the last ``ask_recent`` once: a context per request; None: it has
        not arrived."""
        ...


class Prewarming:
    """Queue of stored contexts to promote: at the start the most recently used ones, afterwards
    those that the engine has queued with ``PersistentTier.prefetch``.

    :param max_blocks: most blocks to ask the tier for in each call; 0: none.
    """

    def __init__(self, tier: RecentContexts, max_blocks: int) -> None:
        self._tier = tier
        self._max_blocks = max_blocks
        self._contexts: deque[StoredContext] = deque()
        """Contexts of the last answer that ``next_context`` has not returned yet."""
        self._asked_at: float | None = None
        """Monotonic time of the question that the tier has not answered; None: there is none."""
        self._gives_up_at = time.monotonic() + _PATIENCE_S
        """Monotonic time at which a tier without any answer is given up."""
        self._answered = False
        """Whether the tier has answered once."""
        self.recent_ended = max_blocks <= 0
        """Whether all recently used contexts were returned. Also True if the tier has not answered
        within a minute: until then, an engine takes steps even if it has no request."""

    def next_context(self) -> StoredContext | None:
        """Return the next stored context to promote; None: there is none now. Asks the tier for
        more contexts if none are left."""
        if not self._contexts and self._max_blocks > 0:
            # The first answer lists the recently used contexts, and all of these were returned:
            # from now on, ``_ask_tier`` asks for prefetches.
            if self._answered:
                self.recent_ended = True
            self._ask_tier()
            self._take_answer()
        if self._contexts:
            return self._contexts.popleft()
        return None

    @property
    def waits(self) -> bool:
        """Whether the tier was asked for contexts and has not answered yet, or contexts are
        queued."""
        return self._asked_at is not None or bool(self._contexts)

    def _ask_tier(self) -> None:
        """Ask the tier for contexts, unless a question waits for its answer: first for recently
        used ones, and once these have ended for those of ``PersistentTier.prefetch``."""
        now = time.monotonic()
        if self._asked_at is not None:
            # Ask the tier again if it has not answered for a minute: the store's process may be a
            # new one, which never received the question.
            is_lost = now > self._asked_at + _PATIENCE_S
            if not is_lost:
                return
        is_asked = self._tier.ask_recent(self._max_blocks, prefetched=self.recent_ended)
        self._asked_at = now if is_asked else None

    def _take_answer(self) -> None:
        """Take the contexts that the tier was asked for, if they have arrived. Waiting has a limit
        from the beginning on, also if the tier could not be asked yet."""
        recent = None
        if self._asked_at is not None:
            recent = self._tier.take_recent()
        if recent is None:
            # the tier could not be asked yet, or has not answered
            self._give_up_if_late()
            return
        self._asked_at = None
        self._answered = True
        self._contexts.extend(recent)
        # an empty answer: there are no such contexts
        if not recent:
            self.recent_ended = True
        num_blocks = sum(len(context.keys) for context in recent)
        if num_blocks:
            logger.info("promoting %d blocks of stored contexts", num_blocks)

    def _give_up_if_late(self) -> None:
        """Stop waiting for recently used contexts if the tier has not listed any in time."""
        if not self.recent_ended and time.monotonic() > self._gives_up_at:
            self.recent_ended = True
            logger.warning(
                "the tier listed no recently used contexts within %.0f s: none are promoted",
                _PATIENCE_S,
            )
