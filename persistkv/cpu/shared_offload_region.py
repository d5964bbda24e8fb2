"""The primary tier's memory: one file under /dev/shm, mapped by the scheduler, every worker, and
the store's host."""

from __future__ import annotations

import logging
import mmap
from typing import ClassVar, Protocol, cast

import torch

from persistkv.config import PAGE_BYTES
from persistkv.cpu.region_file import (
    SHARED_MEMORY_DIRECTORY,
    RegionFile,
    region_path,
    remove_leftover_regions,
)
from persistkv.errors import ConfigurationError, RegionError
from persistkv.memory.pages import prefault
from persistkv.rounding import round_up

__all__ = [
    "SharedOffloadRegion",
    "pin_mmap_region",
    "remove_leftover_regions",
    "row_stride_bytes",
]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process

logger = logging.getLogger(__name__)


def row_stride_bytes(num_workers: int, cpu_page_size: int) -> int:
    """Return the bytes of one row: ``cpu_page_size`` bytes per worker, rounded up to a multiple of
    4 KiB."""
    return round_up(num_workers * cpu_page_size, PAGE_BYTES)


class CudaRuntime(Protocol):
    """The part of the CUDA runtime that registers memory. Each call returns an error code, 0 for
    success."""

    def cudaHostRegister(
        self,
        address: int,
        size: int,
        flags: int,
        /,
    ) -> int: ...

    def cudaHostUnregister(self, address: int, /) -> int: ...


