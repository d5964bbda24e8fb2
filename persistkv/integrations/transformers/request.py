"""One request, from its prompt to its last token: block hashes, block tables, prefix restoration,
sampling."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import torch

from persistkv.base import make_offload_key
from persistkv.connector.matching import GroupBlocks, longest_match
from persistkv.errors import PersistKVError
from persistkv.integrations.transformers import arguments
from persistkv.integrations.transformers.interface import ModelForward
from persistkv.integrations.transformers.kv_cache import (
    BlockPool,
    GroupPages,
    PagedKVCache,
    RequestCache,
)
from persistkv.integrations.transformers.results import GenerateResult, RequestStats
from persistkv.integrations.transformers.tiers import Tiers
from persistkv.tenants import DEFAULT_TENANT

HASH_NAME = "sha256 over parent and tokens as little-endian u32, salt at the root"
"""How ``BlockHashChain`` hashes; part of the identity of stored KV."""
_ROOT = b"persistkv block chain 1\n"
"""Start of the bytes whose hash is the parent of each sequence's first block."""
_MOST_WAITS = 2
"""Number of waits for device blocks. The second one is for stores that find no room in the primary
tier: they begin only with it."""
# range of the seeds that a generator of torch accepts
_MIN_SEED = -(1 << 63)
_MAX_SEED = (1 << 64) - 1

BlockTable = list[int | None]
"""Device blocks of one KV cache group, in the order of the tokens; see ``Request.tables``."""


