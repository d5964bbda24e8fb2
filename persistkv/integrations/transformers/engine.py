"""A small engine for a Hugging Face model, with a paged KV cache, prefix reuse, and tiers that
outlive the process."""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch

from persistkv.config import StoreUrl, parse_size, store_url
from persistkv.errors import ConfigurationError, EngineClosedError, PromptTooLongError
from persistkv.integrations.transformers import arguments
from persistkv.integrations.transformers.arguments import (
    GenerateOptions,
    RequestArguments,
)
from persistkv.integrations.transformers.interface import ModelForward
from persistkv.integrations.transformers.kv_cache import PagedKVCache
from persistkv.integrations.transformers.model import (
    check_model_object,
    check_source,
    context_length,
    load_model,
    model_identity,
    probe_model,
    vocabulary_size,
)
from persistkv.integrations.transformers.prompts import (
    Prompt,
    Tokenizer,
    check_token_ids,
)
from persistkv.integrations.transformers.request import Request, Sampler
from persistkv.integrations.transformers.results import EngineStats, GenerateResult
from persistkv.integrations.transformers.stream import TokenStream
from persistkv.integrations.transformers.tiers import Tiers
from persistkv.storage import BACKENDS
from persistkv.storage.format.codec import parse_codec
from persistkv.tenants import DEFAULT_TENANT, TENANT_OPTIONS
from persistkv.tiering.load_cost import LOAD_POLICIES

_DEFAULT_DEVICE_TOKENS = 8192
_CLOSE_S = 60.0  # seconds for the flush of ``close``
_POLL_S = 0.001  # seconds between two polls, far below the time of a commit


