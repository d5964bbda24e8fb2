"""What a crash kept from a far store is copied from the nearer one of the same engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.storage import resuming
from persistkv.storage.backend import CommitBatch, CommitResult
from persistkv.storage.records import RequestEnd
from persistkv.storage.store import Store

Keys = Callable[..., list[bytes]]
OpenStore = Callable[..., Store]
BLOCKS = 8


@pytest.fixture
def near_url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/near?capacity=256MiB"


@pytest.fixture
def far_url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/far?capacity=256MiB"


def write(store: Store, request: str, keys: list[bytes]) -> None:
    """A request whose blocks lie in the first rows, durable on return."""
    store.put(request, keys, range(len(keys)), range(len(keys)))
    store.end_request(RequestEnd(request, f"manifest-{request}", (keys,), 16 * len(keys), 16))
    store.commit()


def resume(store: Store) -> None:
    """Turn by turn, to the end."""
    until = time.monotonic() + 60
    while store._resumption is not None and store._resumption.seconds_to_turn is not None:
        store.tick()
        assert time.monotonic() < until


def manifest_ids(store: Store) -> set[str]:
    return {manifest.id for manifest in store.medium.backend.manifests(store.namespace)}


def packs(store: Store) -> set[bytes]:
    return {table.pack_id for table in store.medium.backend.changes(store.namespace, None).added}


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_the_far_store_lacks_is_copied(
    near_url: str, far_url: str, open_store: OpenStore, keys: Keys, codec: str
) -> None:
    near = open_store(near_url, codec=codec)
    near.rows.array[:, ::3] = 0  # so that zstd has something to find
    both, lost = keys(BLOCKS), keys(2 * BLOCKS)
    write(near, "both", both)
    write(near, "lost", [*both[:4], *lost])
    before = open_store(far_url, near.rows, codec=codec)
    write(before, "both", both)
    before.close()

    far = open_store(far_url, near.rows, codec=codec, resume_from=near_url)
    assert not far.contains(lost[0])
    resume(far)
    assert packs(far) == packs(near), "under the same names, none twice"
    assert manifest_ids(far) == {"manifest-both", "manifest-lost"}
    assert sorted(far.take_news().stored) == sorted(lost)
    expected = near.rows.array[4 : 4 + len(lost)].copy()
    near.rows.array[:] = 0
    assert far.read(lost, range(len(lost))) == []
    assert (far.rows.array[: len(lost)] == expected).all()
    far.close()

    again = open_store(far_url, near.rows, codec=codec, resume_from=near_url)
    resume(again)
    assert again.counters.commits == 0, "there is nothing left to do"


def test_it_is_bounded(
    near_url: str, far_url: str, open_store: OpenStore, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = open_store(near_url)
    requests = {f"r{number}": keys(BLOCKS) for number in range(4)}
    for number, (request, names) in enumerate(requests.items()):
        monkeypatch.setattr("persistkv.storage.ending.time.time", lambda at=1e9 + 60 * number: at)
        write(near, request, names)
    monkeypatch.undo()
    monkeypatch.setattr(resuming, "_MOST_BYTES", 1)
    far = open_store(far_url, resume_from=near_url)
    resume(far)
    assert [request for request, names in requests.items() if far.contains(names[0])] == ["r3"], "the newest first"
    far.close()
    monkeypatch.undo()
    monkeypatch.setattr(resuming, "_RECENT_S", 90.0)
    again = open_store(far_url, resume_from=near_url)
    resume(again)
    assert [request for request, names in requests.items() if again.contains(names[0])] == ["r2", "r3"]


def test_damaged_pack_is_not_copied_and_its_request_not_told(
    near_url: str, far_url: str, open_store: OpenStore, keys: Keys, tmp_path: Path
) -> None:
    near = open_store(f"{near_url}&placement=extents")
    names = keys(BLOCKS)
    write(near, "r", names)
    payload = bytes(near.rows.array[0])
    near.close()
    (segment,) = [path for path in (tmp_path / "near" / "segments").iterdir() if payload in path.read_bytes()]
    segment.write_bytes(segment.read_bytes().replace(payload, bytes(len(payload))))
    far = open_store(far_url, resume_from=near_url)
    resume(far)
    assert (packs(far), manifest_ids(far)) == (set(), set())


def test_failures_are_tried_again_and_not_for_ever(
    near_url: str, far_url: str, open_store: OpenStore, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "_PAUSE_S", 0.0)
    near = open_store(near_url)
    names = keys(BLOCKS)
    write(near, "r", names)
    far = open_store(far_url, resume_from=near_url)
    commit, failures = far.medium.backend.commit, [StoreError("not now")] * 3

    def fail_at_first(namespace: bytes, batch: CommitBatch) -> CommitResult:
        if failures:
            raise failures.pop()
        return commit(namespace, batch)

    monkeypatch.setattr(far.medium.backend, "commit", fail_at_first)
    resume(far)
    assert far.contains(names[0])
    assert manifest_ids(far) == {"manifest-r"}

    nowhere = open_store(f"{far_url}", resume_from="lmdb:///nowhere/to/be/found")
    resume(nowhere)
    assert nowhere.contains(names[0])


def test_nothing_is_begun_once_it_is_to_stop(near_url: str, far_url: str, open_store: OpenStore, keys: Keys) -> None:
    near = open_store(near_url)
    names = keys(BLOCKS)
    write(near, "r", names)
    far = open_store(far_url, resume_from=near_url)
    far.stop_resuming()
    far.tick()
    assert not far.contains(names[0])
