"""Which of a million keys are held, as 64-bit fingerprints: 8 bytes a key, where a set of keys takes 100.

That a key counts as held though it is not, because another has its fingerprint, has a chance below 10^-13 where a
million are held: what this is for, to find requests whose blocks went, can live with that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from persistkv.storage.keys import PackedKeys
from persistkv.storage.manifest import ManifestKeys

_WORD = 4  # bytes
_STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
_AT_ONCE = 1 << 20  # bytes of keys that are taken together

Fingerprints = npt.NDArray[np.uint64]


class HeldKeys:
    """See the top of this file."""

    def __init__(self, held: Iterable[PackedKeys]) -> None:
        parts: list[Fingerprints] = [np.empty(0, dtype=np.uint64)]
        batch: list[PackedKeys] = []
        size = 0
        for keys in held:
            batch.append(keys)
            size += len(keys.data)
            if size >= _AT_ONCE:
                parts.append(_fingerprints(batch)[0])
                batch, size = [], 0
        parts.append(_fingerprints(batch)[0])
        self._held = np.sort(np.concatenate(parts))

    def missing(self, requests: Sequence[ManifestKeys]) -> list[int]:
        """For each request, how many of its keys are not held."""
        packed = [group for keys in requests for group in keys]
        owners = np.repeat(np.arange(len(requests)), [len(keys) for keys in requests])
        prints, numbers = _fingerprints(packed)
        if not self._absent(np.sort(prints)).any():  # sorted they are found five times as fast
            return [0] * len(requests)
        counts: list[int] = np.bincount(owners[numbers[self._absent(prints)]], minlength=len(requests)).tolist()
        return counts

    def _absent(self, prints: Fingerprints) -> npt.NDArray[np.bool_]:
        if not len(self._held):
            return np.ones(len(prints), dtype=bool)
        nearest = np.minimum(np.searchsorted(self._held, prints), len(self._held) - 1)
        absent: npt.NDArray[np.bool_] = self._held[nearest] != prints
        return absent


def _fingerprints(packed: Sequence[PackedKeys]) -> tuple[Fingerprints, npt.NDArray[np.int64]]:
    """Of all their keys, in any order; and for each, which of ``packed`` it is from."""
    by_length: dict[int, tuple[list[bytes], list[int], list[int]]] = {}
    for number, keys in enumerate(packed):
        for length, data in [(keys.key_length, keys.data)] if keys.key_length else [(len(k), k) for k in keys.unpack()]:
            pieces, numbers, counts = by_length.setdefault(length, ([], [], []))
            pieces.append(data)
            numbers.append(number)
            counts.append(len(data) // length)
    prints: list[Fingerprints] = [np.empty(0, dtype=np.uint64)]
    owners = [np.empty(0, dtype=np.int64)]
    for length, (pieces, numbers, counts) in by_length.items():
        prints.append(_mixed(b"".join(pieces), length))
        owners.append(np.repeat(np.array(numbers, dtype=np.int64), counts))
    return np.concatenate(prints), np.concatenate(owners)


def _mixed(data: bytes, length: int) -> Fingerprints:
    """Each byte of a key, and its length, decide all bits."""
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, length)
    if length % _WORD:
        rows = np.pad(rows, ((0, 0), (0, -length % _WORD)))
    words = rows.view("<u4")
    mixed = np.full(len(words), length, dtype=np.uint64)
    for column in range(words.shape[1]):
        mixed ^= words[:, column]
        mixed *= _STEP
        mixed ^= mixed >> _SHIFT
    return mixed
