"""The example tier: conformance, ``max_blocks`` and the order of eviction."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from persistkv.config import OffloadingConfig
from persistkv.errors import ConfigurationError
from persistkv.testing.tier_conformance import SecondaryTierConformance
from persistkv.tiering.base import JobMetadata
from persistkv.tiering.example import ExampleSecondaryTier
from tests.tiering.conftest import Described, Keys, MakeStack


class TestExampleTier(SecondaryTierConformance):
    def open_tier(
        self,
        config: OffloadingConfig,
        view: memoryview,
    ) -> ExampleSecondaryTier:
        return ExampleSecondaryTier(config, view)


class TestExampleTierAsynchronous(SecondaryTierConformance):
    def open_tier(
        self,
        config: OffloadingConfig,
        view: memoryview,
    ) -> ExampleSecondaryTier:
        return ExampleSecondaryTier(config, view, max_blocks=16, simulate_async=True)


def test_example_tier_full_evicts_oldest_but_not_blocks_of_job(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(16, partial(ExampleSecondaryTier, max_blocks=4))
    (tier,) = stack.tiers_of(ExampleSecondaryTier)
    req = described("r")
    stack.manager.on_new_request(req)
    old, new = keys(4), keys(3)
    stack.store(old, req)
    tier.touch(old[:1], req)
    stack.store(new, req)
    assert set(tier.blocks) == {old[0], *new}
    assert len(tier.blocks) == 4
    many = keys(6)
    stack.store(many, req)
    assert list(tier.blocks) == many[:4], (
        "blocks without room next to the rest of their job are declined"
    )
    (*_, result) = tier.completed_jobs
    assert list(result.failed_keys) == many[4:]


def test_example_tier_simulate_async_runs_jobs_on_poll(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, partial(ExampleSecondaryTier, simulate_async=True))
    (tier,) = stack.tiers_of(ExampleSecondaryTier)
    req = described("r")
    stack.manager.on_new_request(req)
    stack.store(keys(2), req)
    assert (len(tier.pending_jobs), len(tier.blocks)) == (1, 0)
    stack.step()
    assert (len(tier.pending_jobs), len(tier.blocks)) == (0, 2)


def test_example_tier_defaults_to_1000_blocks(make_stack: MakeStack) -> None:
    stack = make_stack(4, ExampleSecondaryTier)
    (tier,) = stack.tiers_of(ExampleSecondaryTier)
    assert tier.max_blocks == 1000


@pytest.mark.parametrize("simulate_async", [False, True])
@pytest.mark.parametrize("is_promotion", [False, True])
def test_example_tier_lengths_differ_raises_without_side_effects(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    simulate_async: bool,
    is_promotion: bool,
) -> None:
    stack = make_stack(8, partial(ExampleSecondaryTier, simulate_async=simulate_async))
    (tier,) = stack.tiers_of(ExampleSecondaryTier)
    job = JobMetadata(1, keys(2), np.array([0], np.int64), is_promotion, described("r"))
    with pytest.raises(ValueError, match="2 keys and 1 rows"):
        (tier.submit_load if is_promotion else tier.submit_store)(job)
    assert list(tier.get_finished_jobs()) == []
    assert len(tier.blocks) == 0
    assert not tier.has_pending_work()


def test_example_tier_held_key_is_not_copied_again(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
) -> None:
    stack = make_stack(8, partial(ExampleSecondaryTier, max_blocks=2))
    (tier,) = stack.tiers_of(ExampleSecondaryTier)
    (held, other, new), req = keys(3), described("r")
    stack.rows[0], stack.rows[1] = 1, 2
    tier.submit_store(JobMetadata(1, [held], np.array([0]), False, req))
    tier.submit_store(JobMetadata(2, [other], np.array([1]), False, req))
    tier.submit_store(JobMetadata(3, [held], np.array([1]), False, req))
    assert set(tier.blocks[held]) == {1}
    tier.submit_store(JobMetadata(4, [new], np.array([1]), False, req))
    assert set(tier.blocks) == {held, new}, (
        "a block that is stored again counts as used"
    )
    assert [result.success for result in tier.get_finished_jobs()] == [True] * 4


def test_example_tier_max_blocks_below_one_raises(
    make_stack: MakeStack,
) -> None:
    with pytest.raises(ConfigurationError, match="max_blocks"):
        make_stack(8, partial(ExampleSecondaryTier, max_blocks=0))
