"""Packs: the unit of durable writing. An immutable run of frames, then a checksummed table of their keys.

Byte by byte in docs/format.md. Invariants of this file:

1. A pack alone (frames, table, trailer) is enough to recover its blocks.
2. A frame's checksum covers its stored bytes and is seeded with its keys and namespace: payload that lies in another's
   place does not verify.
3. Parsing trusts nothing: each count and length is checked against what is there before it is used.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from persistkv.config import PAGE_BYTES
from persistkv.errors import CorruptPackError
from persistkv.storage.codec import Buffer, Codec, CodecPolicy, join_codecs, split_codecs, stored_codec
from persistkv.storage.keys import PackedKeys

PACK_VERSION = 1
ID_BYTES = 16
FRAME_BYTES = 1 << 20  # 1 MiB: raw bytes that a frame holds at most, unless one block is larger
MAX_PACK_BYTES = 64 << 20  # 64 MiB of raw bytes
UNKNOWN_DEPTH = 0xFFFFFFFF
FRAMES_AHEAD = 4  # frames that are encoded ahead of the one that is written, at most

_HEADER = struct.Struct("<HHIIIQQ16s16s")
_FRAME = struct.Struct("<IIIIIIQQQ")
_TRAILER = struct.Struct("<QQ8s")
_MAGIC = b"PKVPACK1"

T = TypeVar("T")
ByteArray = npt.NDArray[np.uint8]


class Frame(NamedTuple):
    """Consecutive blocks of one group: the unit of codec and checksum."""

    group: int
    """KV cache group."""
    block_count: int
    block_bytes: int
    """Raw bytes of one block."""
    depth: int
    """Blocks of the group before the first one in its request; UNKNOWN_DEPTH where nobody told."""
    codec: int
    """Which of the pack's codecs was applied, counted from 1; 0: none, the stored bytes are the raw ones."""
    reserved: int
    """0."""
    offset: int
    """Byte offset in the pack, a multiple of 4 KiB."""
    stored_length: int
    """Bytes at rest, padding left out."""
    checksum: int
    """xxh3-64 of the stored bytes, seeded by ``frame_seed``."""

    @property
    def encoded(self) -> bool:
        """Whether a codec was applied."""
        return self.codec != 0

    @property
    def raw_length(self) -> int:
        """Bytes of all blocks."""
        return self.block_count * self.block_bytes


def pack_frames(frames: Iterable[Frame]) -> bytes:
    """Frames as they stand in a table."""
    return b"".join([_FRAME.pack(*frame) for frame in frames])


def unpack_frames(data: bytes) -> tuple[Frame, ...]:
    """The frames of whole table entries."""
    return tuple(map(Frame._make, _FRAME.iter_unpack(data)))


def frame_seed(namespace: bytes, keys: bytes) -> int:
    """The seed that binds a frame's checksum to its (joined) keys and namespace."""
    return xxhash.xxh3_64_intdigest(keys, seed=int.from_bytes(namespace[:8], "little"))


def align(length: int) -> int:
    """The next multiple of 4 KiB."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def pack_id(namespace: bytes, keys: PackedKeys, codecs: str) -> bytes:
    """A pack's name: the digest of namespace, ordered keys and codecs."""
    digest = blake2b(namespace, digest_size=ID_BYTES)
    digest.update(codecs.encode() + b"\0")
    digest.update(keys.key_length.to_bytes(2, "little") + keys.lengths)
    digest.update(keys.data)
    return digest.digest()


def table_lengths(data: Buffer) -> tuple[int, int]:
    """Raw and payload bytes of the pack whose table is ``data``, as they stand there; 0 where it is too short for one.

    Nothing is verified: for lists that are to be quick.
    """
    if len(data) < _HEADER.size:
        return 0, 0
    _, _, _, _, _, payload, raw, _, _ = _HEADER.unpack_from(data)
    return raw, payload


