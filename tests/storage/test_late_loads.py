"""Loads whose medium hangs: they end at their deadline, and write no row afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from threading import Event

import numpy as np
import pytest

from persistkv.memory.rows import Rows
from persistkv.storage.backend import Backend, Capabilities
from persistkv.storage.records import StoreOptions
from persistkv.storage.shared import SharedBackend, SharedOptions
from persistkv.storage.store.store import Store, start_threads
from persistkv.testing import FaultyBackend, FaultyBlobs, MemoryBackend, MemoryBlobs
from tests.storage.conftest import IDENTITY

Keys = Callable[..., list[bytes]]
MakeRows = Callable[..., Rows]

DEADLINE_S = 0.2
PATIENCE_S = 60.0


class RemoteBackend(SharedBackend):
    """A shared store whose loads are those of a bucket."""

    capabilities = Capabilities(remote=True)


class StallingBlobs(MemoryBlobs):
    """Medium that stops in the middle of a pack, and goes on later."""

    def __init__(self) -> None:
        super().__init__()
        self.stalls = False
        self.goes_on = Event()
        self.num_ended = 0

    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        if not (self.stalls and "/packs/" in f"/{name}"):
            return super().read(name, offset, length, buffers)
        try:
            return super().read(name, offset, length, self._stalling(buffers))
        finally:
            self.num_ended += 1

    def _stalling(self, buffers: Iterable[memoryview]) -> Iterable[memoryview]:
        for number, buffer in enumerate(buffers):
            if number == 2:
                assert self.goes_on.wait(PATIENCE_S)
            yield buffer


def remote(blobs: MemoryBlobs | FaultyBlobs) -> RemoteBackend:
    return RemoteBackend(blobs, SharedOptions(cache=False), background=False)


@asynccontextmanager
async def opened(
    backend: Backend,
    rows: Rows,
    keys: list[bytes],
) -> AsyncIterator[Store]:
    """Open a store that holds the content of the first rows under ``keys``."""
    options = StoreOptions()
    threads = start_threads(backend, options)
    store = Store(backend, IDENTITY, rows, options, url="memory://", threads=threads)
    commits = asyncio.create_task(store.committer.run())
    places = range(len(keys))
    job = await store.put("r", keys, places, places)
    await store.flush()
    await store.finish(job)
    try:
        yield store
    finally:
        commits.cancel()
        await asyncio.wait([commits])
        threads.close()
        store.close()


async def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        await asyncio.sleep(0.01)


def test_read_from_hung_medium_ends_at_deadline_and_others_go_on(
    make_rows: MakeRows,
    keys: Keys,
) -> None:
    """More loads hang than there are threads."""
    rows, names = make_rows(64), keys(8)
    blobs = FaultyBlobs(MemoryBlobs())
    goes_on = Event()

    async def load() -> None:
        async with opened(remote(blobs), rows, names) as store:
            before = rows.array.copy()
            blobs.before("read", lambda _: goes_on.wait(PATIENCE_S))
            for _ in range(store.view.threads.readers + 1):
                begin = time.monotonic()
                outcome = await store.read(names, range(8, 16), begin + DEADLINE_S)
                assert DEADLINE_S <= time.monotonic() - begin < PATIENCE_S / 2
                assert outcome.failed == names
                assert outcome.is_late
                assert not outcome.suspects
            blobs.clear_faults()
            outcome = await store.read(names, range(16, 24), time.monotonic() + 60)
            assert (outcome.failed, outcome.is_late) == ([], False)
            assert (rows.array[16:24] == before[:8]).all()
            before = rows.array.copy()
            goes_on.set()
            await wait_for(lambda: not store.view.threads.longest_s())
            assert (rows.array == before).all()

    asyncio.run(load())


def test_read_of_pack_with_new_data_key_waits_for_no_keys(
    make_rows: MakeRows,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another engine has made the key since; the index is read with the keys of its packs."""
    monkeypatch.setenv("PERSISTKV_TEST_KEY", "0123456789abcdef" * 4)
    rows, names = make_rows(64), keys(8)
    medium = MemoryBlobs()
    blobs = FaultyBlobs(medium.handle())
    options = SharedOptions(cache=False, key_env="PERSISTKV_TEST_KEY")
    reader = RemoteBackend(blobs, options, background=False)
    writer = RemoteBackend(medium.handle(), options, background=False)

    async def load() -> None:
        async with opened(writer, rows, names):
            pass
        async with opened(reader, rows, names) as store:
            before = rows.array.copy()
            assert any("/tenants/" in name for _, name in blobs.calls)
            blobs.calls.clear()
            outcome = await store.read(names, range(8, 16), time.monotonic() + 60)
            assert (outcome.failed, outcome.is_late) == ([], False)
            assert (rows.array[8:16] == before[:8]).all()
            assert blobs.calls
            assert not any("/tenants/" in name for _, name in blobs.calls)

    asyncio.run(load())


def test_read_from_stalling_medium_keeps_what_arrived_and_writes_nothing_later(
    make_rows: MakeRows,
    keys: Keys,
) -> None:
    rows, names = make_rows(128), keys(64)  # four frames
    blobs = StallingBlobs()

    async def load() -> None:
        async with opened(remote(blobs), rows, names) as store:
            stored = rows.array[:64].copy()
            blobs.stalls = True
            outcome = await store.read(
                names, range(64, 128), time.monotonic() + 10 * DEADLINE_S
            )
            assert outcome.is_late
            num_loaded = len(names) - len(outcome.failed)
            assert 0 < num_loaded < 64
            assert outcome.failed == names[num_loaded:]
            assert outcome.raw_bytes == num_loaded * rows.layout.row_stride
            loaded = rows.array[64 : 64 + num_loaded]
            assert (loaded == stored[:num_loaded]).all()
            rows.array[64:] = 7  # another request uses the rows
            blobs.goes_on.set()
            await wait_for(lambda: not store.view.threads.longest_s())
            assert blobs.num_ended == 1
            assert np.all(rows.array[64:] == 7)
            blobs.stalls = False
            assert not (await store.read(names, range(64, 128))).failed

    asyncio.run(load())


def test_probe_of_hung_local_store_ends_at_deadline(
    make_rows: MakeRows,
    keys: Keys,
) -> None:
    rows, names = make_rows(64), keys(8)
    backend = FaultyBackend.of(MemoryBackend(MemoryBlobs()))
    goes_on = Event()

    async def probe() -> None:
        async with opened(backend, rows, names) as store:
            backend.before("read", lambda *_: goes_on.wait(PATIENCE_S))
            for _ in range(store.view.threads.readers + 1):
                outcome = await store.probe(names, time.monotonic() + DEADLINE_S)
                assert (outcome.raw_bytes, outcome.is_late) == (0, True)
            backend.clear_faults()
            outcome = await store.probe(names, time.monotonic() + 60)
            assert outcome.raw_bytes == 8 * rows.layout.row_stride
            goes_on.set()

    asyncio.run(probe())
