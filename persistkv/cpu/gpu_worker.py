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
from persistkv.cpu.pinning import pin_mmap_region, rows_per_registration
from persistkv.cpu.shared_offload_region import SharedOffloadRegion
from persistkv.cpu.transfer import KVMemory, compute_sub_block_ptrs, plan_copies
from persistkv.errors import ConfigurationError
from persistkv.isolation import Isolation

__all__ = ["CpuGpuOffloadingHandlers", "SingleDirectionOffloadingHandler", "compute_sub_block_ptrs"]


class SingleDirectionOffloadingHandler(OffloadingHandler):
    """Transfers in one direction, first in, first out. Called from one thread."""

    def __init__(self, kv_caches: CanonicalKVCaches, engine: CopyEngine) -> None:
        self._kv_caches = kv_caches
        self._engine: CopyEngine | None = engine

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a transfer of blocks of all groups between their pages and rows.

        Pages and rows must not change until the job is reported. The transfer sees all work that was enqueued on the
        caller's current stream before this call.

        :returns: False if the transfer could not be started, and always after ``shutdown``.
        :raises ValueError: if the specs are not of this direction, or do not fit each other or the caches; nothing
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
        """Wait for the transfers in flight, without reporting them, and release pages and rows; idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.drain()


class CpuGpuOffloadingHandlers:
    """The two handlers of one worker, ``gpu_to_cpu_handler`` and ``cpu_to_gpu_handler``.

    "GPU" means the device of the engine's tensors, which may also be a CPU (``devices``).

    :param kv_caches: the engine's tensors, and the tensors that each group uses.
    :param block_size_factor: GPU blocks in one offloaded block.
    :param num_cpu_blocks: rows.
    :param mmap_region: memory of the rows; pinned here if the tensors are on a GPU. Without it, each tensor gets rows
        that are private to this process.
    :raises ConfigurationError: if the caches, the factor, the rows and the region do not fit each other.
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
        registered = rows_per_registration(mmap_region.row_stride) if mmap_region is not None else None
        memory = KVMemory(pages, rows, block_size_factor, registered)
        self.gpu_to_cpu_handler, self.cpu_to_gpu_handler = (
            SingleDirectionOffloadingHandler(kv_caches, engine_class(memory, direction))
            for direction in (Direction.STORE, Direction.LOAD)
        )

    def shutdown(self) -> None:
        """Wait for the transfers in flight and release the handlers; idempotent. The region can be cleaned up after it.

        An exception of one handler is logged and does not affect the other.
        """
        for name, handler in (("store", self.gpu_to_cpu_handler), ("load", self.cpu_to_gpu_handler)):
            with Isolation(f"{name} handler").guard("shutdown", "its resources may not be released"):
                handler.shutdown()


def _sides(spec: TransferSpec, direction: Direction) -> tuple[GPULoadStoreSpec, BlockIDsLoadStoreSpec]:
    gpu, cpu = spec if direction is Direction.STORE else spec[::-1]
    if isinstance(gpu, GPULoadStoreSpec) and isinstance(cpu, CPULoadStoreSpec):
        return gpu, cpu
    media: list[str] = [side.medium() for side in spec if isinstance(side, LoadStoreSpec)]
    raise ValueError(f"a transfer from {' to '.join(media)} is no {direction.value}")


def _rows(
    kv_caches: CanonicalKVCaches, block_size_factor: int, num_cpu_blocks: int, region: SharedOffloadRegion | None
) -> tuple[torch.Tensor, ...]:
    device = kv_caches.tensors[0].tensor.device
    sizes = [canonical.page_size_bytes * block_size_factor for canonical in kv_caches.tensors]
    if region is None:
        pinned = device.type == "cuda"
        return tuple(torch.zeros((num_cpu_blocks, size), dtype=torch.int8, pin_memory=pinned) for size in sizes)
    if region.num_blocks != num_cpu_blocks:
        raise ConfigurationError("num_cpu_blocks", num_cpu_blocks, f"{region.num_blocks}, as the region has")
    if device.type == "cuda":
        with torch.cuda.device(device):  # registering memory creates a context on the current device
            pin_mmap_region(region)
    cell = region.create_next_view(cell_bytes(kv_caches, block_size_factor))
    offsets = tensor_offsets(kv_caches, block_size_factor)
    return tuple(cell[:, offset : offset + size] for offset, size in zip(offsets, sizes, strict=True))
