"""Worker with rows in a pinned region and KV tensors on the device, and plain pinned copies for
comparison."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Sequence

import torch

from persistkv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingHandler,
    TransferSpec,
)
from persistkv.cpu.devices.base import Direction
from persistkv.cpu.devices.cuda import CUDACopyEngine, PageCopier
from persistkv.cpu.gpu_worker import CpuGpuOffloadingHandlers
from persistkv.cpu.layout import KVMemory, cell_bytes, tensor_offsets
from persistkv.cpu.manager import CPULoadStoreSpec
from persistkv.cpu.shared_offload_region import SharedOffloadRegion

# with several tensors, as with layers, consecutive pages of one tensor are not adjacent in the rows
_TENSORS = 4


class Worker:
    """Handlers of one worker, with as many rows as blocks. Call ``close`` after use.

    :param page_bytes: page size of each of four KV tensors.
    :param total_bytes: bytes of all pages; rounded down to whole blocks, at least two.
    """

    def __init__(self, device: torch.device, page_bytes: int, total_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.num_blocks = max(2, total_bytes // (_TENSORS * page_bytes))
        tensors = [
            _random_pages(self.num_blocks, page_bytes, device) for _ in range(_TENSORS)
        ]
        self.caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
            [[CanonicalKVCacheRef(index, page_bytes) for index in range(_TENSORS)]],
        )
        cell = cell_bytes(self.caches, 1)
        self._region = SharedOffloadRegion(
            f"bench-{uuid.uuid4().hex}", self.num_blocks, 0, 1, cell
        )
        try:
            self._handlers = CpuGpuOffloadingHandlers(self.caches, 1, self._region)
        except BaseException:
            self._region.cleanup()
            raise
        self.store: OffloadingHandler = self._handlers.gpu_to_cpu_handler
        self.load: OffloadingHandler = self._handlers.cpu_to_gpu_handler
        self.is_pinned = self._region.is_pinned

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all tensors."""
        return _TENSORS * self.page_bytes

    def use(self, copier: PageCopier) -> None:
        """Submit all further copies through this copier, on the same rows."""
        rows = torch.frombuffer(
            self._region.create_kv_memoryview(), dtype=torch.int8
        ).view(self.num_blocks, -1)
        views = tuple(
            rows[:, offset : offset + self.page_bytes]
            for offset in tensor_offsets(self.caches, 1)
        )
        pages = tuple(canonical.tensor for canonical in self.caches.tensors)
        memory = KVMemory(
            pages,
            views,
            1,
            self._region.rows_per_registration,
            self.caches.group_data_refs,
        )
        self.store, self.load = (
            CUDACopyEngine(memory, direction, copier) for direction in Direction
        )

    def close(self) -> None:
        """Wait for copies and free the rows."""
        self.store.shutdown()
        self.load.shutdown()
        self._handlers.shutdown()
        del self.store, self.load, self._handlers
        self._region.cleanup()


def store_spec(blocks: Sequence[int], rows: Sequence[int]) -> TransferSpec:
    """Return the transfer of blocks to rows; reversed, it is a load."""
    return GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(rows)


def run_job(handler: OffloadingHandler, spec: TransferSpec) -> float:
    """Run a transfer and wait for its end.

    :returns: seconds on the device.
    :raises RuntimeError: the transfer failed.
    """
    start_job(handler, 0, spec)
    handler.wait({0})
    (result,) = handler.get_finished()
    if not result.success:
        raise RuntimeError("a transfer failed")
    return result.seconds


def start_job(handler: OffloadingHandler, job_id: int, spec: TransferSpec) -> None:
    """Start a transfer.

    :raises RuntimeError: it could not be started.
    """
    if not handler.transfer_async(job_id, spec):
        raise RuntimeError("a transfer could not be started")


class PinnedCopies:
    """One large copy in each direction, between pinned memory of torch and the device."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._on_device = [
            torch.ones(num_bytes, dtype=torch.int8, device=device) for _ in range(2)
        ]
        self._on_host = [
            torch.ones(num_bytes, dtype=torch.int8, pin_memory=on_gpu) for _ in range(2)
        ]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu else []  # type: ignore[no-untyped-call]

    def store(self) -> None:
        """Copy from the device."""
        self._on_host[0].copy_(self._on_device[0], non_blocking=True)
        synchronize(self._device)

    def load(self) -> None:
        """Copy to the device."""
        self._on_device[1].copy_(self._on_host[1], non_blocking=True)
        synchronize(self._device)

    def both(self) -> None:
        """Copy in both directions at the same time, the same number of bytes each."""
        if not self._streams:
            self.store()
            self.load()
            return
        with torch.cuda.stream(self._streams[0]):
            self._on_host[0].copy_(self._on_device[0], non_blocking=True)
        with torch.cuda.stream(self._streams[1]):
            self._on_device[1].copy_(self._on_host[1], non_blocking=True)
        synchronize(self._device)


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def medians_of_interleaved(
    steps: dict[str, Callable[[], None]],
    rounds: int,
) -> dict[str, float]:
    """Return the median seconds of each step. The steps alternate; the first round is not
    counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _random_pages(
    num_blocks: int,
    page_bytes: int,
    device: torch.device,
) -> torch.Tensor:
    return torch.randint(
        -128, 128, (num_blocks, page_bytes), dtype=torch.int8, device=device
    )
