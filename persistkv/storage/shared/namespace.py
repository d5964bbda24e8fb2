"""One namespace of a shared store, as one handle uses it: its replica, its commits and its
background work."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from persistkv.errors import QuotaExceededError, StoreError
from persistkv.storage.backend import CommitBatch, CommitResult
from persistkv.storage.catalogue.transaction import bytes_by_tenant
from persistkv.storage.format.pack import PackTable
from persistkv.storage.policy import Policy
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.forgetting.erasing import Erased, Eraser
from persistkv.storage.shared.format import Names
from persistkv.storage.shared.inbox import Inbox
from persistkv.storage.shared.index.follower import Follower
from persistkv.storage.shared.index.merge import Merger
from persistkv.storage.shared.index.reader import IndexReader
from persistkv.storage.shared.index.rebuild import Rebuilder
from persistkv.storage.shared.index.sweep import Sweeper
from persistkv.storage.shared.index.totals import NamespaceLimits, TotalsBoard
from persistkv.storage.shared.options import SharedOptions
from persistkv.storage.shared.packs import PackBlobs
from persistkv.storage.shared.replica import Removals, Replica, ReplicaFolder
from persistkv.storage.stats import MergeState
from persistkv.tenants import tenant_digest

logger = logging.getLogger(__name__)

_RETRY_S = 5.0  # seconds until the index is tried again after a failure


class SharedNamespace:
    """A namespace that a handle has opened. Any thread may read; one thread at a time may commit,
    another one steps.

    :param namespace: id of the namespace.
    :param folder: directory of the replica.
    :param board: totals of all namespaces of the store, from which the limits of this one follow.
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
        self._folder = folder
        self._is_writable = is_writable
        self.names = Names(namespace, medium.keys.keyring_id)
        """Names of its blobs."""
        self.replica: Replica = folder.open(namespace)
        self.reader = IndexReader(medium, self.names, self.replica)
        """Reads objects of the index into the replica."""
        self.merger = Merger(medium, self.names, self.replica, self.reader)
        """Merges commits, and deletes blobs that merges have replaced."""
        self.packs = PackBlobs(medium, self.names, self.replica, self._remove_missing)
        """Uploads and reads packs."""
        self._inbox = Inbox(
            medium,
            self.names,
            self.replica,
            self.packs,
            self.reader,
            self.merger,
        )
        """Writes commits."""
        self.follower = Follower(
            medium,
            self.reader,
            self.merger if is_writable else None,
            options.refresh_s,
        )
        """Reads the commits of other engines, when it is time."""
        self._limits = NamespaceLimits(board, self.replica, medium, options.policy)
        """Limits that merges enforce."""
        self._sweeper = Sweeper(medium, self.names, self.replica)
        """Deletes old blobs that nothing names."""
        clock = medium.clock
        self._lock = clock.lock()
        """Held while the index is read or merged, and while the limits change: a step may hold it
        for long. Commits take it only to open the index and to make room."""
        self.is_open = False
        """Whether the index was read once. Before, nothing is held, and commits are refused."""
        self._open_at = clock.monotonic()
        """Monotonic time of the next attempt of ``step`` to read the index for the first time."""

    def _remove_missing(self, name: bytes) -> None:
        """Log a pack whose blob is missing, and remove it from the index; ``name``: its pack id and
        nonce."""
        text = "a pack of %s is missing on the medium: its blocks are misses"
        logger.warning(text, self.replica.namespace.hex())
        self._inbox.remove_missing(name)

    # Index

    def open(self) -> None:
        """Read the index, unless it was read before.

        :raises StoreError: the medium failed; ``is_open`` stays False.
        """
        # check without the lock first: a step may hold it for long, and each commit comes here
        if not self.is_open:
            self._open()

    def _open(self) -> None:
        """Read the index and begin to follow it, unless another thread has done so."""
        with self._lock:
            if self.is_open:
                return
            now = self._medium.clock.monotonic()
            # if this attempt fails, ``step`` makes the next one at this time
            self._open_at = now + _RETRY_S
            self._remove_forgotten()
            inbox = self.reader.refresh(inbox_age_s=0.0, stable=True)
            # plan a base, because the index may consist of many objects
            self.merger.plan_base()
            self.is_open = True
            self.follower.start()
            self._limits.start()
            # plan a merge: the engine that has written the waiting commits may have been killed
            if inbox:
                self.merger.schedule.plan_merge(now)

    def refresh(self) -> None:
        """Read everything that is durable now, commits that are not merged included.

        :raises StoreError: the medium failed.
        """
        with self._lock:
            self.open()
            self._remove_forgotten()
            self.reader.refresh(inbox_age_s=0.0)

    def _remove_forgotten(self) -> None:
        """Remove what the replica holds of tenants that were forgotten since the last call."""
        had_traces = self.replica.has_traces
        self.replica.remove_forgotten()
        if had_traces or not self.replica.has_traces:
            return
        # After the first removal, delete the file in which the last process has saved the engine's
        # index: it has fingerprints of the tenant's keys. The engine writes the next file, without
        # them, only when it ends.
        self.index_file().unlink(missing_ok=True)

    def erase(self, tenant: str, removals: Removals) -> Sequence[str]:
        """Delete the blobs of a tenant that the index names; see ``Eraser.erase``."""
        eraser = Eraser(self._medium, self.names, self.replica, tenant)
        return eraser.erase(removals)

    def erase_rest(self, tenant: str) -> Erased:
        """Delete the blobs of a tenant that the index does not name, after its record was written;
        without a key, write the index again without the tenant.

        :raises StoreError: the medium failed; some of the blobs may be deleted.
        """
        with self._lock:
            self._remove_forgotten()
            eraser = Eraser(self._medium, self.names, self.replica, tenant)
            erased = eraser.erase_unnamed()
            # the index needs no change: destroyed keys seal the tenant's content in it
            if self._medium.seal.encrypts:
                return erased
            left_of_index = self.merger.write_again(self._limits.current)
            all_left = [*erased.left, *left_of_index]
            return erased._replace(left=all_left)

    def commit(self, batch: CommitBatch) -> CommitResult:
        """Make a batch durable, after making room for it; see ``Inbox.commit``.

        :raises QuotaExceededError: see ``_check_quotas``.
        :raises StoreError: the medium or the replica failed.
        """
        self.open()
        self.follower.note_use()
        # make room only for new content: deletions must not wait for a merge, nor fail with it
        if batch.packs or batch.manifests:
            self._make_room(batch)
        # check the quotas last, because the evictions may have made room in them
        self._check_quotas(batch)
        return self._inbox.commit(batch)

    def _make_room(self, batch: CommitBatch) -> None:
        """Merge with evictions before a commit if the content exceeds the capacity, or the quota of
        a tenant of the batch, by so much that merges in the background do not keep up.

        :raises StoreError: the medium failed; nothing may be added.
        """
        tenants = {tenant_digest(pack.tenant) for pack in batch.packs}
        if not self.merger.is_over(self._limits.current, tenants):
            return
        with self._lock:
            # read the limits again, because a step that held the lock may have changed them
            limits = self._limits.current
            # do not merge if nothing can be evicted: all that is left may be pinned
            if not self.merger.would_evict(limits):
                return
            # read ``latest`` first, because another engine may have evicted meanwhile
            self.follower.read_latest()
            if self.merger.is_over(limits, tenants):
                self.merger.merge(limits)

    def _check_quotas(self, batch: CommitBatch) -> None:
        """Refuse packs for which no eviction can make room in the quota of their tenant.

        :raises QuotaExceededError: they are larger than the quota, or pinned content exceeds it.
        """
        # skip the check for a batch that also deletes: its new packs replace the deleted ones
        if batch.deletions or batch.bad:
            return
        limits = self._limits.current
        for tenant, num_bytes in bytes_by_tenant(batch.packs).items():
            digest = tenant_digest(tenant)
            bound = limits.tenants.get(digest)
            if bound is None:
                continue
            is_over = self.merger.is_tenant_over(limits, digest)
            # nothing can be evicted if all packs of the tenant are pinned
            is_stuck = is_over and not self.replica.has_evictable(digest)
            if is_stuck or num_bytes > bound.limit:
                raise QuotaExceededError(tenant, num_bytes, bound.limit)

    # Background work

    def plan_exchange(self) -> None:
        """Make the next step exchange totals with other namespaces, also if this one is idle."""
        self._limits.due_at = self._medium.clock.monotonic()

    def due_at(self) -> float:
        """Return the monotonic time at which ``step`` has something to do."""
        if not self.is_open:
            return self._open_at
        if not self._is_writable:
            return self.follower.due_at()
        return min(
            self.follower.due_at(),
            self.merger.due_at(),
            self._limits.due_at,
            self._sweeper.due_at,
        )

    def step(self, policy: Policy) -> None:
        """Do the background work that is due.

        :raises StoreError: the medium failed; the rest is done by later calls.
        """
        with self._lock:
            # do this even before the index is read: a replica of an earlier process has content
            self._remove_forgotten()
            if not self.is_open:
                self._open_if_due()
                return
            self.follower.step()
            if not self._is_writable:
                return
            # exchange totals before the merge, which evicts by them
            if self._limits.is_due(policy):
                self._limits.refresh(policy, is_idle=self.follower.is_idle())
                self.merger.check_limits(self._limits.current)
            self.merger.step(self._limits.current)
        # sweep without the lock: a sweep may take many minutes, and commits that need room wait for
        # the lock
        self._sweeper.step()

    def _open_if_due(self) -> None:
        """Read the index for the first time, unless the last attempt has failed just now."""
        if self._medium.clock.monotonic() >= self._open_at:
            self.open()

    def sweep(self) -> int:
        """Delete old blobs that nothing names, now; return their number."""
        self.open()
        return self._sweeper.sweep()

    def rebuild(
        self,
        progress: Callable[[int, int], None],
    ) -> tuple[list[PackTable], Counter[str]]:
        """Commit packs again that the index does not name; return their tables, and the number of
        skipped blobs by reason.

        :raises StoreError: the medium failed; packs that were committed before stay committed.
        """
        with self._lock:
            self.refresh()
            rebuilder = Rebuilder(self._medium, self.names, self.replica, progress)
            return rebuilder.rebuild(), rebuilder.skipped

    def merge_state(self) -> MergeState:
        """Return the number and age of commits that wait for a merge, and who merged last."""
        # hold the lock, because only one thread at a time may use the reader
        with self._lock:
            commits = self.reader.list_commits()
            latest = self.reader.follow()
        times = [info.time for info in commits]
        oldest = min(times, default=None)
        waiting = len(commits)
        if latest is None:
            return MergeState(waiting, oldest, merged_by=None, merged_at=None)
        writer = latest.writer.hex()
        return MergeState(waiting, oldest, merged_by=writer, merged_at=latest.time)

    def index_file(self) -> Path:
        """Return the path of the file for an engine's index (``Backend.index_file``)."""
        return self._folder.path / "index"

    def discard(self) -> None:
        """Release the replica for good: the store to which it belongs was deleted."""
        self._folder.close(self.replica, keep=False)

    def close(self) -> None:
        """Publish waiting uses, and release the replica. Failures are only logged. Own commits that
        are not merged stay in the inbox.
        """
        replica = self.replica
        is_clean = self.is_open
        try:
            if self._is_writable and self.is_open:
                self._inbox.write_uses()
        except StoreError as error:
            text = "%s: the last uses are lost (%s)"
            logger.warning(text, replica.namespace.hex(), error)
            # The replica may lack packs (``Inbox.remove_missing``) whose tombstones could not be
            # written. So the next process must read the whole index.
            is_clean = False
        self._folder.close(replica, keep=is_clean)