class Engine:
    """Answers prompts; computed KV is kept on the device, in the primary tier, and in a store.

    Created with ``Engine.open``, not with the constructor. Closed by ``close`` or a ``with``
    statement, else at the end of the program or when nothing refers to it any more. Any thread may
    call it: requests run one after the other, those of ``stream`` token by token. A process that
    was forked from the engine's must not use it.

    :ivar model: the Hugging Face model.
    :ivar geometry: the model's KV cache groups, and the shape of their KV.
    """

    def __init__(
        self,
        model: Any,
        paged_cache: PagedKVCache,
        tiers: Tiers,
        *,
        tokenizer: Tokenizer,
        stores: Sequence[str],
    ) -> None:
        self.model = model
        self.geometry = paged_cache.geometry
        self._stores = tuple(stores)
        self._num_requests = 0
        """Requests that have begun, for ``stats``."""
        self._paged_cache = paged_cache
        self._tiers = tiers
        self._tokenizer = tokenizer
        self._forward = ModelForward(model)
        self._context_length = context_length(model)
        """Maximum number of tokens of a sequence; None: the model names no limit."""
        self._vocabulary_size = vocabulary_size(model)
        self._lock = threading.RLock()
        """Held by each use of the device cache and of the tiers, which are made for one thread.
        Reentrant, because ``generate`` and its stream both acquire it."""
        self._closing = weakref.finalize(self, _close, tiers, _CLOSE_S, os.getpid())
        """Alive until the engine is closed; runs at the end of the program for an engine that was
        not closed."""

    @classmethod
    @arguments.checks_names
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
        load_policy: str = "auto",
        prefill_tokens_per_s: float | None = None,
        tenant: str = DEFAULT_TENANT,
        dtype: torch.dtype | str = "auto",
        attn_implementation: str | None = None,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
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
        :param load_policy: ``auto`` loads a prefix if that is expected to be faster than computing
            it; ``always`` and ``never`` do not compare.
        :param prefill_tokens_per_s: speed of the model for this comparison; None: as measured.
        :param tenant: tenant of the requests that name none: ``default``, or ``required``: such
            requests neither use nor fill the store.
        :param dtype: data type of a model that is loaded here, not a model object;
            ``attn_implementation`` and ``device`` likewise.
        :param tokenizer: for prompts and answers as text: a tokenizer of transformers, or a
            checkpoint's directory or name. By default that of the checkpoint; a model object has
            none.
        :raises ConfigurationError: an option is invalid; the error names it.
        :raises UnsupportedModelError: the model uses a kind of cache that this engine does not
            support.
        :raises UnsupportedReleaseError: persistkv does not support the installed release of
            transformers.
        :raises IdentityMismatchError: see ``strict_identity``.
        :raises StoreError: ``required`` is set and a store cannot be opened.
        """
        block_size = arguments.integer("block_size", block_size, least=1)
        if device_blocks is None:
            device_blocks = _DEFAULT_DEVICE_TOKENS // block_size
        num_blocks = arguments.integer("device_blocks", device_blocks, least=1)
        urls = _store_urls(store)
        primary_bytes = parse_size(cpu_bytes, name="cpu_bytes")
        # check the options of the tiers before the model is loaded, which takes long
        parse_codec(arguments.text("codec", codec))
        arguments.flag("strict_identity", strict_identity)
        arguments.flag("required", required)
        deadline_s = arguments.number("lookup_deadline_s", lookup_deadline_s, least=0.0)
        share = arguments.number("prewarm_share", prewarm_share, least=0.0, most=1.0)
        arguments.choice("load_policy", load_policy, LOAD_POLICIES)
        arguments.choice("tenant", tenant, TENANT_OPTIONS)
        loaded, checkpoint = _open_model(model, dtype, attn_implementation, device)
        opened_tokenizer = _open_tokenizer(tokenizer, model)
        loaded.eval()
        geometry = probe_model(loaded)
        # the fingerprint of the weights takes seconds, and only a store needs it
        identity: dict[str, Any] = {}
        if urls:
            identity = model_identity(loaded, checkpoint, geometry, block_size)
        paged_cache = PagedKVCache(geometry, num_blocks, block_size)
        try:
            tiers = Tiers(
                paged_cache,
                identity,
                urls,
                cpu_bytes=primary_bytes,
                lookup_deadline_s=deadline_s,
                prewarm_share=share,
                codec=codec,
                host=host,
                strict_identity=strict_identity,
                required=required,
                load_policy=load_policy,
                prefill_tokens_per_s=prefill_tokens_per_s,
                tenant=tenant,
            )
        except ConfigurationError as error:
            # name the argument of this method instead of the tiers' option
            if error.field != "cpu_bytes_to_use":
                raise
            raise ConfigurationError(
                "cpu_bytes", error.value, error.expected
            ) from error
        if share:
            tiers.prewarm()
        return cls(loaded, paged_cache, tiers, tokenizer=opened_tokenizer, stores=urls)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 16,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult:
        """Generate tokens that continue a prompt. Other requests wait meanwhile.

        Blocks are stored while the request runs; they are durable some time later
        (``wait_persisted``).

        :param prompt: text, or a chat (a list of messages with ``role`` and ``content``), which the
            tokenizer converts; or token ids: integers, a tensor of shape (tokens,) or (1, tokens),
            or a tokenizer's output.
        :param options: ``temperature=0.0``, ``top_p=1.0``, ``top_k=0``, ``seed=0``,
            ``stop_token_ids``, ``salt``, ``tenant``, ``labels``, ``load=True``, ``store=True``,
            ``kv_transfer_params``; see ``GenerateOptions``.
        :raises ConfigurationError: the prompt or an option is invalid. Nothing was run.
        :raises PromptTooLongError: prompt and answer exceed the model's context length or the
            device cache. Nothing was run.
        :raises EngineClosedError: the engine is closed; other methods raise it, too.
        """
        stream = self.stream(prompt, max_new_tokens, **options)
        with self._lock:
            return stream.finish()

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 16,
        **options: Unpack[GenerateOptions],
    ) -> TokenStream:
        """Return the tokens that continue a prompt as an iterator, which computes each when it is
        asked for; parameters and errors as for ``generate``.

        The device cache must have room for the whole answers of all streams that have begun.
        """
        tokens = self._checked_prompt(prompt, max_new_tokens)
        checked = RequestArguments.check(options, self._vocabulary_size)
        sampler = Sampler(
            temperature=options.get("temperature", 0.0),
            top_p=options.get("top_p", 1.0),
            top_k=options.get("top_k", 0),
            seed=options.get("seed", 0),
            device=self.model.device,
        )
        stop = self._stop_tokens() if checked.stop is None else checked.stop
        self._check_open()
        request = Request(
            self._forward,
            self.model.device,
            self._paged_cache,
            self._tiers,
            req_id=uuid.uuid4().hex,
            salt=checked.salt,
            tenant=checked.tenant,
        )

        # begin the request when the first token is asked for: a stream that is never read takes no
        # device blocks from other requests
        def start() -> Iterator[int]:
            self._begin(request, checked, len(tokens) + max_new_tokens)
            return request.run(tokens, max_new_tokens, sampler, stop, checked.load)

        return TokenStream(request, start, self._tiers, self._lock, self._tokenizer)

    def _begin(
        self,
        request: Request,
        checked: RequestArguments,
        num_tokens: int,
    ) -> None:
        """Begin a request in the tiers.

        :param num_tokens: tokens of prompt and answer.
        :raises ConfigurationError: running requests may need the device blocks; nothing changed.
        """
        self._check_open()
        # only full blocks need device blocks: tokens of a partial block stay in the request's cache
        num_blocks = num_tokens // self._paged_cache.block_size
        self._check_room(num_blocks)
        self._num_requests += 1
        # step first: this frees the rows of stores that have ended since the last step, so that the
        # request can use them
        self._tiers.step()
        self._tiers.scheduler.on_new_request(
            request.req_id,
            checked.parameters,
            checked.labels,
            store=checked.store,
            retention=checked.retention,
            tenant=checked.tenant,
        )
        self._tiers.begin(request.req_id, request.release, num_blocks)

    def wait_persisted(
        self,
        request: GenerateResult | str,
        timeout_s: float = 60.0,
    ) -> bool:
        """Wait until the whole context of a request is durable in every store. Return False if the
        timeout passed first, a store dropped part of the context, or the engine has no store.
        Requests of other threads run meanwhile.

        :param request: a result, or the id of a request; one of the last 4,096 of this engine.
        :raises ConfigurationError: ``request`` is neither.
        """
        seconds = arguments.number("timeout_s", timeout_s, least=0.0)
        req_id = request.req_id if isinstance(request, GenerateResult) else request
        is_known = isinstance(req_id, str) and self._tiers.knows(req_id)
        if not is_known:
            raise ConfigurationError(
                "request",
                req_id,
                "a result of this engine, or its req_id: one of the last 4,096",
            )
        deadline = time.monotonic() + seconds
        while True:
            # release the lock between two checks, so that requests of other threads run
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
        seconds = arguments.number("timeout_s", timeout_s, least=0.0)
        with self._lock:
            self._check_open()
            return self._tiers.flush(seconds)

    def stats(self) -> EngineStats:
        """Return totals since the engine was opened. Waits up to 5 s for the answer of each
        store."""
        with self._lock:
            num_blocks = 0
            num_resident = 0
            for group in self._paged_cache.groups:
                num_blocks += group.pool.num_blocks
                num_resident += len(group.pool.resident())
            stores = [tier.client.stats() for tier in self._tiers.persistent]
            return EngineStats(
                requests=self._num_requests,
                device_blocks=num_blocks,
                resident_blocks=num_resident,
                cpu_blocks=self._tiers.num_blocks,
                block_bytes=self._paged_cache.block_bytes,
                connector=self._tiers.scheduler.stats,
                load_reasons=self._tiers.load_reasons(),
                persistent=tuple(stores),
            )

    @property
    def notices(self) -> Sequence[str]:
        """Messages of the stores for the user, such as the reason why a store contains nothing for
        this model."""
        notices: list[str] = []
        for tier in self._tiers.persistent:
            notices.extend(tier.client.notices)
        return tuple(notices)

    def resident_pages(self, group_idx: int = 0) -> dict[bytes, torch.Tensor]:
        """Return the reusable pages of one group of ``geometry`` by block hash: views, shape
        (layers, 2, kv_heads, block_size, head_dim).
        """
        group = self._paged_cache.groups[group_idx]
        return {
            block_hash: group.pages[index]
            for block_hash, index in group.pool.resident().items()
        }

    def forget_device(self) -> None:
        """Wait for all transfers, without a time limit. Then drop the blocks of ended requests from
        the device; the tiers keep their copies.
        """
        with self._lock:
            self._check_open()
            self._tiers.drain(math.inf)
            for group in self._paged_cache.groups:
                group.pool.forget()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Flush all stores, then release all resources. Idempotent.

        Streams that have not ended are ended.

        :param timeout_s: timeout of the flush. A store that hangs takes up to two minutes more,
            until its process is killed, because it may use rows until then. Blocks that are not
            durable then may be lost.
        """
        seconds = arguments.number("timeout_s", timeout_s, least=0.0)
        with self._lock:
            # ``detach`` returns None if the engine is closed already
            if self._closing.detach() is not None:
                _close(self._tiers, seconds, owner_pid=os.getpid())

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stores = ", ".join(self._stores) or "no store"
        state = "open" if self._closing.alive else "closed"
        return f"<Engine {type(self.model).__name__}, {stores}, {state}>"

    def _checked_prompt(
        self,
        prompt: Prompt,
        max_new_tokens: int,
    ) -> list[int]:
        """Return the token ids of a prompt that, with the answer, fits the model and the device
        cache."""
        tokens = self._tokenizer.token_ids(prompt)
        check_token_ids("prompt", tokens, self._vocabulary_size)
        num_new = arguments.integer("max_new_tokens", max_new_tokens, least=1)
        num_tokens = len(tokens) + num_new
        block_size = self._paged_cache.block_size
        if self._context_length is not None and num_tokens > self._context_length:
            raise PromptTooLongError(num_tokens, self._context_length)
        # only full blocks need device blocks, so a partial last block always fits
        num_full_blocks = num_tokens // block_size
        if num_full_blocks > self._paged_cache.num_blocks:
            limit = self._paged_cache.num_blocks * block_size + block_size - 1
            raise PromptTooLongError(
                num_tokens, limit, option="device_blocks", needed=num_full_blocks
            )
        return tokens

    def _check_room(self, num_blocks: int) -> None:
        """Raise ConfigurationError unless a request and all running ones find device blocks, so
        that no stream ends for lack of them."""
        running = list(self._tiers.running.values())
        needed = num_blocks + sum(running)
        if needed > self._paged_cache.num_blocks:
            raise ConfigurationError(
                "device_blocks",
                self._paged_cache.num_blocks,
                f"{needed} or more for this request and {len(running)} streams that have not ended",
            )

    def _stop_tokens(self) -> frozenset[int]:
        """Return the tokens with which the model itself ends an answer."""
        config = getattr(self.model, "generation_config", None)
        # one token, several tokens, or None
        found = getattr(config, "eos_token_id", None)
        if isinstance(found, int):
            return frozenset([found])
        return frozenset(found or ())

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise EngineClosedError


