"""SharedOffloadRegion: geometry, views that share its bytes, pinning and cleanup."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from persistkv.cpu.devices.base import Direction
from persistkv.cpu.devices.cpu import CPUCopyEngine
from persistkv.cpu.layout import KVMemory, PageCopies
from persistkv.cpu.shared_offload_region import (
    SharedOffloadRegion,
    pin_mmap_region,
    row_stride_bytes,
)
from persistkv.errors import ConfigurationError, RegionError

CELL = 3000
ROWS = 10
STRIDE = 8192  # two cells of 3000 bytes

MakeRegion = Callable[..., SharedOffloadRegion]


@pytest.fixture
def make_region(shared_memory: str) -> MakeRegion:
    def make(
        rank: int | None = 0,
        num_workers: int = 2,
    ) -> SharedOffloadRegion:
        return SharedOffloadRegion(
            "engine",
            ROWS,
            rank,
            num_workers,
            CELL,
            directory=shared_memory,
            timeout_s=0.2,
        )

    return make


def test_row_stride_bytes_any_size_rounds_up_to_4_kib() -> None:
    assert [row_stride_bytes(1, size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]
    assert row_stride_bytes(8, 512) == 4096


def test_region_heads_split_over_two_workers_gives_same_rows_as_one(
    shared_memory: str,
) -> None:
    """A page stores its heads consecutively, so the cells of two workers are the halves of one
    worker's page."""
    heads, head_bytes, blocks = 4, 1024, ROWS
    kv = torch.randint(-128, 128, (blocks, heads, head_bytes), dtype=torch.int8)
    order = torch.randperm(blocks)
    rows = []
    for num_workers in (1, 2):
        part = heads // num_workers
        regions = [
            SharedOffloadRegion(
                f"engine-{num_workers}",
                blocks,
                rank,
                num_workers,
                part * head_bytes,
                directory=shared_memory,
            )
            for rank in range(num_workers)
        ]
        for rank, region in enumerate(regions):
            pages = (
                kv[:, rank * part : (rank + 1) * part].reshape(blocks, -1).contiguous()
            )
            memory = KVMemory((pages,), (region.create_cell_view(),), 1)
            stores = CPUCopyEngine(memory, Direction.STORE)
            assert stores.copy_now(
                1, [PageCopies(0, part * head_bytes, np.arange(blocks), order.numpy())]
            ).success
            del memory, stores
        view = regions[0].create_kv_memoryview()
        rows.append(np.array(view))
        view.release()
        for region in regions:
            region.cleanup()
    assert rows[0].any()
    assert np.array_equal(rows[0], rows[1])


def test_region_two_workers_interleave_cells_and_scheduler_sees_both(
    make_region: MakeRegion,
) -> None:
    workers = [make_region(rank) for rank in range(2)]
    scheduler = make_region(None)
    view = scheduler.create_kv_memoryview()
    assert (view.shape, view.format, view.readonly) == ((ROWS, STRIDE), "B", False)
    for rank, worker in enumerate(workers):
        cell = worker.create_cell_view()
        assert (cell.shape, cell.stride(), cell.dtype) == (
            (ROWS, CELL),
            (STRIDE, 1),
            torch.int8,
        )
        cell[3, :1000] = rank + 1
        cell[3, 1000:] = rank + 11
    row = np.asarray(view)[3]
    expected = np.repeat(
        np.array([1, 11, 2, 12, 0], np.uint8), [1000, 2000, 1000, 2000, 2192]
    )
    assert np.array_equal(row, expected)
    row[0] = 77
    assert workers[0].create_kv_memoryview()[3, 0] == 77
    del row, cell
    view.release()
    for region in (*workers, scheduler):
        region.cleanup()


def test_create_cell_view_scheduler_without_rank_raises(
    make_region: MakeRegion,
) -> None:
    region = make_region(None)
    with pytest.raises(ConfigurationError, match="rank"):
        region.create_cell_view()
    region.cleanup()


@pytest.mark.parametrize("rank", [2, -1])
def test_region_rank_of_no_worker_raises(make_region: MakeRegion, rank: int) -> None:
    with pytest.raises(ConfigurationError, match=r"^rank: "):
        make_region(rank)


def test_region_opened_again_keeps_written_bytes(make_region: MakeRegion) -> None:
    first = make_region(None)
    view = first.create_kv_memoryview()
    np.asarray(view)[:] = 42
    second = make_region(1)
    assert np.asarray(view).min() == 42
    view.release()
    second.cleanup()
    first.cleanup()


