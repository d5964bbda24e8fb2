"""Session of one handle with one namespace: commits, uses, packs, and application of the feed to the local catalogue.

A commit has three steps:

1. Packs are uploaded in parallel, together with one object that holds the keys of the manifests. Nothing refers to them
   yet: after a failure or a kill a sweep deletes them.
2. One object in the writer's inbox describes the whole commit. Its upload is the commit. The next commit has the next
   number, and is sent after the outcome of this one is known.
3. The commit is applied to the local catalogue. The leader merges it into the feed, which every engine applies.

If the outcome of step 2 stays unknown, the session continues under a new writer id and never deletes anything: the
leader may still find the object and merge it. A pack of the failed commit is then a duplicate, which the feed resolves.

The name of a pack's object ends in a nonce, drawn for each upload: the bytes under a name never change, and no upload
reuses an object. Its bytes are the pack's, with authentication tags between payload and table if the store has a key.
Adjacent ranges of a pack are read with one request, and requests run in parallel.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TypeVar

from persistkv.errors import CorruptPackError, CorruptStoreError, StoreError
from persistkv.storage.backend import CommitBatch, CommitResult, ReadSpan
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.manifest import ManifestKeys, decode_manifest_keys, encode_manifest, encode_manifest_keys
from persistkv.storage.format.pack import Frame
from persistkv.storage.format.pack_writer import NewPack
from persistkv_s3.authentication import SignedObjects, slices
from persistkv_s3.catalogue import Catalogue, PackObject, Plan, Position
from persistkv_s3.client.transport import ABSENT, ConditionFailedError, ObjectInfo, ObjectMissingError, S3Error, Take
from persistkv_s3.feed.format import (
    MAX_FEED_BYTES,
    MAX_INBOX_BYTES,
    MAX_SEGMENT_BYTES,
    MAX_SNAPSHOT_BYTES,
    NONCE_BYTES,
    WRITER_BYTES,
    Dump,
    Entry,
    Feed,
    InboxName,
    ManifestRow,
    NamespaceHead,
    PackRow,
    Snapshot,
    commit_name,
    feed_name,
    parse_inbox,
    seal,
    split_records,
    unseal,
)
from persistkv_s3.feed.head import StoreHead

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MOST_COMMIT_S = 12 * 3600.0  # 12 hours from the first upload to the commit's object; a sweep spares younger objects
_TRIES = 4
"""Maximum number of attempts to reach the head's position: listed objects may be deleted before they are fetched."""
_MOST_SKIPPED = 256
"""Maximum number of feed objects that one attempt skips because they were deleted: a forged head may name 2 ** 48."""
_AT_ONCE = 4
"""Maximum number of feed objects or segments in memory at a time."""
_GAP_BYTES = 128 << 10  # 128 KiB: less than the bytes transferred in the latency of one request


class UploadBudget:
    """Limit on the memory of encoded packs during uploads, in bytes. A pack that is larger reserves all of the limit; a
    pack that is uploaded from its existing memory reserves none.
    """

    def __init__(self, num_bytes: int) -> None:
        self._free = self._all = num_bytes
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, writer: NewPack) -> Iterator[None]:
        """Reserve memory for a pack while the ``with`` block runs; wait until enough memory is free."""
        length = min(writer.raw_length, self._all) if writer.encodes else 0
        with self._changed:
            self._changed.wait_for(lambda: length <= self._free)
            self._free -= length
        try:
            yield
        finally:
            with self._changed:
                self._free += length
                self._changed.notify_all()


