"""The primary tier's memory: one file under /dev/shm, mapped by the scheduler, every worker, and the store's host."""

from __future__ import annotations

import logging
import mmap
from typing import TYPE_CHECKING

import torch

from persistkv.config import PAGE_BYTES
from persistkv.cpu.region_file import SHARED_MEMORY_DIRECTORY, RegionFile, region_path, remove_leftover_regions
from persistkv.errors import ConfigurationError, RegionError
from persistkv.memory.prefault import prefault

if TYPE_CHECKING:
    from persistkv.cpu.pinning import PinnedMemory

__all__ = ["SharedOffloadRegion", "remove_leftover_regions", "row_stride_bytes"]

logger = logging.getLogger(__name__)


def row_stride_bytes(num_workers: int, cpu_page_size: int) -> int:
    """Bytes from one row to the next: the cells of all workers, rounded up to 4 KiB."""
    return -(-num_workers * cpu_page_size // PAGE_BYTES) * PAGE_BYTES


class SharedOffloadRegion:
    """Rows of shared memory. A row is one offloaded block; each worker has a cell of ``cpu_page_size`` bytes in it.

    The first process creates and allocates the file, the others attach. A file that a killed process left is replaced;
    a file in use is never changed. The last process to release the file removes it. Not thread-safe, but rows may be
    read and written from any thread. If construction fails, the file and the mapping are released.

    :param instance_id: the same in all processes of one engine; part of the file's name.
    :param total_size_bytes: must be ``num_blocks`` rows of ``row_stride_bytes(num_workers, cpu_page_size)``.
    :param rank: number of this worker, 0 to ``num_workers - 1``; None for the scheduler, which has no cell.
    :param cpu_page_size: bytes of one worker's cell.
    :param directory: directory of the file, on a tmpfs.
    :param timeout_s: seconds to wait for the process that creates the file.
    :raises ConfigurationError: if the numbers do not agree, or there is too little shared memory.
    :raises RegionError: if the file did not become ready in time or cannot be opened.
    """

    def __init__(
        self,
        instance_id: str,
        total_size_bytes: int,
        num_blocks: int,
        rank: int | None,
        num_workers: int,
        cpu_page_size: int,
        *,
        directory: str = SHARED_MEMORY_DIRECTORY,
        timeout_s: float = 60.0,
    ) -> None:
        self._file: RegionFile | None = None
        self._mmap: mmap.mmap | None = None
        self._rows: torch.Tensor | None = None
        self._pinned: PinnedMemory | None = None
        self.row_stride = _checked_stride(total_size_bytes, num_blocks, rank, num_workers, cpu_page_size)
        self.mmap_path = region_path(instance_id, directory)
        self.total_size_bytes = total_size_bytes
        self.num_blocks = num_blocks
        self.rank = rank
        self.cpu_page_size = cpu_page_size
        self.page_size = mmap.PAGESIZE
        """Bytes of a memory page of this machine."""
        self._next_offset = 0
        try:
            self._map(timeout_s)
        except BaseException:
            self.cleanup()
            raise

    @property
    def fd(self) -> int:
        """Descriptor of the file, for another process that maps it. It carries no lock, so a process that inherits it
        does not make a leftover look like a region in use.

        :raises RegionError: after ``cleanup``.
        """
        if self._file is None:
            raise RegionError(f"{self.mmap_path} was cleaned up")
        return self._file.fd

    @property
    def is_pinned(self) -> bool:
        """Whether the mapping is registered with CUDA in this process."""
        return self._pinned is not None

    @property
    def address(self) -> int:
        """Address of the mapping in this process.

        :raises RegionError: after ``cleanup``.
        """
        return self._open_rows().data_ptr()

    def create_next_view(self, page_size: int) -> torch.Tensor:
        """Reserve the next ``page_size`` bytes of this worker's cell in every row.

        :returns: int8, shape (num_blocks, page_size), strides (row_stride, 1).
        :raises ConfigurationError: if the cell has fewer bytes left, or the region has no cell for this process;
            nothing is reserved then.
        :raises RegionError: after ``cleanup``.
        """
        rows = self._open_rows()
        if self.rank is None:
            raise ConfigurationError("rank", None, "a worker's rank: the scheduler has no cell")
        left = self.cpu_page_size - self._next_offset
        if not 0 < page_size <= left:
            raise ConfigurationError("page_size", page_size, f"1 to {left} bytes, which the cell has left")
        begin = self.rank * self.cpu_page_size + self._next_offset
        self._next_offset += page_size
        return rows[:, begin : begin + page_size]

    def create_kv_memoryview(self) -> memoryview:
        """Return all rows without a copy: writable, shape (num_blocks, row_stride), format ``B``.

        :raises RegionError: after ``cleanup``, or if the view would not share the region's bytes.
        """
        rows = self._open_rows()
        view = memoryview(self._open_mmap()).cast("B", (self.num_blocks, self.row_stride))
        if torch.frombuffer(view, dtype=torch.int8).data_ptr() != rows.data_ptr():
            raise RegionError(f"a view of {self.mmap_path} does not share its memory")
        return view

    def adopt_pinned(self, pinned: PinnedMemory) -> None:
        """Own memory that was registered with CUDA, and unregister it at ``cleanup``."""
        self._pinned = pinned

    def cleanup(self) -> None:
        """Unpin, drop the region's tensor, unmap, and release the file, which the last process removes. Idempotent.

        All users of the rows must have ended before. If a tensor or view of the rows still exists, the memory stays
        mapped until it is deleted, and a warning is logged.
        """
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None
        self._rows = None
        self._unmap()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _map(self, timeout_s: float) -> None:
        self._file = RegionFile.open(self.mmap_path, self.total_size_bytes, timeout_s)
        self._mmap = mmap.mmap(self._file.fd, self.total_size_bytes)
        # torch references the object passed to it, but not its buffer. A private memoryview keeps the buffer exported,
        # so that the mapping outlives the last tensor.
        self._rows = torch.frombuffer(memoryview(self._mmap), dtype=torch.int8).view(self.num_blocks, self.row_stride)
        first, length = (
            (0, self.row_stride) if self.rank is None else (self.rank * self.cpu_page_size, self.cpu_page_size)
        )
        with memoryview(self._mmap) as memory:
            prefault(memory, first, length, self.row_stride)

    def _open_rows(self) -> torch.Tensor:
        if self._rows is None:
            raise RegionError(f"{self.mmap_path} was cleaned up")
        return self._rows

    def _open_mmap(self) -> mmap.mmap:
        if self._mmap is None:
            raise RegionError(f"{self.mmap_path} was cleaned up")
        return self._mmap

    def _unmap(self) -> None:
        mapping, self._mmap = self._mmap, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            logger.warning("%s is still in use at cleanup; its memory is freed when that ends", self.mmap_path)


def _checked_stride(
    total_size_bytes: int, num_blocks: int, rank: int | None, num_workers: int, cpu_page_size: int
) -> int:
    for name, value in (("num_blocks", num_blocks), ("num_workers", num_workers), ("cpu_page_size", cpu_page_size)):
        if value <= 0:
            raise ConfigurationError(name, value, "a positive number")
    if rank is not None and not 0 <= rank < num_workers:
        raise ConfigurationError("rank", rank, f"0 to {num_workers - 1}, or None for the scheduler")
    stride = row_stride_bytes(num_workers, cpu_page_size)
    if total_size_bytes != num_blocks * stride:
        raise ConfigurationError(
            "total_size_bytes", total_size_bytes, f"{num_blocks * stride}: {num_blocks} rows of {stride} bytes"
        )
    return stride
