"""Packs that a commit writes: encoded blocks, or a copy of a pack from another store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from persistkv.storage.format.codec import Buffer, Codec
from persistkv.storage.format.pack import (
    FRAME_BYTES,
    UNKNOWN_DEPTH,
    Frame,
    PackedKeys,
    PackTable,
    PlacedFrame,
    align,
    encoded_length,
    pack_frames,
)
from persistkv.storage.format.seal import PLAIN, FrameSeal, Seal
from persistkv.tenants import DEFAULT_TENANT

if TYPE_CHECKING:
    from persistkv.memory.rows import ByteArray

# maximum number of frames that are encoded while an earlier one is written
MOST_STARTED = 4


class BlockSource(Protocol):
    """Source of a pack's blocks: rows of the primary tier, or staged copies of rows."""

    def gather(self, start: int, stop: int) -> ByteArray:
        """Return blocks ``start`` to ``stop`` (exclusive) as one contiguous array: a view or a
        copy."""

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """Return blocks ``start`` to ``stop`` (exclusive) as views, which need not be contiguous.
        Nothing is copied."""


@dataclass(frozen=True)
class Section:
    """Consecutive blocks of one group that a pack will contain."""

    group: int
    block_bytes: int
    """Raw bytes of one block."""
    keys: Sequence[bytes]
    """One key per block, in block order."""
    source: BlockSource
    depth: int = UNKNOWN_DEPTH
    """Depth of the first block (see ``Frame.depth``); the other blocks follow it in their
    request."""

    @property
    def raw_length(self) -> int:
        """Raw bytes of all blocks."""
        return len(self.keys) * self.block_bytes

    def frame_bounds(self) -> Iterator[tuple[int, int]]:
        """Iterate over the frames: index of the first block, and index after the last one, in this
        section."""
        num_blocks = len(self.keys)
        per_frame = max(1, FRAME_BYTES // self.block_bytes)
        for start in range(0, num_blocks, per_frame):
            stop = min(start + per_frame, num_blocks)
            yield start, stop


class _StoredFrame(NamedTuple):
    """A frame and its stored bytes."""

    frame: Frame
    """The frame, without its offset, and without its tag if that is still to be computed."""
    pieces: Sequence[Buffer]
    """The stored bytes, in order, without padding."""
    untagged_keys: Sequence[bytes] = ()
    """The keys of its blocks if its tag is still to be computed; otherwise empty."""

    @property
    def needs_tag(self) -> bool:
        """Whether the tag is still to be computed: the frame is raw and not encrypted."""
        return bool(self.untagged_keys)


_MakeFrame = Callable[[], _StoredFrame]
"""Encodes and seals one frame, or waits for another thread that does; returns the result."""
StartFrame = Callable[[_MakeFrame], _MakeFrame]
"""Starts a call in another thread; returns a function that waits for the call and returns its
result."""


@dataclass(eq=False, repr=False)
class NewPack(ABC):
    """A pack that a commit writes. The backend reads its payload from ``stream``, and reads it
    again if the commit is retried.
    """

    namespace: bytes
    """16 bytes: the digest of the identity."""
    pack_id: bytes
    """16 bytes: the pack's name."""
    keys: PackedKeys
    """The keys of all blocks, frame after frame."""
    raw_length: int
    """Bytes of all blocks before the codec."""
    frame_count: int
    payload_bound: int
    """Upper bound of the payload in bytes, padding included: its size if the codec makes no frame
    shorter."""
    table_length: int
    """Bytes of the encoded table with its trailer."""
    encodes: bool
    """Whether ``stream`` allocates the bytes that it yields; if not, it yields views of existing
    memory."""
    seal: Seal
    """Seals its frames."""
    tenant: str
    """Whose blocks these are."""
    written: bool = field(default=False, init=False)
    """Whether ``stream`` has run to its end since the last ``restart``. It stays False if the
    backend already holds the pack."""

    @property
    @abstractmethod
    def table(self) -> PackTable:
        """The pack's table.

        :raises ValueError: the table depends on the stream, and the stream has not run to its end.
        """

    @abstractmethod
    def stream(self) -> Iterator[Buffer]:
        """Iterate over the payload in order, padding included. Each piece stays valid while it is
        referenced, so a backend may write many pieces with one call.
        """

    def restart(self) -> None:
        """Prepare for an attempt to commit: call ``end_reads``, and set ``written`` to False."""
        self.end_reads()
        self.written = False

    @abstractmethod
    def end_reads(self) -> None:
        """Wait until this object no longer reads the blocks, after a ``stream`` that ended or was
        abandoned. Their memory may be released afterwards."""


class PlacedPack(NewPack):
    """A pack whose payload the medium has already: a commit writes only its rows in the
    catalogue."""

    def __init__(self, table: PackTable) -> None:
        super().__init__(
            namespace=table.namespace,
            pack_id=table.pack_id,
            keys=table.keys,
            raw_length=table.raw_length,
            frame_count=table.frame_count,
            payload_bound=table.payload_length,
            table_length=_table_length(table),
            encodes=False,
            # the payload is sealed already, so nothing must be sealed again
            seal=PLAIN,
            tenant=table.tenant,
        )
        self._table = table

    @property
    def table(self) -> PackTable:
        return self._table

    def stream(self) -> Iterator[Buffer]:
        self.written = True
        return iter(())

    def end_reads(self) -> None:
        """Do nothing: no blocks are read."""


class PackCopy(NewPack):
    """A copy of a pack from another store, with the same frames, sealed for the store that the copy
    is written to.

    :param table: the pack's table in the other store.
    :param payload: the whole payload, whose frames were opened (``FrameSeal.open``); it must not
        change until the commit has ended.
    :param seal: seal of the store that the copy is written to.
    """

    def __init__(
        self,
        table: PackTable,
        payload: Buffer,
        seal: Seal,
    ) -> None:
        namespace = table.namespace
        new_id = seal.new_pack_id(namespace, table.keys, table.codec, table.tenant)
        plain_length = _table_length(table)
        super().__init__(
            namespace=namespace,
            pack_id=new_id,
            keys=table.keys,
            raw_length=table.raw_length,
            frame_count=table.frame_count,
            payload_bound=table.payload_length,
            table_length=seal.stored_bytes(plain_length),
            # without encryption, ``stream`` yields views of ``payload``
            encodes=seal.encrypts,
            seal=seal,
            tenant=table.tenant,
        )
        self._copied = table
        """Table in the other store."""
        self._payload = memoryview(payload)
        self._table: PackTable | None = None
        """The new table; None: no stream has run to its end since the last ``restart``."""

    @property
    def table(self) -> PackTable:
        if self._table is None:
            raise _no_table()
        return self._table

    def stream(self) -> Iterator[Buffer]:
        self.restart()
        # make a new salt for each attempt, because no pair of key and nonce may be used twice
        frame_seal = self.seal.new_pack(self.namespace, self.tenant)
        frames: list[Frame] = []
        for placed in self._copied.placed_frames():
            frame = placed.frame
            end = frame.offset + frame.stored_length
            opened = self._payload[frame.offset : end]
            pieces, tag = frame_seal.seal(placed, [opened])
            frames.append(frame._replace(tag=tag))
            yield from pieces
            padding = align(end) - end
            if padding:
                yield bytes(padding)
        self._table = msgspec.structs.replace(
            self._copied,
            pack_id=self.pack_id,
            packed_frames=pack_frames(frames),
            data_key=frame_seal.key_id,
            salt=frame_seal.salt,
        )
        self.written = True

    def restart(self) -> None:
        super().restart()
        self._table = None

    def end_reads(self) -> None:
        """Do nothing: ``stream`` starts no work in other threads."""


class PackWriter(NewPack):
    """A pack whose frames are encoded and sealed from sections during ``stream``. Holds one encoded
    frame in memory, or a few if other threads encode frames.

    :param start_frame: starts the encoding of a frame in another thread; None: each frame is
        encoded when the stream reaches it.
    :param seal: seal of the store (``Backend.seal``).
    :param tenant: whose blocks these are.
    :raises ValueError: a key occurs twice (``PackTable.parse`` would reject the pack), is empty, or
        is too long.
    """

    def __init__(
        self,
        namespace: bytes,
        codec: Codec,
        sections: Sequence[Section],
        start_frame: StartFrame | None = None,
        seal: Seal = PLAIN,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        all_keys: list[bytes] = []
        num_frames = 0
        raw_length = 0
        payload_bound = 0
        # the totals are known before anything is encoded: commits reserve space by them
        for section in sections:
            all_keys += section.keys
            raw_length += section.raw_length
            for start, stop in section.frame_bounds():
                num_frames += 1
                frame_bytes = (stop - start) * section.block_bytes
                payload_bound += align(frame_bytes)
        keys = PackedKeys.of(all_keys)
        if len(set(all_keys)) < len(all_keys):
            raise ValueError(f"of {len(keys)} keys of a pack, some occur twice")
        codec_name = str(codec)
        new_id = seal.new_pack_id(namespace, keys, codec_name, tenant)
        plain_length = encoded_length(codec_name, num_frames, keys, tenant)
        super().__init__(
            namespace=namespace,
            pack_id=new_id,
            keys=keys,
            raw_length=raw_length,
            frame_count=num_frames,
            payload_bound=payload_bound,
            table_length=seal.stored_bytes(plain_length),
            encodes=seal.encrypts or not codec.identity,
            seal=seal,
            tenant=tenant,
        )
        self.sections = sections
        """The blocks; empty after ``release``."""
        self.codec = codec
        self._start_frame = start_frame
        self._table: PackTable | None = None
        """The table; None: it was not made since the last ``restart``."""
        self._started: deque[_MakeFrame] = deque()
        """Frames whose encoding has started in other threads, in order; each waits for its
        result."""
        self._make_pending_table: Callable[[], PackTable] | None = None
        """Makes the table of a stream that has run to its end; None: there is none to make."""

    @property
    def table(self) -> PackTable:
        """The pack's table. The checksums of raw frames are computed at the first access, so that a
        backend with its own threads can write the frames at the same time.
        """
        self._make_table_if_pending()
        if self._table is None:
            raise _no_table()
        return self._table

    def stream(self) -> Iterator[Buffer]:
        """Iterate over the payload. Raw frames are not copied: their pieces are views of the
        rows."""
        self.restart()
        # make a new salt for each attempt, because no pair of key and nonce may be used twice
        frame_seal = self.seal.new_pack(self.namespace, self.tenant)
        frames: list[Frame] = []
        untagged: dict[int, _StoredFrame] = {}
        for stored in self._stored_frames(frame_seal):
            if stored.needs_tag:
                number = len(frames)
                untagged[number] = stored
            frames.append(stored.frame)
            yield from stored.pieces
            length = stored.frame.stored_length
            padding = align(length) - length
            if padding:
                yield bytes(padding)
        # Tags of raw frames are computed at the access to ``table``: a backend may write the frames
        # at the same time.
        self._make_pending_table = partial(
            self._make_table, frame_seal, frames, untagged
        )
        self.written = True

    def _make_table(
        self,
        frame_seal: FrameSeal,
        frames: Sequence[Frame],
        untagged: Mapping[int, _StoredFrame],
    ) -> PackTable:
        """Return the pack's table; compute the tags that are not known yet.

        :param frames: all frames in order, without their offsets.
        :param untagged: by number, the frames that lack their tags, too; empty if the pack is
            encrypted.
        """
        complete: list[Frame] = []
        end = 0
        for number, frame in enumerate(frames):
            tag = frame.tag
            if number in untagged:
                stored = untagged[number]
                placed = PlacedFrame(number, frame, stored.untagged_keys)
                # ignore the sealed bytes: without encryption, they are these pieces
                _, tag = frame_seal.seal(placed, stored.pieces)
            complete.append(frame._replace(offset=end, tag=tag))
            end += align(frame.stored_length)
        return PackTable(
            namespace=self.namespace,
            pack_id=self.pack_id,
            codec=str(self.codec),
            payload_length=end,
            raw_length=self.raw_length,
            packed_frames=pack_frames(complete),
            keys=self.keys,
            data_key=frame_seal.key_id,
            salt=frame_seal.salt,
            tenant=self.tenant,
        )

    def _make_table_if_pending(self) -> None:
        """Make the table, if the stream has run to its end and it is not made yet."""
        make_table = self._make_pending_table
        self._make_pending_table = None
        if make_table is not None:
            self._table = make_table()

    def restart(self) -> None:
        # clear this first: ``end_reads`` would make the table of the previous attempt, which is not
        # needed
        self._make_pending_table = None
        super().restart()
        self._table = None

    def end_reads(self) -> None:
        """Finish the work that reads the blocks: wait for frames that other threads encode, and
        compute the tags of raw frames if the stream has run to its end."""
        # A stream that was abandoned leaves frames that are still being encoded. Nothing needs
        # their results or errors.
        while self._started:
            wait_for_frame = self._started.popleft()
            with suppress(Exception):
                wait_for_frame()
        self._make_table_if_pending()

    def release(self) -> None:
        """Release the blocks, so that a reference to this object (such as an error's traceback)
        does not keep them alive. All other attributes remain available; do not call ``stream``
        again.
        """
        self.end_reads()
        self.sections = ()

    def _stored_frames(self, frame_seal: FrameSeal) -> Iterator[_StoredFrame]:
        """Yield the frames in order, encoded in other threads if the pack has a codec."""
        # without a codec, frames are only sealed: encryption holds the GIL, so other threads would
        # not help
        if self._start_frame is None or self.codec.identity:
            for store_frame in self._frame_calls(frame_seal):
                yield store_frame()
            return
        for store_frame in self._frame_calls(frame_seal):
            wait_for_frame = self._start_frame(store_frame)
            self._started.append(wait_for_frame)
            # yield the oldest frame, which bounds the memory of encoded frames
            if len(self._started) > MOST_STARTED:
                wait_for_frame = self._started.popleft()
                yield wait_for_frame()
        while self._started:
            wait_for_frame = self._started.popleft()
            yield wait_for_frame()

    def _frame_calls(self, frame_seal: FrameSeal) -> Iterator[_MakeFrame]:
        """Yield, for each frame of the pack in order, the call that encodes and seals the frame."""
        number = 0
        for section in self.sections:
            for start, stop in section.frame_bounds():
                yield partial(
                    self._encode_and_seal, frame_seal, number, section, start, stop
                )
                number += 1

    def _encode_and_seal(
        self,
        frame_seal: FrameSeal,
        number: int,
        section: Section,
        start: int,
        stop: int,
    ) -> _StoredFrame:
        """Encode and seal frame ``number`` of the pack: blocks ``start`` to ``stop`` (exclusive) of
        a section. Without encryption, a raw frame is returned without its tag."""
        keys = section.keys[start:stop]
        depth = section.depth
        if depth != UNKNOWN_DEPTH:
            depth += start
        num_blocks = stop - start
        # describe the blocks as a raw frame; ``_make_table`` sets the offset
        frame = Frame(
            section.group,
            num_blocks,
            section.block_bytes,
            depth,
            offset=0,
            stored_length=num_blocks * section.block_bytes,
            tag=b"",
        )
        encoded = self._encoded(section, start, stop)
        if encoded is None:
            pieces: Sequence[Buffer] = section.source.pieces(start, stop)
            if not frame_seal.encrypts:
                # ``_make_table`` computes the tag later, from these views
                return _StoredFrame(frame, pieces, untagged_keys=keys)
        else:
            pieces = [encoded]
            frame = frame._replace(stored_length=len(encoded))
        placed = PlacedFrame(number, frame, keys)
        sealed, tag = frame_seal.seal(placed, pieces)
        return _StoredFrame(frame._replace(tag=tag), sealed)

    def _encoded(
        self,
        section: Section,
        start: int,
        stop: int,
    ) -> Buffer | None:
        """Return the encoded blocks; None if the codec does not make them shorter: they are then
        stored raw."""
        if self.codec.identity:
            return None
        blocks = section.source.gather(start, stop)
        raw = blocks.data.cast("B")
        encoded = self.codec.encode(raw)
        is_shorter = len(encoded) < len(raw)
        return encoded if is_shorter else None


def _table_length(table: PackTable) -> int:
    """Return the bytes of an encoded table with its trailer."""
    return encoded_length(table.codec, table.frame_count, table.keys, table.tenant)


def _no_table() -> ValueError:
    return ValueError("a pack's table exists after its stream has run to the end")
