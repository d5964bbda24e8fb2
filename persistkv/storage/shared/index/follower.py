"""When an engine reads ``latest`` and the lists, to find the commits of other engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from persistkv.errors import StoreError
from persistkv.storage.blobs import BlobInfo
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import Latest
from persistkv.storage.shared.index.merge import Merger
from persistkv.storage.shared.index.merge_schedule import MERGE_S, REGULAR_PAUSE_S
from persistkv.storage.shared.index.reader import IndexReader

_IDLE_AFTER_S = 60.0  # seconds without reads and commits after which the handle is idle
# least pause in seconds between reads of ``latest`` while the handle is idle
_IDLE_FOLLOW_S = 30.0
_LEAST_FOLLOW_S = 0.05  # least pause in seconds between them while it is in use
LIST_S = 60.0  # seconds between lists of the index
_IDLE_LIST_S = 300.0  # seconds between them while the handle is idle
# seconds between lists of the inbox while another engine merges, which may be unable to read some
# of the commits
_INBOX_S = 600.0
_OLD_COMMIT_S = 10.0  # age in seconds from which on no engine seems to merge a commit
# age in seconds from which on the merging engine seems to leave a commit out
_LEFT_COMMIT_S = 120.0
# largest age in seconds of ``latest`` while an engine merges regularly
_REGULAR_S = 10.0


class Follower:
    """Reads the commits of other engines in one namespace at the right times. One thread at a time
    may use it; any thread may call ``note_use``.

    :param refresh_s: seconds between two reads of ``latest`` while the handle is in use.
    :param merger: None: the handle only reads.
    """

    def __init__(
        self,
        medium: Medium,
        reader: IndexReader,
        merger: Merger | None,
        refresh_s: float,
    ) -> None:
        self._time = medium.time
        self._clock = medium.clock
        self._reader = reader
        self._merger = merger
        self._refresh_s = refresh_s
        self._used_at = self._clock.monotonic()
        """Monotonic time of the last use."""
        self._follow_at = math.inf
        """Monotonic time at which ``latest`` is read again; infinity: before ``start``."""
        self._list_at = math.inf
        """Monotonic time at which the index is listed again; infinity: before ``start``."""
        self._inbox_at = -math.inf
        """Monotonic time from which on a list of the index includes the inbox in any case."""
        self._is_merged_regularly = False
        """Whether another engine merges regularly, as ``latest`` has shown."""

    def start(self) -> None:
        """Begin to follow, after the index was read."""
        now = self._clock.monotonic()
        self._follow_at = now + self._refresh_s
        # choose a random pause, so that engines that start together do not list together
        share = self._clock.random.uniform(0.5, 1.0)
        self._list_at = now + LIST_S * share
        # the inbox was read on opening
        self._inbox_at = now + _INBOX_S

    def note_use(self) -> None:
        """Record that the handle is in use: it follows other engines more closely then."""
        was_idle = self.is_idle()
        now = self._clock.monotonic()
        self._used_at = now
        if was_idle:
            soon = now + self._refresh_s
            self._follow_at = min(self._follow_at, soon)

    def is_idle(self) -> bool:
        """Return whether the handle was not used for a minute."""
        now = self._clock.monotonic()
        return now - self._used_at > _IDLE_AFTER_S

    def _jitter(self) -> float:
        """Return a factor of a pause: engines that start together spread their requests."""
        return self._clock.random.uniform(0.75, 1.25)

    def due_at(self) -> float:
        """Return the monotonic time of the next step."""
        return min(self._follow_at, self._list_at)

    def step(self) -> None:
        """Read ``latest`` and the lists, each if it is due.

        :raises StoreError: the medium failed; later steps read the rest.
        """
        now = self._clock.monotonic()
        if now >= self._list_at:
            self._read_lists(now)
        if now >= self._follow_at:
            self.read_latest()
        elif self._merger is not None and self._merger.is_merge_due():
            # Read ``latest`` before the merge, because another engine may have merged the commits
            # already. Ignore an error of the medium: the merge fails, too, and is repeated after a
            # pause.
            with suppress(StoreError):
                self.read_latest()

    def _read_lists(self, now: float) -> None:
        """Read the lists, and the objects in them."""
        pause_s = _IDLE_LIST_S if self.is_idle() else LIST_S
        self._list_at = now + pause_s * self._jitter()
        # the least age of the commits to read from the inbox; None: do not list it
        inbox_age_s = None
        # The segments of an engine that merges regularly include the commits. List the inbox all
        # the same, but rarely, because that engine may be unable to read some commits.
        lists_inbox = not self._is_merged_regularly or now >= self._inbox_at
        if lists_inbox:
            self._inbox_at = now + _INBOX_S
            # younger commits are still expected in the next segment
            inbox_age_s = _OLD_COMMIT_S
        commits = self._reader.refresh(inbox_age_s=inbox_age_s)
        if self._merger is not None:
            self._merger.delete_included()
            self._plan_merge(self._merger, commits)

    def _plan_merge(self, merger: Merger, commits: Sequence[BlobInfo]) -> None:
        """Plan a merge of commits that are so old that no engine seems to merge them."""
        if not commits:
            return
        oldest_time = min(info.time for info in commits)
        age_s = self._time.now() - oldest_time
        # the merging engine has left the commit out, perhaps because it cannot read it
        is_left = age_s > _LEFT_COMMIT_S
        now = self._clock.monotonic()
        merger.schedule.plan_merge(now, anyway=is_left)

    def read_latest(self) -> None:
        """Read ``latest``, and the objects that it names.

        :raises StoreError: the medium failed.
        """
        now = self._clock.monotonic()
        # make at least a short pause, because the option ``refresh`` may be 0
        pause_s = max(self._refresh_s, _LEAST_FOLLOW_S)
        if self.is_idle():
            pause_s = max(pause_s, _IDLE_FOLLOW_S)
        self._follow_at = now + pause_s * self._jitter()
        latest = self._reader.follow()
        if self._merger is not None:
            self._merger.record_latest(latest)
        if latest is None:
            self._is_merged_regularly = False
            return
        self._is_merged_regularly = self._is_merging(latest)
        # wait for the next merge, because ``latest`` does not change before
        merge_at = now + self._until_next_merge(latest.time)
        self._follow_at = max(self._follow_at, merge_at)

    def _until_next_merge(self, merged: float) -> float:
        """Return the seconds until the next regular merge; 0: unknown. Until then, ``latest`` does
        not change.

        :param merged: time of the last merge, on the medium's clock.
        """
        pause_s = REGULAR_PAUSE_S + MERGE_S
        rest_s = merged + pause_s - self._time.now()
        # ``merged`` is ahead of the medium's clock, which shows that one of the clocks is wrong:
        # ignore it
        if rest_s > pause_s:
            return 0.0
        return max(0.0, rest_s)

    def _is_merging(self, latest: Latest) -> bool:
        """Return whether ``latest`` shows that another engine merges regularly: another handle has
        written it less than 10 s ago."""
        merger = self._merger
        if merger is not None and latest.writer == merger.writer:
            return False
        age_s = self._time.now() - latest.time
        return 0 <= age_s < _REGULAR_S
