"""The worker's side of the primary tier: copies KV blocks between the engine's tensors and rows,
asynchronously."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from persistkv.base import CanonicalKVCacheRef, CanonicalKVCaches
from persistkv.cpu.devices.base import CopyEngine, Direction
from persistkv.cpu.devices.cpu import CPUCopyEngine
from persistkv.cpu.devices.cuda import CUDACopyEngine
from persistkv.cpu.layout import (
    HeadSlice,
    KVMemory,
    cell_bytes,
    head_slices,
    tensor_offsets,
)
from persistkv.cpu.shared_offload_region import SharedOffloadRegion, pin_mmap_region
from persistkv.errors import ConfigurationError
from persistkv.isolation import Isolation


class CpuGpuOffloadingHandlers:
    """The two handlers of one worker, ``gpu_to_cpu_handler`` and ``cpu_to_gpu_handler``.

    "GPU" means the device of the engine's tensors, which may also be a CPU (``devices``).

    :param kv_caches: the engine's tensors, and the tensors that each group uses.
    :param block_size_factor: GPU blocks in one offloaded block.
    :param region: memory of the rows, opened for this worker; pinned here if the tensors are on a
        GPU.
    :param head_sharded: see ``WorkerGeometry``.
    :raises ConfigurationError: if the caches, the factor and the region do not fit each other.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        block_size_factor: int,
        region: SharedOffloadRegion,
        *,
        head_sharded: bool = False,
    ) -> None:
        # this raises if the caches or the factor are invalid
        cell = cell_bytes(kv_caches, block_size_factor)
        device = kv_caches.tensors[0].tensor.device
        engine_class = copy_engine_class(device)
        if cell != region.cpu_page_size:
            raise ConfigurationError(
                "cpu_page_size", region.cpu_page_size, f"{cell}, as the KV caches have"
            )
        if device.type == "cuda":
            # registering memory creates a context on the current device
            with torch.cuda.device(device):
                pin_mmap_region(region)
        if head_sharded:
            memory = _head_sharded_memory(kv_caches, block_size_factor, region)
        else:
            memory = _cell_memory(kv_caches, block_size_factor, region)
        self.gpu_to_cpu_handler = engine_class(memory, Direction.STORE)
        """Stores: copies from the engine's tensors to rows."""
        self.cpu_to_gpu_handler = engine_class(memory, Direction.LOAD)
        """Loads: copies from rows to the engine's tensors."""

    def shutdown(self) -> None:
        """Wait for the transfers in flight and release the handlers; idempotent. The region can be
        cleaned up after it.

        An exception of one handler is logged and does not affect the other.
        """
        handlers = {"store": self.gpu_to_cpu_handler, "load": self.cpu_to_gpu_handler}
        for name, handler in handlers.items():
            isolation = Isolation(f"{name} handler")
            with isolation.guard("shutdown", "its resources may not be released"):
                handler.shutdown()


def copy_engine_class(device: torch.device) -> type[CopyEngine]:
    """Return the copy engine for tensors on a device; raise ConfigurationError if there is none."""
    engines: dict[str, type[CopyEngine]] = {
        "cpu": CPUCopyEngine,
        "cuda": CUDACopyEngine,
    }
    if device.type not in engines:
        raise ConfigurationError(
            "kv_caches device", str(device), f"one of {', '.join(engines)}"
        )
    return engines[device.type]


def _cell_memory(
    kv_caches: CanonicalKVCaches,
    block_size_factor: int,
    region: SharedOffloadRegion,
) -> KVMemory:
    """Return the memory of one worker that copies whole pages to its own cell of each row, in which
    each KV tensor has its part."""
    cell = region.create_cell_view()
    offsets = tensor_offsets(kv_caches, block_size_factor)
    pages = []
    rows = []
    for canonical, offset in zip(kv_caches.tensors, offsets, strict=True):
        page_bytes = canonical.page_size_bytes
        pages.append(canonical.tensor[:, :page_bytes])
        end = offset + page_bytes * block_size_factor
        rows.append(cell[:, offset:end])
    return KVMemory(
        tuple(pages),
        tuple(rows),
        block_size_factor,
        region.rows_per_registration,
        kv_caches.group_data_refs,
    )


def _head_sharded_memory(
    kv_caches: CanonicalKVCaches,
    block_size_factor: int,
    region: SharedOffloadRegion,
) -> KVMemory:
    """Return the memory of one worker in the head-sharded layout: each slice of heads is copied
    like a KV tensor."""
    if region.rank is None:
        raise ConfigurationError(
            "rank", None, "a worker's rank: the scheduler has no heads"
        )
    slices = head_slices(kv_caches, block_size_factor, region.rank, region.num_workers)
    pages = []
    rows = []
    for heads in slices:
        tensor = kv_caches.tensors[heads.tensor_idx].tensor
        page_end = heads.page_offset + heads.num_bytes
        pages.append(tensor[:, heads.page_offset : page_end])
        row_bytes = heads.num_bytes * block_size_factor
        rows.append(region.create_row_view(heads.row_offset, row_bytes))
    return KVMemory(
        tuple(pages),
        tuple(rows),
        block_size_factor,
        region.rows_per_registration,
        _slice_refs(kv_caches, slices),
    )


def _slice_refs(
    kv_caches: CanonicalKVCaches,
    slices: Sequence[HeadSlice],
) -> list[list[CanonicalKVCacheRef]]:
    """Return for each KV cache group references to the slices of all of its tensors. A reference
    contains the index of its slice, because the memory of a worker has a tensor for each slice."""
    refs_by_tensor: dict[int, list[CanonicalKVCacheRef]] = {}
    for index, heads in enumerate(slices):
        slice_ref = CanonicalKVCacheRef(index, heads.num_bytes)
        refs_by_tensor.setdefault(heads.tensor_idx, []).append(slice_ref)
    groups = []
    for refs in kv_caches.group_data_refs:
        slice_refs: list[CanonicalKVCacheRef] = []
        for ref in refs:
            slice_refs += refs_by_tensor[ref.tensor_idx]
        groups.append(slice_refs)
    return groups
