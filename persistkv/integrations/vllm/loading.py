"""Whether vLLM loads the chunks that a store holds for a request, or computes them.

1. The decision is taken at the first lookup that the store could serve, for the whole prefix that
   it holds from there on, and applies to the request until it ends: vLLM looks up chunk by chunk,
   and again in every step.
2. The engine's speed is measured by steps: the chunks that are stored between two ends of schedules
   are those that the step before the first one has computed.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from persistkv.base import (
    OffloadKey,
    get_offload_group_idx,
    make_offload_key,
)
from persistkv.config import OffloadingConfig
from persistkv.integrations.vllm.numbers import by_group_index
from persistkv.tenants import DEFAULT_TENANT, tenant_key
from persistkv.tiering.load_cost import (
    LoadChooser,
    LoadDecision,
    LoadRun,
    PrefillSpeed,
)
from persistkv.tiering.load_runs import GroupSize, prefix_bytes
from persistkv.tiering.persistent import PersistentTier

# minimum number of tokens of a step that shows the speed of prefills
_FEWEST_TOKENS = 64
_LONGEST_STEP_S = 30.0  # seconds: a longer step includes a pause of the engine
# A step of more than so many times its expected time includes a pause, or mostly decoding. (So a
# lasting slowdown by more than this is not learned: a row of such steps is usual in an engine that
# decodes large batches.)
_PAUSE_RATIO = 5.0

# start of the name of a class of KV cache specs, and its field with the window
_WINDOW_FIELDS = (
    ("SlidingWindow", "sliding_window"),
    ("ChunkedLocal", "attention_chunk_size"),
)


class StepMeter:
    """Measures the engine's prefills from the chunks that its steps have computed.

    A step lasts from the end of its schedule to the end of the next schedule. vLLM stores the
    chunks of a step after the step has ended, so a measurement takes three ends of schedules:

    1. The step begins.
    2. It ends: its time is known (``_step_s``).
    3. All its chunks were stored (``_computed``): the step is measured. Meanwhile the next step has
       ended.
    """

    def __init__(
        self,
        prefill: PrefillSpeed,
        record: Callable[[int, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """:param prefill: learns from each measurement.
        :param record: called with the tokens and the seconds of each measured step.
        :param clock: returns seconds.
        """
        self._prefill = prefill
        self._record = record
        self._clock = clock
        self._ended_at: float | None = None
        """Time of the last call of ``end_schedule``; None: there was none."""
        self._step_s: float | None = None
        """Seconds of the step that ended last; None: not known, because the engine may have waited
        for requests in it."""
        self._computed: dict[str, range] = {}
        """Tokens of the step that ended last whose chunks were stored so far, by request."""

    def add(
        self,
        req_id: str,
        start: int,
        stop: int,
    ) -> None:
        """Count computed tokens of a request whose chunks are stored now."""
        counted = self._computed.get(req_id)
        # join the ranges, because the chunks of one step may arrive in several jobs
        if counted is not None:
            start = min(start, counted.start)
            stop = max(stop, counted.stop)
        self._computed[req_id] = range(start, stop)

    def end_schedule(self, is_busy: bool) -> None:
        """End the schedule of a step.

        :param is_busy: whether the engine has not waited for requests since the schedule before:
            a request of an earlier step continues.
        """
        now = self._clock()
        # all chunks of the step before the last one have been stored by now
        stored_step_s = self._step_s
        stored_tokens = list(self._computed.values())
        self._computed = {}
        # the chunks of the last step are stored from now on
        last_step_s = None
        if is_busy and self._ended_at is not None:
            last_step_s = now - self._ended_at
        self._step_s = last_step_s
        self._ended_at = now
        if stored_step_s is not None and stored_tokens:
            self._observe(stored_tokens, stored_step_s)

    def _observe(
        self,
        computed: Sequence[range],
        step_s: float,
    ) -> None:
        """Learn from one step. Ignore a step whose time may be mostly that of decoding or a pause.

        :param computed: for each request, its tokens that the step has computed.
        """
        num_tokens = sum(len(tokens) for tokens in computed)
        if num_tokens < _FEWEST_TOKENS or step_s > _LONGEST_STEP_S:
            return
        expected_s = self._expected_s(computed)
        includes_pause = expected_s is not None and step_s > _PAUSE_RATIO * expected_s
        if includes_pause:
            return
        for tokens in computed:
            share = len(tokens) / num_tokens
            self._prefill.observe(tokens.start, tokens.stop, share * step_s)
        self._record(num_tokens, step_s)

    def _expected_s(self, computed: Sequence[range]) -> float | None:
        """Return the expected seconds of computing these tokens; None: no speed is known yet."""
        sum_s = 0.0
        for tokens in computed:
            expected_s = self._prefill.expected_s(tokens.start, tokens.stop)
            if expected_s is None:
                return None
            sum_s += expected_s
        return sum_s


def chunk_key(
    request: Any,
    end: int,
    group: int,
    hash_tokens: int,
) -> OffloadKey:
    """Return vLLM's key of a chunk.

    :param request: vLLM's ``Request``.
    :param end: tokens of the request up to the end of the chunk.
    :param group: index of the chunk's KV cache group.
    :param hash_tokens: tokens of one of the request's block hashes.
    """
    # a chunk spans several hashes; the last one covers all tokens up to its end
    last_hash = end // hash_tokens - 1
    block_hash = bytes(request.block_hashes[last_hash])
    return make_offload_key(block_hash, group)


class WaitingChunks:
    """Chunks of one KV cache group of a request that waits for its lookups, from the first chunk to
    load on.

    :param request: vLLM's ``Request``.
    :param tenant: tenant whose request it is; None: it names none.
    :param group: index of the KV cache group.
    :param first_end: tokens of the request up to the end of the first chunk.
    :param chunk_tokens: tokens of a chunk.
    :param hash_tokens: tokens of one of vLLM's block hashes.
    """

    def __init__(
        self,
        request: Any,
        tenant: str | None,
        group: int,
        first_end: int,
        *,
        chunk_tokens: int,
        hash_tokens: int,
    ) -> None:
        self.first_end = first_end
        self.chunk_tokens = chunk_tokens
        self._request = request
        self._tenant = tenant or DEFAULT_TENANT
        self._group = group
        self._hash_tokens = hash_tokens
        self._first = first_end // chunk_tokens - 1
        """Index, among the request's chunks of this group, of the first one to load."""
        # leave out the last token, which the engine computes in any case
        loadable_tokens = request.num_tokens - 1
        num_loadable = loadable_tokens // chunk_tokens
        self._following = range(self._first + 1, num_loadable)
        """Indices of the chunks that may be loaded after the first one."""

    def key_at(self, number: int) -> OffloadKey:
        """Return the key under which stores have a chunk, by its number: the first one to load has
        0."""
        return self._key_of(self._first + number)

    def _key_of(self, chunk: int) -> OffloadKey:
        """Return the key under which stores have a chunk, by its index in the request."""
        end = (chunk + 1) * self.chunk_tokens
        key = chunk_key(self._request, end, self._group, self._hash_tokens)
        return tenant_key(self._tenant, key)

    def num_held(self, tier: PersistentTier) -> int:
        """Return how many chunks in a row a tier holds, from the first one on. The caller knows
        that the tier holds the first one."""

        def is_missing(chunk: int) -> bool:
            return not tier.holds(self._key_of(chunk))

        # A store evicts the deepest chunks of a context first, so it holds a prefix. ``is_missing``
        # is therefore False for some chunks and True for all after them: search the first True.
        num_following = bisect_left(self._following, True, key=is_missing)
        return 1 + num_following

    def held_by(
        self,
        tier: PersistentTier,
        most: int,
    ) -> list[OffloadKey]:
        """Return the keys of the chunks in a row that a tier holds, from the first one on, and not
        more than ``most`` of them. The caller knows that the tier holds the first one."""
        keys = [self.key_at(0)]
        for chunk in self._following[: most - 1]:
            key = self._key_of(chunk)
            if not tier.holds(key):
                break
            keys.append(key)
        return keys


