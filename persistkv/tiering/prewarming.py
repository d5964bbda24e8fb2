"""Selection of the contexts that are promoted before a request looks them up."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Protocol, runtime_checkable

from persistkv.base import OffloadKey

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0
# between polls for contexts requested with ``persistkv warm``: the store's process lists small rows
_LOOK_S = 5.0


@runtime_checkable
class RecentContexts(Protocol):
    """Optional interface of a tier that lists recently used contexts; see ``PersistentTier``."""

    def ask_recent(self, max_blocks: int, *, only_asked: bool = False) -> bool:
        """Ask for keys of recently used requests, at most ``max_blocks`` in all, which
        ``take_recent`` returns. Return False if the tier is not ready; the caller asks again later.

        :param only_asked: ask only for requests that were explicitly selected, such as with
            ``persistkv warm``.
        """
        ...

    def take_recent(self) -> list[list[OffloadKey]] | None:
        """Return the answer to the last ``ask_recent`` once: a list of keys per request; None: it
        has not arrived."""
        ...


class Prewarming:
    """Queue of stored contexts to promote: at the start those requested with ``persistkv warm``,
    then the most recently used ones; afterwards those that are requested later.

    :param max_blocks: most blocks to ask the tier for in each call; 0: none.
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
        """Whether all recently used contexts were returned, or the tier has not answered for a
        minute: an engine must not take steps forever because of it."""

    def next_context(self) -> list[OffloadKey] | None:
        """Return the keys of the next stored request to promote; None if there is none (yet).

        Asks the tier for more contexts if none are left and its last answer is 5 s old.
        """
        if not self._contexts and self._max_blocks > 0:
            self.ended = self.ended or self._learned
            self._learn()
        return self._contexts.popleft() if self._contexts else None

    def look_now(self) -> None:
        """Let ``next_context`` ask for newly requested contexts now, instead of 5 s after the
        tier's last answer."""
        self._next_look = min(self._next_look, time.monotonic())

    @property
    def waits(self) -> bool:
        """Whether the tier was asked for contexts and has not answered yet, or contexts are
        queued."""
        return self._asked_at is not None or bool(self._contexts)

    @property
    def is_due(self) -> bool:
        """Whether ``next_context`` may have work to do. Cheap enough for each step of an engine."""
        return self.waits or not self.ended or time.monotonic() >= self._next_look

    def _learn(self) -> None:
        now = time.monotonic()
        if self._asked_at is None and now >= self._next_look:
            self._asked_at = (
                now
                if self._tier.ask_recent(self._max_blocks, only_asked=self.ended)
                else None
            )
        recent = None if self._asked_at is None else self._tier.take_recent()
        if recent is not None:
            self._contexts.extend(recent)
            self._learned, self._asked_at, self._next_look = True, None, now + _LOOK_S
            self.ended = self.ended or not recent
            if recent:
                logger.info(
                    "promoting %d blocks of recently used contexts",
                    sum(map(len, recent)),
                )
        elif self._asked_at is not None and now > self._asked_at + _PATIENCE_S:
            # the store's process may be new
            self._asked_at = None
        if not self.ended and not self._learned and now > self._gives_up:
            logger.warning(
                "the tier listed no recently used contexts within %.0f s: none are promoted",
                _PATIENCE_S,
            )
            self.ended = True
