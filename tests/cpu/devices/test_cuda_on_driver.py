"""The CUDA strategy with a driver that needs no GPU: the driver call, addresses, order and
failures."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from persistkv.base import TransferResult
from persistkv.cpu.devices.base import Direction
from persistkv.cpu.devices.cuda import (
    SOURCE_IN_STREAM_ORDER,
    CopyAttributes,
    CopyBatch,
    CUDACopyEngine,
    DriverBatchCopier,
    MemoryLocation,
    PageCopier,
)
from persistkv.cpu.layout import KVMemory, PageCopies
from persistkv.cpu.shared_offload_region import SharedOffloadRegion, pin_mmap_region
from tests.cpu.devices.driver import Driver, Stream

PAGE = 4096
NUM_ROWS = 10


def copies(
    blocks: list[int],
    sub_blocks: list[int],
    page: int = PAGE,
) -> list[PageCopies]:
    return [PageCopies(0, page, np.array(blocks), np.array(sub_blocks))]


def make_pages(count: int = 16) -> torch.Tensor:
    return torch.randint(
        -128,
        128,
        (count, PAGE),
        dtype=torch.int8,
        generator=torch.Generator().manual_seed(0),
    )


@pytest.fixture
def region(shared_memory: str) -> Iterator[SharedOffloadRegion]:
    region = SharedOffloadRegion(
        "engine", NUM_ROWS, 0, 1, PAGE, directory=shared_memory
    )
    yield region
    region.cleanup()


def test_copy_attributes_layout_matches_cuda_header(driver: Driver) -> None:
    expected = [
        ctypes.sizeof(MemoryLocation),
        MemoryLocation.type.offset,
        MemoryLocation.id.offset,
        ctypes.sizeof(CopyAttributes),
        CopyAttributes.source_access_order.offset,
        CopyAttributes.source_hint.offset,
        CopyAttributes.target_hint.offset,
        CopyAttributes.flags.offset,
        np.dtype(np.int64).itemsize,
        SOURCE_IN_STREAM_ORDER,
    ]
    assert driver.interface == expected


def test_cuda_engine_scattered_pages_reach_their_rows_in_three_copies(
    driver: Driver,
) -> None:
    pages, rows = make_pages(), torch.zeros((NUM_ROWS, PAGE), dtype=torch.int8)
    engine = CUDACopyEngine(
        KVMemory((pages,), (rows,), 1),
        Direction.STORE,
        DriverBatchCopier(driver.library),
    )
    assert engine.submit(1, copies([3, 4, 9, 0], [5, 6, 7, 1]))
    assert engine.get_finished() == [
        TransferResult(1, success=True, num_bytes=4 * PAGE, seconds=1e-3)
    ]
    assert torch.equal(rows[[5, 6, 7, 1]], pages[[3, 4, 9, 0]])
    assert not rows[[0, 2, 3, 4, 8, 9]].any()
    assert driver.take_num_copies() == 3


def test_batch_copier_null_address_raises_with_index_of_copy(driver: Driver) -> None:
    pages, rows = make_pages(), torch.zeros((NUM_ROWS, PAGE), dtype=torch.int8)
    sources = np.array([pages.data_ptr(), 0, pages.data_ptr()])
    targets = rows.data_ptr() + PAGE * np.array([0, 2, 4])
    batch = CopyBatch.of_pages(targets, sources, PAGE, rows, pages)
    with pytest.raises(
        RuntimeError,
        match=f"error 1: copy 1 of 3 copies, 4096 bytes from 0x0 to {targets[1]:#x}",
    ):
        DriverBatchCopier(driver.library).copy(batch, torch.cuda.Stream())  # type: ignore[no-untyped-call]


def test_batch_copier_rejected_stream_raises_without_index(driver: Driver) -> None:
    pages, rows = make_pages(), torch.zeros((NUM_ROWS, PAGE), dtype=torch.int8)
    batch = CopyBatch.of_pages(
        np.array([rows.data_ptr()]), np.array([pages.data_ptr()]), PAGE, rows, pages
    )
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.cuda_stream = 0
    with pytest.raises(
        RuntimeError, match=r"cuMemcpyBatchAsync failed with error 1: 1 copies$"
    ):
        DriverBatchCopier(driver.library).copy(batch, stream)


@pytest.mark.parametrize(
    "order",
    [list(range(NUM_ROWS)), [5, 6, 2, 3, 9, 0, 1, 7, 8, 4]],
    ids=["in order", "mixed"],
)
def test_cuda_engine_small_registrations_no_copy_spans_two(
    driver: Driver,
    region: SharedOffloadRegion,
    order: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SharedOffloadRegion, "registration_bytes", 3 * PAGE + 1)
    assert pin_mmap_region(region, driver)
    pages = make_pages()
    original = pages.clone()
    rows = region.create_cell_view()
    memory = KVMemory((pages,), (rows,), 1, region.rows_per_registration)
    copier = DriverBatchCopier(driver.library)
    store, load = (CUDACopyEngine(memory, direction, copier) for direction in Direction)
    assert store.submit(1, copies(list(range(3, 3 + NUM_ROWS)), order))
    assert torch.equal(rows[order], original[3 : 3 + NUM_ROWS])
    pages.zero_()
    assert load.submit(2, copies(list(range(3, 3 + NUM_ROWS)), order))
    assert torch.equal(pages[3 : 3 + NUM_ROWS], original[3 : 3 + NUM_ROWS])
    driver.take_num_copies()
    assert store.submit(3, copies([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]))
    assert driver.take_num_copies() == 2


def test_submit_copies_run_after_caller_and_between_events(driver: Driver) -> None:
    class Recorded(PageCopier):
        def copy(self, batch: CopyBatch, stream: torch.cuda.Stream) -> None:
            stream.log.append("copy")  # type: ignore[attr-defined]

    memory = KVMemory(
        (make_pages(),), (torch.zeros((NUM_ROWS, PAGE), dtype=torch.int8),), 1
    )
    engine = CUDACopyEngine(memory, Direction.LOAD, Recorded())
    assert engine.submit(1, copies([1], [2]) + copies([2], [3], page=100))
    assert Stream.log == [
        "wait for the caller's stream",
        "record",
        "copy",
        "copy",
        "record",
    ]


def test_submit_rejected_copy_writes_nothing_and_next_job_runs(
    driver: Driver,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages, rows = make_pages(), torch.zeros((NUM_ROWS, PAGE), dtype=torch.int8)
    # only a part of row 2 is registered
    assert driver.cudaHostRegister(rows.data_ptr(), 2 * PAGE + 100, 0) == 0
    try:
        engine = CUDACopyEngine(
            KVMemory((pages,), (rows,), 1),
            Direction.STORE,
            DriverBatchCopier(driver.library),
        )
        assert not engine.submit(1, copies([1], [2]))
        assert Stream.log[-1] == "synchronize"
        assert "store job 1 could not be started" in caplog.text
        assert engine.submit(2, copies([1], [1]))
        assert [result.job_id for result in engine.get_finished()] == [2]
        assert torch.equal(rows[1], pages[1])
        assert not rows[2].any()
    finally:
        assert driver.cudaHostUnregister(rows.data_ptr()) == 0


def test_cuda_engine_broken_device_fails_jobs_without_raising(
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    streams: list[Stream] = []

    class Observed(Stream):
        def __init__(self, device: torch.device | None = None) -> None:
            super().__init__(device)
            streams.append(self)

        def wait_stream(self, other: Stream) -> None:
            if self.broken:
                raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "Stream", Observed)
    memory = KVMemory(
        (make_pages(),), (torch.zeros((NUM_ROWS, PAGE), dtype=torch.int8),), 1
    )
    engine = CUDACopyEngine(memory, Direction.STORE, DriverBatchCopier(driver.library))
    assert engine.submit(1, copies([1], [2]))
    assert engine.submit(2, copies([2], [3]))
    streams[0].broken = True
    engine.wait({1, 2})
    assert engine.get_finished() == [
        TransferResult(1, success=False),
        TransferResult(2, success=False),
    ]
    assert engine.get_finished() == []
    assert not engine.submit(3, copies([1], [2]))
    engine.shutdown()
    assert "store job 1 failed" in caplog.text