class StoreLoads:
    """Decides about the loads of one store."""

    def __init__(
        self,
        offloading: Any,
        group_tokens: Sequence[int],
        prefill: PrefillSpeed,
    ) -> None:
        """:param offloading: vLLM's ``OffloadingConfig``.
        :param group_tokens: for each KV cache group, the tokens of one chunk.
        :param prefill: the engine's speed, shared by its stores.
        """
        self._hash_tokens = offloading.cache.tokens_per_hash
        """Tokens of one of vLLM's block hashes."""
        self._group_tokens = group_tokens
        self._used_groups = [group.group_id for group in offloading.groups]
        """Indices of the KV cache groups that vLLM offloads; it may leave some out."""
        self._chooser = LoadChooser(prefill)
        """Compares the times of loads with those of computing the tokens."""

    def chunks(
        self,
        request: Any,
        tenant: str | None,
        key: OffloadKey,
        end: int,
    ) -> WaitingChunks:
        """Return a request's chunks that may be loaded, from the one with this key on.

        :param request: vLLM's ``Request``.
        :param tenant: tenant whose request it is; None: it names none.
        :param key: vLLM's key of the first chunk to load.
        :param end: tokens of the request up to the end of this chunk.
        """
        group = get_offload_group_idx(key)
        return WaitingChunks(
            request,
            tenant,
            group,
            end,
            chunk_tokens=self._group_tokens[group],
            hash_tokens=self._hash_tokens,
        )

    def decide(
        self,
        tiers: Sequence[PersistentTier],
        tier: PersistentTier,
        chunks: WaitingChunks,
    ) -> LoadDecision | None:
        """Return the decision about the prefix that ``tier`` holds; None: another tier is expected
        to load it faster.

        :param tiers: all stores of the engine.
        :param chunks: those of the waiting request; the tier holds the first one.
        """
        num_held = chunks.num_held(tier)
        chunk_tokens = chunks.chunk_tokens
        sizes = self._group_sizes(tier.config)
        num_bytes = prefix_bytes(sizes, num_held * chunk_tokens)
        # stores evict the deepest chunks first: one that holds the last chunk holds the prefix
        last_key = chunks.key_at(num_held - 1)
        for other in tiers:
            if other is tier or not other.holds(last_key):
                continue
            if _is_faster(other, tier, num_bytes):
                return None
        # the engine has the tokens before the first chunk already
        start = chunks.first_end - chunk_tokens
        stop = start + num_held * chunk_tokens
        run = LoadRun(tier, stop, num_bytes)
        return self._chooser.choose([run], start=start)

    def _group_sizes(self, config: OffloadingConfig) -> list[GroupSize]:
        """Return the sizes of the chunks of all KV cache groups that vLLM offloads. A load brings
        the chunks of all of them, although a decision is taken at a chunk of one group."""
        sizes = []
        for group in self._used_groups:
            chunk_tokens = self._group_tokens[group]
            chunk_bytes = config.layout.groups[group].block_bytes
            window = config.windows[group] if config.windows else None
            sizes.append(GroupSize(chunk_tokens, chunk_bytes, window))
        return sizes


