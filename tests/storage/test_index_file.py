"""The index file: a store saves its index in it on close, for the next opening."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.records import StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.faulty import FaultyBackend
from persistkv.testing.samples import sample_pack
from tests.storage.conftest import IDENTITY
from tests.storage.stores import inject_faults

PACKS, BLOCKS = 17, 256  # enough keys for a file
KEY = "PERSISTKV_TEST_KEY"


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores with a sixteenth of the keys write files."""
    monkeypatch.setattr("persistkv.storage.store.index.SAVED_FROM", 1 << 12)


@pytest.fixture(params=["", f"&key_env={KEY}"], ids=["plain", "key"])
def url(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    monkeypatch.setenv(KEY, "k" * 32)
    return f"lmdb://{tmp_path}/store?capacity=256MiB{request.param}"


@pytest.fixture
def packs(url: str) -> list[PackWriter]:
    """Packs for the store, which is created."""
    backend = open_backend(url)
    seal = backend.seal
    backend.close()
    return [
        sample_pack(IDENTITY.digest, seed, blocks=BLOCKS, block_bytes=1, seal=seal)
        for seed in range(PACKS + 1)
    ]


@contextmanager
def opened(
    url: str,
    make_rows: Callable[..., Rows],
) -> Iterator[tuple[BlockingStore, list[bytes | None]]]:
    """Open a store; yield it and the cursors of its calls of ``changes``. None reads the whole
    catalogue."""
    backend = FaultyBackend.of(open_backend(url))
    cursors: list[bytes | None] = []
    backend.before("changes", lambda namespace, cursor: cursors.append(cursor))
    store = BlockingStore(
        backend,
        IDENTITY,
        make_rows(1, 4096, (((0, 1),),)),
        StoreOptions(events=True),
        url=url,
    )
    yield store, cursors
    store.close()


def commit(url: str, batch: CommitBatch) -> None:
    """Commit without a store, like a process that has no index, such as a tool."""
    for pack in batch.packs:
        pack.restart()
    backend = open_backend(url)
    backend.open_namespace(IDENTITY)
    backend.commit(IDENTITY.digest, batch)
    backend.close()


def index_file(url: str) -> Path:
    backend = open_backend(url, read_only=True)
    path = backend.index_file(IDENTITY.digest)
    backend.close()
    assert path is not None
    return path


def version(url: str) -> tuple[int, int, int]:
    """Return inode, modification time and size of the index file, which change when it is
    written."""
    stat = index_file(url).stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def holds(store: BlockingStore, packs: list[PackWriter]) -> list[bool]:
    """Return for each pack whether the index finds its keys; check that it finds all of them or
    none."""
    found = [{store.contains(key) for key in pack.keys.unpack()} for pack in packs]
    assert all(len(one) == 1 for one in found)
    return [one.pop() for one in found]


def fill(url: str, packs: list[PackWriter], make_rows: Callable[..., Rows]) -> None:
    """Make a store of all packs except the last one, and its index file."""
    commit(url, CommitBatch(packs[:PACKS]))
    with opened(url, make_rows):
        pass
    assert index_file(url).stat().st_mode & 0o777 == 0o600


def test_index_file_unchanged_store_opens_without_catalogue_scan(
    url: str,
    packs: list[PackWriter],
    make_rows: Callable[..., Rows],
) -> None:
    fill(url, packs, make_rows)
    before = version(url)
    with opened(url, make_rows) as (store, cursors):
        assert None not in cursors
        assert holds(store, packs) == [True] * PACKS + [False]
        assert len(store.index) == PACKS * BLOCKS
        report = store.take_report()
        assert (report.stored, report.removed, report.lost) == ([], [], False)
        assert store.read(packs[3].keys.unpack()[:1], [0]) == []
    assert version(url) == before, "nothing has changed, so it is not written again"


def test_index_file_changes_after_writing_are_applied(
    url: str,
    packs: list[PackWriter],
    make_rows: Callable[..., Rows],
) -> None:
    fill(url, packs, make_rows)
    commit(
        url, CommitBatch(packs[PACKS:], deletions=[packs[0].pack_id, packs[5].pack_id])
    )
    for _ in range(2):  # the second time from the file that the first one writes
        with opened(url, make_rows) as (store, cursors):
            assert None not in cursors
            assert holds(store, packs) == [
                number not in (0, 5) for number in range(PACKS + 1)
            ]
            assert len(store.index) == (PACKS - 1) * BLOCKS


def test_index_file_of_recreated_store_is_deleted(
    url: str,
    packs: list[PackWriter],
    make_rows: Callable[..., Rows],
) -> None:
    """Otherwise its position in the log of changes could become valid again, in a store restored
    from a copy."""
    fill(url, packs, make_rows)
    path = index_file(url)
    saved = path.read_bytes()
    for name in ("data.mdb", "lock.mdb", "guard"):
        (path.parent / name).unlink()
    with opened(url, make_rows) as (store, _):
        assert holds(store, packs) == [False] * (PACKS + 1)
        assert not path.exists()
    commit(url, CommitBatch(packs[:PACKS]))
    path.write_bytes(saved)
    with opened(url, make_rows) as (store, _):
        assert holds(store, packs) == [True] * PACKS + [False]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


def damage_file(path: Path, damage: str, saved: bytes) -> None:
    """Put something else in the place of an index file with the content ``saved``."""
    if damage == "link":
        (path.parent / "other").write_bytes(saved)
        path.symlink_to(path.parent / "other")
    elif damage == "fifo":
        os.mkfifo(path)
    elif damage == "directory":
        path.mkdir()
    else:
        flipped = bytearray(saved)
        flipped[len(saved) // 2] ^= 1
        contents = {
            "cut": saved[:-9],
            "longer": saved + b"x",
            "empty": b"",
            "flipped": flipped,
            "garbage": b"?" * 999,
        }
        path.write_bytes(bytes(contents[damage]))


def test_index_file_damaged_is_ignored(
    url: str,
    packs: list[PackWriter],
    make_rows: Callable[..., Rows],
) -> None:
    fill(url, packs, make_rows)
    path = index_file(url)
    saved = path.read_bytes()
    commit(url, CommitBatch(packs[PACKS:]))
    for damage in (
        "cut",
        "longer",
        "empty",
        "flipped",
        "garbage",
        "link",
        "fifo",
        "directory",
    ):
        remove(path)
        damage_file(path, damage, saved)
        with opened(url, make_rows) as (store, cursors):
            assert None in cursors, damage
            assert holds(store, packs) == [True] * (PACKS + 1), damage


def test_index_file_after_failed_pack_read_is_not_written(
    url: str,
    packs: list[PackWriter],
    make_rows: Callable[..., Rows],
) -> None:
    """Packs that could not be read are not in the index, but may still be in the store."""
    fill(url, packs, make_rows)
    path = index_file(url)
    path.unlink()
    with opened(url, make_rows) as (store, _):
        backend = inject_faults(store)
        backend.after("tables", lambda found, namespace, pack_ids: [])
        assert store.read(packs[2].keys.unpack()[:1], [0]) == packs[2].keys.unpack()[:1]
        store.flush()
    assert not path.exists()


def test_index_file_read_only_store_uses_but_does_not_write_it(
    url: str,
    packs: list[PackWriter],
    make_rows: Callable[..., Rows],
) -> None:
    fill(url, packs, make_rows)
    commit(url, CommitBatch(packs[PACKS:]))
    before = version(url)
    backend = open_backend(url, read_only=True)
    store = BlockingStore(
        backend, IDENTITY, make_rows(1, 4096, (((0, 1),),)), StoreOptions(), url=url
    )
    assert holds(store, packs) == [True] * (PACKS + 1)
    store.close()
    assert version(url) == before


def test_index_file_small_store_writes_none(
    url: str,
    packs: list[PackWriter],
    make_rows: Callable[..., Rows],
) -> None:
    commit(url, CommitBatch(packs[:1]))
    with opened(url, make_rows):
        pass
    assert not index_file(url).exists()
