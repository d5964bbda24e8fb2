"""Deletion of blobs that nothing names: uploads of commits that failed, and packs whose deletion
failed.

1. A blob is deleted only if it is older than 24 hours on the medium's clock, and two readings of
   the whole index, begun after it was listed, do not name it. Each reading lists the inbox before
   the index, and begins from nothing: the replica is not trusted. The machine's clock must confirm
   the medium's, which may jump ahead, or the packs of a running commit count as old.
2. If any object of the index is missing, unreadable or of a newer release, nothing is deleted: it
   may name the blob. An object that was damaged for seven days counts as junk, unless it may be
   sealed with a data key that this handle does not know.
3. One sweep a day is enough for all engines: a blob records when one began.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv.storage.blobs import BlobInfo, BlobMissingError
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.clock import AGREEING_S
from persistkv.storage.shared.format import (
    Delta,
    Names,
    NewerFormatError,
)
from persistkv.storage.shared.index.objects import IndexObjects
from persistkv.storage.shared.index.unnamed import unnamed_packs
from persistkv.storage.shared.replica import Replica

logger = logging.getLogger(__name__)

INTERVAL_S = 86_400.0  # one day: seconds between two sweeps
CHECK_S = 3600.0  # seconds between looks whether a sweep is due
# one day: age of a blob before which no sweep deletes it. A commit is acknowledged only within half
# a day of its uploads.
LEAST_AGE_S = 86_400.0
# seven days: age from which on a damaged object of the index does not prevent sweeps
_JUNK_S = 7 * 86_400.0
_TRIES = 4  # maximum number of lists in one reading of the index, while merges replace objects
_STARTED = struct.Struct("<d")  # time at which a sweep began, on the medium's clock


class _BlockedError(Exception):
    """An object of the index cannot be read, and may name any blob. The text tells which and
    why."""


class _Damage(NamedTuple):
    """Result of reading an object of the index that is damaged."""

    reason: str
    """Name of the object, and the error."""


class Sweeper:
    """Sweeps the blobs of one namespace. One thread at a time may call ``step``, any thread
    ``sweep``. Commits and merges may run meanwhile."""

    def __init__(
        self,
        medium: Medium,
        names: Names,
        replica: Replica,
    ) -> None:
        self._medium = medium
        self._names = names
        self._replica = replica
        self._objects = IndexObjects(medium, replica.namespace)
        clock = medium.clock
        # choose a random pause, so that engines that start together check at different times
        pause_s = CHECK_S * clock.random.random()
        self.due_at = clock.monotonic() + pause_s
        """Monotonic time of the next step."""

    def step(self) -> None:
        """Sweep, if no engine has begun a sweep for a day.

        :raises StoreError: the medium failed; a later step sweeps the rest.
        """
        clock = self._medium.clock
        now = clock.monotonic()
        if now < self.due_at:
            return
        pause_s = CHECK_S * clock.random.uniform(0.5, 1.5)
        self.due_at = now + pause_s
        if self._is_due():
            self.sweep()

    def _is_due(self) -> bool:
        """Return whether no engine has begun a sweep for a day.

        :raises StoreError: the medium failed.
        """
        namespace = self._replica.namespace
        try:
            body = self._medium.sealed(self._names.swept, namespace)
            (started,) = _STARTED.unpack(body)
        except (BlobMissingError, CorruptPackError, struct.error):
            return True
        now = self._medium.time.now()
        if not now:
            # No reply has told the medium's time yet, because this engine has written nothing and
            # the index has no object. The list of the packs tells it.
            self._medium.listed(self._names.packs)
            now = self._medium.time.now()
        if not now:
            # no time is known because there are no packs, so there is nothing to sweep
            return False
        # a start more than a day ahead was written by a wrong clock, and does not count
        is_recent = -INTERVAL_S < now - started < INTERVAL_S
        return not is_recent

    def sweep(self) -> int:
        """Delete old blobs that nothing names; return their number.

        :raises StoreError: the medium failed; a later sweep deletes the rest.
        """
        now = self._record_start()
        difference_s = abs(now - self._medium.clock.wall())
        if difference_s >= AGREEING_S:
            text = "%s: no sweep, because the clocks of the medium and of this machine differ"
            logger.warning(text, self._names.base)
            return 0
        # delete data keys again that were destroyed and that a late upload has restored
        restored = self._medium.keys.undeleted()
        self._medium.keys.destroy(restored)
        unnamed = self._old_blobs(now)
        if not unnamed:
            return 0
        try:
            # read twice, because one reading may miss the object that names a blob
            for _ in range(2):
                unnamed -= self._named_by_index(unnamed, now)
        except _BlockedError as blocked:
            logger.warning("%s: no sweep, because %s", self._names.base, blocked)
            return 0
        self._medium.blobs.delete(sorted(unnamed))
        return len(unnamed)

    def _record_start(self) -> float:
        """Record that a sweep begins, so that other engines skip theirs; return the medium's
        time."""
        body = _STARTED.pack(self._medium.time.now())
        namespace = self._replica.namespace
        written = self._medium.put_sealed(self._names.swept, body, namespace)
        return written.time

    def _old_blobs(self, now: float) -> set[str]:
        """Return the blobs of packs and keys that are old enough, and that the replica does not
        hold: the candidates for deletion."""
        packs = unnamed_packs(self._medium, self._names, self._replica)
        unheld = list(packs.values())
        held_nonces = self._replica.keys_nonces()
        listed = self._medium.listed(self._names.keys)
        for info in listed:
            nonce = self._names.keys_nonce(info.name)
            # the nonce is None if another program has written the blob
            if nonce is not None and nonce not in held_nonces:
                unheld.append(info)
        old_before = now - LEAST_AGE_S
        return {info.name for info in unheld if info.time < old_before}

    def _named_by_index(
        self,
        blobs: set[str],
        now: float,
    ) -> set[str]:
        """Return the names of the blobs that the index names, without those of packs that have a
        tombstone.

        :raises _BlockedError: an object of the index cannot be read.
        """
        names = self._names
        named: set[str] = set()
        ended: set[str] = set()
        for delta in self._all_deltas(now):
            for pack in delta.packs:
                named.add(names.pack(pack.name))
            for manifest in delta.manifests:
                named.add(names.keys_blob(manifest.keys))
            for tombstone in delta.removed:
                ended.add(names.pack(tombstone.name))
            # keep only the names of candidates, so that a large index takes little memory
            named &= blobs
            ended &= blobs
        return named - ended

    def _all_deltas(self, now: float) -> Iterator[Delta]:
        """Yield the content of the whole index, some of it perhaps twice.

        :raises _BlockedError: an object of the index cannot be read.
        """
        read: set[str] = set()
        # list again while a listed object is missing, which a merge has included in another
        for _ in range(_TRIES):
            is_complete = True
            listed = self._list_objects()
            new = [info for info in listed if info.name not in read]
            fetched = self._medium.maintenance.each(self._fetch, new)
            for info, content in fetched:
                if content is None:
                    is_complete = False
                    continue
                # count a damaged object as read, so that it is not tried again
                read.add(info.name)
                if isinstance(content, Delta):
                    yield content
                elif not self._is_junk(info, now):
                    raise _BlockedError(content.reason)
            if is_complete:
                return
        raise _BlockedError("listed objects of the index are missing")

    def _is_junk(self, info: BlobInfo, now: float) -> bool:
        """Return whether an object that does not read counts as junk: it is seven days old, and
        this handle knows all data keys of the store itself, so the object is damaged, and not only
        sealed with a data key that the handle lacks.

        :raises StoreError: the medium failed.
        """
        is_old = now - info.time >= _JUNK_S
        return is_old and self._medium.keys.are_complete()

    def _list_objects(self) -> list[BlobInfo]:
        """Return the commits, then the objects of the index. Commits that are merged between the
        lists are in both, or in objects of the second one."""
        names = self._names
        infos = self._medium.listed(names.inbox, stable=True)
        infos += self._medium.listed(names.index, stable=True)
        return [info for info in infos if names.is_object(info.name)]

    def _fetch(self, info: BlobInfo) -> Delta | _Damage | None:
        """Return the content of an object, or its damage; None if it is missing.

        :raises _BlockedError: a newer release has written it.
        """
        try:
            return self._objects.read(info)
        except BlobMissingError:
            return None
        except NewerFormatError as error:
            raise _BlockedError(
                f"{info.name} is of a newer release ({error})"
            ) from None
        except CorruptPackError as error:
            return _Damage(f"{info.name} does not read ({error})")