def _is_faster(
    other: PersistentTier,
    tier: PersistentTier,
    num_bytes: int,
) -> bool:
    """Return whether ``other`` is expected to load ``num_bytes`` bytes faster than ``tier``."""
    other_s = other.expected_load_s(num_bytes)
    own_s = tier.expected_load_s(num_bytes)
    # None: the tier loads whatever it takes (``load_policy`` "always"), so times do not decide
    if other_s is None or own_s is None:
        return False
    return other_s < own_s


def group_windows(
    offloading: Any,
    kv_cache_config: Any,
) -> tuple[int | None, ...]:
    """Return ``OffloadingConfig.windows`` of vLLM's KV cache groups.

    :param kv_cache_config: vLLM's ``KVCacheConfig``; None: unknown.
    """
    if kv_cache_config is None:
        return ()
    windows: dict[int, int | None] = {}
    for group in offloading.groups:
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        windows[group.group_id] = _window_of(spec)
    return by_group_index(windows)


def _window_of(spec: Any) -> int | None:
    """Return how many of a prefix's last tokens the engine needs to continue after the prefix;
    None: all."""
    kind = type(spec).__name__
    # a state-space model needs the state after the last token
    if kind.startswith("Mamba"):
        return 1
    for prefix, field in _WINDOW_FIELDS:
        if kind.startswith(prefix):
            return int(getattr(spec, field))
    return None


def shared_prefill(offloading_spec: Any, tokens_per_s: float | None) -> PrefillSpeed:
    """Return the speed of this engine, shared by all of its stores and kept in the spec; the first
    store's option applies."""
    prefill: PrefillSpeed = vars(offloading_spec).setdefault(
        "_persistkv_prefill", PrefillSpeed(tokens_per_s)
    )
    return prefill
