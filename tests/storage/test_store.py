"""One open namespace, on each driver: what goes in comes out, or is a miss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from persistkv.errors import ConfigurationError, CorruptPackError, IdentityMismatchError, StoreError, StoreFullError
from persistkv.storage.backend import Backend, CommitBatch, CommitResult, ReadSpan
from persistkv.storage.identity import Identity
from persistkv.storage.manifest import RequestManifest
from persistkv.storage.pack import PackTable
from persistkv.storage.records import RequestEnd
from persistkv.storage.rows import Rows
from persistkv.storage.store import Store

Keys = Callable[..., list[bytes]]
OpenStore = Callable[..., Store]


def end(request: str, *chains: list[bytes], tokens: int | None = None, **more: Any) -> RequestEnd:
    count = 16 * len(chains[0]) if tokens is None else tokens
    return RequestEnd(request, f"manifest-{request}", chains, count, 16, **more)


def manifests(store: Store) -> list[RequestManifest]:
    return sorted(store.medium.backend.manifests(store.namespace), key=lambda manifest: manifest.id)


def refill(store: Store) -> np.ndarray[Any, Any]:
    """Wipe the rows, hand over what they held."""
    before = store.rows.array.copy()
    store.rows.array[:] = 0
    return before


@pytest.mark.parametrize("codec", ["raw", "zstd", "zstd:3"])
@pytest.mark.parametrize("count", [1, 3, 16, 64])
def test_round_trip(store_url: str, open_store: OpenStore, keys: Keys, codec: str, count: int) -> None:
    store = open_store(store_url, codec=codec)
    store.rows.array[:, ::3] = 0  # so that zstd has something to find
    names, places = keys(count), list(range(count))[::-1]
    assert store.put("r", names, places, range(count)) is (count < 64)  # 64 x 64 KiB are written from the rows
    store.end_request(end("r", names))
    store.commit()
    before = refill(store)
    assert store.read(names, range(count)) == []
    assert (store.rows.array[:count] == before[places]).all()
    assert store.counters.stored_blocks == store.counters.loaded_blocks == count


def test_parts_of_frames_and_several_groups(
    store_url: str, open_store: OpenStore, keys: Keys, make_rows: Callable[..., Rows]
) -> None:
    rows = make_rows(64, 12288, (((0, 4096), (8192, 100)), ((4096, 4096),)))
    store = open_store(store_url, rows)
    full, window = keys(20, 0), keys(20, 1)
    store.put("r", full + window, list(range(20)) * 2, list(range(20)) * 2)
    store.flush()
    before = refill(store)
    wanted = [full[7], window[19], full[0], window[3]]
    assert store.read(wanted, [40, 40, 41, 42]) == []
    assert (rows.array[40, :4096] == before[7, :4096]).all()
    assert (rows.array[40, 8192:8292] == before[7, 8192:8292]).all()
    assert (rows.array[40, 4096:8192] == before[19, 4096:8192]).all()
    assert not rows.array[40, 8292:].any(), "what is no part of the group must not be touched"
    assert (rows.array[42, 4096:8192] == before[3, 4096:8192]).all()
    assert not rows.array[42, :4096].any()


def test_nothing_is_visible_before_it_is_durable(store_url: str, open_store: OpenStore, keys: Keys) -> None:
    store = open_store(store_url)
    small, large = keys(2), keys(64)
    assert store.put("r", small, [0, 1], [0, 1])
    assert not store.put("r", large, range(64), None)
    assert not any(map(store.contains, small + large))
    assert all(map(store.took, small))
    assert not any(map(store.took, large))
    store.commit(everything=True)
    assert all(map(store.contains, small + large))
    assert sorted(store.take_news().stored) == sorted(small + large)


def test_staged_blocks_no_longer_need_their_rows(store_url: str, open_store: OpenStore, keys: Keys) -> None:
    store = open_store(store_url)
    names = keys(3)
    store.put("r", names, [5, 6, 7], [0, 1, 2])
    before = refill(store)
    store.flush()
    assert store.read(names, [0, 1, 2]) == []
    assert (store.rows.array[:3] == before[5:8]).all()


def test_what_is_held_or_on_its_way_is_not_written_again(store_url: str, open_store: OpenStore, keys: Keys) -> None:
    store = open_store(store_url)
    names = keys(64)
    store.put("a", names, range(64), None)
    assert not store.put("b", names[:2], [0, 1], None), "its rows are needed until the write has succeeded"
    store.commit()
    assert store.put("c", names + names, list(range(64)) * 2, None)
    store.commit()
    assert store.counters.stored_blocks == 64
    assert store.counters.held_blocks == 2 + 128


def test_decoded_blocks_of_a_request_become_one_frame(store_url: str, open_store: OpenStore, keys: Keys) -> None:
    store = open_store(store_url)
    names = keys(5)
    for depth, name in enumerate(names):
        store.put("r", [name], [depth], [depth])
    store.end_request(end("r", names))
    store.commit()
    (pack,) = {store.index.pack_of(name) for name in names}
    assert pack is not None
    assert pack.keys == tuple(names)
    assert len(pack.frames) == 1


def test_two_stores_cut_the_same_packs_of_one_prefix(
    open_store: OpenStore, keys: Keys, make_rows: Callable[..., Rows]
) -> None:
    names = keys(96)
    cut = []
    for runs in ([range(96)], [range(32), range(32, 96)]):
        store = open_store("memory://x", make_rows(96, 1 << 20))
        for run in runs:
            store.put("r", [names[i] for i in run], list(run), list(run))
        store.flush()
        cut.append({table.pack_id for table in store.medium.backend.changes(store.namespace, None).added})
    assert cut[0] == cut[1]
    assert len(cut[0]) == 3


def test_a_manifest_tells_of_the_whole_context(store_url: str, open_store: OpenStore, keys: Keys) -> None:
    store = open_store(store_url)
    names = keys(4)
    store.put("a", names[:2], [0, 1], [0, 1])
    store.put("b", names, range(4), range(4))
    store.end_request(end("b", names, tokens=70, labels={"user": "x"}))
    store.commit()
    assert store.take_news().persisted == [("b", True)]
    (manifest,) = manifests(store)
    assert (manifest.id, manifest.tokens, manifest.blocks, manifest.labels) == ("manifest-b", 70, 4, {"user": "x"})
    assert manifest.raw_bytes == 4 * (64 << 10)
    (chain,) = store.medium.backend.manifest_keys(store.namespace, "manifest-b") or ()
    assert chain.unpack() == names
    assert all(map(store.contains, names)), "what another request staged is written with it"


def test_a_manifest_never_names_what_is_not_there(store_url: str, open_store: OpenStore, keys: Keys) -> None:
    store = open_store(store_url)
    names = keys(4)
    store.put("r", [names[0], names[1], names[3]], [0, 1, 3], [0, 1, 3])
    store.end_request(end("r", names, tokens=64))
    store.end_request(end("nothing", keys(2)))
    store.end_request(end("empty", []))
    store.commit()
    assert dict(store.take_news().persisted) == {"r": False, "nothing": False, "empty": True}
    (manifest,) = manifests(store)
    assert (manifest.tokens, manifest.group_blocks) == (32, (2,))


def test_age_and_bound_make_staged_blocks_due(open_store: OpenStore, keys: Keys) -> None:
    aged = open_store("memory://x", max_age_s=0.0)
    aged.put("r", keys(1), [0], None)
    assert aged.wants_commit()
    assert aged.seconds_to_work() == 0.0
    bounded = open_store("memory://y", max_age_s=1e6, staging_bytes=512 << 10)
    bounded.put("r", keys(1), [0], None)
    assert not bounded.wants_commit()
    bounded.put("s", keys(1), [1], None)
    bounded.tick()
    assert bounded.staged_bytes == 0
    assert len(bounded.index) == 2


def test_bad_rows_and_groups_are_refused_untouched(open_store: OpenStore, keys: Keys) -> None:
    store = open_store("memory://x")
    with pytest.raises(ValueError, match="rows 0 to 64"):
        store.put("r", keys(2), [0, 64], None)
    with pytest.raises(ValueError, match="key of group 3"):
        store.put("r", keys(1, group=3), [0], None)
    with pytest.raises(ValueError, match="rows 99 to 99"):
        store.read(keys(1), [99])
    assert not store.wants_commit()


def test_reopening_finds_everything(open_store: OpenStore, keys: Keys, tmp_path: Any) -> None:
    url = f"lmdb://{tmp_path}/store"
    first = open_store(url)
    names = keys(64)
    first.put("r", names, range(64), range(64))
    first.end_request(end("r", names))
    first.close()
    again = open_store(url)
    assert all(map(again.contains, names))
    before = refill(again)
    assert again.read(names, range(64)) == []
    assert (again.rows.array == before).all()
    assert again.notice == ""


def test_other_handles_learn_of_what_was_stored_and_deleted(open_store: OpenStore, keys: Keys, tmp_path: Any) -> None:
    url = f"lmdb://{tmp_path}/store"
    writer, reader = open_store(url), open_store(url, refresh_s=0.0)
    names = keys(64)
    writer.put("r", names, range(64), None)
    writer.commit()
    reader.tick()
    assert sorted(reader.take_news().stored) == sorted(names)
    tables = writer.medium.backend.changes(writer.namespace, None).added
    writer.medium.backend.commit(writer.namespace, CommitBatch(deletions=[table.pack_id for table in tables]))
    reader.tick()
    assert sorted(reader.take_news().removed) == sorted(names)
    assert reader.read(names, range(64)) == names


def test_a_commit_looks_again_at_what_others_stored(open_store: OpenStore, keys: Keys, tmp_path: Any) -> None:
    url = f"lmdb://{tmp_path}/store"
    one, two = open_store(url), open_store(url)
    names = keys(64)
    one.put("r", names, range(64), range(64))
    two.put("r", names, range(64), range(64))
    one.commit()
    two.commit()
    assert all(map(two.contains, names))
    assert two.counters.stored_blocks == 0
    assert one.medium.backend.stats().packs == 1


class FailingBackend(Backend):
    """Passes everything on, but what it is told to fail."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.commit_errors: list[StoreError] = []
        self.max_packs: int | None = None
        self.read_error: StoreError | None = None
        self.flip = False

    @classmethod
    def open(cls, *args: Any, **kwargs: Any) -> Backend:
        raise NotImplementedError

    def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
        if self.commit_errors:
            raise self.commit_errors.pop(0)
        if self.max_packs is not None and len(batch.packs) > self.max_packs:
            raise StoreFullError("too many packs")
        return self.inner.commit(namespace, batch)

    def read(self, namespace: bytes, spans: Any) -> list[bool]:
        if self.read_error:
            raise self.read_error
        filled = self.inner.read(namespace, spans)
        if self.flip:
            spans[0].buffers[0][11] ^= 1
        return filled

    def namespaces(self) -> Any:
        return self.inner.namespaces()

    def open_namespace(self, identity: Identity) -> Any:
        return self.inner.open_namespace(identity)

    def changes(self, namespace: bytes, cursor: bytes | None) -> Any:
        return self.inner.changes(namespace, cursor)

    def manifests(self, namespace: bytes) -> Any:
        return self.inner.manifests(namespace)

    def manifest_keys(self, namespace: bytes, manifest_id: str) -> Any:
        return self.inner.manifest_keys(namespace, manifest_id)

    def stats(self) -> Any:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def failing(open_store: OpenStore, store_url: str) -> tuple[Store, FailingBackend]:
    store = open_store(store_url)
    backend = FailingBackend(store.medium.backend)
    store.medium.backend = backend
    return store, backend


