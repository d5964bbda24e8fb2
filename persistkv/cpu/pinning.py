"""Registration of host memory with CUDA, so that the GPU accesses it directly."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol, cast

import torch

if TYPE_CHECKING:
    from persistkv.cpu.shared_offload_region import SharedOffloadRegion

_RANGE_BYTES = 1 << 30  # 1 GiB: drivers refuse or stall on single registrations of hundreds of GiB
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process

logger = logging.getLogger(__name__)


class CudaRuntime(Protocol):
    """The part of the CUDA runtime that registers memory; each call returns an error code, 0 for success."""

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> int: ...

    def cudaHostUnregister(self, address: int, /) -> int: ...


class PinnedMemory:
    """Ranges that stay registered until ``release``."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._addresses: list[int] = []

    def add(self, address: int, size: int) -> int:
        """Register one range.

        :returns: CUDA's error code; the range is registered only if it is 0.
        """
        code = int(self._runtime.cudaHostRegister(address, size, _PORTABLE))
        if code == 0:
            self._addresses.append(address)
        return code

    def release(self) -> None:
        """Unregister all ranges, the last one first. A failure is logged and does not affect the others. Idempotent."""
        failed = False
        while self._addresses:
            address = self._addresses.pop()
            code = int(self._runtime.cudaHostUnregister(address))
            if code:
                failed = True
                logger.warning("cudaHostUnregister(%#x) failed with error %d", address, code)
        if failed:
            _clear_cuda_error()


def rows_per_registration(row_stride: int) -> int:
    """Return the number of rows of a region that one call registers."""
    return max(1, _RANGE_BYTES // row_stride)


def pin_mmap_region(region: SharedOffloadRegion, runtime: CudaRuntime | None = None) -> bool:
    """Register a region's mapping with CUDA; ``cleanup`` of the region unregisters it.

    Ranges end between two rows, since a single copy must not touch two registrations. If CUDA refuses a range, the
    ranges before it are unregistered, one warning is logged, and copies use unpinned memory, which is slower.

    :param runtime: for tests; by default the CUDA runtime of torch.
    :returns: whether the region is pinned.
    """
    if region.is_pinned:
        return True
    if runtime is None:
        if not torch.cuda.is_available():
            return False
        runtime = cast(CudaRuntime, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    pinned = PinnedMemory(runtime)
    step = rows_per_registration(region.row_stride) * region.row_stride
    for offset in range(0, region.total_size_bytes, step):
        size = min(step, region.total_size_bytes - offset)
        code = pinned.add(region.address + offset, size)
        if code:
            pinned.release()
            _clear_cuda_error()
            logger.warning(
                "CUDA error %d while pinning %d bytes at offset %d of %s: copies use unpinned memory, which is slower",
                code,
                size,
                offset,
                region.mmap_path,
            )
            return False
    region.adopt_pinned(pinned)
    return True


def _clear_cuda_error() -> None:
    """Consume the error of a refused call, which CUDA would report again at this thread's next kernel launch."""
    if not torch.cuda.is_available():
        return
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        logger.debug("CUDA reported the error of a registration again: %s", error)
