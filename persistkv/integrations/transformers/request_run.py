"""One request, from its prompt to its last token."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from persistkv.errors import PersistKVError
from persistkv.integrations.transformers.block_pool import BlockPool
from persistkv.integrations.transformers.hashing import BlockHashChain, offload_keys
from persistkv.integrations.transformers.kv_cache import PagedKVCache, RequestCache
from persistkv.integrations.transformers.offload import OffloadLoop
from persistkv.integrations.transformers.request_blocks import RequestBlocks
from persistkv.integrations.transformers.results import GenerateResult, RequestStats
from persistkv.integrations.transformers.sampling import TokenChooser


@dataclass(frozen=True)
class EngineParts:
    """Objects that all requests of an engine share."""

    model: Any
    forward_options: dict[str, Any]
    device: PagedKVCache
    loop: OffloadLoop


class RequestRun:
    """Run of one request.

    :ivar blocks: the request's device blocks: the caller releases them when the connector releases the request.
    """

    def __init__(self, parts: EngineParts, req_id: str, chain: BlockHashChain) -> None:
        self.blocks = RequestBlocks(parts.device, self._allocate)
        self._parts = parts
        self._req_id = req_id
        self._chain = chain
        self._stats = RequestStats()

    def run(
        self, prompt: Sequence[int], max_new_tokens: int, chooser: TokenChooser, stop: Collection[int], reuse: bool
    ) -> GenerateResult:
        """Run the request. The caller has announced it to the connector, and must finish it even if this raises."""
        begin = time.perf_counter()
        self._stats.prompt_tokens = len(prompt)
        self._know(prompt, len(prompt))
        restored = self._restore(len(prompt)) if reuse else 0
        self._stats.lookup_s = time.perf_counter() - begin - self._stats.load_s
        cache = RequestCache(self._parts.device.geometry, len(prompt) + max_new_tokens)
        self.blocks.gather(cache)
        first_logits = logits = self._forward(prompt[restored:], cache)
        self._stats.computed_tokens = len(prompt) - restored
        tokens = [chooser.choose(logits)]
        self._stats.ttft_s = time.perf_counter() - begin
        self._keep(cache, len(prompt))
        while len(tokens) < max_new_tokens and tokens[-1] not in stop:
            self._know(tokens[-1:], len(prompt) + len(tokens))
            logits = self._forward(tokens[-1:], cache)
            tokens.append(chooser.choose(logits))
            self._keep(cache, len(prompt) + len(tokens) - 1)
        self._stats.total_s = time.perf_counter() - begin
        kept = tuple(self._chain.hashes[: self.blocks.num_blocks])
        return GenerateResult(self._req_id, tokens, first_logits.to("cpu", copy=True), kept, self._stats)

    def _know(self, token_ids: Sequence[int], num_tokens: int) -> None:
        hashes = self._chain.extend(token_ids)
        for group in range(len(self._parts.device.groups)):
            self._parts.loop.scheduler.update_keys(self._req_id, group, offload_keys(hashes, group), num_tokens)

    def _restore(self, num_tokens: int) -> int:
        """Reference and load the longest prefix on the device and in the tiers; one token is left to compute."""
        blocks, size = self.blocks, self._parts.device.block_size
        on_device = self._stats.device_tokens = blocks.acquire_resident(self._chain.hashes, num_tokens - 1)
        matched = self._parts.loop.match(self._req_id, on_device)
        begin = time.perf_counter()
        first = blocks.num_blocks
        blocks.make_room(self._parts.loop.scheduler.needed_device_blocks(self._req_id, matched))
        loaded = self._parts.loop.load(self._req_id, blocks.tables, matched)
        blocks.truncate(first + loaded.num_tokens // size)
        blocks.publish(self._chain.hashes, first)
        self._stats.load_s = time.perf_counter() - begin
        self._stats.persistent_tokens = loaded.num_promoted_tokens
        self._stats.cpu_tokens = loaded.num_tokens - loaded.num_promoted_tokens
        self._stats.bytes_loaded = loaded.num_bytes
        return on_device + loaded.num_tokens

    def _forward(self, token_ids: Sequence[int], cache: RequestCache) -> torch.Tensor:
        """Return the logits after the last token, shape (vocabulary,). The tokens are appended to the cache."""
        model = self._parts.model
        inputs = torch.tensor([list(token_ids)], dtype=torch.long, device=model.device)
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, **self._parts.forward_options)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _keep(self, cache: RequestCache, num_tokens: int) -> None:
        """Copy blocks that became full to pages, report them to the connector, and step."""
        num_blocks = num_tokens // self._parts.device.block_size
        if num_blocks > self.blocks.num_blocks:
            self.blocks.keep(cache, self._chain.hashes, num_blocks)
            self._parts.loop.scheduler.update_computed_tokens(self._req_id, num_tokens, self.blocks.tables)
        self._parts.loop.step()

    def _allocate(self, pool: BlockPool, count: int) -> list[int]:
        """Return device blocks to write. May wait for blocks of earlier requests that are being stored."""
        allocated = pool.allocate(count)
        if allocated is None:
            self._parts.loop.step(wait=True)
            self._parts.loop.step(wait=True)
            allocated = pool.allocate(count)
        if allocated is None:
            raise PersistKVError(f"{count} device blocks are needed, {pool.num_available} can be had")
        return allocated
