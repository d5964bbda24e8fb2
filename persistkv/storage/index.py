"""The in-memory index of one namespace: which pack, and which block in it, holds a key.

Owned by ``Store``. A key may lie in several packs and survives the deletion of one. The common case, a key in one
pack, costs one dictionary entry whose value is a plain number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from persistkv.storage.pack import Frame, PackTable, frame_seed

_POSITION_BITS = 24  # a pack of 64 MiB holds fewer blocks than that unless they are smaller than 4 bytes
_POSITION_MASK = (1 << _POSITION_BITS) - 1


class HeldPack(NamedTuple):
    """What reading a pack takes; its keys stand in the index itself."""

    pack_id: bytes
    codecs: str
    """As in the pack's table."""
    frames: tuple[Frame, ...]
    seeds: tuple[int, ...]
    """For each frame, what its checksum is seeded with."""
    starts: tuple[int, ...]
    """For each frame, the position in the pack of its first block."""
    payload_length: int
    block_count: int

    def frame_of(self, position: int) -> int:
        """The number of the frame that holds the block at this position."""
        return bisect_right(self.starts, position) - 1


class Index:
    """Not thread-safe, but a membership probe is one dictionary probe and may come from any thread."""

    def __init__(self) -> None:
        self._where: dict[bytes, int] = {}
        self._also: dict[bytes, list[int]] = {}
        self._packs: dict[int, HeldPack] = {}
        self._numbers: dict[bytes, int] = {}
        self._next_number = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._where)

    def holds(self, pack: HeldPack) -> bool:
        """Whether this pack, and not another that was written under its name since, is known."""
        number = self._numbers.get(pack.pack_id)
        return number is not None and self._packs[number] is pack

    def add(self, table: PackTable) -> list[bytes]:
        """Take a pack in.

        :returns: the keys that were not held before; none where the pack is known already.
        """
        if table.pack_id in self._numbers:
            return []
        keys = table.keys.unpack()
        number = self._next_number
        self._next_number += 1
        self._numbers[table.pack_id] = number
        self._packs[number] = _held(table, keys)
        places = range(number << _POSITION_BITS, (number << _POSITION_BITS) + len(keys))
        if self._where.keys().isdisjoint(keys):
            self._where.update(zip(keys, places, strict=True))
            return keys
        return [key for key, place in zip(keys, places, strict=True) if self._add_one(key, place)]

    def _add_one(self, key: bytes, place: int) -> bool:
        if self._where.setdefault(key, place) == place:
            return True
        self._also.setdefault(key, []).append(place)
        return False

    def remove(self, pack_id: bytes, keys: Iterable[bytes] | None = None) -> list[bytes]:
        """Forget a pack.

        :param keys: the pack's keys; without them the whole index is scanned.
        :returns: the keys that no other pack holds and that are gone now; none where the pack is not known.
        """
        number = self._numbers.pop(pack_id, None)
        if number is None:
            return []
        del self._packs[number]
        if keys is None:
            keys = [key for key, place in self._where.items() if place >> _POSITION_BITS == number]
            keys += [key for key, places in self._also.items() if any(p >> _POSITION_BITS == number for p in places)]
        return [key for key in keys if self._remove_one(key, number)]

    def _remove_one(self, key: bytes, number: int) -> bool:
        if key not in self._where:
            return False
        places = [self._where[key], *self._also.pop(key, ())]
        left = [place for place in places if place >> _POSITION_BITS != number]
        if not left:
            del self._where[key]
            return True
        self._where[key] = left[0]
        if len(left) > 1:
            self._also[key] = left[1:]
        return False

    def remove_all(self, pack_ids: Iterable[bytes]) -> list[bytes]:
        """Forget packs whose keys nobody can tell any more, with one scan of the whole index for all of them.

        :returns: the keys that no other pack holds and that are gone now.
        """
        known = {self._numbers[pack_id]: pack_id for pack_id in pack_ids if pack_id in self._numbers}
        keys: dict[int, list[bytes]] = {number: [] for number in known}
        if not known:
            return []
        for key, place in self._where.items():
            if (number := place >> _POSITION_BITS) in known:
                keys[number].append(key)
        for key, places in self._also.items():
            for place in places:
                if (number := place >> _POSITION_BITS) in known:
                    keys[number].append(key)
        return [key for number, pack_id in known.items() for key in self.remove(pack_id, keys[number])]

    def locate(self, key: bytes) -> tuple[HeldPack, int] | None:
        """The pack that holds the key and the block's position in it; None where no pack does."""
        place = self._where.get(key)
        if place is None:
            return None
        return self._packs[place >> _POSITION_BITS], place & _POSITION_MASK


def _held(table: PackTable, keys: list[bytes]) -> HeldPack:
    starts = tuple(accumulate((frame.block_count for frame in table.frames[:-1]), initial=0)) if table.frames else ()
    seeds = tuple(
        frame_seed(table.namespace, b"".join(keys[start : start + frame.block_count]))
        for start, frame in zip(starts, table.frames, strict=True)
    )
    return HeldPack(table.pack_id, table.codecs, table.frames, seeds, starts, table.payload_length, len(keys))
