"""The CUDA strategy on a real device: bytes, order, failures, pinned regions, shutdown."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from persistkv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from persistkv.cpu.devices.base import Direction
from persistkv.cpu.devices.cuda import (
    CUDACopyEngine,
    DriverBatchCopier,
    PageCopier,
    TorchCopier,
    choose_copier,
)
from persistkv.cpu.gpu_worker import CpuGpuOffloadingHandlers
from persistkv.cpu.layout import KVMemory, PageCopies
from persistkv.cpu.manager import CPULoadStoreSpec
from persistkv.cpu.shared_offload_region import SharedOffloadRegion, pin_mmap_region
from persistkv.memory.pages import HUGE_PAGE_BYTES, use_huge_pages

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
LONG = 1_000_000_000  # cycles: about half a second
COPIERS: dict[str, Callable[[], PageCopier]] = {
    "batch": DriverBatchCopier,
    "single": TorchCopier,
}


@pytest.fixture(params=COPIERS)
def copier(request: pytest.FixtureRequest) -> PageCopier:
    try:
        return COPIERS[request.param]()
    except AttributeError:
        pytest.skip("the driver is older than CUDA 12.8")


def sleep(cycles: int = LONG) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def random_bytes(
    rows: int,
    columns: int,
    device: torch.device | str = DEVICE,
) -> torch.Tensor:
    return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)


def pinned_memory(
    num_blocks: int,
    num_rows: int,
    page: int,
    factor: int = 1,
    slack: int = 0,
) -> KVMemory:
    """Return one KV tensor whose pages begin ``slack`` bytes into its blocks, and rows with gaps of
    the same size."""
    pages = random_bytes(num_blocks, page + slack)[:, slack:]
    rows = torch.zeros(
        (num_rows, factor * page + slack), dtype=torch.int8, pin_memory=True
    )[:, slack:]
    return KVMemory((pages,), (rows,), factor)


def run(engine: CUDACopyEngine, copies: list[PageCopies]) -> None:
    assert engine.submit(1, copies)
    engine.wait({1})
    assert [result.success for result in engine.get_finished()] == [True]


@pytest.fixture
def region(shared_memory: str) -> Iterator[SharedOffloadRegion]:
    """Region of 16 rows of 64 KiB."""
    region = SharedOffloadRegion("engine", 16, 0, 1, 1 << 16, directory=shared_memory)
    yield region
    region.cleanup()


# Bytes


@pytest.mark.parametrize("slack", [0, 3], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize(
    "page",
    [
        1,
        33,
        512,
        4 << 10,
        16 << 10,
        64 << 10,
        256 << 10,
        512 << 10,
        1 << 20,
        2 << 20,
        (2 << 20) + 1,
    ],
)
def test_cuda_engine_any_page_size_copies_same_bytes(
    copier: PageCopier,
    page: int,
    shuffled: bool,
    slack: int,
) -> None:
    factor, count = 2, 24
    memory = pinned_memory(40, 20, page, factor, slack)
    original = memory.pages[0].clone()
    draw = np.random.default_rng(page)
    blocks = draw.permutation(40)[:count] if shuffled else np.arange(5, 5 + count)
    places = (
        draw.permutation(20 * factor)[:count] if shuffled else np.arange(3, 3 + count)
    )
    copies = [PageCopies(0, page, blocks, places)]
    run(CUDACopyEngine(memory, Direction.STORE, copier), copies)
    expected = torch.zeros((20, factor, page), dtype=torch.int8)
    for block, place in zip(blocks.tolist(), places.tolist(), strict=True):
        expected[place // factor, place % factor] = original[block].cpu()
    assert torch.equal(memory.rows[0].reshape(20, factor, page), expected)
    memory.pages[0].fill_(7)
    run(CUDACopyEngine(memory, Direction.LOAD, copier), copies)
    restored = torch.full_like(original, 7)
    restored[blocks] = original[blocks]
    assert torch.equal(memory.pages[0], restored)


def test_cuda_engine_thousands_of_pages_restores_every_tensor(
    copier: PageCopier,
) -> None:
    tensors = [pinned_memory(6000, 5000, page) for page in (4096, 512, 96)]
    memory = KVMemory(
        tuple(part.pages[0] for part in tensors),
        tuple(part.rows[0] for part in tensors),
        1,
    )
    original = [pages.clone() for pages in memory.pages]
    draw = np.random.default_rng(1)
    blocks, rows = draw.permutation(6000)[:5000], draw.permutation(5000)
    copies = [
        PageCopies(index, pages.shape[1], blocks, rows)
        for index, pages in enumerate(memory.pages)
    ]
    run(CUDACopyEngine(memory, Direction.STORE, copier), copies)
    for pages in memory.pages:
        pages.zero_()
    run(CUDACopyEngine(memory, Direction.LOAD, copier), copies)
    for pages, first in zip(memory.pages, original, strict=True):
        assert torch.equal(pages[blocks], first[blocks])


def test_choose_copier_pinned_memory_returns_batch_copier() -> None:
    try:
        DriverBatchCopier()
    except AttributeError:
        pytest.skip("the driver is older than CUDA 12.8")
    assert isinstance(choose_copier(DEVICE, pinned=True), DriverBatchCopier)


# Order


def test_cuda_engine_pending_kernels_finish_before_store_and_load(
    copier: PageCopier,
) -> None:
    memory = pinned_memory(64, 64, 1 << 16)
    pages = memory.pages[0]
    store, load = (CUDACopyEngine(memory, direction, copier) for direction in Direction)
    copies = [PageCopies(0, 1 << 16, np.arange(64), np.arange(63, -1, -1))]
    torch.cuda.synchronize()
    sleep()
    pages.fill_(7)
    run(store, copies)
    assert int(memory.rows[0].min()) == int(memory.rows[0].max()) == 7
    pages.fill_(1)
    torch.cuda.synchronize()
    sleep()
    read = pages.clone()
    run(load, copies)
    torch.cuda.synchronize()
    assert int(read.min()) == int(read.max()) == 1
    assert int(pages.min()) == int(pages.max()) == 7


def test_cuda_engine_pending_copies_do_not_delay_kernels(copier: PageCopier) -> None:
    memory = pinned_memory(64, 64, 1 << 16)
    store, load = (CUDACopyEngine(memory, direction, copier) for direction in Direction)
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    values = torch.zeros(1 << 20, device=DEVICE)
    values += 1  # the first launch of a kernel may wait for the device
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        sleep()
        assert store.submit(1, [PageCopies(0, 1 << 16, np.arange(32), np.arange(32))])
        assert load.submit(
            2, [PageCopies(0, 1 << 16, np.arange(32, 64), np.arange(32, 64))]
        )
    values += 1
    torch.cuda.current_stream().synchronize()
    assert store.get_finished() == load.get_finished() == []
    store.wait({1})
    load.wait({2})
    results = [*store.get_finished(), *load.get_finished()]
    assert [(result.job_id, result.success) for result in results] == [
        (1, True),
        (2, True),
    ]
    assert all(
        0 < result.seconds < 0.2 for result in results
    )  # the time of the copies, without the wait for the caller's stream


def test_cuda_engine_many_jobs_finish_in_submission_order(copier: PageCopier) -> None:
    memory = pinned_memory(64, 2, 1 << 16)
    engine = CUDACopyEngine(memory, Direction.STORE, copier)
    for job in range(64):
        assert engine.submit(
            job, [PageCopies(0, 1 << 16, np.array([job]), np.array([job % 2]))]
        )
    ended: list[int] = []
    while len(ended) < 64:
        ended += [result.job_id for result in engine.get_finished()]
    assert ended == list(range(64))
    assert torch.equal(memory.rows[0], memory.pages[0][62:].cpu())


def test_submit_thread_without_cuda_context_succeeds(copier: PageCopier) -> None:
    memory = pinned_memory(4, 4, 4096)
    engine = CUDACopyEngine(memory, Direction.STORE, copier)
    started: list[bool] = []
    copies = [PageCopies(0, 4096, np.arange(4), np.array([2, 0, 3, 1]))]
    thread = threading.Thread(target=lambda: started.append(engine.submit(1, copies)))
    thread.start()
    thread.join()
    engine.wait({1})
    assert started == [True]
    assert torch.equal(memory.rows[0][[2, 0, 3, 1]], memory.pages[0].cpu())


# Failures


def test_submit_null_address_fails_and_next_job_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Misdirected(DriverBatchCopier):
        def copy(self, batch, stream):  # type: ignore[no-untyped-def]
            if len(batch.sizes) > 2:
                batch.sources[1] = 0
            super().copy(batch, stream)

    memory = pinned_memory(16, 16, 4096)
    engine = CUDACopyEngine(memory, Direction.STORE, Misdirected())
    assert not engine.submit(
        1, [PageCopies(0, 4096, np.array([1, 3, 5]), np.array([1, 3, 5]))]
    )
    assert "cuMemcpyBatchAsync failed with error" in caplog.text
    run(engine, [PageCopies(0, 4096, np.array([2]), np.array([9]))])
    assert torch.equal(memory.rows[0][9], memory.pages[0][2].cpu())


def in_new_process(body: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process, because its errors may abort the process or break the CUDA
    context."""
    program = "from tests.cpu.devices.test_cuda import *\n" + body
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=45,
        check=False,
    )