class PackTable(msgspec.Struct, frozen=True):
    """All of a pack but its payload; what a catalogue keeps."""

    namespace: bytes
    """16 bytes: the digest of the identity."""
    pack_id: bytes
    """16 bytes."""
    codecs: str
    """Text forms of the codecs that frames name by number."""
    payload_length: int
    """Bytes of the frames with their padding: where the table begins."""
    raw_length: int
    """Bytes of all blocks before the codec."""
    frames: tuple[Frame, ...]
    keys: PackedKeys
    """The keys of all blocks, frame after frame."""

    def encode(self) -> bytes:
        """Table and trailer."""
        codecs = self.codecs.encode()
        header = _HEADER.pack(
            PACK_VERSION,
            self.keys.key_length,
            len(self.frames),
            len(self.keys),
            len(codecs),
            self.payload_length,
            self.raw_length,
            self.namespace,
            self.pack_id,
        )
        table = b"".join((header, codecs, pack_frames(self.frames), self.keys.lengths, self.keys.data))
        return table + _TRAILER.pack(len(table), xxhash.xxh3_64_intdigest(table), _MAGIC)

    @classmethod
    def parse(cls, data: Buffer) -> PackTable:
        """Read table and trailer from the end of ``data`` (a whole pack, or its last bytes).

        :raises CorruptPackError: naming the field that is wrong.
        """
        table = _checked_table(data)
        version, key_length, frame_count, block_count, codec_length, payload, raw, namespace, name = (
            _HEADER.unpack_from(table)
        )
        if version != PACK_VERSION:
            raise CorruptPackError("version", f"{version}; this release reads {PACK_VERSION}")
        frames_at = _HEADER.size + codec_length
        lengths_at = frames_at + frame_count * _FRAME.size
        keys_at = lengths_at + (0 if key_length else 2 * block_count)
        if keys_at > len(table):
            raise CorruptPackError(
                "counts", f"{frame_count} frames and {block_count} blocks do not fit {len(table)} bytes"
            )
        keys = PackedKeys(table[keys_at:], key_length, table[lengths_at:keys_at])
        if key_length and len(keys.data) != key_length * block_count:
            raise CorruptPackError("keys", f"{len(keys.data)} bytes are not {block_count} keys of {key_length}")
        if not key_length:
            _check_key_lengths(keys)
        frames = unpack_frames(table[frames_at:lengths_at])
        try:
            codecs = table[_HEADER.size : frames_at].decode()
        except UnicodeDecodeError:
            raise CorruptPackError("codecs", "their names are not text") from None
        _check_frames(frames, payload, block_count, raw, len(split_codecs(codecs)))
        return cls(namespace, name, codecs, payload, raw, frames, keys)


def _checked_table(data: Buffer) -> bytes:
    view = memoryview(data)
    if len(view) < _TRAILER.size + _HEADER.size:
        raise CorruptPackError("trailer", f"{len(view)} bytes are too few for a pack")
    length, checksum, magic = _TRAILER.unpack_from(view, len(view) - _TRAILER.size)
    if magic != _MAGIC:
        raise CorruptPackError("magic", f"{magic!r} instead of {_MAGIC!r}")
    if not _HEADER.size <= length <= len(view) - _TRAILER.size:
        raise CorruptPackError("table length", f"{length} does not lie within {len(view)} bytes")
    table = bytes(view[len(view) - _TRAILER.size - length : len(view) - _TRAILER.size])
    if xxhash.xxh3_64_intdigest(table) != checksum:
        raise CorruptPackError("table checksum", "does not match")
    return table


def _check_key_lengths(keys: PackedKeys) -> None:
    lengths = struct.unpack(f"<{len(keys.lengths) // 2}H", keys.lengths)
    if sum(lengths) != len(keys.data) or 0 in lengths:
        raise CorruptPackError("key lengths", f"{len(lengths)} of them are not those of {len(keys.data)} bytes of keys")


def _check_frames(frames: Sequence[Frame], payload: int, block_count: int, raw: int, codec_count: int) -> None:
    end = blocks = total = 0
    for _, count, block_bytes, _, codec, reserved, offset, stored, _ in frames:
        length = count * block_bytes
        if codec > codec_count:
            raise CorruptPackError("frame codec", f"number {codec} of {codec_count}")
        if reserved:
            raise CorruptPackError("frame", f"{reserved:#x} where 0 belongs")
        if not length or (length > FRAME_BYTES and count > 1):
            raise CorruptPackError("frame length", f"{count} blocks of {block_bytes} bytes")
        if stored > length or not (codec or stored == length):
            raise CorruptPackError("frame length", f"{stored} stored bytes for {length} raw ones")
        if offset != end:
            raise CorruptPackError("frame offset", f"{offset} instead of {end}")
        end = align(offset + stored)
        blocks += count
        total += length
    if blocks != block_count:
        raise CorruptPackError("block count", f"frames hold {blocks}, the table names {block_count}")
    if total != raw:
        raise CorruptPackError("raw length", f"frames hold {total}, the table says {raw}")
    if end != payload:
        raise CorruptPackError("payload length", f"frames end at {end}, the table says {payload}")


