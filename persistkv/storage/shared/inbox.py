"""Commits of one handle to one namespace.

1. Packs are uploaded in parallel, together with one blob that holds the keys of the requests.
   Nothing names them yet.
2. One object in the inbox describes the whole commit. Its durable write is the commit.
3. The writer applies it to its replica at once. A merge shows it to other engines.

A commit is acknowledged only if, after its last request, less than 12 hours have passed since its
first, on the medium's clock and on the machine's: a sweep deletes blobs that nothing names after 24
hours. If the outcome of a request stays unknown, the commit is not acknowledged; it may appear all
the same, under names that no other commit has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch, CommitResult, ManifestWrite
from persistkv.storage.format.manifest import encode_manifest
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.clock import ROUNDING_S
from persistkv.storage.shared.format import (
    LATEST_TIME,
    MAX_OBJECT_BYTES,
    Delta,
    ManifestEntry,
    Names,
    PackEntry,
    Pin,
    Tombstone,
    UseEntry,
    union,
)
from persistkv.storage.shared.index.merge import Merger, OwnCommit
from persistkv.storage.shared.index.reader import IndexReader
from persistkv.storage.shared.packs import PackBlobs, Upload
from persistkv.storage.shared.replica import (
    NO_OBJECT,
    CommitPlan,
    KeysPlace,
    Replica,
)
from persistkv.storage.shared.replica.rows import request_digest

# 12 hours: longest time from the start of a commit to its acknowledgement
MOST_COMMIT_S = 12 * 3600.0
# seconds after which the next use publishes the waiting uses in a commit of their own
_TOUCH_S = 600.0
# maximum size of a commit; a quarter, because a merge writes several into one object
_MOST_BODY_BYTES = MAX_OBJECT_BYTES // 4


class _Start(NamedTuple):
    """The beginning of a commit, on each clock, in seconds."""

    medium: float
    """Time of the first request; ``LATEST_TIME`` while the medium's time is unknown."""
    monotonic: float
    """Monotonic time, which stops while the machine is suspended."""
    wall: float
    """Time of the machine, which may jump."""


