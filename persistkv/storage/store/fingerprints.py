"""Fingerprints of keys (64-bit hashes), and their place in the memory that host process and engine
share: the slots of a hash table with open addressing and linear probing, followed by the number of
entries. ``index`` has the rules of this table."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

EMPTY = 0  # value of a slot that ends a probe
GONE = 1  # value of a slot whose entry was removed, and that probes pass
_SLOT_BYTES = 8
SLICE_BYTES = 4 << 20  # 4 MiB: memory released per step, in less than 1 ms
FEW = 12  # number of keys below which a loop is faster than NumPy
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Fps = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

fingerprint_of = xxhash.xxh3_64_intdigest  # of a whole key, in 40 ns


def stored_fingerprints(keys: Sequence[bytes]) -> Fps:
    """Return the fingerprint of each key as a table stores it, without reserved values."""
    fingerprints = np.fromiter(map(fingerprint_of, keys), np.uint64, len(keys))
    return _stored(fingerprints)


def unpack_fingerprints(packed: bytes) -> Fps:
    """Return ``PackedKeys.fingerprints`` as a table stores them; a partial last one is ignored."""
    fingerprints = np.frombuffer(packed, "<u8", len(packed) // 8)
    return _stored(fingerprints)


def _stored(fingerprints: Fps) -> Fps:
    """Return fingerprints as a table stores them: the reserved values 0 and 1 become 2 and 3.

    Lookups of a single key do not replace its fingerprint, so they miss a key with a reserved one
    (2 of 2^64).
    """
    # usually none is reserved; ``initial`` is the result for an empty array
    if fingerprints.min(initial=GONE + 1) > GONE:
        return fingerprints
    is_reserved = fingerprints <= GONE
    return np.where(is_reserved, fingerprints + np.uint64(2), fingerprints)


def table_bytes(slots: int) -> int:
    """Return the size in bytes of the shared memory of a table: its slots, then the number of
    entries."""
    return (slots + 1) * _SLOT_BYTES


def matches(
    table: Fps,
    slots: int,
    wanted: Fps,
) -> tuple[_Flags, Ints]:
    """Return for each fingerprint whether the table has it, and the slot at which its probe ended:
    the first one that contains the fingerprint, else an empty one. ``table`` may have further
    elements behind its slots.
    """
    probed = first_slots(wanted, slots)
    found = np.zeros(len(wanted), np.bool_)
    # indices of the fingerprints whose probes have not ended; each turn moves all of them on
    left = np.arange(len(wanted))
    while len(left):
        values = table[probed[left]]
        is_hit = values == wanted[left]
        found[left[is_hit]] = True
        is_other = ~is_hit & (values != EMPTY)
        left = left[is_other]
        advance(probed, left, slots)
    return found, probed


def first_slots(fingerprints: Fps, slots: int) -> Ints:
    """Return the slot at which the probe of each fingerprint begins."""
    return (fingerprints % np.uint64(slots)).astype(np.int64)


def advance(
    probed: Ints,
    which: Ints,
    slots: int,
) -> None:
    """Move the probes with the indices ``which`` to their next slots; the first slot follows the
    last one."""
    following = probed[which] + 1
    # compare instead of computing a remainder, which is several times slower
    following[following == slots] = 0
    probed[which] = following
