"""Compaction returns free space to the disk and leaves the content unchanged."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import stdout_of
from tests.backends.lmdb.consistency import find_faults


@pytest.fixture
def url(tmp_path: Path) -> StoreUrl:
    return StoreUrl.parse(f"lmdb://{tmp_path}/store?capacity=256MiB&placement=extents")


@pytest.fixture
def backend(url: StoreUrl) -> Iterator[LmdbBackend]:
    with closing(LmdbBackend.open(url)) as backend:
        yield backend


@pytest.fixture
def namespace(backend: LmdbBackend) -> bytes:
    return backend.open_namespace(Identity.of({"model": "compacting"})).id


def fill(backend: LmdbBackend, namespace: bytes, seeds: Sequence[int]) -> list[PackWriter]:
    packs = [sample_pack(namespace, seed, blocks=1 + seed % 5, block_bytes=400_001) for seed in seeds]
    for pack, seed in zip(packs, seeds, strict=True):
        backend.commit(namespace, CommitBatch([pack], [sample_manifest(f"r{seed}", seed, packs=[pack.pack_id])]))
    return packs


def check(backend: LmdbBackend, namespace: bytes, packs: Iterable[PackWriter]) -> None:
    assert find_faults(backend) == []
    check_totals(backend)
    assert set(tables(backend, namespace)) == {pack.pack_id for pack in packs}
    for pack in packs:
        assert read_pack(backend, namespace, pack.table) == payload_of(pack)


@pytest.mark.parametrize("seed", range(4))
def test_compact_after_deletions_releases_space_and_keeps_content(
    backend: LmdbBackend, namespace: bytes, seed: int
) -> None:
    packs = fill(backend, namespace, range(60))
    kept = random.Random(seed).sample(packs, 20)
    gone = [pack.pack_id for pack in packs if pack not in kept]
    backend.commit(namespace, CommitBatch(deletions=gone))
    before = backend.stats()
    steps = list(backend.compact())
    check(backend, namespace, kept)
    after = backend.stats()
    payload = sum(len(payload_of(pack)) for pack in kept)
    assert steps[-1].moved_bytes > 0
    assert after.disk_bytes < before.disk_bytes - payload
    assert backend.free_space().payload_bytes <= max(len(payload_of(pack)) for pack in kept)
    again = fill(backend, namespace, range(100, 110))
    check(backend, namespace, [*kept, *again])


def test_compact_other_handle_commits_between_steps_keeps_content(
    backend: LmdbBackend, namespace: bytes, url: StoreUrl
) -> None:
    packs = fill(backend, namespace, range(40))
    backend.commit(namespace, CommitBatch(deletions=[pack.pack_id for pack in packs[::2]]))
    kept = packs[1::2]
    steps = backend.compact()
    next(steps)
    with closing(LmdbBackend.open(url)) as other:
        kept += fill(other, namespace, range(200, 205))
        other.commit(namespace, CommitBatch(deletions=[kept.pop(0).pack_id]))
    list(steps)
    check(backend, namespace, kept)


def test_compact_large_store_of_small_packs_releases_space(tmp_path: Path) -> None:
    """The catalogue of the store has space for the rows of a few packs at a time."""
    with closing(LmdbBackend.open(StoreUrl.parse(f"lmdb://{tmp_path}/large?capacity=1GiB"))) as backend:
        namespace = backend.open_namespace(Identity.of({"model": "compacting"})).id
        packs = [sample_pack(namespace, seed, blocks=1, block_bytes=4096) for seed in range(2200)]
        for start in range(0, len(packs), 100):
            some = packs[start : start + 100]
            backend.commit(namespace, CommitBatch(some))
            backend.commit(namespace, CommitBatch(deletions=[pack.pack_id for pack in some[::2]]))
        before = backend.free_space().payload_bytes
        list(backend.compact())
        assert backend.free_space().payload_bytes < before // 10
        check(backend, namespace, packs[1::2])


def test_compact_without_free_space_keeps_content(backend: LmdbBackend, namespace: bytes) -> None:
    packs = fill(backend, namespace, range(5))
    list(backend.compact())
    list(backend.compact())
    check(backend, namespace, packs)


def test_compact_read_only_store_raises(backend: LmdbBackend, url: StoreUrl) -> None:
    backend.open_namespace(Identity.of({"model": "compacting"}))
    with closing(LmdbBackend.open(url, read_only=True)) as reader, pytest.raises(StoreError):
        reader.compact()


COMPACT = """
import sys
from persistkv_lmdb import commit
from persistkv.storage import open_backend
commit.MOVED_BYTES = 1 << 20
for step in open_backend(sys.argv[1]).compact():
    print(step.moved_bytes, flush=True)
"""


@pytest.mark.slow
def test_compact_after_killed_compactions_keeps_content_and_completes(url: StoreUrl) -> None:
    draw = random.Random(7)
    seeds = iter(range(10_000))
    with closing(LmdbBackend.open(url)) as backend:
        namespace = backend.open_namespace(Identity.of({"model": "compacting"})).id
        kept = fill(backend, namespace, [next(seeds) for _ in range(50)])
    for _ in range(10):
        with closing(LmdbBackend.open(url)) as backend:
            gone = draw.sample(kept, 20)
            backend.commit(namespace, CommitBatch(deletions=[pack.pack_id for pack in gone]))
            kept = [pack for pack in kept if pack not in gone]
            kept += fill(backend, namespace, [next(seeds) for _ in range(20)])
        command = [sys.executable, "-c", COMPACT, f"lmdb://{url.location}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            for _ in range(draw.randint(1, 8)):
                stdout_of(process).readline()
            time.sleep(draw.uniform(0.0, 0.01))
            process.kill()
            stdout_of(process).read()
        with closing(LmdbBackend.open(url)) as backend:
            check(backend, namespace, kept)
    with closing(LmdbBackend.open(url)) as backend:
        list(backend.compact())
        check(backend, namespace, kept)
        assert backend.free_space().payload_bytes <= max(len(payload_of(pack)) for pack in kept)
