"""Tenants of an engine on the connector: no row of the primary tier, and no stored block, of one is
used for another. Requests of all tenants have the same tokens, and none has a salt.

The rows are written with content that depends on the tenant, to show whose blocks a load returns.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from persistkv.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    StoredContext,
    TransferResult,
)
from persistkv.connector.common import KVCacheGroupSpec, TransferJob
from persistkv.connector.scheduler import OffloadingConnectorScheduler
from persistkv.cpu.manager import CPULoadStoreSpec
from persistkv.errors import ConfigurationError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.host.status import read_statuses
from persistkv.storage.records import Choice
from persistkv.tenants import DEFAULT_TENANT, tenant_key
from persistkv.tiering.load_cost import Reason
from persistkv.tiering.persistent import PersistentTier
from tests.tiering.conftest import GROUPS, STRIDE, Keys, MakeStack, Stack, persistent
from tests.tiering.tiers import RecordingTier

TOKENS = 16  # of a block
WINDOW = 32
GROUP_SPECS = [
    KVCacheGroupSpec(TOKENS),
    KVCacheGroupSpec(TOKENS, sliding_window=WINDOW),
    KVCacheGroupSpec(TOKENS),
]
CONTENT_BYTES = 64
TENANTS = (None, "anna", "berta")


def content(tenant: str | None, key: bytes) -> bytes:
    """Return the bytes of a tenant's block: the tokens' and the tenant's."""
    name = (tenant or DEFAULT_TENANT).encode()
    return (key + name).ljust(CONTENT_BYTES, b"\0")


