"""A store on a bucket: visibility of keys, parallel fetches, and an engine with a host process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from mmap import mmap
from random import Random
from typing import TYPE_CHECKING, Unpack

import numpy as np
import pytest

from persistkv.base import make_offload_key
from persistkv.config import GroupLayout, RowLayout
from persistkv.memory.rows import Rows
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.seal import PLAIN
from persistkv.storage.host.client import StoreClient
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.shared.format import Latest, Names, encode, seal_object
from persistkv.storage.store.blocking import BlockingStore
from persistkv.testing.conformance.suite import sample_identity
from persistkv_s3 import S3Backend
from persistkv_s3.client.transport import LateError, Sink
from tests.backends.s3.conftest import Opener
from tests.storage.host.hosted import STRIDE, Hosted
from tests.storage.stores import StoreSettings

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

BLOCK = 256 << 10
PATIENCE_S = 60


def make_keys(count: int, first: int = 0) -> list[bytes]:
    return [
        bytes(make_offload_key((first + number).to_bytes(32, "little"), 0))
        for number in range(count)
    ]


def make_rows(count: int) -> Rows:
    filled = np.random.default_rng(7).integers(0, 256, count * BLOCK, dtype=np.uint8)
    return Rows(
        memoryview(bytearray(filled.tobytes())),
        RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),)),
    )


def open_on(
    backend: S3Backend, rows: Rows, **options: Unpack[StoreSettings]
) -> BlockingStore:
    options.setdefault("events", True)
    settings = StoreOptions(**options)
    return BlockingStore(backend, sample_identity(), rows, settings, url="s3://test")


def end(request: str, keys: list[bytes]) -> RequestEnd:
    return RequestEnd(request, f"manifest-{request}", (keys,), 16 * len(keys), 16)


def test_store_keys_become_visible_after_last_upload(open_store: Opener) -> None:
    backend, client = open_store("refresh=1h")
    rows, keys = make_rows(16), make_keys(16)
    store = open_on(backend, rows)
    seen: list[tuple[str, bool]] = []
    client.before = lambda verb, url: seen.append((verb, store.contains(keys[0])))
    store.put("r", keys, range(16), range(16))
    store.end_request(end("r", keys))
    store.flush()
    assert seen == [("PUT", False)] * 3, "the pack, the manifest's keys, the index"
    report = store.take_report()
    assert (sorted(report.stored), report.persisted) == (sorted(keys), [("r", True)])


def test_read_contiguous_blocks_sends_one_request_per_run(open_store: Opener) -> None:
    backend, client = open_store("refresh=1h")
    rows, keys = make_rows(256), make_keys(256)
    store = open_on(backend, rows)
    store.put("r", keys, range(256), range(256))
    store.flush()
    expected = rows.array.copy()
    rows.array[:] = 0
    client.take()
    assert store.read(keys, range(256)) == []
    assert client.take() == {"GET": 2}, "two packs of 32 MiB"
    assert (rows.array == expected).all()
    far_apart = [*range(8), *range(40, 44), *range(200, 208)]
    assert store.read([keys[n] for n in far_apart], far_apart) == []
    assert client.take() == {"GET": 3}
    assert (rows.array == expected).all()


@pytest.mark.parametrize("key", ["", "&key_env=PERSISTKV_TEST_KEY"])
def test_read_encoded_blocks_sends_one_request_per_run(
    open_store: Opener,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
) -> None:
    """The promotion allocates memory for two frames for each pack that it reads at the same time,
    not for a whole run."""
    monkeypatch.setenv("PERSISTKV_TEST_KEY", "k" * 32)
    backend, client = open_store(f"refresh=1h{key}")
    rows, keys = make_rows(256), make_keys(256)
    noise = rows.array[16:32].copy()
    rows.array[:, 4096:] = rows.array[:, :1]  # compressible content for the codecs
    rows.array[16:32] = noise  # frames between others, which the codec stores raw
    store = open_on(backend, rows, codec="zstd")
    store.put("r", keys, range(256), range(256))
    store.flush()
    expected = rows.array.copy()
    rows.array[:] = 0
    client.take()
    lent: list[int] = []

    def lend(size: int) -> mmap:
        lent.append(size)
        return mmap(-1, size)

    monkeypatch.setattr("persistkv.storage.store.load.huge_memory", lend)
    assert store.read(keys, range(256)) == []
    assert client.take() == {"GET": 2}, "two packs of 32 MiB raw"
    assert (rows.array == expected).all()
    assert sum(lent) <= 2 * (4 << 20), "256 blocks are 64 MiB"
    far_apart = [*range(3, 8), *range(14, 30), *range(40, 44), *range(200, 208)]
    assert store.read([keys[n] for n in far_apart], [255 - n for n in far_apart]) == []
    assert client.take() == {"GET": 2}, "the gaps are shorter than 256 KiB"
    assert (rows.array[[255 - n for n in far_apart]] == expected[far_apart]).all()


def test_read_broken_off_keeps_blocks_received_before(
    open_store: Opener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, _ = open_store("refresh=1h")
    rows, keys = make_rows(32), make_keys(32)
    rows.array[:, 4096:] = rows.array[:, :1]
    store = open_on(backend, rows, codec="zstd")
    store.put("r", keys, range(32), range(32))
    store.flush()
    expected = rows.array.copy()
    rows.array[:] = 0

    room = Sink.room

    def break_off(sink: Sink) -> memoryview:
        if sink.position >= 70_000:
            raise LateError("the deadline passed")
        return room(sink)[:10_000]

    with monkeypatch.context() as patch:
        patch.setattr(Sink, "room", break_off)
        failed = store.read(keys, range(32))
    came = 32 - len(failed)
    assert 0 < came < 32
    assert failed == keys[came:]
    assert (rows.array[:came] == expected[:came]).all()
    assert all(map(store.contains, keys)), "nothing is wrong with the pack"
    assert store.read(keys, range(32)) == []
    assert (rows.array == expected).all()


@pytest.mark.slow
def test_read_fetches_ranges_in_parallel(
    open_store: Opener,
) -> None:
    backend, client = open_store("refresh=1h")
    rows, keys = make_rows(256), make_keys(256)
    writer = open_on(backend, rows)
    writer.put("r", keys, range(256), range(256))
    writer.flush()
    other, client = open_store("refresh=1h")
    store = BlockingStore(
        other,
        sample_identity(),
        rows,
        StoreOptions(),
        url="s3://test",
    )
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def meet(verb: str, url: str) -> None:
        if "/packs/" in url:
            both.wait()

    client.before = meet
    assert store.read(keys, range(256)) == []


@pytest.mark.slow
def test_client_receives_changes_of_other_engines_without_jobs(
    open_store: Opener,
    endpoint: str,
    bucket: str,
    hosted: Hosted,
) -> None:
    url = f"s3://{bucket}/store?endpoint_url={endpoint}"
    layout = RowLayout(STRIDE, (GroupLayout(((0, STRIDE),)),))
    identity = Identity.of({"weights": "w"})
    client = hosted.connect(url)
    client.open()
    writer, _ = open_store()
    store = BlockingStore(
        writer,
        identity,
        Rows(memoryview(bytearray(8 * STRIDE)), layout),
        StoreOptions(),
        url="s3://test",
    )
    keys = make_keys(8)

    def shows(held: bool) -> bool:
        writer.step()  # which merges its commits
        return all(client.contains(key) == held for key in keys)

    store.put("r", keys, range(8), range(8))
    store.flush()
    wait_for(client, partial(shows, held=True))
    writer.commit(store.namespace, _deletion(store))
    wait_for(client, partial(shows, held=False))
    assert client.counters.load_jobs == client.counters.store_jobs == 0


@pytest.mark.slow
def test_host_process_driver_log_reaches_engine(
    endpoint: str,
    bucket: str,
    raw_client: S3Client,
    hosted: Hosted,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = hosted.connect(f"s3://{bucket}/store?endpoint_url={endpoint}")
    client.open()
    namespace = Identity.of({"weights": "w"}).digest
    names = Names(namespace)
    damaged = names.new_index(1, time.time(), Random(1))
    latest = encode(Latest(b"writer", time.time(), [(damaged, 7)]))
    body = seal_object(names.latest, latest, PLAIN, namespace)
    raw_client.put_object(Bucket=bucket, Key=f"store/{damaged}", Body=b"damaged")
    raw_client.put_object(Bucket=bucket, Key=f"store/{names.latest}", Body=body)
    wait_for(client, lambda: "is unreadable" in caplog.text)


def _deletion(store: BlockingStore) -> CommitBatch:
    packs = store.view.backend.changes(store.namespace, None).added
    return CommitBatch(deletions=[pack.pack_id for pack in packs])


def wait_for(client: StoreClient, happened: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not happened():
        client.poll()
        time.sleep(0.01)
        assert time.monotonic() < until
