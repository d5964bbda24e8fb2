"""Session of one handle with one namespace: commits, uses, keys of manifests.

A commit has three steps:

1. Packs are uploaded in parallel, together with one object that holds the keys of the manifests. No index object
   references them yet: after a failure or a kill they are orphans, which retention removes.
2. One index object describes the whole commit. Its upload is the commit: every handle sees all of it, or nothing.
3. Packs that existed already are checked again: a pack that was pruned between 1 and 2 is uploaded again.

If the outcome of 2 is unknown, the session continues under a new writer id, because the numbers of a writer have no
gaps. If the upload did succeed, the session merges it like a commit of another writer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence

from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.backend import CommitBatch, CommitResult
from persistkv.storage.format.manifest import ManifestKeys, decode_manifest_keys, encode_manifest, encode_manifest_keys
from persistkv.storage.format.pack_writer import NewPack
from persistkv_s3.authentication import Authenticator, SignedObjects
from persistkv_s3.client.transport import ObjectExistsError, ObjectMissingError
from persistkv_s3.log.follower import Follower
from persistkv_s3.log.layout import Entry, GoneRow, LogName, ManifestRow, Stamp, encode_entries
from persistkv_s3.log.state import LastUse, LogState, PackState
from persistkv_s3.packs import PackObjects, UploadBudget, Uploaded

logger = logging.getLogger(__name__)


class NamespaceSession:
    """See the top of this file. One thread at a time commits; ``packs`` is thread-safe."""

    def __init__(self, objects: SignedObjects, follower: Follower, touch_s: float) -> None:
        self.follower = follower
        self.state = follower.state
        self.names = objects.names
        self.packs = PackObjects(objects, follower)
        self.objects = objects
        self._bucket = objects.bucket
        self._authenticator = objects.authenticator
        self._namespace = objects.namespace
        self._touch_s = touch_s
        self._writer = os.urandom(16)
        self._number = 0
        self._written_at = time.monotonic()

    def commit(self, batch: CommitBatch, moment: int, *, dropped: Sequence[str] = ()) -> CommitResult:
        """See ``Backend.commit``.

        :param moment: greater than all moments that the handle has merged, in any namespace.
        :param dropped: manifests to remove without their packs.
        """
        follower, state = self.follower, self.state
        if batch.deletions or batch.bad:
            follower.refresh()  # a pack that another writer uploaded since must not be deleted
        else:
            follower.look_before_commit()
        if batch.seen is not None and not state.is_current(batch.seen):
            return CommitResult(batch.seen, stale=True)
        moment = max(moment, state.moment + 1)
        now = self._bucket.now()
        plan = _Plan(state, batch, follower.lost, dropped)
        if not plan.is_commit:
            self._touch(plan.uses, LastUse(moment, now))
            return CommitResult(state.cursor)
        keys = plan.manifest_keys(self._namespace, self._authenticator)
        uploaded = self._upload(plan.missing, UploadBudget(batch.memory), b"".join(keys))
        entry = plan.entry(self._namespace, Stamp(moment, self._writer), now, self._number + 1, uploaded, keys)
        self._publish([*self._pending(), entry])
        cursor = state.cursor
        state.relearn(pack.table.pack_id for pack in uploaded if pack.reused and pack.table != pack.writer.table)
        self._maintain([pack for pack in uploaded if pack.reused])
        return CommitResult(cursor, [held.table for held in plan.gone.values()])

    def _upload(self, packs: Sequence[tuple[NewPack, int]], budget: UploadBudget, keys: bytes) -> list[Uploaded]:
        """Upload packs under their generations, and an object with the keys of the manifests."""
        found: dict[int, Uploaded] = {}
        name = LogName(self._writer, self._number + 1)

        def put(number: int | None) -> None:
            if number is None:
                self._bucket.put(self.names.manifest_keys(name), [keys], only_if_absent=False)
                return
            writer, generation = packs[number]
            with budget.reserved(writer):
                found[number] = self.packs.upload(writer, generation)

        try:
            self._bucket.all(put, [*range(len(packs)), *([None] if keys else [])], writes=True)
        except BaseException:
            self._renew_writer()  # a late PUT may still create the object with keys: do not reuse its name
            raise
        return [found[number] for number in range(len(packs))]

    def _publish(self, entries: list[Entry]) -> None:
        """Write one index object with these entries."""
        name = LogName(self._writer, self._number + 1)
        try:
            self.objects.put(self.names.log(name), encode_entries(entries))
        except ObjectExistsError as error:
            if not error.uncertain:  # the writer id is not unique: the process was copied
                self._renew_writer()
                raise
        except StoreError:
            self._renew_writer()
            raise
        self._number = name.number
        self.follower.published(name, entries)
        self.follower.touched.clear()
        self._written_at = time.monotonic()
        for entry in entries:
            for pack_id in [*(row.pack_id for row in entry.head.packs), *(row.pack_id for row in entry.head.gone)]:
                self.follower.lost.pop(pack_id, None)

    def restart(self) -> None:
        """Continue under a new writer id after the bucket was emptied."""
        self._renew_writer()
        self.follower.emptied = False

    def _renew_writer(self) -> None:
        self._writer = os.urandom(16)
        self._number = 0

    def _maintain(self, reused: list[Uploaded]) -> None:
        """Restore reused packs and take a snapshot; the commit stays valid if this fails."""
        try:
            self._bucket.all(self.packs.restore, reused, writes=True)
            self.follower.take_snapshot_if_due(self._writer)
        except StoreError as error:
            logger.warning("%s: maintenance failed (%s); a later commit retries it", self.names.base, error)

    def _touch(self, pack_ids: list[bytes], use: LastUse) -> None:
        """Record uses; they are written with the next commit, or alone after ``touch``."""
        for pack_id in pack_ids:
            self.state.use(pack_id, use)
            self.follower.touched[pack_id] = use
        if not self.follower.touched:
            self._written_at = time.monotonic()
        elif time.monotonic() - self._written_at >= self._touch_s:
            self.write_uses()

    def write_uses(self) -> None:
        """Write the uses since the last commit."""
        if self.follower.touched:
            self._publish(self._pending())

    def close(self) -> None:
        """Write pending uses and the local cache of the index; failures are logged only."""
        try:
            self.write_uses()
        except StoreError as error:
            logger.warning("%s: could not write last uses (%s); they are lost", self.names.base, error)
        self.follower.close()

    def _pending(self) -> list[Entry]:
        """Return pending uses, one entry for each moment."""
        by_use: dict[LastUse, list[bytes]] = {}
        for pack_id, use in self.follower.touched.items():
            by_use.setdefault(use, []).append(pack_id)
        entries = []
        for (moment, at), used in sorted(by_use.items()):
            entries.append(Entry.of(self._namespace, Stamp(moment, self._writer), at))
            entries[-1].head.uses = b"".join(used)
        return entries

    def manifest_keys(self, manifest_id: str) -> ManifestKeys | None:
        """See ``Backend.manifest_keys``."""
        self.follower.look()
        held = self.state.manifests.get(manifest_id)
        if held is None:
            return None
        buffer = bytearray(held.row.keys_length)
        try:
            self._bucket.fill(self.names.manifest_keys(held.keys), held.row.keys_offset, [memoryview(buffer)])
            signed_as = _keys_name(manifest_id)
            return decode_manifest_keys(self._authenticator.opened(self._namespace, signed_as, buffer))
        except (CorruptPackError, ObjectMissingError):
            return None


class _Plan:
    """Effects of a batch: removals, uploads, uses. The state is not changed."""

    def __init__(
        self, state: LogState, batch: CommitBatch, lost: dict[bytes, PackState], dropped: Sequence[str] = ()
    ) -> None:
        self._catalogue = state
        self._batch = batch
        self._lost = lost
        self.gone: dict[bytes, PackState] = {}
        self.manifests_gone = {name for name in dropped if name in state.manifests}
        named = {pack_id for write in batch.manifests for pack_id in write.packs}
        self._keep = named | {pack.pack_id for pack in batch.packs}
        """Packs that removals of other packs leave in place."""
        for pack_id in batch.deletions:
            self._delete(pack_id)
        for pack_id in batch.bad:
            self._delete(pack_id, alone=True)
        self.missing = self._missing()
        """(pack, generation) of packs to upload."""
        written = {write.manifest.id for write in batch.manifests}
        self.pins = [
            (name, pinned)
            for name, pinned in batch.pins
            if name in written or (name in state.manifests and name not in self.manifests_gone)
        ]

    def _delete(self, pack_id: bytes, *, alone: bool = False) -> None:
        """Remove a pack and the manifests that reference it.

        Unless ``alone``, also remove packs that only these manifests made reachable.
        """
        doomed = [pack_id]
        while doomed:
            pack_id = doomed.pop()
            for name in self._naming(pack_id):
                self.manifests_gone.add(name)
                doomed += () if alone else self._unreachable(name, pack_id)
            held = self._catalogue.packs.get(pack_id)
            if held is not None:
                self.gone[pack_id] = held

    def _naming(self, pack_id: bytes) -> list[str]:
        return [name for name in self._catalogue.naming.get(pack_id, ()) if name not in self.manifests_gone]

    def _unreachable(self, name: str, pack_id: bytes) -> Iterable[bytes]:
        manifest = self._catalogue.manifests[name]
        behind = manifest.packs[manifest.packs.index(pack_id) + 1 :] if manifest.row.ordered else ()
        return [other for other in behind if not self._naming(other) and other not in self._keep]

    def _missing(self) -> list[tuple[NewPack, int]]:
        found: dict[bytes, tuple[NewPack, int]] = {}
        for writer in self._batch.packs:
            name = writer.pack_id
            if name in self.gone or name not in self._catalogue.packs:
                before = self.gone.get(name) or self._catalogue.gone.get(name)
                found.setdefault(name, (writer, 0 if before is None else before.generation + 1))
        return list(found.values())

    @property
    def uses(self) -> list[bytes]:
        """Packs of the state that the batch uses."""
        batch = self._batch
        used = [*batch.touches, *(pack.pack_id for pack in batch.packs)]
        used += [pack_id for write in batch.manifests for pack_id in write.packs]
        return [name for name in dict.fromkeys(used) if name in self._catalogue.packs and name not in self.gone]

    @property
    def is_commit(self) -> bool:
        """Whether the batch changes more than uses."""
        return bool(self.missing or self.gone or self.manifests_gone or self._batch.manifests or self.pins)

    def manifest_keys(self, namespace: bytes, authenticator: Authenticator) -> list[bytes]:
        """Return the signed keys of each manifest of the batch."""
        return [
            b"".join(authenticator.signed(namespace, _keys_name(write.manifest.id), [encode_manifest_keys(write.keys)]))
            for write in self._batch.manifests
        ]

    def entry(
        self,
        namespace: bytes,
        stamp: Stamp,
        now: float,
        number: int,
        packs: Sequence[Uploaded],
        manifest_keys: Sequence[bytes],
    ) -> Entry:
        """Return the entry of the commit.

        :param number: of the index object and of the object with the keys.
        """
        entry = Entry.of(namespace, stamp, now)
        head = entry.head
        for pack in packs:
            entry.add_pack(pack.writer.pack_id, pack.generation, pack.tags + pack.table.encode())
        keys_at = 0
        for write, keys in zip(self._batch.manifests, manifest_keys, strict=True):
            manifest, named = write.manifest, b"".join(dict.fromkeys(write.packs))
            row = ManifestRow(manifest.id, manifest.ordered, named, 0, 0, stamp.writer, number, keys_at, len(keys))
            entry.add_manifest(row, encode_manifest(manifest))
            keys_at += len(keys)
        came = {row.pack_id for row in head.packs}
        lost = {pack_id: held for pack_id, held in self._lost.items() if pack_id not in self._catalogue.packs}
        gone = {**lost, **self.gone}
        head.gone = [GoneRow(pack_id, held.generation) for pack_id, held in gone.items() if pack_id not in came]
        head.uses = b"".join(self.uses)
        head.manifests_gone = sorted(self.manifests_gone - {row.id for row in head.manifests})
        head.pins = self.pins
        return entry


def _keys_name(manifest_id: str) -> str:
    """Name under which the keys of a manifest are signed."""
    return f"keys of {manifest_id}"
