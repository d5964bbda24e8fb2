"""Types shared by the scheduler's and the worker's side of the primary tier."""

from __future__ import annotations

from persistkv.base import BlockIDsLoadStoreSpec


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Rows of the primary tier, one per offloaded block."""

    @staticmethod
    def medium() -> str:
        return "CPU"
