"""Transfers through the handlers, on each available device: every byte is compared with a plain
model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from persistkv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    HeadSharding,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
)
from persistkv.cpu import gpu_worker
from persistkv.cpu.devices.base import CopyEngine, Direction
from persistkv.cpu.devices.cuda import CUDACopyEngine, DriverBatchCopier
from persistkv.cpu.gpu_worker import CpuGpuOffloadingHandlers
from persistkv.cpu.layout import KVMemory, PageCopies, cell_bytes, group_layouts
from persistkv.cpu.manager import CPULoadStoreSpec
from persistkv.cpu.shared_offload_region import SharedOffloadRegion
from persistkv.errors import ConfigurationError

NUM_BLOCKS, NUM_ROWS = 96, 80

needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=["cpu", "cuda strategy", pytest.param("cuda", marks=needs_cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Device of the KV tensors; "cuda strategy" is the CPU with the CUDA strategy and a driver that
    needs no GPU."""
    if request.param != "cuda strategy":
        return str(request.param)
    driver = request.getfixturevalue("driver")
    strategy = partial(CUDACopyEngine, copier=DriverBatchCopier(driver.library))
    monkeypatch.setattr(gpu_worker, "copy_engine_class", lambda device: strategy)
    return "cpu"


@dataclass
class Geometry:
    """KV tensors, and for each group the (tensor, used bytes) pairs that it refers to."""

    pages: list[int]
    groups: list[list[tuple[int, int]]]


GEOMETRIES = {
    "one group": Geometry([64], [[(0, 64)]]),
    "layers": Geometry([256] * 4, [[(index, 256) for index in range(4)]]),
    "hybrid, own tensors": Geometry([128, 48], [[(0, 128)], [(1, 48)]]),
    "hybrid, shared tensor, padding": Geometry(
        [128, 40], [[(0, 128), (1, 40)], [(0, 48)], [(0, 128)]]
    ),
    "odd pages": Geometry([33, 7], [[(0, 33)], [(0, 5), (1, 7)]]),
}


def make_caches(geometry: Geometry, device: str, slack: int = 0) -> CanonicalKVCaches:
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for page in geometry.pages:
        data = torch.randint(
            -128, 128, (NUM_BLOCKS, page + slack), dtype=torch.int8, generator=generator
        )
        tensors.append(CanonicalKVCacheTensor(data.to(device), page))
    refs = [
        [CanonicalKVCacheRef(index, used) for index, used in group]
        for group in geometry.groups
    ]
    return CanonicalKVCaches(tensors, refs)


@contextmanager
def make_handlers(
    caches: CanonicalKVCaches,
    factor: int,
    directory: str,
) -> Iterator[tuple[CpuGpuOffloadingHandlers, SharedOffloadRegion]]:
    cell = cell_bytes(caches, factor)
    region = SharedOffloadRegion("engine", NUM_ROWS, 0, 1, cell, directory=directory)
    with ExitStack() as cleanup:
        cleanup.callback(region.cleanup)
        handlers = CpuGpuOffloadingHandlers(caches, factor, region)
        cleanup.callback(handlers.shutdown)
        yield handlers, region


def finish(
    handler: OffloadingHandler,
    job_id: int,
    spec: TransferSpec,
) -> TransferResult:
    assert handler.transfer_async(job_id, spec)
    handler.wait({job_id})
    (result,) = handler.get_finished()
    assert result.success
    assert result.job_id == job_id
    assert handler.get_finished() == []
    return result