class BlockHashChain:
    """Block hashes of one growing token sequence. A hash identifies all tokens from the first to
    the block's last.

    :param salt: sequences with different salts share no hashes; None and "" differ.
    :param tenant: sequences of different tenants share no hashes either; None: the default tenant.
    """

    def __init__(
        self,
        block_size: int,
        salt: str | None = None,
        tenant: str | None = None,
    ) -> None:
        self.hashes: list[bytes] = []
        """Hashes of all full blocks so far, in order."""
        self._block_bytes = 4 * block_size
        """Bytes of the tokens of one block, four for each token."""
        self._tail = b""
        """Bytes of the tokens after the last full block."""
        root = _ROOT
        if tenant not in (None, DEFAULT_TENANT):
            # "\0" ends the name, which has no control characters, so that different pairs of tenant
            # and salt give different bytes
            root += f"tenant {tenant}\0".encode()
        if salt is not None:
            root += b"salt " + salt.encode()
        self._parent = hashlib.sha256(root).digest()
        """Hash of the last full block; before the first one, that of salt and tenant."""

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Append tokens; return the hashes of the blocks that became full."""
        packed = np.asarray(token_ids, dtype="<u4").tobytes()
        data = self._tail + packed
        full_bytes = len(data) - len(data) % self._block_bytes
        new = []
        for start in range(0, full_bytes, self._block_bytes):
            block = data[start : start + self._block_bytes]
            # include the previous hash, which identifies all tokens before this block
            digest = hashlib.sha256(self._parent + block)
            self._parent = digest.digest()
            new.append(self._parent)
        self._tail = data[full_bytes:]
        self.hashes += new
        return new


class Sampler:
    """Chooses the tokens of one request; parameters as for ``Engine.generate``. Equal seeds choose
    equal tokens from equal logits.

    :raises ConfigurationError: a parameter is of another type, or out of range.
    """

    def __init__(
        self,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._temperature = arguments.number("temperature", temperature, least=0.0)
        self._top_p = arguments.number("top_p", top_p, least=0.0, most=1.0, above=True)
        self._top_k = arguments.integer("top_k", top_k, least=0)
        checked_seed = arguments.integer("seed", seed, least=_MIN_SEED, most=_MAX_SEED)
        self._generator = torch.Generator(device).manual_seed(checked_seed)

    def choose(self, logits: torch.Tensor) -> int:
        """Return the id of the next token; ``logits`` has shape (vocabulary,)."""
        # at temperature 0, choose the most likely token
        if not self._temperature:
            return int(logits.argmax())
        scaled = logits.float() / self._temperature
        probabilities, token_ids = scaled.softmax(-1).sort(descending=True)
        # Keep a token if the tokens before it have a total probability below top_p. The first token
        # is always kept: nothing is before it.
        before = probabilities.cumsum(-1) - probabilities
        probabilities[before >= self._top_p] = 0.0
        if self._top_k:
            probabilities[self._top_k :] = 0.0
        # draw an index in the sorted order
        index = torch.multinomial(
            probabilities, num_samples=1, generator=self._generator
        )
        return int(token_ids[index])


class Request:
    """Runs one request. Device blocks in its tables stay referenced until ``release``, also after
    an error.

    :ivar req_id: its id in the tiers.
    :ivar tables: for each KV cache group, the device block of each full block of prompt and answer,
        in order. None: the block was outside of the sliding window when the request began, and was
        therefore not restored.
    :ivar ended: whether the last token was computed.
    :param forward: the model, which runs on ``model_device``.
    :param paged_cache: the device's blocks, which all requests share.
    """

    def __init__(
        self,
        forward: ModelForward,
        model_device: torch.device,
        paged_cache: PagedKVCache,
        tiers: Tiers,
        req_id: str,
        salt: str | None,
        tenant: str | None,
    ) -> None:
        self.tables: list[BlockTable] = [[] for _ in paged_cache.groups]
        self._model = forward
        self._model_device = model_device
        self._paged_cache = paged_cache
        self._tiers = tiers
        self.req_id = req_id
        self._chain = BlockHashChain(paged_cache.block_size, salt, tenant)
        self._stats = RequestStats()
        self._tokens: list[int] = []
        """Ids of the answer's tokens so far."""
        self._logits = torch.empty(0)
        """Logits of the first token of the answer, for the result; empty until it is computed."""
        self.ended = False
        self._num_kept = 0
        """Number of full blocks of the tokens that have KV, for the result. It remains when
        ``release`` empties the tables."""

    def run(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampler: Sampler,
        stop: Collection[int],
        load: bool,
    ) -> Iterator[int]:
        """Compute the tokens of the answer, each when it is asked for; parameters as for
        ``Engine.generate``. The caller must call ``Tiers.begin`` before, and ``Tiers.end`` after
        the last token that it takes, even if this raises.

        :raises PersistKVError: too few blocks of the device cache are free.
        """
        begin = time.perf_counter()
        self._stats.prompt_tokens = len(prompt)
        self._report_tokens(prompt, len(prompt))
        num_restored = self._restore(len(prompt)) if load else 0
        restored_s = time.perf_counter() - begin
        # ``_restore`` has measured the load, which is the other part of this time
        self._stats.lookup_s = restored_s - self._stats.load_s
        most_tokens = len(prompt) + max_new_tokens
        cache = RequestCache(self._paged_cache.geometry, most_tokens)
        self._gather_restored(cache)
        token = self._prefill(prompt, num_restored, cache, sampler)
        self._stats.ttft_s = time.perf_counter() - begin
        self._keep_full_blocks(cache, len(prompt))
        while True:
            self._tokens.append(token)
            self._stats.total_s = time.perf_counter() - begin
            # set ``ended`` before the yield, because the stream reads it together with the token
            self.ended = len(self._tokens) == max_new_tokens or token in stop
            yield token
            if self.ended:
                return
            num_tokens = len(prompt) + len(self._tokens)
            self._report_tokens([token], num_tokens)
            logits = self._forward([token], cache)
            token = sampler.choose(logits)
            self._keep_full_blocks(cache, num_tokens)

    def _prefill(
        self,
        prompt: Sequence[int],
        num_restored: int,
        cache: RequestCache,
        sampler: Sampler,
    ) -> int:
        """Compute the prompt after its restored tokens; return the first token of the answer.
        Measure the time that this took and the time that the restored tokens saved."""
        begin = time.perf_counter()
        logits = self._forward(prompt[num_restored:], cache)
        self._logits = logits.to("cpu", copy=True)
        self._stats.computed_tokens = len(prompt) - num_restored
        first_token = sampler.choose(logits)
        self._stats.prefill_s = time.perf_counter() - begin
        self._tiers.record_prefill(num_restored, len(prompt), self._stats.prefill_s)
        # only the tokens from stores count as saved; they are taken for the last restored ones
        first_loaded = num_restored - self._stats.persistent_tokens
        self._stats.saved_s = self._tiers.prefill_s(first_loaded, num_restored)
        return first_token

    def result(self, text: str | None) -> GenerateResult:
        """Return the result of the tokens computed so far, at least one; ``text`` is theirs."""
        tokens = list(self._tokens)
        kept = tuple(self._chain.hashes[: self._num_kept])
        return GenerateResult(
            req_id=self.req_id,
            tokens=tokens,
            text=text,
            logits=self._logits,
            block_hashes=kept,
            stats=self._stats,
        )

    def release(self) -> None:
        """Drop the references to the device blocks."""
        self._truncate(0)

    def _report_tokens(
        self,
        token_ids: Sequence[int],
        num_tokens: int,
    ) -> None:
        """Report the next tokens, up to ``num_tokens`` in all, and the keys of the blocks that
        became full, to the scheduler of the tiers."""
        hashes = self._chain.extend(token_ids)
        for group in range(len(self.tables)):
            keys = [make_offload_key(block_hash, group) for block_hash in hashes]
            self._tiers.scheduler.update_keys(self.req_id, group, keys, num_tokens)

    def _restore(self, num_tokens: int) -> int:
        """Restore the longest prefix of ``num_tokens - 1`` tokens from device and tiers; return its
        length."""
        on_device = self._acquire_resident(num_tokens - 1)
        self._stats.device_tokens = on_device
        num_matched = self._tiers.match(self.req_id, on_device)
        begin = time.perf_counter()
        first_new_block = self._num_blocks
        # Allocate device blocks only after ``match``, which may wait for promotions: blocks that
        # were allocated before it would be missing to other requests during the wait.
        self._allocate_matched(num_matched)
        progress = self._tiers.load(self.req_id, self.tables, num_matched)
        num_loaded = progress.num_tokens if progress.success else 0
        loaded_blocks = num_loaded // self._paged_cache.block_size
        # release the blocks that were not loaded: their content must not be published
        self._truncate(first_new_block + loaded_blocks)
        self._publish(first_new_block)
        self._stats.load_s = time.perf_counter() - begin
        self._stats.bytes_loaded = progress.num_bytes
        self._count_loaded(num_loaded)
        return on_device + num_loaded

    def _allocate_matched(self, num_matched: int) -> None:
        """Append a device block to the tables for each block of ``num_matched`` further tokens."""
        scheduler = self._tiers.scheduler
        needed = scheduler.needed_device_blocks(self.req_id, num_matched)
        groups = self._paged_cache.groups
        for group, table, positions in zip(groups, self.tables, needed, strict=True):
            # blocks before the sliding window are not restored: None takes their places
            num_skipped = positions.start - len(table)
            table += [None] * num_skipped
            allocated = self._allocate(group.pool, len(positions))
            table += allocated

    def _count_loaded(self, num_loaded: int) -> None:
        """Record how many of the loaded tokens each tier had, and the outcome of the load."""
        num_promoted = self._tiers.scheduler.num_promoted_tokens(self.req_id)
        self._stats.persistent_tokens = num_promoted
        self._stats.cpu_tokens = num_loaded - num_promoted
        self._stats.load_reason = self._tiers.load_reason(self.req_id)

    def _acquire_resident(self, limit: int) -> int:
        """Reference the device's blocks of the longest prefix up to ``limit`` tokens that every
        group can restore from the device; return its length.
        """
        hashes = self._chain.hashes
        groups = [
            GroupBlocks(group.blocks, hashes, group.pool.holds)
            for group in self._paged_cache.groups
        ]
        block_size = self._paged_cache.block_size
        num_tokens = longest_match(groups, block_size, start=0, limit=limit)
        for group, table in self._groups():
            needed = group.blocks.device_blocks(num_tokens)
            # blocks before the sliding window are not needed: None takes their places
            table += [None] * needed.start
            # acquire every needed block: the match has just found all of them on the device
            for position in needed:
                block_id = group.pool.acquire(hashes[position])
                table.append(block_id)
        return num_tokens

    def _gather_restored(self, cache: RequestCache) -> None:
        """Copy the restored blocks that the next token attends to from the pages to the request's
        cache."""
        num_tokens = self._num_blocks * self._paged_cache.block_size
        groups = self._paged_cache.groups
        for group, table, buffer in zip(
            groups, self.tables, cache.buffers, strict=True
        ):
            needed = group.blocks.device_blocks(num_tokens)
            block_ids = _blocks_in(table[needed.start :])
            group.gather(buffer, needed, block_ids)
        cache.set_length(num_tokens)

    def _forward(
        self,
        token_ids: Sequence[int],
        cache: RequestCache,
    ) -> torch.Tensor:
        """Run the model on new tokens, append their KV to the cache, return the last logits, shape
        (vocabulary,)."""
        batch = [list(token_ids)]
        inputs = torch.tensor(batch, dtype=torch.long, device=self._model_device)
        return self._model(inputs, cache)

    def _keep_full_blocks(self, cache: RequestCache, num_tokens: int) -> None:
        """Copy the blocks that became full to pages, publish them, and report them to the
        connector, whose next step starts to store them; then make a step.

        :param num_tokens: tokens that have KV in the cache.
        """
        # ``_num_blocks`` is the length of the tables: the blocks that were full before this call
        first_new_block = self._num_blocks
        self._num_kept = num_tokens // self._paged_cache.block_size
        new_blocks = range(first_new_block, self._num_kept)
        if new_blocks:
            groups = self._paged_cache.groups
            for group, table, buffer in zip(
                groups, self.tables, cache.buffers, strict=True
            ):
                self._write_pages(group, table, buffer, new_blocks)
            self._publish(first_new_block)
            scheduler = self._tiers.scheduler
            scheduler.update_computed_tokens(self.req_id, num_tokens, self.tables)
        self._tiers.step()

    def _write_pages(
        self,
        group: GroupPages,
        table: BlockTable,
        buffer: torch.Tensor,
        positions: range,
    ) -> None:
        """Append the blocks at ``positions`` to a group's table, and copy those that are not on the
        device yet from the request's buffer. A block that the device has already is referenced
        instead, so that all requests use the same bytes."""
        new_positions = []
        new_block_ids = []
        for position in positions:
            block_id = group.pool.acquire(self._chain.hashes[position])
            if block_id is None:
                (block_id,) = self._allocate(group.pool, count=1)
                new_positions.append(position)
                new_block_ids.append(block_id)
            table.append(block_id)
        group.scatter(buffer, new_positions, new_block_ids)

    def _allocate(
        self,
        pool: BlockPool,
        count: int,
    ) -> list[int]:
        """Return device blocks to write; if too few are available, wait for transfers of earlier
        requests first."""
        allocated = pool.allocate(count)
        for _ in range(_MOST_WAITS):
            if allocated is not None:
                break
            # ended requests keep their device blocks until their stores have ended
            self._tiers.step(wait=True)
            allocated = pool.allocate(count)
        if allocated is None:
            raise PersistKVError(
                f"{count} device blocks are needed, {pool.num_available} are available"
            )
        return allocated

    def _publish(self, first: int) -> None:
        """Make the request's blocks from index ``first`` on reusable by later requests."""
        for group, table in self._groups():
            for position in range(first, len(table)):
                block_id = table[position]
                if block_id is not None:
                    group.pool.publish(block_id, self._chain.hashes[position])

    def _truncate(self, num_blocks: int) -> None:
        """Release the request's device blocks, except the first ``num_blocks`` of each group."""
        for group, table in self._groups():
            released = _blocks_in(table[num_blocks:])
            group.pool.release(released)
            del table[num_blocks:]

    @property
    def _num_blocks(self) -> int:
        """Length of each table, the same for all groups."""
        return len(self.tables[0])

    def _groups(self) -> Iterable[tuple[GroupPages, BlockTable]]:
        """Return the device's pages and the request's table of each KV cache group."""
        return zip(self._paged_cache.groups, self.tables, strict=True)


def _blocks_in(table: Iterable[int | None]) -> list[int]:
    """Return the device blocks of a table, without the positions that have none."""
    return [block_id for block_id in table if block_id is not None]