class Inbox:
    """Writer of commits, see the top of this file. Only one thread at a time may commit."""

    def __init__(
        self,
        medium: Medium,
        names: Names,
        replica: Replica,
        packs: PackBlobs,
        reader: IndexReader,
        merger: Merger,
    ) -> None:
        self._medium = medium
        self._names = names
        self._replica = replica
        self._packs = packs
        self._reader = reader
        self._merger = merger
        self._clock = medium.clock
        self._objects = reader.objects
        self._uses: dict[bytes, float] = {}
        """Unpublished uses, oldest first: pack id → time on the medium's clock."""
        self._lost: dict[bytes, float] = {}
        """Unpublished tombstones of missing blobs: pack id and nonce of a blob → time of its
        tombstone, on the medium's clock."""
        self._published_at = self._clock.monotonic()
        """Monotonic time of the last commit."""

    def commit(self, batch: CommitBatch) -> CommitResult:
        """Upload the packs of a batch, write its commit to the inbox, and apply it to the replica
        (``Backend.commit``). A batch that only uses packs is not written now."""
        plan = self._replica.plan(batch)
        # the replica has changes that the caller has not seen: it must read them first
        if batch.seen is not None and plan.cursor != batch.seen:
            return CommitResult(batch.seen, stale=True)
        used = _used_packs(batch, plan)
        if not _changes_anything(batch, plan):
            self._record_uses(used)
            return CommitResult(plan.cursor)

        start = self._start()
        upload = self._packs.upload(plan.missing, batch.manifests, batch.memory)
        # A sweep deletes old uploads that nothing names, so a commit that has taken too long must
        # not name them. ``_publish`` checks the medium's clock, too.
        self._check_age(start)
        # a tenant may have been forgotten during the upload
        self._medium.records.refuse_forgotten(batch)
        # an unknown time is later than all others, so that the replies to the uploads replace it
        earliest = min(start.medium, upload.earliest)
        start = start._replace(medium=earliest)

        delta = self._delta(batch, plan, upload, used)
        cursor_before, cursor_after = self._publish(delta, start)
        removals = plan.removals
        # the tombstones of these packs are durable now, so their blobs may be deleted later
        self._merger.deletions.add_packs(removals.packs)
        # If other objects were applied since the plan, the caller must read their changes, too,
        # which begin at the cursor of the plan.
        nothing_in_between = cursor_before == plan.cursor
        cursor = cursor_after if nothing_in_between else plan.cursor
        return CommitResult(cursor, removals.tables)

    def _start(self) -> _Start:
        """Return the present time on each clock. While that of the medium is unknown, it is
        ``LATEST_TIME``: ``commit`` takes the earliest time in the replies to the uploads."""
        clock = self._clock
        return _Start(
            medium=self._medium.time.now() or LATEST_TIME,
            monotonic=clock.monotonic(),
            wall=clock.wall(),
        )

    def _check_age(self, start: _Start, written: float | None = None) -> None:
        """Raise a StoreError if any clock shows that a commit takes too long. The medium's clock
        may be wrong in some replies; the monotonic clock stops while the machine is suspended.

        :param written: time of a request of the commit, on the medium's clock; None: compare only
            the machine's clocks.
        """
        clock = self._clock
        monotonic_s = clock.monotonic() - start.monotonic
        wall_s = clock.wall() - start.wall
        age_s = max(monotonic_s, wall_s)
        if written is not None:
            on_medium_s = written - start.medium
            age_s = max(age_s, on_medium_s)
        if age_s > MOST_COMMIT_S:
            raise StoreError("the commit took more than 12 hours and does not count")

    def _delta(
        self,
        batch: CommitBatch,
        plan: CommitPlan,
        upload: Upload,
        used: Sequence[bytes],
    ) -> Delta:
        """Return the content of a commit.

        :param used: packs that it uses, besides those that its requests name.
        """
        now = self._medium.entry_time()
        packs: list[PackEntry] = []
        for entry in upload.entries:
            packs.append(msgspec.structs.replace(entry, time=now))
        uses = _uses_at(now, used, batch.manifests)
        content = Delta(packs=packs, uses=uses)
        requests = self._requests(batch.manifests, upload.places, plan.pins, now)
        # end the packs and requests that the batch removes
        removals = self._replica.tombstones(plan.removals, now)
        return union([content, requests, removals])

    def _requests(
        self,
        writes: Sequence[ManifestWrite],
        places: Sequence[KeysPlace],
        pins: Sequence[tuple[bytes, bool]],
        now: float,
    ) -> Delta:
        """Return the requests that a commit writes, pins or unpins. Each change of a request gets a
        version above all that this engine knows of it; that of a written request is also at least
        ``_least_version``, because other engines may know greater ones.

        :param places: where the keys of each written request are.
        :param pins: see ``CommitPlan``.
        """
        written_digests = [request_digest(write.manifest.id) for write in writes]
        pinned_digests = [digest for digest, _ in pins]
        versions = self._replica.versions([*written_digests, *pinned_digests])

        least_version = self._least_version()
        manifests: list[ManifestEntry] = []
        written = zip(writes, written_digests, places, strict=True)
        for write, digest, place in written:
            version = max(versions[digest] + 1, least_version)
            versions[digest] = version
            manifest = _manifest_entry(write, place, digest, version, now)
            manifests.append(manifest)
        # add pins after manifests: the version of a pin is greater than that of the write
        pin_entries: list[Pin] = []
        for digest, pinned in pins:
            versions[digest] += 1
            pin_entries.append(Pin(digest, versions[digest], pinned))
        return Delta(manifests=manifests, pins=pin_entries)

    def _least_version(self) -> int:
        """Return the least version of a request. In a store with forgotten tenants, it is the
        medium's time in milliseconds. An engine that has not read the record of a tenant yet may
        hold greater versions of the request than this replica, and must not take the new version
        for an older one.
        """
        medium = self._medium
        if not medium.records.forgotten.tenants:
            return 1
        milliseconds = int(1000 * medium.time.now())
        return max(1, milliseconds)

    def _publish(
        self,
        delta: Delta,
        start: _Start,
    ) -> tuple[bytes, bytes]:
        """Write a commit to the inbox, with the uses and tombstones that wait for one, and apply it
        to the replica; return the cursors of the replica before and after.

        :raises StoreError: the commit is too large, took over 12 hours, or was perhaps not written.
        """
        # Copy what this commit publishes: other threads may add tombstones meanwhile
        # (``remove_missing``), and uses are deleted while the copy is read (``_forget_published``).
        uses = dict(self._uses)
        lost = dict(self._lost)
        waiting = _delta_of_waiting(uses, lost)
        delta = union([delta, waiting])
        name = self._names.new_commit(self._clock.random)
        body = self._objects.body(name, delta)
        if len(body) > _MOST_BODY_BYTES:
            text = f"a commit with {len(body)} bytes of key tables: commit fewer packs at once"
            raise StoreError(text)

        # The reader must not apply the commit when a list shows it, because this call returns the
        # cursors before and after it.
        publishing = self._reader.publishing
        publishing.add(name)
        try:
            written = self._objects.put(name, body).time
            # check the age after the write, which the medium may have executed late: a commit that
            # took too long is not acknowledged, although it may appear
            self._check_age(start, written)
            # Limit the times in the content to the time of the object, as other handles do when
            # they read it. The reply may have a time that is wrong, or rounded down.
            present = self._medium.time.time_of_use()
            latest = max(written, present) + ROUNDING_S
            delta = delta.clamped(latest)
            cursors = self._replica.apply([(name, delta)])
        finally:
            publishing.discard(name)

        now = self._clock.monotonic()
        # keep the content, so that the next merge of this engine need not read it
        self._merger.own_commits[name] = OwnCommit(now, delta)
        self._merger.schedule.note_commit(now)
        self._published_at = now
        self._forget_published(uses, lost)
        return cursors

    def _forget_published(
        self,
        uses: Mapping[bytes, float],
        lost: Mapping[bytes, float],
    ) -> None:
        """Remove published uses and lost packs from those that wait; a pack that was used again
        since has a later time, and keeps waiting."""
        for pack_id, time in uses.items():
            is_latest_use = self._uses.get(pack_id) == time
            if is_latest_use:
                del self._uses[pack_id]
        for name in lost:
            self._lost.pop(name, None)

    # Uses

    def _record_uses(self, pack_ids: Sequence[bytes]) -> None:
        """Record a use of packs, for the next commit. Publish uses that have waited for long."""
        now = self._medium.time.time_of_use()
        for pack_id in self._replica.held(pack_ids):
            # delete an earlier use first, so that the dict stays in the order of times
            self._uses.pop(pack_id, None)
            self._uses[pack_id] = now
        waited_s = self._clock.monotonic() - self._published_at
        if self._uses and waited_s >= _TOUCH_S:
            self.write_uses()

    def write_uses(self) -> None:
        """Publish waiting uses and tombstones in a commit of their own.

        :raises StoreError: the commit failed; the uses and tombstones wait for the next commit.
        """
        if self._uses or self._lost:
            self._publish(Delta(), self._start())

    def remove_missing(self, name: bytes) -> None:
        """Remove a pack whose blob is missing: now from the replica, with the next commit from the
        index. Any thread may call this.
        """
        now = self._medium.entry_time()
        self._lost[name] = now
        removal = Delta(removed=[Tombstone(name, now)])
        self._replica.apply([(NO_OBJECT, removal)])