def test_submit_unregistered_memory_copies_or_fails_and_next_job_runs() -> None:
    ended = in_new_process(
        """
good = pinned_memory(16, 16, 4096)
bad = KVMemory(good.pages, (torch.zeros((16, 4096), dtype=torch.int8),), 1)
copies = [PageCopies(0, 4096, np.array([1, 3]), np.array([1, 3]))]
engine = CUDACopyEngine(bad, Direction.STORE, DriverBatchCopier())
if engine.submit(1, copies):
    engine.wait({1})
    assert [result.success for result in engine.get_finished()] == [True]
    assert torch.equal(bad.rows[0][[1, 3]], good.pages[0][[1, 3]].cpu())
    print("copied")
else:
    print("refused")
run(CUDACopyEngine(good, Direction.STORE, DriverBatchCopier()), copies)
assert torch.equal(good.rows[0][[1, 3]], good.pages[0][[1, 3]].cpu())
"""
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() in ("copied", "refused")


def test_handlers_failed_kernel_fails_jobs_and_shutdown_frees_region(
    shared_memory: str,
) -> None:
    ended = in_new_process(
        f"""
region = SharedOffloadRegion("engine", 16, 0, 1, 1 << 16, directory={shared_memory!r})
pages = random_bytes(16, 1 << 16)
caches = CanonicalKVCaches([CanonicalKVCacheTensor(pages, 1 << 16)], [[CanonicalKVCacheRef(0, 1 << 16)]])
handlers = CpuGpuOffloadingHandlers(caches, 1, region)
store = handlers.gpu_to_cpu_handler
spec = GPULoadStoreSpec([1, 2], [2], [0]), CPULoadStoreSpec([3, 4])
assert store.transfer_async(1, spec)
store.wait({{1}})
assert [result.success for result in store.get_finished()] == [True]
torch.zeros(4, device=DEVICE)[torch.tensor([4], device=DEVICE)]  # an assertion in a kernel
assert store.transfer_async(2, spec) in (True, False)
store.wait({{2}})
assert not any(result.success for result in store.get_finished())
assert not store.transfer_async(3, spec)
handlers.shutdown()
region.cleanup()
print("released")
"""
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "released"
    assert os.listdir(shared_memory) == []


# Pinned regions


def test_cleanup_pinned_region_unpins_and_new_region_pins(shared_memory: str) -> None:
    for _ in range(2):
        region = SharedOffloadRegion(
            "engine", 4, 0, 1, 1 << 16, directory=shared_memory
        )
        view = region.create_cell_view()
        assert not view.is_pinned()
        assert pin_mmap_region(region)
        assert view.is_pinned()
        region.cleanup()  # the view keeps the memory mapped
        assert not view.is_pinned()
        del view
    assert int(torch.ones(3, device=DEVICE).sum()) == 3


def test_cuda_engine_copies_across_registrations_succeed(
    region: SharedOffloadRegion,
    copier: PageCopier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SharedOffloadRegion, "registration_bytes", 3 << 16)
    assert pin_mmap_region(region)
    pages = random_bytes(16, 1 << 16)
    original = pages.clone()
    rows = region.create_cell_view()
    memory = KVMemory((pages,), (rows,), 1, region.rows_per_registration)
    copies = [PageCopies(0, 1 << 16, np.arange(16), np.arange(16))]
    run(CUDACopyEngine(memory, Direction.STORE, copier), copies)
    assert torch.equal(rows, original.cpu())
    pages.zero_()
    run(CUDACopyEngine(memory, Direction.LOAD, copier), copies)
    assert torch.equal(pages, original)


def test_cuda_engine_rows_in_huge_pages_are_pinned_and_copied(
    shared_memory: str,
    copier: PageCopier,
) -> None:
    num_rows = 16
    total = num_rows * HUGE_PAGE_BYTES
    region = SharedOffloadRegion(
        "engine", num_rows, 0, 1, HUGE_PAGE_BYTES, directory=shared_memory
    )
    try:
        if not use_huge_pages([region.fd], total):
            pytest.skip("the kernel gives no huge pages for shared memory")
        assert pin_mmap_region(region)
        pages = random_bytes(num_rows, HUGE_PAGE_BYTES)
        rows = region.create_cell_view()
        memory = KVMemory((pages,), (rows,), 1, region.rows_per_registration)
        order = np.random.default_rng(0).permutation(num_rows)
        run(
            CUDACopyEngine(memory, Direction.STORE, copier),
            [PageCopies(0, HUGE_PAGE_BYTES, np.arange(num_rows), order)],
        )
        assert torch.equal(rows[order], pages.cpu())
        del rows, memory
    finally:
        region.cleanup()


def test_region_two_processes_pin_it_and_copy(shared_memory: str) -> None:
    def make(rank: int) -> str:
        return f"""
region = SharedOffloadRegion("engine", 8, {rank}, 2, 1 << 16, directory={shared_memory!r})
pages = torch.full((8, 1 << 16), {rank} + 1, dtype=torch.int8, device=DEVICE)
caches = CanonicalKVCaches([CanonicalKVCacheTensor(pages, 1 << 16)], [[CanonicalKVCacheRef(0, 1 << 16)]])
handlers = CpuGpuOffloadingHandlers(caches, 1, region)
assert region.is_pinned
def store():
    spec = GPULoadStoreSpec(list(range(8)), [8], [0]), CPULoadStoreSpec([7, 6, 5, 4, 3, 2, 1, 0])
    assert handlers.gpu_to_cpu_handler.transfer_async(1, spec)
    handlers.gpu_to_cpu_handler.wait({{1}})
    assert [result.success for result in handlers.gpu_to_cpu_handler.get_finished()] == [True]
"""

    code = "from tests.cpu.devices.test_cuda import *\n"
    first = make(0) + "print('pinned', flush=True)\ninput()\nstore()\n"
    first += (
        "rows = torch.frombuffer(region.create_kv_memoryview(), dtype=torch.int8).view(8, "
        "2, -1)\n"
    )
    first += "print(rows.amin((0, 2)).tolist(), rows.amax((0, 2)).tolist())\n"
    second = make(1) + "store()\nhandlers.shutdown()\nregion.cleanup()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code + first],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "pinned"
        ended = in_new_process(second)
        output, _ = process.communicate("\n", timeout=45)
    assert ended.returncode == 0, ended.stderr
    assert process.returncode == 0
    assert output.strip() == "[1, 2] [1, 2]"


# Shutdown


def test_handlers_shutdown_waits_for_copies_in_flight(
    shared_memory: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    page, count = 2 << 20, 64
    region = SharedOffloadRegion("engine", count, 0, 1, page, directory=shared_memory)
    view = region.create_kv_memoryview()
    pages = torch.zeros((count, page), dtype=torch.int8, device=DEVICE)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(pages, page)], [[CanonicalKVCacheRef(0, page)]]
    )
    handlers = CpuGpuOffloadingHandlers(caches, 1, region)
    assert region.is_pinned
    torch.cuda.synchronize()
    sleep()
    pages.fill_(5)
    spec = (
        GPULoadStoreSpec(list(range(count)), [count], [0]),
        CPULoadStoreSpec(list(range(count))),
    )
    assert handlers.gpu_to_cpu_handler.transfer_async(1, spec)
    handlers.shutdown()
    rows = np.frombuffer(view, np.int8)
    assert (rows.min(), rows.max()) == (5, 5)
    del rows
    view.release()
    region.cleanup()
    assert not caplog.records
    assert os.listdir(shared_memory) == []


def test_region_process_exits_during_copies_can_be_pinned_again(
    shared_memory: str,
) -> None:
    body = f"""
page = 2 << 20
region = SharedOffloadRegion("engine", 16, 0, 1, page, directory={shared_memory!r})
caches = CanonicalKVCaches([CanonicalKVCacheTensor(random_bytes(16, page), page)], [[CanonicalKVCacheRef(0, page)]])
handlers = CpuGpuOffloadingHandlers(caches, 1, region)
sleep()
spec = GPULoadStoreSpec(list(range(16)), [16], [0]), CPULoadStoreSpec(list(range(16)))
assert handlers.gpu_to_cpu_handler.transfer_async(1, spec)
os._exit(3)
"""
    assert in_new_process(body).returncode == 3
    assert len(list(Path(shared_memory).iterdir())) == 1
    page = 2 << 20
    region = SharedOffloadRegion("engine", 16, 0, 1, page, directory=shared_memory)
    try:
        assert pin_mmap_region(region)
    finally:
        region.cleanup()