class NamespaceSession:
    """Session with one namespace, see the top of this file. Thread-safe, but only one thread at a time may commit."""

    def __init__(self, objects: SignedObjects, catalogue: Catalogue, head: StoreHead, touch_s: float) -> None:
        self.objects = objects
        self.catalogue = catalogue
        self._bucket = objects.bucket
        self._clock = objects.bucket.clock
        self._names = objects.names
        self.namespace = objects.names.namespace
        self._head = head
        self._touch_s = touch_s
        self.writer = self._clock.random.randbytes(WRITER_BYTES)
        """Writer id of the next commit, see ``InboxName``. A failed commit changes it."""
        self._number = 0
        self._unmerged: dict[int, Entry] = {}
        """Own commits that the feed does not contain yet."""
        self._read: set[InboxName] = set()
        """Commits of other writers that were already read from the inbox."""
        self._uses: dict[bytes, int] = {}
        """Unpublished uses, oldest first: pack id → number of its last use, which packs used together share."""
        self._moments = 0
        self._written_at = self._clock.monotonic()
        self._skips_missing = False
        """Whether a missing object of the feed is treated as damaged, in the present call of ``sync``."""
        self._lock = threading.RLock()

    @property
    def is_waiting(self) -> bool:
        """Whether an own commit is not merged into the feed yet."""
        return bool(self._unmerged)

    def commit(self, batch: CommitBatch) -> CommitResult:
        """See ``Backend.commit``."""
        plan = self.catalogue.plan(batch)
        if batch.seen is not None and plan.cursor != batch.seen:
            return CommitResult(batch.seen, stale=True)
        missing = {pack.pack_id for pack in plan.missing}
        used = [*batch.touches, *(pack.pack_id for pack in batch.packs if pack.pack_id not in missing)]
        used += [pack_id for write in batch.manifests for pack_id in write.packs]
        used = list(dict.fromkeys(used))
        if not (plan.missing or plan.gone or batch.manifests or plan.pins):
            self._touch(used)
            return CommitResult(plan.cursor)
        if plan.missing or batch.manifests:
            self._written_at = self._clock.monotonic()
        entry = self._upload(batch, plan)
        entry.uses = [*self._pending_uses(), b"".join(used)]
        # Without the removal of a lost object, the feed would keep it and drop that of this commit.
        entry.gone = list(dict.fromkeys([*plan.gone, *self.catalogue.lost()]))
        before, after = self._publish(entry)
        return CommitResult(after if before == plan.cursor else plan.cursor, plan.removed)

    def _upload(self, batch: CommitBatch, plan: Plan) -> Entry:
        """Upload packs, and an object with the keys of the manifests; return the commit, which is not published yet."""
        number, started = self._number + 1, self._bucket.now()
        keys_name, keys = f"keys/{self.writer.hex()}-{number:012x}", list[bytes]()
        manifests, offset = list[ManifestRow](), 0
        for write in batch.manifests:
            encoded = [encode_manifest_keys(write.keys)]
            signed = self.objects.authenticator.signed(self.namespace, _keys_of(write.manifest.id), encoded)
            keys.append(b"".join(signed))
            named = b"".join(dict.fromkeys(write.packs))
            manifests.append(ManifestRow(encode_manifest(write.manifest), named, keys_name, offset, len(keys[-1])))
            offset += len(keys[-1])
        budget = UploadBudget(batch.memory)

        def put(pack: NewPack | None) -> PackRow | None:
            if pack is None:
                self._bucket.put(self._names.base + keys_name, keys)
                return None
            with budget.reserved(pack):
                return self._upload_pack(pack)

        try:
            found = self._bucket.all(put, [*plan.missing, *([None] if keys else [])], writes=True)
        except BaseException:
            self._renew_writer()  # a late PUT may still create the object with keys: do not reuse its name
            raise
        packs = [row for row in found if row is not None]
        return Entry(writer=self.writer, number=number, time=started, packs=packs, manifests=manifests, pins=plan.pins)

    def _upload_pack(self, writer: NewPack) -> PackRow:
        """Upload a pack; return its row for the commit. A sweep deletes an object to which no commit refers."""
        payload: list[Buffer] = list(writer.stream())
        nonce = self._bucket.clock.random.randbytes(NONCE_BYTES)
        body = self.objects.authenticator.pack_tags(writer.table, payload) + writer.table.encode()
        self._bucket.put(self._names.pack(writer.pack_id, nonce), [*payload, body])
        return PackRow(writer.pack_id, nonce, body)

    def _publish(self, entry: Entry) -> tuple[bytes, bytes]:
        """Write a commit to the inbox and apply it to the local catalogue; return ``Changes.cursor`` before and after.

        :raises StoreError: the commit is too large, took over 12 hours, or was not written; it is not applied here. If
            its outcome stayed unknown, or only the local catalogue failed, the leader may still merge it.
        """
        name = InboxName(self.namespace, entry.writer, entry.number)
        signed_as = commit_name(entry.writer, entry.number)
        data = self.objects.authenticator.signed(self.namespace, signed_as, [seal(entry)])
        if sum(len(memoryview(piece)) for piece in data) > MAX_INBOX_BYTES:
            raise StoreError(f"a commit of more than {MAX_INBOX_BYTES} bytes of key tables: commit fewer packs at once")
        try:
            self._bucket.put(self._names.inbox(name), data, condition=ABSENT)
        except ConditionFailedError as error:
            if not error.uncertain:  # the writer id is not unique: the process was copied
                self._renew_writer()
                raise
        except S3Error as error:
            if not (error.uncertain and self._was_written(name)):
                self._renew_writer()
                raise
        if self._bucket.now() - entry.time > _MOST_COMMIT_S:  # the process was suspended: the leader rejects it
            self._renew_writer()
            raise StoreError("the commit took more than 12 hours and does not count")
        self._number = entry.number
        with self._lock:
            self._unmerged[entry.number] = entry
        self._uses.clear()
        return self.catalogue.apply_pending(entry, self._bucket.now())

    def _was_written(self, name: InboxName) -> bool:
        """Return whether a commit is in the inbox or already merged; False also if the server cannot be asked."""
        try:
            with suppress(ObjectMissingError):
                self._bucket.head(self._names.inbox(name))
                return True
            self._head.poll()
            self.sync()
            return self.catalogue.merged_number(name.writer) >= name.number
        except StoreError:
            return False

    def _renew_writer(self) -> None:
        self.writer, self._number = self._clock.random.randbytes(WRITER_BYTES), 0

    # Uses

    def _touch(self, pack_ids: Sequence[bytes]) -> None:
        """Record a use of packs, for the next commit with content. Publish uses that have waited for ``touch_s``."""
        held = self.catalogue.objects(pack_ids) if pack_ids else {}
        if held:
            self._moments += 1
            for pack_id in held:
                self._uses.pop(pack_id, None)
                self._uses[pack_id] = self._moments
        if not self._uses:
            self._written_at = self._clock.monotonic()
        elif self._clock.monotonic() - self._written_at >= self._touch_s:
            self.write_uses()

    def _pending_uses(self) -> list[bytes]:
        """Return the unpublished uses, oldest first: concatenated ids of the packs that were used together."""
        return [b"".join(pack_ids) for _, pack_ids in groupby(self._uses, key=self._uses.__getitem__)]

    def write_uses(self) -> None:
        """Publish the unpublished uses in a commit of their own. If it fails, they remain unpublished."""
        if self._uses:
            number, now = self._number + 1, self._bucket.now()
            uses = [*self._pending_uses(), b""]
            self._publish(Entry(writer=self.writer, number=number, time=now, uses=uses, gone=self.catalogue.lost()))
            self._written_at = self._clock.monotonic()

    # Packs

    def read(self, spans: Sequence[ReadSpan]) -> list[bool]:
        """See ``Backend.read``."""
        filled = [False] * len(spans)

        def fetch(run: _RangedGet) -> None:
            frames = run.widen() if self.objects.authenticator.key_id else []
            if not self._fill(run):
                return
            is_ours = self.objects.authenticator.frame_check(run.held.table, run.held.tags)
            pieces = slices(run.buffers, [(frame.offset - run.start, frame.stored_length) for _, frame in frames])
            bad = [frame for (number, frame), stored in zip(frames, pieces, strict=True) if not is_ours(number, stored)]
            for index, start, end in run.spans:
                filled[index] = not any(frame.offset < end and start < _end(frame) for frame in bad)

        self._bucket.all(fetch, self._runs(spans, filled))
        return filled

    def read_frames(self, pack_id: bytes, frames: Sequence[Frame], buffer: memoryview, take: Take) -> None:
        """See ``SupportsFrames.read_frames``."""

        def fetch(run: _RangedGet) -> bool:
            offsets = [frame.offset for frame in run.held.table.frames]
            is_ours = self.objects.authenticator.frame_check(run.held.table, run.held.tags)

            def check(number: int, stored: memoryview) -> None:
                index = run.first_buffers.get(number)
                if index is not None and is_ours(bisect_left(offsets, frames[index].offset), [stored]):
                    take(index, stored)

            return self._fill(run, check)

        spans = [ReadSpan(pack_id, frame.offset, [buffer[: frame.stored_length]]) for frame in frames]
        gap = memoryview(bytearray(_GAP_BYTES))  # receives the bytes of all gaps, which are not longer
        for run in self._runs(spans, [False] * len(spans), gap):
            if not fetch(run):
                return

    def _fill(self, run: _RangedGet, take: Take | None = None) -> bool:
        """Download the range of a run; return False if its object is missing."""
        try:
            self._bucket.fill(self._names.pack(run.pack_id, run.held.nonce), run.start, run.buffers, take)
            return True
        except ObjectMissingError:
            self._mark_missing(run.pack_id, run.held.nonce)
            return False

    def _runs(self, spans: Sequence[ReadSpan], filled: list[bool], gap: memoryview | None = None) -> list[_RangedGet]:
        """Group spans into GETs; mark empty spans as filled; skip spans of missing packs or beyond the payload.

        :param gap: memory for the bytes between two spans; None: new memory for each gap.
        """
        runs: list[_RangedGet] = []
        objects = self.catalogue.objects({span.pack_id for span in spans})
        for index in sorted(range(len(spans)), key=lambda n: (spans[n].pack_id, spans[n].offset)):
            span = spans[index]
            length = sum(buffer.nbytes for buffer in span.buffers)
            held = objects.get(span.pack_id)
            if held is None or span.offset + length > held.table.payload_length:
                continue
            if not length:
                filled[index] = True
                continue
            if not runs or runs[-1].held is not held or not 0 <= span.offset - runs[-1].end <= _GAP_BYTES:
                runs.append(_RangedGet(span.pack_id, held, span.offset, gap))
            runs[-1].add(index, span, length)
        return runs

    def _mark_missing(self, pack_id: bytes, nonce: bytes) -> None:
        """Remove a pack whose object is missing: now from the local catalogue, with the next commit from the feed."""
        self.catalogue.drop(pack_id, nonce, self._bucket.now())

    # Feed

    def sync(self) -> None:
        """Apply the feed to the local catalogue, up to the newest known head. An object that is missing although the
        head names it is treated as damaged: only its content is lost.

        :raises S3Error: a request failed; the catalogue has the position of the last feed object that was applied.
        """
        with self._lock:
            self._skips_missing = False
            for tries_left in reversed(range(_TRIES)):
                try:
                    target = self._head.head.namespaces.get(self.namespace)
                    self._sync(target)
                    break
                except ObjectMissingError:  # superseded after the head was read, or deleted by an operator
                    if not tries_left:
                        raise
                    self._head.poll()
                    newest = self._head.head.namespaces.get(self.namespace)
                    # A leader deletes no object that the head names, so this one will not come back.
                    self._skips_missing = newest == target
            if self._unmerged:
                merged = self.catalogue.merged_number(self.writer)
                self._unmerged = {number: entry for number, entry in self._unmerged.items() if number > merged}

    def _sync(self, target: NamespaceHead | None) -> None:
        if not self.catalogue.is_of(self._head.head.store):  # own commits were perhaps deleted with the head
            inbox = {parse_inbox(info.key) for info in self.inbox()} if self._unmerged else set()
            kept = {n: e for n, e in self._unmerged.items() if InboxName(self.namespace, e.writer, n) in inbox}
            self._unmerged = kept
            self._reload([], Position())
        at = self.catalogue.position
        if target is None:
            if at.generation:
                self._reload([], Position())
            return
        known = target.term_of(at.position)
        follows = (
            at.generation in ((target.generation,) if at.position else (b"", target.generation))
            and at.position <= target.position
            and known in (None, at.term)
            and not (at.position == 0 and target.snapshot)
        )
        if not follows or not self._follow(target, at):
            at = self._load_snapshot(target)
            if not self._follow(target, at):
                raise ObjectMissingError(f"{self._names.base}feed/: the feed does not follow the snapshot")

    def _follow(self, target: NamespaceHead, at: Position) -> bool:
        """Apply the feed objects after ``at``, up to the head's position.

        :returns: False if the head does not name all of them, or if one does not follow its predecessor.
        :raises ObjectMissingError: one is missing, or too many.
        """
        skipped = 0

        def fetch(position: int) -> tuple[bytes, Feed | None] | None:
            term = target.term_of(position)
            if term is None:
                return None
            feed = self.feed_object((position, term), may_be_missing=self._skips_missing)
            return term, feed

        positions = range(at.position + 1, target.position + 1)  # not a list: a forged head may name 2 ** 48
        for position, found in self._bucket.each(fetch, positions, _AT_ONCE):
            if found is None:
                return False
            term, feed = found
            if feed is None:
                skipped += 1
                if self._skips_missing and skipped > _MOST_SKIPPED:
                    raise ObjectMissingError(
                        f"{self._names.base}feed/: {skipped} objects that the head names are missing"
                    )
                at = Position(target.generation, position, term, at.time, damaged=True)
                self.catalogue.skip_to(at)
                continue
            if feed.generation != target.generation or (feed.previous != at.term and not at.damaged):
                return False
            self.catalogue.apply_feed(feed)
            at = Position(feed.generation, feed.position, feed.term, feed.time)
        return True

    def feed_object(self, name: tuple[int, bytes], *, may_be_missing: bool = True) -> Feed | None:
        """Return the feed object named by (position, term); None if it is unreadable, or may be missing and is."""
        return self.objects.record(feed_name(*name), Feed, MAX_FEED_BYTES, may_be_missing=may_be_missing)

    def snapshot(self, target: NamespaceHead, *, may_be_missing: bool = True) -> Snapshot | None:
        """Return the snapshot that the head names for this namespace; None if it names none, or it is unreadable, or
        may be missing and is.
        """
        if not target.snapshot:
            return None
        name = target.snapshot
        return self.objects.record(name, Snapshot, MAX_SNAPSHOT_BYTES, may_be_missing=may_be_missing)

    def _load_snapshot(self, target: NamespaceHead) -> Position:
        """Replace the catalogue by the readable parts of the newest snapshot; return the new position."""
        generation, name = target.generation, target.snapshot
        found = self.snapshot(target, may_be_missing=self._skips_missing)
        if found is None:  # the feed objects that it covers are lost, too
            term = target.term_of(target.snapshot_position) or b""
            at = Position(generation, target.snapshot_position, term, 0.0, damaged=bool(name))
            self._reload([], at)
            return at
        damaged: list[str] = []
        try:
            self._reload(self._records(found.base, Dump, damaged), Position(generation))
        except CorruptStoreError as error:
            logger.warning("%s%s has invalid rows (%s): its packs are misses", self._names.base, name, error)
            damaged.append(name)
            self._reload([], Position(generation))
        for feed in self._records(found.tails, Feed, damaged):
            self.catalogue.skip_to(Position(generation, feed.position - 1, feed.previous, 0.0))
            self.catalogue.apply_feed(feed)
        at = Position(generation, found.position, found.term, found.time, bool(damaged))
        self.catalogue.skip_to(at)
        return at

    def _records(self, names: Sequence[str], kind: type[T], damaged: list[str]) -> Iterator[T]:
        """Yield the records of segments up to damage; add the names of damaged segments to ``damaged``."""
        for name, data in self._bucket.each(self._segment, names, _AT_ONCE):
            try:
                for record in split_records(data):
                    yield unseal(record, kind)
            except CorruptPackError as error:
                damaged.append(name)
                logger.warning("%s%s is unreadable (%s): its packs are misses", self._names.base, name, error)

    def _segment(self, name: str) -> memoryview:
        try:
            return self.objects.get(name, MAX_SEGMENT_BYTES)
        except CorruptPackError:
            return memoryview(b"unreadable")
        except ObjectMissingError:
            if not self._skips_missing:
                raise
            return memoryview(b"missing")

    def _reload(self, dumps: Iterable[Dump], position: Position) -> None:
        """Replace the catalogue by dumped rows; then apply own unmerged commits again."""
        self.catalogue.load(dumps, position, self._head.head.store)
        self._read.clear()
        for entry in self._unmerged.values():
            self.catalogue.apply_pending(entry, self._bucket.now())

    # Inbox

    def inbox(self) -> list[ObjectInfo]:
        """Return the listing of this namespace's commits in the inbox. The leader deletes merged ones later."""
        return list(self._bucket.list(f"{self._names.inbox_prefix}{self.namespace.hex()}-"))

    def unmerged(self, infos: dict[InboxName, ObjectInfo]) -> list[InboxName]:
        """Return those of the commits that the feed does not contain, oldest first; those of a writer are in order."""
        merged = self.catalogue.merged() if infos else {}
        new = (name for name in infos if name.number > merged.get(name.writer, 0))
        return sorted(new, key=lambda name: (infos[name].modified, name))

    def read_inbox(self, found: Iterable[ObjectInfo]) -> None:
        """Apply to the local catalogue those inbox commits that the feed does not contain.

        :param found: result of ``inbox``, called before the head was read, so that no commit is missed.
        """
        with self._lock:
            small = (info for info in found if info.size <= MAX_INBOX_BYTES)
            infos = {name: info for info in small if (name := parse_inbox(info.key)) is not None}
            self._read &= infos.keys()
            new = [name for name in self.unmerged(infos) if name not in self._read and name.writer != self.writer]
            for name, entry in self._bucket.each(self.read_commit, new, _AT_ONCE):
                self._read.add(name)
                if entry is None:  # merged and deleted since the head was read, or unreadable
                    self._head.poll()
                    self.sync()
                elif not is_rejected(entry, infos[name]):
                    self.catalogue.apply_pending(entry, self._bucket.now())

    def read_commit(self, name: InboxName) -> Entry | None:
        """Read a commit from the inbox, or an own one from memory; None: missing, unreadable or not authentic."""
        mine = self._unmerged.get(name.number)  # without the lock: ``read_inbox`` holds it and waits for this thread
        if mine is not None and mine.writer == name.writer:
            return mine
        signed_as, key = commit_name(name.writer, name.number), self._names.inbox(name)
        return self.objects.record(signed_as, Entry, MAX_INBOX_BYTES, key=key, may_be_missing=True)

    def manifest_keys(self, manifest_id: str) -> ManifestKeys | None:
        """See ``Backend.manifest_keys``."""
        place = self.catalogue.keys_place(manifest_id)
        if place is None:
            return None
        name, offset, length = place
        if length > MAX_INBOX_BYTES:
            return None
        buffer = bytearray(length)
        try:
            self._bucket.fill(self._names.base + name, offset, [memoryview(buffer)])
            opened = self.objects.authenticator.opened(self.namespace, _keys_of(manifest_id), buffer)
            return decode_manifest_keys(opened)
        except (CorruptPackError, ObjectMissingError):
            return None


