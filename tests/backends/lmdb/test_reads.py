"""Payload reads from segments, with direct I/O and through the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from persistkv.errors import ConfigurationError, CorruptStoreError, StoreError
from persistkv.storage.backend import CommitBatch, ReadSpan
from persistkv.storage.catalogue import TableRows
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import Opener

PAGE = 4096


@pytest.fixture
def placement() -> str:
    return "extents"


@pytest.fixture(params=["direct", "cached"])
def reads(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each read whether it bypasses the page cache."""
    found = []
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        found.append(bool(os.O_DIRECT & int(flags_of(fd), 8)))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return found


def flags_of(fd: int) -> str:
    with open(f"/proc/self/fdinfo/{fd}") as file:
        return next(line.split()[1] for line in file if line.startswith("flags"))


def drop_from_page_cache(path: Path) -> None:
    for file in (path / "segments").iterdir():
        fd = os.open(file, os.O_RDWR)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def stored(
    backend: LmdbBackend,
    identity: Identity,
    block_bytes: int,
) -> tuple[bytes, PackWriter, bytes]:
    namespace = backend.open_namespace(identity).id
    pack = sample_pack(namespace, 1, blocks=20, block_bytes=block_bytes)
    backend.commit(namespace, CommitBatch([pack]))
    return namespace, pack, payload_of(pack)


def read(
    backend: LmdbBackend,
    namespace: bytes,
    pack: PackWriter,
    buffers: list[memoryview],
    offset: int = 0,
) -> bool:
    return backend.read(namespace, [ReadSpan(pack.pack_id, offset, buffers)])[0]


@pytest.mark.parametrize("block_bytes", [PAGE, 3 * PAGE, 5000])
def test_read_any_buffer_alignment_returns_stored_bytes(
    open_store: Opener,
    identity: Identity,
    reads: str,
    block_bytes: int,
) -> None:
    backend = open_store(f"?capacity=16MiB&reads={reads}")
    namespace, pack, payload = stored(backend, identity, block_bytes)
    for offset, length in (
        (0, len(payload)),
        (PAGE, 2 * PAGE),
        (2 * PAGE, 100),
        (0, 5000),
    ):
        room = memoryview(mmap.mmap(-1, len(payload) + PAGE))
        for start in (0, 8):  # page-aligned and unaligned buffers
            buffers = [
                room[start : start + length // 2],
                room[start + length // 2 : start + length],
            ]
            assert read(backend, namespace, pack, buffers, offset)
            assert room[start : start + length] == payload[offset : offset + length]


def test_read_reads_option_selects_direct_io(
    open_store: Opener,
    path: Path,
    identity: Identity,
    reads: str,
    calls: list[bool],
) -> None:
    backend = open_store(f"?capacity=16MiB&reads={reads}")
    namespace, pack, payload = stored(backend, identity, PAGE)
    room = memoryview(mmap.mmap(-1, len(payload)))
    drop_from_page_cache(path)
    assert read(backend, namespace, pack, [room])
    if not any(calls) and reads == "direct":
        pytest.skip("the file system has no O_DIRECT")
    assert calls == [reads == "direct"]
    assert room == payload


def test_read_o_direct_unsupported_reads_through_page_cache(
    open_store: Opener,
    path: Path,
    identity: Identity,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[bool],
) -> None:
    real, asked = os.open, []

    def refused(
        name: str,
        flags: int,
        mode: int = 0o777,
        *,
        dir_fd: int | None = None,
    ) -> int:
        if flags & os.O_DIRECT:
            asked.append(name)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refused)
    backend = open_store("?capacity=16MiB")
    namespace, pack, payload = stored(backend, identity, PAGE)
    room = memoryview(mmap.mmap(-1, len(payload)))
    drop_from_page_cache(path)
    assert read(backend, namespace, pack, [room])
    assert room == payload
    assert asked
    assert calls == [False]


def test_read_segment_ends_within_page_misses_beyond_its_end(
    open_store: Opener,
    path: Path,
    identity: Identity,
    reads: str,
) -> None:
    backend = open_store(f"?capacity=16MiB&reads={reads}")
    namespace, pack, payload = stored(backend, identity, PAGE)
    with open(path / "segments" / "00000000.seg", "r+b") as file:
        file.truncate(len(payload) - 100)
    room = memoryview(mmap.mmap(-1, len(payload)))
    assert not read(backend, namespace, pack, [room])
    assert read(backend, namespace, pack, [room[: 4 * PAGE]])
    assert room[: 4 * PAGE] == payload[: 4 * PAGE]


def test_open_invalid_reads_option_raises(open_store: Opener) -> None:
    with (
        pytest.raises(ConfigurationError, match="reads"),
        closing(open_store("?reads=fast")),
    ):
        pass


def test_read_each_handle_uses_its_own_reads_option(
    open_store: Opener,
    path: Path,
    identity: Identity,
    calls: list[bool],
) -> None:
    backend = open_store("?capacity=16MiB")
    namespace, pack, payload = stored(backend, identity, PAGE)
    cached = open_store("?reads=cached")
    room = memoryview(mmap.mmap(-1, len(payload)))
    drop_from_page_cache(path)
    assert read(backend, namespace, pack, [room])
    if not any(calls):
        pytest.skip("the file system has no O_DIRECT")
    assert read(cached, namespace, pack, [room])
    assert calls == [True, False]


def test_tables_damaged_row_raises_store_error(
    open_store: Opener,
    identity: Identity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = open_store("?capacity=16MiB")
    namespace, pack, _ = stored(backend, identity, PAGE)

    def damaged(*arguments: object) -> None:
        raise struct.error("a row of impossible length")

    with monkeypatch.context() as patch:
        patch.setattr(TableRows, "get", damaged)
        with pytest.raises(CorruptStoreError):
            backend.tables(namespace, [pack.pack_id])
        catalogue = backend.catalogue(namespace)
        for read_requests in (catalogue.manifest_keys, catalogue.uses):
            with pytest.raises(CorruptStoreError):
                read_requests(["request"])


@pytest.mark.parametrize("fault", ["cannot be opened", "is lost"])
def test_open_namespace_bad_segment_file_succeeds_and_defers_to_read(
    open_store: Opener,
    path: Path,
    identity: Identity,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    first = open_store("?capacity=16MiB")
    namespace, pack, payload = stored(first, identity, PAGE)
    first.close()
    real = os.open

    def refused(
        name: str,
        flags: int,
        mode: int = 0o777,
        *,
        dir_fd: int | None = None,
    ) -> int:
        if str(name).endswith(".seg"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(name, flags, mode, dir_fd=dir_fd)

    if fault == "is lost":
        (path / "segments" / "00000000.seg").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        backend = open_store()
        backend.open_namespace(identity)
    room = memoryview(mmap.mmap(-1, len(payload)))
    assert read(backend, namespace, pack, [room]) is (fault == "cannot be opened")


def test_read_failing_disk_raises(
    open_store: Opener,
    path: Path,
    identity: Identity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = open_store("?capacity=16MiB")
    namespace, pack, payload = stored(backend, identity, PAGE)

    def preadv(*arguments: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StoreError, match=os.strerror(errno.EIO)):
        read(backend, namespace, pack, [memoryview(mmap.mmap(-1, len(payload)))])
