"""The primary tier's interface to secondary tiers: the bytes of its rows, and methods to read and write them."""

from __future__ import annotations

import contextlib

from persistkv.cpu.manager import CPUOffloadingManager
from persistkv.cpu.shared_offload_region import SharedOffloadRegion
from persistkv.errors import ConfigurationError


class CPUPrimaryTierOffloadingManager(CPUOffloadingManager):
    """Manager of a region's rows, the tier in front of all others.

    A cascade to a secondary tier reads rows (``prepare_read``), a promotion writes them (``prepare_write``).
    The manager owns the region: ``shutdown`` releases it.

    :param mmap_region: holds the bytes; must have ``num_blocks`` rows.
    :raises ConfigurationError: if the region has another number of rows, and as ``CPUOffloadingManager`` does.
    """

    def __init__(
        self,
        num_blocks: int,
        mmap_region: SharedOffloadRegion,
        cache_policy: str = "lru",
        enable_events: bool = False,
    ) -> None:
        super().__init__(num_blocks, cache_policy, enable_events)
        if mmap_region.num_blocks != num_blocks:
            raise ConfigurationError("num_blocks", num_blocks, f"{mmap_region.num_blocks}, as the region has")
        self.mmap_region = mmap_region
        self._kv_memoryview: memoryview | None = None

    prepare_read = CPUOffloadingManager.prepare_load
    complete_read = CPUOffloadingManager.complete_load
    prepare_write = CPUOffloadingManager.prepare_store
    complete_write = CPUOffloadingManager.complete_store

    def get_kv_memoryview(self) -> memoryview:
        """Return all rows, writable, shape (num_blocks, row_stride), format ``B``; the same object at each call.

        :raises RegionError: after ``shutdown``.
        """
        if self._kv_memoryview is None:
            self._kv_memoryview = self.mmap_region.create_kv_memoryview()
        return self._kv_memoryview

    def shutdown(self) -> None:
        """Release the view, then the region. All readers of rows must have ended before."""
        view, self._kv_memoryview = self._kv_memoryview, None
        if view is not None:
            # An array over the view prevents its release. Then the region logs a warning and its memory stays mapped.
            with contextlib.suppress(BufferError):
                view.release()
        self.mmap_region.cleanup()
