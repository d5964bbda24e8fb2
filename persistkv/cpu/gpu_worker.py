"""The worker's side of the primary tier: copies KV blocks between the engine's tensors and rows, asynchronously."""

from __future__ import annotations

import torch

from persistkv.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    TransferResult,
    TransferSpec,
)
from persistkv.cpu.common import CPULoadStoreSpec
from persistkv.cpu.devices.base import CopyEngine, Direction
from persistkv.cpu.devices.select import copy_engine_class
from persistkv.cpu.layout import cell_bytes, check_kv_caches, tensor_offsets
from persistkv.cpu.pinning import pin_mmap_region
from persistkv.cpu.shared_offload_region import SharedOffloadRegion
from persistkv.cpu.transfer import KVMemory, compute_sub_block_ptrs, plan_copies
from persistkv.errors import ConfigurationError

__all__ = ["CpuGpuOffloadingHandlers", "SingleDirectionOffloadingHandler", "compute_sub_block_ptrs"]


class SingleDirectionOffloadingHandler(OffloadingHandler):
    """Transfers one way, first in, first out. Called from one thread."""

    def __init__(self, kv_caches: CanonicalKVCaches, engine: CopyEngine) -> None:
        self._kv_caches = kv_caches
        self._engine: CopyEngine | None = engine

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a transfer of blocks of all groups between their pages and rows.

        Pages and rows must stay as they are until the job is reported. It sees what the caller's current stream was
        given before.

        :returns: False where it could not be started, and always after ``shutdown``.
        :raises ValueError: where the specs are not of this direction, or do not fit each other or the caches; nothing
            was started.
        """
        if self._engine is None:
            return False
        gpu, cpu = _sides(spec, self._engine.direction)
        return self._engine.submit(job_id, plan_copies(gpu, cpu, self._kv_caches, self._engine.memory))

    def get_finished(self) -> list[TransferResult]:
        return self._engine.finished() if self._engine is not None else []

    def wait(self, job_ids: set[int]) -> None:
        if self._engine is not None:
            self._engine.wait(job_ids)

    def shutdown(self) -> None:
        """Wait for what runs, which is not reported any more, and let go of pages and rows; idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.drain()


class CpuGpuOffloadingHandlers:
    """The two handlers of one worker, ``gpu_to_cpu_handler`` and ``cpu_to_gpu_handler``.

    "GPU" is wherever the engine's tensors lie; the device is a strategy (``devices``).

    :param kv_caches: the engine's tensors and which group uses which of them.
    :param block_size_factor: GPU blocks in one offloaded block.
    :param num_cpu_blocks: rows.
    :param mmap_region: where the rows lie; pinned here where there is a GPU. Without, each tensor gets rows of its own,
        which only this process sees.
    :raises ConfigurationError: where the caches, the factor, the rows and the region do not fit each other.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        block_size_factor: int,
        num_cpu_blocks: int,
        mmap_region: SharedOffloadRegion | None = None,
    ) -> None:
        check_kv_caches(kv_caches, block_size_factor)
        if num_cpu_blocks <= 0:
            raise ConfigurationError("num_cpu_blocks", num_cpu_blocks, "a positive number of rows")
        engine_class = copy_engine_class(kv_caches.tensors[0].tensor.device)
        rows = _rows(kv_caches, block_size_factor, num_cpu_blocks, mmap_region)
        pages = tuple(canonical.tensor[:, : canonical.page_size_bytes] for canonical in kv_caches.tensors)
        memory = KVMemory(pages, rows, block_size_factor)
        self.gpu_to_cpu_handler, self.cpu_to_gpu_handler = (
            SingleDirectionOffloadingHandler(kv_caches, engine_class(memory, direction))
            for direction in (Direction.STORE, Direction.LOAD)
        )

    def shutdown(self) -> None:
        """Wait for what runs and release it; idempotent. The region may be cleaned up after."""
        self.gpu_to_cpu_handler.shutdown()
        self.cpu_to_gpu_handler.shutdown()


def _sides(spec: TransferSpec, direction: Direction) -> tuple[GPULoadStoreSpec, BlockIDsLoadStoreSpec]:
    gpu, cpu = spec if direction is Direction.STORE else spec[::-1]
    if isinstance(gpu, GPULoadStoreSpec) and isinstance(cpu, CPULoadStoreSpec):
        return gpu, cpu
    media: list[str] = [side.medium() for side in spec if isinstance(side, LoadStoreSpec)]
    raise ValueError(f"a transfer from {' to '.join(media)} is no {direction.value}")


def _rows(
    kv_caches: CanonicalKVCaches, block_size_factor: int, num_cpu_blocks: int, region: SharedOffloadRegion | None
) -> tuple[torch.Tensor, ...]:
    on_gpu = kv_caches.tensors[0].tensor.is_cuda
    sizes = [canonical.page_size_bytes * block_size_factor for canonical in kv_caches.tensors]
    if region is None:
        return tuple(torch.zeros((num_cpu_blocks, size), dtype=torch.int8, pin_memory=on_gpu) for size in sizes)
    if region.num_blocks != num_cpu_blocks:
        raise ConfigurationError("num_cpu_blocks", num_cpu_blocks, f"{region.num_blocks}, as the region has")
    if on_gpu:
        pin_mmap_region(region)
    cell = region.create_next_view(cell_bytes(kv_caches, block_size_factor))
    offsets = tensor_offsets(kv_caches, block_size_factor)
    return tuple(cell[:, offset : offset + size] for offset, size in zip(offsets, sizes, strict=True))
