"""Reading of one namespace's index into the replica.

1. An object is read unless the replica contains it: because it was read, or because an object that
   was read includes it.
2. An object that is listed and missing was merged and deleted meanwhile: the lists are read again.
   One that two lists in a row show and that is missing both times is damage: it is skipped,
   reported, and tried again after a minute.
3. Opening reads the inbox first, then the index: a commit that is merged meanwhile appears in the
   index.
4. Objects that cannot be read cost only themselves. They are never included in others, and never
   deleted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

from persistkv.errors import CorruptPackError
from persistkv.storage.blobs import BlobInfo, BlobMissingError, RefusedError
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.clock import AGREEING_S
from persistkv.storage.shared.format import (
    BASE_LEVEL,
    Delta,
    Latest,
    Names,
    decode_latest,
)
from persistkv.storage.shared.index.objects import IndexObjects
from persistkv.storage.shared.replica import Replica

logger = logging.getLogger(__name__)

_TRIES = 4  # maximum number of lists, if objects that they show are missing
_RETRY_S = 60.0  # seconds until an object that could not be read is tried again
_FORGET_S = 600.0  # seconds until the name of an object is forgotten that no list shows
# seconds until an unreadable object is forgotten that no list shows; lists of the inbox are up to
# 12 minutes apart
_FORGET_UNREADABLE_S = 3600.0
# 32 MiB: maximum size of the objects that are in memory at the same time. Their decoded content
# takes several times as much memory, which the process keeps.
_MOST_AT_ONCE_BYTES = 32 << 20
_MOST_RECENT = 64  # maximum number of objects of the index that ``latest`` names
# number of segments that are read faster than a base, which is the whole index
_FEW_SEGMENTS = 64


class IndexReader:
    """Reader of the index of one namespace. Only one thread at a time may use it.

    :param names: names of the namespace's blobs.
    """

    def __init__(
        self,
        medium: Medium,
        names: Names,
        replica: Replica,
    ) -> None:
        self._medium = medium
        self._names = names
        self._replica = replica
        self._clock = medium.clock
        self.objects = IndexObjects(medium, replica.namespace)
        self.unreadable: dict[str, float] = {}
        """Objects that were listed and could not be read → monotonic time of the next try."""
        self.listed: dict[str, BlobInfo] = {}
        """Objects of the index that the last list has shown, by name."""
        self.publishing: set[str] = set()
        """Names of the commits that this handle is writing. The reader skips them: the thread that
        writes a commit applies it, and returns the cursors before and after it."""
        self.recent: list[BlobInfo] = []
        """Objects of the index that were read or written recently, newest last."""
        self._followed: Latest | None = None
        """The content of ``latest`` that ``follow`` has handled last: its objects are not read
        again through it. None: there is none."""
        now = self._clock.monotonic()
        self._shown_at: dict[str, float] = dict.fromkeys(replica.contained, now)
        """Name of an object that the replica contains → monotonic time at which a list, or another
        object that includes it, has shown last that it exists."""

    def refresh(
        self,
        *,
        inbox_age_s: float | None = None,
        stable: bool = False,
    ) -> list[BlobInfo]:
        """Read new objects; return the commits in the inbox, without those that cannot be read.

        :param inbox_age_s: read and return also commits in the inbox: those of at least this age in
            seconds, on the medium's clock. Younger ones are soon in a segment. None: no commits.
        :param stable: see ``Medium.listed``; opening reads the whole index, and needs it.
        :raises StoreError: the medium or the replica failed; the replica keeps the objects that
            were read before.
        """
        inbox: list[BlobInfo] = []
        missing_before: set[str] = set()
        for _ in range(_TRIES):
            missing: list[str] = []
            if inbox_age_s is not None:
                inbox = self._old_commits(inbox_age_s, stable=stable)
                missing += self.read_objects(inbox, is_inbox=True)
            # list the index after the inbox: a commit that is merged meanwhile is then in one of
            # the lists
            index = self._medium.listed(self._names.index, stable=stable)
            self._note_list(index)
            missing += self.read_objects(index)
            if not missing:
                break
            # An object that is missing once was merged and deleted after the list. One that is
            # missing again is lost.
            lost = missing_before.intersection(missing)
            for name in lost:
                self._report(name, "it is listed and missing")
            missing_before = set(missing)
        self._check_includers()
        # leave out commits that could not be read
        contained = self._replica.contained
        return [info for info in inbox if info.name in contained]

    def list_commits(self, *, stable: bool = False) -> list[BlobInfo]:
        """Return the commits in the inbox. Lists that show a commit make the replica keep its name,
        so that the commit is not read again.

        :param stable: see ``Medium.listed``.
        """
        contained = self._replica.contained
        commits: list[BlobInfo] = []
        shown: list[str] = []
        for info in self._medium.listed(self._names.inbox, stable=stable):
            if self._names.is_commit(info.name):
                commits.append(info)
            if info.name in contained:
                shown.append(info.name)
        self._note_shown_now(shown)
        return commits

    def _old_commits(
        self,
        least_age_s: float,
        *,
        stable: bool,
    ) -> list[BlobInfo]:
        """Return the commits in the inbox that are at least ``least_age_s`` old, and those whose
        age is unknown."""
        time_before = self._medium.time.now()
        commits = self.list_commits(stable=stable)
        # the list has advanced the estimate of the medium's time to that of the newest commit, if
        # that was later
        now = self._medium.time.now()
        old: list[BlobInfo] = []
        for info in commits:
            is_old = now - info.time >= least_age_s
            # The commit is an hour later than the time before the list: the medium's clock was
            # wrong when it was written, or this handle did not know the time. Count it as old.
            is_ahead = info.time - time_before >= AGREEING_S
            if is_old or is_ahead:
                old.append(info)
        return old

    def follow(self) -> Latest | None:
        """Read the objects that ``latest`` names; return it, or None if there is none that can be
        read.

        Objects that are missing were included in others meanwhile: then the index is listed.
        """
        namespace = self._replica.namespace
        try:
            body = self._medium.sealed(self._names.latest, namespace)
            latest = decode_latest(body)
        except (BlobMissingError, CorruptPackError):
            return None
        # Do not read the same objects again: they may have been deleted since, and would then seem
        # to be missing.
        if latest == self._followed:
            return latest
        missing = self.read_objects(self._objects_named_by(latest))
        if missing:
            self.refresh()
        self._followed = latest
        return latest

    def _objects_named_by(self, latest: Latest) -> list[BlobInfo]:
        """Return the objects of the index that ``latest`` names, with the time 0, because readers
        use only the times of commits."""
        named: list[BlobInfo] = []
        for name, size in latest.recent:
            # check the name: in a store without a key, a forged ``latest`` may name anything
            is_in_index = self._names.level(name) > 0
            if is_in_index:
                named.append(BlobInfo(name, size, 0.0))
        return named

    def read_objects(
        self,
        infos: Iterable[BlobInfo],
        *,
        is_inbox: bool = False,
    ) -> list[str]:
        """Read objects into the replica, unless it contains them; return the names of missing ones.

        :param is_inbox: the objects are commits. Times in a commit are limited to the time of its
            blob.
        """
        new = [info for info in infos if self._is_to_read(info.name)]
        todo = self._in_order(new)
        missing: list[str] = []
        # read the first object alone, because it may include all the others
        at_once = 1
        while todo:
            batch = self._of_one_level(todo[:at_once])
            missing += self._read_together(batch, is_inbox=is_inbox)
            # leave out objects that the batch includes
            contained = self._replica.contained
            rest = todo[len(batch) :]
            todo = [info for info in rest if info.name not in contained]
            at_once = self._medium.blobs.connections
        return missing

    def _read_together(
        self,
        infos: Sequence[BlobInfo],
        *,
        is_inbox: bool,
    ) -> list[str]:
        """Read objects concurrently, and add them to the replica in one transaction; return the
        names of missing ones."""
        missing: list[str] = []
        read: list[BlobInfo] = []
        objects: list[tuple[str, Delta]] = []
        contents = self._medium.maintenance.all(self.fetch, infos)
        for info, delta in zip(infos, contents, strict=True):
            if delta is not None:
                content = delta.clamped(info.time) if is_inbox else delta
                objects.append((info.name, content))
                read.append(info)
            elif info.name not in self.unreadable:
                missing.append(info.name)
            else:
                # The object could not be read, now or earlier, so another list does not help. The
                # report is logged once only, and sets the time of the next try.
                self._report(info.name, "it is listed and missing")
        self.apply(objects)
        self.note_recent(read)
        return missing

    def _of_one_level(self, infos: Sequence[BlobInfo]) -> list[BlobInfo]:
        """Return the first objects that may be read together: those of one level, because they may
        include objects of lower levels, which then need not be read. If they are several, they have
        at most ``_MOST_AT_ONCE_BYTES`` together.

        :param infos: objects in the order of ``_in_order``, so that those of one level are
            neighbours.
        """
        first_level = self._names.level(infos[0].name)
        found: list[BlobInfo] = []
        num_bytes = 0
        for info in infos:
            num_bytes += info.size
            is_too_much = bool(found) and num_bytes > _MOST_AT_ONCE_BYTES
            is_other_level = self._names.level(info.name) != first_level
            if is_other_level or is_too_much:
                break
            found.append(info)
        return found

    def _in_order(self, infos: Sequence[BlobInfo]) -> list[BlobInfo]:
        """Return objects in the order of reading: from the highest level down. An object includes
        others of lower levels, which then need not be read.

        A reader that lacks only a few segments reads them before a base that includes them: then it
        need not read the parts of the base, which are the whole index.
        """
        # names sort by level, then by time
        highest_first = sorted(infos, key=lambda info: info.name, reverse=True)
        bases: list[BlobInfo] = []
        segments: list[BlobInfo] = []
        for info in highest_first:
            if self._names.level(info.name) >= BASE_LEVEL:
                bases.append(info)
            else:
                segments.append(info)
        # read bases first into an empty replica, or if many segments are missing: that is faster
        is_empty = not self._replica.contained
        if is_empty or len(segments) > _FEW_SEGMENTS:
            return highest_first
        return segments + bases

    def fetch(self, info: BlobInfo) -> Delta | None:
        """Return the content of an object; None if it is missing, or cannot be read, which is
        reported. Any thread may call this."""
        try:
            return self.objects.read(info)
        except BlobMissingError:
            return None
        except (RefusedError, CorruptPackError) as error:
            # Only this object is refused: a medium that refuses all reads opens no store.
            self._report(info.name, str(error))
            return None

    def _report(self, name: str, reason: str) -> None:
        """Record that an object cannot be read; the first time, log it."""
        if name not in self.unreadable:
            text = "%s is unreadable (%s): packs that it alone names are misses"
            logger.warning(text, name, reason)
        self.unreadable[name] = self._clock.monotonic() + _RETRY_S

    def apply(self, objects: Sequence[tuple[str, Delta]]) -> None:
        """Add objects that were read or written to the replica."""
        if not objects:
            return
        # find needless parts before ``apply``, which adds all included names to ``contained``
        needless_parts = self._needless_parts(objects)
        self._replica.apply(objects)
        self._replica.mark_contained(needless_parts)
        # keep the names of these objects, and of all that they name, while lists show them
        shown = list(needless_parts)
        for name, delta in objects:
            self.unreadable.pop(name, None)
            shown.append(name)
            shown += delta.includes
        self._note_shown_now(shown)

    def _needless_parts(self, objects: Sequence[tuple[str, Delta]]) -> list[str]:
        """Return the names of parts of bases that need not be read: the replica contains all that
        the base includes, so the base brings nothing new."""
        contained = self._replica.contained
        needless: list[str] = []
        for _, delta in objects:
            has_parts = bool(delta.parts)
            if has_parts and contained.keys() >= set(delta.includes):
                needless += delta.parts
        return needless

    def _note_shown_now(self, names: Iterable[str]) -> None:
        """Remember that objects exist, so that their names are not forgotten."""
        now = self._clock.monotonic()
        self._shown_at.update(dict.fromkeys(names, now))

    def note_recent(self, infos: Iterable[BlobInfo]) -> None:
        """Record objects of the index that were read or written, for ``latest``."""
        for info in infos:
            # commits have level 0
            if self._names.level(info.name):
                self.recent.append(info)
        del self.recent[:-_MOST_RECENT]

    def _check_includers(self) -> None:
        """Find objects whose includer has vanished, because an operator or a rule of the bucket has
        deleted it. From now on, they count as not included, and a later merge or base includes them
        again.
        """
        not_included: list[str] = []
        for name in self.listed:
            # the includer is None if the replica does not contain the object, and empty if nothing
            # includes it
            includer = self._replica.contained.get(name)
            if includer and includer not in self.listed:
                not_included.append(name)
        self._replica.mark_not_included(not_included)

    def _is_to_read(self, name: str) -> bool:
        """Return whether an object is to be read: it is part of the index, not contained, and not
        known to be bad."""
        is_known = name in self._replica.contained or name in self.publishing
        if is_known or not self._names.is_object(name):
            return False
        retry_at = self.unreadable.get(name, -math.inf)
        return self._clock.monotonic() >= retry_at

    def _note_list(self, infos: Sequence[BlobInfo]) -> None:
        """Remember a list of the index, and forget names that no list has shown for a while."""
        listed: dict[str, BlobInfo] = {}
        for info in infos:
            if self._names.is_object(info.name):
                listed[info.name] = info
        self.listed = listed
        self._note_shown_now(listed)
        # forget objects that were deleted, because ``contained`` would otherwise grow for ever
        old = self._not_shown_lately()
        if old:
            self._replica.forget(old)
        for name in old:
            self._shown_at.pop(name, None)
        self._forget_unreadable()

    def _not_shown_lately(self) -> list[str]:
        """Return the names that no list has shown for a while."""
        now = self._clock.monotonic()
        old: list[str] = []
        # copy, because another thread may add a commit meanwhile
        names = list(self._replica.contained)
        for name in names:
            # a name that was never shown counts as shown now
            shown_at = self._shown_at.setdefault(name, now)
            if now - shown_at > _FORGET_S:
                old.append(name)
        return old

    def _forget_unreadable(self) -> None:
        """Forget objects that could not be read and were not tried again for long: no list shows
        them any more."""
        now = self._clock.monotonic()
        for name, retry_at in list(self.unreadable.items()):
            if now - retry_at > _FORGET_UNREADABLE_S:
                self.unreadable.pop(name, None)