class BlockSource(Protocol):
    """Where a pack's blocks come from: rows of the primary tier, or staged copies of them."""

    def gather(self, start: int, stop: int) -> ByteArray:
        """Blocks ``start`` to ``stop`` side by side, contiguous: where they lie, or a copy."""
        ...

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """The same bytes in the same order, where they lie; never a copy."""
        ...


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of one group that go into a pack."""

    group: int
    block_bytes: int
    """Raw bytes of one block."""
    keys: Sequence[bytes]
    """In the order of the blocks."""
    source: BlockSource
    """Where their bytes lie."""
    depth: int = UNKNOWN_DEPTH
    """Depth of the first block; the others follow it."""

    @property
    def raw_length(self) -> int:
        """Bytes of all blocks."""
        return len(self.keys) * self.block_bytes

    def frame_bounds(self) -> Iterator[tuple[int, int]]:
        """First block and end of each frame."""
        per_frame = max(1, FRAME_BYTES // self.block_bytes)
        for start in range(0, len(self.keys), per_frame):
            yield start, min(start + per_frame, len(self.keys))

    def raw(self, start: int, stop: int) -> memoryview:
        """The bytes of these blocks side by side."""
        return self.source.gather(start, stop).data.cast("B")

    def sample(self) -> memoryview:
        """The bytes of the first frame, for a codec to be chosen by."""
        return self.raw(*next(self.frame_bounds()))


class Ahead(Protocol):
    """Begins a call beside the caller's own work; what it returns waits for the result."""

    def __call__(self, call: Callable[[], T]) -> Callable[[], T]: ...


class _StoredFrame(NamedTuple):
    frame: Frame
    """Its offset is not known yet."""
    pieces: Sequence[Buffer]
    seed: int | None = None
    """Of its checksum, where that is not known yet either."""


