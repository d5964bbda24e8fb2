from __future__ import annotations

import hashlib
import struct
import threading
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from persistkv.errors import CorruptPackError
from persistkv.memory.rows import ByteArray, StagedBlocks
from persistkv.storage.format.codec import Codec, PlanesCodec, RawCodec, ZstdCodec
from persistkv.storage.format.pack import (
    FRAME_BYTES,
    UNKNOWN_DEPTH,
    PackTable,
    align,
    decode_frame,
)
from persistkv.storage.format.pack_writer import PackCopy, PackWriter, Section
from persistkv.storage.format.seal import PLAIN
from persistkv.storage.threads import StoreThreads
from persistkv.testing.samples import (
    payload_of,
    sample_blocks,
    sample_keys,
    sample_pack,
    sample_section,
)
from tests.storage.packs import NAMESPACE, blocks_of, raw_blocks, sections, write


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        sections, min_size=1, max_size=3, unique_by=lambda section: section.keys[0]
    ),
    st.sampled_from([RawCodec(), ZstdCodec(), PlanesCodec(), PlanesCodec(4)]),
)
def test_pack_round_trip_returns_same_blocks_and_table(
    parts: list[Section],
    codec: Codec,
) -> None:
    payload, table = write(*parts, codec=codec)
    assert PackTable.parse(payload + table.encode()) == table
    assert PackTable.parse(table.encode()) == table
    assert blocks_of(payload, table) == {
        key: block for part in parts for key, block in raw_blocks(part).items()
    }
    assert table.payload_length == len(payload)
    assert table.raw_length == sum(part.raw_length for part in parts)


def test_pack_frames_hold_blocks_up_to_one_mebibyte() -> None:
    _, table = write(
        sample_section(1, blocks=40, block_bytes=65_536),
        sample_section(2, group=1, blocks=3, block_bytes=3 << 20),
    )
    assert [(frame.group, frame.block_count, frame.depth) for frame in table.frames] == [
        (0, 16, 0), (0, 16, 16), (0, 8, 32), (1, 1, 0), (1, 1, 1), (1, 1, 2),
    ]  # fmt: skip
    assert all(frame.raw_length <= FRAME_BYTES for frame in table.frames[:3])
    assert all(frame.offset % 4096 == 0 for frame in table.frames)
    assert all(
        align(one.offset + one.stored_length) == other.offset
        for one, other in pairwise(table.frames)
    )


def test_pack_unknown_depth_is_kept_in_all_frames() -> None:
    part = sample_section(1, blocks=40, block_bytes=65_536)
    _, table = write(Section(part.group, part.block_bytes, part.keys, part.source))
    assert {frame.depth for frame in table.frames} == {UNKNOWN_DEPTH}


def test_pack_incompressible_frame_is_stored_raw() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (4, 4096), dtype=np.uint8)
    payload, table = write(
        Section(0, 4096, sample_keys(1, 4), StagedBlocks([noise])), codec=ZstdCodec()
    )
    (frame,) = table.frames
    assert not frame.encoded
    assert payload[: frame.stored_length] == noise.tobytes()


def test_pack_only_incompressible_frames_are_stored_raw() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (3, 8192), dtype=np.uint8)
    parts = [
        Section(
            0, 8192, sample_keys(1, 3), StagedBlocks([np.full((3, 8192), 7, np.uint8)])
        ),
        Section(1, 8192, sample_keys(2, 3, group=1), StagedBlocks([noise])),
    ]
    payload, table = write(*parts, codec=ZstdCodec())
    assert table.codec == "zstd:1"
    assert [(frame.group, frame.encoded) for frame in table.frames] == [
        (0, True),
        (1, False),
    ]
    assert blocks_of(payload, table) == {
        key: block for part in parts for key, block in raw_blocks(part).items()
    }


@pytest.mark.parametrize("codec", [RawCodec(), ZstdCodec(), PlanesCodec()])
def test_pack_bounds_hold_and_pack_copy_bounds_are_exact(codec: Codec) -> None:
    parts = [
        sample_section(1, blocks=300),
        sample_section(2, group=3, block_bytes=70_000, blocks=2),
    ]
    pack = PackWriter(NAMESPACE, codec, parts)
    bound, frames = pack.payload_bound, pack.frame_count
    payload = payload_of(pack)
    assert frames == pack.table.frame_count
    assert bound >= len(payload)
    copy = PackCopy(pack.table, payload, PLAIN)
    assert (copy.pack_id, copy.keys, copy.raw_length) == (
        pack.pack_id,
        pack.keys,
        pack.raw_length,
    )
    assert (copy.payload_bound, copy.frame_count) == (len(payload), frames)
    assert (payload_of(copy), copy.table) == (payload, pack.table)


