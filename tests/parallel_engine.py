"""An engine of several tensor-parallel workers in this process, over the tiering stack: real rows
and real copies."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from persistkv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    HeadSharding,
    OffloadKey,
    ReqContext,
    RequestDescription,
    TransferSpec,
    make_offload_key,
)
from persistkv.cpu.spec import WorkerGeometry
from persistkv.tiering.manager import TieringOffloadingManager
from persistkv.tiering.persistent import PersistentTier
from persistkv.tiering.spec import TieringOffloadingSpec

BLOCK_TOKENS = 4
NUM_HEADS = 4
HEAD_BYTES = 8  # of one token
NUM_LAYERS = 3
NUM_ROWS = 8
PAGE_BYTES = 2 * BLOCK_TOKENS * NUM_HEADS * HEAD_BYTES


def block_keys(count: int, start: int = 0) -> list[OffloadKey]:
    return [
        make_offload_key(number.to_bytes(32, "little"), 0)
        for number in range(start, start + count)
    ]


class ParallelEngine:
    """Stores and loads blocks of known content with ``num_workers`` workers.

    :param tokens_first: whether a page holds tokens before heads; False: heads before tokens.
    :param factor: device blocks in an offloaded block.
    """

    def __init__(
        self,
        url: str,
        num_workers: int,
        *,
        factor: int = 1,
        tokens_first: bool = False,
        head_sharded: bool = True,
    ) -> None:
        self.factor = factor
        self.num_parts = 2 * BLOCK_TOKENS if tokens_first else 2
        page_bytes = PAGE_BYTES // num_workers
        self.specs: list[TieringOffloadingSpec] = []
        self.caches: list[CanonicalKVCaches] = []
        instance_id = uuid.uuid4().hex
        tier = {"type": "persistent", "url": url, "host": "thread"}
        for rank in range(num_workers):
            geometry = WorkerGeometry(
                instance_id=instance_id,
                gpu_block_size=BLOCK_TOKENS,
                gpu_block_bytes=NUM_LAYERS * page_bytes,
                rank=rank,
                num_workers=num_workers,
                head_sharded=head_sharded,
            )
            stride = -(-NUM_LAYERS * PAGE_BYTES * factor // 4096) * 4096
            options = {
                "cpu_bytes_to_use": NUM_ROWS * stride,
                "block_size": BLOCK_TOKENS * factor,
                "secondary_tiers": [tier],
            }
            self.specs.append(
                TieringOffloadingSpec(
                    extra_config=options, geometry=geometry, identity={"weights": "w"}
                )
            )
            heads = HeadSharding(self.num_parts, NUM_HEADS // num_workers)
            tensors = []
            for _ in range(NUM_LAYERS):
                pages = torch.zeros((NUM_ROWS * factor, page_bytes), dtype=torch.int8)
                tensors.append(CanonicalKVCacheTensor(pages, page_bytes, heads))
            refs = [
                CanonicalKVCacheRef(layer, page_bytes) for layer in range(NUM_LAYERS)
            ]
            self.caches.append(CanonicalKVCaches(tensors, [refs]))
        manager = self.specs[0].get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        self.handlers = [
            list(spec.get_handlers(caches))
            for spec, caches in zip(self.specs, self.caches, strict=True)
        ]
        self.num_jobs = 0

    def page(
        self,
        key: OffloadKey,
        position: int,
        layer: int,
        rank: int,
    ) -> npt.NDArray[np.int8]:
        """Return one worker's part of the content of a device block, which depends on nothing else
        of the engine."""
        seed = [*key, position, layer]
        whole = np.random.default_rng(seed).integers(
            -128, 128, PAGE_BYTES, dtype=np.int8
        )
        per_worker = NUM_HEADS // len(self.specs)
        heads = whole.reshape(self.num_parts, NUM_HEADS, -1)[
            :, rank * per_worker : (rank + 1) * per_worker
        ]
        return np.ascontiguousarray(heads).reshape(-1)

    def store(self, keys: Sequence[OffloadKey], req_id: str) -> None:
        """Store blocks, and wait until they are durable."""
        for rank, caches in enumerate(self.caches):
            for layer, tensor in enumerate(caches.tensors):
                for number, key in enumerate(keys):
                    for position in range(self.factor):
                        page = torch.from_numpy(self.page(key, position, layer, rank))
                        tensor.tensor[number * self.factor + position] = page
        req = self._begin(keys, req_id)
        output = self.manager.prepare_store(keys, req)
        assert output is not None
        assert output.keys_to_store == list(keys)
        self._transfer(0, (self._device_blocks(keys), output.store_spec))
        self.manager.complete_store(keys, req)
        self.manager.on_request_finished(req)
        (tier,) = self.manager.secondary_tiers
        assert isinstance(tier, PersistentTier)
        assert tier.wait_persisted(req_id, 60)
        self.manager.take_events()

    def load(self, keys: Sequence[OffloadKey], req_id: str) -> bool:
        """Load blocks and check every byte in every worker; return False if one of them is a
        miss."""
        req = self._begin(keys, req_id)
        deadline = time.monotonic() + 60
        while None in (answers := [self.manager.lookup(key, req) for key in keys]):
            assert time.monotonic() < deadline
            self.manager.take_events()
            time.sleep(0.001)
        found = all(answers)
        if found:
            self._transfer(
                1, (self.manager.prepare_load(keys, req), self._device_blocks(keys))
            )
            self.manager.complete_load(keys, req)
            for rank, caches in enumerate(self.caches):
                for layer, tensor in enumerate(caches.tensors):
                    for number, key in enumerate(keys):
                        for position in range(self.factor):
                            page = tensor.tensor[
                                number * self.factor + position
                            ].numpy()
                            assert (
                                page == self.page(key, position, layer, rank)
                            ).all(), "other bytes"
        self.manager.on_request_finished(req)
        return found

    def _begin(self, keys: Sequence[OffloadKey], req_id: str) -> ReqContext:
        description = RequestDescription()
        description.extend(0, keys)
        description.num_tokens = len(keys) * BLOCK_TOKENS * self.factor
        req = ReqContext(req_id, None, description)
        self.manager.on_new_request(req)
        return req

    def _device_blocks(self, keys: Sequence[OffloadKey]) -> GPULoadStoreSpec:
        count = len(keys) * self.factor
        return GPULoadStoreSpec(range(count), [count], [0])

    def _transfer(self, direction: int, spec: TransferSpec) -> None:
        self.num_jobs += 1
        for handlers in self.handlers:
            handler = handlers[direction][2]
            assert handler.transfer_async(self.num_jobs, spec)
            handler.wait({self.num_jobs})
            (result,) = handler.get_finished()
            assert result.success

    def close(self) -> None:
        self.handlers.clear()
        for spec in reversed(self.specs):
            spec.shutdown()


def check_sharing(url: str, *, factor: int, tokens_first: bool) -> None:
    """Check that 1, 2 and 1 workers, one engine after the other, load all blocks that the earlier
    ones stored."""
    keys: list[OffloadKey] = []
    for number, num_workers in enumerate((1, 2, 1)):
        engine = ParallelEngine(
            url, num_workers, factor=factor, tokens_first=tokens_first
        )
        try:
            assert not keys or engine.load(keys, f"load-{number}")
            new = block_keys(2, start=len(keys))
            engine.store(new, f"store-{number}")
            keys += new
        finally:
            engine.close()
