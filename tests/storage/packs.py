"""Helpers for the tests of packs: write, seal and decode."""

from __future__ import annotations

import struct

import xxhash
from hypothesis import strategies as st

from persistkv.storage.format.codec import Codec, RawCodec
from persistkv.storage.format.pack import (
    PackTable,
    decode_frame,
)
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.format.seal import PLAIN
from persistkv.testing.samples import sample_section

NAMESPACE = bytes(range(16))


HEADER = struct.Struct("<HHIIHHQQ16s16s8s16s")  # docs/format.md


FRAME = struct.Struct("<IIIIQQ16s")


TRAILER = struct.Struct("<QQ8s")


def write(*sections: Section, codec: Codec | None = None) -> tuple[bytes, PackTable]:
    """Write a pack; return its payload and its table."""
    pack = PackWriter(NAMESPACE, codec or RawCodec(), sections)
    return b"".join(map(bytes, pack.stream())), pack.table


def sealed(table: bytes) -> bytes:
    """Return a table followed by a valid trailer."""
    return table + TRAILER.pack(
        len(table), xxhash.xxh3_64_intdigest(table), b"PKVPACK1"
    )


def raw_blocks(part: Section) -> dict[bytes, bytes]:
    """Return the blocks of a sample section by key."""
    raw, size = part.source.gather(0, len(part.keys)).tobytes(), part.block_bytes
    return {
        key: raw[number * size : (number + 1) * size]
        for number, key in enumerate(part.keys)
    }


def blocks_of(payload: bytes, table: PackTable) -> dict[bytes, bytes]:
    """Verify each frame; return all blocks by key."""
    blocks: dict[bytes, bytes] = {}
    seal = PLAIN.of_pack(table)
    for placed in table.placed_frames():
        frame = placed.frame
        stored = payload[frame.offset : frame.offset + frame.stored_length]
        seal.open(placed, [memoryview(stored)])
        raw = bytearray(frame.raw_length)
        decode_frame(table.codec, frame, stored, memoryview(raw))
        size = frame.block_bytes
        blocks |= {
            name: bytes(raw[index * size : (index + 1) * size])
            for index, name in enumerate(placed.keys)
        }
    assert len(blocks) == len(table.keys)
    return blocks


sections = st.builds(
    sample_section,
    st.integers(0, 1 << 30),
    group=st.integers(0, 3),
    blocks=st.integers(1, 9),
    block_bytes=st.sampled_from([1, 100, 4096, 300_000, (1 << 20) + 1]),
    hash_bytes=st.sampled_from([8, 32]),
)
