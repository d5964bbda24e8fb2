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
from persistkv.integrations.vllm.identity import find_worker
from persistkv.integrations.vllm.regions import map_huge_pages
from persistkv.integrations.vllm.weights.probe import watch_weights
from persistkv.memory.libc import memory_at

Mappings = Mapping[tuple[int, int], Any]
"""vLLM's ``CanonicalPageMapping`` objects, by (index of the KV tensor, bytes of a page)."""


# vLLM is not installed where types are checked.
class PersistKVSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Offloading spec for vLLM on CPUs: ``"spec_name": "PersistKVSpec"`` instead of
    ``TieringOffloadingSpec``.

    It adds a worker for KV tensors in CPU memory, which vLLM lacks. The options are the same. If a
    KV tensor is in device memory, it behaves like ``TieringOffloadingSpec``.
    """

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker that copies between the KV tensors of this process and the rows of the
        primary tier: for CPU tensors that of this package, else vLLM's.

        :param kv_caches: vLLM's ``CanonicalKVCaches``.
        """
        devices = {canonical.tensor.device.type for canonical in kv_caches.tensors}
        if devices != {"cpu"}:
            return super().get_worker(kv_caches)
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        mappings: Mappings | None = None
        if getattr(self.config, "canonical_layout", False):
            mappings = _mappings(kv_caches)
        rows = self._rows(region, kv_caches, mappings)
        # Map the whole region in huge pages before the first copy, so that the store's process does
        # not make the kernel move its pages later. All rows are views of its storage.
        storage = rows[0].untyped_storage()
        memory = memory_at(storage.data_ptr(), storage.nbytes())
        map_huge_pages(memory)
        worker = CPUOffloadingWorker(
            kv_caches,
            rows,
            self.blocks_per_chunk,
            release=region.cleanup,
            mappings=mappings,
        )
        watch_weights(worker, self, find_worker())
        return worker

    def _rows(
        self,
        region: SharedOffloadRegion,
        kv_caches: Any,
        mappings: Mappings | None,
    ) -> list[torch.Tensor]:
        """Return the part of the region's rows for each KV tensor; in the canonical layout if there
        are ``mappings``."""
        if mappings is None:
            page_sizes = [canonical.page_size_bytes for canonical in kv_caches.tensors]
            create_view = region.create_next_worker_view
        else:
            page_sizes = _canonical_sizes(mappings, len(kv_caches.tensors))
            create_view = region.create_next_canonical_view
        return [create_view(size * self.blocks_per_chunk) for size in page_sizes]


# vLLM is not installed where types are checked.
class CPUOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Worker for KV tensors in CPU memory. ``submit_store`` and ``submit_load`` copy before they
    return, because the engine computes on the same processors."""

    def __init__(
        self,
        kv_caches: Any,
        rows: Sequence[torch.Tensor],
        blocks_per_chunk: int,
        release: Callable[[], None],
        mappings: Mappings | None = None,
    ) -> None:
        """:param rows: for each tensor, its part of the rows: int8, shape (chunks, blocks_per_chunk
            * page bytes).
        :param release: called by ``shutdown``, when the worker has no reference to the rows any
            more.
        :param mappings: positions of the pages' bytes in rows of vLLM's canonical layout, which is
            the same for all parallel sizes. None: the direct layout, in which a row has the pages'
            bytes as they are.
        """
        pages = []
        for canonical in kv_caches.tensors:
            num_blocks = canonical.tensor.shape[0]
            # one line of bytes for each block: the page, and padding if there is any
            blocks = canonical.tensor.view(num_blocks, -1)
            pages.append(blocks[:, : canonical.page_size_bytes])
        memory = KVMemory(
            tuple(pages),
            tuple(rows),
            blocks_per_chunk,
            group_data_refs=kv_caches.group_data_refs,
        )
        self._engines: dict[Direction, CPUCopyEngine] = {}
        """The engine that copies in each direction; empty after ``shutdown``."""
        for direction in Direction:
            if mappings is None:
                engine = CPUCopyEngine(memory, direction)
            else:
                engine = _CanonicalCopyEngine(memory, direction, mappings)
            self._engines[direction] = engine
        self._results: list[TransferResult] = []
        """Results of ended transfers, for the next ``get_finished``."""
        self._release = release

    def submit_store(
        self,
        job_id: int,
        src_spec: Any,
        dst_spec: Any,
    ) -> bool:
        return self._submit(Direction.STORE, job_id, src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: Any,
        dst_spec: Any,
        expedited: bool = False,
    ) -> bool:
        # ``_submit`` takes the device's blocks first, which are the destination of a load
        return self._submit(Direction.LOAD, job_id, dst_spec, src_spec)

    def _submit(
        self,
        direction: Direction,
        job_id: int,
        blocks: Any,
        chunks: Any,
    ) -> bool:
        """Copy between device blocks and chunks now, and keep the result for ``get_finished``.
        Return False after ``shutdown``: nothing was copied."""
        engine = self._engines.get(direction)
        if engine is None:
            return False
        copies = plan_copies(blocks, chunks, engine.memory)
        ended = engine.copy_now(job_id, copies)
        result = TransferResult(job_id, ended.success, ended.num_bytes, ended.seconds)
        self._results.append(result)
        return True

    def get_finished(self) -> list[TransferResult]:
        results = self._results
        self._results = []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: transfers have ended when ``submit_store`` and ``submit_load`` return."""

    def shutdown(self) -> None:
        """Release the rows; idempotent."""
        # drop the engines first, because rows to which they refer cannot be unmapped
        if self._engines:
            self._engines.clear()
            self._release()


