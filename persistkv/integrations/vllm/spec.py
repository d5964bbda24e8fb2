"""vLLM's tiered offloading on its CPU platform, where the stock spec has no worker."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from persistkv.integrations.vllm.regions import ready
from persistkv.integrations.vllm.worker import CPUOffloadingWorker
from persistkv.memory.libc import memory_at


class PersistKVSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """``"spec_name": "PersistKVSpec"`` instead of ``TieringOffloadingSpec``, with the same options.

    If KV tensors are in device memory, it behaves like the stock spec.
    """

    def get_worker(self, kv_caches: Any) -> Any:
        if any(canonical.tensor.device.type != "cpu" for canonical in kv_caches.tensors):
            return super().get_worker(kv_caches)
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        sizes = [canonical.page_size_bytes * self.blocks_per_chunk for canonical in kv_caches.tensors]
        rows = [region.create_next_worker_view(size) for size in sizes]
        ready(_memory_of(rows[0]))
        return CPUOffloadingWorker(kv_caches, rows, self.blocks_per_chunk, region.cleanup)


def _memory_of(rows: torch.Tensor) -> memoryview:
    """Return all bytes of the storage that contains a tensor."""
    storage = rows.untyped_storage()
    return memory_at(storage.data_ptr(), storage.nbytes())
