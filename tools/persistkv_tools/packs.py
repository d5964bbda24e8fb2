"""Packs of a store: their tables, the keys in them, and the check of their bytes.

1. Every stored byte is checked: frames by their checksums, padding by its zeros, the table by the
   pack's id.
2. A frame is good if it also decodes to its raw length.
3. Damage is returned as a finding and never raised. ``StoreError`` means that the medium failed.
"""

from __future__ import annotations

import enum
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import Backend, ReadSpan
from persistkv.storage.format.pack import (
    Frame,
    PackTable,
    PlacedFrame,
    align,
    decode_frame,
)
from persistkv.storage.format.seal import FrameSeal, Seal

BATCH_BYTES = 8 << 20  # 8 MiB
"""Most bytes of one read. With 2 MiB, a verify of packs of 4 MiB took a fifth longer."""
OnBytes = Callable[[int], None]
"""Called with the number of bytes after each read or write; may sleep to limit the pace."""
T = TypeVar("T")


class Problem(enum.StrEnum):
    """Kind of a defect that ``persistkv verify`` finds. docs/operating.md describes each kind."""

    PAYLOAD = "payload"
    DECODE = "decode"  # the bytes match their checksum, but cannot be decoded
    SHORT = "short"
    PADDING = "padding"
    NAME = "name"
    PACK_ROWS = "pack rows"
    MANIFEST_ROWS = "manifest rows"
    TENANT_TOTALS = "tenant totals"
    MANIFEST_KEYS = "manifest keys"
    MISSING_BLOCKS = "missing blocks"


class Defect(msgspec.Struct, frozen=True, kw_only=True):
    """One defect of a store. Fields that do not apply to it are None."""

    problem: Problem
    detail: str
    count: int = 1
    """Number of defects that this finding reports."""
    namespace: str | None = None
    pack: str | None = None
    request: str | None = None
    group: int | None = None
    offset: int | None = None
    """Where the damaged frame, padding or missing bytes start: bytes from the start of the pack's
    payload."""


class UnknownCodecError(Exception):
    """The pack uses a codec that this release does not know. It may be intact, but cannot be
    checked."""


class Piece(NamedTuple):
    """Consecutive frames of one pack."""

    table: PackTable
    frames: Sequence[Frame]
    first_frame: int
    """Number of frames of the pack before these."""
    first_block: int
    """Number of blocks of the pack before these frames."""
    start: int
    """Offset of the first frame in the pack's payload, in bytes."""
    length: int
    """Bytes of these frames in the payload, padding included."""
    is_last: bool
    """Whether these are the last frames of the pack."""


def pieces(table: PackTable, most_bytes: int) -> Iterator[Piece]:
    """Cut a pack into pieces of at most ``most_bytes``; a larger frame is a piece of its own."""
    runs = list(split_by_bytes(table.frames, _padded_bytes, most_bytes))
    # a pack without frames is one empty piece, because its id is checked with its first piece
    if not runs:
        runs.append([])
    first_frame = 0
    first_block = 0
    start = 0
    for frames in runs:
        length = sum(map(_padded_bytes, frames))
        next_frame = first_frame + len(frames)
        yield Piece(
            table=table,
            frames=frames,
            first_frame=first_frame,
            first_block=first_block,
            start=start,
            length=length,
            is_last=next_frame == table.frame_count,
        )
        first_frame = next_frame
        first_block += sum(frame.block_count for frame in frames)
        start += length


def _padded_bytes(frame: Frame) -> int:
    """Return the bytes of a frame in the payload, padding included."""
    return align(frame.stored_length)


def split_by_bytes(
    items: Iterable[T],
    bytes_of: Callable[[T], int],
    most_bytes: float,
) -> Iterator[list[T]]:
    """Divide items into lists of at most ``most_bytes``; a larger item is alone in its list."""
    part: list[T] = []
    part_bytes = 0
    for item in items:
        num_bytes = bytes_of(item)
        if part and part_bytes + num_bytes > most_bytes:
            yield part
            part = []
            part_bytes = 0
        part.append(item)
        part_bytes += num_bytes
    if part:
        yield part


def check_piece(
    piece: Piece,
    payload: memoryview,
    seal: Seal,
) -> Iterator[Defect]:
    """Yield the defects of a piece; for the first piece of a pack, also check the pack's id.

    :param payload: stored bytes of the piece, which are decrypted in place.
    :param seal: seal of the store.
    :raises UnknownCodecError: the frames cannot be decoded by this release.
    """
    table = piece.table
    first_block = piece.first_block
    keys = table.keys.unpack()
    # check the id with the first piece only, because the id covers the table and no frames
    if piece.first_frame == 0 and not seal.is_id_of(table):
        yield _defect(
            table,
            Problem.NAME,
            "the pack's id does not match the keys and codec of its table",
        )
    frame_seal = seal.of_pack(table)
    for number, frame in enumerate(piece.frames, piece.first_frame):
        next_block = first_block + frame.block_count
        placed = PlacedFrame(number, frame, keys[first_block:next_block])
        first_block = next_block
        begin = frame.offset - piece.start
        end = begin + _padded_bytes(frame)
        yield from _check_frame(table, placed, payload[begin:end], frame_seal)


