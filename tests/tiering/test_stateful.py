"""A state machine drives manager and tiers, and compares them with a byte-accurate model of every
row.

After every step it checks three invariants: readable rows hold the bytes of their keys, a tier
reports only blocks that it has, and no row is written or reused while a job uses it.
``test_tiering_machine_planted_bug_is_detected`` puts plausible bugs into the manager, and expects
the machine to detect each.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from persistkv.base import (
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestDescription,
    RequestOffloadingContext,
    make_offload_key,
)
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.cpu.manager import CPUPrimaryTierOffloadingManager
from persistkv.cpu.shared_offload_region import SharedOffloadRegion
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from persistkv.tiering.manager import TieringOffloadingManager
from persistkv.tiering.spec import TieringOffloadingOptions

NUM_ROWS = 10
STRIDE = 4096
NUM_GROUPS = 2
CHAIN = 4  # blocks of each group in a request's context
GARBAGE = 0xEE
FREQUENT = ["look_up", "end_step", "begin_store", "end_transfer", "tier_works"]
RARE = ["new_request", "finish", "announce_again", "break_tier"]
FAULTS = [
    "lookup",
    "submit_store",
    "submit_load",
    "get_finished_jobs",
    "take_events",
    "touch",
]


def chains_of(branch: int) -> list[list[OffloadKey]]:
    """Return the chains of a context; all branches share the first two blocks of each group."""
    return [
        [
            make_offload_key(bytes((depth, branch if depth >= 2 else 0)) * 4, group)
            for depth in range(CHAIN)
        ]
        for group in range(NUM_GROUPS)
    ]


def content(key: OffloadKey, weights: int) -> npt.NDArray[np.uint8]:
    """Return the content of a key's block under these weights."""
    return np.resize(np.frombuffer(key + bytes((weights,)), dtype=np.uint8), STRIDE)