def test_region_written_by_other_process_shows_its_bytes(
    make_region: MakeRegion,
    shared_memory: str,
) -> None:
    region = make_region(0)
    code = f"""if True:
        from persistkv.cpu.shared_offload_region import SharedOffloadRegion
        region = SharedOffloadRegion("engine", {ROWS}, 1, 2, {CELL}, directory={shared_memory!r})
        region.create_cell_view()[:] = 9
        region.cleanup()
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    with region.create_kv_memoryview() as view:
        assert view[ROWS - 1, CELL] == 9
        assert view[ROWS - 1, CELL - 1] == 0
    region.cleanup()


def test_cleanup_called_twice_frees_all_and_later_use_raises(
    make_region: MakeRegion,
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    region = make_region()
    path = Path(region.mmap_path)
    assert path.name == "persistkv_offload_engine.mmap"
    assert os.fstat(region.fd).st_size == ROWS * STRIDE
    region.cleanup()
    region.cleanup()
    assert not path.exists()
    assert set(os.listdir("/proc/self/fd")) == before
    for use in (
        lambda: region.fd,
        lambda: region.address,
        region.create_kv_memoryview,
        region.create_cell_view,
    ):
        with pytest.raises(RegionError, match="cleaned up"):
            use()


def test_cleanup_views_in_use_warns_and_keeps_memory_mapped(
    make_region: MakeRegion,
    caplog: pytest.LogCaptureFixture,
) -> None:
    region = make_region()
    tensor, view = region.create_cell_view(), region.create_kv_memoryview()
    tensor[:] = 5
    with caplog.at_level(logging.WARNING):
        region.cleanup()
    assert "still in use" in caplog.text
    assert not Path(region.mmap_path).exists()
    assert int(tensor.sum()) == 5 * CELL * ROWS
    assert view[0, 0] == 5
    mapped = region.mmap_path
    view.release()
    del tensor, view
    gc.collect()
    assert mapped not in Path("/proc/self/maps").read_text()


def test_region_prefault_fails_leaves_no_file_or_descriptor(
    make_region: MakeRegion,
    shared_memory: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise MemoryError("no more")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("persistkv.cpu.shared_offload_region.prefault", refuse)
    with pytest.raises(MemoryError, match="no more") as caught:
        make_region()
    del caught
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before
    assert os.listdir(shared_memory) == []
    monkeypatch.undo()
    make_region().cleanup()


def test_region_other_geometry_under_same_name_raises(
    make_region: MakeRegion,
    shared_memory: str,
) -> None:
    region = make_region()
    with pytest.raises(RegionError, match="another geometry"):
        SharedOffloadRegion(
            "engine", 1, 0, 2, CELL, directory=shared_memory, timeout_s=0.1
        )
    region.cleanup()


def test_cleanup_pinned_region_unregisters_memory(make_region: MakeRegion) -> None:
    class Runtime:
        def __init__(self) -> None:
            self.registered: set[int] = set()

        def cudaHostRegister(self, address: int, size: int, flags: int, /) -> int:
            self.registered.add(address)
            return 0

        def cudaHostUnregister(self, address: int, /) -> int:
            self.registered.remove(address)
            return 0

    runtime = Runtime()
    region = make_region()
    address = region.address
    assert pin_mmap_region(region, runtime)
    assert runtime.registered == {address}
    region.cleanup()
    assert not region.is_pinned
    assert not runtime.registered


# Pinning


class Runtime:
    """CUDA runtime that counts registrations; from call ``refuse_from`` on, each returns the error
    ``code``."""

    def __init__(self, refuse_from: int = 1000, code: int = 2) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.refuse_from = refuse_from
        self.code = code

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> int:
        self.calls += 1
        if self.calls >= self.refuse_from:
            return self.code
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int, /) -> int:
        return 0 if self.registered.pop(address, None) else 713


@pytest.fixture
def region(shared_memory: str) -> Iterator[SharedOffloadRegion]:
    region = SharedOffloadRegion("engine", ROWS, 0, 1, STRIDE, directory=shared_memory)
    yield region
    region.cleanup()


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedOffloadRegion, "registration_bytes", 3 * STRIDE + 1)


@pytest.mark.usefixtures("small_ranges")
def test_pin_large_region_registers_bounded_ranges_of_whole_rows(
    region: SharedOffloadRegion,
) -> None:
    runtime = Runtime()
    assert pin_mmap_region(region, runtime)
    assert region.is_pinned
    offsets = {
        address - region.address: size for address, size in runtime.registered.items()
    }
    assert offsets == {
        0: 3 * STRIDE,
        3 * STRIDE: 3 * STRIDE,
        6 * STRIDE: 3 * STRIDE,
        9 * STRIDE: STRIDE,
    }
    assert pin_mmap_region(region, runtime)
    assert runtime.calls == 4


@pytest.mark.usefixtures("small_ranges")
def test_pin_rejected_range_unregisters_all_and_warns_once(
    region: SharedOffloadRegion,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = Runtime(refuse_from=3)
    assert not pin_mmap_region(region, runtime)
    assert not region.is_pinned
    assert not runtime.registered
    (record,) = caplog.records
    assert "CUDA error 2" in record.getMessage()
    assert f"at offset {6 * STRIDE}" in record.getMessage()


@pytest.mark.usefixtures("small_ranges")
def test_cleanup_unregister_fails_logs_each_range(
    region: SharedOffloadRegion,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = Runtime()
    pin_mmap_region(region, runtime)
    runtime.registered.clear()
    region.cleanup()
    assert len(caplog.records) == 4
    assert "error 713" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pin_no_gpu_returns_false_without_warning(
    region: SharedOffloadRegion,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not pin_mmap_region(region)
    assert not caplog.records


@pytest.mark.cuda
@pytest.mark.usefixtures("small_ranges")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pin_cuda_device_pins_views(region: SharedOffloadRegion) -> None:
    assert pin_mmap_region(region)
    assert region.create_cell_view().is_pinned()


@pytest.mark.cuda
@pytest.mark.usefixtures("small_ranges")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pin_rejected_by_cuda_warns_and_cuda_stays_usable(
    region: SharedOffloadRegion,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = region.address + 6 * STRIDE
    assert int(runtime.cudaHostRegister(address, STRIDE, 0)) == 0
    try:
        assert not pin_mmap_region(region)
        assert len(caplog.records) == 1
        assert int(torch.ones(3, device="cuda").sum()) == 3
    finally:
        assert int(runtime.cudaHostUnregister(address)) == 0
