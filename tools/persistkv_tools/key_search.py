"""Finds a few keys among a million packed ones: to make an object of each would take longer than to read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby

import numpy as np

from persistkv.storage.keys import PackedKeys

_HEAD = np.dtype("<u8")
_AT_ONCE = 1 << 20  # bytes of keys that are searched together


class KeySearch:
    """Looks for the same keys again and again."""

    def __init__(self, wanted: Iterable[bytes]) -> None:
        self._wanted = frozenset(wanted)
        heads = [key[: _HEAD.itemsize] for key in self._wanted if len(key) >= _HEAD.itemsize]
        self._heads = np.unique(np.frombuffer(b"".join(heads), dtype=_HEAD))

    def find(self, among: Iterable[PackedKeys]) -> Iterator[tuple[int, list[bytes]]]:
        """Those of ``among`` that have wanted keys: the position of each, and these keys, in order."""
        batch: list[tuple[int, PackedKeys]] = []
        size = 0
        for position, keys in enumerate(among):
            batch.append((position, keys))
            size += len(keys.data)
            if size >= _AT_ONCE:
                yield from self._find(batch)
                batch, size = [], 0
        yield from self._find(batch)

    def _find(self, batch: list[tuple[int, PackedKeys]]) -> Iterator[tuple[int, list[bytes]]]:
        for key_length, run in groupby(batch, key=lambda item: item[1].key_length):
            some = list(run)
            for index in self._suspects(key_length, [keys for _, keys in some]):
                position, keys = some[index]
                if found := [key for key in keys.unpack() if key in self._wanted]:
                    yield position, found

    def _suspects(self, key_length: int, some: list[PackedKeys]) -> Iterable[int]:
        """Which of these may have one: they have a key that begins like one."""
        if key_length < _HEAD.itemsize:
            return range(len(some))
        data = b"".join([keys.data for keys in some])
        if not len(self._heads) or len(data) < key_length:
            return ()
        heads = np.ndarray(len(data) // key_length, dtype=_HEAD, buffer=data, strides=(key_length,))
        nearest = np.minimum(np.searchsorted(self._heads, heads), len(self._heads) - 1)
        hits = np.flatnonzero(self._heads[nearest] == heads)
        ends = np.fromiter(accumulate(len(keys) for keys in some), dtype=np.int64, count=len(some))
        return np.unique(np.searchsorted(ends, hits, side="right")).tolist()  # type: ignore[no-any-return]
