"""One namespace of one handle: commits to it, and reads from it.

A commit, in this order:

1. Packs go up side by side, and with them one object with the keys of the manifests. Nothing names them yet: what a
   failure or a kill leaves of them is an orphan, which retention removes.
2. One index object says all that the commit did. It is the commit: once it lies there everybody sees all of it.
3. Packs that were found in the bucket instead of written are looked at once more: one that was pruned between 1 and 2
   is written again.

Where nobody can tell whether 2 was done, the handle goes on as another writer: numbers of a writer have no gaps, and
what was done after all is learnt like a stranger's commit.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from persistkv.errors import CorruptPackError, StoreError
from persistkv.storage.backend import CommitBatch, CommitResult, ReadSpan
from persistkv.storage.manifest import ManifestKeys, decode_manifest_keys
from persistkv.storage.pack import Frame
from persistkv.storage.pack_writer import NewPack
from persistkv_s3.cache import IndexCache
from persistkv_s3.catalogue import Use
from persistkv_s3.errors import ObjectExistsError, ObjectMissingError
from persistkv_s3.follower import Follower, log_failure
from persistkv_s3.layout import Entry, Head, Stamp, encode_entries
from persistkv_s3.names import LogName
from persistkv_s3.options import S3Options
from persistkv_s3.packs import PackObjects, Room, Uploaded
from persistkv_s3.plan import Plan, keys_name
from persistkv_s3.runs import Run, neighbours, span_bytes
from persistkv_s3.signed import SignedObjects
from persistkv_s3.sinks import FrameSink
from persistkv_s3.snapshots import Snapshots

logger = logging.getLogger(__name__)


class Space:
    """See the top of this file. Reads come from any thread; commits from one at a time."""

    def __init__(self, objects: SignedObjects, options: S3Options, cache: IndexCache) -> None:
        self._objects = objects
        self.follower = Follower(objects, options.refresh_s, cache)
        self.catalogue = self.follower.catalogue
        self._bucket = objects.bucket
        self.names = objects.names
        self.namespace = objects.namespace
        self._touch_s = options.touch_s
        self._authenticator = objects.authenticator
        self._packs = PackObjects(objects.bucket, objects.names, objects.authenticator)
        self._snapshots = Snapshots(objects, self.follower)
        self._writer = os.urandom(16)
        self._number = 0
        self._told_at = time.monotonic()

    def commit(self, batch: CommitBatch, moment: int, *, dropped: Sequence[str] = ()) -> CommitResult:
        """See ``Backend.commit``.

        :param moment: greater than all that the handle has heard of, in any namespace.
        :param dropped: manifests that go, without their packs.
        """
        follower, catalogue = self.follower, self.catalogue
        if batch.deletions or batch.bad:
            follower.refresh()  # what others wrote since under the same name is not to be deleted
        else:
            follower.look_before_commit()
        if batch.seen is not None and not catalogue.is_current(batch.seen):
            return CommitResult(batch.seen, stale=True)
        moment = max(moment, catalogue.moment + 1)
        now = max(catalogue.time, time.time())
        plan = Plan(catalogue, batch, follower.lost, dropped)
        if not plan.says_something:
            self._touch(plan.uses, Use(moment, now))
            return CommitResult(catalogue.cursor)
        keys = plan.manifest_keys(self.namespace, self._authenticator)
        uploaded = self._upload(plan.missing, Room(batch.memory), b"".join(keys))
        entry = plan.entry(self.namespace, Stamp(moment, self._writer), now, self._number + 1, uploaded, keys)
        self._publish([*self._pending(), entry])
        cursor = catalogue.cursor
        catalogue.relearn(pack.table.pack_id for pack in uploaded if pack.reused and pack.table != pack.writer.table)
        self._maintain([pack for pack in uploaded if pack.reused])
        return CommitResult(cursor, plan.evicted)

    def _upload(self, packs: Sequence[tuple[NewPack, int]], room: Room, keys: bytes) -> list[Uploaded]:
        """All packs, each under its generation, and an object with the manifests' keys beside them."""
        found: dict[int, Uploaded] = {}
        name = LogName(self._writer, self._number + 1)

        def put(number: int | None) -> None:
            if number is None:
                self._bucket.put(self.names.manifest_keys(name), [keys], only_if_absent=False)
                return
            writer, generation = packs[number]
            with room.taken(writer):
                found[number] = self._packs.upload(writer, generation)

        try:
            self._bucket.all_writes(put, [*range(len(packs)), *([None] if keys else [])])
        except BaseException:
            self._become_another()  # an object with keys may still arrive: its name is not used again
            raise
        return [found[number] for number in range(len(packs))]

    def _publish(self, entries: list[Entry]) -> None:
        """Tell all, in one object; uses that waited are told with it."""
        name = LogName(self._writer, self._number + 1)
        try:
            self._objects.put(self.names.log(name), encode_entries(entries))
        except ObjectExistsError as error:
            if not error.uncertain:  # nobody else draws this writer's numbers: the process was copied
                self._become_another()
                raise
        except StoreError:
            self._become_another()
            raise
        self._number = name.number
        self.follower.published(name, entries)
        self.follower.touched.clear()
        self._told_at = time.monotonic()
        told = [row.pack_id for entry in entries for row in entry.head.packs]
        told += [row.pack_id for entry in entries for row in entry.head.gone]
        for pack_id in told:
            self.follower.lost.pop(pack_id, None)

    def begin_anew(self) -> None:
        """The bucket was emptied: go on as somebody whom nobody has heard of."""
        self._become_another()
        self.follower.emptied = False

    def _become_another(self) -> None:
        self._writer = os.urandom(16)
        self._number = 0

    def _maintain(self, reused: list[Uploaded]) -> None:
        """What follows a commit, which is done whatever comes of this."""
        try:
            self._bucket.all_writes(self._restore, reused)
            self._snapshots.take_if_due(self._writer)
        except StoreError as error:
            log_failure(f"what follows a commit to {self.names.base}", error)

    def _restore(self, pack: Uploaded) -> None:
        """Write a pack again that was found and is gone."""
        name = pack.table.pack_id
        if self._packs.exists(name, pack.generation):
            return
        held = self.catalogue.packs.get(name)
        logger.warning("%s was removed while a commit reused it; it is written again", name.hex())
        if pack.table == pack.writer.table:
            self._packs.upload_again(pack)
        elif held is not None:  # the index tells of the other's bytes, which nobody has any more
            self.follower.miss(name, held)

    # Uses

    def _touch(self, pack_ids: list[bytes], use: Use) -> None:
        """Uses wait for a commit that says more, so that they cost no request; but not for ever."""
        for pack_id in pack_ids:
            self.catalogue.use(pack_id, use)
            self.follower.touched[pack_id] = use
        if not self.follower.touched:
            self._told_at = time.monotonic()
        elif time.monotonic() - self._told_at >= self._touch_s:
            self.tell_uses()

    def tell_uses(self) -> None:
        """Write down what was used since the last commit."""
        if self.follower.touched:
            self._publish(self._pending())

    def close(self) -> None:
        """Tell uses that waited, and keep what is known for the next start; neither is worth an error."""
        try:
            self.tell_uses()
        except StoreError as error:
            log_failure(f"telling what was used in {self.names.base}", error)
        self.follower.save()

    def _pending(self) -> list[Entry]:
        """Uses that nobody was told of: an entry for each moment."""
        by_use: dict[Use, list[bytes]] = {}
        for pack_id, use in self.follower.touched.items():
            by_use.setdefault(use, []).append(pack_id)
        return [
            Entry(Head(namespace=self.namespace, writer=self._writer, moment=moment, time=at, uses=b"".join(used)), b"")
            for (moment, at), used in sorted(by_use.items())
        ]

    # Reads

    def read(self, spans: Sequence[ReadSpan]) -> list[bool]:
        """See ``Backend.read``: neighbouring spans are one request, requests go side by side."""
        self.follower.ensure()
        filled = [False] * len(spans)
        runs = list(self._runs(spans))

        def fetch(run: Run) -> None:
            numbers = run.widen() if self._authenticator.key_id else range(0)
            try:
                self._bucket.fill(run.key, run.start, run.buffers)
            except ObjectMissingError:
                self.follower.miss(run.pack_id, run.held)
                return
            for number in run.good(self._authenticator, numbers):
                filled[number] = True

        if runs:
            self._bucket.all(fetch, runs)
        return [done or self._is_empty(span) for done, span in zip(filled, spans, strict=True)]

    def read_frames(
        self, pack_id: bytes, frames: Sequence[Frame], buffer: memoryview, take: Callable[[int, memoryview], None]
    ) -> None:
        """See ``Backend.read_frames``: neighbours are one request."""
        self.follower.ensure()
        held = self.catalogue.packs.get(pack_id)
        if held is None:
            return
        offsets = [frame.offset for frame in held.table.frames]
        is_ours = self._authenticator.frame_check(held.table, held.tags)
        for run in neighbours(frames, held.table.payload_length):

            def check(number: int, stored: memoryview, run: Sequence[int] = run) -> None:
                frame = frames[run[number]]
                if is_ours(bisect_left(offsets, frame.offset), [stored]):
                    take(run[number], stored)

            ranges = [(frames[number].offset, frames[number].stored_length) for number in run]
            try:
                self._bucket.pour(self.names.pack(pack_id, held.generation), FrameSink(ranges, buffer, check))
            except ObjectMissingError:
                self.follower.miss(pack_id, held)
                return

    def manifest_keys(self, manifest_id: str) -> ManifestKeys | None:
        """See ``Backend.manifest_keys``."""
        self.follower.look()
        held = self.catalogue.manifests.get(manifest_id)
        if held is None:
            return None
        buffer = bytearray(held.keys_length)
        try:
            self._bucket.fill(self.names.manifest_keys(held.keys), held.keys_offset, [memoryview(buffer)])
            signed_as = keys_name(manifest_id)
            return decode_manifest_keys(self._authenticator.opened(self.namespace, signed_as, buffer))
        except (CorruptPackError, ObjectMissingError):
            return None

    def _is_empty(self, span: ReadSpan) -> bool:
        held = self.catalogue.packs.get(span.pack_id)
        return span_bytes(span) == 0 and held is not None and span.offset <= held.table.payload_length

    def _runs(self, spans: Sequence[ReadSpan]) -> Iterator[Run]:
        run: Run | None = None
        for number in sorted(range(len(spans)), key=lambda n: (spans[n].pack_id, spans[n].offset)):
            span, length = spans[number], span_bytes(spans[number])
            held = self.catalogue.packs.get(span.pack_id)
            if held is None or not length or span.offset + length > held.table.payload_length:
                continue
            if run is None or not run.takes(span, held):
                if run is not None:
                    yield run
                run = Run(self.names.pack(span.pack_id, held.generation), span.pack_id, held, span.offset)
            run.add(number, span, length)
        if run is not None:
            yield run