class _RangedGet:
    """One GET of bytes ``start`` to ``end`` (exclusive) of the pack object ``held``. The range is empty at first."""

    def __init__(self, pack_id: bytes, held: PackObject, start: int, gap: memoryview | None) -> None:
        self.pack_id = pack_id
        self.held = held
        self.start = self.end = start
        self._gap = gap
        self.buffers: list[memoryview] = []
        self.spans: list[tuple[int, int, int]] = []
        """(index among the requested spans, offset of the first byte in the payload, offset after the last byte)."""
        self.first_buffers: dict[int, int] = {}
        """Index of a span's first buffer → index of the span."""

    def add(self, index: int, span: ReadSpan, length: int) -> None:
        """Append span ``index``, of ``length`` bytes, and memory for the bytes between the previous span and it."""
        self._skip(span.offset - self.end)
        self.first_buffers[len(self.buffers)] = index
        self.buffers += span.buffers
        self.end = span.offset + length
        self.spans.append((index, span.offset, self.end))

    def _skip(self, length: int) -> None:
        if length > 0:
            self.buffers.append(memoryview(bytearray(length)) if self._gap is None else self._gap[:length])
            self.end += length

    def widen(self) -> list[tuple[int, Frame]]:
        """Extend the range to whole frames, to verify their tags; return (index in pack, frame) of each."""
        table = self.held.table.frames
        offsets = [frame.offset for frame in table]
        numbers = range(bisect_right(offsets, self.start) - 1, bisect_left(offsets, self.end))
        frames = [(number, table[number]) for number in numbers]
        if before := self.start - frames[0][1].offset:
            self.buffers.insert(0, memoryview(bytearray(before)))
            self.start -= before
        self._skip(_end(frames[-1][1]) - self.end)
        return frames


def _end(frame: Frame) -> int:
    return frame.offset + frame.stored_length


def is_rejected(entry: Entry, info: ObjectInfo) -> bool:
    """Return whether a commit is rejected because it took over 12 hours: a sweep may have deleted its packs."""
    return info.modified - entry.time > _MOST_COMMIT_S


def _keys_of(manifest_id: str) -> str:
    """Return the name that the authentication tag of a manifest's keys covers."""
    return f"keys of {manifest_id}"
