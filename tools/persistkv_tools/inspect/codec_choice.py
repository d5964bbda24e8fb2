"""Which codec suits a store: tried on samples of what the store holds.

The worth of a codec is its ratio divided by the time of a store and a load, each relative to ``raw``: one that halves
the bytes and takes twice as long is worth as much as ``raw``. A recommended codec is worth at least a tenth more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from persistkv.errors import CorruptPackError
from persistkv.storage.backend import Backend, ReadSpan
from persistkv.storage.format.codec import parse_codec
from persistkv.storage.format.pack import FRAME_BYTES, Frame, PackTable, align, decode_frame

CODECS = ("raw", "zstd:1", "planes:2", "planes:4")
_SAMPLE_PACKS = 64
LEAST_GAIN = 1.1

T = TypeVar("T")


class CodecFigure(msgspec.Struct, frozen=True):
    """One codec, in medians over the rounds."""

    codec: str
    ratio: float
    """Raw bytes per stored byte, padding included."""
    store_bytes_per_s: float
    """Raw bytes."""
    load_bytes_per_s: float
    """Likewise."""
    time: float
    """Of a store and a load, relative to ``raw``."""


class Advice(msgspec.Struct, frozen=True):
    """A recommended codec."""

    codec: str
    reason: str


def sample_store(backend: Backend, most_bytes: int) -> bytes:
    """Decoded frames, spread evenly over a store's packs. Frames that cannot be read are left out.

    :returns: nothing if there is less than one full frame: too little to judge by.
    :raises StoreError: the medium failed.
    """
    tables = [table for space in backend.namespaces() for table in backend.changes(space.id, None).added]
    packs = _spread(tables, _SAMPLE_PACKS)
    per_pack = max(1, most_bytes // FRAME_BYTES // max(1, len(packs)))
    sample = bytearray()
    for table in packs:
        for frame in _spread(table.frames, per_pack):
            sample += _decoded(backend, table, frame)
    return bytes(sample[:most_bytes]) if len(sample) >= FRAME_BYTES else b""


def _spread(items: Sequence[T], most: int) -> Sequence[T]:
    return items[:: max(1, -(-len(items) // most))]


def _decoded(backend: Backend, table: PackTable, frame: Frame) -> bytearray:
    stored, raw = bytearray(frame.stored_length), bytearray(frame.raw_length)
    with suppress(CorruptPackError):
        if all(backend.read(table.namespace, [ReadSpan(table.pack_id, frame.offset, [memoryview(stored)])])):
            decode_frame(table.codec, frame, stored, memoryview(raw))
            return raw
    return bytearray()


def smallest(sample: bytes) -> tuple[str, float]:
    """The codec with the highest ratio for these bytes, and that ratio."""
    frames = [sample[start : start + FRAME_BYTES] for start in range(0, len(sample), FRAME_BYTES)]
    ratios = {}
    for name in CODECS:
        codec = parse_codec(name)
        ratios[name] = len(sample) / sum(align(min(len(codec.encode(frame)), len(frame))) for frame in frames)
    best = max(ratios, key=ratios.__getitem__)
    return best, ratios[best]


def recommend(figures: Sequence[CodecFigure]) -> Advice:
    """The codec that is worth most, and why."""
    best = max((figure for figure in figures if figure.codec != "raw"), key=lambda figure: figure.ratio / figure.time)
    traits = (
        f"{best.codec} makes the data {best.ratio:.2f}x smaller, and a store and a load take {best.time:.2f}x as long"
    )
    if best.ratio / best.time >= LEAST_GAIN:
        return Advice(best.codec, f"{traits} as with raw")
    return Advice("raw", f"no codec is worth its time here: {traits} as with raw")