@dataclass
class PackWriter:
    """Turns segments into a pack, one frame in memory at a time, or a few where they are encoded ahead.

    What ``codec`` chooses for the segments' groups is settled here, for the pack is named after it. ``stream`` may be
    called again (a commit that is retried); the table then describes the newest run.
    """

    namespace: bytes
    """16 bytes: the digest of the identity."""
    codec: CodecPolicy
    segments: Sequence[Segment]
    """What goes in; nothing after ``release``."""
    keys: PackedKeys = field(init=False)
    """The keys of all blocks, segment after segment."""
    pack_id: bytes = field(init=False)
    """16 bytes: the pack's name."""
    raw_length: int = field(init=False)
    """Bytes of all blocks."""
    codecs: tuple[Codec, ...] = field(init=False)
    """Those that the frames are written with, each once."""
    _codec_numbers: dict[int, int] = field(init=False)
    """For each group, which of ``codecs``, counted from 1."""
    ahead: Ahead | None = None
    """Begins the encoding of frames ahead of those that are asked for, and computes the checksums of the others while
    they are written; None: all of that is done when it is asked for."""
    _table: PackTable | None = field(init=False, default=None)
    _begun: deque[Callable[[], _StoredFrame]] = field(init=False, default_factory=deque)
    _finishing: Callable[[], PackTable] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        first = {segment.group: segment for segment in reversed(self.segments)}
        chosen = {group: self.codec.choose(group, segment.sample) for group, segment in sorted(first.items())}
        self.codecs = tuple(dict.fromkeys(chosen.values()))
        self._codec_numbers = {group: self.codecs.index(codec) + 1 for group, codec in chosen.items()}
        self.keys = PackedKeys.of([key for segment in self.segments for key in segment.keys])
        self.pack_id = pack_id(self.namespace, self.keys, join_codecs(self.codecs))
        self.raw_length = sum(segment.raw_length for segment in self.segments)

    @property
    def written(self) -> bool:
        """Whether ``stream`` has run to its end: a backend that held the pack already never asked for it."""
        return self._table is not None or self._finishing is not None

    @property
    def table(self) -> PackTable:
        """The pack's table; there once ``stream`` has run to its end. May wait for checksums.

        :raises ValueError: before that.
        """
        self._finish()
        if self._table is None:
            raise ValueError("a pack's table exists after its stream has run to the end")
        return self._table

    def stream(self) -> Iterator[Buffer]:
        """The payload in order, padding included. Raw frames come as the rows that they lie in; every piece stays valid
        while it is referenced, so that many can be written with one call.
        """
        self.settle()
        self._table = None
        frames: list[Frame] = []
        raw: list[tuple[int, _StoredFrame]] = []
        offset = 0
        for stored in self._stored_frames():
            frame = stored.frame._replace(offset=offset)
            if stored.seed is not None:
                raw.append((len(frames), stored))
            frames.append(frame)
            yield from stored.pieces
            offset = align(frame.offset + frame.stored_length)
            if padding := offset - frame.offset - frame.stored_length:
                yield bytes(padding)
        finish = partial(self._make_table, frames, raw, offset)
        self._finishing = finish if self.ahead is None else self.ahead(finish)

    def _make_table(self, frames: list[Frame], raw: Iterable[tuple[int, _StoredFrame]], end: int) -> PackTable:
        for number, stored in raw:
            checksum = frame_checksum(stored.pieces, stored.seed or 0)
            frames[number] = frames[number]._replace(checksum=checksum)
        codecs = join_codecs(self.codecs)
        return PackTable(self.namespace, self.pack_id, codecs, end, self.raw_length, tuple(frames), self.keys)

    def _finish(self) -> None:
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            self._table = finishing()

    def restart(self) -> None:
        """Forget what an attempt that failed has written: another process's pack may be found in its place now."""
        self.settle()
        self._table = None

    def settle(self) -> None:
        """Wait for what was begun beside a ``stream`` that was left or has ended: nobody reads the blocks any more."""
        while self._begun:
            with suppress(Exception):  # it would have come out of the stream, which nobody asks any more
                self._begun.popleft()()
        self._finish()

    def release(self) -> None:
        """Let go of the blocks: who keeps this object (an error's traceback may) does not keep them. Table, keys and
        names stay; ``stream`` may not be called any more.
        """
        self.settle()
        self.segments = ()

    def _stored_frames(self) -> Iterator[_StoredFrame]:
        bounds = ((segment, *bound) for segment in self.segments for bound in segment.frame_bounds())
        encodes = any(not codec.identity for codec in self.codecs)
        for segment, start, stop in bounds:
            if self.ahead is None or not encodes:
                yield self._store(segment, start, stop)
                continue
            self._begun.append(self.ahead(partial(self._store, segment, start, stop)))
            if len(self._begun) > FRAMES_AHEAD:
                yield self._begun.popleft()()
        while self._begun:
            yield self._begun.popleft()()

    def _store(self, segment: Segment, start: int, stop: int) -> _StoredFrame:
        number, pieces = self._encode(segment, start, stop)
        seed = frame_seed(self.namespace, b"".join(segment.keys[start:stop]))
        depth = segment.depth if segment.depth == UNKNOWN_DEPTH else segment.depth + start
        length = sum(map(len, pieces))
        checksum = frame_checksum(pieces, seed) if number else 0
        frame = Frame(segment.group, stop - start, segment.block_bytes, depth, number, 0, 0, length, checksum)
        return _StoredFrame(frame, pieces, None if number else seed)

    def _encode(self, segment: Segment, start: int, stop: int) -> tuple[int, Sequence[Buffer]]:
        """The number of the codec, and the stored bytes; 0 and the raw ones, where they lie, where it does not help."""
        number = self._codec_numbers[segment.group]
        codec = self.codecs[number - 1]
        if not codec.identity:
            raw = segment.raw(start, stop)
            stored = codec.encode(raw)
            if len(stored) < len(raw):
                return number, [stored]
        return 0, segment.source.pieces(start, stop)


def frame_checksum(pieces: Iterable[Buffer], seed: int) -> int:
    """xxh3-64 of a frame's stored bytes, wherever they lie."""
    digest = xxhash.xxh3_64(seed=seed)
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def verify_frame(frame: Frame, stored: Buffer, seed: int) -> None:
    """Check a frame's stored bytes.

    :raises CorruptPackError: where they are not what was written under these keys.
    """
    if len(stored) != frame.stored_length or xxhash.xxh3_64_intdigest(stored, seed=seed) != frame.checksum:
        raise CorruptPackError("frame checksum", f"does not match at offset {frame.offset}")


def decode_frame(codecs: str, frame: Frame, stored: Buffer, out: memoryview) -> None:
    """Fill ``out`` with the frame's blocks, side by side.

    :param codecs: as in the pack's table.
    :param stored: verified.
    :param out: ``frame.raw_length`` bytes.
    :raises CorruptPackError: where they do not decode to that, or with no codec of this release; what ``out`` holds is
        then undefined.
    """
    stored_codec(codecs, frame.codec).decode_into(stored, out)