def _changes_anything(batch: CommitBatch, plan: CommitPlan) -> bool:
    """Return whether a batch needs a commit of its own: it adds, removes or pins something. Uses
    alone wait for the next commit."""
    packs_to_upload = plan.missing
    removals = plan.removals
    changes = (
        packs_to_upload,
        batch.manifests,
        plan.pins,
        removals.packs,
        removals.manifests,
    )
    return any(changes)


def _used_packs(batch: CommitBatch, plan: CommitPlan) -> list[bytes]:
    """Return the ids of the packs that a batch uses and does not add. To store a pack that is held
    is a use."""
    missing = {pack.pack_id for pack in plan.missing}
    # these packs are held, so they are not uploaded again
    held = [pack.pack_id for pack in batch.packs if pack.pack_id not in missing]
    return [*batch.touches, *held]


def _uses_at(
    time: float,
    used: Sequence[bytes],
    writes: Sequence[ManifestWrite],
) -> list[UseEntry]:
    """Return the uses of a commit at a time: of packs, and of those that its requests name."""
    # a dict is an ordered set: it has each pack once
    pack_ids = dict.fromkeys(used)
    for write in writes:
        pack_ids.update(dict.fromkeys(write.packs))
    if not pack_ids:
        return []
    return [UseEntry(time, b"".join(pack_ids))]


def _manifest_entry(
    write: ManifestWrite,
    place: KeysPlace,
    digest: bytes,
    version: int,
    time: float,
) -> ManifestEntry:
    """Return a request as a commit lists it."""
    packs = dict.fromkeys(write.packs)
    return ManifestEntry(
        digest=digest,
        version=version,
        time=time,
        head=encode_manifest(write.manifest),
        packs=b"".join(packs),
        keys=place.nonce,
        offset=place.offset,
        length=place.length,
        data_key=place.data_key,
    )


def _delta_of_waiting(
    uses: Mapping[bytes, float],
    lost: Mapping[bytes, float],
) -> Delta:
    """Return a delta with uses and lost packs.

    :param uses: pack id → time, in the order of the times.
    :param lost: pack id and nonce of a missing blob → time of its tombstone.
    """
    use_entries: list[UseEntry] = []
    # write one entry for all packs that were used at the same time
    by_time = groupby(uses, key=uses.__getitem__)
    for time, pack_ids in by_time:
        joined_ids = b"".join(pack_ids)
        use_entries.append(UseEntry(time, joined_ids))
    removed = [Tombstone(name, time) for name, time in lost.items()]
    return Delta(uses=use_entries, removed=removed)