def test_a_failed_commit_costs_its_blocks_and_nothing_else(
    failing: tuple[Store, FailingBackend], keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    store, backend = failing
    backend.commit_errors = [StoreFullError("no room")]
    lost, kept = keys(64), keys(2)
    store.put("r", lost, range(64), None)
    with caplog.at_level(logging.WARNING):
        store.commit()
    assert "the store is full (no room)" in caplog.text
    assert not any(map(store.took, lost))
    assert store.counters.dropped_blocks == 64
    assert store.counters.dropped_bytes == 64 * (64 << 10)
    store.put("r", kept, [0, 1], None)
    store.end_request(end("r", kept))
    store.commit()
    assert all(map(store.contains, kept))
    store.put("r", lost, range(64), None)
    store.commit()
    assert all(map(store.contains, lost)), "what was dropped can be stored later"


def test_one_pack_too_many_costs_only_itself(failing: tuple[Store, FailingBackend], keys: Keys) -> None:
    store, backend = failing
    backend.max_packs = 1
    first, second = keys(64), keys(64)
    store.put("a", first, range(64), None)
    store.put("b", second, range(64), None)
    store.end_request(end("a", first))
    store.commit()
    assert all(map(store.contains, first + second))
    assert [manifest.id for manifest in manifests(store)] == ["manifest-a"]


def test_a_failed_read_is_a_miss_and_deletes_nothing(failing: tuple[Store, FailingBackend], keys: Keys) -> None:
    store, backend = failing
    names = keys(64)
    store.put("r", names, range(64), None)
    store.commit()
    backend.read_error = StoreError("the disk does not answer")
    assert store.read(names, range(64)) == names
    backend.read_error = None
    assert store.read(names, range(64)) == []


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_flipped_byte_is_a_miss_and_the_pack_is_deleted(
    open_store: OpenStore, store_url: str, keys: Keys, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(store_url, codec=codec)
    store.rows.array[:, ::2] = 0
    backend = FailingBackend(store.medium.backend)
    store.medium.backend = backend
    names = keys(32)
    store.put("r", names, range(32), range(32))
    store.flush()
    store.take_news()
    backend.flip = True
    with caplog.at_level(logging.WARNING):
        failed = store.read(names, range(32))
    backend.flip = False
    assert failed, "a flipped byte was served"
    assert set(failed) < set(names)
    assert "do not verify" in caplog.text
    assert store.counters.verification_failures == 1
    assert sorted(store.take_news().removed) == sorted(names)
    assert not any(map(store.contains, names))
    store.put("r", names, range(32), range(32))
    store.flush()
    assert store.read(names, range(32)) == [], "the same blocks can be stored anew"


def test_what_others_commit_before_ours_is_not_passed_over(open_store: OpenStore, keys: Keys, tmp_path: Any) -> None:
    """Our last retry commits whatever happened meanwhile: its cursor lies behind commits that we have not seen."""
    url = f"lmdb://{tmp_path}/store"
    ours, theirs = open_store(url), open_store(url)
    foreign = keys(3)

    class Beaten(FailingBackend):
        """Somebody else commits before each of our commits."""

        def commit(self, namespace: bytes, batch: CommitBatch) -> CommitResult:
            if foreign:
                theirs.put("r", [foreign.pop()], [0], None)
                theirs.flush()
            return super().commit(namespace, batch)

    expected = list(foreign)
    ours.medium.backend = Beaten(ours.medium.backend)
    ours.put("r", mine := keys(64), range(64), None)
    ours.commit()
    ours.refresh()
    assert all(map(ours.contains, mine + expected))


def test_a_pack_that_was_replaced_is_not_deleted(open_store: OpenStore, keys: Keys, tmp_path: Any) -> None:
    """The same keys make the same name: only the table tells that these are other bytes."""
    url = f"lmdb://{tmp_path}/store"
    ours, theirs = open_store(url), open_store(url)
    names = keys(64)
    ours.put("r", names, range(64), None)
    ours.commit()
    theirs.refresh()
    tables = theirs.medium.backend.changes(theirs.namespace, None).added
    theirs.medium.backend.commit(theirs.namespace, CommitBatch(deletions=[table.pack_id for table in tables]))
    theirs.refresh()
    theirs.rows.array[:] ^= 0xFF
    theirs.put("r", names, range(64), None)
    theirs.commit()
    ours.take_news()
    assert ours.read(names, range(64)), "our table is of the old bytes"
    assert all(map(theirs.contains, names))
    assert theirs.read(names, range(64)) == []
    assert ours.read(names, range(64)) == [], "the new table was learnt"
    news = ours.take_news()
    assert set(names) <= set(news.stored)


def test_a_pack_without_its_payload_heals(open_store: OpenStore, keys: Keys) -> None:
    store = open_store("memory://x")
    names = keys(64)
    for _ in range(2):
        store.put("r", names, range(64), None)
        store.commit()
        assert store.read(names, range(64)) == []
        packs = store.medium.backend.spaces[store.namespace].packs  # type: ignore[attr-defined]
        (name,) = packs
        packs[name] = packs[name]._replace(payload=bytearray())
        assert store.read(names, range(64)) == names
        assert not any(map(store.contains, names))


def test_a_codec_of_another_release_is_a_miss_and_no_damage(
    open_store: OpenStore, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store("memory://x", codec="zstd")
    store.rows.array[:] = 0
    names = keys(64)
    store.put("r", names, range(64), None)
    store.commit()

    def unknown(text: str) -> Any:
        raise ConfigurationError("codec", text, "one that this release knows")

    with monkeypatch.context() as patch:
        patch.setattr("persistkv.storage.codec.text.parse_codec", unknown)
        assert store.read(names, range(64)) == names
    assert store.counters.verification_failures == 0
    assert store.read(names, range(64)) == []


def test_small_jobs_do_not_gather_past_their_bound(open_store: OpenStore, keys: Keys) -> None:
    store = open_store("memory://x", staging_bytes=8 * (64 << 10), max_age_s=1e6)
    names = [keys(4) for _ in range(3)]
    free = [store.put("r", names[job], range(4 * job, 4 * job + 4), None) for job in range(3)]
    assert free == [True, False, False], "what has no room is written from its rows"
    assert store.staged_bytes == 4 * (64 << 10)
    assert not store.has_room
    store.commit()
    assert store.has_room
    assert all(store.contains(key) for job in names for key in job)


def test_a_full_store_says_so_once(
    failing: tuple[Store, FailingBackend], keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    store, backend = failing
    backend.commit_errors = [StoreFullError("no room")] * 10
    for _ in range(5):
        store.put("r", keys(64), range(64), None)
        store.commit()
    assert caplog.text.count("the store is full") == 1
    assert store.counters.dropped_blocks == 5 * 64


def test_a_block_in_the_place_of_another_does_not_verify(open_store: OpenStore, keys: Keys) -> None:
    """Swap the payloads of two packs of one size: each frame is intact, and in the wrong place."""
    store = open_store("memory://x")
    one, two = keys(64), keys(64)
    store.put("a", one, range(64), None)
    store.rows.array[:] ^= 0xFF
    store.commit()
    store.rows.array[:] ^= 0xFF
    store.put("b", two, range(64), None)
    store.commit()
    packs = store.medium.backend.spaces[store.namespace].packs  # type: ignore[attr-defined]
    first, second = packs
    packs[first], packs[second] = (
        packs[first]._replace(payload=packs[second].payload),
        packs[second]._replace(payload=packs[first].payload),
    )
    assert store.read(one, range(64)) == one
    assert store.read(two, range(64)) == two


def test_a_table_of_other_block_sizes_is_a_miss(
    open_store: OpenStore, keys: Keys, make_rows: Callable[..., Rows], tmp_path: Any
) -> None:
    url = f"lmdb://{tmp_path}/store"
    store = open_store(url)
    names = keys(4)
    store.put("r", names, range(4), None)
    store.flush()
    other = open_store(url, make_rows(8, 4096))
    assert other.contains(names[0])
    assert other.read(names, range(4)) == names


def test_another_identity_misses_and_is_told_why(open_store: OpenStore, keys: Keys, tmp_path: Any) -> None:
    url = f"lmdb://{tmp_path}/store"
    store = open_store(url)
    names = keys(2)
    store.put("r", names, [0, 1], None)
    store.flush()
    other = Identity.of({"weights": "w", "dtype": "bfloat16"})
    with pytest.raises(IdentityMismatchError, match="dtype: 'bfloat16' here, 'float32' stored"):
        open_store(url, identity=other, strict_identity=True)
    assert len(list(store.medium.backend.namespaces())) == 1, "a refusal creates nothing"
    stranger = open_store(url, identity=other)
    assert "dtype: 'bfloat16' here, 'float32' stored" in stranger.notice
    assert not any(map(stranger.contains, names))
    assert open_store(url, identity=other).notice == ""


def test_an_unknown_codec_is_refused_before_anything_is_made(open_store: OpenStore, tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match="codec: 'lz5'"):
        open_store(f"lmdb://{tmp_path}/store", codec="lz5")


def test_readers_take_neighbouring_frames_in_one_span(open_store: OpenStore, keys: Keys) -> None:
    store = open_store("memory://x")
    names = keys(32)
    store.put("r", names, range(32), None)
    store.flush()
    seen: list[ReadSpan] = []

    class Recording(FailingBackend):
        def read(self, namespace: bytes, spans: Any) -> list[bool]:
            seen.extend(spans)
            return super().read(namespace, spans)

    store.medium.backend = Recording(store.medium.backend)
    assert store.read(names, range(32)) == []
    assert len(seen) == 1
    assert sum(map(len, seen[0].buffers)) == 32 * (64 << 10)


def test_a_pack_alone_is_enough(open_store: OpenStore, keys: Keys) -> None:
    store = open_store("memory://x", codec="zstd")
    names = keys(8)
    store.put("r", names, range(8), range(8))
    store.flush()
    (pack,) = store.medium.backend.spaces[store.namespace].packs.values()  # type: ignore[attr-defined]
    table = PackTable.parse(bytes(pack.payload) + pack.table)
    assert table.keys.unpack() == names
    assert [frame.depth for frame in table.frames] == [0]
    with pytest.raises(CorruptPackError):
        PackTable.parse(bytes(pack.payload))


def small_store(tmp_path: Any, open_store: OpenStore, make_rows: Callable[..., Rows], **options: Any) -> Store:
    """8 MiB on LMDB, rows of 64 KiB."""
    return open_store(f"lmdb://{tmp_path}/store?capacity=8MiB", make_rows(64), **options)


def store_request(store: Store, request: str, names: list[bytes], *, close: bool = True) -> None:
    store.put(request, names, range(len(names)), range(len(names)))
    if close:
        store.end_request(end(request, names))
    store.commit(everything=True)


def test_a_full_store_takes_what_is_new_and_forgets_what_is_old(
    open_store: OpenStore, keys: Keys, make_rows: Callable[..., Rows], tmp_path: Any
) -> None:
    store = small_store(tmp_path, open_store, make_rows)
    requests = [keys(16) for _ in range(20)]
    for number, names in enumerate(requests):
        store_request(store, f"r{number}", names)
    held = [all(map(store.contains, names)) for names in requests]
    assert held == sorted(held), "the oldest go first"
    assert 4 <= sum(held) < 20
    news = store.take_news()
    gone = [name for names, there in zip(requests, held, strict=True) if not there for name in names]
    assert sorted(news.removed) == sorted(gone)
    assert store.counters.evicted_blocks == len(gone)
    assert store.counters.dropped_blocks == 0
    assert {manifest.id for manifest in manifests(store)} == {
        f"manifest-r{number}" for number, there in enumerate(held) if there
    }
    assert store.read(requests[-1], range(16)) == []


@pytest.mark.parametrize("use", ["read", "touch", "offer", "another request"])
def test_what_is_used_stays(
    open_store: OpenStore, keys: Keys, make_rows: Callable[..., Rows], tmp_path: Any, use: str
) -> None:
    store = small_store(tmp_path, open_store, make_rows)
    kept = keys(16)
    store_request(store, "kept", kept)
    for number in range(20):
        if use == "read":
            assert store.read(kept, range(16)) == []
        elif use == "touch":
            store.touch([*kept, *keys(3)])
        elif use == "offer":
            store.put("again", kept, range(16), range(16))
        else:
            store.end_request(end(f"again{number}", kept))
        store_request(store, f"r{number}", keys(16))
    assert all(map(store.contains, kept))
    assert store.counters.evicted_blocks


def test_a_request_that_goes_on_keeps_its_prefix(
    open_store: OpenStore, keys: Keys, make_rows: Callable[..., Rows], tmp_path: Any
) -> None:
    """Its manifest touches the whole chain: the end of a context never outlives what it depends on."""
    store = small_store(tmp_path, open_store, make_rows)
    context: list[bytes] = []
    for turn in range(8):
        fresh = keys(4)
        store.put("chat", fresh, range(4), range(len(context), len(context) + 4))
        context += fresh
        store.end_request(RequestEnd("chat", f"turn{turn}", (context[:],), 16 * len(context), 16))
        store.commit()
        store_request(store, f"other{turn}", keys(16))
        assert all(map(store.contains, context))
    for number in range(12):
        store_request(store, f"r{number}", keys(16))
        held = list(map(store.contains, context))
        assert held == sorted(held, reverse=True), "a hole in front of what is held"
    assert not any(map(store.contains, context))


def test_uses_are_committed_though_nothing_is_stored(
    open_store: OpenStore, keys: Keys, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"lmdb://{tmp_path}/store", refresh_s=1e6)
    names = keys(16)
    store_request(store, "r", names)
    commits = store.counters.commits
    store._committed_at += 1000.0  # however long this takes
    store.touch(names)
    assert 900 < store.seconds_to_work() <= 1002
    store.tick()
    assert store.counters.commits == commits
    store._committed_at -= 1003.0
    assert store.seconds_to_work() == 0.0
    store.tick()
    assert store.counters.commits == commits + 1
    store.tick()
    assert store.counters.commits == commits + 1


def test_idle_stores_let_old_blocks_expire(
    open_store: OpenStore, keys: Keys, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"{store_url}{'&' if '?' in store_url else '?'}ttl=1h")
    names = keys(16)
    store_request(store, "r", names)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 7200)
    store._committed_at -= 31.0
    store.tick()
    assert not any(map(store.contains, names))
    assert store.take_news().removed == names


def test_blocks_evicted_by_another_handle_are_gone_here_too(
    open_store: OpenStore, keys: Keys, make_rows: Callable[..., Rows], tmp_path: Any
) -> None:
    one = small_store(tmp_path, open_store, make_rows)
    two = small_store(tmp_path, open_store, make_rows, refresh_s=0.0)
    names = keys(16)
    store_request(one, "mine", names)
    two.tick()
    assert all(map(two.contains, names))
    for number in range(12):
        store_request(one, f"r{number}", keys(16))
    two.tick()
    assert not any(map(two.contains, names))
    assert sorted(two.index) == sorted(one.index)


def test_what_is_larger_than_the_store_is_dropped_and_nothing_else(
    open_store: OpenStore, keys: Keys, make_rows: Callable[..., Rows], tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(f"lmdb://{tmp_path}/store?capacity=2MiB", make_rows(64))
    kept, large = keys(4), keys(64)
    store_request(store, "small", kept)
    for number in range(3):
        store_request(store, f"large{number}", large)
    assert store.counters.dropped_blocks == 3 * 64
    assert all(map(store.contains, kept))
    assert not any(map(store.contains, large))
    assert sum("the store is full" in line for line in caplog.messages) == 1, "one warning a minute"
    assert dict(store.take_news().persisted) == {"small": True, "large0": False, "large1": False, "large2": False}


def test_an_interval_gathers_what_was_taken(store_url: str, open_store: OpenStore, keys: Keys) -> None:
    """Large jobs are copied, too; their rows are free, and nothing is durable nor found before its time."""
    store = open_store(store_url, durability="interval:1h", max_age_s=0.0, refresh_s=1e6)
    large, small = keys(64), keys(3)
    assert store.put("a", large, range(64), range(64))
    assert store.put("b", small, [0, 1, 2], None)
    store.end_request(end("a", large))
    before = refill(store)
    assert not store.wants_commit()
    assert store.seconds_to_work() > 0
    store.tick()
    assert not any(map(store.contains, large + small))
    assert store.take_news().persisted == []
    store.flush()
    assert store.counters.commits == 1, "one transaction for all"
    assert all(map(store.contains, large + small))
    assert store.take_news().persisted == [("a", True)]
    assert store.read(large, range(64)) == []
    assert (store.rows.array == before).all()


def test_an_interval_ends(open_store: OpenStore, keys: Keys) -> None:
    for use in ("blocks", "an end"):
        store = open_store("memory://x", durability="interval:1h")
        names = keys(2)
        if use == "blocks":
            store.put("r", names, [0, 1], None)
            (pack,) = store._staging.waiting()
            pack.since -= 3601
        else:
            store.end_request(end("r", names))
            store._ends_since -= 3601
        assert store.seconds_to_work() == 0.0
        store.tick()
        assert store.counters.commits == 1
        assert not store.wants_commit()


def test_an_interval_ends_where_memory_does(open_store: OpenStore, keys: Keys, make_rows: Callable[..., Rows]) -> None:
    store = open_store("memory://x", make_rows(64, 1 << 20), durability="interval:1h", staging_bytes=64 << 20)
    names = keys(48)
    assert store.put("r", names[:8], range(8), range(8))
    assert not store.wants_commit()
    assert store.put("r", names[8:16], range(8, 16), range(8, 16))
    assert store.wants_commit(), "half of what may be staged"
    assert store.put("r", names[16:32], range(16, 32), range(16, 32))
    assert not store.put("r", names[32:], range(32, 48), range(32, 48)), "no room is left: written from the rows"
    store.tick()
    assert all(map(store.contains, names))
    assert store.staged_bytes == 0


def test_blocks_are_wanted_in_any_places(
    store_url: str, open_store: OpenStore, keys: Keys, make_rows: Callable[..., Rows]
) -> None:
    """Whole frames and parts of them, rows that lie side by side or not, some wanted twice; raw and encoded."""
    draw = np.random.default_rng(11)
    for codec, ranges in (("raw", ()), ("zstd", ()), ("raw", (((0, 4096), (8192, 100)),)), ("zstd", (((0, 100),),))):
        store = open_store(
            store_url.replace("?", f"-{codec}{len(ranges)}?"), make_rows(256, 16 << 10, ranges), codec=codec
        )
        store.rows.array[:, ::2] = 0
        names = keys(100)
        store.put("r", names, range(100), range(100))
        store.flush()
        before = store.rows.array.copy()
        for count in (1, 64, 100, 128):
            store.rows.array[:] = 0
            wanted = list(range(count)) if count == 100 else list(draw.integers(0, 100, count))
            places = list(range(count)) if draw.integers(2) else list(draw.permutation(256)[:count])
            assert store.read([names[block] for block in wanted], places) == []
            expected = np.zeros_like(before)
            for offset, size in store.rows.layout.groups[0].ranges:
                expected[places, offset : offset + size] = before[wanted, offset : offset + size]
            assert (store.rows.array == expected).all()
