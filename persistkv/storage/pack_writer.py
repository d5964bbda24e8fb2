"""Making packs: what goes in, and the stream that comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from persistkv.storage.codec import Buffer, Codec, CodecPolicy, join_codecs
from persistkv.storage.keys import PackedKeys
from persistkv.storage.pack import (
    FRAME_BYTES,
    UNKNOWN_DEPTH,
    Frame,
    PackTable,
    align,
    frame_checksum,
    frame_seed,
    pack_frames,
    pack_id,
)

if TYPE_CHECKING:
    from persistkv.storage.arrays import ByteArray

FRAMES_AHEAD = 4  # frames that are encoded ahead of the one that is written, at most

T = TypeVar("T")


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

    :raises ValueError: a key occurs twice: ``PackTable.parse`` would reject the pack.
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
    """Begins the encoding of frames ahead of those that are asked for; None: they are encoded when they are."""
    _table: PackTable | None = field(init=False, default=None)
    _begun: deque[Callable[[], _StoredFrame]] = field(init=False, default_factory=deque)
    _finishing: Callable[[], PackTable] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        first = {segment.group: segment for segment in reversed(self.segments)}
        chosen = {group: self.codec.choose(group, segment.sample) for group, segment in sorted(first.items())}
        self.codecs = tuple(dict.fromkeys(chosen.values()))
        self._codec_numbers = {group: self.codecs.index(codec) + 1 for group, codec in chosen.items()}
        self.keys = PackedKeys.of([key for segment in self.segments for key in segment.keys])
        if not self.keys.distinct:
            raise ValueError(f"of {len(self.keys)} keys of a pack, some occur twice")
        self.pack_id = pack_id(self.namespace, self.keys, join_codecs(self.codecs))
        self.raw_length = sum(segment.raw_length for segment in self.segments)

    @property
    def written(self) -> bool:
        """Whether ``stream`` has run to its end: a backend that held the pack already never asked for it."""
        return self._table is not None or self._finishing is not None

    @property
    def table(self) -> PackTable:
        """The pack's table; there once ``stream`` has run to its end. Checksums of raw frames are computed when it is
        first asked for: a backend that writes beside its own work has begun to write them by then.

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
        self.restart()
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
        self._finishing = partial(self._make_table, frames, raw, offset)

    def _make_table(self, frames: list[Frame], raw: Iterable[tuple[int, _StoredFrame]], end: int) -> PackTable:
        for number, stored in raw:
            checksum = frame_checksum(stored.pieces, stored.seed or 0)
            frames[number] = frames[number]._replace(checksum=checksum)
        codecs = join_codecs(self.codecs)
        return PackTable(self.namespace, self.pack_id, codecs, end, self.raw_length, pack_frames(frames), self.keys)

    def _finish(self) -> None:
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            self._table = finishing()

    def restart(self) -> None:
        """Forget what an attempt that failed has written: another process's pack may be found in its place now."""
        self._finishing = None
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
