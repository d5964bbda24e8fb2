"""The in-memory index of one namespace: which pack holds a key.

Owned by ``Store``. Several packs may hold a key; the key survives the deletion of one of them. The memory per key is
its bytes, one dictionary entry and one reference in its pack's tuple of keys: about 130 bytes for keys of 36 bytes.
Everything else is kept once per pack, in packed form, and is unpacked when the pack is read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import repeat

from persistkv.storage.format.pack import Frame, PackTable, unpack_frames


class HeldPack:
    """Data that is needed to read a pack. Immutable. Two packs of one id are distinguished by object identity."""

    __slots__ = ("_frames", "codec", "keys", "pack_id")

    def __init__(self, table: PackTable, keys: list[bytes]) -> None:
        self.pack_id = bytes(bytearray(table.pack_id))  # a copy, away from the parser's short-lived objects
        self.codec = sys.intern(table.codec)
        """As in the pack's table."""
        self.keys = tuple(keys)
        """Keys of all blocks, frame after frame."""
        self._frames = bytes(bytearray(table.packed_frames))

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Frames of the pack, unpacked on each access."""
        return unpack_frames(self._frames)


class Index:
    """Map from keys to packs. Not thread-safe, except for membership tests: these are one dictionary probe."""

    def __init__(self) -> None:
        self._where: dict[bytes, HeldPack] = {}
        self._also: dict[bytes, list[HeldPack]] = {}
        self._packs: dict[bytes, HeldPack] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._where)

    def pack_of(self, key: bytes) -> HeldPack | None:
        """Return a pack that holds the key, or None."""
        return self._where.get(key)

    def packs_of(self, keys: Iterable[bytes]) -> list[HeldPack | None]:
        """Return ``pack_of`` for each key, several times faster than single calls."""
        return list(map(self._where.get, keys))

    def absent(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys that no pack holds, in order."""
        where = self._where
        return [key for key in keys if key not in where]

    def holds(self, pack: HeldPack) -> bool:
        """Whether the index has this very pack, and not one that was written under its id since."""
        return self._packs.get(pack.pack_id) is pack

    def add(self, table: PackTable) -> list[bytes]:
        """Add a pack.

        :returns: the keys that were not held before; none if the pack is already known.
        """
        return [] if table.pack_id in self._packs else self.restore(HeldPack(table, table.keys.unpack()))

    def restore(self, pack: HeldPack) -> list[bytes]:
        """Add a pack that was removed; return the same as ``add``."""
        if pack.pack_id in self._packs:
            return []
        self._packs[pack.pack_id] = pack
        keys = list(pack.keys)
        holders = list(map(self._where.setdefault, keys, repeat(pack)))
        if holders.count(pack) == len(keys):
            return keys
        for key, holder in zip(keys, holders, strict=True):
            if holder is not pack:
                self._also.setdefault(key, []).append(pack)
        return [key for key, holder in zip(keys, holders, strict=True) if holder is pack]

    def remove_all(self, pack_ids: Iterable[bytes]) -> list[bytes]:
        """Remove packs; unknown ids are ignored.

        :returns: keys of these packs that no pack holds any more.
        """
        known = [pack for pack_id in pack_ids if (pack := self._packs.pop(pack_id, None)) is not None]
        return [key for pack in known for key in pack.keys if self._remove_one(key, pack)]

    def _remove_one(self, key: bytes, pack: HeldPack) -> bool:
        holder = self._where.get(key)
        if key not in self._also:
            if holder is pack:
                del self._where[key]
            return holder is pack
        left = [held for held in (self._where[key], *self._also.pop(key)) if held is not pack]
        self._where[key] = left[0]
        if len(left) > 1:
            self._also[key] = left[1:]
        return False
