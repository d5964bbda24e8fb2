"""Packs and keys of requests in blobs: upload and reads.

Adjacent ranges of a pack are read with one call, and calls run in parallel.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import ManifestWrite, ReadSpan, TakeFrame
from persistkv.storage.blobs import BlobMissingError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.manifest import (
    ManifestKeys,
    decode_manifest_keys,
    encode_manifest_keys,
)
from persistkv.storage.format.pack import PLAIN_KEY, Frame
from persistkv.storage.format.pack_writer import NewPack
from persistkv.storage.format.seal import record_key
from persistkv.storage.shared.calls import Medium
from persistkv.storage.shared.format import (
    LATEST_TIME,
    NONCE_BYTES,
    Names,
    PackEntry,
    record_name,
)
from persistkv.storage.shared.replica import KeysPlace, PackBlob, Replica

# bytes per second of a fast medium, which reads the bytes of a gap in less time than another call
# takes
_BYTES_PER_S = 500e6
# maximum number of blobs of one pack that a read tries; engines that store the pack at the same
# time make several
_MOST_BLOBS = 4
_MOST_GAP_BYTES = 256 << 10  # 256 KiB


class UploadBudget:
    """Limit on the memory of encoded packs during uploads, in bytes. A pack that is larger reserves
    all of the limit; a pack that is uploaded from its existing memory reserves none.
    """

    def __init__(self, num_bytes: int) -> None:
        self._free = self._all = num_bytes
        """Bytes that are not reserved, and the whole limit."""
        self._changed = threading.Condition()
        """Guards ``_free``; notified when memory is released."""

    @contextmanager
    def reserved(self, pack: NewPack) -> Iterator[None]:
        """Reserve memory for a pack while the ``with`` block runs; wait until enough memory is
        free."""
        length = 0
        if pack.encodes:
            length = min(pack.raw_length, self._all)
        with self._changed:
            self._changed.wait_for(lambda: length <= self._free)
            self._free -= length
        try:
            yield
        finally:
            with self._changed:
                self._free += length
                self._changed.notify_all()


class Upload(NamedTuple):
    """Blobs that were uploaded for a commit."""

    entries: list[PackEntry]
    """Entry of each pack in the index."""
    places: list[KeysPlace]
    """Place of the keys of each request."""
    earliest: float
    """Time of the first upload, on the medium's clock; later than any if there was none."""


class _Uploaded(NamedTuple):
    """A blob that was uploaded."""

    time: float
    """Time of the upload, on the medium's clock."""
    entry: PackEntry | None
    """Entry of the pack in the blob; None: the blob has the keys of requests."""


class _KeyRecords(NamedTuple):
    """Content of the blob with the keys of all requests of a commit."""

    nonce: bytes
    """Random part of the name of the blob."""
    records: list[Buffer]
    """The sealed keys of each request."""
    places: list[KeysPlace]
    """Place of each record in the blob."""


