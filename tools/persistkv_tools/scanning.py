"""The first look of ``verify`` at packs: whether they look right, as fast as the medium gives them.

1. "Right" is said of a pack only where every stored byte was looked at, as ``pack_check`` does. What is not right is
   for that one to say; nothing here is a finding.
2. Packs are read in the order in which they lie, neighbours with one call; what is read is checked in the same thread,
   so that it is still in the processor's cache. Larger packs are cut between frames.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import xxhash

from persistkv.errors import CorruptPackError
from persistkv.huge_pages import huge_memory
from persistkv.storage.backend import Backend, ReadSpan
from persistkv.storage.executor import thread_pool
from persistkv.storage.pack import Frame, PackTable, align, decode_frame, frame_seed, pack_id
from persistkv_tools.pack_check import OtherReleaseError, frame_runs

BATCH_BYTES = 8 << 20  # 8 MiB: with 2 MiB, a verify of packs of 4 MiB took a fifth longer
_AHEAD = 1024  # batches that are begun and not taken, at most: they have been read, and only their outcome is kept


class Look(enum.IntEnum):
    """What came of it. Of the parts of one pack, the largest counts."""

    RIGHT = 0
    OTHER_RELEASE = 1
    WRONG = 2


class Piece(NamedTuple):
    """Neighbouring frames of one pack."""

    table: PackTable
    frames: Sequence[Frame]
    first_block: int
    """Blocks of the pack before them."""
    start: int
    """First byte of the payload that it takes."""
    length: int
    """Bytes, padding included."""
    is_last: bool
    """Whether the pack ends with them."""


def _pieces(table: PackTable, most_bytes: int) -> Iterator[Piece]:
    first = 0
    for frames in frame_runs(table.frames, most_bytes):
        start, end = frames[0].offset, align(frames[-1].offset + frames[-1].stored_length)
        count = sum(frame.block_count for frame in frames)
        yield Piece(table, frames, first, start, end - start, first + count == len(table.keys))
        first += count
    if not table.frame_count:
        yield Piece(table, (), 0, 0, 0, True)


Batch = list[Piece]
"""Pieces of one namespace that are read together."""


def batches(tables: Iterable[PackTable], batch_bytes: int) -> Iterator[Batch]:
    """The packs in their order, cut and put together."""
    batch: Batch = []
    size = 0
    for table in tables:
        for piece in _pieces(table, batch_bytes):
            if batch and size + piece.length > batch_bytes:
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += piece.length
    if batch:
        yield batch


class Scanner:
    """Reads batches and looks at them, some ahead of those that were asked for where there are threads.

    :param threads: 0: in the caller's thread, when it asks.
    """

    def __init__(self, backend: Backend, waiting: Iterator[Batch], threads: int) -> None:
        self._backend = backend
        self._waiting = waiting
        self._local = threading.local()
        self._pool = thread_pool(threads, "persistkv-verify") if threads else None
        self._begun: deque[tuple[Batch, Future[list[Look]]]] = deque()
        self._begin()

    def __iter__(self) -> Iterator[tuple[Batch, list[Look]]]:
        """Each batch, and what came of each of its pieces.

        :raises StoreError: the medium failed.
        """
        if self._pool is None:
            while (batch := next(self._waiting, None)) is not None:
                yield batch, self._look(batch)
        while self._begun:
            batch, looks = self._begun[0]
            yield batch, looks.result()
            self._begun.popleft()
            self._begin()

    def close(self) -> None:
        """Begin no read any more, and wait for those that run. Reads of a remote store may take until its deadline;
        they write into memory of their own, and are not waited for.
        """
        self._waiting = iter(())
        if self._pool is not None:
            self._pool.shutdown(wait=not self._backend.capabilities.remote, cancel_futures=True)

    def _begin(self) -> None:
        while self._pool is not None and len(self._begun) < _AHEAD:
            batch = next(self._waiting, None)
            if batch is None:
                return
            self._begun.append((batch, self._pool.submit(self._look, batch)))

    def _look(self, batch: Batch) -> list[Look]:
        memory = self._memory(sum(piece.length for piece in batch))
        spans, found, end = [], [], 0
        for piece in batch:
            begin, end = end, end + piece.length
            found.append(memory[begin:end])
            spans.append(ReadSpan(piece.table.pack_id, piece.start, [found[-1]]))
        filled = self._backend.scan(batch[0].table.namespace, spans)
        return [
            _look_at(piece, bytes_) if there else Look.WRONG
            for piece, bytes_, there in zip(batch, found, filled, strict=True)
        ]

    def _memory(self, size: int) -> memoryview:
        """This thread's, aligned; to be used until it asks again."""
        held: memoryview | None = getattr(self._local, "memory", None)
        if held is None or len(held) < size:
            held = self._local.memory = memoryview(huge_memory(max(size, BATCH_BYTES)))
        return held


def _look_at(piece: Piece, found: memoryview) -> Look:
    table, block = piece.table, piece.first_block
    if not block and pack_id(table.namespace, table.keys, table.codecs) != table.pack_id:
        return Look.WRONG
    try:
        for frame in piece.frames:
            begin = frame.offset - piece.start
            keys = table.keys.joined(block, block + frame.block_count)
            block += frame.block_count
            if not _is_right(table, frame, keys, found[begin : begin + align(frame.stored_length)]):
                return Look.WRONG
    except OtherReleaseError:
        return Look.OTHER_RELEASE
    return Look.RIGHT


def _is_right(table: PackTable, frame: Frame, keys: bytes, found: memoryview) -> bool:
    stored, padding = found[: frame.stored_length], found[frame.stored_length :]
    if xxhash.xxh3_64_intdigest(stored, seed=frame_seed(table.namespace, keys)) != frame.checksum:
        return False
    if padding and any(padding):
        return False
    if frame.encoded:
        try:
            decode_frame(table.codecs, frame, stored, memoryview(bytearray(frame.raw_length)))
        except CorruptPackError as error:
            if error.field == "codec":
                raise OtherReleaseError(error.problem) from None
            return False
    return True
