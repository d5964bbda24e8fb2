"""vLLM's tiered offloading on its CPU platform, where the stock spec has no worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from persistkv.cpu.devices.base import Direction
from persistkv.cpu.devices.cpu import CPUCopyEngine
from persistkv.cpu.layout import KVMemory, PageCopies, plan_copies
from persistkv.integrations.vllm.regions import ready
from persistkv.isolation import Isolation
from persistkv.memory.libc import memory_at

Mappings = Mapping[tuple[int, int], Any]
"""vLLM's ``CanonicalPageMapping`` objects, by (index of the KV tensor, bytes of a page)."""


class PersistKVSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Offloading spec for vLLM on CPUs: ``"spec_name": "PersistKVSpec"`` instead of ``TieringOffloadingSpec``.

    It adds a worker for KV tensors in CPU memory, which vLLM lacks. The options are the same. If a KV tensor is in
    device memory, it behaves like ``TieringOffloadingSpec``.
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
        mappings = _mappings(kv_caches) if getattr(self.config, "canonical_layout", False) else None
        if mappings is None:
            sizes = [canonical.page_size_bytes for canonical in kv_caches.tensors]
            create_view = region.create_next_worker_view
        else:
            sizes = _canonical_sizes(mappings, len(kv_caches.tensors))
            create_view = region.create_next_canonical_view
        rows = [create_view(size * self.blocks_per_chunk) for size in sizes]
        storage = rows[0].untyped_storage()
        ready(memory_at(storage.data_ptr(), storage.nbytes()))
        return CPUOffloadingWorker(kv_caches, rows, self.blocks_per_chunk, region.cleanup, mappings)


class CPUOffloadingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Worker for KV tensors in CPU memory. ``submit_store`` and ``submit_load`` copy before they return, because the
    engine computes on the same processors.

    :param kv_caches: vLLM's ``CanonicalKVCaches``, in CPU memory.
    :param rows: for each tensor, its part of the rows: int8, shape (chunks, blocks_per_chunk * page bytes).
    :param release: called by ``shutdown``, when the worker has no reference to the rows any more.
    :param mappings: positions of the pages' bytes in rows of the canonical layout; None for the direct layout.
    """

    def __init__(
        self,
        kv_caches: Any,
        rows: Sequence[torch.Tensor],
        blocks_per_chunk: int,
        release: Callable[[], None],
        mappings: Mappings | None = None,
    ) -> None:
        pages = tuple(
            canonical.tensor.view(canonical.tensor.shape[0], -1)[:, : canonical.page_size_bytes]
            for canonical in kv_caches.tensors
        )
        self._kv_caches = kv_caches
        self._memory: KVMemory | None = KVMemory(pages, tuple(rows), blocks_per_chunk)
        self._stores, self._loads = (
            CPUCopyEngine(self._memory, direction, in_place=True)
            if mappings is None
            else _CanonicalCopyEngine(self._memory, direction, mappings)
            for direction in (Direction.STORE, Direction.LOAD)
        )
        self._release = release

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(self._stores, job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Copy rows to pages before returning, even if ``expedited`` is False. Return False after ``shutdown``."""
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


class _CanonicalCopyEngine(CPUCopyEngine):
    """Copies between pages and rows in vLLM's canonical layout, which is the same for all parallel sizes.

    A worker writes only its parts of a row. If several workers hold the same bytes of a block, one of them writes them.

    :param memory: the pages and rows to copy between.
    :param mappings: as for ``CPUOffloadingWorker``.
    """

    def __init__(self, memory: KVMemory, direction: Direction, mappings: Mappings) -> None:
        super().__init__(memory, direction, in_place=True)
        self._mappings = mappings
        self._sizes = _canonical_sizes(mappings, len(memory.pages))

    def _copy(self, part: PageCopies) -> None:
        mapping, factor = self._mappings[part.tensor_idx, part.page_bytes], self.memory.block_size_factor
        pages, rows = self.memory.pages[part.tensor_idx], self.memory.rows[part.tensor_idx]
        stores, used = self.direction is Direction.STORE, np.ones(len(part.blocks), bool)
        if stores:
            used[:] = [mapping.is_writer(block) for block in part.blocks.tolist()]
        blocks = torch.from_numpy(part.blocks[used])
        chunks, positions = map(torch.from_numpy, np.divmod(part.sub_blocks[used], factor))
        for run in mapping.runs:
            fragments = (run.num_fragments, run.fragment_size)
            local = pages.as_strided(
                (len(pages), *fragments),
                (pages.stride(0), run.local_stride, 1),
                pages.storage_offset() + run.local_offset,
            )
            canonical = rows.as_strided(
                (len(rows), factor, *fragments),
                (rows.stride(0), self._sizes[part.tensor_idx], run.canonical_stride, 1),
                rows.storage_offset() + run.canonical_offset,
            )
            if stores:
                canonical[chunks, positions] = local[blocks]
            else:
                local[blocks] = canonical[chunks, positions]


def _mappings(kv_caches: Any) -> Mappings:
    return {(ref.tensor_idx, ref.page_size_bytes): ref.mapping for refs in kv_caches.group_data_refs for ref in refs}


def _canonical_sizes(mappings: Mappings, num_tensors: int) -> list[int]:
    """Return, for each KV tensor, the bytes of one page in the canonical layout."""
    return [
        max(mapping.canonical_page_size_bytes for (tensor, _), mapping in mappings.items() if tensor == index)
        for index in range(num_tensors)
    ]
