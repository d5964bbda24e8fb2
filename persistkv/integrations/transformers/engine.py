"""A small engine for a Hugging Face model, with a paged KV cache, prefix reuse, and tiers that
outlive the process."""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from persistkv.config import StoreUrl, parse_size, store_url
from persistkv.errors import ConfigurationError, EngineClosedError, PromptTooLongError
from persistkv.integrations.request_options import RequestOptions
from persistkv.integrations.transformers.interface import ModelForward
from persistkv.integrations.transformers.kv_cache import PagedKVCache
from persistkv.integrations.transformers.model import (
    context_length,
    load_model,
    model_identity,
    probe_model,
)
from persistkv.integrations.transformers.request import (
    Request,
    Sampler,
    TokenIds,
    one_row,
)
from persistkv.integrations.transformers.results import EngineStats, GenerateResult
from persistkv.integrations.transformers.tiers import Tiers
from persistkv.storage import BACKENDS

_DEFAULT_DEVICE_TOKENS = 8192
_CLOSE_S = 60.0
_POLL_S = 0.001  # far below the time of a commit


class Engine:
    """Runs one request at a time; computed KV is kept on the device, in the primary tier, and in a
    store.

    Created with ``Engine.open``, not with the constructor. Closed by ``close`` or a ``with``
    statement, else at the end of the program or when nothing refers to it any more. Any thread may
    call it: requests run one after the other. A process that was forked from the engine's must not
    use it.

    :ivar model: the Hugging Face model.
    :ivar geometry: the model's KV cache groups, and the shape of their KV.
    """

    def __init__(self, model: Any, device: PagedKVCache, tiers: Tiers) -> None:
        self._num_requests = 0
        self.model, self.geometry = model, device.geometry
        self._device, self._tiers = device, tiers
        self._forward = ModelForward(model)
        self._context_length = context_length(model)
        self._lock = threading.RLock()
        """Held by each use of the device cache and of the tiers, which are made for one thread."""
        self._closing = weakref.finalize(self, _close, tiers, _CLOSE_S, os.getpid())
        """Alive until the engine is closed; runs at the end of the program for an engine that
        nobody closed."""

    @classmethod
    def open(
        cls,
        model: Any,
        store: str | Path | Sequence[str | Path] | None = None,
        *,
        block_size: int = 16,
        device_blocks: int | None = None,
        cpu_bytes: int | str = "1GiB",
        codec: str = "raw",
        host: str = "process",
        strict_identity: bool = False,
        required: bool = False,
        lookup_deadline_s: float = 10.0,
        prewarm_share: float = 0.0,
        dtype: torch.dtype | str = "auto",
        attn_implementation: str | None = None,
        device: torch.device | str | None = None,
    ) -> Engine:
        """Open a model, and the store for its KV.

        :param model: a directory with a checkpoint, a name that transformers knows, or a model
            object, which is put into evaluation mode. All engines that open the same checkpoint
            share its KV; the KV of a model object is identified by its state dict.
        :param store: URL of the store, such as ``lmdb:///var/kv?capacity=100GiB``, or the path of
            an LMDB store; None: nothing outlives this process. Several stores are given nearest
            first: each stores all contexts, and a context that only a later store holds is written
            to the others when it is used.
        :param block_size: tokens in a block.
        :param device_blocks: blocks of the device cache for each KV cache group; by default enough
            for 8,192 tokens.
        :param cpu_bytes: size of the primary tier.
        :param codec: codec of new packs: ``raw``, ``zstd`` or ``planes``; ``zstd:LEVEL``,
            ``planes:WIDTH``. Packs of any codec can be read.
        :param host: execution context of the store: ``process`` or ``thread``.
        :param strict_identity: refuse a store that contains only KV of other identities, e.g. of
            other models.
        :param required: refuse to start if a store cannot be opened, for example because another
            process holds its lock or a server refuses access. By default an error is logged, and
            the store is tried again in the background.
        :param lookup_deadline_s: seconds that a request waits for blocks being promoted from the
            store.
        :param prewarm_share: part of the primary tier, 0 to 1, to fill with the store's most
            recently used contexts before this returns, which takes up to a minute.
        :param dtype: data type of a model that is loaded by name; ``attn_implementation`` and
            ``device`` likewise.
        :raises ConfigurationError: an option is invalid.
        :raises UnsupportedModelError: the model uses a kind of cache that this engine does not
            support.
        :raises UnsupportedReleaseError: persistkv does not support the installed release of
            transformers.
        :raises IdentityMismatchError: see ``strict_identity``.
        :raises StoreError: ``required`` is set and a store cannot be opened.
        """
        if block_size <= 0:
            raise ConfigurationError("block_size", block_size, "a positive number")
        blocks = device_blocks
        if blocks is None:
            blocks = _DEFAULT_DEVICE_TOKENS // block_size
        if blocks <= 0:
            raise ConfigurationError("device_blocks", blocks, "a positive number")
        urls = _store_urls(store)
        num_bytes = parse_size(cpu_bytes, name="cpu_bytes")
        checkpoint: Path | None = None
        if isinstance(model, (str, Path)):
            model, checkpoint = load_model(model, dtype, attn_implementation, device)
        model.eval()
        geometry = probe_model(model)
        # the fingerprint of the weights takes seconds, and only a store needs it
        identity: dict[str, Any] = {}
        if urls:
            identity = model_identity(model, checkpoint, geometry, block_size)
        cache = PagedKVCache(geometry, blocks, block_size)
        try:
            tiers = Tiers(
                cache,
                identity,
                urls,
                cpu_bytes=num_bytes,
                lookup_deadline_s=lookup_deadline_s,
                prewarm_share=prewarm_share,
                codec=codec,
                host=host,
                strict_identity=strict_identity,
                required=required,
            )
        except ConfigurationError as error:
            if error.field != "cpu_bytes_to_use":
                raise
            raise ConfigurationError(
                "cpu_bytes", error.value, error.expected
            ) from error
        if prewarm_share:
            tiers.prewarm()
        return cls(model, cache, tiers)

    def generate(
        self,
        token_ids: TokenIds,
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop_token_ids: Collection[int] | None = None,
        salt: str | None = None,
        labels: Mapping[str, str] | None = None,
        load: bool = True,
        store: bool = True,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> GenerateResult:
        """Generate tokens that continue a prompt.

        Blocks are stored while the request runs; they are durable some time later
        (``wait_persisted``).

        :param token_ids: the prompt: integers, a tensor of shape (tokens,) or (1, tokens), or a
            tokenizer's output.
        :param temperature: 0 chooses the most likely token.
        :param top_p: draw from the most likely tokens with this total probability.
        :param top_k: draw from this many most likely tokens; 0: no limit.
        :param stop_token_ids: tokens that end the generation; by default the model's own.
        :param salt: contexts of different salts share no blocks.
        :param labels: stored with the context and shown by tools.
        :param load: False computes the whole prompt and restores no KV.
        :param store: False stores no block of this request in the tiers.
        :param kv_transfer_params: ``RequestOptions`` in the form of vLLM's requests, for an engine
            behind a server: ``{"persistkv": {"load": False, "ttl": "1h"}}``. ``load`` or ``store``
            is off if either form sets it to False.
        :raises ConfigurationError: an option is invalid. Nothing was run.
        :raises PromptTooLongError: prompt and answer exceed the model's context length or the
            device cache. Nothing was run.
        :raises EngineClosedError: the engine is closed; other methods raise it, too.
        """
        prompt = self._checked_prompt(token_ids, max_new_tokens)
        stop = (
            self._stop_tokens() if stop_token_ids is None else frozenset(stop_token_ids)
        )
        sampler = Sampler(temperature, top_p, top_k, seed, self.model.device)
        options = RequestOptions.parse(kv_transfer_params)
        load, store, labels = (
            load and options.load,
            store and options.store,
            {**(labels or {}), **options.labels},
        )
        req_id = uuid.uuid4().hex
        with self._lock:
            self._check_open()
            self._num_requests += 1
            # rows of stores that ended since the last step are free for this request
            self._tiers.step()
            self._tiers.scheduler.on_new_request(
                req_id,
                kv_transfer_params,
                labels,
                store=store,
                retention=options.retention,
            )
            request = Request(
                self._forward,
                self.model.device,
                self._device,
                self._tiers,
                req_id,
                salt,
            )
            self._tiers.begin(req_id, request.release)
            try:
                with torch.no_grad():
                    return request.run(prompt, max_new_tokens, sampler, stop, load)
            finally:
                self._tiers.scheduler.request_finished(req_id)
                self._tiers.step()

    def wait_persisted(
        self, request: GenerateResult | str, timeout_s: float = 60.0
    ) -> bool:
        """Wait until the whole context of a request is durable in every store. Return False if the
        timeout passed first, a store dropped part of the context, or the engine has no store.
        Requests of other threads run meanwhile.
        """
        req_id = request if isinstance(request, str) else request.req_id
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._check_open()
                self._tiers.step()
                persisted = self._tiers.persisted(req_id)
            if persisted is not None:
                return persisted
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all submitted blocks are durable or dropped in every store. Return False if
        the timeout passed first, or a store is not open. Requests of other threads wait meanwhile.
        """
        with self._lock:
            self._check_open()
            return self._tiers.flush(timeout_s)

    def stats(self) -> EngineStats:
        """Return totals since the engine was opened. Waits up to 5 s for the answer of each
        store."""
        with self._lock:
            num_blocks = num_resident = 0
            for group in self._device.groups:
                num_blocks += group.pool.num_blocks
                num_resident += len(group.pool.resident())
            return EngineStats(
                self._num_requests,
                num_blocks,
                num_resident,
                self._tiers.num_blocks,
                self._device.block_bytes,
                self._tiers.scheduler.stats,
                tuple(tier.client.stats() for tier in self._tiers.persistent),
            )

    @property
    def notices(self) -> Sequence[str]:
        """Messages of the stores for the user, such as the reason why a store contains nothing for
        this model."""
        return tuple(
            notice for tier in self._tiers.persistent for notice in tier.client.notices
        )

    def resident_pages(self, group_idx: int = 0) -> dict[bytes, torch.Tensor]:
        """Return the reusable pages of one group of ``geometry`` by block hash: views, shape
        (layers, 2, kv_heads, block_size, head_dim).
        """
        group = self._device.groups[group_idx]
        return {
            block_hash: group.pages[index]
            for block_hash, index in group.pool.resident().items()
        }

    def forget_device(self) -> None:
        """Wait for all transfers, without a time limit. Then drop the blocks of finished requests
        from the device; the tiers keep their copies.
        """
        with self._lock:
            self._check_open()
            self._tiers.drain(math.inf)
            for group in self._device.groups:
                group.pool.forget()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Flush all stores, then release all resources. Idempotent.

        :param timeout_s: timeout of the flush. A store that hangs takes up to two minutes more,
            until its process is killed, because it may use rows until then. Blocks that are not
            durable then may be lost.
        """
        with self._lock:
            if self._closing.detach():
                _close(self._tiers, timeout_s, os.getpid())

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked_prompt(self, token_ids: TokenIds, max_new_tokens: int) -> list[int]:
        prompt = one_row(token_ids)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if not prompt or min(prompt) < 0 or max(prompt) >= vocabulary:
            shown = f"{len(prompt)} tokens" if prompt else "no tokens"
            raise ConfigurationError(
                "token_ids",
                shown,
                f"at least one token, each from 0 to {vocabulary - 1}",
            )
        if max_new_tokens <= 0:
            raise ConfigurationError(
                "max_new_tokens", max_new_tokens, "a positive number"
            )
        num_tokens, block_size = len(prompt) + max_new_tokens, self._device.block_size
        if self._context_length is not None and num_tokens > self._context_length:
            raise PromptTooLongError(num_tokens, self._context_length)
        limit = (self._device.num_blocks + 1) * block_size - 1
        if num_tokens > limit:
            raise PromptTooLongError(
                num_tokens, limit, "device_blocks", num_tokens // block_size
            )
        return prompt

    def _stop_tokens(self) -> frozenset[int]:
        found = getattr(
            getattr(self.model, "generation_config", None), "eos_token_id", None
        )
        return frozenset([found] if isinstance(found, int) else found or ())

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise EngineClosedError


def _close(tiers: Tiers, timeout_s: float, owner_pid: int) -> None:
    """Flush and release the tiers of an engine, in the process that opened them; a fork shares
    their files."""
    if os.getpid() != owner_pid:
        return
    try:
        tiers.flush(timeout_s)
    finally:
        tiers.close()


def _store_urls(store: str | Path | Sequence[str | Path] | None) -> list[str]:
    """Return the URLs of the stores; raise ConfigurationError if one is invalid."""
    if store is None:
        return []
    stores = [store] if isinstance(store, (str, Path)) else store
    urls = [store_url(entry) for entry in stores]
    for url in urls:
        BACKENDS.get(StoreUrl.parse(url).scheme)
    return urls