class ChaosTier(SecondaryTierManager):
    """Tier that runs its jobs in any order, and fails blocks and raises errors as the machine
    decides."""

    def __init__(
        self,
        config: OffloadingConfig,
        view: memoryview,
        policy: OffloadPolicy,
    ) -> None:
        super().__init__(config, view)
        self.policy = policy
        self.rows = np.frombuffer(view, dtype=np.uint8).reshape(NUM_ROWS, STRIDE)
        self.blocks: dict[OffloadKey, bytes] = {}
        self.waiting: list[JobMetadata] = []
        self.finished: list[JobResult] = []
        self.on_submit: Callable[[JobMetadata], None] = lambda job: None
        self.on_end: Callable[[JobMetadata], None] = lambda job: None
        self.open_requests: Counter[str] = Counter()
        self.faults: list[str] = []

    def check(self, call: str) -> None:
        """Raise once if the machine planned a fault for this call."""
        if call in self.faults:
            self.faults.remove(call)
            raise OSError(call)

    @staticmethod
    def get_tier_type() -> str:
        return "chaos"

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self.check("lookup")
        return key in self.blocks

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self.check("submit_store")
        self._submit(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self.check("submit_load")
        self._submit(job_metadata)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.check("touch")

    def take_events(self) -> tuple[()]:
        self.check("take_events")
        return ()

    def _submit(self, job: JobMetadata) -> None:
        self.on_submit(job)
        self.waiting.append(job)

    def work(self, number: int, failing: Sequence[bool], fail_all: bool) -> None:
        """Run one pending job; overwrite the rows of failed loads with garbage."""
        job = self.waiting.pop(number % len(self.waiting))
        failed = [
            key for index, key in enumerate(job.keys) if failing[index % len(failing)]
        ]
        for key, row in zip(job.keys, job.block_ids, strict=True):
            if job.is_promotion:
                if key not in self.blocks:
                    failed.append(key)
                self.rows[row] = (
                    GARBAGE
                    if key in failed
                    else np.frombuffer(self.blocks[key], dtype=np.uint8)
                )
            elif key not in failed:
                self.blocks[key] = self.rows[row].tobytes()
        if fail_all and job.is_promotion:
            for row in job.block_ids:
                self.rows[row] = GARBAGE
        self.on_end(job)
        self.finished.append(
            JobResult(job.job_id, not fail_all, tuple(dict.fromkeys(failed)))
        )

    def get_finished_jobs(self) -> list[JobResult]:
        self.check("get_finished_jobs")
        finished, self.finished = self.finished, []
        return finished

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.open_requests[req_context.req_id] += 1
        return RequestOffloadingContext(self.policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.open_requests[req_context.req_id] -= 1

    def reset_cache(self, weights_changed: bool) -> None:
        if weights_changed:
            self.blocks.clear()

    def drain_jobs(self, timeout_s: float) -> bool:
        while self.waiting:
            self.work(0, [False], fail_all=False)
        return True

    def shutdown(self) -> None:
        self.rows = np.empty((0, 0), np.uint8)


@dataclass
class Transfer:
    """Transfer of a worker between device and rows."""

    req: ReqContext
    keys: list[OffloadKey]
    rows: list[int]
    is_load: bool
    weights: int


class TieringMachine(RuleBasedStateMachine):
    """Actions and invariants of the stack. ``sabotage`` may break the manager under test."""

    totals: ClassVar[Counter[str]] = Counter()
    """Numbers of actions of all runs: runs without actions would prove nothing."""
    sabotage: Callable[[TieringOffloadingManager], None] | None = None

    @initialize(
        tiers=st.lists(st.sampled_from(OffloadPolicy), min_size=1, max_size=2),
        cascade_share=st.sampled_from([1.0, 0.3]),
    )
    def build(self, tiers: list[OffloadPolicy], cascade_share: float) -> None:
        region = SharedOffloadRegion(uuid.uuid4().hex, NUM_ROWS, 0, 1, STRIDE)
        self.primary = CPUPrimaryTierOffloadingManager(region)
        view = self.primary.get_kv_memoryview()
        self.rows = np.frombuffer(view, dtype=np.uint8).reshape(NUM_ROWS, STRIDE)
        layout = RowLayout(STRIDE, (GroupLayout(((0, STRIDE),)),) * NUM_GROUPS)
        config = OffloadingConfig({"w": 1}, 16, layout, NUM_ROWS)
        self.tiers = [ChaosTier(config, view, policy) for policy in tiers]
        options = TieringOffloadingOptions(
            cpu_bytes_to_use=NUM_ROWS * STRIDE, cascade_share=cascade_share
        )
        self.manager = TieringOffloadingManager(self.primary, self.tiers, options)
        self.requests: dict[str, ReqContext] = {}
        self.transfers: list[Transfer] = []
        self.weights = 0
        self.readers: Counter[int] = Counter()
        self.writers: Counter[int] = Counter()
        self.frozen: dict[int, bytes] = {}
        self.count = 0
        for tier in self.tiers:
            tier.on_submit, tier.on_end = self.job_begins, self.job_ends
        if self.sabotage is not None:
            type(self).sabotage(self.manager)  # type: ignore[misc]
        for branch in range(3):
            self.new_request(branch, described=branch > 0)

    # The model of rows

    def use(self, rows: Sequence[int], *, writing: bool) -> None:
        for row in rows:
            assert not self.writers[row], (
                f"row {row} is given out while it is being written"
            )
            if writing:
                assert not self.readers[row], (
                    f"row {row} is written while it is being read"
                )
                self.writers[row] += 1
            else:
                self.readers[row] += 1
                self.frozen[row] = self.rows[row].tobytes()

    def release(self, rows: Sequence[int], *, writing: bool) -> None:
        for row in rows:
            if writing:
                self.writers[row] -= 1
            else:
                self.readers[row] -= 1
                if not self.readers[row]:
                    del self.frozen[row]

    def job_begins(self, job: JobMetadata) -> None:
        assert len(set(job.block_ids.tolist())) == len(job.block_ids) == len(job.keys)
        self.use(job.block_ids.tolist(), writing=job.is_promotion)

    def job_ends(self, job: JobMetadata) -> None:
        self.release(job.block_ids.tolist(), writing=job.is_promotion)

    # Actions of an engine. One rule draws the action: Hypothesis disables rules at random, and with
    # one rule per action most runs would lack a necessary action and stay shallow.

    @rule(
        action=st.sampled_from(
            [*3 * FREQUENT, *3 * ["quiet", "reset", "begin_load"], *RARE]
        ),
        number=st.integers(0, 9),
        other=st.integers(0, 2 * CHAIN),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    )
    def act(
        self,
        action: str,
        number: int,
        other: int,
        flags: tuple[bool, bool, bool],
    ) -> None:
        match action:
            case "new_request":
                self.new_request(number % 3, described=flags[0], announced=flags[1])
            case "announce_again" if self.requests:
                self.announce(self.pick(number))
            case "break_tier":
                self.tiers[number % len(self.tiers)].faults.append(
                    FAULTS[other % len(FAULTS)]
                )
            case "look_up" if self.requests:
                self.look_up(number)
            case "end_step":
                self.manager.take_events()
            case "begin_store" if self.requests:
                self.begin_store(number, other % CHAIN, other + 1)
            case "begin_load" if self.requests:
                self.begin_load(number)
            case "end_transfer" if self.transfers:
                self.end_transfer(number, success=flags[0] or flags[1])
            case "tier_works" if any(tier.waiting for tier in self.tiers):
                self.tier_works(
                    number, [flag and flags[0] for flag in flags], fail_all=other == 7
                )
            case "finish" if self.requests:
                self.finish(number)
            case "reset":
                self.reset(weights_changed=all(flags))
            case "quiet":
                self.all_transfers_end()

    def new_request(self, branch: int, described: bool, announced: bool = True) -> None:
        self.count += 1
        description = None
        if described:
            description = RequestDescription(NUM_GROUPS)
            for group, chain in enumerate(chains_of(branch)):
                description.extend(group, chain)
        req = ReqContext(f"{self.count}-{branch}", None, description)
        if announced:
            self.announce(req)
        self.requests[req.req_id] = req

    def announce(self, req: ReqContext) -> None:
        policy = self.manager.on_new_request(req).policy
        wants_all = any(
            tier.policy is OffloadPolicy.REQUEST_LEVEL for tier in self.tiers
        )
        assert policy is (
            OffloadPolicy.REQUEST_LEVEL if wants_all else OffloadPolicy.BLOCK_LEVEL
        )

    def pick(self, number: int) -> ReqContext:
        return self.requests[sorted(self.requests)[number % len(self.requests)]]

    @staticmethod
    def keys_of(req: ReqContext) -> list[OffloadKey]:
        return [
            key for chain in chains_of(int(req.req_id.split("-")[1])) for key in chain
        ]

    def look_up(self, number: int) -> None:
        req = self.pick(number)
        keys = self.keys_of(req)
        self.manager.touch(keys, req)
        for key in keys:
            if self.manager.lookup(key, req):
                row = self.primary.get_block_id(key, req)
                assert (self.rows[row] == content(key, self.weights)).all(), (
                    "a readable block holds other bytes"
                )

    def begin_store(self, number: int, start: int, length: int) -> None:
        req = self.pick(number)
        output = self.manager.prepare_store(
            self.keys_of(req)[start : start + length], req
        )
        if output is not None and output.keys_to_store:
            rows = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
            self.use(rows, writing=True)
            self.transfers.append(
                Transfer(req, output.keys_to_store, rows, False, self.weights)
            )

    def begin_load(self, number: int) -> None:
        req = self.pick(number)
        ready = [key for key in self.keys_of(req) if self.manager.lookup(key, req)]
        if ready:
            rows = self.manager.prepare_load(ready, req).block_ids.tolist()  # type: ignore[attr-defined]
            self.use(rows, writing=False)
            self.transfers.append(Transfer(req, ready, rows, True, self.weights))

    def end_transfer(self, number: int, success: bool) -> None:
        transfer = self.transfers.pop(number % len(self.transfers))
        if transfer.is_load:
            for key, row in zip(transfer.keys, transfer.rows, strict=True):
                assert (self.rows[row] == content(key, transfer.weights)).all(), (
                    "a load read other bytes"
                )
            self.release(transfer.rows, writing=False)
            self.manager.complete_load(transfer.keys, transfer.req)
            return
        for key, row in zip(transfer.keys, transfer.rows, strict=True):
            self.rows[row] = content(key, transfer.weights) if success else GARBAGE
        self.release(transfer.rows, writing=True)
        self.manager.complete_store(transfer.keys, transfer.req, success)

    def tier_works(self, number: int, failing: list[bool], fail_all: bool) -> None:
        busy = [tier for tier in self.tiers if tier.waiting]
        busy[number % len(busy)].work(number, failing, fail_all)

    def finish(self, number: int) -> None:
        req = self.pick(number)
        del self.requests[req.req_id]
        self.manager.on_request_finished(req)

    def all_transfers_end(self) -> None:
        """Let all transfers and jobs succeed, so that runs reach deep states."""
        while self.transfers:
            self.end_transfer(0, True)
        self.end_step()

    def end_step(self) -> None:
        """Let the tiers end their jobs, then end the step."""
        for tier in self.tiers:
            tier.drain_jobs(1)
        self.manager.take_events()

    def reset(self, weights_changed: bool) -> None:
        """Before a change of weights, an engine waits for its tiers' jobs, which would store old
        bytes as new ones."""
        if weights_changed:
            self.end_step()
            if any(tier.waiting for tier in self.tiers):
                return
            self.weights += 1
        self.manager.reset_cache(weights_changed)

    # Invariants

    @invariant()
    def rows_that_are_read_do_not_change(self) -> None:
        for row, before in getattr(self, "frozen", {}).items():
            assert self.rows[row].tobytes() == before, (
                f"row {row} changed while a job read it"
            )

    @invariant()
    def tiers_hold_what_belongs_to_their_keys(self) -> None:
        for tier in getattr(self, "tiers", ()):
            for key, held in tier.blocks.items():
                assert held == content(key, self.weights).tobytes(), (
                    "a tier was handed other bytes"
                )

    def check_no_promotion_is_forgotten(self, req: ReqContext, key: OffloadKey) -> None:
        """Check that a lookup gets a definite answer once the tiers have worked, not *retry later*
        for ever."""
        for _ in range(3):
            if self.manager.lookup(key, req) is not None:
                break
            self.end_step()
        assert self.manager.lookup(key, req) is not None, (
            "a promotion is awaited that no tier works on"
        )
        self.manager.on_request_finished(req)

    def teardown(self) -> None:
        """Check that, after the end of all work, every row is free and no request is remembered."""
        if not hasattr(self, "manager"):
            return
        try:
            for tier in self.tiers:
                tier.faults.clear()
            while self.transfers:
                self.end_transfer(0, True)
            for req_id in sorted(self.requests):
                self.manager.on_request_finished(self.requests[req_id])
            for _ in range(4):
                self.end_step()
            for branch in range(3):
                for key in dict.fromkeys(
                    key for chain in chains_of(branch) for key in chain
                ):
                    self.check_no_promotion_is_forgotten(
                        ReqContext(f"probe-{key.hex()}-{branch}"), key
                    )
            self.end_step()  # promoted blocks cascaded to other tiers
            assert self.primary.num_free_or_evictable() == NUM_ROWS, (
                "a reference was leaked"
            )
            assert not self.manager.has_pending_work()
            assert not any(self.readers.values())
            assert not any(self.writers.values())
            for tier in self.tiers:
                assert not any(tier.open_requests.values()), (
                    "a tier was not told of a request's end, or twice"
                )
            self.totals.update(vars(self.manager.stats))
        finally:
            self.rows = np.empty((0, 0), np.uint8)
            self.manager.shutdown()


def run(
    machine: type[TieringMachine],
    max_examples: int,
    phases: Sequence[Phase] = tuple(Phase),
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            phases=phases,
            stateful_step_count=100,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        ),
    )


@pytest.mark.timeout(600)
def test_tiering_manager_random_steps_keep_invariants() -> None:
    run(TieringMachine, max_examples=100)
    done = TieringMachine.totals
    assert done["cascaded_blocks"] > 1000, done
    assert done["promoted_blocks"] > 300, done
    assert done["failed_promotions"] > 30, done
