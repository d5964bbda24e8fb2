"""Workers that share the region of one engine, without the engine."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from tests.integrations.vllm.offloading import offloading_config

if TYPE_CHECKING:
    from persistkv.integrations.vllm.spec import CPUOffloadingWorker

pytestmark = pytest.mark.vllm

HEAD_BYTES, BLOCKS, LAYERS = 4096, 8, 2
NUMBERS = itertools.count()


Worker = tuple["CPUOffloadingWorker", list[torch.Tensor]]
"""Worker and its pages."""
MakeWorkers = Callable[..., tuple[list[Worker], torch.Tensor]]


@pytest.fixture
def make_workers() -> Iterator[MakeWorkers]:
    """Return a function that starts the workers of an engine over a model with two heads, and
    returns them with their pages and the rows that the scheduler sees.
    """
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    from persistkv.integrations.vllm.spec import PersistKVSpec

    ends: list[Callable[[], None]] = []

    def make(
        kv: torch.Tensor, world: int, blocks_per_chunk: int = 1
    ) -> tuple[list[Worker], torch.Tensor]:
        """:param kv: shape (layers, blocks, 2, heads, bytes of a head)."""
        name = f"spec-{os.getpid()}-{next(NUMBERS)}"
        page = kv[0, 0].numel() // world
        row_bytes = LAYERS * page * world * blocks_per_chunk
        chunks = BLOCKS // blocks_per_chunk
        scheduler = SharedOffloadRegion(
            name, chunks, None, row_bytes, row_bytes // world
        )
        workers = []
        for rank in range(world):
            config = offloading_config(LAYERS * page, 16)
            config = dataclasses.replace(
                config,
                engine_id=name,
                extra_config={
                    "cpu_bytes_to_use": chunks * row_bytes,
                    "secondary_tiers": [{"type": "fs"}],
                },
                cache=dataclasses.replace(
                    config.cache, blocks_per_chunk=blocks_per_chunk
                ),
                parallel=dataclasses.replace(
                    config.parallel, rank=rank, world_size=world, tp_size=world
                ),
                canonical_layout=True,
            )
            heads = 2 // world
            pages = [
                layer[:, :, rank * heads : (rank + 1) * heads]
                .reshape(BLOCKS, page)
                .clone()
                for layer in kv
            ]
            part = heads * HEAD_BYTES
            run = base.CopyRun(0, rank * part, part, 2, part, 2 * HEAD_BYTES)
            mapping = base.CanonicalPageMapping(page * world, page, (run,), 1, 0, True)
            refs = [
                base.CanonicalKVCacheRef(layer, page, mapping)
                for layer in range(LAYERS)
            ]
            caches = base.CanonicalKVCaches(
                [base.CanonicalKVCacheTensor(layer, page) for layer in pages], [refs]
            )
            workers.append((PersistKVSpec(config).get_worker(caches), pages))
        ends.extend([*(worker.shutdown for worker, _ in workers), scheduler.cleanup])
        return workers, torch.frombuffer(
            scheduler.create_kv_memoryview(), dtype=torch.int8
        ).view(chunks, -1)

    yield make
    for end in ends:
        end()


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_spec_canonical_rows_of_two_workers_equal_rows_of_one(
    make_workers: MakeWorkers,
    blocks_per_chunk: int,
) -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    kv = torch.randint(-128, 128, (LAYERS, BLOCKS, 2, 2, HEAD_BYTES), dtype=torch.int8)
    blocks = GPULoadStoreSpec([5, 2, 7, 0], [4], [0])
    chunks = CPULoadStoreSpec([3, 1, 2, 0][: 4 // blocks_per_chunk])
    found = []
    for world in (1, 2):
        workers, rows = make_workers(kv, world, blocks_per_chunk)
        for worker, pages in workers:
            assert worker.submit_store(1, blocks, chunks)
            stored = [layer.clone() for layer in pages]
            for layer in pages:
                layer.zero_()
            assert worker.submit_load(2, chunks, blocks)
            for before, after in zip(stored, pages, strict=True):
                assert torch.equal(after[[5, 2, 7, 0]], before[[5, 2, 7, 0]])
                assert not after[[1, 3, 4, 6]].any()
            assert [result.success for result in worker.get_finished()] == [True, True]
        found.append(rows.clone())
    assert found[0].any()
    assert torch.equal(*found)
