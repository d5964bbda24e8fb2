"""Who merges an index, and when: a matter of cost, not of safety.

1. Whoever merged last goes on while it commits: the others read what it announces.
2. An engine whose own commit waits too long merges it. While ``latest`` moves, another engine
   merges for all: then it waits until ``latest`` has stood still, but for a bounded time, since
   ``latest`` is not trusted. Else many engines merge at once, replace what the others have
   announced in ``latest``, and so cause further merges by engines that do not find their commits.
3. Anybody merges commits that are old, after a random pause, unless another engine has merged
   meanwhile. Commits that are older than that engine needs are merged in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# after a merge: until the same engine merges again. Readers look for it then
AGAIN_S = 2.6
MERGE_S = 0.3  # usual time of a merge
_ALONE_S = 10.0  # the same, if it has found only its own commits for a while
# after a commit of another engine was found: until this one counts as alone
_COMPANY_S = 60.0
_FAILED_S = 1.0  # doubled for each merge that failed: pause after it
# Longer than a pause and the time until others have seen the merge, or engines merge what is merged
# already.
_WAIT_S, _JITTER_S = 3.5, 1.0  # until an engine merges its own commits
_LONGEST_WAIT_S = 10.0  # the same, while another engine seems to merge
# After ``latest`` was written: until nobody seems to merge. Longer than the pause between merges,
# whose times differ.
_STILL_S = 3.2
_OLD_S = 10.0  # age of a commit that anybody may merge
_LONGEST_PAUSE_S = 60.0  # between merges that fail
_ACTIVE_S = 60.0  # an engine that has committed within this time merges regularly


class Turns:
    """Decides when one engine merges an index. Times are monotonic.

    :param jitter: returns a random number from 0 to 1.
    """

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._random = jitter
        self._jitter_s = _JITTER_S * jitter()
        self._merged_at = -math.inf
        self._committed_at = -math.inf
        self._is_last = False  # whether this engine has written ``latest``
        self._announced_at = -math.inf  # when ``latest`` was written
        self._company_at = -math.inf  # when its list showed commits of others
        self._left = False  # whether its last merge left commits
        self._failures = 0  # merges in a row that have not ended
        self._old_at = math.inf  # when to look whether old commits are still there
        # when they were noticed; infinity: another engine that merges does not end the wait
        self._noticed_at = math.inf

    def committed(self, now: float) -> None:
        """Record that this engine has committed."""
        self._committed_at = now

    def began(self, now: float) -> None:
        """Record that this engine begins to merge. Until ``ended``, it counts as failed."""
        self._merged_at = now
        self._failures += 1
        self._old_at = self._noticed_at = math.inf

    def ended(self, *, found: bool, others: bool, left: bool) -> None:
        """Record whether the merge has found commits in the inbox, also those of others, and
        whether it left some."""
        self._failures = 0
        if others:
            self._company_at = self._merged_at
        self._is_last = self._is_last or found
        self._left = left

    def followed(self, *, is_own: bool, announced: float) -> None:
        """Record who has written ``latest``, and when."""
        self._is_last = is_own
        self._announced_at = announced
        if announced > self._noticed_at:
            # An engine that does not commit would take the place of the one that merges for all,
            # and not go on.
            self._old_at = self._noticed_at = math.inf

    def look_soon(self, now: float, *, is_left: bool = False) -> None:
        """Record that old commits may wait, or that content may exceed the limits. A thousand
        engines may notice it at once: each looks again after a random pause.

        :param is_left: the engine that merges has left the commits for minutes. It may be unable to
            read them, so this one merges them even if the other one continues.
        """
        if self._old_at == math.inf:
            self._old_at = now + _OLD_S * self._random()
            self._noticed_at = now
        if is_left:
            self._noticed_at = math.inf

    def due_at(self, now: float, oldest_own: float | None) -> float:
        """Return when to merge next; infinity: not before something happens.

        :param oldest_own: when the oldest own commit was acknowledged that no segment includes;
            None: there is none.
        """
        due = self._old_at
        if self._left:
            due = min(due, self._merged_at)
        if oldest_own is not None:
            due = min(due, max(self._waited_at(oldest_own), self._merged_at + AGAIN_S))
        if self._is_last and now - self._committed_at < _ACTIVE_S:
            due = min(due, self._merged_at + self._regular_pause_s(now))
        if self._failures:
            pause_s = min(_FAILED_S * 2.0**self._failures, _LONGEST_PAUSE_S)
            due = max(due, self._merged_at + pause_s)
        return due

    def _waited_at(self, oldest_own: float) -> float:
        """Return when an own commit that was acknowledged at this time has waited too long."""
        waited = max(oldest_own + _WAIT_S, self._announced_at + _STILL_S)
        return min(waited, oldest_own + _LONGEST_WAIT_S) + self._jitter_s

    def _regular_pause_s(self, now: float) -> float:
        """Return the seconds between merges of the engine that merges for all. Alone, it merges its
        own commits when they have waited, and others that begin to commit merge theirs.
        """
        is_alone = now - self._company_at > _COMPANY_S
        return _ALONE_S if is_alone else AGAIN_S
