"""Merging of one namespace's index: segments, bases, evictions, and the deletion of included
objects.

An object *includes* others if it contains their whole content and lists their names. An engine that
has read an object need not read the objects that it includes.

1. A *segment* includes commits: their contents, their names, and the evictions that they require.
   Afterwards, the commits are deleted. An object may be deleted whenever a durable object includes
   it, also after a pause of any length.
2. A segment also includes older segments of at most its own size (``_small_segments``). So few
   segments remain that no other one includes, and each byte is written again only when the segment
   that contains it doubles.
3. A *base* includes all objects of the index that its writer has read. Objects that a base or a
   segment includes are deleted ten minutes later: a slow reader must be able to finish.
4. Any engine may merge at any time, and two engines may merge the same commits, which costs
   requests. ``MergeSchedule`` decides which engine merges.
5. The work of one merge is bounded in commits, bytes and evictions. If work is left, the next merge
   follows at once.
6. The blobs of removed packs are deleted an hour after their tombstone: engines may still read
   them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec

from persistkv.errors import StoreError
from persistkv.storage.blobs import BlobInfo
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.clock import AGREEING_S, ROUNDING_S
from persistkv.storage.shared.format import (
    BASE_LEVEL,
    NONCE_BYTES,
    Delta,
    Latest,
    Names,
    encode,
    union,
)
from persistkv.storage.shared.index.deletions import Deletions
from persistkv.storage.shared.index.merge_schedule import MergeSchedule
from persistkv.storage.shared.index.reader import IndexReader
from persistkv.storage.shared.replica import Limits, Removals, Replica

logger = logging.getLogger(__name__)

MOST_COMMITS = 1000  # maximum number of commits in one merge
_MOST_BYTES = 8 << 20  # 8 MiB: maximum bytes of the commits in one merge
_MOST_EVICTED = 4096  # maximum number of packs and requests that one merge evicts
# 24 MiB: maximum size of a segment that includes older segments
_MOST_SEGMENT_BYTES = 24 << 20
PART_BYTES = 28 << 20  # 28 MiB: maximum size of one part of a base
_MOST_MERGES = 20  # maximum number of merges in ``write_again``
# 256 KiB: no base is written while all segments together are smaller
LEAST_BASE_BYTES = 256 << 10
# seconds after its first list at which a merge or a base is abandoned
_STALE_S = 3600.0
# 1/64: share of the capacity, or of a quota. If the content exceeds the limit by more, a commit
# waits for a merge with evictions.
_EXCESS_SHARE = 64
# seconds after its plan of evictions at which a merge is abandoned
_EVICTION_STALE_S = 30.0
# seconds from the inclusion of an object of the index to its deletion
INCLUDED_S = 600.0
_TOMBSTONES_KEPT_S = 7 * 86_400.0  # seven days: age at which a base drops a tombstone
OTHERS_BASE_S = 300.0  # least wait for a base of an engine that did not merge last
# seconds for which an engine checks that ``latest`` names the last object that it has written
_ANNOUNCED_S = 15.0
# maximum number of names that a segment or base includes although another object includes them
# already: about 1 MB
MOST_CARRIED = 10_000


class _SegmentPlan(NamedTuple):
    """Content of a segment before it is written."""

    segment: Delta
    """Commits, older segments, and tombstones of the removals."""
    removals: Removals
    """Packs and requests that the segment evicts."""
    planned: float
    """Monotonic time at which the removals were chosen."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything to merge or to evict."""
        return bool(self.segment.includes) or not self.segment.is_empty


class OwnCommit(NamedTuple):
    """A commit of this handle that no segment includes."""

    acknowledged: float
    """Monotonic time of the acknowledgement."""
    delta: Delta
    """Content of the commit."""


