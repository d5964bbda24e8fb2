"""The region: geometry, views that share its bytes, and giving it back in every order."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from persistkv.cpu.shared_offload_region import SharedOffloadRegion, row_stride_bytes
from persistkv.errors import ConfigurationError, RegionError

CELL = 3000
ROWS = 10
STRIDE = 8192  # two cells of 3000 bytes

MakeRegion = Callable[..., SharedOffloadRegion]


@pytest.fixture
def make_region(shared_memory: str) -> MakeRegion:
    def make(rank: int | None = 0, num_workers: int = 2, total: int = ROWS * STRIDE) -> SharedOffloadRegion:
        return SharedOffloadRegion(
            "engine", total, ROWS, rank, num_workers, CELL, directory=shared_memory, timeout_s=0.2
        )

    return make


def test_the_stride_is_a_multiple_of_4_kib() -> None:
    assert [row_stride_bytes(1, size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]
    assert row_stride_bytes(8, 512) == 4096


def test_cells_of_workers_interleave_and_the_scheduler_sees_all(make_region: MakeRegion) -> None:
    workers = [make_region(rank) for rank in range(2)]
    scheduler = make_region(None)
    view = scheduler.create_kv_memoryview()
    assert (view.shape, view.format, view.readonly) == ((ROWS, STRIDE), "B", False)
    for rank, worker in enumerate(workers):
        first, rest = worker.create_next_view(1000), worker.create_next_view(2000)
        assert (first.shape, first.stride(), first.dtype) == ((ROWS, 1000), (STRIDE, 1), torch.int8)
        first[3] = rank + 1
        rest[3] = rank + 11
    row = np.asarray(view)[3]
    expected = np.repeat(np.array([1, 11, 2, 12, 0], np.uint8), [1000, 2000, 1000, 2000, 2192])
    assert np.array_equal(row, expected)
    row[0] = 77
    assert workers[0].create_kv_memoryview()[3, 0] == 77
    del row, first, rest
    view.release()
    for region in (*workers, scheduler):
        region.cleanup()


def test_a_cell_is_not_overrun(make_region: MakeRegion) -> None:
    region = make_region()
    region.create_next_view(2000)
    for size in (1001, 0, -1):
        with pytest.raises(ConfigurationError, match=r"page_size: .* 1 to 1000 bytes"):
            region.create_next_view(size)
    region.create_next_view(1000)
    region.cleanup()


def test_the_scheduler_has_no_cell(make_region: MakeRegion) -> None:
    region = make_region(None)
    with pytest.raises(ConfigurationError, match="rank"):
        region.create_next_view(1)
    region.cleanup()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"total": ROWS * STRIDE - 1}, "total_size_bytes"),
        ({"rank": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"num_workers": 0}, "num_workers"),
    ],
)
def test_numbers_that_do_not_agree(make_region: MakeRegion, wrong: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{field}: "):
        make_region(**wrong)


def test_what_others_wrote_survives_that_one_more_comes(make_region: MakeRegion) -> None:
    first = make_region(None)
    view = first.create_kv_memoryview()
    np.asarray(view)[:] = 42
    second = make_region(1)
    assert np.asarray(view).min() == 42
    view.release()
    second.cleanup()
    first.cleanup()


def test_another_process_sees_the_same_bytes(make_region: MakeRegion, shared_memory: str) -> None:
    region = make_region(0)
    code = f"""if True:
        from persistkv.cpu.shared_offload_region import SharedOffloadRegion
        region = SharedOffloadRegion("engine", {ROWS * STRIDE}, {ROWS}, 1, 2, {CELL}, directory={shared_memory!r})
        region.create_next_view({CELL})[:] = 9
        region.cleanup()
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    with region.create_kv_memoryview() as view:
        assert view[ROWS - 1, CELL] == 9
        assert view[ROWS - 1, CELL - 1] == 0
    region.cleanup()


def test_cleanup_is_idempotent_and_leaves_nothing(make_region: MakeRegion) -> None:
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
        lambda: region.create_next_view(1),
    ):
        with pytest.raises(RegionError, match="cleaned up"):
            use()


def test_memory_outlives_cleanup_while_it_is_held(make_region: MakeRegion, caplog: pytest.LogCaptureFixture) -> None:
    region = make_region()
    tensor, view = region.create_next_view(CELL), region.create_kv_memoryview()
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


def test_a_failed_construction_leaves_nothing(
    make_region: MakeRegion, shared_memory: str, monkeypatch: pytest.MonkeyPatch
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


def test_a_region_of_another_size_is_not_joined(make_region: MakeRegion, shared_memory: str) -> None:
    region = make_region()
    with pytest.raises(RegionError, match="another geometry"):
        SharedOffloadRegion("engine", STRIDE, 1, 0, 2, CELL, directory=shared_memory, timeout_s=0.1)
    region.cleanup()


def test_it_is_unpinned_at_cleanup(make_region: MakeRegion) -> None:
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
    assert region.pin(runtime)
    assert runtime.registered == {address}
    region.cleanup()
    assert not region.is_pinned
    assert not runtime.registered
