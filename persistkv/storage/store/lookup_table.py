"""The table in which an engine looks up keys: its read-only view of the memory that the host
process writes (``index``)."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np

from persistkv.errors import StoreError
from persistkv.storage.store.fingerprints import (
    FEW,
    SEALS,
    SLICE_BYTES,
    fingerprint_of,
    matches,
    stored_fingerprints,
    table_bytes,
)

_MAX_COLLISIONS = 4_096  # bound on remembered collisions


class LookupTable:
    """The engine's read-only view of the fingerprints that the host process keeps in shared memory.
    Empty until ``map`` and after ``clear``. Lookups may run in any thread; the other methods belong
    to one thread.
    """

    def __init__(self) -> None:
        self._retired: list[mmap.mmap] = []
        """Memory of previous tables, which ``release_some`` releases."""
        self._released = 0
        """Bytes of ``_retired[0]`` that are released already."""
        self._collisions: dict[bytes, None] = {}
        """Ordered set of the keys that are not held although held keys have their fingerprints."""
        self._memory: mmap.mmap | None = None
        """The mapped table; None: empty."""
        self._table = _empty_table()
        """The words of the table (its slots, then one word with the number of entries), and the
        number of slots. One value, so that a thread never mixes two tables."""

    def map(self, fd: int, slots: int) -> None:
        """Map a table that the host sent, in place of the previous one, which ``release_some``
        releases; close ``fd``.

        :raises StoreError: the memfd is not sealed or too small, or cannot be mapped; the previous
            table stays in use.
        """
        num_bytes = table_bytes(slots)
        try:
            # without the seals, the host could shrink the file, and a lookup would end in SIGBUS
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            is_sealed = seals & SEALS == SEALS
            has_size = slots > 0 and os.fstat(fd).st_size >= num_bytes
            if not is_sealed or not has_size:
                raise StoreError(
                    f"the lookup table of {slots} slots is not sealed, or too small"
                )
            memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise StoreError(f"the lookup table cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._retire()
        self._memory = memory
        # assign both at once, so that lookups in other threads see both or neither
        self._table = (memoryview(memory).cast("Q"), slots)

    def clear(self) -> None:
        """Find no keys until the next ``map``, because the host process is down."""
        self._table = _empty_table()
        self._collisions.clear()
        self._retire()

    def _retire(self) -> None:
        """Leave the memory of the present table to ``release_some``."""
        if self._memory is not None:
            self._retired.append(self._memory)
        self._memory = None

    def release_some(self) -> bool:
        """Release a slice of the previous tables' memory (a whole one takes 27 ms); return False if
        none was left."""
        if not self._retired:
            return False
        memory = self._retired[0]
        num_bytes = min(SLICE_BYTES, len(memory) - self._released)
        memory.madvise(mmap.MADV_DONTNEED, self._released, num_bytes)
        self._released += num_bytes
        # Release the mapping with the last slice, not in a further call: an engine that maps a new
        # table before each call of this method would otherwise release only every second table.
        if self._released == len(memory):
            self._released = 0
            del self._retired[0]
        return True

    def __contains__(self, key: bytes) -> bool:
        """Whether the host's store probably holds the key: another key can have the same
        fingerprint."""
        fingerprint = fingerprint_of(key)
        table, slots = self._table
        slot = fingerprint % slots
        while found := table[slot]:  # 0 is an empty slot
            if found == fingerprint:
                # The key is absent if it is a known collision: the fingerprint is that of another
                # key. Usually no collision is known, and the key need not be hashed again.
                return not self._collisions or key not in self._collisions
            slot += 1
            if slot == slots:
                slot = 0
        return False

    contains = __contains__

    def __len__(self) -> int:
        """Number of entries of the host's index: the word behind the slots."""
        table, slots = self._table
        return table[slots]

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Return ``contains`` for each key; several times faster than single calls."""
        if len(keys) < FEW:
            return list(map(self.contains, keys))
        memory, slots = self._table
        table = np.frombuffer(memory, np.uint64)
        found, _ = matches(table, slots, stored_fingerprints(keys))
        held: list[bool] = found.tolist()
        if self._collisions:
            for place, key in enumerate(keys):
                # a known collision: the fingerprint that was found is that of another key
                if key in self._collisions:
                    held[place] = False
        return held

    def prefix(self, keys: Sequence[bytes]) -> int:
        """Return the number of keys before the first one for which ``contains`` returns False."""
        held = self.held(keys)
        if False in held:
            return held.index(False)
        return len(held)

    def set_collisions(self, keys: Mapping[bytes, bool]) -> None:
        """Remember (True) or forget (False) that keys are not held although other keys have their
        fingerprints. Of more than 4,096 keys, the oldest are forgotten: lookups find them again,
        and their loads fail as misses.
        """
        change_collisions(self._collisions, keys)


def change_collisions(
    collisions: dict[bytes, None], changes: Mapping[bytes, bool]
) -> None:
    """Change an ordered set of colliding keys: True adds a key, False removes it. Above 4,096 keys,
    the oldest are removed."""
    for key, is_collision in changes.items():
        # remove it even if it is added again below, which makes it the newest
        collisions.pop(key, None)
        if is_collision:
            collisions[key] = None
    while len(collisions) > _MAX_COLLISIONS:
        oldest = next(iter(collisions))
        del collisions[oldest]


def _empty_table() -> tuple[memoryview, int]:
    """Return ``LookupTable._table`` without entries: one empty slot, and 0 entries."""
    slots = 1
    words = memoryview(bytes(table_bytes(slots))).cast("Q")
    return words, slots
