"""Blocks wait here, copied out of their rows, until they make packs that are worth writing.

1. What is staged is counted from ``add`` until ``end``: also while a transaction writes it.
2. A key is found here for as long as its copy is. Whoever offers it again while it is being written has a claim on that
   copy: where the transaction fails, it is staged anew under his name.

The bound on the bytes in it is its owner's to keep: see ``fits``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from persistkv.storage.pack import UNKNOWN_DEPTH
from persistkv.storage.pack_writer import Segment
from persistkv.storage.rows import RowBlocks, StagedBlocks

FULL_BYTES = 16 << 20  # 16 MiB: blocks that a request staged one after the other are a pack once they are so many


@dataclass(eq=False)
class StagedPack:
    """Copies that are written as one pack."""

    request: str
    since: float
    segments: list[Segment] = field(default_factory=list)
    num_bytes: int = 0
    closed: bool = False
    """Nothing is added to it any more."""
    claims: dict[bytes, str] = field(default_factory=dict)
    """Keys that were offered again while it was being written, and by which request."""

    @property
    def num_blocks(self) -> int:
        """Blocks of all segments."""
        return sum(len(segment.keys) for segment in self.segments)


class Staging:
    """See the top of this file."""

    def __init__(self, max_bytes: int, max_age_s: float, *, gather_all: bool) -> None:
        """Nothing is staged yet.

        :param max_bytes: what ``fits`` says no to.
        :param max_age_s: after which a pack is due.
        :param gather_all: nothing is due before the oldest is, but then all is; else each pack by itself.
        """
        self.num_bytes = 0
        """Raw bytes of all copies."""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._gather_all = gather_all
        self._waiting: dict[StagedPack, None] = {}
        self._waiting_bytes = 0
        self._open: dict[str, StagedPack] = {}
        self._pack_of: dict[bytes, StagedPack] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._pack_of

    def held(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of the keys that are found here, in order."""
        return [key for key in keys if key in self._pack_of] if self._pack_of else []

    def fits(self, num_bytes: int) -> bool:
        """Whether so much more may be added."""
        return self.num_bytes + num_bytes <= self._max_bytes

    def add(self, request: str, segments: Iterable[Segment], *, whole: bool = False) -> None:
        """Copy blocks; their rows are free on return.

        :param whole: they are a pack of their own; else they join what the request staged before.
        """
        pack = StagedPack(request, time.monotonic(), closed=True) if whole else self._open_pack(request)
        self._waiting[pack] = None
        for segment in segments:
            self._add(pack, segment)
        if pack.num_bytes >= FULL_BYTES:
            self._close(pack)

    def _open_pack(self, request: str) -> StagedPack:
        return self._open.setdefault(request, StagedPack(request, time.monotonic()))

    def _add(self, pack: StagedPack, segment: Segment) -> None:
        blocks = segment.source.gather(0, len(segment.keys))
        if isinstance(segment.source, RowBlocks):
            blocks = np.array(blocks, copy=True)
        copied = Segment(segment.group, segment.block_bytes, segment.keys, StagedBlocks([blocks]), segment.depth)
        pack.segments.append(copied)
        pack.num_bytes += segment.raw_length
        self.num_bytes += segment.raw_length
        self._waiting_bytes += segment.raw_length
        self._pack_of.update(dict.fromkeys(segment.keys, pack))

    def _close(self, pack: StagedPack) -> None:
        pack.closed = True
        if self._open.get(pack.request) is pack:
            del self._open[pack.request]

    def claim(self, key: bytes, request: str) -> None:
        """Another job offered a key that is staged."""
        pack = self._pack_of[key]
        if pack not in self._waiting:
            pack.claims[key] = request

    def owners(self, keys: Iterable[bytes]) -> set[StagedPack]:
        """The packs that hold these keys and wait."""
        return {pack for key in keys if (pack := self._pack_of.get(key)) is not None and pack in self._waiting}

    def of_request(self, request: str) -> list[StagedPack]:
        """What a request staged and waits."""
        return [pack for pack in self._waiting if pack.request == request]

    def waiting(self) -> list[StagedPack]:
        """All that waits."""
        return list(self._waiting)

    def due(self) -> list[StagedPack]:
        """What is to be written now: its time is up; or half of the bound waits (the other half fills meanwhile)."""
        if 2 * self._waiting_bytes >= self._max_bytes:
            return list(self._waiting)
        old = time.monotonic() - self._max_age_s
        if self._gather_all:
            return list(self._waiting) if any(pack.since <= old for pack in self._waiting) else []
        return [pack for pack in self._waiting if pack.closed or pack.since <= old]

    def seconds_to_due(self) -> float | None:
        """How long until the oldest is aged; None where nothing waits."""
        if not self._waiting:
            return None
        return max(0.0, min(pack.since for pack in self._waiting) + self._max_age_s - time.monotonic())

    def take(self, pack: StagedPack) -> list[Segment]:
        """Its blocks, as few segments as their depths allow; they stay here until ``end``."""
        del self._waiting[pack]
        self._waiting_bytes -= pack.num_bytes
        self._close(pack)
        pack.segments = _joined(pack.segments)
        return pack.segments

    def end(self, pack: StagedPack, *, written: bool) -> int:
        """A pack that was taken is durable, or is not; the blocks of it that are lost."""
        self.num_bytes -= pack.num_bytes
        for segment in pack.segments:
            for key in segment.keys:
                del self._pack_of[key]
        if written:
            return 0
        for segment in pack.segments:
            self._restage(segment, pack.claims)
        return pack.num_blocks - len(pack.claims)

    def _restage(self, segment: Segment, claims: dict[bytes, str]) -> None:
        """Copied once more: what nobody claims is let go of."""
        for position, key in enumerate(segment.keys):
            if key in claims:
                block = np.array(segment.source.gather(position, position + 1), copy=True)
                depth = segment.depth if segment.depth == UNKNOWN_DEPTH else segment.depth + position
                one = Segment(segment.group, segment.block_bytes, [key], StagedBlocks([block]), depth)
                self.add(claims[key], [one])


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Decode adds one block at a time: runs that follow one another become one segment, hence one frame."""
    ordered = sorted(segments, key=lambda s: (s.group, s.depth))
    ends: list[int] = []
    for before, segment in zip([None, *ordered], ordered, strict=False):
        follows = (
            before is not None
            and before.group == segment.group
            and (segment.depth == UNKNOWN_DEPTH == before.depth or segment.depth == before.depth + len(before.keys))
        )
        ends.append(ends[-1] if follows else len(ends))
    runs = groupby(zip(ends, ordered, strict=True), key=lambda pair: pair[0])
    return [_one([segment for _, segment in run]) for _, run in runs]


def _one(run: list[Segment]) -> Segment:
    first = run[0]
    keys = [key for segment in run for key in segment.keys]
    blocks = [segment.source.gather(0, len(segment.keys)) for segment in run]
    return Segment(first.group, first.block_bytes, keys, StagedBlocks(blocks), first.depth)