class TenantEngine:
    """An engine whose worker writes ``content``, and checks it after loads.

    :param chains: for each KV cache group, the engine's keys of the longest context. Contexts are
        prefixes of it.
    """

    def __init__(self, stack: Stack, chains: Sequence[Sequence[OffloadKey]]) -> None:
        self.stack = stack
        self.chains = chains
        self.scheduler = OffloadingConnectorScheduler(
            stack.manager, GROUP_SPECS, store_wait_s=0.0
        )
        self.events: list[OffloadingEvent] = []
        self.released: set[str] = set()
        self._tenants: list[str | None] = []
        """Tenant of each request, by its number."""
        self._numbers: dict[str, int] = {}

    def begin(self, req_id: str, tenant: str | None, num_blocks: int) -> ReqContext:
        context = self.scheduler.on_new_request(req_id, tenant=tenant)
        self._numbers[req_id] = len(self._tenants)
        self._tenants.append(tenant)
        num_tokens = num_blocks * TOKENS + 1
        for group, chain in enumerate(self.chains):
            self.scheduler.update_keys(req_id, group, chain[:num_blocks], num_tokens)
        return context

    def match(self, req_id: str) -> int:
        """Return the number of tokens to load; wait for promotions."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = self.scheduler.get_num_new_matched_tokens(req_id, 0)
            if found is not None:
                return found
            self.step()
        raise AssertionError("promotions do not end")

    def load(self, req_id: str, num_tokens: int) -> int:
        """Load matched tokens, and check each row's content; return the tokens that were loaded."""
        if not num_tokens:
            return 0
        tables = self._tables(req_id, num_tokens // TOKENS)
        loaded = self.scheduler.update_state_after_alloc(req_id, tables, num_tokens)
        self.step()
        return loaded

    def compute(self, req_id: str, num_blocks: int) -> None:
        """Compute the blocks of a request, and store them."""
        tables = self._tables(req_id, num_blocks)
        num_tokens = num_blocks * TOKENS
        self.scheduler.update_computed_tokens(req_id, num_tokens, tables)
        self.step()

    def finish(self, req_id: str) -> None:
        self.scheduler.request_finished(req_id)
        self.step()

    def run(self, req_id: str, tenant: str | None, num_blocks: int) -> int:
        """Run a whole request; return the tokens that were loaded."""
        self.begin(req_id, tenant, num_blocks)
        loaded = self.load(req_id, self.match(req_id))
        self.compute(req_id, num_blocks)
        self.finish(req_id)
        deadline = time.monotonic() + 60
        while req_id not in self.released and time.monotonic() < deadline:
            self.step()
        return loaded

    def step(self) -> None:
        """End a step: run its transfers, and check each row's content in loads."""
        metadata = self.scheduler.build_connector_meta()
        results = []
        for job in metadata.stores:
            self._store(job)
            results.append(TransferResult(job.job_id, success=True, num_bytes=1))
        for job in metadata.loads:
            self._check(job)
            results.append(TransferResult(job.job_id, success=True, num_bytes=1))
        output = self.scheduler.update_connector_output(results)
        self.released.update(output.released)
        self.events += self.scheduler.take_events()

    def _tables(self, req_id: str, num_blocks: int) -> list[list[int]]:
        """Return device blocks whose numbers tell request, group and position."""
        tables = []
        for group in range(len(self.chains)):
            first = 10_000 * self._numbers[req_id] + 1000 * group
            tables.append(list(range(first, first + num_blocks)))
        return tables

    def _content(self, device_block: int) -> bytes:
        number, place = divmod(device_block, 10_000)
        key = self.chains[place // 1000][place % 1000]
        return content(self._tenants[number], key)

    def _store(self, job: TransferJob) -> None:
        source, target = job.spec
        assert isinstance(source, GPULoadStoreSpec)
        for block, row in self._pairs(source, target):
            self.stack.rows[row] = 0
            self._bytes(block, row)[:] = np.frombuffer(self._content(block), np.uint8)

    def _check(self, job: TransferJob) -> None:
        source, target = job.spec
        assert isinstance(target, GPULoadStoreSpec)
        for block, row in self._pairs(target, source):
            assert self._bytes(block, row).tobytes() == self._content(block)

    def _pairs(
        self,
        device: GPULoadStoreSpec,
        rows: LoadStoreSpec,
    ) -> Iterator[tuple[int, int]]:
        """Yield device block and row of each block of a job."""
        assert isinstance(rows, CPULoadStoreSpec)
        pairs = zip(device.block_ids.tolist(), rows.block_ids.tolist(), strict=True)
        yield from pairs

    def _bytes(self, device_block: int, row: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a row that show whose it is."""
        group = device_block % 10_000 // 1000
        start = GROUPS[group].ranges[0][0]
        return self.stack.rows[row, start : start + CONTENT_BYTES]


@pytest.fixture
def chains(keys: Keys) -> list[list[OffloadKey]]:
    return [keys(6, group) for group in range(len(GROUPS))]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store?capacity=64MiB"


OpenEngine = Callable[..., TenantEngine]


@pytest.fixture
def open_engine(
    make_stack: MakeStack,
    chains: list[list[OffloadKey]],
    url: str,
) -> OpenEngine:
    """Return a function that starts engines on one store."""

    def start(num_rows: int = 64, **options: object) -> TenantEngine:
        defaults = {"host": "thread", "load_policy": "always", "max_age_s": 0.0}
        tier = persistent(url=url, **{**defaults, **options})
        return TenantEngine(make_stack(num_rows, tier), chains)

    return start


def tier_of(engine: TenantEngine) -> PersistentTier:
    (tier,) = engine.stack.tiers_of(PersistentTier)
    return tier


def persist(engine: TenantEngine, req_id: str, tenant: str | None, blocks: int) -> int:
    """Run a request, and wait until its context is durable; return the tokens loaded."""
    loaded = engine.run(req_id, tenant, blocks)
    deadline = time.monotonic() + 60
    while tier_of(engine).persisted(req_id) is None and time.monotonic() < deadline:
        engine.step()
    assert tier_of(engine).persisted(req_id)
    return loaded


@contextmanager
def opened(url: str) -> Iterator[Backend]:
    with closing(open_backend(url, read_only=True)) as backend:
        yield backend


def packs_by_tenant(url: str) -> dict[str, set[bytes]]:
    """Return the keys of all packs of a store by the tenants that their tables name."""
    found: dict[str, set[bytes]] = {}
    with opened(url) as backend:
        for namespace in backend.namespaces():
            for table in backend.changes(namespace.id, None).added:
                found.setdefault(table.tenant, set()).update(table.keys.unpack())
    return found


def keys_of(tenant: str | None, chains: Sequence[Sequence[OffloadKey]]) -> set[bytes]:
    own: set[bytes] = set()
    for chain in chains:
        own.update(tenant_key(tenant or DEFAULT_TENANT, key) for key in chain)
    return own


def test_restart_equal_prefixes_of_tenants_are_stored_and_served_apart(
    open_engine: OpenEngine,
    chains: list[list[OffloadKey]],
    url: str,
) -> None:
    first = open_engine()
    for number, tenant in enumerate(TENANTS):
        assert persist(first, f"r{number}", tenant, 6) == 0, "of another tenant"
    stored = packs_by_tenant(url)
    assert stored == {name or DEFAULT_TENANT: keys_of(name, chains) for name in TENANTS}

    second = open_engine()
    for number, tenant in enumerate(TENANTS):
        assert persist(second, f"s{number}", tenant, 6) == 6 * TOKENS
    assert persist(second, "other", "clara", 6) == 0


def test_primary_tier_rows_of_other_tenant_miss(open_engine: OpenEngine) -> None:
    engine = open_engine(load_policy="never")
    for turn in range(2):
        for number, tenant in enumerate(TENANTS):
            loaded = engine.run(f"{turn}-{number}", tenant, 4)
            assert loaded == (4 * TOKENS if turn else 0)


def test_default_tenant_by_name_is_that_of_requests_without_one(
    open_engine: OpenEngine,
    chains: list[list[OffloadKey]],
    url: str,
) -> None:
    engine = open_engine()
    assert persist(engine, "unnamed", None, 4) == 0
    assert persist(engine, "named", "default", 4) == 4 * TOKENS
    assert packs_by_tenant(url).keys() == {DEFAULT_TENANT}


def test_tenant_in_parameters_counts_and_other_one_beside_it_raises(
    open_engine: OpenEngine,
) -> None:
    scheduler = open_engine().scheduler
    parameters = {"persistkv": {"tenant": "anna"}, "other": {"tenant": "x"}}
    assert scheduler.on_new_request("a", parameters).tenant == "anna"
    assert scheduler.on_new_request("b", parameters, tenant="anna").tenant == "anna"
    assert scheduler.on_new_request("c", {"persistkv": False}).tenant is None
    with pytest.raises(ConfigurationError, match="one tenant"):
        scheduler.on_new_request("d", parameters, tenant="berta")
    for invalid in ("", "x" * 129, "a\nb", 7, b"a", ["a"]):
        with pytest.raises(ConfigurationError, match="1 to 128 characters"):
            scheduler.on_new_request("e", {"persistkv": {"tenant": invalid}})
        with pytest.raises(ConfigurationError, match="1 to 128 characters"):
            scheduler.on_new_request("f", tenant=invalid)  # type: ignore[arg-type]


def test_promotion_in_flight_of_one_tenant_does_not_answer_others(
    open_engine: OpenEngine,
) -> None:
    engine = open_engine()
    persist(engine, "cold", "anna", 5)
    engine.stack.clear_primary()
    engine.begin("warm", "anna", 5)
    engine.begin("berta", "berta", 5)
    engine.begin("default", None, 5)
    assert engine.scheduler.get_num_new_matched_tokens("warm", 0) is None
    engine.step()  # submits the promotion
    for other in ("berta", "default"):
        assert engine.scheduler.get_num_new_matched_tokens(other, 0) == 0
    assert engine.load("warm", engine.match("warm")) == 5 * TOKENS
    for other in ("berta", "default"):
        assert engine.scheduler.get_num_new_matched_tokens(other, 0) == 0


def test_abandoned_load_of_one_tenant_does_not_bar_blocks_of_another(
    make_stack: MakeStack,
    chains: list[list[OffloadKey]],
) -> None:
    stack = make_stack(64, RecordingTier)
    (tier,) = stack.tiers_of(RecordingTier)
    engine = TenantEngine(stack, chains)
    engine.run("cold", "anna", 4)
    engine.step()
    stack.clear_primary()
    tier.load_deadline_s = 0.05
    tier.withholds_results = True
    engine.begin("warm", "anna", 4)
    assert engine.scheduler.get_num_new_matched_tokens("warm", 0) is None
    engine.step()
    time.sleep(0.1)
    assert engine.match("warm") == 0  # abandoned; its rows stay reserved
    assert engine.run("berta-1", "berta", 4) == 0
    assert engine.run("berta-2", "berta", 4) == 4 * TOKENS
    tier.withholds_results = False
    engine.step()
    assert engine.load("warm", engine.match("warm")) == 4 * TOKENS


def test_next_turn_of_another_tenant_shares_nothing_and_of_same_tenant_all(
    open_engine: OpenEngine,
    chains: list[list[OffloadKey]],
    url: str,
) -> None:
    engine = open_engine()
    assert persist(engine, "turn-1", "anna", 3) == 0
    assert persist(engine, "turn-2", "berta", 5) == 0
    assert persist(engine, "turn-3", "anna", 6) == 3 * TOKENS
    assert persist(engine, "turn-4", "berta", 6) == 5 * TOKENS
    stored = packs_by_tenant(url)
    assert stored == {name: keys_of(name, chains) for name in ("anna", "berta")}


def test_events_have_keys_of_engine(
    open_engine: OpenEngine,
    chains: list[list[OffloadKey]],
) -> None:
    engine = open_engine()
    persist(engine, "a", "anna", 6)
    persist(engine, "b", None, 6)
    deadline = time.monotonic() + 60
    stored: list[OffloadKey] = []
    while len(stored) < 2 * 18 and time.monotonic() < deadline:
        engine.step()
        stored = []
        for event in engine.events:
            if event.medium == "persistent":
                assert not event.removed
                stored += event.keys
    every = [key for chain in chains for key in chain]
    assert sorted(stored) == sorted(2 * every)


def test_required_tenant_refuses_requests_without_one(
    open_engine: OpenEngine,
    url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lax = open_engine()
    persist(lax, "lax", None, 4)
    engine = open_engine(tenant="required")
    tier = tier_of(engine)
    with caplog.at_level(logging.WARNING):
        assert engine.run("unnamed", None, 4) == 0, "stored by another engine"
        assert engine.run("again", None, 6) == 4 * TOKENS, "from the primary tier"
    assert caplog.text.count("names no tenant") == 1
    assert "request unnamed neither uses nor fills the store" in caplog.text
    assert tier.persisted("unnamed") is False
    assert persist(engine, "named", "anna", 4) == 0
    assert tier.load_counts[Reason.REFUSED] == 2
    assert tier.client.flush(60)
    assert {name: len(found) for name, found in packs_by_tenant(url).items()} == {
        DEFAULT_TENANT: 3 * 4,
        "anna": 3 * 4,
    }
    deadline = time.monotonic() + 60
    refused: list[str] = []
    while len(refused) < 2 and time.monotonic() < deadline:
        with opened(url) as backend:
            statuses = read_statuses(backend)
        refused = []
        for status in statuses:
            for report in status.load_reports:
                if report.reason == "refused":
                    refused.append(report.request)
        engine.step()
        time.sleep(0.05)
    assert sorted(refused) == ["again", "unnamed"]


def test_load_policy_never_stores_for_each_tenant_and_loads_for_none(
    open_engine: OpenEngine,
    url: str,
) -> None:
    first = open_engine(load_policy="never")
    for number, tenant in enumerate(TENANTS):
        persist(first, f"r{number}", tenant, 4)
    assert {len(found) for found in packs_by_tenant(url).values()} == {3 * 4}
    second = open_engine(load_policy="never")
    for number, tenant in enumerate(TENANTS):
        assert second.run(f"s{number}", tenant, 4) == 0


def recent(tier: PersistentTier, choice: Choice | StoredContext) -> list[StoredContext]:
    """Return the contexts that a prefetch selects."""
    tier.prefetch(choice)
    assert tier.ask_recent(1000, prefetched=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        tier.get_finished_jobs()
        found = tier.take_recent()
        if found is not None:
            return found
        time.sleep(0.001)
    raise AssertionError("no answer")


def test_prefetch_selects_contexts_of_its_tenant_only(
    open_engine: OpenEngine,
    chains: list[list[OffloadKey]],
) -> None:
    engine = open_engine()
    for number, tenant in enumerate(TENANTS):
        persist(engine, f"r{number}", tenant, 6)
    tier = tier_of(engine)
    for tenant in ("anna", "berta", DEFAULT_TENANT):
        (found,) = recent(tier, Choice(tenant=tenant))
        assert found.tenant == tenant
        assert set(found.keys) == keys_of(tenant, chains)
    assert recent(tier, Choice(tenant="clara")) == []
    named = {context.tenant for context in recent(tier, Choice())}
    assert named == {"anna", "berta", DEFAULT_TENANT}
    own = StoredContext("anna", list(map(OffloadKey, keys_of("anna", chains))))
    assert recent(tier, own) == [own]


def test_prewarmed_rows_serve_only_their_tenant(
    make_stack: MakeStack,
    chains: list[list[OffloadKey]],
    open_engine: OpenEngine,
    url: str,
) -> None:
    first = open_engine()
    persist(first, "cold", "anna", 4)
    tier = partial(PersistentTier, url=url, host="thread", tenant="required")
    engine = TenantEngine(make_stack(64, tier, prewarm_share=0.5), chains)
    deadline = time.monotonic() + 60
    while engine.stack.manager.has_pending_work() and time.monotonic() < deadline:
        engine.step()
    assert engine.stack.manager.stats.promoted_blocks == 3 * 4
    engine.begin("berta", "berta", 4)
    engine.begin("anna", "anna", 4)
    assert engine.scheduler.get_num_new_matched_tokens("berta", 0) == 0
    matched = engine.scheduler.get_num_new_matched_tokens("anna", 0)
    assert matched == 4 * TOKENS, "at once, from the primary tier"
    assert engine.load("anna", matched) == 4 * TOKENS


def test_reused_request_id_of_another_tenant_stores_nothing_of_the_first(
    make_stack: MakeStack,
    keys: Keys,
) -> None:
    """A finished request awaits the promotion of its blocks, when its id is used again."""
    stack = make_stack(16, RecordingTier)
    (tier,) = stack.tiers_of(RecordingTier)
    names = [tenant_key("anna", key) for key in keys(2)]
    manager = stack.manager
    cold = ReqContext("cold", tenant="anna")
    manager.on_new_request(cold)
    stack.store(names, cold)
    manager.on_request_finished(cold)
    stack.step()
    manager.reset_cache(weights_changed=False)

    warm, first = ReqContext("warm", tenant="anna"), ReqContext("r", tenant="anna")
    manager.on_new_request(warm)
    assert manager.lookup_prefix(names, warm) == [None, None]
    tier.withholds_results = True
    stack.step()
    manager.on_new_request(first)
    assert manager.prepare_store(names, first) is not None  # they are being promoted
    manager.on_request_finished(first)
    second = ReqContext("r", tenant="berta")
    manager.on_new_request(second)
    tier.withholds_results = False
    stack.step(2)
    assert manager.lookup_prefix(names, warm) == [True, True]
    assert {job.req_context.tenant for job in tier.stores} == {"anna"}
    manager.on_request_finished(second)
    manager.on_request_finished(warm)
    stack.step()
    assert sorted(context.req_id for context in tier.ended) == ["cold", "r", "warm"]


@pytest.mark.parametrize("seed", range(20))
def test_random_interleavings_never_mix_tenants(
    make_stack: MakeStack,
    chains: list[list[OffloadKey]],
    seed: int,
) -> None:
    """Requests begin, wait, are preempted, resumed, abandoned and finished in any order, while
    blocks are evicted from a small primary tier."""
    random_ = random.Random(seed)
    stack = make_stack(random_.choice((10, 24, 60)), RecordingTier)
    (tier,) = stack.tiers_of(RecordingTier)
    engine = TenantEngine(stack, chains)
    live: dict[str, tuple[str | None, int]] = {}
    num_begun = num_loaded = 0
    for _ in range(250):
        action = random_.choice(
            ("begin", "match", "match", "compute", "preempt", "end")
        )
        tier.withholds_results = random_.random() < 0.3
        if action == "begin" and len(live) < 6:
            num_begun += 1
            req_id = f"r{num_begun}"
            tenant = random_.choice(TENANTS)
            num_blocks = random_.randint(1, 6)
            engine.begin(req_id, tenant, num_blocks)
            live[req_id] = (tenant, num_blocks)
        elif not live:
            continue
        req_id = random_.choice(list(live))
        tenant, num_blocks = live[req_id]
        if action == "match":
            found = engine.scheduler.get_num_new_matched_tokens(req_id, 0)
            if found:
                num_loaded += engine.load(req_id, found)
        elif action == "compute":
            engine.compute(req_id, num_blocks)
        elif action == "preempt":
            engine.scheduler.update_computed_tokens(req_id, 0, [[], [], []])
        elif action == "end":
            del live[req_id]
            engine.finish(req_id)
        engine.step()
        if random_.random() < 0.02:
            stack.manager.reset_cache(weights_changed=False)
    tier.withholds_results = False
    assert num_loaded
    of_tenants = {name: keys_of(name, chains) for name in TENANTS}
    for job in tier.stores:
        assert of_tenants[job.req_context.tenant].issuperset(job.keys)
    for key, data in tier.blocks.items():
        (owner,) = [name for name in TENANTS if key in of_tenants[name]]
        originals = [one for chain in chains for one in chain]
        (original,) = [
            one for one in originals if tenant_key(owner or DEFAULT_TENANT, one) == key
        ]
        assert data.startswith(content(owner, original)), STRIDE
    for req_id in live:
        engine.finish(req_id)