def test_pack_writer_second_stream_equals_first() -> None:
    pack = PackWriter(
        NAMESPACE, PlanesCodec(), [sample_section(1), sample_section(2, group=1)]
    )
    first = b"".join(map(bytes, pack.stream()))
    table = pack.table
    assert b"".join(map(bytes, pack.stream())) == first
    assert pack.table == table


def test_decode_frame_unknown_codec_raises_corrupt() -> None:
    payload, table = write(sample_section(1), codec=ZstdCodec())
    (frame,) = table.frames
    assert frame.encoded
    with pytest.raises(CorruptPackError, match="brotli"):
        decode_frame(
            "brotli",
            frame,
            payload[: frame.stored_length],
            memoryview(bytearray(frame.raw_length)),
        )


def test_pack_id_depends_on_namespace_keys_codec_and_tenant_only() -> None:
    one = sample_pack(NAMESPACE, 1)
    assert one.pack_id == sample_pack(NAMESPACE, 1, content=9).pack_id
    others = [
        sample_pack(bytes(16), 1),
        sample_pack(NAMESPACE, 2),
        sample_pack(NAMESPACE, 1, codec=ZstdCodec()),
        PackWriter(NAMESPACE, RawCodec(), [sample_section(1, blocks=3)]),
        sample_pack(NAMESPACE, 1, tenant="anna"),
        sample_pack(NAMESPACE, 1, tenant="berta"),
    ]
    assert len({one.pack_id, *(other.pack_id for other in others)}) == 7
    for pack in (one, *others):
        payload_of(pack)
        assert PLAIN.is_id_of(pack.table)


def test_pack_id_differs_for_other_key_boundaries() -> None:
    def named(keys: list[bytes]) -> bytes:
        part = Section(0, 8, keys, StagedBlocks([sample_blocks(1, len(keys), 8)]))
        return PackWriter(NAMESPACE, RawCodec(), [part]).pack_id

    assert named([b"ab", b"c"]) != named([b"a", b"bc"])
    assert named([b"ab", b"cd"]) != named([b"abcd"])


def test_pack_writer_repeated_key_raises() -> None:
    keys = sample_keys(1, 3)
    part = Section(0, 8, [*keys, keys[0]], StagedBlocks([sample_blocks(1, 4, 8)]))
    with pytest.raises(ValueError, match="twice"):
        PackWriter(NAMESPACE, RawCodec(), [part])


def test_pack_writer_table_before_stream_raises() -> None:
    pack = sample_pack(NAMESPACE, 1)
    with pytest.raises(ValueError, match="stream"):
        _ = pack.table


def test_plain_seal_other_keys_or_namespace_raise_corrupt() -> None:
    payload, table = write(sample_section(1))
    (placed,) = table.placed_frames()
    stored = memoryview(payload[: placed.frame.stored_length])
    keys = placed.keys
    seal = PLAIN.of_pack(table)
    seal.open(placed, [stored])
    seal.open(placed, [stored[:10], stored[10:]])
    other = msgspec.structs.replace(table, namespace=bytes(16))
    for wrong, names in ((seal, keys[::-1]), (PLAIN.of_pack(other), keys)):
        with pytest.raises(CorruptPackError, match="frame"):
            wrong.open(replace(placed, keys=names), [stored])
    with pytest.raises(CorruptPackError, match="frame"):
        seal.open(placed, [stored[:-1]])


def test_plain_seal_any_flipped_byte_raises_corrupt() -> None:
    payload, table = write(sample_section(1, blocks=2, block_bytes=64))
    (placed,) = table.placed_frames()
    seal = PLAIN.of_pack(table)
    for offset in range(placed.frame.stored_length):
        damaged = bytearray(payload[: placed.frame.stored_length])
        damaged[offset] ^= 1
        with pytest.raises(CorruptPackError, match="frame"):
            seal.open(placed, [memoryview(damaged)])


