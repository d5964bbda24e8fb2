"""Free space returns to the file system as holes in the segment files. The content stays; holes are
filled again."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from persistkv.config import PAGE_BYTES, StoreUrl
from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend
from tests import forked
from tests.backends.lmdb.consistency import find_faults

# 3 MiB: what a writer has reserved for its next commit, and metadata of the file system
SLACK = 3 << 20


@pytest.fixture
def url(tmp_path: Path) -> StoreUrl:
    return StoreUrl.parse(f"lmdb://{tmp_path}/store?capacity=256MiB&placement=extents")


@pytest.fixture
def backend(url: StoreUrl) -> Iterator[LmdbBackend]:
    with closing(LmdbBackend.open(url)) as backend:
        yield backend


@pytest.fixture
def namespace(backend: LmdbBackend) -> bytes:
    return backend.open_namespace(Identity.of({"model": "holes"})).id


def fill(
    backend: LmdbBackend,
    namespace: bytes,
    seeds: Sequence[int],
) -> list[PackWriter]:
    packs = [
        sample_pack(namespace, seed, blocks=1 + seed % 5, block_bytes=400_001)
        for seed in seeds
    ]
    for pack, seed in zip(packs, seeds, strict=True):
        backend.commit(
            namespace,
            CommitBatch(
                [pack], [sample_manifest(f"r{seed}", seed, packs=[pack.pack_id])]
            ),
        )
    return packs


def stored(packs: Iterable[PackWriter]) -> int:
    return sum(pack.table.payload_length for pack in packs)


def segments_on_disk(backend: LmdbBackend) -> int:
    return sum(backend.environment.files.lengths().values())


def segment_lengths(backend: LmdbBackend) -> int:
    return sum(
        file.stat().st_size
        for file in (backend.environment.path / "segments").iterdir()
    )


def check(backend: LmdbBackend, namespace: bytes, packs: Iterable[PackWriter]) -> None:
    assert find_faults(backend) == []
    check_totals(backend)
    assert set(tables(backend, namespace)) == {pack.pack_id for pack in packs}
    for pack in packs:
        assert read_pack(backend, namespace, pack.table) == payload_of(pack)


@pytest.mark.parametrize("seed", range(4))
def test_release_free_after_deletions_returns_space_and_keeps_content(
    backend: LmdbBackend,
    namespace: bytes,
    seed: int,
) -> None:
    packs = fill(backend, namespace, range(60))
    kept = random.Random(seed).sample(packs, 20)
    gone = [pack.pack_id for pack in packs if pack not in kept]
    backend.commit(namespace, CommitBatch(deletions=gone))
    before = backend.disk_bytes()
    assert backend.release_free() == before - backend.disk_bytes() > 0
    check(backend, namespace, kept)
    assert backend.free_space().payload_bytes == 0
    assert segments_on_disk(backend) <= stored(kept) + SLACK
    again = fill(backend, namespace, range(100, 130))
    check(backend, namespace, [*kept, *again])
    assert segment_lengths(backend) <= stored(packs) + (32 << 20), (
        "holes are filled before files grow"
    )


def test_release_free_twice_or_in_empty_store_changes_nothing(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    backend.release_free()
    packs = fill(backend, namespace, range(5))
    backend.release_free()
    before = segments_on_disk(backend)
    backend.release_free()
    assert segments_on_disk(backend) == before
    check(backend, namespace, packs)


def test_release_free_read_only_store_raises(
    backend: LmdbBackend,
    url: StoreUrl,
    namespace: bytes,
) -> None:
    fill(backend, namespace, range(1))
    with (
        closing(LmdbBackend.open(url, read_only=True)) as reader,
        pytest.raises(StoreError),
    ):
        reader.release_free()


@pytest.fixture
def scattered(backend: LmdbBackend, namespace: bytes) -> list[PackWriter]:
    """Small packs with free extents between them, more than one transaction turns into holes."""
    packs = [
        sample_pack(namespace, seed, blocks=1, block_bytes=4096) for seed in range(1200)
    ]
    for start in range(0, len(packs), 100):
        backend.commit(namespace, CommitBatch(packs[start : start + 100]))
    backend.commit(
        namespace, CommitBatch(deletions=[pack.pack_id for pack in packs[::2]])
    )
    assert backend.free_space().pieces > 500
    return packs[1::2]


def test_release_free_scattered_small_packs_returns_space(
    backend: LmdbBackend,
    namespace: bytes,
    scattered: list[PackWriter],
) -> None:
    backend.release_free()
    assert backend.free_space().payload_bytes == 0
    assert segments_on_disk(backend) <= stored(scattered) + SLACK
    check(backend, namespace, scattered)


def test_set_policy_lower_capacity_evicts_and_frees_disk_before_it_returns(
    backend: LmdbBackend,
    namespace: bytes,
    url: StoreUrl,
) -> None:
    """The newest packs are scattered over the files, because they took the space of evicted
    ones."""
    with closing(LmdbBackend.open(url)) as other:
        space = other.open_namespace(Identity.of({"model": "holes"})).id
        packs = fill(other, space, range(120))
        other.commit(
            space, CommitBatch(deletions=[pack.pack_id for pack in packs[::3]])
        )
        packs = [pack for number, pack in enumerate(packs) if number % 3] + fill(
            other, space, range(200, 240)
        )
        capacity = 16 << 20
        backend.set_policy(replace(backend.policy(), capacity=capacity))
        assert backend.stats().disk_bytes <= capacity
        left = set(tables(backend, namespace))
        assert left == {pack.pack_id for pack in packs[len(packs) - len(left) :]}, (
            "the last used ones stay"
        )
        assert len(left) * 1_200_000 > capacity // 2
        packs = packs[len(packs) - len(left) :] + fill(other, space, range(300, 302))
        assert other.stats().disk_bytes <= capacity
        held = set(tables(other, space))
        check(other, space, [pack for pack in packs if pack.pack_id in held])
        backend.set_policy(replace(backend.policy(), capacity=128 << 20))
        more = fill(other, space, range(400, 460))
        held = set(tables(other, space))
        assert {pack.pack_id for pack in more} < held
        check(other, space, [pack for pack in packs + more if pack.pack_id in held])


def test_set_policy_lower_capacity_of_scattered_free_space_frees_disk_and_refuses_no_commit(
    backend: LmdbBackend,
    namespace: bytes,
    scattered: list[PackWriter],
) -> None:
    backend.set_policy(replace(backend.policy(), capacity=8 << 20))
    assert backend.stats().disk_bytes <= 8 << 20
    more = [
        sample_pack(namespace, seed, blocks=1, block_bytes=4096)
        for seed in range(2000, 2100)
    ]
    for pack in more:
        backend.commit(namespace, CommitBatch([pack]))
        assert backend.stats().disk_bytes <= 8 << 20
    held = set(tables(backend, namespace))
    assert {pack.pack_id for pack in more} <= held
    check(
        backend,
        namespace,
        [pack for pack in [*scattered, *more] if pack.pack_id in held],
    )


def test_commit_aborted_after_it_filled_a_hole_gives_the_space_back(
    backend: LmdbBackend,
    namespace: bytes,
) -> None:
    packs = fill(backend, namespace, range(40))
    backend.commit(
        namespace, CommitBatch(deletions=[pack.pack_id for pack in packs[:20]])
    )
    backend.release_free()
    before = segments_on_disk(backend)
    with (
        suppress(ZeroDivisionError),
        backend.environment.transaction(write=True) as transaction,
    ):
        backend.environment.prepare_payloads(transaction).allocate(
            (8 << 20) // PAGE_BYTES
        )
        raise ZeroDivisionError
    assert segments_on_disk(backend) > before + (7 << 20)
    backend.commit(namespace, CommitBatch(touches=[packs[20].pack_id]))
    assert segments_on_disk(backend) <= before + SLACK
    check(backend, namespace, packs[20:])


def test_commit_hole_cannot_be_filled_evicts_and_keeps_hole(
    backend: LmdbBackend,
    namespace: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packs = fill(backend, namespace, range(40))
    backend.commit(
        namespace, CommitBatch(deletions=[pack.pack_id for pack in packs[:20]])
    )
    backend.release_free()
    before = segments_on_disk(backend)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        (pack,) = fill(backend, namespace, [100])
    held = set(tables(backend, namespace))
    assert pack.pack_id in held
    assert segments_on_disk(backend) <= before + SLACK
    kept = [other for other in [*packs[20:], pack] if other.pack_id in held]
    assert 1 < len(kept) < 21
    check(backend, namespace, kept)


def test_release_free_file_system_without_holes_keeps_content_and_space(
    backend: LmdbBackend,
    namespace: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("persistkv_lmdb.payloads.segments.punch_hole", refuse)
    packs = fill(backend, namespace, range(20))
    backend.commit(
        namespace, CommitBatch(deletions=[pack.pack_id for pack in packs[:10]])
    )
    backend.release_free()
    assert backend.free_space().payload_bytes > 0
    backend.set_policy(replace(backend.policy(), capacity=8 << 20))
    again = fill(backend, namespace, range(50, 53))
    held = set(tables(backend, namespace))
    assert {pack.pack_id for pack in again} <= held
    assert backend.stats().stored_bytes <= 8 << 20
    assert find_faults(backend) == []
    for pack in [*packs, *again]:
        assert read_pack(backend, namespace, pack.table) == (
            payload_of(pack) if pack.pack_id in held else None
        )


RELEASE = """
import os, signal, sys
from persistkv.storage import open_backend
from persistkv_lmdb.payloads import segments
backend, left = open_backend(sys.argv[1]), [int(sys.argv[2])]
real = segments.punch_hole
def punch(*arguments):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments)
segments.punch_hole = punch
backend.release_free()
"""


# the first one only probes the file system
@pytest.mark.parametrize("punched", [1, 2, 5])
def test_release_free_killed_while_it_punches_next_commit_punches_the_rest(
    backend: LmdbBackend,
    namespace: bytes,
    url: StoreUrl,
    punched: int,
) -> None:
    """LMDB records the holes already, so the space is not counted any more."""
    packs = fill(backend, namespace, range(40))
    backend.commit(
        namespace, CommitBatch(deletions=[pack.pack_id for pack in packs[::2]])
    )
    before = segments_on_disk(backend)
    command = [sys.executable, "-c", RELEASE, f"lmdb://{url.location}", str(punched)]
    assert forked.run(command).returncode == -signal.SIGKILL
    assert segments_on_disk(backend) > before // 2
    backend.commit(namespace, CommitBatch(touches=[packs[1].pack_id]))
    assert segments_on_disk(backend) <= stored(packs[1::2]) + SLACK
    check(backend, namespace, packs[1::2])