class PackBlobs:
    """Packs of one namespace. Thread-safe.

    :param on_missing: called with the name (pack id and nonce) of a pack whose blob is missing.
    """

    def __init__(
        self,
        medium: Medium,
        names: Names,
        replica: Replica,
        on_missing: Callable[[bytes], None],
    ) -> None:
        self._medium = medium
        self._names = names
        self._replica = replica
        self._on_missing = on_missing
        bytes_per_latency = int(medium.blobs.latency_s * _BYTES_PER_S)
        self._gap_bytes = min(bytes_per_latency, _MOST_GAP_BYTES)
        """Bytes between two spans up to which one call reads both: to read the gap takes less time
        than a second call."""

    # Uploads

    def upload(
        self,
        packs: Sequence[NewPack],
        writes: Sequence[ManifestWrite],
        memory: int,
    ) -> Upload:
        """Upload packs, and one blob with the keys of requests. Nothing names them yet: after a
        failure, the sweep deletes them.

        :param memory: maximum bytes of encoded packs.
        """
        budget = UploadBudget(memory)
        key_records = self._key_records(writes)
        uploads: list[Callable[[], _Uploaded]] = []
        for pack in packs:
            uploads.append(partial(self._upload_pack, pack, budget))
        if writes:
            uploads.append(partial(self._upload_keys, key_records))
        done = self._medium.uploads.all(operator.call, uploads)

        times = [uploaded.time for uploaded in done]
        earliest = min(times, default=LATEST_TIME)
        entries = [uploaded.entry for uploaded in done if uploaded.entry is not None]
        return Upload(entries, key_records.places, earliest)

    def _key_records(self, writes: Sequence[ManifestWrite]) -> _KeyRecords:
        """Seal the keys of requests as records of one blob."""
        seal = self._medium.seal
        nonce = self._new_nonce()
        records: list[Buffer] = []
        places: list[KeysPlace] = []
        offset = 0
        for write in writes:
            sealed = self._sealed_keys(write)
            data_key = record_key(sealed) if seal.encrypts else PLAIN_KEY
            length = len(sealed)
            places.append(KeysPlace(nonce, offset, length, data_key))
            records.append(sealed)
            offset += length
        return _KeyRecords(nonce, records, places)

    def _new_nonce(self) -> bytes:
        """Return the random part of the name of a new blob."""
        return self._medium.clock.random.randbytes(NONCE_BYTES)

    def _upload_keys(self, keys: _KeyRecords) -> _Uploaded:
        """Upload the blob with the keys of requests."""
        blob = self._names.keys_blob(keys.nonce)
        time = self._medium.put(blob, keys.records)
        return _Uploaded(time, None)

    def _sealed_keys(self, write: ManifestWrite) -> bytes:
        """Return the keys of a request's blocks as they are stored, sealed for its tenant."""
        encoded = encode_manifest_keys(write.keys)
        name = self._keys_name(write.manifest.id)
        return self._medium.seal.sealed(name, encoded, write.manifest.tenant)

    def _keys_name(self, manifest_id: str) -> bytes:
        """Return the name under which the keys of a request are sealed."""
        return record_name(self._replica.namespace, f"keys of {manifest_id}")

    def _upload_pack(self, pack: NewPack, budget: UploadBudget) -> _Uploaded:
        """Upload a pack when there is memory for it."""
        with budget.reserved(pack):
            entry = self._put_pack(pack)
        return _Uploaded(entry.time, entry)

    def _put_pack(self, pack: NewPack) -> PackEntry:
        """Write a pack to a blob of its own; return its entry in the index, with the medium's
        time."""
        medium = self._medium
        payload: list[Buffer] = list(pack.stream())
        # make the blob's name new, even if the same pack is uploaded again
        nonce = self._new_nonce()
        blob = self._names.pack(pack.pack_id + nonce)
        # The table follows the payload, so that a rebuild can find the pack without the index.
        table = pack.table
        stored_table = medium.seal.encode_table(table)
        time = medium.put(blob, [*payload, stored_table])
        return PackEntry(pack.pack_id, nonce, table.encode(), time)

    # Reads

    def read(self, spans: Sequence[ReadSpan]) -> list[bool]:
        """Fill the buffers of spans of packs; return for each span whether it was filled. A span is
        not filled if its pack is not held, if the blob is missing or too short, or if the span is
        beyond the payload.

        :raises StoreError: the medium failed; the content of all buffers is undefined.
        """
        filled = [False] * len(spans)

        def fill(run: _Range) -> None:
            is_filled = self._fill(run, iter(run.buffers))
            if is_filled:
                for index in run.spans:
                    filled[index] = True

        # ``_fill`` removes a missing blob from the replica (``on_missing``), which then shows
        # another blob of the pack, if there is one. Read again from that blob.
        for _ in range(_MOST_BLOBS):
            ranges = self._ranges(spans, filled)
            self._medium.loads.all(fill, ranges)
            if all(filled) or not self._have_other_blobs(ranges):
                break
        return filled

    def _have_other_blobs(self, ranges: Sequence[_Range]) -> bool:
        """Return whether a pack was read from a blob that turned out to be missing, and another
        blob holds it."""
        nonces_read = {run.pack_id: run.blob.nonce for run in ranges}
        held = self._replica.blobs(nonces_read)
        held_blobs = held.items()
        return any(blob.nonce != nonces_read[pack_id] for pack_id, blob in held_blobs)

    def read_frames(
        self,
        pack_id: bytes,
        frames: Sequence[Frame],
        buffer: memoryview,
        take: TakeFrame,
    ) -> None:
        """Read frames of a pack into ``buffer``, one after another, and pass each to ``take``.
        Frames that cannot be read are left out.

        :param buffer: memory for one frame, at least as large as the largest.
        :param take: called with the index of a frame and its stored bytes, which the next frame
            overwrites.
        :raises StoreError: the medium failed. Errors of ``take`` end the read unchanged.
        """
        spans: list[ReadSpan] = []
        for frame in frames:
            # all frames use the same memory, one after another
            memory = buffer[: frame.stored_length]
            spans.append(ReadSpan(pack_id, frame.offset, [memory]))
        is_read = [False] * len(spans)

        def take_span(index: int, stored: memoryview) -> None:
            take(index, stored)
            is_read[index] = True

        # If the blob is gone, ``_fill`` removes it from the replica, which then shows another blob
        # of the pack. Read the remaining frames from that blob.
        for _ in range(_MOST_BLOBS):
            ranges = self._ranges(spans, is_read)
            # read one range after the other, because the frames share the memory
            for run in ranges:
                # these buffers call ``take_span`` with each frame as soon as it is in the memory
                buffers = run.buffers_taken_by(take_span)
                is_filled = self._fill(run, buffers)
                # stop, because the next ranges are in the same blob, which is gone
                if not is_filled:
                    break
            if all(is_read) or not self._have_other_blobs(ranges):
                break

    def _fill(self, run: _Range, buffers: Iterator[memoryview]) -> bool:
        """Read a range into buffers; return False if its blob is missing or too short. If the blob
        is gone for good, report the pack with ``on_missing``."""
        name = run.pack_id + run.blob.nonce
        blob = self._names.pack(name)
        length = run.end - run.start
        try:
            done = self._medium.blobs.read(blob, run.start, length, buffers)
        except BlobMissingError:
            is_too_short = False
        else:
            if done == length:
                return True
            # the blob exists, but ends before the range
            is_too_short = True
        if self._is_lost(blob, is_too_short=is_too_short):
            self._on_missing(name)
        return False

    def _is_lost(self, blob: str, *, is_too_short: bool) -> bool:
        """Return whether a blob whose read has failed is gone for good: it is too short, because it
        was changed, or it is still missing at a second look."""
        medium = self._medium
        # check the policy, too: in a directory that is not mounted at present, every blob is
        # missing
        if not medium.exists(medium.names.policy):
            return False
        return is_too_short or not medium.exists(blob)

    def _ranges(
        self,
        spans: Sequence[ReadSpan],
        filled: list[bool],
    ) -> list[_Range]:
        """Group the spans that are not filled into ranges, one for each call. Skip spans of missing
        packs or beyond the payload, which stay misses.

        :param filled: whether each span is filled; empty spans are marked here.
        """
        ranges: list[_Range] = []
        # the last range of ``ranges``
        current: _Range | None = None
        held = self._replica.blobs({span.pack_id for span in spans})
        for index in _reading_order(spans):
            if filled[index]:
                continue
            span = spans[index]
            length = sum(buffer.nbytes for buffer in span.buffers)
            blob = held.get(span.pack_id)
            if blob is None or span.offset + length > blob.table.payload_length:
                continue
            if not length:
                filled[index] = True
                continue
            if current is None or not current.is_followed_by(span, self._gap_bytes):
                current = _Range(span.pack_id, blob, span.offset)
                ranges.append(current)
            current.add(index, span, length)
        return ranges

    def manifest_keys(self, manifest_id: str) -> ManifestKeys | None:
        """Return the keys of a request's blocks; None if the request is not held, or its keys are
        missing or damaged."""
        place = self._replica.keys_place(manifest_id)
        if place is None:
            return None
        medium = self._medium
        blob = self._names.keys_blob(place.nonce)
        name = self._keys_name(manifest_id)
        try:
            # if the blob ends before the record, ``opened`` raises
            record = medium.read(blob, place.offset, place.length)
            content = medium.seal.opened(name, record)
            return decode_manifest_keys(content)
        except (CorruptPackError, BlobMissingError):
            return None