def _close(
    tiers: Tiers,
    timeout_s: float,
    owner_pid: int,
) -> None:
    """End all streams of an engine, then flush and release its tiers.

    :param owner_pid: process that opened the engine. In another process, this does nothing: it also
        runs at the end of a forked process, which shares the files of the tiers.
    """
    if os.getpid() != owner_pid:
        return
    tiers.end_all()
    try:
        tiers.flush(timeout_s)
    finally:
        tiers.close()


def _store_urls(store: str | Path | Sequence[str | Path] | None) -> list[str]:
    """Return the URLs of the stores; raise ConfigurationError if one is invalid."""
    if store is None:
        return []
    stores: Sequence[object] = [store]
    if isinstance(store, Sequence) and not isinstance(store, str):
        stores = store
    urls = []
    for entry in stores:
        if not isinstance(entry, (str, Path)):
            raise ConfigurationError(
                "store", entry, "a URL or a path, or a list of them"
            )
        url = store_url(entry)
        # raise for an invalid URL, or a scheme without a backend
        BACKENDS.get(StoreUrl.parse(url).scheme)
        urls.append(url)
    return urls


def _open_model(
    model: Any,
    dtype: torch.dtype | str,
    attn_implementation: str | None,
    device: torch.device | str | None,
) -> tuple[Any, Path | None]:
    """Return the model, and the directory that it was loaded from; None: it is identified by its
    state dict. Parameters as for ``Engine.open``."""
    if isinstance(model, (str, Path)):
        checked_device = None if device is None else arguments.device(device)
        if attn_implementation is not None:
            arguments.text("attn_implementation", attn_implementation)
        return load_model(
            model, arguments.dtype(dtype), attn_implementation, checked_device
        )
    check_model_object(model)
    # refuse options of loading, which would have no effect on a model object
    for name, value, default in (
        ("dtype", dtype, "auto"),
        ("attn_implementation", attn_implementation, None),
        ("device", device, None),
    ):
        if value != default:
            raise ConfigurationError(
                name, value, "no value: it is for a model that is loaded here"
            )
    return model, None


def _open_tokenizer(tokenizer: Any, model: Any) -> Tokenizer:
    """Return the given tokenizer, or else that of the checkpoint; parameters as for
    ``Engine.open``."""
    if isinstance(tokenizer, (str, Path)):
        check_source("tokenizer", tokenizer)
        return Tokenizer.load(tokenizer)
    if tokenizer is not None:
        return Tokenizer(tokenizer)
    if isinstance(model, (str, Path)):
        return Tokenizer.load(model)
    return Tokenizer(None, missing="Engine.open takes one as tokenizer=")