class Merger:
    """Merges the index of one namespace. Only one thread at a time may call its methods."""

    def __init__(
        self,
        medium: Medium,
        names: Names,
        replica: Replica,
        reader: IndexReader,
    ) -> None:
        self._medium = medium
        self._names = names
        self._replica = replica
        self._reader = reader
        self._clock = medium.clock
        self._objects = reader.objects
        self.writer = self._clock.random.randbytes(NONCE_BYTES)
        """Random name of this handle in ``latest``."""
        self.schedule = MergeSchedule(self._clock.random.random)
        """When this handle merges commits."""
        self.own_commits: dict[str, OwnCommit] = {}
        """Own commits that no segment includes, by name."""
        self.last_writer = b""
        """Name of the writer of ``latest``."""
        self._written = ""
        """Name of the object of the index that this handle has written last; empty: none."""
        self._written_at = -math.inf
        """Monotonic time at which that object was written; minus infinity: none was."""
        self._base_wanted_at = math.inf
        """Monotonic time at which this engine writes a base; infinity: none is planned."""
        self.deletions = Deletions(medium, names)
        """Deletions of blobs that merges have made superfluous."""

    # Schedule

    def due_at(self) -> float:
        """Return the monotonic time of the next merge, base or deletion."""
        merge_at = self._merge_due_at()
        deletion_at = self.deletions.due_at()
        return min(merge_at, self._base_wanted_at, deletion_at)

    def is_merge_due(self) -> bool:
        """Return whether the next ``step`` merges."""
        return self._clock.monotonic() >= self._merge_due_at()

    def _merge_due_at(self) -> float:
        """Return the monotonic time of the next merge."""
        now = self._clock.monotonic()
        oldest_own = self._oldest_own()
        return self.schedule.due_at(now, oldest_own)

    def is_over(self, limits: Limits, tenants: Iterable[bytes]) -> bool:
        """Return whether the content that is known here exceeds the capacity, or the quota of one
        of these tenants, by more than 1/64 (``_EXCESS_SHARE``).

        :param tenants: digests of the names of the tenants whose quotas are compared. Each
            comparison takes a transaction.
        """
        whole = limits.whole
        used = self._replica.disk_bytes()
        if whole is not None and used > _with_excess(whole.num_bytes):
            return True
        with_quota = limits.tenants.keys() & set(tenants)
        return any(self.is_tenant_over(limits, tenant) for tenant in with_quota)

    def is_tenant_over(self, limits: Limits, tenant: bytes) -> bool:
        """Return whether a tenant with a quota has more in this namespace than its bound, and 1/64
        of it (``_EXCESS_SHARE``)."""
        most = _with_excess(limits.tenants[tenant].num_bytes)
        return self._replica.tenant_bytes(tenant) > most

    def step(self, limits: Limits) -> None:
        """Merge, write a base, and delete blobs, each if it is due."""
        now = self._clock.monotonic()
        if self.is_merge_due():
            self.merge(limits)
        if now >= self._base_wanted_at:
            self.write_base()
        self.deletions.step()

    def _oldest_own(self) -> float | None:
        """Return the monotonic time at which the oldest own commit that no segment includes was
        acknowledged; None: there is no such commit."""
        self._drop_included_commits()
        # copy, because another thread may add a commit meanwhile
        waiting = list(self.own_commits.values())
        times = [commit.acknowledged for commit in waiting]
        return min(times, default=None)

    def _drop_included_commits(self) -> None:
        """Drop own commits that a segment includes."""
        # copy, because another thread may add a commit meanwhile
        names = list(self.own_commits)
        for name in names:
            if self._replica.is_included(name):
                self.own_commits.pop(name, None)

    def _drop_vanished_commits(self, listed: set[str], began: float) -> None:
        """Drop own commits that a list of the inbox lacks: another engine has merged them.

        Usually ``_drop_included_commits`` finds them. But an engine that was suspended may read
        only a later base: it includes the segment that named them, but does not name them itself.

        :param listed: names of the commits in the list.
        :param began: monotonic time before the list, which may lack later commits.
        """
        # copy, because another thread may add a commit meanwhile
        commits = list(self.own_commits.items())
        for name, commit in commits:
            is_older_than_list = commit.acknowledged < began
            if is_older_than_list and name not in listed:
                self.own_commits.pop(name, None)

    def record_latest(self, latest: Latest | None) -> None:
        """Record the content of ``latest``. Write it again if it lacks an own segment: of two
        engines that merge at the same time, one overwrites the ``latest`` of the other. Plan a base
        if one is wanted.

        :param latest: None: there is none, or it does not read.
        :raises StoreError: the medium failed.
        """
        if latest is not None:
            self._note_latest(latest)
            if self._is_missing_in(latest):
                # Writer and time stay those of the last merge. If many engines have merged at the
                # same time, each of them adds its segment here. If each also became the writer, the
                # writer would change before its next merge is due, and no engine would merge.
                self._write_latest(latest.writer, latest.time)
        self.plan_base()

    def _note_latest(self, latest: Latest) -> None:
        """Pass on to the schedule which engine has merged last, and when."""
        self.last_writer = latest.writer
        self.schedule.note_latest(
            self._clock.monotonic(),
            is_own=latest.writer == self.writer,
            written=self._announced_at(latest),
            time=latest.time,
        )

    def _announced_at(self, latest: Latest) -> float:
        """Return when ``latest`` was written, as monotonic time; minus infinity if the time in it
        is in the future, and so wrong."""
        age_s = self._medium.time.now() - latest.time
        if age_s < -ROUNDING_S:
            return -math.inf
        now = self._clock.monotonic()
        return now - age_s

    def _is_missing_in(self, latest: Latest) -> bool:
        """Return whether ``latest`` lacks the last object that this handle has written. The object
        counts only for 15 s (``_ANNOUNCED_S``), and only while no other object includes it."""
        age_s = self._clock.monotonic() - self._written_at
        is_recent = age_s <= _ANNOUNCED_S
        if not is_recent or not self._replica.is_unincluded(self._written):
            return False
        named = [name for name, _ in latest.recent]
        return self._written not in named

    def check_limits(self, limits: Limits) -> None:
        """Plan a merge if content has expired or exceeds the limits, even if no commit waits."""
        if self.would_evict(limits):
            self.schedule.plan_merge(self._clock.monotonic())

    def would_evict(self, limits: Limits) -> bool:
        """Return whether a merge now would evict anything; it never evicts pinned content."""
        now = self._expiry_time()
        removals = self._replica.plan_eviction(limits, now, at_most=1)
        return bool(removals.packs or removals.manifests)

    # Merges

    def merge(self, limits: Limits) -> None:
        """Merge the commits in the inbox into a segment, with the evictions that are necessary.

        :raises StoreError: the medium failed; a later merge does the rest.
        """
        began = self._clock.monotonic()
        self.schedule.begin_merge(began)
        commits = self._reader.list_commits()
        listed = {info.name for info in commits}
        self._drop_vanished_commits(listed, began)
        new = [info for info in commits if self._is_to_merge(info.name)]
        batch = _first_within_bounds(new)
        deltas = self._read_commits(batch)
        # the schedule keeps the pauses between merges short while other engines commit
        found_others = any(name not in self.own_commits for name in deltas)

        plan = self._plan_segment(batch, deltas, limits)
        if plan.has_work:
            self._publish(plan.segment, began, plan.planned)
            # the tombstones of these packs are durable now, so their blobs may be deleted later
            self.deletions.add_packs(plan.removals.packs)
            self._announce_segment()
        # delete the commits only now: the segment that includes them is durable
        self._delete_merged_commits(commits)

        num_removed = len(plan.removals.packs) + len(plan.removals.manifests)
        may_evict_more = num_removed >= _MOST_EVICTED
        has_more_commits = len(new) > len(batch)
        self.schedule.end_merge(
            found=bool(deltas),
            found_others=found_others,
            incomplete=may_evict_more or has_more_commits,
        )
        self.plan_base()

    def _plan_segment(
        self,
        batch: Sequence[BlobInfo],
        deltas: Mapping[str, Delta],
        limits: Limits,
    ) -> _SegmentPlan:
        """Return the content of the next segment; it is empty if there is nothing to merge or to
        evict.

        :param batch: commits that it includes.
        :param deltas: their contents by name. The replica has applied them, and may therefore
            exceed the limits.
        """
        # without commits, the segment only has evictions, and includes no older segments
        older: dict[str, Delta] = {}
        if deltas:
            older = self._older_segments(batch)

        planned = self._clock.monotonic()
        expiry_time = self._expiry_time()
        removals = self._replica.plan_eviction(
            limits, expiry_time, at_most=_MOST_EVICTED
        )
        # if the medium's time is unknown, ``entry_time`` is later than any time, so that no base
        # drops the tombstones as old
        removal_time = self._medium.entry_time()
        evictions = self._replica.tombstones(removals, removal_time)

        contents = [*deltas.values(), evictions, *older.values()]
        carried = self._included_in(older.values())
        includes = [*deltas, *older, *carried]
        segment = union(contents, includes)
        return _SegmentPlan(segment, removals, planned)

    def _delete_merged_commits(self, commits: Sequence[BlobInfo]) -> None:
        """Delete the commits that a segment or base includes."""
        names = [info.name for info in commits]
        self.deletions.delete(self._only_included(names))

    def _only_included(self, names: Iterable[str]) -> list[str]:
        """Return the names of the objects that another object includes."""
        return [name for name in names if self._replica.is_included(name)]

    def _is_to_merge(self, name: str) -> bool:
        """Return whether a commit in the inbox is to be merged."""
        reader = self._reader
        # A commit that cannot be read stays in the inbox. A commit that this handle is writing must
        # first be applied by the writing thread.
        if name in reader.unreadable or name in reader.publishing:
            return False
        return not self._replica.is_included(name)

    def _read_commits(self, infos: Sequence[BlobInfo]) -> dict[str, Delta]:
        """Return the content of commits by name, without missing and unreadable ones, and add it to
        the replica."""
        found = self._commit_contents(infos)
        # apply commits of other engines; own commits were applied when they were written
        contained = self._replica.contained
        new: list[tuple[str, Delta]] = []
        for name, delta in found.items():
            if name not in contained:
                new.append((name, delta))
        self._reader.apply(new)
        return found

    def _commit_contents(self, infos: Sequence[BlobInfo]) -> dict[str, Delta]:
        """Return the content of commits by name: own ones from memory, the rest from the medium. No
        time in it may be later than the commit itself: every reader replaces later times."""
        others = [info for info in infos if info.name not in self.own_commits]
        read = self._fetch_all(others)
        found: dict[str, Delta] = {}
        for info in infos:
            own = self.own_commits.get(info.name)
            if own is not None:
                found[info.name] = own.delta.clamped(info.time)
            elif info.name in read:
                found[info.name] = read[info.name].clamped(info.time)
        return found

    def _fetch_all(self, infos: Sequence[BlobInfo]) -> dict[str, Delta]:
        """Return the content of objects by name, without missing and unreadable ones."""
        found: dict[str, Delta] = {}
        read = self._medium.maintenance.each(self._reader.fetch, infos)
        for info, delta in read:
            if delta is not None:
                found[info.name] = delta
        return found

    def _older_segments(self, commits: Sequence[BlobInfo]) -> dict[str, Delta]:
        """Return the content of the older segments that the next segment includes, by name.

        :param commits: commits that the next segment includes.
        """
        num_bytes = 0
        for info in commits:
            # count the name, too, because the segment contains it
            num_bytes += info.size + len(info.name)
        chosen = self._small_segments(num_bytes)
        found = self._fetch_all(chosen)
        for info in chosen:
            if info.name not in found:
                # the segment is missing or unreadable: ignore it until a list shows it again
                self._reader.listed.pop(info.name, None)
        return found

    def _small_segments(self, num_bytes: int) -> list[BlobInfo]:
        """Return the older segments that the next segment includes: those that are no larger than
        the content that it has already.

        Sizes are compared by their numbers of binary digits, as in a log-structured merge tree. The
        segments that stay have different numbers of digits, so there are few. Each byte is written
        again about once per digit, because its segment grows each time.

        :param num_bytes: size of the commits that the next segment includes.
        """
        _, segments = self._base_and_segments()
        segments.sort(key=lambda info: info.size)
        chosen: list[BlobInfo] = []
        total_bytes = num_bytes
        for info in segments:
            is_larger = info.size.bit_length() > total_bytes.bit_length()
            if is_larger or total_bytes + info.size > _MOST_SEGMENT_BYTES:
                break
            if info.name not in self._reader.unreadable:
                chosen.append(info)
                total_bytes += info.size
        return chosen

    def _included_in(self, segments: Iterable[Delta]) -> list[str]:
        """Return the names of the objects that these segments include, and that still exist. The
        next segment names them, too, because its readers read it in place of these segments.

        While the medium refuses deletions, these names become many, and only the greatest are
        returned: names sort by level, so their objects include most of the others. Readers may then
        read the omitted objects again, which only takes time.
        """
        names: set[str] = set()
        for segment in segments:
            names.update(segment.includes)
        listed = self._reader.listed
        carried = sorted(names & listed.keys())
        return carried[-MOST_CARRIED:]

    def _expiry_time(self) -> float:
        """Return the medium's time if the machine's clock confirms it; else 0: nothing expires."""
        now = self._medium.time.now()
        difference_s = abs(now - self._clock.wall())
        return now if difference_s < AGREEING_S else 0.0

    def _publish(
        self,
        segment: Delta,
        began: float,
        planned: float,
    ) -> None:
        """Write a segment. The replica has its content already, except for the evictions.

        :param began: monotonic time at which the merge began to list commits.
        :param planned: monotonic time at which its evictions were chosen.
        :raises StoreError: the medium failed, or the process was paused for too long; nothing was
            applied.
        """
        # choose a higher level than those of the included segments: readers begin with the highest
        # level, and skip the objects that are included in it
        included_levels = [self._names.level(name) for name in segment.includes]
        level = 1 + max(included_levels, default=0)
        name = self._new_name(level)
        body = self._objects.body(name, segment)
        # If the process was paused, other engines may have merged the same commits, and may be
        # using the packs that this merge would evict.
        now = self._clock.monotonic()
        is_list_stale = now - began > _STALE_S
        are_evictions_stale = now - planned > _EVICTION_STALE_S
        if is_list_stale or are_evictions_stale:
            raise StoreError(
                f"{self._names.base}: the process was paused; the merge is repeated"
            )
        written = self._objects.put(name, body)
        lacking = Delta(
            removed=segment.removed,
            dropped=segment.dropped,
            includes=segment.includes,
        )
        self._reader.apply([(name, lacking)])
        self._note_written(written)

    def _new_name(self, level: int) -> str:
        """Return a name for an object of the index."""
        now = self._medium.time.now()
        return self._names.new_index(level, now, self._clock.random)

    def _note_written(self, info: BlobInfo) -> None:
        """Remember an object of the index that this handle has written, as if a list had shown
        it."""
        reader = self._reader
        reader.listed[info.name] = info
        reader.note_recent([info])
        self._written = info.name
        self._written_at = self._clock.monotonic()

    def _announce_segment(self) -> None:
        """Write ``latest`` after a merge, with the segments of other engines."""
        if self.last_writer != self.writer:
            # Another engine has merged last, perhaps at the same time. Read its segments now,
            # because ``latest`` must name them, too.
            self._reader.follow()
        self._announce()

    def _announce(self) -> None:
        """Write ``latest`` after a merge or base of this engine."""
        now = self._medium.time.now()
        self._write_latest(self.writer, now)
        self.last_writer = self.writer

    def _write_latest(self, writer: bytes, time: float) -> None:
        """Write ``latest``.

        :param writer: name of the handle that has written the last merge or base.
        :param time: time of that merge or base, on the medium's clock.
        """
        listed = self._reader.listed
        recent: list[tuple[str, int]] = []
        for info in self._reader.recent:
            # Name only objects that exist. An object that no other includes was not deleted; an
            # included one may have been, so the last list must show it.
            is_unincluded = self._replica.is_unincluded(info.name)
            if is_unincluded or info.name in listed:
                recent.append((info.name, info.size))
        latest = Latest(writer, time, recent)
        body = encode(latest)
        self._medium.put_sealed(self._names.latest, body, self._replica.namespace)

    # Bases

    def plan_base(self) -> None:
        """Plan a base if one is wanted, or cancel the plan. The engine that has merged last writes
        the base at once, other engines only after minutes, so that usually one engine writes it."""
        # each attempt with a damaged replica would fail: leave the base to other engines
        if self._replica.is_damaged or not self._is_base_wanted():
            self._base_wanted_at = math.inf
            return
        is_planned = self._base_wanted_at < math.inf
        if is_planned:
            return
        pause_s = 0.0
        if self.last_writer != self.writer:
            jitter = self._clock.random.random()
            pause_s = OTHERS_BASE_S * (1 + jitter)
        now = self._clock.monotonic()
        self._base_wanted_at = now + pause_s

    def _is_base_wanted(self) -> bool:
        """Return whether the segments that no object includes are large in comparison with the last
        base: readers without a replica read all of them."""
        base_bytes, segments = self._base_and_segments()
        # a single segment is read as fast as a base
        if len(segments) < 2:
            return False
        segment_bytes = sum(info.size for info in segments)
        # a base is as large as the whole index, so it is only written when a quarter was added
        least_bytes = max(LEAST_BASE_BYTES, base_bytes // 4)
        return segment_bytes > least_bytes

    def _base_and_segments(self) -> tuple[int, list[BlobInfo]]:
        """Return the bytes of the last base, and the segments. Only objects count that were listed
        and read, and that no other one includes."""
        base_bytes = 0
        segments: list[BlobInfo] = []
        for name, info in self._reader.listed.items():
            # ``is_unincluded`` is False, too, for an object that was not read
            if not self._replica.is_unincluded(name):
                continue
            if self._names.level(name) >= BASE_LEVEL:
                base_bytes += info.size
            else:
                segments.append(info)
        return base_bytes, segments

    def write_again(self, limits: Limits) -> Sequence[str]:
        """Write the whole index again, and erase the objects that it replaces, with their older
        versions; return what the medium keeps of them (``Blobs.erase``).

        :raises StoreError: the medium failed, or the replica is damaged.
        """
        # repeat until the inbox is empty; give up if other engines keep filling it
        for _ in range(_MOST_MERGES):
            self.merge(limits)
            commits = self._reader.refresh(inbox_age_s=0.0, stable=True)
            if not commits:
                break
        # write a base even if the index is a single object, which must be replaced, too
        self.write_base(least_objects=1)
        included = self._only_included(self._reader.listed)
        return self._medium.blobs.erase(self._names.index, included)

    def write_base(self, least_objects: int = 2) -> None:
        """Write a base: an object that includes all listed objects of the index that were read.

        :param least_objects: if the base would include fewer objects, it is not written.
        :raises StoreError: the medium failed, or the replica is damaged. The content of the index
            is unchanged, although some parts of the base may be written.
        """
        began = self._clock.monotonic()
        self._base_wanted_at = math.inf
        self._reader.refresh(stable=True)
        included = self._to_include()
        if len(included) < least_objects:
            return
        self._purge_tombstones()
        included_levels = [self._names.level(name) for name in included]
        level = max(BASE_LEVEL, 1 + max(included_levels))
        written: list[str] = []
        # close the dump even if a part is not written: an open dump holds a transaction, for which
        # the replica's ``close`` waits
        with closing(self._replica.dump(PART_BYTES)) as parts:
            # Write each part when the next one shows that it is not the last. The last part has
            # more content: it names the other parts, and the objects that the base includes.
            last = next(parts)
            for part in parts:
                name = self._write_part(level, last, began)
                written.append(name)
                last = part
        last = msgspec.structs.replace(last, includes=included, parts=written)
        # The last part has a higher level, so that readers meet it before the other parts, which
        # they may not need.
        self._write_part(level + 1, last, began)
        self._announce()

    def _purge_tombstones(self) -> None:
        """Purge old tombstones from the replica, so that the base does not have them.

        A wrong clock must not purge tombstones early, because the removed packs could return. While
        the machine's clock does not confirm the medium's, the time is 0, so no tombstone counts as
        old.
        """
        oldest_kept = self._expiry_time() - _TOMBSTONES_KEPT_S
        self._replica.purge(oldest_kept)

    def _to_include(self) -> list[str]:
        """Return the listed objects that were read: all that no object includes, and a bounded
        number of those that another object includes already."""
        unincluded: list[str] = []
        included: list[str] = []
        for name in self._reader.listed:
            if self._replica.is_unincluded(name):
                unincluded.append(name)
            elif self._replica.is_included(name):
                included.append(name)
        # keep the last names: they have the highest levels, and include most of the other objects
        return unincluded + included[-MOST_CARRIED:]

    def _write_part(
        self,
        level: int,
        part: Delta,
        began: float,
    ) -> str:
        """Write a part of a base; return its name.

        :param began: monotonic time at which the base was begun. After an hour, no part is written,
            because the list of the index is too old.
        :raises StoreError: the medium failed, or the base takes too long.
        """
        name = self._new_name(level)
        body = self._objects.body(name, part)
        took_s = self._clock.monotonic() - began
        if took_s > _STALE_S:
            raise StoreError(
                f"{self._names.base}: a base took more than an hour; it is repeated"
            )
        info = self._objects.put(name, body)
        # The content of the part came from the replica, which lacks only the names of the objects
        # that the part includes.
        lacking = Delta(includes=part.includes)
        self._reader.apply([(name, lacking)])
        self._note_written(info)
        return name

    def delete_included(self) -> None:
        """Delete each listed object of the index whose includer is listed, too, and ten minutes old
        by the medium's clock. Only the last merger does so.
        """
        if self.last_writer != self.writer:
            return
        deletable_before = self._medium.time.now() - INCLUDED_S
        listed = self._reader.listed
        names_to_delete: list[str] = []
        for name in listed:
            includer = self._replica.contained.get(name)
            if not includer or includer not in listed:
                continue
            included_at = listed[includer].time
            # the time is 0 if the medium has not told it
            if 0 < included_at < deletable_before:
                names_to_delete.append(name)
        self.deletions.delete(names_to_delete)


def _with_excess(num_bytes: int) -> int:
    """Return a bound in bytes plus 1/64, which engines may commit between two background merges."""
    return num_bytes + num_bytes // _EXCESS_SHARE


def _first_within_bounds(infos: Sequence[BlobInfo]) -> list[BlobInfo]:
    """Return the first of the commits, up to the bounds of one merge. Lists are sorted by name, and
    names are random, so no engine's commits come first."""
    found: list[BlobInfo] = []
    num_bytes = 0
    for info in infos[:MOST_COMMITS]:
        num_bytes += info.size
        # take at least one commit, even if it is larger than the bound
        if found and num_bytes > _MOST_BYTES:
            break
        found.append(info)
    return found