class _CanonicalCopyEngine(CPUCopyEngine):
    """Copies between pages and rows in vLLM's canonical layout, which is the same for all parallel
    sizes.

    A worker writes only its parts of a row. If several workers hold the same bytes of a block, one
    of them writes them.
    """

    def __init__(
        self,
        memory: KVMemory,
        direction: Direction,
        mappings: Mappings,
    ) -> None:
        super().__init__(memory, direction)
        self._mappings = mappings
        self._page_bytes = _canonical_sizes(mappings, len(memory.pages))
        """For each KV tensor, the bytes of one page in a row."""

    def _copy(self, part: PageCopies) -> None:
        """Copy the pages of one tensor, run by run: a run is a number of fragments that are equally
        far apart in the page, and, with another distance, in the row."""
        mapping = self._mappings[part.tensor_idx, part.page_bytes]
        local_pages = part.blocks
        row_pages = part.sub_blocks
        if self.direction is Direction.STORE:
            # only one of several workers with the same bytes writes them
            writes = [mapping.is_writer(block) for block in local_pages.tolist()]
            is_written = np.array(writes, bool)
            local_pages = local_pages[is_written]
            row_pages = row_pages[is_written]
        in_tensor = torch.from_numpy(local_pages)
        # ``row_pages`` counts the pages of all rows, row by row
        row_numbers, places_in_row = np.divmod(row_pages, self.memory.block_size_factor)
        in_rows = (torch.from_numpy(row_numbers), torch.from_numpy(places_in_row))
        for run in mapping.runs:
            local = self._local_fragments(part.tensor_idx, run)
            canonical = self._canonical_fragments(part.tensor_idx, run)
            if self.direction is Direction.STORE:
                canonical[in_rows] = local[in_tensor]
            else:
                local[in_tensor] = canonical[in_rows]

    def _local_fragments(self, tensor: int, run: Any) -> torch.Tensor:
        """Return the fragments of a run in all pages of a tensor: shape (blocks, fragments,
        bytes)."""
        pages = self.memory.pages[tensor]
        return pages.as_strided(
            (len(pages), run.num_fragments, run.fragment_size),
            (pages.stride(0), run.local_stride, 1),
            pages.storage_offset() + run.local_offset,
        )

    def _canonical_fragments(self, tensor: int, run: Any) -> torch.Tensor:
        """Return the fragments of a run in all rows of a tensor: shape (rows, pages of a row,
        fragments, bytes)."""
        rows = self.memory.rows[tensor]
        pages_per_row = self.memory.block_size_factor
        return rows.as_strided(
            (len(rows), pages_per_row, run.num_fragments, run.fragment_size),
            (rows.stride(0), self._page_bytes[tensor], run.canonical_stride, 1),
            rows.storage_offset() + run.canonical_offset,
        )


def _mappings(kv_caches: Any) -> Mappings:
    """Return the positions of the pages' bytes in rows of the canonical layout, by tensor and page
    size: references that agree in both have the same mapping."""
    mappings = {}
    for refs in kv_caches.group_data_refs:
        for ref in refs:
            mappings[ref.tensor_idx, ref.page_size_bytes] = ref.mapping
    return mappings


def _canonical_sizes(mappings: Mappings, num_tensors: int) -> list[int]:
    """Return, for each KV tensor, the bytes of one page in the canonical layout."""
    sizes = [0] * num_tensors
    for (tensor, _), mapping in mappings.items():
        sizes[tensor] = max(sizes[tensor], mapping.canonical_page_size_bytes)
    return sizes