@dataclass
class Job:
    """Transfer of blocks of all groups, with enough rows for them."""

    gpu: GPULoadStoreSpec
    cpu: CPULoadStoreSpec

    @classmethod
    def random(
        cls,
        chance: random.Random,
        num_groups: int,
        factor: int,
        scattered: bool,
    ) -> Job:
        sizes = [chance.randint(0, NUM_BLOCKS // num_groups) for _ in range(num_groups)]
        indices = [chance.randint(0, 3 * factor) for _ in range(num_groups)]
        num_rows = [
            -(-(index % factor + size) // factor) if size else 0
            for size, index in zip(sizes, indices, strict=True)
        ]
        blocks = (
            chance.sample(range(NUM_BLOCKS), sum(sizes))
            if scattered
            else list(range(sum(sizes)))
        )
        if sum(num_rows) > NUM_ROWS:
            return cls.random(chance, num_groups, factor, scattered)
        rows = (
            chance.sample(range(NUM_ROWS), sum(num_rows))
            if scattered
            else list(range(sum(num_rows)))
        )
        return cls(GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(rows))

    def used(self, geometry: Geometry) -> Iterator[tuple[int, int, int]]:
        """Yield (tensor, block, used bytes) of each page to be moved."""
        first = 0
        for size, refs in zip(self.gpu.group_sizes, geometry.groups, strict=True):
            for block in self.gpu.block_ids[first : first + size]:
                for tensor, used in refs:
                    yield tensor, block, used
            first += size


@pytest.mark.parametrize("scattered", [False, True], ids=["in order", "scattered"])
@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_handlers_store_then_load_restores_only_transferred_pages(
    name: str,
    factor: int,
    scattered: bool,
    device: str,
    shared_memory: str,
) -> None:
    geometry = GEOMETRIES[name]
    caches = make_caches(geometry, device, slack=16)
    original = [canonical.tensor.clone() for canonical in caches.tensors]
    chance = random.Random(f"{name} {factor} {scattered}")
    with make_handlers(caches, factor, shared_memory) as (handlers, _):
        for number in range(6):
            job = Job.random(chance, len(geometry.groups), factor, scattered)
            stored = finish(handlers.gpu_to_cpu_handler, number, (job.gpu, job.cpu))
            for canonical in caches.tensors:
                canonical.tensor.fill_(number)
            loaded = finish(handlers.cpu_to_gpu_handler, number, (job.cpu, job.gpu))
            expected = [torch.full_like(tensor, number) for tensor in original]
            for tensor, block, used in job.used(geometry):
                expected[tensor][block, :used] = original[tensor][block, :used]
            for index, canonical in enumerate(caches.tensors):
                assert torch.equal(canonical.tensor, expected[index])
                canonical.tensor.copy_(original[index])
            num_bytes = sum(used for _, _, used in job.used(geometry))
            assert (stored.num_bytes, loaded.num_bytes) == (num_bytes, num_bytes)
            assert min(stored.seconds, loaded.seconds) >= 0


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_handlers_stored_rows_match_group_layouts(
    factor: int,
    device: str,
    shared_memory: str,
) -> None:
    geometry = GEOMETRIES["hybrid, shared tensor, padding"]
    caches = make_caches(geometry, device)
    with make_handlers(caches, factor, shared_memory) as (handlers, region):
        sizes = [factor, factor, 0]
        gpu = GPULoadStoreSpec(list(range(2 * factor)), sizes, [0, 0, 0])
        finish(handlers.gpu_to_cpu_handler, 0, (gpu, CPULoadStoreSpec([7, 3])))
        view = region.create_kv_memoryview()
        rows = torch.frombuffer(view, dtype=torch.int8).view(NUM_ROWS, -1)
        for group, row in ((0, 7), (1, 3)):
            ranges = group_layouts(caches, factor)[group].ranges
            written = torch.cat(
                [rows[row, begin : begin + length] for begin, length in ranges]
            )
            pages = [
                caches.tensors[tensor].tensor[group * factor + position, :used].cpu()
                for tensor, used in sorted(geometry.groups[group])
                for position in range(factor)
            ]
            assert torch.equal(written, torch.cat(pages))
            assert int(rows[row].ne(0).sum()) <= len(written)
        del rows, written
        view.release()


def test_handler_jobs_of_one_direction_finish_in_order(
    device: str,
    shared_memory: str,
) -> None:
    caches = make_caches(GEOMETRIES["layers"], device)
    original = caches.tensors[0].tensor[:6].clone()
    with make_handlers(caches, 1, shared_memory) as (handlers, _):
        store, load = handlers.gpu_to_cpu_handler, handlers.cpu_to_gpu_handler
        for job_id in range(5):
            assert store.transfer_async(
                job_id, (GPULoadStoreSpec([job_id], [1], [0]), CPULoadStoreSpec([9]))
            )
        store.wait({4, 99})
        assert [result.job_id for result in store.get_finished()] == [0, 1, 2, 3, 4]
        finish(load, 7, (CPULoadStoreSpec([9]), GPULoadStoreSpec([5], [1], [0])))
        assert torch.equal(caches.tensors[0].tensor[5], original[4])


def test_handler_empty_job_is_reported_with_zero_bytes(
    device: str,
    shared_memory: str,
) -> None:
    with make_handlers(make_caches(GEOMETRIES["layers"], device), 2, shared_memory) as (
        handlers,
        _,
    ):
        nothing = GPULoadStoreSpec([], [0], [0])
        assert (
            finish(
                handlers.gpu_to_cpu_handler, 1, (nothing, CPULoadStoreSpec([]))
            ).num_bytes
            == 0
        )


def test_handlers_inference_mode_tensors_are_loaded(
    device: str,
    shared_memory: str,
) -> None:
    with torch.inference_mode():
        caches = make_caches(GEOMETRIES["layers"], device)
    original = caches.tensors[2].tensor[5].clone()
    spec = GPULoadStoreSpec([5], [1], [0]), CPULoadStoreSpec([0])
    with make_handlers(caches, 1, shared_memory) as (handlers, _):
        finish(handlers.gpu_to_cpu_handler, 1, spec)
        with torch.inference_mode():
            caches.tensors[2].tensor.zero_()
        finish(handlers.cpu_to_gpu_handler, 2, spec[::-1])
    assert torch.equal(caches.tensors[2].tensor[5], original)


def test_handlers_any_bit_pattern_survives_round_trip(
    device: str,
    shared_memory: str,
) -> None:
    """Pages are moved as wide numbers: NaNs with a payload and subnormal numbers must not
    change."""
    page = torch.arange(256, dtype=torch.uint8).repeat(4).sort().values.view(torch.int8)
    signalling = torch.tensor(
        [0x7FF0000000000001, 0x000000000000000F], dtype=torch.int64
    ).view(torch.int8)
    data = torch.cat([page, signalling]).repeat(NUM_BLOCKS, 1).to(device)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(data, 1040)], [[CanonicalKVCacheRef(0, 1040)]]
    )
    with make_handlers(caches, 1, shared_memory) as (handlers, _):
        spec = GPULoadStoreSpec([3, 2, 1], [3], [0]), CPULoadStoreSpec([5, 6, 7])
        original = data.clone()
        finish(handlers.gpu_to_cpu_handler, 1, spec)
        data[1:4] = 0
        finish(handlers.cpu_to_gpu_handler, 2, spec[::-1])
    assert torch.equal(data, original)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda gpu, cpu: (cpu, gpu),
        lambda gpu, cpu: (gpu, gpu),
        lambda gpu, cpu: (gpu, CPULoadStoreSpec([NUM_ROWS])),
        lambda gpu, cpu: (gpu, CPULoadStoreSpec([1, 2])),
    ],
)
def test_transfer_async_mismatched_specs_raise(
    wrong: Callable[..., TransferSpec],
    device: str,
    shared_memory: str,
) -> None:
    with make_handlers(make_caches(GEOMETRIES["layers"], device), 1, shared_memory) as (
        handlers,
        _,
    ):
        with pytest.raises(ValueError, match=r"is no store|not one of|which needs"):
            handlers.gpu_to_cpu_handler.transfer_async(
                1, wrong(GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0]))
            )
        assert handlers.gpu_to_cpu_handler.get_finished() == []