class _Range:
    """One read of bytes ``start`` to ``end`` (exclusive) of a pack's blob: of neighbouring spans,
    and of the gaps between them. The range is empty at first.

    :param blob: the blob that holds the pack.
    """

    def __init__(
        self,
        pack_id: bytes,
        blob: PackBlob,
        start: int,
    ) -> None:
        self.pack_id = pack_id
        self.blob = blob
        self.start = self.end = start
        self._gap_memory = memoryview(b"")
        """Receives the bytes of all gaps between spans, one over another: they are ignored."""
        self.buffers: list[memoryview] = []
        """Receive the bytes, in order: those of the spans and of the gaps. None is empty."""
        self.spans: list[int] = []
        """Indexes of the requested spans."""
        self._span_at: dict[int, int] = {}
        """Index in ``buffers`` of the first buffer of a span → index of the span."""

    def is_followed_by(self, span: ReadSpan, gap_bytes: int) -> bool:
        """Return whether a span is in the same pack, at most ``gap_bytes`` behind the range."""
        distance = span.offset - self.end
        return span.pack_id == self.pack_id and 0 <= distance <= gap_bytes

    def add(
        self,
        index: int,
        span: ReadSpan,
        length: int,
    ) -> None:
        """Append span ``index``, of ``length`` bytes, and memory for the bytes between the previous
        span and it."""
        gap = span.offset - self.end
        # allocate more memory for a larger gap; buffers of earlier gaps keep the old memory
        if gap > len(self._gap_memory):
            self._gap_memory = memoryview(bytearray(gap))
        if gap:
            self.buffers.append(self._gap_memory[:gap])
        first_buffer = len(self.buffers)
        self._span_at[first_buffer] = index
        self.buffers += [buffer.cast("B") for buffer in span.buffers if buffer.nbytes]
        self.end = span.offset + length
        self.spans.append(index)

    def buffers_taken_by(self, take: TakeFrame) -> Iterator[memoryview]:
        """Yield the buffers to a reader, and pass the first one of each span to ``take`` when it is
        full, with the index of the span."""
        for number, buffer in enumerate(self.buffers):
            yield buffer
            # the reader asks for the next buffer, so this one is full
            span = self._span_at.get(number)
            if span is not None:
                take(span, buffer)


def _reading_order(spans: Sequence[ReadSpan]) -> list[int]:
    """Return the indexes of spans in the order of packs and offsets, so that neighbours in a pack
    follow each other."""

    def place(index: int) -> tuple[bytes, int]:
        span = spans[index]
        return span.pack_id, span.offset

    indexes = range(len(spans))
    return sorted(indexes, key=place)
