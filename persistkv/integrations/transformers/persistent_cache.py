"""Stored KV for plain ``transformers``: ``load`` fills a cache for ``model.generate``, ``save``
stores it.

Contexts are the same as those of ``Engine``: with the same weights, options and block size, each
finds what the other stored. Both functions open the store, work in the caller's thread, and close
the store.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from persistkv.base import OffloadKey, make_offload_key
from persistkv.batches import batched
from persistkv.config import GroupLayout, RowLayout, store_url
from persistkv.connector.matching import GroupBlocks, longest_match
from persistkv.cpu.shared_offload_region import row_stride_bytes
from persistkv.errors import ConfigurationError, PromptTooLongError, StoreError
from persistkv.integrations.transformers import arguments
from persistkv.integrations.transformers.interface import ModelForward
from persistkv.integrations.transformers.kv_cache import KVGeometry, RequestCache
from persistkv.integrations.transformers.model import (
    check_model_object,
    context_length,
    model_identity,
    probe_model,
    vocabulary_size,
)
from persistkv.integrations.transformers.prompts import (
    TokenIds,
    check_token_ids,
    one_row,
)
from persistkv.integrations.transformers.request import BlockHashChain
from persistkv.memory.budget import BLOCKS_STAGED
from persistkv.memory.pages import huge_memory
from persistkv.memory.rows import Rows
from persistkv.storage import open_backend
from persistkv.storage.format.codec import parse_codec
from persistkv.storage.identity import Identity
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from persistkv.storage.store.savings import MEASURED_TOKENS, Savings
from persistkv.tenants import DEFAULT_TENANT, check_tenant, tenant_key

_ROWS_BYTES = 64 << 20  # 64 MiB: size of the blocks that are copied at once
_SPARE_TOKENS = 256  # number of tokens for which the cache has room after the prompt
_GROWTH = 2  # factor of the capacity when the cache is full


class _ForwardCall(NamedTuple):
    """A call of the model with the cache."""

    position: int
    """Number of tokens in the cache before the call."""
    token_ids: torch.Tensor
    """Tokens that the model ran, shape (tokens,)."""
    position_ids: torch.Tensor | None
    """As given to the model; None: none were given."""


class ForwardRecord:
    """The tokens whose KV a cache holds, observed at the calls of one model. Made for one cache,
    which it refers to weakly; the observation ends with the cache.

    A cache sees keys and values, never tokens. Without this record, ``save`` would have to believe
    its caller.

    :ivar problem: why a forward pass gave the cache KV that belongs to no plain prefix of tokens;
        "": none did.
    :ivar prefill_tokens: tokens of the prefills whose time was measured, and is not saved yet.
    :ivar prefill_s: seconds that these prefills took.
    :param restored: tokens whose KV the cache holds already.
    """

    _UNSEEN = -1  # a number that no token has

    def __init__(
        self,
        cache: RequestCache,
        model: Any,
        restored: Sequence[int],
    ) -> None:
        self.problem = ""
        self.prefill_tokens = 0
        self.prefill_s = 0.0
        self._prefill_begin: float | None = None
        """Time at which the present prefill began; None: none is being measured."""
        self._restored = restored
        self._calls: list[_ForwardCall] = []
        """Calls of the model with the cache, in order."""
        self._mask: torch.Tensor | None = None
        """The last attention mask; None: no call had any."""
        # a weak reference, because the model keeps its hooks, which would keep the cache and its KV
        # as long as the model exists
        self._cache = weakref.ref(cache)
        handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
        ]
        # remove the hooks from the model when the cache is deleted
        for handle in handles:
            weakref.finalize(cache, handle.remove)

    def tokens(self, length: int) -> list[int]:
        """Return the tokens of the first ``length`` positions. A position that no observed call
        filled has a value that equals no token."""
        known = list(self._restored)
        # A call replaces the tokens from its position on, because the cache may have been cropped
        # before.
        for call in self._calls:
            known = self._with_length(known, call.position)
            known.extend(call.token_ids.tolist())
        return self._with_length(known, length)

    def check(self) -> None:
        """Raise if a call used a mask or positions that change the KV of a prefix.

        :raises ConfigurationError: one did.
        """
        # Read tensors here, not in each forward pass, because they may be on a device.
        if self._mask is not None:
            shows_all = bool(self._mask.all())
            if not shows_all:
                self.problem = "an attention mask that hides tokens"
        for call in self._calls:
            given = call.position_ids
            if given is None:
                continue
            end = call.position + len(given)
            expected = torch.arange(call.position, end, device=given.device)
            if not torch.equal(given, expected):
                self.problem = "other position_ids than those of the tokens"
        if self.problem:
            raise ConfigurationError(
                "cache", self.problem, "a cache of plain forward passes"
            )

    def _with_length(
        self,
        known: list[int],
        length: int,
    ) -> list[int]:
        """Return ``length`` tokens: the first known ones, and ``_UNSEEN`` for those missing at the
        end."""
        missing = length - len(known)
        return known[:length] + [self._UNSEEN] * missing

    def _before_forward(
        self, _: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Record a call of the model, before it runs, if it gets the cache."""
        # discard the start time of a forward pass that raised, after which ``_after_forward`` did
        # not run
        self._prefill_begin = None
        cache = self._cache()
        is_passed = any(value is cache for value in (*args, *options.values()))
        if cache is None or not is_passed:
            return
        first_argument = args[0] if args else None
        input_ids = options.get("input_ids", first_argument)
        # do not record embeddings and batches: ``save`` refuses tokens that were not recorded
        if input_ids is None or input_ids.shape[0] != 1:
            return
        position_ids = options.get("position_ids")
        self._record_call(cache.get_seq_length(), input_ids, position_ids)
        mask = options.get("attention_mask")
        if mask is not None:
            self._observe_mask(mask)
        # measure long prefills only; wait for earlier work of the device, which would count, too
        if input_ids.shape[1] >= MEASURED_TOKENS:
            _synchronize(input_ids.device)
            self._prefill_begin = time.perf_counter()

    def _record_call(
        self,
        position: int,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
    ) -> None:
        """Append a call to ``_calls``; parameters as in ``_ForwardCall``."""
        # clone the tensors, because the caller may reuse them
        token_ids = input_ids[0].clone()
        if position_ids is not None:
            position_ids = position_ids.reshape(-1).clone()
        call = _ForwardCall(position, token_ids, position_ids)
        self._calls.append(call)

    def _after_forward(self, *_: Any) -> None:
        """Record how long a prefill took, after the model has run."""
        if self._prefill_begin is None:
            return
        # the last call that ``_before_forward`` has recorded is the one that has just ended
        token_ids = self._calls[-1].token_ids
        _synchronize(token_ids.device)
        self.prefill_tokens += len(token_ids)
        self.prefill_s += time.perf_counter() - self._prefill_begin
        self._prefill_begin = None

    def _observe_mask(self, mask: Any) -> None:
        """Keep a mask for ``check``, or note that its form is one that cannot be checked."""
        # a mask of two dimensions, sequences and tokens, can only hide whole tokens
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            # keep the last mask only, because each mask covers all tokens so far
            self._mask = mask
        else:
            self.problem = "an attention mask of its own"


