"""A minimal engine with persistent KV: the calls of an engine, step by step.

Its "model" writes the number of each token and its position into the KV of that token, so every
block can be checked.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence

import torch

from persistkv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadKey,
    make_offload_key,
)
from persistkv.connector.common import KVCacheGroupSpec, LoadProgress
from persistkv.connector.scheduler import OffloadingConnectorScheduler
from persistkv.connector.worker import OffloadingConnectorWorker
from persistkv.cpu.spec import WorkerGeometry
from persistkv.errors import PersistKVError
from persistkv.tiering.spec import TieringOffloadingSpec

BLOCK_TOKENS = 16
BLOCK_BYTES = 64 << 10  # 64 KiB: KV of 16 tokens in all layers
DEVICE_BLOCKS = 64


class MinimalEngine:
    """Answers one request at a time. Raises the errors of persistkv for invalid options."""

    def __init__(self, url: str) -> None:
        # the device's blocks
        self.kv = torch.zeros(DEVICE_BLOCKS, BLOCK_BYTES, dtype=torch.int8)
        tensor = CanonicalKVCacheTensor(self.kv, BLOCK_BYTES)
        caches = CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, BLOCK_BYTES)]])
        self.spec = TieringOffloadingSpec(
            extra_config={
                "cpu_bytes_to_use": "16MiB",
                "enable_events": True,
                "secondary_tiers": [{"type": "persistent", "url": url}],
            },
            geometry=WorkerGeometry(
                instance_id=f"minimal-{time.time_ns()}",
                gpu_block_size=BLOCK_TOKENS,
                gpu_block_bytes=BLOCK_BYTES,
            ),
            # everything the bytes depend on
            identity={"model": "position-writer", "block_tokens": BLOCK_TOKENS},
        )
        manager = self.spec.get_manager()  # starts the host process
        self.scheduler = OffloadingConnectorScheduler(
            manager, [KVCacheGroupSpec(BLOCK_TOKENS)]
        )
        self.worker = OffloadingConnectorWorker(self.spec.get_handlers(caches))
        self.durable: set[OffloadKey] = set()  # blocks that another engine would find

    def answer(self, req_id: str, tokens: Sequence[int]) -> int:
        """Fill the KV of a prompt; return the number of tokens that were loaded from the tiers."""
        # a real engine allocates free ones
        blocks = list(range(-(-len(tokens) // BLOCK_TOKENS)))
        self.scheduler.on_new_request(req_id, labels={"engine": "minimal"})
        self.scheduler.update_keys(req_id, 0, block_keys(tokens), len(tokens))
        loaded = self.load(req_id, blocks)
        for position in range(loaded, len(tokens)):  # the forward pass
            self.token_kv(blocks, position)[:] = tokens[position] * 1000 + position
        self.scheduler.update_computed_tokens(req_id, len(tokens), [blocks])
        self.scheduler.request_finished(req_id)
        # the device blocks are in use until the request is released
        while req_id not in self.step()[1]:
            time.sleep(0.001)
        return loaded

    def token_kv(self, blocks: Sequence[int], position: int) -> torch.Tensor:
        """Return the KV of one token of a request."""
        block, offset = divmod(position, BLOCK_TOKENS)
        return self.kv[blocks[block]].view(torch.int32).view(BLOCK_TOKENS, -1)[offset]

    def load(self, req_id: str, blocks: list[int]) -> int:
        """Load the longest prefix that the tiers hold. A failed load costs time only: its tokens
        are computed."""
        deadline = time.monotonic() + 5.0
        # being promoted
        while (matched := self.scheduler.get_num_new_matched_tokens(req_id, 0)) is None:
            if time.monotonic() > deadline:
                self.scheduler.give_up_waiting(req_id)
            self.step()
            time.sleep(0.001)
        if not self.scheduler.update_state_after_alloc(req_id, [blocks], matched):
            return 0
        loads = self.step()[0]
        while req_id not in loads:
            time.sleep(0.001)
            loads = self.step()[0]
        return loads[req_id].num_tokens if loads[req_id].success else 0

    def step(self) -> tuple[dict[str, LoadProgress], list[str]]:
        """Start planned transfers, process results, end the step; return ended loads and released
        requests."""
        self.worker.start(self.scheduler.build_connector_meta())
        output = self.scheduler.update_connector_output(self.worker.get_finished())
        for event in self.scheduler.take_events():  # exactly once in each step
            if event.medium != "CPU":
                (
                    self.durable.difference_update
                    if event.removed
                    else self.durable.update
                )(event.keys)
        return output.loads, output.released

    def close(self) -> None:
        """Release the worker before the rows that it copies to. Accepted blocks are committed by
        the host process."""
        self.worker.shutdown()
        self.scheduler.shutdown()


def block_keys(tokens: Sequence[int]) -> list[OffloadKey]:
    """Return a chain of hashes: the key of a block stands for all tokens up to its end."""
    keys, chain = [], b""
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        chain = hashlib.sha256(
            chain + repr(tokens[end - BLOCK_TOKENS : end]).encode()
        ).digest()
        keys.append(make_offload_key(chain, 0))
    return keys


def main() -> None:
    """Answer one prompt; run it twice with the same URL."""
    try:
        engine = MinimalEngine(sys.argv[1])
    except PersistKVError as error:
        sys.exit(str(error))
    tokens = list(range(500))
    try:
        print(engine.answer("first", tokens), "of", len(tokens), "tokens restored")  # noqa: T201
    finally:
        engine.close()


if __name__ == "__main__":
    main()
