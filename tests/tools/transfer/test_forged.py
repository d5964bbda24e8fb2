"""Forged files of ``persistkv export``: their checksums match, but no export writes such
content."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import xxhash

from persistkv.storage.format.pack import (
    Frame,
    PackedKeys,
    PackTable,
    frame_checksum,
    frame_seed,
    pack_frames,
    pack_id,
)
from persistkv.storage.identity import Identity
from persistkv_tools.transfer.archive import (
    ArchiveReader,
    ArchiveWriter,
    CorruptArchiveError,
)
from persistkv_tools.transfer.import_ import verify_archive
from tests.tools.transfers import ignore

NESTED = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def verify(path: Path) -> None:
    with closing(ArchiveReader(path)) as archive:
        verify_archive(archive, ignore)


def record(kind: bytes, body: bytes) -> bytes:
    return (
        struct.pack("<4sIQQ", kind, 0, len(body), xxhash.xxh3_64_intdigest(body)) + body
    )


@pytest.mark.parametrize("block_bytes", [(256 << 20) + 1, (1 << 32) - 1])
def test_verify_archive_block_of_gigabytes_is_refused_without_memory(
    tmp_path: Path, block_bytes: int
) -> None:
    """A frame of a few bytes can decode to gigabytes of zeros."""
    identity = Identity.of({"weights": "w"})
    keys = PackedKeys.of([bytes(36)])
    stored = bytes(4096)
    checksum = frame_checksum([stored], frame_seed(identity.digest, bytes(36)))
    frame = Frame(0, 1, block_bytes, 0, 0, len(stored), checksum)
    name = pack_id(identity.digest, keys, "zstd:1")
    table = PackTable(
        identity.digest,
        name,
        "zstd:1",
        len(stored),
        block_bytes,
        pack_frames([frame]),
        keys,
    )
    path = tmp_path / "forged.pkv"
    with ArchiveWriter(path) as writer:
        writer.namespace(identity)
        writer.pack(table, stored)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptArchiveError, match="block length"):
            verify(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_verify_archive_deeply_nested_identity_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "forged.pkv"
    nested: Any = SimpleNamespace(encode=lambda: NESTED)
    with ArchiveWriter(path) as writer:
        writer.namespace(cast(Identity, nested))
    with pytest.raises(CorruptArchiveError, match="nested"):
        verify(path)


@pytest.mark.parametrize("kind", [b"HEAD", b"END "])
def test_verify_archive_deeply_nested_record_is_refused(
    tmp_path: Path, kind: bytes
) -> None:
    path = tmp_path / "forged.pkv"
    head = record(b"HEAD", b'{"version": 1, "created": 0.0, "writer": ""}')
    begin = b"" if kind == b"HEAD" else head
    path.write_bytes(b"PKVARCH1" + begin + record(kind, NESTED))
    with pytest.raises(CorruptArchiveError, match="at byte"):
        verify(path)