def _check_frame(
    table: PackTable,
    placed: PlacedFrame,
    padded: memoryview,
    seal: FrameSeal,
) -> Iterator[Defect]:
    """Yield the defects of a frame, and of the padding after it.

    :param padded: stored bytes of the frame and of its padding; the frame is decrypted in place.
    :param seal: seal of the pack's frames.
    :raises UnknownCodecError: the frame is of an unknown codec.
    """
    frame = placed.frame
    stored = padded[: frame.stored_length]
    try:
        seal.open(placed, [stored])
    except CorruptPackError as error:
        problem = Problem.PAYLOAD
        yield _defect(table, problem, str(error), frame.group, frame.offset)
    else:
        yield from _check_decoding(table, frame, stored)
    padding = bytes(padded[frame.stored_length :])
    if padding.strip(b"\0"):
        offset = frame.offset + frame.stored_length
        detail = "non-zero bytes after a frame"
        yield _defect(table, Problem.PADDING, detail, frame.group, offset)


def _check_decoding(
    table: PackTable,
    frame: Frame,
    stored: memoryview,
) -> Iterator[Defect]:
    """Yield a defect if the bytes of a frame, which match their checksum, cannot be decoded: a
    wrong encoder may have made them.

    :raises UnknownCodecError: the frame is of an unknown codec.
    """
    if not frame.encoded:
        return
    raw = memoryview(bytearray(frame.raw_length))
    try:
        decode_frame(table.codec, frame, stored, raw)
    except CorruptPackError as error:
        # this release does not know the codec, so the frame may be intact
        if error.field == "codec":
            raise UnknownCodecError(error.problem) from None
        problem = Problem.DECODE
        yield _defect(table, problem, str(error), frame.group, frame.offset)


def read_frame(
    backend: Backend,
    table: PackTable,
    number: int,
) -> bytearray | None:
    """Return the raw bytes of a frame; None if the store does not hold it.

    :param number: index of the frame in the pack.
    :raises CorruptPackError: its bytes do not verify or decode.
    :raises StoreError: the medium failed.
    """
    # take the frame with its keys and number, which the seal of the pack checks, too
    placed = next(islice(table.placed_frames(), number, None))
    frame = placed.frame
    stored = memoryview(bytearray(frame.stored_length))
    span = ReadSpan(table.pack_id, frame.offset, [stored])
    if backend.read(table.namespace, [span]) != [True]:
        return None
    backend.seal.of_pack(table).open(placed, [stored])
    raw = bytearray(frame.raw_length)
    decode_frame(table.codec, frame, stored, memoryview(raw))
    return raw


def check_pack(
    backend: Backend,
    table: PackTable,
    on_bytes: OnBytes = lambda num_bytes: None,
) -> list[Defect]:
    """Read a pack and return its defects; parameters and errors as for ``checked_pieces``."""
    defects: list[Defect] = []
    for stored, defects_of_piece in checked_pieces(backend, table, on_bytes):
        defects += defects_of_piece
        del stored  # a piece at a time is in memory
    return defects


def checked_pieces(
    backend: Backend,
    table: PackTable,
    on_bytes: OnBytes,
) -> Iterator[tuple[memoryview, list[Defect]]]:
    """Read a pack; yield the bytes of each piece, with decrypted frames, and the defects in them.
    The bytes must not be used if there are defects.

    :param on_bytes: called after each read, with its bytes.
    :raises UnknownCodecError: the pack cannot be decoded by this release.
    :raises StoreError: the medium failed.
    """
    for piece in pieces(table, BATCH_BYTES):
        # Reads past the page cache need memory that is aligned to pages, as an mmap is. An mmap
        # cannot be empty.
        memory = mmap.mmap(-1, max(piece.length, 1))
        buffer = memoryview(memory)[: piece.length]
        span = ReadSpan(table.pack_id, piece.start, [buffer])
        if backend.read(table.namespace, [span]) == [True]:
            defects = list(check_piece(piece, buffer, backend.seal))
        else:
            end = piece.start + piece.length
            detail = f"bytes {piece.start:,} to {end:,} are missing"
            defects = [_defect(table, Problem.SHORT, detail, offset=piece.start)]
        on_bytes(piece.length)
        yield buffer, defects
        # release the memory before the next piece is read
        del memory, buffer, span


def _defect(
    table: PackTable,
    problem: Problem,
    detail: str,
    group: int | None = None,
    offset: int | None = None,
) -> Defect:
    """Return a defect of a pack."""
    return Defect(
        problem=problem,
        detail=detail,
        namespace=table.namespace.hex(),
        pack=table.pack_id.hex(),
        group=group,
        offset=offset,
    )