def test_handlers_after_shutdown_reject_jobs_and_release_region(
    device: str,
    shared_memory: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caches = make_caches(GEOMETRIES["layers"], device)
    with make_handlers(caches, 1, shared_memory) as (handlers, _):
        spec = GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0])
        assert handlers.gpu_to_cpu_handler.transfer_async(1, spec)
        handlers.shutdown()
        handlers.shutdown()
        assert not handlers.gpu_to_cpu_handler.transfer_async(2, spec)
        handlers.gpu_to_cpu_handler.wait({1, 2})
        assert handlers.gpu_to_cpu_handler.get_finished() == []
    assert "still in use" not in caplog.text


class RaisingEngine(CopyEngine):
    """Copy engine that raises when it waits for copies."""

    def submit(self, job_id: int, copies: Sequence[PageCopies]) -> bool:
        return True

    def get_finished(self) -> list[TransferResult]:
        return []

    def wait(self, job_ids: set[int]) -> None:
        raise RuntimeError("device lost")

    def shutdown(self) -> None:
        raise RuntimeError("device lost")


@pytest.mark.parametrize("direction", Direction)
def test_handlers_shutdown_one_raises_other_is_released(
    direction: Direction,
    shared_memory: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caches = make_caches(GEOMETRIES["one group"], "cpu")
    with make_handlers(caches, 1, shared_memory) as (handlers, _):
        broken = RaisingEngine(KVMemory((), (), 1), direction)
        blocks, rows = GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0])
        if direction is Direction.STORE:
            replaced, handlers.gpu_to_cpu_handler = handlers.gpu_to_cpu_handler, broken
            other = handlers.cpu_to_gpu_handler
        else:
            replaced, handlers.cpu_to_gpu_handler = handlers.cpu_to_gpu_handler, broken
            other = handlers.gpu_to_cpu_handler
        spec: TransferSpec = (
            (rows, blocks) if direction is Direction.STORE else (blocks, rows)
        )
        replaced.shutdown()
        handlers.shutdown()
        assert not other.transfer_async(1, spec), "the other handler was shut down"
    assert f"{direction.value} handler raised in shutdown" in caplog.text


