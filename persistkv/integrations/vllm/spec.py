"""vLLM's tiered offloading on its CPU platform, where the stock spec has no worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from persistkv.cpu.devices.base import Direction
from persistkv.cpu.devices.cpu import CPUCopyEngine
from persistkv.cpu.layout import KVMemory, plan_copies
from persistkv.integrations.vllm.regions import ready
from persistkv.isolation import Isolation
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
        storage = rows[0].untyped_storage()
        ready(memory_at(storage.data_ptr(), storage.nbytes()))
        return CPUOffloadingWorker(kv_caches, rows, self.blocks_per_chunk, region.cleanup)


class CPUOffloadingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Copies synchronously in the submitting step, because the engine computes on the same processors.

    :param kv_caches: vLLM's ``CanonicalKVCaches``, in CPU memory.
    :param rows: for each tensor, its part of the rows: int8, shape (chunks, blocks_per_chunk * page bytes).
    :param release: called at the end, when no reference to the rows remains.
    """

    def __init__(
        self, kv_caches: Any, rows: Sequence[torch.Tensor], blocks_per_chunk: int, release: Callable[[], None]
    ) -> None:
        pages = tuple(
            canonical.tensor.view(canonical.tensor.shape[0], -1)[:, : canonical.page_size_bytes]
            for canonical in kv_caches.tensors
        )
        self._kv_caches = kv_caches
        self._memory: KVMemory | None = KVMemory(pages, tuple(rows), blocks_per_chunk)
        self._stores = CPUCopyEngine(self._memory, Direction.STORE, in_place=True)
        self._loads = CPUCopyEngine(self._memory, Direction.LOAD, in_place=True)
        self._release = release

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(self._stores, job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Copy at once, also loads that are not expedited."""
        return self._submit(self._loads, job_id, dst_spec, src_spec)

    def _submit(self, engine: CPUCopyEngine, job_id: int, blocks: Any, chunks: Any) -> bool:
        if self._memory is None:
            return False
        return engine.submit(job_id, plan_copies(blocks, chunks, self._kv_caches, self._memory))

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(result.job_id, result.success, result.num_bytes, result.seconds)
            for engine in (self._stores, self._loads)
            for result in engine.finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._stores.wait(job_ids)
        self._loads.wait(job_ids)

    def shutdown(self) -> None:
        """Wait for the transfers in flight, then release the rows; idempotent."""
        if self._memory is None:
            return
        for engine in (self._stores, self._loads):
            with Isolation(f"{engine.direction.value} engine").guard("drain", "its transfers may not have ended"):
                engine.drain()
        self._memory = None
        del self._stores.memory, self._loads.memory
        self._release()
