"""Merging of one namespace's index: segments, bases, evictions, and the deletion of included
objects.

An object *includes* others if it contains their whole content and lists their names. Engines that
have read it need not read these any more.

1. A *segment* includes commits: their contents, their names, and the evictions that they require.
   Afterwards, the commits are deleted. An object may be deleted whenever a durable object includes
   it, also after a pause of any length.
2. A segment also includes older segments of at most its own size (``_older_segments``). So few
   segments remain that no other one includes, and each byte is written again only when the segment
   that contains it doubles.
3. A *base* includes all objects of the index that its writer has read. Objects that a base or a
   segment includes are deleted ten minutes later: a slow reader must be able to finish.
4. Any engine may merge at any time, and two engines may merge the same commits, which costs
   requests. ``MergeSchedule`` decides which engine merges.
5. The work of one merge is bounded in commits, bytes and evictions. If any are left, the next merge
   follows at once.
6. The blobs of removed packs are deleted an hour after their tombstone: engines may still read
   them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from persistkv.errors import StoreError
from persistkv.storage.blobs import BlobInfo
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.clock import AGREEING_S, ROUNDING_S
from persistkv.storage.shared.format import (
    BASE_LEVEL,
    LATEST_TIME,
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
from persistkv.storage.shared.replica import Limits, Replica

logger = logging.getLogger(__name__)

MOST_COMMITS = 1000  # per merge
_MOST_BYTES = 8 << 20  # 8 MiB of commits per merge
_MOST_EVICTED = 4096  # packs and requests per merge
_MOST_SEGMENT_BYTES = 24 << 20  # 24 MiB: of a segment that includes older ones
_PART_BYTES = 28 << 20  # 28 MiB: of a base
_MOST_MERGES = 20  # before the index is written again, while engines commit
_LEAST_BASE_BYTES = 256 << 10  # 256 KiB of segments: fewer are not worth a base
_STALE_S = 3600.0  # age of the first list at which a merge or a base is abandoned
# 1/64 of the capacity or a quota: by which each writer may exceed it between two merges
_EXCESS_SHARE = 64
_EVICTION_STALE_S = 30.0  # age of a plan of evictions at which its merge is abandoned
_INCLUDED_S = 600.0  # until included objects of the index are deleted
_TOMBSTONES_KEPT_S = 7 * 86_400.0  # seven days: until a base drops a tombstone
_OTHERS_BASE_S = 300.0  # until another engine than the last merger writes a base
# after a segment was written: as long as it is checked that ``latest`` names it
_ANNOUNCED_S = 15.0
# names that are included already and that a segment or base includes again: about 1 MB
_MOST_CARRIED = 10_000


class OwnCommit(NamedTuple):
    """A commit of this handle that no segment includes."""

    acknowledged: float
    """Monotonic time."""
    delta: Delta


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
        self.own: dict[str, OwnCommit] = {}
        """Own commits that no segment includes, by name."""
        self.last_writer = b""
        """Name of the writer of ``latest``."""
        self._written = ""
        """Object of the index that this handle has written last."""
        self._written_at = -math.inf
        """Monotonic time of its writing."""
        self._base_wanted_at = math.inf
        """Monotonic time at which this engine writes a base; infinity: none is planned."""
        self.deletions = Deletions(medium, names)
        """Deletions of blobs that merges have made superfluous."""

    # Schedule

    def due_at(self) -> float:
        """Return the monotonic time of the next merge, base or deletion."""
        return min(self._merge_at(), self._base_wanted_at, self.deletions.due_at())

    def is_merge_due(self) -> bool:
        """Return whether the next ``step`` merges."""
        return self._clock.monotonic() >= self._merge_at()

    def _merge_at(self) -> float:
        """Return the monotonic time of the next merge."""
        now = self._clock.monotonic()
        return self.schedule.due_at(now, self._oldest_own())

    def is_over(self, limits: Limits, tenants: Iterable[bytes]) -> bool:
        """Return whether the content that is known here exceeds the capacity, or the quota of one
        of these tenants, by more than what engines commit between two merges in the background.

        :param tenants: digests of their names: each quota that is compared takes a transaction.
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
        """Return when the oldest own commit was acknowledged that no segment includes; None: there
        is none."""
        # Copies, because another thread may commit meanwhile. ``contained`` has an includer once
        # a segment includes the commit.
        for name in list(self.own):
            if self._replica.contained.get(name):
                self.own.pop(name, None)
        waiting = list(self.own.values())
        times = [commit.acknowledged for commit in waiting]
        return min(times, default=None)

    def _forget_own(self, listed: set[str], began: float) -> None:
        """Forget own commits that are missing in a list that began after their acknowledgement:
        another engine has merged them. After a suspension, this engine may read only a base that
        includes the segment, so ``contained`` never tells.

        :param listed: names of the commits in the list.
        :param began: monotonic time before the list.
        """
        commits = list(self.own.items())
        for name, commit in commits:
            is_listed = name in listed or commit.acknowledged >= began
            if not is_listed:
                self.own.pop(name, None)

    def followed(self, latest: Latest | None) -> None:
        """Record the content of ``latest``. Write it again if it lacks an own segment: of two
        engines that merge at the same time, one overwrites the ``latest`` of the other. Plan a base
        if one is wanted.

        :param latest: None: there is none.
        :raises StoreError: the medium failed.
        """
        if latest is not None:
            self._note_latest(latest)
            if self._is_missing_in(latest):
                # Writer and time stay those of the last merge. If many engines have merged at the
                # same time, each adds its segment: if each became the writer, none would stay it
                # for long enough to merge again, and none of the others would merge meanwhile.
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
        is ahead of the medium's, and so wrong."""
        age_s = self._medium.time.now() - latest.time
        if age_s < -ROUNDING_S:
            return -math.inf
        now = self._clock.monotonic()
        return now - age_s

    def _is_missing_in(self, latest: Latest) -> bool:
        """Return whether ``latest`` lacks the object that this handle has written recently, and
        none includes."""
        age_s = self._clock.monotonic() - self._written_at
        if age_s > _ANNOUNCED_S or not self._replica.is_unincluded(self._written):
            return False
        return all(name != self._written for name, _ in latest.recent)

    def check_limits(self, limits: Limits) -> None:
        """Plan a merge if content has expired or exceeds the capacity: also without commits."""
        if self.evicts(limits):
            self.schedule.plan_merge(self._clock.monotonic())

    def evicts(self, limits: Limits) -> bool:
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
        self._forget_own({info.name for info in commits}, began)
        new = [info for info in commits if self._is_new(info.name)]
        some = _bounded(new)
        deltas = self._read(some)
        # for evictions alone, no older segment is written again
        older: dict[str, Delta] = {}
        if deltas:
            older = self._older_segments(some)

        # after the commits were applied to the replica, which may now exceed the limits
        planned = self._clock.monotonic()
        now = self._expiry_time()
        removals = self._replica.plan_eviction(limits, now, at_most=_MOST_EVICTED)
        at = self._medium.time.time_of_use() or LATEST_TIME
        evictions = self._replica.tombstones(removals, at)

        contents = [*deltas.values(), evictions, *older.values()]
        carried = self._included_in(older.values())
        includes = [*deltas, *older, *carried]
        segment = union(contents, includes)
        # whether other engines commit, too, decides which engine merges
        found_others = not self.own.keys() >= deltas.keys()
        # else there is nothing to merge, and nothing to evict
        if not segment.is_empty or segment.includes:
            self._publish(segment, began, planned)
            # their tombstones are durable now
            self.deletions.add_packs(removals.packs)
            if self.last_writer != self.writer:
                # Another engine may have merged at the same time. ``latest`` must name its segment,
                # too: this engine reads it again only when the next merge is due.
                self._reader.follow()
            self._announce()
        # after the segment is durable, because it includes them
        self._delete_included(commits)

        # more may be left to evict, or to merge
        num_removed = len(removals.packs) + len(removals.manifests)
        is_incomplete = num_removed >= _MOST_EVICTED or len(new) > len(some)
        self.schedule.end_merge(
            found=bool(deltas),
            found_others=found_others,
            incomplete=is_incomplete,
        )
        self.plan_base()

    def _delete_included(self, commits: Sequence[BlobInfo]) -> None:
        """Delete those of the commits that an object includes."""
        contained = self._replica.contained
        included = [info.name for info in commits if contained.get(info.name)]
        self.deletions.delete(included)

    def _is_new(self, name: str) -> bool:
        """Return whether the next segment includes a commit in the inbox."""
        contained = self._replica.contained
        reader = self._reader
        # the replica may contain it without an includer: it was applied, and is in no segment yet
        is_included = bool(contained.get(name))
        is_waiting = name in reader.unreadable or name in reader.publishing
        return not is_included and not is_waiting

    def _read(self, infos: Sequence[BlobInfo]) -> dict[str, Delta]:
        """Return the content of commits by name, without missing and unreadable ones, and add it to
        the replica."""
        others = [info for info in infos if info.name not in self.own]
        read = self._fetch_all(others)
        found: dict[str, Delta] = {}
        for info in infos:
            own = self.own.get(info.name)
            delta = read.get(info.name) if own is None else own.delta
            if delta is not None:
                # own ones, too: the segment must have the times that other engines read
                found[info.name] = delta.clamped(info.time)

        contained = self._replica.contained
        # not those that the replica has applied before, such as own ones
        new = [item for item in found.items() if item[0] not in contained]
        self._reader.apply(new)
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
        """Return the older segments that the next one includes: name → content.

        The smallest first, until one has more binary digits of bytes than all content so far. So
        the remaining ones have different numbers of digits, and an included segment at least
        doubles.

        :param commits: that the next one includes.
        """
        num_bytes = 0
        for info in commits:
            # the segment contains their names, too
            num_bytes += info.size + len(info.name)
        _, segments = self._base_and_segments()
        segments.sort(key=lambda info: info.size)

        chosen: list[BlobInfo] = []
        for info in segments:
            is_larger = info.size.bit_length() > num_bytes.bit_length()
            if is_larger or num_bytes + info.size > _MOST_SEGMENT_BYTES:
                break
            if info.name not in self._reader.unreadable:
                chosen.append(info)
                num_bytes += info.size

        found = self._fetch_all(chosen)
        for info in chosen:
            if info.name not in found:
                # missing or unreadable: later merges ignore it until a list shows it again
                self._reader.listed.pop(info.name, None)
        return found

    def _included_in(self, deltas: Iterable[Delta]) -> list[str]:
        """Return the names of the objects that these segments include, and that still exist. The
        next segment includes them, too: its readers need not read the older segments, and skip
        these objects all the same. While the medium refuses deletions, they are many, and only
        those with the greatest names are returned.
        """
        names: set[str] = set()
        for delta in deltas:
            names.update(delta.includes)
        listed = self._reader.listed
        carried = sorted(names & listed.keys())
        return carried[-_MOST_CARRIED:]

    def _expiry_time(self) -> float:
        """Return the medium's time if the machine's clock confirms it; else 0: nothing expires."""
        now = self._medium.time.now()
        difference_s = abs(now - self._clock.wall())
        return now if difference_s < AGREEING_S else 0.0

    def _publish(self, segment: Delta, began: float, planned: float) -> None:
        """Write a segment. The replica has its content already, except for the evictions.

        :raises StoreError: it was not written, or too late; nothing was applied.
        """
        # readers begin with the highest level, and skip what it includes
        levels = [self._names.level(name) for name in segment.includes]
        level = 1 + max(levels, default=0)
        name = self._new_name(level)
        body = self._objects.encode(name, segment)
        # after a long pause, other engines may have merged or used the same content
        now = self._clock.monotonic()
        is_stale = now - began > _STALE_S
        is_plan_stale = now - planned > _EVICTION_STALE_S
        if is_stale or is_plan_stale:
            raise StoreError(
                f"{self._names.base}: the process was paused; the merge is repeated"
            )
        written = self._objects.put(name, body)
        # what the replica lacks of the segment
        changes = Delta(
            removed=segment.removed,
            dropped=segment.dropped,
            includes=segment.includes,
        )
        self._reader.apply([(name, changes)])
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
        reader.remember([info])
        self._written = info.name
        self._written_at = self._clock.monotonic()

    def _announce(self) -> None:
        """Write ``latest`` after a merge or base of this engine."""
        now = self._medium.time.now()
        self._write_latest(self.writer, now)
        self.last_writer = self.writer

    def _write_latest(self, writer: bytes, time: float) -> None:
        """Write ``latest``.

        :param writer: of the last merge or base.
        :param time: of the last merge or base, on the medium's clock.
        """
        listed = self._reader.listed
        recent: list[tuple[str, int]] = []
        for info in self._reader.recent:
            # else another object includes it, and it may be deleted
            if info.name in listed or self._replica.is_unincluded(info.name):
                recent.append((info.name, info.size))
        latest = Latest(writer, time, recent)
        body = encode(latest)
        self._medium.put_sealed(self._names.latest, body, self._replica.namespace)

    # Bases

    def plan_base(self) -> None:
        """Plan a base if one is wanted, or cancel the plan. The last merger writes it at once,
        others only after minutes: usually one engine does it."""
        if not self._is_base_wanted():
            self._base_wanted_at = math.inf
        elif self._base_wanted_at == math.inf:
            # none is planned yet
            pause_s = 0.0
            if self.last_writer != self.writer:
                jitter = self._clock.random.random()
                pause_s = _OTHERS_BASE_S * (1 + jitter)
            now = self._clock.monotonic()
            self._base_wanted_at = now + pause_s

    def _is_base_wanted(self) -> bool:
        """Return whether the segments that no object includes are large in comparison with the last
        base: readers without a replica read all of them."""
        base_bytes, segments = self._base_and_segments()
        if len(segments) < 2:
            return False
        sizes = [info.size for info in segments]
        least_bytes = max(_LEAST_BASE_BYTES, base_bytes // 4)
        return sum(sizes) > least_bytes

    def _base_and_segments(self) -> tuple[int, list[BlobInfo]]:
        """Return the bytes of the last base, and the segments: of the listed objects that were read
        and that no other one includes."""
        base_bytes = 0
        segments: list[BlobInfo] = []
        for name, info in self._reader.listed.items():
            # also without those that were not read
            if not self._replica.is_unincluded(name):
                continue
            if self._names.level(name) >= BASE_LEVEL:
                base_bytes += info.size
            else:
                segments.append(info)
        return base_bytes, segments

    def write_again(self, limits: Limits) -> Sequence[str]:
        """Write the whole index again, and delete all that it includes, with older versions; return
        what the medium keeps (``Blobs.erase``).

        :raises StoreError: the medium failed.
        """
        for _ in range(_MOST_MERGES):
            self.merge(limits)
            # until no commit is left in the inbox
            if not self._reader.refresh(inbox_age_s=0.0, stable=True):
                break
        self.write_base(least_objects=1)
        contained = self._replica.contained
        listed = self._reader.listed
        included = [name for name in listed if contained.get(name)]
        return self._medium.blobs.erase(self._names.index, included)

    def write_base(self, least_objects: int = 2) -> None:
        """Write a base: an object that includes all listed objects of the index that were read.

        :param least_objects: of fewer, none is written.
        :raises StoreError: the medium failed. The index has the content of before; some parts of
            the base may be in it.
        """
        began = self._clock.monotonic()
        self._base_wanted_at = math.inf
        self._reader.refresh(stable=True)
        listed = self._to_include()
        if len(listed) < least_objects:
            return
        # A clock that is ahead must not drop tombstones early: the removed packs could return. At
        # the time 0, which stands for a clock that is not confirmed, none is old enough.
        oldest_kept = self._expiry_time() - _TOMBSTONES_KEPT_S
        self._replica.purge(oldest_kept)
        levels = [self._names.level(name) for name in listed]
        level = max(BASE_LEVEL, 1 + max(levels))
        # Each part is written when the next one shows that it is not the last: only the last one
        # names the others, and what the base includes.
        parts: list[str] = []
        waiting: Delta | None = None
        for part in self._replica.dump(_PART_BYTES):
            if waiting is not None:
                name = self._write_part(level, waiting, began)
                parts.append(name)
            waiting = part
        # ``dump`` returns at least one
        assert waiting is not None
        # Its level is higher, so that readers meet it before the parts, which they may not need.
        last = msgspec.structs.replace(waiting, includes=listed, parts=parts)
        self._write_part(level + 1, last, began)
        self._announce()

    def _to_include(self) -> list[str]:
        """Return the listed objects that were read: all that no object includes, and a bounded
        number of the others."""
        contained = self._replica.contained
        new: list[str] = []
        included: list[str] = []
        for name in self._reader.listed:
            if contained.get(name):
                included.append(name)
            elif name in contained:
                # read, and without an includer
                new.append(name)
        return new + included[-_MOST_CARRIED:]

    def _write_part(self, level: int, part: Delta, began: float) -> str:
        """Write a part of a base; return its name.

        :raises StoreError: the medium failed, or the base takes too long.
        """
        name = self._new_name(level)
        body = self._objects.encode(name, part)
        took_s = self._clock.monotonic() - began
        if took_s > _STALE_S:
            raise StoreError(
                f"{self._names.base}: a base took more than an hour; it is repeated"
            )
        written = self._objects.put(name, body)
        # the replica has the rest: the part was read from it
        changes = Delta(includes=part.includes)
        self._reader.apply([(name, changes)])
        self._note_written(written)
        return name

    def delete_included(self) -> None:
        """Delete each listed object of the index whose includer is listed, too, and ten minutes old
        by the medium's clock. Only the last merger does so.
        """
        if self.last_writer != self.writer:
            return
        now = self._medium.time.now()
        old = now - _INCLUDED_S
        listed = self._reader.listed
        contained = self._replica.contained
        found: list[str] = []
        for name in listed:
            includer = listed.get(contained.get(name, ""))
            # 0: the time of the includer is not known
            if includer is not None and 0 < includer.time < old:
                found.append(name)
        self.deletions.delete(found)


def _with_excess(num_bytes: int) -> int:
    """Return a bound in bytes plus 1/64, which engines may commit between two background merges."""
    return num_bytes + num_bytes // _EXCESS_SHARE


def _bounded(infos: Sequence[BlobInfo]) -> list[BlobInfo]:
    """Return the first of the commits, in random order of their names, up to the bounds of one
    merge."""
    found: list[BlobInfo] = []
    length = 0
    for info in infos[:MOST_COMMITS]:
        length += info.size
        # at least one, also if it is larger
        if found and length > _MOST_BYTES:
            break
        found.append(info)
    return found