@pytest.mark.parametrize("tenant", ["default", "anna", "Zoë & co."])
def test_pack_format_matches_documentation(tenant: str) -> None:
    """Decode as docs/format.md describes, with struct and the two hash functions only."""

    parts = [
        sample_section(1, blocks=3, block_bytes=5000),
        sample_section(2, group=7, blocks=2, block_bytes=9, hash_bytes=8),
    ]
    writer = PackWriter(NAMESPACE, RawCodec(), parts, tenant=tenant)
    payload = payload_of(writer)
    pack = payload + writer.table.encode()
    stored_tenant = b"" if tenant == "default" else tenant.encode()
    digest_key = hashlib.blake2b(stored_tenant).digest() if stored_tenant else b""

    length, checksum, magic = struct.unpack("<QQ8s", pack[-24:])
    assert magic == b"PKVPACK1"
    body = pack[-24 - length : -24]
    assert xxhash.xxh3_64_intdigest(body) == checksum
    (
        version,
        key_length,
        frames,
        blocks,
        codec_length,
        tenant_length,
        payload_length,
        raw,
        namespace,
        name,
        data_key,
        salt,
    ) = struct.unpack_from("<HHIIHHQQ16s16s8s16s", body)
    assert (data_key, salt) == (bytes(8), bytes(16))
    assert (version, key_length, frames, blocks, codec_length) == (1, 0, 2, 5, 3)
    assert (payload_length, raw, namespace) == (
        len(payload),
        3 * 5000 + 2 * 9,
        NAMESPACE,
    )
    assert body[88:91] == b"raw"
    assert body[91 : 91 + tenant_length] == stored_tenant
    rows_at = 91 + tenant_length
    rows = [
        struct.unpack_from("<IIIIQQ16s", body, rows_at + 48 * index)
        for index in range(2)
    ]
    lengths = struct.unpack_from("<5H", body, rows_at + 96)
    keys = body[rows_at + 96 + 10 :]
    assert lengths == (36, 36, 36, 12, 12)
    assert keys == b"".join([*parts[0].keys, *parts[1].keys])
    assert (
        name
        == hashlib.blake2b(
            namespace + b"raw\0" + struct.pack("<H5H", 0, *lengths) + keys,
            digest_size=16,
            key=digest_key,
        ).digest()
    )

    (seed_of_namespace,) = struct.unpack_from("<Q", namespace)
    at = 0
    for part, row in zip(parts, rows, strict=True):
        group, count, block_bytes, depth, offset, stored, tag = row
        assert (group, count, block_bytes, depth) == (
            part.group,
            len(part.keys),
            part.block_bytes,
            0,
        )
        joined = b"".join(part.keys)
        assert keys[at : at + len(joined)] == joined
        at += len(joined)
        seed = xxhash.xxh3_64_intdigest(joined, seed=seed_of_namespace)
        stored_bytes = pack[offset : offset + stored]
        assert xxhash.xxh3_128_digest(stored_bytes, seed=seed) == tag
        assert stored_bytes == b"".join(raw_blocks(part).values())
    assert [row[4] for row in rows] == [0, 16384]
    assert len(payload) == 20480


@pytest.mark.parametrize("codec", [RawCodec(), ZstdCodec(), PlanesCodec()])
def test_pack_writer_frames_encoded_in_threads_give_same_pack(codec: Codec) -> None:
    """Frames keep their order, and pieces that are still referenced keep their content."""
    blocks = np.random.default_rng(5).integers(0, 8, (40, 256 << 10), dtype=np.uint8)
    names = [number.to_bytes(8, "little") + bytes(4) for number in range(40)]
    sections = [
        Section(0, 256 << 10, names, StagedBlocks([blocks[:17], blocks[17:]]), 0)
    ]
    threads = StoreThreads(3)
    plain, threaded = (
        PackWriter(NAMESPACE, codec, sections, start) for start in (None, threads.start)
    )
    expected, pieces = b"".join(plain.stream()), list(threaded.stream())
    assert b"".join(pieces) == expected
    assert threaded.table == plain.table
    assert b"".join(threaded.stream()) == expected, "a commit that is retried"
    threads.close()


def test_pack_writer_end_reads_waits_for_frames_being_encoded() -> None:
    """After ``end_reads``, no thread reads the blocks, even if frames were being encoded."""
    inside, release = threading.Semaphore(0), threading.Event()
    reading: list[int] = []

    class Slow(StagedBlocks):
        def gather(self, start: int, stop: int) -> ByteArray:
            if start:
                reading.append(start)
                inside.release()
                assert release.wait(30)
                reading.remove(start)
            return super().gather(start, stop)

    names = [number.to_bytes(8, "little") + bytes(4) for number in range(12)]
    source = Slow([np.zeros((12, 1 << 20), np.uint8)])
    threads = StoreThreads(2)
    writer = PackWriter(
        NAMESPACE, ZstdCodec(), [Section(0, 1 << 20, names, source, 0)], threads.start
    )
    stream = writer.stream()
    next(stream)
    inside.acquire(timeout=30)
    assert reading
    threading.Timer(0.02, release.set).start()
    writer.end_reads()
    assert not reading
    assert not writer.written
    threads.close()


def test_pack_writer_restart_resets_written() -> None:
    writer = PackWriter(NAMESPACE, RawCodec(), [sample_section(1, blocks=3)])
    list(writer.stream())
    assert writer.written
    writer.restart()
    assert not writer.written
    list(writer.stream())
    assert writer.written
