"""A full store: the catalogue grows at the expense of the payload, and little space is unused."""

from __future__ import annotations

import gc
import shutil
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import StoreFullError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import tables
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend
from persistkv_lmdb.environment import Environment
from tests.backends.lmdb.conftest import Opener

MIB = 1 << 20


@pytest.fixture
def placement() -> str:
    return "extents"


@pytest.fixture
def second_attempts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record each commit that needs a second attempt because space was lacking."""
    found: list[bool] = []
    commit_nothing = Environment.commit_nothing

    def counted(self: Environment) -> int:
        found.append(True)
        return commit_nothing(self)

    monkeypatch.setattr(Environment, "commit_nothing", counted)
    return found


def commit_many(
    backend: LmdbBackend,
    namespace: bytes,
    count: int,
    packs_per_commit: int = 1,
    *,
    blocks: int = 4,
    block_bytes: int = 4096,
) -> int:
    """Commit ``count`` packs of one size. Return the maximum size on disk, in bytes."""
    most = 0
    for first in range(0, count, packs_per_commit):
        packs = [
            sample_pack(namespace, seed, blocks=blocks, block_bytes=block_bytes)
            for seed in range(first, first + packs_per_commit)
        ]
        backend.commit(namespace, CommitBatch(packs))
        most = max(most, backend.stats().disk_bytes)
    return most


def test_commit_full_store_uses_most_of_capacity_for_payload(
    open_store: Opener,
    identity: Identity,
    second_attempts: list[bool],
) -> None:
    backend = open_store("?capacity=64MiB")
    namespace = backend.open_namespace(identity).id
    assert (
        commit_many(backend, namespace, 500, blocks=4, block_bytes=64 << 10) <= 64 * MIB
    )
    # packs of 256 KiB, each with a trailer in a page of 4 KiB
    assert backend.stats().stored_bytes > 0.93 * 64 * MIB
    assert not second_attempts, "a commit of the usual size needed a second attempt"


def test_commit_large_batches_of_small_packs_below_capacity_evict_nothing(
    open_store: Opener,
    identity: Identity,
    second_attempts: list[bool],
) -> None:
    """Each batch rewrites more catalogue pages than are left before the driver detects that the
    catalogue is full."""
    backend = open_store("?capacity=1GiB")
    namespace = backend.open_namespace(identity).id
    packs_per_commit, batches = 800, 6
    for first in range(0, batches * packs_per_commit, packs_per_commit):
        packs = [
            sample_pack(namespace, seed, blocks=20, block_bytes=512)
            for seed in range(first, first + packs_per_commit)
        ]
        assert not backend.commit(namespace, CommitBatch(packs)).evicted
    assert backend.stats().packs == batches * packs_per_commit
    assert second_attempts == []


@pytest.fixture
def gc_disabled() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("blocks", "stored"), [(128, True), (512, False)])
def test_commit_retried_or_rejected_releases_references_to_pack(
    open_store: Opener,
    identity: Identity,
    second_attempts: list[bool],
    gc_disabled: None,
    blocks: int,
    stored: bool,
) -> None:
    """The commit drops its references to the rows when it ends, without a run of the garbage
    collector."""
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    # more than one transaction evicts
    commit_many(backend, namespace, 1500, 50, blocks=1, block_bytes=8 << 10)
    second_attempts.clear()
    pack = sample_pack(namespace, 1000, blocks=blocks, block_bytes=64 << 10)
    pack_id, alive = pack.pack_id, weakref.ref(pack)
    with suppress(StoreFullError):
        backend.commit(namespace, CommitBatch([pack]))
    del pack
    assert second_attempts or not stored
    assert alive() is None
    assert (pack_id in tables(backend, namespace)) is stored


@pytest.mark.slow
def test_commit_small_blocks_catalogue_and_payload_fit_capacity(
    open_store: Opener,
    identity: Identity,
) -> None:
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    assert commit_many(backend, namespace, 3000, 10, blocks=2) <= 16 * MIB
    # packs of 8 KiB take 12 KiB, with their trailers
    assert backend.stats().stored_bytes > 0.5 * 16 * MIB


@pytest.mark.slow
def test_commit_blocks_become_small_catalogue_grows_within_capacity(
    open_store: Opener,
    identity: Identity,
) -> None:
    backend = open_store("?capacity=16MiB")
    namespace = backend.open_namespace(identity).id
    commit_many(backend, namespace, 8, blocks=64, block_bytes=64 << 10)
    assert commit_many(backend, namespace, 3000, 10, blocks=2) <= 16 * MIB
    assert backend.stats().stored_bytes > 0.4 * 16 * MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(directory)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


def test_commit_that_the_disk_does_not_hold_raises_naming_the_disk(
    small_disk: Path,
    identity: Identity,
) -> None:
    """Not the capacity, which would hold it."""
    url = StoreUrl.parse(f"lmdb://{small_disk}/kv?capacity=1GiB")
    with closing(LmdbBackend.open(url)) as backend:
        namespace = backend.open_namespace(identity).id
        large = sample_pack(namespace, 2, blocks=64, block_bytes=1 << 17)
        with pytest.raises(StoreFullError, match="do not fit the disk, which has"):
            backend.commit(namespace, CommitBatch([large]))


@pytest.fixture
def disk_with_reserve(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB, of which a fifth is reserved for root."""
    directory = tmp_path / "reserving"
    directory.mkdir()
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    commands = (
        ["mkfs.ext4", "-q", "-m", "20", str(image)],
        ["mount", "-o", "loop", str(image), str(directory)],
    )
    for command in commands:
        if not shutil.which(command[0]):
            pytest.skip(f"no {command[0]} here")
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting an ext4 needs privileges")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.mark.parametrize(("block_bytes", "stored"), [(64 << 10, 160), (512, 600)])
def test_commit_on_disk_whose_reserve_is_used_evicts_only_what_it_needs(
    disk_with_reserve: Path,
    identity: Identity,
    block_bytes: int,
    stored: int,
) -> None:
    """The space that segments free would become part of the reserve, and of no use to the store."""
    url = StoreUrl.parse(f"lmdb://{disk_with_reserve}/kv?capacity=256MiB")
    with closing(LmdbBackend.open(url)) as backend:
        namespace = backend.open_namespace(identity).id
        commit_many(backend, namespace, stored, 10, blocks=2, block_bytes=block_bytes)
        before = backend.stats()
        assert before.packs == stored
        fill(disk_with_reserve / "other")
        refused = 0
        for seed in range(10_000, 10_020):
            pack = sample_pack(namespace, seed, blocks=2, block_bytes=block_bytes)
            try:
                backend.commit(namespace, CommitBatch([pack]))
            except StoreFullError:
                refused += 1
        after = backend.stats()
        # the catalogue of small packs cannot grow, and evicts for its free pages
        assert refused <= 2
        assert after.packs > 0.3 * stored
        assert after.disk_bytes >= before.disk_bytes
        if block_bytes == 64 << 10:
            assert refused == 0
            assert after.packs >= stored


def fill(path: Path) -> None:
    """Write a file until its file system is full."""
    with suppress(OSError), path.open("wb", 0) as file:
        while True:
            file.write(bytes(4096))
