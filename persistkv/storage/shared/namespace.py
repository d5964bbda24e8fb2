"""One namespace of a shared store, as one handle uses it: its replica, its commits and its
background work."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch, CommitResult
from persistkv.storage.policy import Policy
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import Latest, Names
from persistkv.storage.shared.inbox import Inbox
from persistkv.storage.shared.index.merge import Limits, Merger
from persistkv.storage.shared.index.reader import IndexReader
from persistkv.storage.shared.index.rebuild import FoundPack, Rebuilder
from persistkv.storage.shared.index.sweep import Sweeper
from persistkv.storage.shared.index.totals import IDLE_TOTALS_S, TOTALS_S, TotalsBoard
from persistkv.storage.shared.index.turns import AGAIN_S, MERGE_S
from persistkv.storage.shared.options import SharedOptions
from persistkv.storage.shared.packs import PackBlobs
from persistkv.storage.shared.replica import Replica, ReplicaFolder
from persistkv.storage.stats import MergeState

logger = logging.getLogger(__name__)

_IDLE_AFTER_S = 60.0  # without reads and commits
_IDLE_FOLLOW_S = 30.0
_LIST_S, _IDLE_LIST_S = 60.0, 300.0  # between lists of the index
_SWEEP_CHECK_S = 3600.0  # between looks whether a sweep is due
_OLD_COMMIT_S = 10.0  # age of a commit that nobody seems to merge
_REGULAR_S = 10.0  # age of ``latest`` while somebody merges regularly
_RETRY_S = 5.0  # after a failure


class SharedNamespace:
    """A namespace that a handle has opened. Any thread may read; one thread at a time may commit,
    another one steps.

    :param folder: of the replica.
    :param is_writable: whether this handle commits and merges.
    :raises StoreError: the replica cannot be opened.
    """

    def __init__(
        self,
        medium: Medium,
        namespace: bytes,
        folder: ReplicaFolder,
        options: SharedOptions,
        board: TotalsBoard,
        *,
        is_writable: bool,
    ) -> None:
        self._medium = medium
        self._clock = medium.clock
        self._folder = folder
        self._options = options
        self._board = board
        self._is_writable = is_writable
        self.id = namespace
        names = self._names = Names(namespace, medium.authenticator.key_id)
        self.replica: Replica = folder.open(namespace)
        self.reader = IndexReader(medium, names, self.replica)
        self.merger = Merger(medium, names, self.replica, self.reader)
        self.packs = PackBlobs(medium, names, self.replica, self._lose)
        self._inbox = Inbox(
            medium,
            names,
            self.replica,
            self.packs,
            self.reader,
            self.merger,
            options.touch_s,
        )
        self._sweeper = Sweeper(medium, names, self.replica)
        self._lock = self._clock.lock()
        self.is_open = False
        """Whether the index was read once. Before, nothing is held, and commits are refused."""
        self._is_merged_regularly = False
        """Whether another engine merges, as the last look has shown."""
        self._policy = options.policy
        self._limits = Limits(None, None)
        now = self._clock.monotonic()
        self.opened_at = now
        """Monotonic time at which the handle opened the namespace."""
        self._used_at = now
        self._open_at = now
        self._follow_at = self._list_at = self._totals_at = math.inf
        self._sweep_at = now + _SWEEP_CHECK_S * self._clock.random.random()

    def _lose(self, name: bytes) -> None:
        logger.warning(
            "a pack of %s is missing on the medium: its blocks are misses",
            self.id.hex(),
        )
        self._inbox.lose(name)

    def use(self) -> None:
        """Record that the handle is in use: it follows other engines more closely then."""
        now = self._clock.monotonic()
        was_idle = now - self._used_at > _IDLE_AFTER_S
        self._used_at = now
        if was_idle:
            self._follow_at = min(self._follow_at, now + self._options.refresh_s)

    # Index

    def open(self) -> None:
        """Read the index, unless it was read before.

        :raises StoreError: the medium failed; ``is_open`` stays False.
        """
        # a step may hold the lock for long, and each commit passes here
        if not self.is_open:
            self._open()

    def _open(self) -> None:
        with self._lock:
            if self.is_open:
                return
            now = self._clock.monotonic()
            self._open_at = now + _RETRY_S
            inbox = self.reader.open()
            self.merger.followed(None)
            self.is_open = True
            self._follow_at = now + self._options.refresh_s
            self._list_at = now + _LIST_S * self._clock.random.uniform(0.5, 1.0)
            self._totals_at = now + TOTALS_S * self._clock.random.random()
            if inbox:
                self.merger.turns.look_soon(now)

    def refresh(self) -> None:
        """Read everything that is durable now, commits that are not merged included.

        :raises StoreError: the medium failed.
        """
        with self._lock:
            self.open()
            self.reader.refresh(with_inbox=True)

    def commit(self, batch: CommitBatch) -> CommitResult:
        """See ``Backend.commit``."""
        self.open()
        self.use()
        return self._inbox.commit(batch)

    # Background work

    def due_at(self) -> float:
        """Return the monotonic time at which ``step`` has something to do."""
        if not self.is_open:
            return self._open_at
        due = [self._follow_at, self._list_at]
        if self._is_writable:
            due += [self._sweep_at, self._totals_at, self.merger.due_at()]
        return min(due)

    def step(self, policy: Policy) -> None:
        """Do what is due.

        :raises StoreError: the medium failed; the rest is done by later calls.
        """
        with self._lock:
            now = self._clock.monotonic()
            if not self.is_open:
                if now >= self._open_at:
                    self.open()
                return
            self._follow(now)
            if not self._is_writable:
                return
            if now >= self._totals_at or policy != self._policy:
                self._update_limits(policy, now)
            self.merger.step(self._limits)
            if now >= self._sweep_at:
                self._sweep_at = now + _SWEEP_CHECK_S * self._clock.random.uniform(
                    0.5, 1.5
                )
                if self._sweeper.is_due():
                    self._sweeper.sweep()

    def _update_limits(self, policy: Policy, now: float) -> None:
        is_idle = now - self._used_at > _IDLE_AFTER_S
        self._totals_at = now + (IDLE_TOTALS_S if is_idle else TOTALS_S)
        self._policy = policy
        if policy.capacity is not None or policy.ttl_s is not None:
            try:
                self._board.exchange(self.replica)
            except StoreError as error:  # merges go on with what is known
                logger.warning(
                    "%s: the totals of the store were not exchanged (%s)",
                    self.id.hex(),
                    error,
                )
        self._limits = self._board.limits(policy, self.id)
        self.merger.check_limits(self._limits)

    def _follow(self, now: float) -> None:
        """Read what other engines have published, if that is due."""
        is_idle = now - self._used_at > _IDLE_AFTER_S
        if now >= self._list_at:
            pause_s = _IDLE_LIST_S if is_idle else _LIST_S
            self._list_at = now + pause_s * self._clock.random.uniform(0.75, 1.25)
            inbox = self.reader.refresh(with_inbox=not self._is_merged_regularly)
            if self._is_writable:
                self.merger.delete_included()
            latest = self._medium.time.now() - _OLD_COMMIT_S
            if any(info.time < latest for info in inbox):
                self.merger.turns.look_soon(now)
        if now >= self._follow_at:
            self._look(now, is_idle=is_idle)
        elif self._is_writable and self.merger.is_merge_due():
            # Commits that others have merged meanwhile need not be merged again. If the medium
            # fails, so does the merge, which is then repeated after a pause.
            with suppress(StoreError):
                self._look(now, is_idle=is_idle)

    def _look(self, now: float, *, is_idle: bool) -> None:
        """Read ``latest``, and what it names."""
        pause_s = max(self._options.refresh_s, 0.05)
        if is_idle:
            pause_s = max(pause_s, _IDLE_FOLLOW_S)
        self._follow_at = now + pause_s * self._clock.random.uniform(0.75, 1.25)
        latest = self.reader.follow()
        self.merger.followed(latest)
        self._is_merged_regularly = latest is not None and self._is_merging(latest)
        if latest is not None:
            self._follow_at = max(
                self._follow_at, now + self._until_next_merge(latest.time)
            )

    def _until_next_merge(self, merged: float) -> float:
        """Return the seconds until a merge is expected after one that was announced at this time on
        the medium's clock; 0: it is not known. Until then, nothing new is announced.
        """
        pause_s = AGAIN_S + MERGE_S
        rest_s = merged + pause_s - self._medium.time.now()
        return rest_s if 0 < rest_s <= pause_s else 0.0

    def _is_merging(self, latest: Latest) -> bool:
        """Return whether another engine merges the commits of all: nobody else needs to look for
        old ones."""
        age_s = self._medium.time.now() - latest.time
        is_other = latest.writer != self.merger.writer
        return is_other and 0 <= age_s < _REGULAR_S

    def sweep(self) -> int:
        """Delete old blobs that nothing names, now; return their number."""
        with self._lock:
            self.open()
            return self._sweeper.sweep()

    def rebuild(
        self, progress: Callable[[int, int], None]
    ) -> tuple[list[FoundPack], Counter[str]]:
        """Name packs again that the index does not name; return them, and the number of skipped
        blobs by reason.

        :raises StoreError: the medium failed; packs that were named before stay.
        """
        with self._lock:
            self.refresh()
            rebuilder = Rebuilder(self._medium, self._names, self.replica, progress)
            return rebuilder.rebuild(), rebuilder.skipped

    def merge_state(self) -> MergeState:
        """See ``Backend.merge_state``."""
        with self._lock:
            infos = self._medium.listed(self._names.inbox)
            commits = [info for info in infos if self._names.is_commit(info.name)]
            latest = self.reader.follow()
        oldest = min((info.time for info in commits), default=None)
        if latest is None:
            return MergeState(len(commits), oldest, None, None)
        return MergeState(len(commits), oldest, latest.writer.hex(), latest.time)

    def index_file(self) -> Path:
        """Return the path of the file for an engine's index (``Backend.index_file``)."""
        return self._folder.path / "index"

    def discard(self) -> None:
        """Release the replica, which does not belong to the store any more."""
        self._folder.close(self.replica, keep=False)

    def close(self) -> None:
        """Publish waiting uses, and release the replica. Failures are only logged. Own commits that
        are not merged stay in the inbox.
        """
        is_clean = self.is_open
        try:
            if self._is_writable and self.is_open:
                self._inbox.write_uses()
        except StoreError as error:
            logger.warning("%s: the last uses are lost (%s)", self.id.hex(), error)
            is_clean = False
        self._folder.close(self.replica, keep=is_clean)
