"""When an engine merges an index. Any engine may merge at any time: the schedule only affects cost
and delay.

1. The engine that has written ``latest`` merges regularly while it commits, for all engines.
2. Another engine merges its own commits when they have waited. While ``latest`` is rewritten, it
   waits longer, because the regular merges include its commits. That wait is bounded: ``latest``
   may be wrong, and the other engine may be unable to read the commits. Without the wait, many
   engines merge at the same time and overwrite each other's ``latest``, so that readers miss
   segments and more engines merge.
3. An engine that finds old commits of others merges them after a random pause, unless ``latest`` is
   written during the pause. Commits that regular merges have left for minutes are merged anyway.
4. If ``latest`` was written every few seconds and is not any more, an engine merges once: the one
   that has written it may have been killed after a commit. In a fleet, rule 2 acts before.
"""

from __future__ import annotations

import math
from collections.abc import Callable

REGULAR_PAUSE_S = 2.6
"""Seconds from one regular merge to the next. Readers read ``latest`` again after it."""
MERGE_S = 0.3
"""Usual duration of a merge in seconds."""
# the same pause if the merges of the last minute have found only the engine's own commits
_ALONE_PAUSE_S = 10.0
_ALONE_AFTER_S = 60.0
# A regular merge and its announcement take less. With a shorter wait, commits are merged twice.
_OWN_WAIT_S, _JITTER_S = 3.5, 1.0
# the longest wait of an own commit, while other engines merge
_LONGEST_OWN_WAIT_S = 10.0
# since ``latest`` was written: no regular merges any more. They are up to 3 s apart
_NOT_REGULAR_S = 3.2
# since ``latest`` was read: another engine merges what the one with regular merges may have left
_STOPPED_S = 4.5
_OLD_PAUSE_S = 10.0  # the longest random pause before a merge of old commits
_FAILED_PAUSE_S = 1.0  # after a failed merge; doubled for each one in a row
_LONGEST_FAILED_PAUSE_S = 60.0
_ACTIVE_S = 60.0  # since the last commit: regular merges end


class MergeSchedule:
    """Schedule of the merges of one engine in one index. All times are monotonic, in seconds.

    :param random: returns a random number from 0 to 1.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._jitter_s = _JITTER_S * random()
        """Of this engine: others that wait for the same time differ."""
        self._merged_at = -math.inf
        """Time of the last merge."""
        self._committed_at = -math.inf
        """Time of the last own commit."""
        self._is_regular = False
        """Whether this engine has written ``latest`` last, as far as it knows. Then it merges
        regularly while it commits."""
        self._announced_at = -math.inf
        """Time at which ``latest`` was written."""
        self._latest_time = -math.inf
        """Time in ``latest``, on the clock of its writer."""
        self._stopped_at = math.inf
        """Time at which the regular merges of another engine count as stopped; infinity: there were
        none."""
        self._found_others_at = -math.inf
        """Time of the last merge that found commits of other engines."""
        self._is_incomplete = False
        """Whether the last merge left commits."""
        self._failures = 0
        """Failed merges in a row."""
        self._planned_at = math.inf
        """Time of a planned merge of old commits."""
        self._planned_since = math.inf
        """Time at which it was planned; infinity: other engines' merges do not cancel it."""

    def note_commit(self, now: float) -> None:
        """Record that this engine has committed."""
        self._committed_at = now

    def begin_merge(self, now: float) -> None:
        """Record that this engine begins to merge. Without ``end_merge``, the merge has failed."""
        self._merged_at = now
        # ``end_merge`` takes it back
        self._failures += 1
        self._planned_at = math.inf
        self._stopped_at = math.inf

    def end_merge(self, *, found: bool, found_others: bool, incomplete: bool) -> None:
        """Record that the merge has succeeded.

        :param found: whether there were commits.
        :param found_others: whether there were commits of other engines.
        :param incomplete: whether commits are left.
        """
        self._failures = 0
        # else the pauses get longer after a minute (``_pause_s``)
        if found_others:
            self._found_others_at = self._merged_at
        self._is_regular = self._is_regular or found
        self._is_incomplete = incomplete

    def note_latest(
        self,
        now: float,
        *,
        is_own: bool,
        written: float,
        time: float,
    ) -> None:
        """Record that ``latest`` was read.

        :param is_own: whether this engine has written it.
        :param written: monotonic time of writing; minus infinity: unknown.
        :param time: time of writing that it contains. ``latest`` has changed if this has.
        """
        self._is_regular = is_own
        self._announced_at = written
        pause_s = time - self._latest_time
        # 0: it is the one that was read before
        if pause_s:
            # rule 4: if it does not change again by then, its engine was perhaps killed
            is_regular = 0 < pause_s < _NOT_REGULAR_S and not is_own
            stopped_at = now + _STOPPED_S + self._jitter_s
            self._stopped_at = stopped_at if is_regular else math.inf
        self._latest_time = time
        if written > self._planned_since:
            # Another engine has merged during the pause. If this one merged, too, it would become
            # the one with regular merges, and not continue them, because it does not commit.
            self._planned_at = math.inf

    def plan_merge(self, now: float, *, anyway: bool = False) -> None:
        """Plan a merge of old commits, or of content that exceeds the limits. Many engines may find
        the same ones at the same time: each merges after a random pause.

        :param anyway: merge even if another engine merges during the pause.
        """
        if self._planned_at == math.inf:
            self._planned_at = now + _OLD_PAUSE_S * self._random()
            self._planned_since = now
        if anyway:
            self._planned_since = math.inf

    def due_at(self, now: float, oldest_own: float | None) -> float:
        """Return the time of the next merge; infinity: there is none.

        :param oldest_own: time of acknowledgement of the oldest own commit that no segment
            includes; None: there is none.
        """
        # rules 3 and 4
        due = min(self._planned_at, self._stopped_at)
        if self._is_incomplete:
            # at once
            due = min(due, self._merged_at)
        # rule 2, but not more often than regular merges
        if oldest_own is not None:
            own_due = max(
                self._own_due_at(oldest_own), self._merged_at + REGULAR_PAUSE_S
            )
            due = min(due, own_due)
        # rule 1
        if self._is_regular and now - self._committed_at < _ACTIVE_S:
            due = min(due, self._merged_at + self._pause_s(now))
        # after all others: it delays every merge
        if self._failures:
            # 2 s after the first failure
            pause_s = _FAILED_PAUSE_S * 2.0**self._failures
            pause_s = min(pause_s, _LONGEST_FAILED_PAUSE_S)
            due = max(due, self._merged_at + pause_s)
        return due

    def _own_due_at(self, oldest_own: float) -> float:
        """Return the time at which this engine merges an own commit, see rule 2."""
        has_waited_at = oldest_own + _OWN_WAIT_S
        # when the next regular merge of another engine is overdue
        not_regular_at = self._announced_at + _NOT_REGULAR_S
        latest = oldest_own + _LONGEST_OWN_WAIT_S
        return min(max(has_waited_at, not_regular_at), latest) + self._jitter_s

    def _pause_s(self, now: float) -> float:
        """Return the pause between regular merges. Without commits of others, they are rarer."""
        is_alone = now - self._found_others_at > _ALONE_AFTER_S
        return _ALONE_PAUSE_S if is_alone else REGULAR_PAUSE_S