def test_handlers_unsupported_device_raises(shared_memory: str) -> None:
    caches = CanonicalKVCaches(
        [
            CanonicalKVCacheTensor(
                torch.zeros((2, 8), dtype=torch.int8, device="meta"), 8
            )
        ],
        [[CanonicalKVCacheRef(0, 8)]],
    )
    with (
        pytest.raises(
            ConfigurationError,
            match="kv_caches device: 'meta' is not valid; expected one of cpu, cuda",
        ),
        make_handlers(caches, 1, shared_memory),
    ):
        pass


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_handlers_pending_kernels_finish_before_store_and_load(
    shared_memory: str,
) -> None:
    pages = torch.zeros((NUM_BLOCKS, 1 << 16), dtype=torch.int8, device="cuda")
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(pages, 1 << 16)], [[CanonicalKVCacheRef(0, 1 << 16)]]
    )
    gpu = (
        GPULoadStoreSpec(list(range(32)), [32], [0]),
        CPULoadStoreSpec(list(range(32))),
    )
    with make_handlers(caches, 1, shared_memory) as (handlers, _):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        pages.fill_(7)
        finish(handlers.gpu_to_cpu_handler, 1, gpu)
        pages.fill_(1)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        read = pages.clone()
        finish(handlers.cpu_to_gpu_handler, 2, gpu[::-1])
        assert int(read.min()) == int(read.max()) == 1
        assert int(pages[:32].min()) == int(pages[:32].max()) == 7
        assert int(pages[32:].max()) == 1


@pytest.mark.parametrize("factor", [1, 2])
def test_handlers_head_sharded_two_workers_fill_rows_as_one(
    device: str,
    shared_memory: str,
    factor: int,
) -> None:
    parts, heads, head_bytes, num_rows = 4, 6, 16, 4
    whole = torch.randint(
        -128, 128, (num_rows * factor, parts, heads, head_bytes), dtype=torch.int8
    )

    def fill_rows(num_workers: int) -> torch.Tensor:
        per_worker = heads // num_workers
        page = parts * per_worker * head_bytes
        name = f"workers-{num_workers}-{factor}"
        regions = [
            SharedOffloadRegion(
                name,
                num_rows,
                rank,
                num_workers,
                page * factor,
                directory=shared_memory,
            )
            for rank in range(num_workers)
        ]
        for rank, region in enumerate(regions):
            part = whole[:, :, rank * per_worker : (rank + 1) * per_worker]
            pages = part.reshape(num_rows * factor, page).to(device)
            tensor = CanonicalKVCacheTensor(
                pages, page, HeadSharding(parts, per_worker)
            )
            kv_caches = CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, page)]])
            handlers = CpuGpuOffloadingHandlers(
                kv_caches, factor, region, head_sharded=True
            )
            blocks = GPULoadStoreSpec(
                range(num_rows * factor), [num_rows * factor], [0]
            )
            rows = CPULoadStoreSpec(list(reversed(range(num_rows))))
            assert handlers.gpu_to_cpu_handler.transfer_async(1, (blocks, rows))
            handlers.gpu_to_cpu_handler.wait({1})
            kept = pages.clone()
            pages.zero_()
            assert handlers.cpu_to_gpu_handler.transfer_async(2, (rows, blocks))
            handlers.cpu_to_gpu_handler.wait({2})
            assert torch.equal(pages, kept)
            handlers.shutdown()
        used = parts * heads * head_bytes * factor
        filled = regions[0].create_row_view(0, used).clone()
        del handlers, kv_caches
        for region in regions:
            region.cleanup()
        return filled

    one = fill_rows(1)
    assert one.any()
    assert torch.equal(one, fill_rows(2))
    assert torch.equal(one, fill_rows(3))


def test_handlers_head_sharded_region_of_scheduler_raises(shared_memory: str) -> None:
    tensor = CanonicalKVCacheTensor(
        torch.zeros((2, 16), dtype=torch.int8), 16, HeadSharding(2, 2)
    )
    kv_caches = CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, 16)]])
    region = SharedOffloadRegion("engine", 2, None, 1, 16, directory=shared_memory)
    with pytest.raises(ConfigurationError, match="rank"):
        CpuGpuOffloadingHandlers(kv_caches, 1, region, head_sharded=True)
    region.cleanup()
