"""Local copy of the index: a start fetches only newer entries, and damage to the copy causes no other loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import check_totals, read_pack, sample_identity, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_s3 import S3Backend
from persistkv_s3.log import follower
from tests.backends.s3.conftest import Opener
from tests.backends.s3.test_retention import run

NAMESPACE = sample_identity().digest

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def many_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "SNAPSHOT_AFTER", (3, 3))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "persistkv" / "s3"


def commit(backend: S3Backend, seeds: range) -> None:
    for seed in seeds:
        pack = sample_pack(NAMESPACE, seed)
        batch = CommitBatch([pack], [sample_manifest(f"r{seed}", packs=[pack.pack_id])], pins=[(f"r{seed}", seed == 2)])
        backend.commit(NAMESPACE, batch)


def fill(open_store: Opener, seeds: range, options: str = "refresh=1h") -> None:
    """Commit packs with their requests, delete the first pack, and close the handle cleanly."""
    backend, _ = open_store(options)
    backend.open_namespace(sample_identity())
    commit(backend, seeds)
    gone = sample_pack(NAMESPACE, seeds[0]).pack_id
    backend.commit(NAMESPACE, CommitBatch(deletions=[gone]))
    backend.close()


def fetched(open_store: Opener, options: str = "refresh=1h") -> tuple[S3Backend, list[str]]:
    """Return a new handle that has read the whole index, and the URLs of the index segments that it fetched."""
    backend, client = open_store(options)
    urls: list[str] = []
    client.before = lambda verb, url: urls.append(url)
    tables(backend, NAMESPACE)
    client.before = lambda verb, url: None
    return backend, [url for url in urls if "/segments/" in url]


def assert_same(ours: S3Backend, theirs: S3Backend) -> None:
    assert tables(ours, NAMESPACE) == tables(theirs, NAMESPACE)
    one, other = (backend.session(NAMESPACE).state for backend in (ours, theirs))
    assert one.manifests == other.manifests
    assert (one.packs, one.gone) == (other.packs, other.gone)
    assert one.pinned_packs == other.pinned_packs
    assert check_totals(ours) == check_totals(theirs)


@pytest.mark.parametrize("key", ["", "&key_env=PERSISTKV_TEST_KEY"])
def test_start_fetches_what_came_since(
    open_store: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("PERSISTKV_TEST_KEY", "k" * 32)
    fill(open_store, range(10), f"refresh=1h{key}")
    assert [path.name.startswith(".") for path in directory.iterdir()] == [False]
    plain, without = fetched(open_store, f"refresh=1h&cache=no{key}")
    known, at_once = fetched(open_store, f"refresh=1h{key}")
    assert (len(without) >= 3, at_once) == (True, [])
    assert_same(known, plain)

    other, _ = open_store(f"refresh=1h&cache=no{key}")
    commit(other, range(20, 22))
    later, since = fetched(open_store, f"refresh=1h{key}")
    assert len(since) == 1, "the segment that was added"
    fresh, _ = open_store(f"refresh=1h&cache=no{key}")
    assert_same(later, fresh)
    pack = sample_pack(NAMESPACE, 5)
    expected = payload_of(pack)
    assert read_pack(later, NAMESPACE, pack.table) == expected
    commit(later, range(30, 34))
    (last, _) = open_store(f"refresh=0s&cache=no{key}")
    assert_same(later, last)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


@pytest.mark.parametrize("damage", [cut, flip, lambda data: b"", lambda data: data + b"x"])
def test_damaged_file_is_none(open_store: Opener, directory: Path, damage: Callable[[bytes], bytes]) -> None:
    fill(open_store, range(8))
    (path,) = directory.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    backend, segments = fetched(open_store)
    assert segments
    fresh, _ = open_store("cache=no")
    assert_same(backend, fresh)


def test_file_of_somebody_without_the_key_is_none(
    open_store: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSISTKV_TEST_KEY", "k" * 32)
    with_key = "refresh=1h&key_env=PERSISTKV_TEST_KEY"
    fill(open_store, range(8), with_key)
    (theirs,) = directory.iterdir()
    fill(open_store, range(8))
    (ours,) = set(directory.iterdir()) - {theirs}
    theirs.write_bytes(ours.read_bytes())
    backend, segments = fetched(open_store, with_key)
    assert segments
    assert len(tables(backend, NAMESPACE)) == 7


def test_snapshot_that_was_written_anew_is_fetched(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "SEGMENTS", 2)
    fill(open_store, range(4))
    other, _ = open_store("refresh=1h&cache=no")
    commit(other, range(20, 40))
    backend, segments = fetched(open_store)
    assert segments
    fresh, _ = open_store("cache=no")
    assert_same(backend, fresh)


def test_nothing_is_deleted_on_the_word_of_a_file(open_store: Opener) -> None:
    fill(open_store, range(8))
    backend, at_once = fetched(open_store)
    assert not at_once
    packs = backend.session(NAMESPACE).state.packs
    held = set(packs)
    forgotten = sorted(held)[0]
    packs.pop(forgotten)  # simulate a local copy that lacks this pack
    assert run(backend, hours=2).orphans == 2, "the pack that was deleted, and the keys of its request"
    assert set(tables(backend, NAMESPACE)) == held
    (fresh, _) = open_store("cache=no")
    pack = next(pack for pack in (sample_pack(NAMESPACE, seed) for seed in range(8)) if pack.pack_id == forgotten)
    expected = payload_of(pack)
    assert read_pack(fresh, NAMESPACE, pack.table) == expected


def test_directory_that_cannot_be_written_costs_nothing(open_store: Opener, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    fill(open_store, range(8), f"refresh=1h&cache={tmp_path}/file/below")
    backend, segments = fetched(open_store, f"refresh=1h&cache={tmp_path}/file/below")
    assert segments
    assert len(tables(backend, NAMESPACE)) == 7
