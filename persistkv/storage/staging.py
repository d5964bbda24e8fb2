"""Small jobs wait here, copied out of their rows, until they make a pack that is worth writing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from persistkv.storage.pack import UNKNOWN_DEPTH, Segment
from persistkv.storage.rows import RowBlocks, StagedBlocks

FULL_BYTES = 16 << 20  # 16 MiB: a request's staged blocks are written once they are this many


@dataclass
class _Waiting:
    since: float
    segments: list[Segment] = field(default_factory=list)
    num_bytes: int = 0


class Staging:
    """Staged blocks by request. The bound on the bytes in it is its owner's to keep: see ``due``."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self.num_bytes = 0
        """Raw bytes that wait here."""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._waiting: dict[str, _Waiting] = {}
        self._owner: dict[bytes, str] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._owner

    def owner(self, key: bytes) -> str | None:
        """The request that staged the key."""
        return self._owner.get(key)

    def add(self, request: str, segment: Segment) -> None:
        """Copy a segment's blocks; their rows are free on return."""
        blocks = segment.source.gather(0, len(segment.keys))
        if isinstance(segment.source, RowBlocks):
            blocks = np.array(blocks, copy=True)
        copied = Segment(segment.group, segment.block_bytes, segment.keys, StagedBlocks([blocks]), segment.depth)
        waiting = self._waiting.setdefault(request, _Waiting(time.monotonic()))
        waiting.segments.append(copied)
        waiting.num_bytes += segment.raw_length
        self.num_bytes += segment.raw_length
        self._owner.update(dict.fromkeys(segment.keys, request))

    def due(self) -> list[str]:
        """The requests whose blocks are to be written now: full, aged, or all where the bound is reached."""
        if self.num_bytes >= self._max_bytes:
            return list(self._waiting)
        old = time.monotonic() - self._max_age_s
        return [name for name, w in self._waiting.items() if w.num_bytes >= FULL_BYTES or w.since <= old]

    def due_bytes(self) -> int:
        """Raw bytes of what is to be written now."""
        return sum(self._waiting[name].num_bytes for name in self.due())

    def seconds_to_due(self) -> float | None:
        """How long until the oldest is aged; None where nothing waits."""
        if not self._waiting:
            return None
        return max(0.0, min(w.since for w in self._waiting.values()) + self._max_age_s - time.monotonic())

    def requests(self) -> list[str]:
        """All requests with blocks in here."""
        return list(self._waiting)

    def take(self, request: str) -> list[Segment]:
        """Remove a request's blocks and hand them over as few segments as their depths allow."""
        waiting = self._waiting.pop(request, None)
        if waiting is None:
            return []
        self.num_bytes -= waiting.num_bytes
        for segment in waiting.segments:
            for key in segment.keys:
                del self._owner[key]
        return _joined(waiting.segments)


def _joined(segments: list[Segment]) -> list[Segment]:
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
