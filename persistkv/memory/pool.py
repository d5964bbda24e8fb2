"""Pool of buffers for copies of blocks."""

from __future__ import annotations

import mmap
import threading

from persistkv.memory.pages import HUGE_PAGE_BYTES, huge_memory

_KEPT_BYTES = 128 << 20  # 128 MiB: maximum size of the free buffers that are kept
_MOST_WASTE = 4  # maximum size of a lent buffer divided by the bytes asked for


class BufferPool:
    """Reuses buffers: the first access to new memory takes longer than a copy. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        """Buffers that were given back, in that order."""
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> mmap.mmap:
        """Return a buffer of at least ``num_bytes``, with undefined content.

        :raises OSError: no memory is left.
        """
        # count less than a huge page as one, because a new buffer would not be smaller
        most_bytes = _MOST_WASTE * max(num_bytes, HUGE_PAGE_BYTES)
        with self._lock:
            for index, buffer in enumerate(self._free):
                if num_bytes <= len(buffer) <= most_bytes:
                    return self._free.pop(index)
        return huge_memory(num_bytes)

    def give_back(self, buffer: mmap.mmap) -> None:
        """Return a buffer that nothing uses any more."""
        with self._lock:
            sizes = map(len, self._free)
            kept_bytes = sum(sizes)
            # a buffer that is not kept is unmapped with its last reference
            if kept_bytes + len(buffer) <= _KEPT_BYTES:
                self._free.append(buffer)
