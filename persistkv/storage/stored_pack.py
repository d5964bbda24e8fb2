"""A pack as it lies in one store, on its way to another or to a file: the same bytes under the same name."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from persistkv.storage.codec import Buffer, RawCodec, split_codecs, stored_codec
from persistkv.storage.pack import Frame, PackTable, decode_frame
from persistkv.storage.pack_writer import PackWriter, Segment

if TYPE_CHECKING:
    from persistkv.storage.arrays import ByteArray


class StoredPack(PackWriter):
    """What a backend takes for a new pack, made of one that exists. It must have been checked."""

    def __init__(self, table: PackTable, payload: Buffer) -> None:
        """:param payload: all of it, unchanged until the commit is done.

        :raises CorruptPackError: the table names a codec that this release does not know.
        """
        names = split_codecs(table.codecs)
        self.namespace = table.namespace
        self.codec = RawCodec()
        self.keys = table.keys
        self.pack_id = table.pack_id
        self.raw_length = table.raw_length
        self.codecs = tuple(stored_codec(table.codecs, number + 1) for number in range(len(names)))
        self._codec_numbers = {frame.group: frame.codec for frame in table.frames if frame.encoded}
        self.segments = list(_segments(table, memoryview(payload)))
        self._begun = deque()
        self._payload = payload
        self._described = table

    @property
    def payload(self) -> Buffer:
        """All frames with their padding."""
        return self._payload

    @property
    def payload_length(self) -> int:
        """Bytes of it."""
        return self._described.payload_length

    def stream(self) -> Iterator[Buffer]:
        """The payload."""
        yield self._payload
        self._table = self._described


class _FrameBlocks:
    """A frame's blocks, decoded where somebody asks for them."""

    def __init__(self, codecs: str, frame: Frame, stored: memoryview) -> None:
        self._codecs = codecs
        self._frame = frame
        self._stored = stored

    def gather(self, start: int, stop: int) -> ByteArray:
        import numpy as np  # few packs are decoded on their way

        frame = self._frame
        blocks = np.empty((frame.block_count, frame.block_bytes), dtype=np.uint8)
        decode_frame(self._codecs, frame, self._stored, blocks.data.cast("B"))
        return blocks[start:stop].reshape(-1)

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        return [self.gather(start, stop).data.cast("B")]


def _segments(table: PackTable, payload: memoryview) -> Iterator[Segment]:
    """One for each frame: what a backend estimates by has the frames that there will be."""
    keys = table.keys.unpack()
    ends = accumulate(frame.block_count for frame in table.frames)
    for frame, end in zip(table.frames, ends, strict=True):
        stored = payload[frame.offset : frame.offset + frame.stored_length]
        source = _FrameBlocks(table.codecs, frame, stored)
        yield Segment(frame.group, frame.block_bytes, keys[end - frame.block_count : end], source, frame.depth)
