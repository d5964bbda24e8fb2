"""The filter that stores only blocks that requests look up repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from persistkv.base import (
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestDescription,
    RequestOffloadingContext,
)
from persistkv.cpu.manager import CPUOffloadingManager
from persistkv.cpu.reuse_manager import FilterReusedOffloadingManager
from persistkv.errors import ConfigurationError

MakeKeys = Callable[[int], list[OffloadKey]]


def make_filter(
    store_threshold: int = 2,
    max_tracker_size: int = 100,
    num_blocks: int = 4,
) -> FilterReusedOffloadingManager:
    return FilterReusedOffloadingManager(
        CPUOffloadingManager(num_blocks), store_threshold, max_tracker_size
    )


def look_up(
    manager: FilterReusedOffloadingManager,
    keys: Sequence[OffloadKey],
    context: ReqContext,
) -> None:
    for key in keys:
        manager.lookup(key, context)


def stored(
    manager: FilterReusedOffloadingManager,
    keys: Sequence[OffloadKey],
    context: ReqContext,
) -> list[OffloadKey]:
    """Store all blocks that the filter accepts; return them."""
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)
    return output.keys_to_store


def described(req_id: str, *chains: Sequence[OffloadKey]) -> ReqContext:
    description = RequestDescription(len(chains))
    for group, chain in enumerate(chains):
        description.extend(group, chain)
    return ReqContext(req_id, None, description)


@pytest.mark.parametrize("threshold", [1, 2, 5])
def test_prepare_store_block_is_stored_after_threshold_lookups(
    keys: MakeKeys,
    context: ReqContext,
    threshold: int,
) -> None:
    manager = make_filter(threshold)
    (key,) = keys(1)
    for _ in range(threshold):
        assert stored(manager, [key], context) == []
        assert manager.lookup(key, context) is False
    assert stored(manager, [key], context) == [key]
    assert manager.lookup(key, context) is True


def test_prepare_store_mixed_blocks_stores_reused_ones_in_order(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = make_filter()
    first, second, third, fourth = keys(4)
    look_up(manager, [third, first, third, first, second], context)
    assert stored(manager, [fourth, third, second, first], context) == [third, first]


def test_prepare_store_filtered_blocks_evict_nothing(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = make_filter(num_blocks=2)
    held = keys(2)
    look_up(manager, held * 2, context)
    assert stored(manager, held, context) == held
    output = manager.prepare_store(keys(5), context)
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys) == ([], [])
    assert [manager.lookup(key, context) for key in held] == [True, True]


def test_prepare_store_without_room_for_reused_blocks_returns_none(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = make_filter(num_blocks=2)
    many = keys(3)
    look_up(manager, many * 2, context)
    assert manager.prepare_store(many, context) is None


def test_complete_store_filtered_block_raises_key_error(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = make_filter()
    (key,) = keys(1)
    manager.prepare_store([key], context)
    with pytest.raises(KeyError, match="not held"):
        manager.complete_store([key], context)


def test_tracker_full_forgets_least_recently_looked_up_block(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    manager = make_filter(max_tracker_size=2)
    first, second, third = keys(3)
    look_up(manager, [first, second, first, third], context)  # forgets the second block
    look_up(manager, [second], context)  # forgets the first block
    assert stored(manager, [first, second, third], context) == []
    look_up(manager, [second, third], context)
    assert stored(manager, [first, second, third], context) == [second, third]


def test_tracker_chain_longer_than_limit_keeps_first_blocks(keys: MakeKeys) -> None:
    manager = make_filter(store_threshold=1, max_tracker_size=3)
    chain = keys(10)
    request = described("a", chain)
    manager.lookup(chain[0], request)
    assert stored(manager, chain, request) == chain[:3]


def test_tracker_two_long_groups_keep_first_blocks_of_each(keys: MakeKeys) -> None:
    manager = make_filter(store_threshold=1, max_tracker_size=4)
    chains = [keys(5), keys(5)]
    request = described("a", *chains)
    manager.lookup(chains[0][0], request)
    assert (
        stored(manager, chains[0] + chains[1], request) == chains[0][:2] + chains[1][:2]
    )


def test_described_request_repeated_lookups_count_once(keys: MakeKeys) -> None:
    manager = make_filter(num_blocks=8)
    groups = [keys(3), keys(2)]
    everything = groups[0] + groups[1]
    first = described("a", *groups)
    # an engine that waits for a promotion repeats its lookup, which ends at the first miss
    for _ in range(5):
        manager.lookup(groups[0][0], first)
    assert stored(manager, everything, first) == []
    manager.on_request_finished(first)
    second = described("b", *groups)
    manager.lookup(groups[0][0], second)
    assert stored(manager, everything, second) == everything


def test_described_request_blocks_added_after_lookup_are_not_counted(
    keys: MakeKeys,
) -> None:
    manager = make_filter(store_threshold=1)
    prompt, answer = keys(2), keys(2)
    request = described("a", prompt)
    manager.lookup(prompt[0], request)
    assert request.description is not None
    request.description.extend(0, answer)
    assert stored(manager, prompt + answer, request) == prompt


def test_described_request_finished_id_reused_counts_again(keys: MakeKeys) -> None:
    manager = make_filter()
    chain = keys(2)
    for _ in range(2):
        request = described("a", chain)
        manager.lookup(chain[0], request)
        manager.on_request_finished(request)
    assert stored(manager, chain, described("a", chain)) == chain


def test_lookup_block_outside_description_counts(keys: MakeKeys) -> None:
    manager = make_filter(store_threshold=1)
    (other,) = keys(1)
    request = described("a", keys(2))
    manager.lookup(other, request)
    assert stored(manager, [other], request) == [other]


def test_reset_cache_forgets_counts(keys: MakeKeys, context: ReqContext) -> None:
    manager = make_filter()
    (key,) = keys(1)
    look_up(manager, [key, key], context)
    manager.reset_cache()
    assert stored(manager, [key], context) == []
    look_up(manager, [key, key], context)
    assert stored(manager, [key], context) == [key]


class RecordingManager(CPUOffloadingManager):
    """Manager that records the calls that reach it."""

    def __init__(self) -> None:
        super().__init__(4, enable_events=True)
        self.calls: list[tuple[str, object]] = []

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.calls.append(("touch", list(keys)))
        super().touch(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self.calls.append(("on_new_request", req_context))
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.calls.append(("on_request_finished", req_context))

    def reset_cache(self, weights_changed: bool = True) -> None:
        self.calls.append(("reset_cache", weights_changed))
        super().reset_cache(weights_changed)

    def shutdown(self) -> None:
        self.calls.append(("shutdown", None))


def test_filter_other_calls_reach_backing_manager(
    keys: MakeKeys,
    context: ReqContext,
) -> None:
    backing = RecordingManager()
    manager = FilterReusedOffloadingManager(backing, 1, 10)
    held, filtered = keys(2), keys(2)
    assert manager.backing is backing
    assert manager.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    look_up(manager, held, context)
    assert stored(manager, held + filtered, context) == held
    manager.touch(filtered + held, context)
    spec = manager.prepare_load(held, context)
    assert spec.medium() == "CPU"
    assert backing.num_free_or_evictable() == 2
    manager.complete_load(held, context)
    assert [event.keys for event in manager.take_events()] == [held]
    manager.on_request_finished(context)
    manager.reset_cache(weights_changed=False)
    manager.shutdown()
    assert backing.calls == [
        ("on_new_request", context),
        ("touch", filtered + held),
        ("on_request_finished", context),
        ("reset_cache", False),
        ("shutdown", None),
    ]


@pytest.mark.parametrize(
    ("threshold", "size", "message"),
    [
        (0, 10, "store_threshold: 0 is not valid; expected 1 lookup or more"),
        (-1, 10, "store_threshold: -1 is not valid; expected 1 lookup or more"),
        (2, 0, "max_tracker_size: 0 is not valid; expected 1 block or more"),
    ],
)
def test_filter_number_out_of_range_raises_and_names_option(
    threshold: int,
    size: int,
    message: str,
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_filter(threshold, size)
    assert str(caught.value) == message
