"""When an engine merges an index. Any engine may merge at any time: the schedule only affects cost
and delay. ``latest`` is the object that each merge overwrites, with the name of its engine.

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
# seconds between regular merges that have found only own commits for the last minute
_ALONE_PAUSE_S = 10.0
_ALONE_AFTER_S = 60.0
# seconds for which an own commit waits. A regular merge with its announcement takes nearly as long:
# with a shorter wait, commits would be merged twice.
_OWN_WAIT_S = 3.5
_JITTER_S = 1.0  # longest random delay of an engine, in seconds
# longest wait of an own commit while other engines merge, in seconds
_LONGEST_OWN_WAIT_S = 10.0
# seconds since the last write of ``latest`` after which regular merges have stopped; they are up to
# 3 s apart
_NOT_REGULAR_S = 3.2
# seconds since the last read of ``latest`` after which this engine merges in place of the one with
# regular merges
_STOPPED_S = 4.5
_OLD_PAUSE_S = 10.0  # longest random pause before a merge of old commits, in seconds
# half of the pause in seconds after the first failed merge. Each further failure doubles the pause.
_FAILED_PAUSE_S = 1.0
_LONGEST_FAILED_PAUSE_S = 60.0
_ACTIVE_S = 60.0  # seconds after the last commit at which regular merges end


class MergeSchedule:
    """Schedule of the merges of one engine in one index. All times are monotonic, in seconds.

    :param random: returns a random number from 0 to 1.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._jitter_s = _JITTER_S * random()
        """Random delay of this engine, so that engines with equal reasons do not merge together."""
        self._merged_at = -math.inf
        """Time of the last merge."""
        self._committed_at = -math.inf
        """Time of the last own commit."""
        self._is_regular = False
        """Whether this engine has probably written ``latest`` last. If so, it merges regularly
        while it commits."""
        self._announced_at = -math.inf
        """Time at which ``latest`` was written."""
        self._latest_time = -math.inf
        """Time in ``latest`` when it was read last: not monotonic, but as its writer stated it."""
        self._stopped_at = math.inf
        """Time at which the regular merges of another engine count as stopped; infinity: there were
        none."""
        self._found_others_at = -math.inf
        """Time of the last merge that found commits of other engines."""
        self._is_incomplete = False
        """Whether the last merge left commits or evictions."""
        self._failures = 0
        """Failed merges in a row; a merge that has begun counts until ``end_merge``."""
        self._planned_at = math.inf
        """Time of a planned merge of old commits; infinity: none is planned."""
        self._planned_since = math.inf
        """Time at which that merge was planned: a merge of another engine after this time cancels
        the plan. Infinity: no merge cancels it."""

    def note_commit(self, now: float) -> None:
        """Record that this engine has committed."""
        self._committed_at = now

    def begin_merge(self, now: float) -> None:
        """Record that this engine begins to merge. Without ``end_merge``, the merge has failed."""
        self._merged_at = now
        # count the merge as failed until ``end_merge`` is called
        self._failures += 1
        # this merge makes a planned one needless, and one in place of another engine
        self._planned_at = math.inf
        self._stopped_at = math.inf

    def end_merge(
        self,
        *,
        found: bool,
        found_others: bool,
        incomplete: bool,
    ) -> None:
        """Record that the merge has succeeded.

        :param found: whether there were commits.
        :param found_others: whether there were commits of other engines.
        :param incomplete: whether commits or evictions are left.
        """
        self._failures = 0
        self._is_incomplete = incomplete
        if found:
            self._is_regular = True
        if found_others:
            # pauses between regular merges stay short for another minute
            self._found_others_at = self._merged_at

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
        :param time: time of writing that it contains. ``latest`` has changed if this time has.
        """
        self._is_regular = is_own
        self._announced_at = written
        if time != self._latest_time:
            self._plan_takeover(now, is_own=is_own, time=time)
        self._latest_time = time
        has_merged_since = written > self._planned_since
        if has_merged_since:
            # Cancel the planned merge, because the other engine has merged since. The engine that
            # merges last takes over the regular merges, and this one would not continue them
            # without commits of its own.
            self._planned_at = math.inf

    def _plan_takeover(
        self,
        now: float,
        *,
        is_own: bool,
        time: float,
    ) -> None:
        """Plan a merge in place of another engine that merges regularly: it may be killed after a
        commit. Each change of ``latest`` shows that the other engine is alive, and delays the plan.

        :param is_own: whether this engine has written ``latest``.
        :param time: new time in ``latest``.
        """
        pause_s = time - self._latest_time
        is_other_regular = not is_own and 0 < pause_s < _NOT_REGULAR_S
        if is_other_regular:
            self._stopped_at = now + _STOPPED_S + self._jitter_s
        else:
            self._stopped_at = math.inf

    def plan_merge(self, now: float, *, anyway: bool = False) -> None:
        """Plan a merge of old commits, or of content that exceeds the limits. Many engines may find
        the same reason at the same time, so each waits for a random pause.

        :param anyway: merge even if another engine merges during the pause.
        """
        is_planned = self._planned_at < math.inf
        if not is_planned:
            self._planned_at = now + _OLD_PAUSE_S * self._random()
            self._planned_since = now
        if anyway:
            # no merge of another engine is later than infinity, so none cancels the plan
            self._planned_since = math.inf

    def due_at(self, now: float, oldest_own: float | None) -> float:
        """Return the time of the next merge; infinity: there is none.

        :param oldest_own: time of acknowledgement of the oldest own commit that no segment
            includes; None: there is none.
        """
        # begin with the planned merges: of old commits, and in place of an engine that has stopped
        due = min(self._planned_at, self._stopped_at)
        if self._is_incomplete:
            # work is left over from the last merge: the next one is due at once
            due = min(due, self._merged_at)
        if oldest_own is not None:
            own_due = self._own_due_at(oldest_own)
            due = min(due, own_due)
        is_active = now - self._committed_at < _ACTIVE_S
        if self._is_regular and is_active:
            regular_due = self._merged_at + self._pause_s(now)
            due = min(due, regular_due)
        # apply the pause after failures last, because it delays every merge
        if self._failures:
            # the first failure causes a pause of 2 s
            pause_s = _FAILED_PAUSE_S * 2.0**self._failures
            pause_s = min(pause_s, _LONGEST_FAILED_PAUSE_S)
            due = max(due, self._merged_at + pause_s)
        return due

    def _own_due_at(self, oldest_own: float) -> float:
        """Return the time at which this engine merges its oldest commit: when it has waited for 3.5
        s and no other engine merges regularly, or at the latest after 10 s; but never sooner after
        its last merge than regular merges follow each other."""
        waited_at = oldest_own + _OWN_WAIT_S
        # the next regular merge of another engine may include the commit: wait until it is late
        overdue_at = self._announced_at + _NOT_REGULAR_S
        at_latest = oldest_own + _LONGEST_OWN_WAIT_S
        wanted_at = min(max(waited_at, overdue_at), at_latest)
        earliest = self._merged_at + REGULAR_PAUSE_S
        return max(earliest, wanted_at + self._jitter_s)

    def _pause_s(self, now: float) -> float:
        """Return the pause between regular merges. They are rarer if no other engine commits."""
        is_alone = now - self._found_others_at > _ALONE_AFTER_S
        return _ALONE_PAUSE_S if is_alone else REGULAR_PAUSE_S
