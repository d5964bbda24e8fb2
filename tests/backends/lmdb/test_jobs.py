"""Jobs that several threads read in parts: a failing part does not affect the blocks of the other
parts."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Unpack

import numpy as np
import pytest

from persistkv.config import GroupLayout, RowLayout
from persistkv.memory.rows import Rows
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack import FRAME_BYTES
from persistkv.storage.identity import Identity
from persistkv.storage.records import StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.storage.threads import StoreThreads
from persistkv.testing.samples import sample_pack
from tests.backends.lmdb.conftest import Opener
from tests.storage.stores import StoreSettings

BLOCK = 64 << 10
BLOCKS = 256


@pytest.fixture
def placement() -> str:
    return "extents"


def rows_of(seed: int) -> Rows:
    memory = memoryview(mmap.mmap(-1, 2 * BLOCKS * BLOCK))
    np.frombuffer(memory, np.uint8)[: BLOCKS * BLOCK] = np.random.default_rng(
        seed
    ).integers(0, 256, BLOCKS * BLOCK, dtype=np.uint8)
    return Rows(memory, RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)),)))


def drop_from_page_cache(path: Path) -> None:
    with open(path / "segments" / "00000000.seg", "r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def block_keys(first: int, count: int) -> list[bytes]:
    return [
        number.to_bytes(32, "big") + bytes(4) for number in range(first, first + count)
    ]


@pytest.fixture
def open_store_with_rows(
    open_store: Opener,
    identity: Identity,
) -> Iterator[Callable[..., BlockingStore]]:
    """Open a store with rows: stores read from the first half, loads write to the second half."""
    opened = []

    def open_store_with_rows(
        seed: int = 1, **options: Unpack[StoreSettings]
    ) -> BlockingStore:
        backend = open_store("?capacity=256MiB")
        store = BlockingStore(
            backend,
            identity,
            rows_of(seed),
            StoreOptions(**options),
            url="lmdb:",
        )
        opened.append(store)
        return store

    yield open_store_with_rows
    for store in opened:
        store.close()


def loaded(store: BlockingStore, wanted: Sequence[int]) -> list[bytes | None]:
    """Load blocks by number. Return their bytes in the order of ``wanted``, with None for a
    miss."""
    order = random.Random(len(wanted)).sample(range(BLOCKS, 2 * BLOCKS), len(wanted))
    store.rows.array[BLOCKS:] = 0
    failed = set(store.read([block_keys(number, 1)[0] for number in wanted], order))
    return [
        None if block_keys(number, 1)[0] in failed else store.rows.array[row].tobytes()
        for number, row in zip(wanted, order, strict=True)
    ]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_read_random_jobs_returns_stored_blocks(
    open_store_with_rows: Callable[..., BlockingStore],
    path: Path,
    codec: str,
) -> None:
    store = open_store_with_rows(codec=codec)
    store.rows.array[:BLOCKS, BLOCK // 4 :] = 7  # compressible content for the codecs
    for first in (0, BLOCKS // 2):
        store.put(
            f"r{first}",
            block_keys(first, BLOCKS // 2),
            range(first, first + BLOCKS // 2),
            None,
        )
    store.flush()
    held = [row.tobytes() for row in store.rows.array[:BLOCKS]]
    rng = random.Random(3)
    for _ in range(6):
        first = rng.randrange(BLOCKS // 3)
        wanted: Sequence[int] = range(first, rng.randrange(first + BLOCKS // 2, BLOCKS))
        drop_from_page_cache(path)
        if rng.random() < 0.5:
            wanted = rng.sample(wanted, len(wanted) * 3 // 4)
        assert loaded(store, wanted) == [held[number] for number in wanted]
    assert loaded(store, range(BLOCKS)) == held


def test_read_bad_frame_misses_its_blocks_only(
    open_store_with_rows: Callable[..., BlockingStore],
    path: Path,
) -> None:
    """Two packs in one job, one with a flipped byte: its other frames and all frames of the other
    pack are served."""
    store = open_store_with_rows()
    half = BLOCKS // 2
    for first in (0, half):
        store.put(
            f"r{first}",
            block_keys(first, half),
            range(first, first + half),
            range(half),
        )
        store.flush()
    held = [row.tobytes() for row in store.rows.array[:BLOCKS]]
    with open(path / "segments" / "00000000.seg", "r+b") as file:
        file.seek(3 * FRAME_BYTES + 5)
        byte = file.read(1)
        file.seek(3 * FRAME_BYTES + 5)
        file.write(bytes([byte[0] ^ 1]))
    drop_from_page_cache(path)
    found = loaded(store, range(BLOCKS))
    bad = [number for number in range(BLOCKS) if found[number] is None]
    assert len(bad) == FRAME_BYTES // BLOCK
    assert [found[number] for number in range(BLOCKS) if number not in bad] == [
        held[number] for number in range(BLOCKS) if number not in bad
    ]
    store.refresh()
    assert store.counters.verification_failures == 1


def test_read_pack_overwritten_meanwhile_misses_and_counts_no_damage(
    open_store_with_rows: Callable[..., BlockingStore],
    open_store: Opener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: Path,
) -> None:
    """After the extents of a pack are looked up and before they are read, another engine evicts and
    overwrites it."""
    store = open_store_with_rows()
    store.put("r", block_keys(0, BLOCKS), range(BLOCKS), range(BLOCKS))
    store.flush()
    drop_from_page_cache(path)
    other = open_store()
    before = [table.pack_id for table in other.changes(store.namespace, None).added]
    new = [
        sample_pack(store.namespace, seed, blocks=BLOCKS // 4, block_bytes=BLOCK)
        for seed in range(8)
    ]
    preadv, overwritten, overwriting = os.preadv, list[bool](), threading.Lock()

    def overwrite_first(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with overwriting:
            if not overwritten:
                overwritten.append(True)
                other.commit(store.namespace, CommitBatch(deletions=before))
                # in what was reserved for it
                other.commit(store.namespace, CommitBatch(new[:4]))
                other.commit(store.namespace, CommitBatch(new[4:]))
        return preadv(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", overwrite_first)
        assert loaded(store, range(BLOCKS)) == [None] * BLOCKS
    store.refresh()
    assert store.counters.verification_failures == 0
    assert store.counters.missed_blocks == BLOCKS
    assert "do not verify" not in caplog.text
    kept = {table.pack_id for table in other.changes(store.namespace, None).added}
    assert kept == {pack.pack_id for pack in new}


def test_read_one_failing_disk_call_misses_its_blocks_only(
    open_store_with_rows: Callable[..., BlockingStore],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store_with_rows()
    store.put("r", block_keys(0, BLOCKS), range(BLOCKS), range(BLOCKS))
    store.flush()
    drop_from_page_cache(path)
    held = [row.tobytes() for row in store.rows.array[:BLOCKS]]
    preadv, calls = os.preadv, []

    def fails_once(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails_once)
        found = loaded(store, range(BLOCKS))
    assert 0 < found.count(None) < BLOCKS
    assert all(
        block in (None, stored) for block, stored in zip(found, held, strict=True)
    )
    assert store.counters.verification_failures == 0
    assert loaded(store, range(BLOCKS)) == held


def test_close_threads_during_cancelled_read_waits_for_read(
    open_store_with_rows: Callable[..., BlockingStore],
) -> None:
    """No caller waits for the job's outcome. Closing waits for the reads, so no thread writes to
    the rows later."""
    store = open_store_with_rows()
    store.put("r", block_keys(0, BLOCKS), range(BLOCKS), None)
    store.flush()
    running, ending = store.view.threads, StoreThreads(2)
    store.view.threads = ending

    async def cancel_read() -> None:
        keys, block_ids = block_keys(0, BLOCKS), range(BLOCKS, 2 * BLOCKS)
        reading = asyncio.create_task(store.store.read(keys, block_ids))
        await asyncio.sleep(0)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        ending.close()

    asyncio.run(cancel_read())
    assert np.array_equal(store.rows.array[BLOCKS:], store.rows.array[:BLOCKS])
    store.view.threads = running
