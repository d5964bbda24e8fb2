"""vLLM's tiering manager and the spec's worker over a store, without an engine: the calls that an
engine makes.

These also run on the files of releases that have no build for CPUs (``make test-vllm-next``).
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from persistkv.base import OffloadKey, make_offload_key
from tests.host_processes import host_processes
from tests.integrations.vllm.conftest import PREWARM, wait_stored
from tests.integrations.vllm.conftest import tier as tier_entry
from tests.integrations.vllm.offloading import offloading_config

if TYPE_CHECKING:
    from vllm.v1.kv_hints import KvHintsEnvelope
    from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext

pytestmark = pytest.mark.vllm

CHUNKS, CHUNK_BYTES, CHUNK_TOKENS = 16, 8192, 16
TIMEOUT_S = 60


class Engine:
    """Manager and one worker of an engine, built from one spec.

    :param used: for each KV cache group, the bytes of a page that its blocks use.
    """

    def __init__(
        self, *tiers: dict[str, Any], used: tuple[int, ...] = (CHUNK_BYTES,)
    ) -> None:
        from persistkv.integrations.vllm.plugin import register
        from persistkv.integrations.vllm.spec import PersistKVSpec

        register()
        self.used = used
        config = offloading_config(CHUNK_BYTES, CHUNK_TOKENS)
        config = dataclasses.replace(
            config,
            groups=tuple(
                dataclasses.replace(config.groups[0], group_id=index)
                for index in range(len(used))
            ),
            engine_id=f"test-{os.getpid()}-{time.monotonic_ns()}",
            extra_config={
                "cpu_bytes_to_use": CHUNKS * CHUNK_BYTES,
                "secondary_tiers": list(tiers),
            },
        )
        self.spec = PersistKVSpec(config)
        self.manager = self.spec.get_manager()
        self.lock = getattr(self.manager, "lock", threading.Lock())
        self.requests = self.jobs = 0
        self.register(
            torch.randint(-128, 128, (2 * CHUNKS, CHUNK_BYTES), dtype=torch.int8)
        )

    def register(self, pages: torch.Tensor) -> None:
        from vllm.v1.kv_offload import base

        self.pages = pages
        caches = base.CanonicalKVCaches(
            [base.CanonicalKVCacheTensor(pages, CHUNK_BYTES)],
            [[base.CanonicalKVCacheRef(0, num_bytes)] for num_bytes in self.used],
        )
        self.worker = self.spec.get_worker(caches)

    def request(self, keys: Sequence[OffloadKey], **facts: Any) -> ReqContext:
        from vllm.v1.kv_offload.base import ReqContext

        self.requests += 1
        context = ReqContext(f"request-{self.requests}", **facts)
        for index, key in enumerate(keys):
            context.set_offload_key_position(key, (index + 1) * CHUNK_TOKENS)
        with self.lock:
            self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        with self.lock:
            self.manager.on_schedule_end(ScheduleEndContext([], []))

    def store(self, keys: list[OffloadKey], *, wait: bool = True, **facts: Any) -> None:
        """Store the first pages under these keys; ``wait`` until no work is pending."""
        context = self.request(keys, **facts)
        with self.lock:
            output = self.manager.prepare_store(keys, context)
        if absent := output.keys_to_store:  # keys that the primary tier lacks
            pages = [keys.index(key) for key in absent]
            assert self.worker.submit_store(
                self._job(), self._blocks(pages, absent), output.store_spec
            )
        with self.lock:
            if absent:
                self.manager.complete_store(absent, context, True)
            self.manager.on_request_finished(context)
        if wait:
            self.settle()

    def settle(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.001)

    def load(self, keys: list[OffloadKey], first_page: int, **arguments: Any) -> bool:
        """Promote the chunks of these keys and copy them to pages; return whether all were
        found."""
        from vllm.v1.kv_offload.base import LookupResult

        context = self.request(keys)
        deadline = time.monotonic() + TIMEOUT_S
        source = None
        while source is None:
            with self.lock:
                found = {self.manager.lookup(key, context) for key in keys}
                if found == {LookupResult.HIT}:
                    source = self.manager.prepare_load(keys, context)
            if LookupResult.MISS in found:
                return False
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.001)
        assert self.worker.submit_load(
            self._job(),
            source,
            self._blocks(range(first_page, first_page + len(keys)), keys),
            **arguments,
        )
        with self.lock:
            self.manager.complete_load(keys, context)
            self.manager.on_request_finished(context)
        return True

    def look_up(
        self, keys: Sequence[OffloadKey], context: ReqContext
    ) -> list[LookupResult]:
        with self.lock:
            return [self.manager.lookup(key, context) for key in keys]

    def _job(self) -> int:
        self.jobs += 1
        return self.jobs

    def _blocks(
        self, pages: Iterable[int], keys: Sequence[OffloadKey]
    ) -> GPULoadStoreSpec:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec, get_offload_group_idx

        groups = [get_offload_group_idx(key) for key in keys]
        return GPULoadStoreSpec(
            list(pages),
            [groups.count(group) for group in range(len(self.used))],
            [0] * len(self.used),
        )

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.shutdown()


StartManager = Callable[..., Engine]


@pytest.fixture
def start(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartManager]:
    from persistkv.integrations.vllm import tier

    config = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        model_config=SimpleNamespace(max_model_len=1),
        kv_transfer_config=SimpleNamespace(
            kv_connector="OffloadingConnector", kv_connector_extra_config={}
        ),
    )
    monkeypatch.setattr(tier, "find_vllm_config", lambda: config)
    monkeypatch.setattr(tier, "engine_identity", lambda *_, **__: {"test": 1})
    running: list[Engine] = []

    def start(*more: dict[str, Any], **arguments: Any) -> Engine:
        running.append(Engine(tier_entry(url), *more, **arguments))
        return running[-1]

    yield start
    for engine in running:
        engine.close()


def keys_of(count: int, first: int = 0, group: int = 0) -> list[OffloadKey]:
    return [
        make_offload_key(bytes([first + index]) * 32, group) for index in range(count)
    ]


def prompt_keys(token_ids: list[int], cache_salt: str | None) -> list[OffloadKey]:
    """Return the keys of a prompt's full chunks: chained hashes, as documented by vLLM."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    init_none_hash(sha256)
    hashes: list[Any] = [None]
    for start in range(0, len(token_ids) // CHUNK_TOKENS * CHUNK_TOKENS, CHUNK_TOKENS):
        extra = (("cache_salt", cache_salt),) if cache_salt and not start else None
        hashes.append(
            hash_block_tokens(
                sha256, hashes[-1], token_ids[start : start + CHUNK_TOKENS], extra
            )
        )
    return [make_offload_key(bytes(block_hash), 0) for block_hash in hashes[1:]]


def pages_equal(engine: Engine, count: int, first_page: int) -> bool:
    return bool(
        (engine.pages[:count] == engine.pages[first_page : first_page + count]).all()
    )


def test_manager_restart_loads_chunks_of_previous_engine(start: StartManager) -> None:
    engine, keys = start(), keys_of(4)
    engine.store(keys)
    before = engine.pages[:4].clone()
    engine.close()
    engine = start()
    assert engine.load(keys, 8)
    assert bool((engine.pages[8:12] == before).all())


def test_manager_restart_loads_groups_with_padded_pages(start: StartManager) -> None:
    # of a Mamba layer; vLLM pads its pages to the size of attention pages
    state_bytes = 3000
    keys = keys_of(3) + keys_of(2, group=1)
    engine = start(used=(CHUNK_BYTES, state_bytes))
    engine.store(keys)
    before = engine.pages[:5].clone()
    engine.close()
    engine = start(used=(CHUNK_BYTES, state_bytes))
    padding = engine.pages[11:13, state_bytes:].clone()
    assert engine.load(keys, 8)
    assert bool((engine.pages[8:11] == before[:3]).all())
    assert bool((engine.pages[11:13, :state_bytes] == before[3:, :state_bytes]).all())
    assert bool((engine.pages[11:13, state_bytes:] == padding).all())


def test_worker_expedited_load_finishes_in_submit_load(start: StartManager) -> None:
    engine, keys = start(), keys_of(2)
    engine.store(keys)
    assert engine.load(keys, 8, expedited=True)
    assert pages_equal(engine, 2, 8)
    assert [result.success for result in engine.worker.get_finished()] == [True, True]


def test_manager_reset_cache_keeps_store_and_promotes_after_flush(
    start: StartManager,
) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    engine, keys = start(), keys_of(4)
    engine.store(keys)
    with engine.lock:
        engine.manager.reset_cache()
    if hasattr(engine.manager, "on_reset_flushed"):
        assert engine.look_up(keys, engine.request(keys)) == [LookupResult.MISS] * 4
        with engine.lock:
            engine.manager.on_reset_flushed()
    assert engine.load(keys, 8)
    assert pages_equal(engine, 4, 8)


def test_manager_reset_cache_during_promotion_finishes_all_jobs(
    start: StartManager,
) -> None:
    engine, keys = start(), keys_of(4)
    engine.store(keys)
    with engine.lock:
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
    context = engine.request(keys)
    engine.look_up(keys, context)
    engine.step()  # submits the promotion
    with engine.lock:
        engine.manager.reset_cache()
        engine.manager.on_request_finished(context)
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
    engine.settle()
    assert engine.load(keys, 8)
    assert pages_equal(engine, 4, 8)


def test_manager_reset_cache_during_store_finishes_it(
    start: StartManager, url: str
) -> None:
    engine, keys = start(), keys_of(4)
    engine.store(keys, wait=False)
    assert engine.manager.has_pending_work()
    with engine.lock:
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
    engine.settle()
    wait_stored(url, 1)
    assert engine.load(keys, 8)
    assert pages_equal(engine, 4, 8)


def test_manager_concurrent_lookups_and_steps_load_correct_bytes(
    start: StartManager,
) -> None:
    engine = start()
    contexts = [keys_of(3, 3 * number) for number in range(5)]
    ended = threading.Event()
    problems: list[BaseException] = []

    def poll() -> None:
        """Look up keys of other requests and run steps, as vLLM's thread that serves other engines
        does."""
        try:
            while not ended.is_set():
                keys = contexts[len(problems) % 5]
                context = engine.request(keys)
                engine.look_up(keys, context)
                engine.step()
                with engine.lock:
                    engine.manager.on_request_finished(context)
        except BaseException as error:
            problems.append(error)

    engine.lock = threading.Lock()
    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for _ in range(3):
            for keys in contexts:
                engine.store(keys)
                with engine.lock:
                    engine.manager.reset_cache()
                    getattr(engine.manager, "on_reset_flushed", lambda: None)()
                assert engine.load(keys, 8)
                assert pages_equal(engine, 3, 8)
    finally:
        ended.set()
        thread.join()
    assert not problems


def test_worker_wake_with_new_pages_loads_chunks_stored_before_sleep(
    start: StartManager,
) -> None:
    engine, keys = start(), keys_of(4)
    engine.store(keys)
    before = engine.pages[:4].clone()
    engine.worker.shutdown()
    engine.register(torch.zeros((2 * CHUNKS, CHUNK_BYTES), dtype=torch.int8))
    assert engine.load(keys, 8)
    assert bool((engine.pages[8:12] == before).all())


def test_manager_shutdown_removes_store_from_spec(start: StartManager) -> None:
    from persistkv.integrations.vllm.tier import engine_stores

    engine = start()
    assert len(engine_stores(engine.spec)) == 1
    engine.manager.shutdown()
    assert not engine_stores(engine.spec)


def test_manager_config_info_labels_describe_store(start: StartManager) -> None:
    engine = start()
    if not hasattr(engine.manager, "config_info"):
        pytest.skip("this release has no config_info")
    (labels,) = [
        labels
        for labels in engine.manager.config_info()
        if labels["tier"].endswith(":persistkv")
    ]
    assert labels == {
        "tier": labels["tier"],
        "store": "lmdb",
        "namespace": labels["namespace"],
        "codec": "raw",
        "durability": "commit",
        "policy": "request",
        "host": "process",
    }
    assert set(labels) <= set(
        type(engine.spec).config_info_keys(engine.spec.extra_config)
    )


@pytest.mark.parametrize(
    "payload",
    [
        {"labels": {"session": "7"}},
        {"labels": {"session": "7", "model": "tiny"}},
        {"token_ids": list(range(5 * CHUNK_TOKENS - 1))},
        {"token_ids": list(range(4 * CHUNK_TOKENS)), "cache_salt": "tenant"},
    ],
)
def test_manager_prefetch_hint_promotes_context_before_its_request(
    start: StartManager, url: str, payload: dict[str, Any]
) -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
    from vllm.v1.kv_offload.base import LookupResult

    engine, chosen, other = start(PREWARM), keys_of(4), keys_of(4, 4)
    if "token_ids" in payload:
        chosen = prompt_keys(payload["token_ids"], payload.get("cache_salt"))
        assert len(chosen) == 4
    engine.store(chosen, kv_transfer_params={"persistkv": {"labels": {"session": "7"}}})
    engine.store(other)
    wait_stored(url, 2)
    with engine.lock:
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
    hints = KvHintsEnvelope(
        "1", "m", [KvHintAction("a", "persistkv.prefetch", "1", payload)]
    )
    context = engine.request([], kv_hints=hints)
    with engine.lock:
        engine.manager.on_request_finished(context)
    engine.settle()
    assert engine.look_up(chosen, engine.request(chosen)) == [LookupResult.HIT] * 4
    assert LookupResult.HIT not in engine.look_up(other, engine.request(other))


def test_manager_prefetch_hint_with_two_stores_is_queued_once(
    start: StartManager, tmp_path: Path
) -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    from persistkv.integrations.vllm.tier import engine_stores

    engine = start(tier_entry(f"lmdb://{tmp_path}/second"))
    action = KvHintAction("a", "persistkv.prefetch", "1", {"labels": {"session": "7"}})
    engine.request([], kv_hints=KvHintsEnvelope("1", "m", [action]))
    first, second = engine_stores(engine.spec)
    assert first.prefetch_waits
    assert not second.prefetch_waits
    first.ask_recent(1 << 20, prefetched=True)
    assert not first.prefetch_waits


def prefetching(payload: dict[str, Any]) -> KvHintsEnvelope:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    action = KvHintAction("a", "persistkv.prefetch", "1", payload)
    return KvHintsEnvelope("1", "m", [action])


def restarted(engine: Engine) -> None:
    """Empty the primary tier."""
    with engine.lock:
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()


@pytest.mark.parametrize(
    "payload",
    [{"labels": {"session": "7"}}, {"token_ids": list(range(4 * CHUNK_TOKENS))}],
)
def test_manager_prefetch_hint_promotes_only_contexts_of_its_tenant(
    start: StartManager,
    url: str,
    payload: dict[str, Any],
) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    engine = start(PREWARM)
    chosen = prompt_keys(list(range(4 * CHUNK_TOKENS)), None)
    options = {"labels": {"session": "7"}, "tenant": "anna"}
    engine.store(chosen, kv_transfer_params={"persistkv": options})
    wait_stored(url, 1)
    restarted(engine)
    for tenant, results in (
        ("berta", {LookupResult.MISS}),
        (None, {LookupResult.MISS}),
        ("anna", {LookupResult.HIT}),
    ):
        named = None if tenant is None else {"persistkv": {"tenant": tenant}}
        hint = engine.request(
            [], kv_transfer_params=named, kv_hints=prefetching(payload)
        )
        with engine.lock:
            engine.manager.on_request_finished(hint)
        engine.settle()
        context = engine.request(chosen, kv_transfer_params=named)
        assert set(engine.look_up(chosen, context)) == results, tenant


def named(weights: str) -> dict[str, Any]:
    return {"persistkv": {"weights": weights, "labels": {"session": "7"}}}


def use_weights(engine: Engine, weights: str) -> None:
    """Begin and end requests that name the weights, until the store serves them."""
    from persistkv.integrations.vllm.tier import engine_stores

    (store,) = engine_stores(engine.spec)
    deadline = time.monotonic() + TIMEOUT_S
    is_used = False
    while not is_used:
        assert time.monotonic() < deadline
        context = engine.request([], kv_transfer_params=named(weights))
        with engine.lock:
            engine.manager.on_request_finished(context)
        engine.step()
        is_used = store.is_in_use


def test_manager_prefetch_hint_after_weights_are_named_promotes_their_context(
    start: StartManager,
    url: str,
) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    engine = start(PREWARM)
    chosen = keys_of(4)
    use_weights(engine, "step-1")
    engine.store(chosen, kv_transfer_params=named("step-1"))
    wait_stored(url, 1)
    restarted(engine)
    hint = engine.request(
        [],
        kv_transfer_params=named("step-1"),
        kv_hints=prefetching({"labels": {"session": "7"}}),
    )
    with engine.lock:
        engine.manager.on_request_finished(hint)
    engine.settle()
    context = engine.request(chosen, kv_transfer_params=named("step-1"))
    assert engine.look_up(chosen, context) == [LookupResult.HIT] * 4


def test_manager_touch_while_store_of_earlier_weights_closes_returns_at_once(
    start: StartManager,
) -> None:
    from persistkv.integrations.vllm.tier import engine_stores

    engine = start()
    (store,) = engine_stores(engine.spec)
    keys = keys_of(4)
    earlier = engine.request(keys)
    first_hosts = host_processes()
    # the next weights are named while the store is opened for these
    for weights in ("step-1", "step-2"):
        store.watch.on_no_kv()
        engine.request([], kv_transfer_params=named(weights))
    assert store.is_opening
    time.sleep(4.0)  # for the store of the first name to open
    (host,) = host_processes() - first_hosts
    # it waits for its host before it closes
    os.kill(host, signal.SIGSTOP)
    resume = threading.Timer(10.0, os.kill, (host, signal.SIGCONT))
    resume.start()
    engine.request([], kv_transfer_params=named("step-2"))
    time.sleep(0.5)  # for the thread that closes it to begin
    begin = time.monotonic()
    engine.manager.touch(keys, earlier)
    assert time.monotonic() - begin < 5.0
    resume.join()


def test_manager_prewarm_promotes_contexts_of_tenants(
    start: StartManager, url: str
) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    first = start()
    contexts = {"anna": keys_of(4), "default": keys_of(4, 4)}
    for tenant, keys in contexts.items():
        first.store(keys, kv_transfer_params={"persistkv": {"tenant": tenant}})
    wait_stored(url, 2)
    first.close()
    second = start(PREWARM)
    second.settle()
    for tenant, keys in contexts.items():
        named = {"persistkv": {"tenant": tenant}}
        context = second.request(keys, kv_transfer_params=named)
        assert set(second.look_up(keys, context)) == {LookupResult.HIT}


def test_manager_restart_equal_chunks_of_tenants_load_only_for_their_own(
    start: StartManager, url: str
) -> None:
    from vllm.v1.kv_offload.base import LookupResult

    first, keys = start(), keys_of(4)
    first.store(keys, kv_transfer_params={"persistkv": {"tenant": "anna"}})
    wait_stored(url, 1)
    first.close()
    second = start()
    for named in (None, {"persistkv": {"tenant": "berta"}}):
        context = second.request(keys, kv_transfer_params=named)
        results = second.look_up(keys, context)
        assert set(results) == {LookupResult.MISS}
        with second.lock:
            second.manager.on_request_finished(context)
    second.step()
    own = second.request(keys, kv_transfer_params={"persistkv": {"tenant": "anna"}})
    deadline = time.monotonic() + TIMEOUT_S
    while set(second.look_up(keys, own)) != {LookupResult.HIT}:
        assert LookupResult.MISS not in second.look_up(keys, own)
        assert time.monotonic() < deadline
        second.step()
        time.sleep(0.001)
