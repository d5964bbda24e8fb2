"""Packs and manifests for tests, generated from a seed. The same seed generates the same keys and
bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from persistkv.base import Priority, make_offload_key
from persistkv.memory.rows import ByteArray, StagedBlocks
from persistkv.storage.backend import ManifestWrite
from persistkv.storage.format.codec import Codec, RawCodec
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackedKeys, PackTable
from persistkv.storage.format.pack_writer import NewPack, PackWriter, Section
from persistkv.storage.format.seal import PLAIN, Seal
from persistkv.tenants import DEFAULT_TENANT


def sample_keys(
    seed: int,
    count: int,
    *,
    group: int = 0,
    hash_bytes: int = 32,
) -> list[bytes]:
    """Return ``count`` block keys of one group; each contains ``hash_bytes`` random bytes in place
    of a hash."""
    rng = np.random.default_rng(seed)
    return [make_offload_key(rng.bytes(hash_bytes), group) for _ in range(count)]


def sample_blocks(
    seed: int,
    count: int,
    block_bytes: int,
) -> ByteArray:
    """Return random bytes, shape (count, block_bytes). Half of each block repeats one byte, so that
    it compresses."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    half = block_bytes // 2
    first_bytes = blocks[:, :1]
    blocks[:, half:] = first_bytes
    return blocks


def sample_section(
    seed: int,
    *,
    group: int = 0,
    blocks: int = 4,
    block_bytes: int = 4096,
    hash_bytes: int = 32,
    content: int | None = None,
    depth: int = 0,
) -> Section:
    """Return consecutive blocks of one group, for a pack.

    :param content: seed of the blocks' bytes; None: the seed of the keys.
    :param depth: number of blocks before the first one in its request.
    """
    content_seed = seed if content is None else content
    rows = sample_blocks(content_seed, blocks, block_bytes)
    keys = sample_keys(seed, blocks, group=group, hash_bytes=hash_bytes)
    return Section(group, block_bytes, keys, StagedBlocks([rows]), depth)


def sample_pack(
    namespace: bytes,
    seed: int,
    *,
    codec: Codec | None = None,
    blocks: int = 4,
    block_bytes: int = 4096,
    content: int | None = None,
    depth: int = 0,
    seal: Seal = PLAIN,
    tenant: str = DEFAULT_TENANT,
) -> PackWriter:
    """Return a pack of consecutive blocks of group 0; see ``sample_section``. The default codec is
    ``raw``.

    :param seal: of the store (``Backend.seal``).
    """
    section = sample_section(
        seed, blocks=blocks, block_bytes=block_bytes, content=content, depth=depth
    )
    if codec is None:
        codec = RawCodec()
    return PackWriter(namespace, codec, [section], seal=seal, tenant=tenant)


def payload_of(pack: NewPack) -> bytes:
    """Return the payload of a pack: all bytes that ``NewPack.stream`` yields, joined; with opened
    frames if a key seals them."""
    if pack.seal.encrypts and isinstance(pack, PackWriter):
        # its own stream would seal it with a new key
        pack = PackWriter(pack.namespace, pack.codec, pack.sections)
    return b"".join(map(bytes, pack.stream()))


def open_payload(
    seal: Seal,
    table: PackTable,
    payload: memoryview,
) -> None:
    """Open all frames of a payload, in place.

    :raises CorruptPackError: one does not verify.
    """
    frame_seal = seal.of_pack(table)
    for placed in table.placed_frames():
        frame = placed.frame
        end = frame.offset + frame.stored_length
        stored = payload[frame.offset : end]
        frame_seal.open(placed, [stored])


def sample_manifest(
    manifest_id: str,
    seed: int = 0,
    *,
    blocks: int = 3,
    labels: dict[str, str] | None = None,
    packs: Sequence[bytes] = (),
    ordered: bool = True,
    restored_tokens: int = 0,
    ttl_s: float | None = None,
    priority: Priority = "normal",
    tenant: str = DEFAULT_TENANT,
) -> ManifestWrite:
    """Return a manifest of one group that names packs by id; other parameters as for
    ``RequestManifest``."""
    keys = PackedKeys.of(sample_keys(seed, blocks))
    manifest = RequestManifest(
        id=manifest_id,
        created=1_700_000_000.0 + seed,
        tokens=16 * blocks,
        group_blocks=(blocks,),
        raw_bytes=4096 * blocks,
        ordered=ordered,
        restored_tokens=restored_tokens,
        labels=labels or {},
        ttl_s=ttl_s,
        priority=priority,
        tenant=tenant,
    )
    return ManifestWrite(manifest, (keys,), packs)