class PersistentCache(RequestCache):
    """The KV cache of one sequence, for ``model.generate``. Made by the function ``load``, which
    also calls the method ``load``: no other method may be called before that.

    :ivar argument: name of the argument with which ``generate`` takes it: ``cache``, or
        ``past_key_values`` before transformers 5.24.
    :ivar restored_tokens: the first tokens of the sequence, whose KV came from the store.
    :param url: URL of the store.
    :param identity: a result of ``model_identity``.
    :param capacity: tokens for which buffers are allocated at first.
    """

    def __init__(
        self,
        argument_name: str,
        geometry: KVGeometry,
        url: str,
        identity: Mapping[str, Any],
        capacity: int,
        salt: str | None,
        tenant: str | None,
    ) -> None:
        super().__init__(geometry, capacity)
        self.argument = argument_name
        self.restored_tokens: Sequence[int] = ()
        self._url = url
        self._identity = Identity.of(identity)
        self._salt = salt
        self._tenant = tenant or DEFAULT_TENANT
        self._block_size: int = identity["block_size"]
        self._groups = [group.blocks(self._block_size) for group in geometry]
        """For each KV cache group, its division of the sequence into blocks."""
        self._block_bytes = [group.token_bytes * self._block_size for group in geometry]
        """For each KV cache group, the bytes of one block."""
        self._first_cached = [0] * len(geometry)
        """For each KV cache group, the index of the first block in this cache. Earlier blocks were
        not restored: they were outside of the sliding window."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the KV of new tokens to a layer, and enlarge the buffers if they are full. The
        model calls this.

        :raises ConfigurationError: there is more than one sequence, as in a batch or beam search;
            nothing was appended.
        """
        if key_states.shape[0] != 1:
            raise ConfigurationError(
                self.argument, f"{key_states.shape[0]} sequences", "one sequence"
            )
        capacity = self.buffers[0].shape[3]  # number of tokens, the same for all groups
        num_tokens = self.layers[layer_idx].get_seq_length()
        num_new = key_states.shape[-2]
        needed = num_tokens + num_new
        if needed > capacity:
            self.grow(max(needed, _GROWTH * capacity))
        keys, values = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return keys, values

    def load(
        self,
        tokens: Sequence[int],
        model: Any,
    ) -> None:
        """Fill the empty cache with the KV of the longest stored prefix of ``tokens`` without the
        last one, which the model must run to predict the next token.

        From now on, the tokens that ``model`` runs with this cache are recorded.

        :raises StoreError: the store failed; the cache is empty.
        """
        group_keys = self._keys_of(tokens)
        # any codec will do, because blocks are only read
        with self._open_store("raw") as store:
            length = self._restore(store, group_keys, len(tokens) - 1)
            if length:
                self._add_savings(store, requests=1, tokens=length)
        self.restored_tokens = tuple(tokens[:length])
        self.set_length(length)
        self._record = ForwardRecord(self, model, self.restored_tokens)

    def _restore(
        self,
        store: BlockingStore,
        group_keys: Sequence[Sequence[OffloadKey]],
        limit: int,
    ) -> int:
        """Copy the blocks of the longest stored prefix, of at most ``limit`` tokens, to the
        buffers; return its length."""
        unreadable: set[bytes] = set()

        def is_available(key: bytes) -> bool:
            return key not in unreadable and store.contains(key)

        groups = []
        for geometry, keys in zip(self._groups, group_keys, strict=True):
            groups.append(GroupBlocks(geometry, keys, is_available))
        while True:
            length = longest_match(groups, self._block_size, start=0, limit=limit)
            needed = [group.device_blocks(length) for group in self._groups]
            failed = self._read(store, group_keys, needed)
            if not failed:
                self._first_cached = [positions.start for positions in needed]
                return length
            # leave unreadable blocks, which ``contains`` may still report, out of the next match
            unreadable.update(failed)

    def save(
        self,
        tokens: Sequence[int],
        labels: Mapping[str, str],
        codec: str,
    ) -> str:
        """Store the full blocks of the cache; see the function ``save``."""
        num_tokens = self._checked_length(tokens)
        group_keys = self._keys_of(tokens[:num_tokens])
        request = uuid.uuid4().hex
        with self._open_store(codec) as store:
            self._put_absent(store, request, group_keys)
            end = RequestEnd(
                request=request,
                manifest_id=request,  # a manifest needs a unique id, and this one is random
                group_keys=tuple(map(list, group_keys)),
                tokens=num_tokens,
                block_size=self._block_size,
                labels=dict(labels),
                restored_tokens=len(self.restored_tokens),
                tenant=self._tenant,
            )
            store.end_request(end)
            store.flush()
            is_whole_by_request = dict(store.take_report().persisted)
            is_whole = is_whole_by_request[request]
            if not is_whole and not self._lacks_only_uncached(store, group_keys):
                raise StoreError(f"{self._url}: not the whole context could be stored")
            self._save_prefill(store)
        return request

    def _lacks_only_uncached(
        self,
        store: BlockingStore,
        group_keys: Sequence[Sequence[OffloadKey]],
    ) -> bool:
        """Return whether the store lacks blocks of a context, but holds all blocks of this cache:
        only blocks outside of the sliding window, which were not restored, are absent."""
        cached_keys = []
        for keys, first in zip(group_keys, self._first_cached, strict=True):
            cached_keys.append(keys[first:])
        return _holds(store, cached_keys) and not _holds(store, group_keys)

    def _save_prefill(self, store: BlockingStore) -> None:
        """Record in the store the prefills that were measured since the last call."""
        record = self._record
        if not record.prefill_tokens:
            return
        self._add_savings(
            store, prefill_tokens=record.prefill_tokens, prefill_s=record.prefill_s
        )
        record.prefill_tokens = 0
        record.prefill_s = 0.0

    def _add_savings(self, store: BlockingStore, **counts: Any) -> None:
        """Add counts, which are fields of ``Savings``, to those that this thread has recorded in
        the store."""
        source = _savings_source(os.getpid(), threading.get_ident())
        identity = self._identity
        part = Savings(identity.digest.hex(), identity.model_name, **counts)
        store.add_savings(identity, source, part)

    def _put_absent(
        self,
        store: BlockingStore,
        request: str,
        group_keys: Sequence[Sequence[OffloadKey]],
    ) -> None:
        """Store the blocks of the cache that the store lacks."""
        absent = self._absent_blocks(store, group_keys)
        for batch in batched(absent, len(store.rows)):
            batch_keys = []
            depths = []  # numbers of blocks before each block, which are the positions
            for row, (group, position) in enumerate(batch):
                block = self._block(group, position)
                self._row(store, row, group).copy_(block)
                key = group_keys[group][position]
                batch_keys.append(key)
                depths.append(position)
            rows = range(len(batch))
            store.put(request, batch_keys, rows, depths, self._tenant)
            # wait until the blocks are written, because the next batch overwrites the rows
            store.flush()

    def _absent_blocks(
        self,
        store: BlockingStore,
        group_keys: Sequence[Sequence[OffloadKey]],
    ) -> list[tuple[int, int]]:
        """Return (KV cache group, position in the group) of each block of the cache that the store
        lacks."""
        absent: list[tuple[int, int]] = []
        for group, keys in enumerate(group_keys):
            for position in range(self._first_cached[group], len(keys)):
                if not store.contains(keys[position]):
                    absent.append((group, position))
        return absent

    def _checked_length(self, tokens: Sequence[int]) -> int:
        """Return how many of the first ``tokens`` have KV in the cache.

        :raises ConfigurationError: the cache holds the KV of other tokens, or of tokens that are
            not known.
        """
        lengths: set[int] = {layer.get_seq_length() for layer in self.layers}
        if len(lengths) != 1:
            problem = (
                f"layers of {min(lengths)} to {max(lengths)} tokens, after a forward "
                f"pass that failed"
            )
            raise ConfigurationError(
                "cache", problem, "the same number of tokens in all layers"
            )
        self._record.check()
        (cache_length,) = lengths
        num_tokens = min(len(tokens), cache_length)
        computed = self._record.tokens(num_tokens)
        for position in range(num_tokens):
            if tokens[position] != computed[position]:
                raise ConfigurationError(
                    "token_ids",
                    f"{tokens[position]} at position {position}",
                    "the tokens that the model ran with this cache, after those that were loaded",
                )
        return num_tokens

    def _keys_of(self, tokens: Sequence[int]) -> list[list[OffloadKey]]:
        """Return the keys of the full blocks of ``tokens`` for each KV cache group."""
        chain = BlockHashChain(self._block_size, self._salt, self._tenant)
        hashes = chain.extend(tokens)
        group_keys = []
        for group in range(len(self._groups)):
            keys = []
            for block_hash in hashes:
                key = make_offload_key(block_hash, group)
                keys.append(tenant_key(self._tenant, key))
            group_keys.append(keys)
        return group_keys

    def _read(
        self,
        store: BlockingStore,
        group_keys: Sequence[Sequence[bytes]],
        needed: Sequence[range],
    ) -> list[bytes]:
        """Copy each group's blocks with an index in ``needed`` from the store to the buffers. Stop
        at the first batch with unreadable blocks and return their keys; return [] if all blocks
        were read.
        """
        wanted: list[tuple[int, int]] = []
        for group, positions in enumerate(needed):
            wanted.extend((group, position) for position in positions)
        for batch in batched(wanted, len(store.rows)):
            keys = [group_keys[group][position] for group, position in batch]
            failed = store.read(keys, range(len(batch)))
            if failed:
                return failed
            for row, (group, position) in enumerate(batch):
                block = self._block(group, position)
                block.copy_(self._row(store, row, group))
        return []

    def _block(self, group: int, position: int) -> torch.Tensor:
        """Return a view of block number ``position`` in a buffer, shape (layers, 2, kv_heads,
        block_size, head_dim)."""
        start = position * self._block_size
        stop = start + self._block_size
        return self.buffers[group][:, :, :, start:stop]

    def _row(
        self,
        store: BlockingStore,
        row: int,
        group: int,
    ) -> torch.Tensor:
        """Return a view of a row of the transfer memory, in the shape of a block of ``group``."""
        block = self._block(group, 0)
        stored = store.rows.array[row, : self._block_bytes[group]]
        return torch.from_numpy(stored).view(block.dtype).view(block.shape)

    @contextmanager
    def _open_store(self, codec: str) -> Iterator[BlockingStore]:
        """Open the store of this identity, with memory for the rows of single blocks; close it at
        the end."""
        # a row has room for the largest block of any group, and for one worker
        stride = row_stride_bytes(num_workers=1, cpu_page_size=max(self._block_bytes))
        groups = map(GroupLayout.of_bytes, self._block_bytes)
        layout = RowLayout(stride, tuple(groups))
        num_rows = max(1, _ROWS_BYTES // stride)
        num_bytes = num_rows * stride
        staging_bytes = max(StoreOptions().staging_bytes, BLOCKS_STAGED * stride)
        options = StoreOptions(codec=codec, staging_bytes=staging_bytes)
        memory = memoryview(huge_memory(num_bytes))[:num_bytes]
        rows = Rows(memory, layout)
        backend = open_backend(self._url)
        try:
            store = BlockingStore(backend, self._identity, rows, options, url=self._url)
        except BaseException:
            backend.close()
            raise
        with closing(store):
            yield store


@arguments.checks_names
def load(
    model: Any,
    token_ids: TokenIds,
    store: str | Path,
    *,
    block_size: int = 16,
    checkpoint: str | Path | None = None,
    salt: str | None = None,
    tenant: str | None = None,
) -> PersistentCache:
    """Return a cache with the KV of the longest stored prefix of a prompt; empty if the store has
    none for this model.

    Pass it to ``model.generate`` with the whole prompt: ``generate(input_ids, cache=cache)``.
    Before transformers 5.24, the name is ``past_key_values``; ``**{cache.argument: cache}`` suits
    every release.

    :param model: a Hugging Face decoder-only model on its device.
    :param token_ids: the prompt: integers, a tensor of shape (tokens,) or (1, tokens), or a
        tokenizer's output.
    :param store: URL of the store, or the path of an LMDB store; it is created if absent.
    :param block_size: tokens in a block.
    :param checkpoint: directory that the model was loaded from, if its weights were not changed
        since. Their fingerprint, which is cached, then identifies the model. By default each call
        hashes the state dict, which takes seconds if the model is large.
    :param salt: contexts of different salts share no blocks.
    :param tenant: name of the tenant whose context it is, 1 to 128 characters: contexts of
        different tenants share no blocks. ``save`` stores the context as that of the same tenant.
        None: the default tenant.
    :raises ConfigurationError: an argument is invalid.
    :raises PromptTooLongError: the prompt exceeds the model's context length.
    :raises UnsupportedModelError: the model uses a kind of cache that persistkv does not support.
    :raises UnsupportedReleaseError: persistkv does not support the installed release of
        transformers.
    :raises StoreError: the store cannot be opened or read.
    """
    tokens = one_row(token_ids)
    arguments.integer("block_size", block_size, least=1)
    if not isinstance(store, (str, Path)):
        raise ConfigurationError("store", store, "a URL or a path")
    if salt is not None:
        arguments.text("salt", salt)
    if tenant is not None:
        check_tenant("tenant", tenant)
    check_model_object(model)
    limit = context_length(model)
    if limit is not None and len(tokens) > limit:
        raise PromptTooLongError(len(tokens), limit)
    geometry = probe_model(model)
    check_token_ids("token_ids", tokens, vocabulary_size(model))
    directory = None if checkpoint is None else Path(checkpoint)
    identity = model_identity(model, directory, geometry, block_size)
    cache = PersistentCache(
        ModelForward(model).cache_argument,
        geometry,
        store_url(store),
        identity,
        capacity=len(tokens) + _SPARE_TOKENS,
        salt=salt,
        tenant=tenant,
    )
    cache.load(tokens, model)
    return cache


@arguments.checks_names
def save(
    cache: PersistentCache,
    token_ids: TokenIds,
    *,
    labels: Mapping[str, str] | None = None,
    codec: str = "raw",
) -> str:
    """Store the full blocks of a cache in the store that was passed to ``load``. They are durable
    on return.

    The tokens are compared with those that the model was called with, so KV is never stored under
    other tokens. KV that was not computed by calls of that model with ``input_ids``, one sequence,
    no padding and the usual positions is refused.

    :param cache: a cache of ``load``, after ``model.generate`` or a forward pass of the model that
        was passed to ``load``. Its weights must not have changed since then.
    :param token_ids: the tokens in the cache, in order, such as a row of ``generate``'s output.
        Tokens after those with KV in the cache are ignored: the last one of ``generate``'s output.
    :param labels: stored with the context and shown by ``persistkv ls``.
    :param codec: codec of new packs, as in ``Engine.open``.
    :returns: the id of the request in ``persistkv ls``. A context shorter than a block stores
        nothing.
    :raises ConfigurationError: ``token_ids`` are not the tokens in the cache, the cache holds KV
        that is refused, or an option is invalid. Nothing was stored.
    :raises StoreError: the store failed, or did not take all of it; a part may be stored.
    """
    parse_codec(arguments.text("codec", codec))
    return cache.save(one_row(token_ids), arguments.labels(labels), codec)


def _holds(
    store: BlockingStore,
    group_keys: Sequence[Sequence[bytes]],
) -> bool:
    """Return whether the store holds all of these blocks."""
    return all(store.contains(key) for keys in group_keys for key in keys)


@cache
def _savings_source(pid: int, thread: int) -> str:
    """Return the name under which a thread records its savings in the store: drawn at random at the
    first call, and cached. Each thread has its own, so that no two add to one record at the same
    time; the process id keeps a fork from using its parent's."""
    return secrets.token_hex(8)


def _synchronize(device: torch.device) -> None:
    """Wait until a device has run all work that is queued on it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
