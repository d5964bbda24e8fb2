"""Reads one pack from a store and checks all of it: what ``verify``, ``export`` and ``push`` rest on.

1. Every stored byte is checked: frames by their checksums, padding by its zeros, the table by the pack's name.
2. A frame is good where it also decodes to its raw length.
3. Damage is a finding, never an exception; ``StoreError`` means that the medium failed.
"""

from __future__ import annotations

import enum
import mmap
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import msgspec

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import ReadSpan
from persistkv.storage.extensions import InspectableBackend, scan
from persistkv.storage.format.pack import Frame, PackTable, align, decode_frame, frame_seed, pack_id, verify_frame

_READ_BYTES = 8 << 20  # 8 MiB: past it, larger reads gain nothing


class Problem(str, enum.Enum):
    """What is wrong."""

    PAYLOAD = "payload"
    """A frame's bytes are not those that were written under its keys."""
    DECODE = "decode"
    """A frame's bytes are right, and do not decode."""
    SHORT = "short"
    """The payload is not there, or ends too early."""
    PADDING = "padding"
    """Bytes between frames are not zero: harmless by themselves, and a sign of a foreign write."""
    NAME = "name"
    """The table's keys or codec are not those that the pack is named after."""
    PACK_ROWS = "pack rows"
    """Rows of packs do not read; the store does not say which."""
    MANIFEST_ROWS = "manifest rows"
    """Heads of requests do not read; the store does not say which."""
    MANIFEST_KEYS = "manifest keys"
    """The keys of a request do not read."""
    MISSING_BLOCKS = "missing blocks"
    """A request names blocks that no pack holds."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    problem: Problem
    detail: str
    count: int = 1
    """Number of rows that it reports."""
    namespace: str | None = None
    pack: str | None = None
    request: str | None = None
    group: int | None = None
    offset: int | None = None
    """First byte, counted from the pack's begin."""


class OtherReleaseError(Exception):
    """The pack names a codec that this release does not know: no damage, but nothing can be said of it."""


def check_pack(
    backend: InspectableBackend, table: PackTable, took: Callable[[int], None], keep: bytearray | None = None
) -> list[Finding]:
    """Return the defects of a pack.

    :param took: called with the bytes of each read.
    :param keep: is extended by the whole payload; useless if there are defects.
    :raises OtherReleaseError: the pack cannot be decoded by this release.
    :raises StoreError: the medium failed.
    """
    check = _Check(table)
    for frames in frame_runs(table.frames, _READ_BYTES):
        start, end = frames[0].offset, align(frames[-1].offset + frames[-1].stored_length)
        buffer = memoryview(mmap.mmap(-1, end - start))
        if not all(scan(backend, table.namespace, [ReadSpan(table.pack_id, start, [buffer])])):
            check.note(Problem.SHORT, f"bytes {start:,} to {end:,} are not there", offset=start)
        else:
            for frame in frames:
                check.frame(frame, buffer[frame.offset - start :])
            if keep is not None:
                keep += buffer
        took(end - start)
    return check.findings


def check_payload(table: PackTable, payload: memoryview) -> list[Finding]:
    """Return the defects of a pack whose payload is in memory.

    :raises OtherReleaseError: the pack cannot be decoded by this release.
    """
    check = _Check(table)
    if len(payload) != table.payload_length:
        check.note(Problem.SHORT, f"{len(payload):,} bytes of payload; its table says {table.payload_length:,}")
        return check.findings
    for frame in table.frames:
        check.frame(frame, payload[frame.offset :])
    return check.findings


class _Check:
    """Findings about one pack: its table when it is created, each frame when it is given."""

    def __init__(self, table: PackTable) -> None:
        self.findings: list[Finding] = []
        self._table = table
        keys = table.keys.unpack()
        ends = accumulate(frame.block_count for frame in table.frames)
        self._seeds = {
            frame.offset: frame_seed(table.namespace, b"".join(keys[end - frame.block_count : end]))
            for frame, end in zip(table.frames, ends, strict=True)
        }
        largest = max((frame.raw_length for frame in table.frames if frame.encoded), default=0)
        self._raw = memoryview(bytearray(largest))
        if pack_id(table.namespace, table.keys, table.codec) != table.pack_id:
            self.note(Problem.NAME, "the keys and codec of its table are not those that it is named after")

    def note(self, problem: Problem, detail: str, *, group: int | None = None, offset: int | None = None) -> None:
        """Something is wrong."""
        table = self._table
        self.findings.append(
            Finding(
                problem=problem,
                detail=detail,
                namespace=table.namespace.hex(),
                pack=table.pack_id.hex(),
                group=group,
                offset=offset,
            )
        )

    def frame(self, frame: Frame, found: memoryview) -> None:
        """Check a frame.

        :param found: its stored bytes, its padding, and any bytes behind.
        """
        stored = found[: frame.stored_length]
        try:
            verify_frame(frame, stored, self._seeds[frame.offset])
        except CorruptPackError as error:
            self.note(Problem.PAYLOAD, str(error), group=frame.group, offset=frame.offset)
        else:
            self._decode(frame, stored)
        padding = found[frame.stored_length : align(frame.stored_length)]
        if bytes(padding).count(0) != len(padding):
            offset = frame.offset + frame.stored_length
            self.note(Problem.PADDING, "bytes that are not zero behind a frame", group=frame.group, offset=offset)

    def _decode(self, frame: Frame, stored: memoryview) -> None:
        if not frame.encoded:
            return
        try:
            decode_frame(self._table.codec, frame, stored, self._raw[: frame.raw_length])
        except CorruptPackError as error:
            if error.field == "codec":
                raise OtherReleaseError(error.problem) from None
            self.note(Problem.DECODE, str(error), group=frame.group, offset=frame.offset)


def frame_runs(frames: Sequence[Frame], most_bytes: int) -> Iterator[list[Frame]]:
    """Neighbouring frames that are read at once: so many bytes, or one frame."""
    run: list[Frame] = []
    size = 0
    for frame in frames:
        if run and size + frame.stored_length > most_bytes:
            yield run
            run, size = [], 0
        run.append(frame)
        size += align(frame.stored_length)
    if run:
        yield run