class SharedOffloadRegion:
    """Shared memory of the primary tier: a memory-mapped file of rows, one row per offloaded block.

    Each worker (rank) owns one cell of ``cpu_page_size`` bytes in every row. The first process
    creates and allocates the file, the others attach; see ``RegionFile``. The methods are not
    thread-safe; the rows may be read and written from any thread. If construction fails, the file
    and the mapping are released. After ``cleanup``, ``fd``, ``address`` and the methods that create
    views raise RegionError.

    :param instance_id: name of the engine, the same in all of its processes; part of the file's
        name.
    :param num_blocks: number of rows, of ``row_stride_bytes(num_workers, cpu_page_size)`` bytes.
    :param rank: number of this worker, 0 to ``num_workers - 1``; None for the scheduler, which has
        no cell.
    :param directory: directory of the file, on a tmpfs.
    :param timeout_s: seconds to wait for the process that creates the file.
    :raises ConfigurationError: ``rank`` is out of range, or shared memory is short.
    :raises RegionError: the file did not become ready within ``timeout_s`` or cannot be opened.
    """

    # 1 GiB: bytes that are registered at once; drivers refuse or stall on hundreds of GiB
    registration_bytes: ClassVar[int] = 1 << 30

    def __init__(
        self,
        instance_id: str,
        num_blocks: int,
        rank: int | None,
        num_workers: int,
        cpu_page_size: int,
        *,
        directory: str = SHARED_MEMORY_DIRECTORY,
        timeout_s: float = 60.0,
    ) -> None:
        if rank is not None and not 0 <= rank < num_workers:
            raise ConfigurationError(
                "rank", rank, f"0 to {num_workers - 1}, or None for the scheduler"
            )
        self.row_stride = row_stride_bytes(num_workers, cpu_page_size)
        self.mmap_path = region_path(instance_id, directory)
        self.total_size_bytes = num_blocks * self.row_stride
        self.num_blocks = num_blocks
        self.rank = rank
        self.num_workers = num_workers
        self.cpu_page_size = cpu_page_size
        self._cuda: CudaRuntime | None = None
        """Runtime for ``_unpin``; None: ``pin_mmap_region`` has not used one."""
        self._pinned: list[int] = []
        """Addresses of the ranges that are registered with CUDA; ``pin_mmap_region`` adds them."""
        # None before they are opened, and after ``cleanup``: the file with its lock, the mapping,
        # and the mapping as a tensor, shape (num_blocks, row_stride), int8
        self._file: RegionFile | None = None
        self._mmap: mmap.mmap | None = None
        self._rows: torch.Tensor | None = None
        try:
            self._open(timeout_s)
        except BaseException:
            self.cleanup()
            raise

    def _open(self, timeout_s: float) -> None:
        """Open the file, map it, and touch the bytes of each row that this process uses."""
        size = self.total_size_bytes
        self._file = RegionFile.open(self.mmap_path, size, timeout_s)
        self._mmap = mmap.mmap(self._file.fd, size)
        # torch references the object passed to it, but not its buffer, so ``close`` could unmap the
        # memory of a tensor. While a memoryview of it exists, ``close`` raises BufferError instead.
        exported = memoryview(self._mmap)
        flat = torch.frombuffer(exported, dtype=torch.int8)
        self._rows = flat.view(self.num_blocks, self.row_stride)
        # the scheduler uses all cells of a row, a worker its own cell
        first = 0
        length = self.row_stride
        if self.rank is not None:
            first = self.rank * self.cpu_page_size
            length = self.cpu_page_size
        with memoryview(self._mmap) as memory:
            prefault(memory, first, length, self.row_stride)

    @property
    def fd(self) -> int:
        """Descriptor of the file, for another process that maps it. It holds no lock, so it does
        not mark the file as in use.
        """
        if self._file is None:
            raise RegionError(f"{self.mmap_path} was cleaned up")
        return self._file.fd

    @property
    def address(self) -> int:
        """Address of the mapping in this process."""
        _, rows = self._mapped()
        return rows.data_ptr()

    @property
    def is_pinned(self) -> bool:
        """Whether the mapping is registered with CUDA in this process."""
        return bool(self._pinned)

    @property
    def rows_per_registration(self) -> int:
        """Number of consecutive rows, starting at row 0, that one call registers with CUDA."""
        return max(1, self.registration_bytes // self.row_stride)

    def create_cell_view(self) -> torch.Tensor:
        """Return this worker's cell of every row; shape (num_blocks, cpu_page_size), int8.

        :raises ConfigurationError: ``rank`` is None: the scheduler has no cell.
        """
        if self.rank is None:
            raise ConfigurationError(
                "rank", None, "a worker's rank: the scheduler has no cell"
            )
        begin = self.rank * self.cpu_page_size
        return self.create_row_view(begin, self.cpu_page_size)

    def create_row_view(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return ``num_bytes`` bytes of every row from ``offset`` on, which may be in the cells of
        several workers; shape (num_blocks, num_bytes), int8."""
        _, rows = self._mapped()
        return rows[:, offset : offset + num_bytes]

    def create_kv_memoryview(self) -> memoryview:
        """Return all rows without a copy: writable, shape (num_blocks, row_stride), format
        ``B``."""
        mapping, _ = self._mapped()
        shape = (self.num_blocks, self.row_stride)
        return memoryview(mapping).cast("B", shape)

    def cleanup(self) -> None:
        """Unpin and unmap the memory, and release the file; the last process deletes it.
        Idempotent.

        All reads and writes of rows must have ended before. If a tensor or view of the rows still
        exists, a warning is logged, and the memory stays mapped until that object is deleted.
        """
        # CUDA must not keep addresses that another mapping may get
        self._unpin()
        self._rows = None
        mapping = self._mmap
        self._mmap = None
        try:
            if mapping is not None:
                mapping.close()
        except BufferError:
            logger.warning(
                "%s is still in use at cleanup; its memory is freed when that ends",
                self.mmap_path,
            )
        # close the file last: without its lock, another engine may remove the file
        if self._file is not None:
            self._file.close()
            self._file = None

    def _unpin(self) -> None:
        """Unregister all ranges from CUDA, the last one first. Log a failure and continue with the
        others."""
        failed = False
        while self._pinned and self._cuda is not None:
            address = self._pinned.pop()
            code = int(self._cuda.cudaHostUnregister(address))
            if code:
                failed = True
                logger.warning(
                    "cudaHostUnregister(%#x) failed with error %d", address, code
                )
        if failed:
            # CUDA would report the error again at this thread's next kernel launch
            _clear_cuda_error()

    def _mapped(self) -> tuple[mmap.mmap, torch.Tensor]:
        """Return the mapping and the rows in it; raise RegionError after ``cleanup``."""
        if self._mmap is None or self._rows is None:
            raise RegionError(f"{self.mmap_path} was cleaned up")
        return self._mmap, self._rows


def pin_mmap_region(
    region: SharedOffloadRegion,
    runtime: CudaRuntime | None = None,
) -> bool:
    """Register a region's mapping with CUDA, so that the GPU accesses it directly, until
    ``cleanup``.

    The mapping is registered in ranges of whole rows, each by a call of CUDA: the copy of a row
    must not touch two registrations. If CUDA refuses a range, the ranges before it are
    unregistered, and one warning is logged.

    :param runtime: for tests; by default the CUDA runtime of torch.
    :returns: whether the whole mapping is registered. It is not without a CUDA device.
    """
    if region.is_pinned:
        return True
    if runtime is None:
        if not torch.cuda.is_available():
            return False
        runtime = cast(CudaRuntime, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    region._cuda = runtime  # set for ``_unpin``
    step = region.rows_per_registration * region.row_stride
    for offset in range(0, region.total_size_bytes, step):
        address = region.address + offset
        size = min(step, region.total_size_bytes - offset)
        code = int(runtime.cudaHostRegister(address, size, _PORTABLE))
        if code:
            # pin all or nothing, because batched copies need the whole mapping pinned
            region._unpin()
            # CUDA would report the error again at this thread's next kernel launch
            _clear_cuda_error()
            where = f"{size} bytes at offset {offset} of {region.mmap_path}"
            logger.warning(
                "CUDA error %d while pinning %s: copies use unpinned memory, which is slower",
                code,
                where,
            )
            return False
        region._pinned.append(address)
    return True


def _clear_cuda_error() -> None:
    """Clear the error of a failed CUDA call. Otherwise CUDA reports it again at this thread's next
    kernel launch."""
    if not torch.cuda.is_available():
        return
    try:
        # a kernel, at whose launch CUDA reports and clears the error
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        logger.debug("CUDA reported the error of a registration again: %s", error)
