"""Blocks of callers' memory, on each medium."""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from persistkv import (
    BlockStore,
    CompletionQueue,
    ConfigurationError,
    StoreError,
)
from persistkv.errors import HostError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.records import StoreOptions
from tests.storage.blocks.conftest import (
    BLOCK_BYTES,
    OpenBlocks,
    identity,
    new_keys,
    random_blocks,
)


def test_put_then_get_returns_the_bytes(open_blocks: OpenBlocks) -> None:
    store, keys, blocks = open_blocks(), new_keys(5), random_blocks(5)
    assert store.put(keys, list(blocks)) == [True] * 5
    assert store.contains([*keys, b"absent"]) == [True] * 5 + [False]
    into = np.zeros_like(blocks)
    assert store.get(keys[::-1], list(into)) == [True] * 5
    assert np.array_equal(into, blocks[::-1])


def test_reopened_store_serves_what_was_acknowledged(open_blocks: OpenBlocks) -> None:
    store, keys, blocks = open_blocks(), new_keys(3), random_blocks(3)
    assert all(store.put(keys, list(blocks)))
    assert store.close()
    again, into = open_blocks(), np.zeros_like(blocks)
    assert again.prefix([*keys, b"absent", keys[0]]) == 3
    assert all(again.get(keys, list(into)))
    assert np.array_equal(into, blocks)


def test_regions_of_any_sizes_are_joined_and_divided(open_blocks: OpenBlocks) -> None:
    """Keys and values lie apart, as in an engine's pool; the reader's regions are other ones."""
    store, keys = open_blocks(), new_keys(4)
    pool = random_blocks(2, 4 * BLOCK_BYTES // 2).reshape(2, 4, BLOCK_BYTES // 2)
    stored = [[pool[0, page], pool[1, page]] for page in range(4)]
    assert all(store.put(keys, stored))
    whole = np.zeros((4, BLOCK_BYTES), np.uint8)
    cuts = [0, 1, 4096, 5000, BLOCK_BYTES]
    into = [[block[a:b] for a, b in itertools.pairwise(cuts)] for block in whole]
    assert all(store.get(keys, into))
    for page in range(4):
        assert np.array_equal(whole[page], np.concatenate(pool[:, page]))


def test_groups_have_blocks_of_their_own_size(open_blocks: OpenBlocks) -> None:
    sizes = (8192, 1000, 3 << 20)
    store = open_blocks(block_bytes=sizes, identity=identity(shapes=((1,), (2,), (3,))))
    keys = new_keys(2)
    for group, size in enumerate(sizes):
        blocks = random_blocks(2, size, seed=group)
        assert store.contains(keys, group) == [False, False]
        assert all(store.put(keys, list(blocks), group))
        into = np.zeros_like(blocks)
        assert all(store.get(keys, list(into), group))
        assert np.array_equal(into, blocks)


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_get_of_absent_keys_fills_the_others(
    open_blocks: OpenBlocks,
    timeout_s: float | None,
) -> None:
    store, keys, blocks = open_blocks(), new_keys(4), random_blocks(4)
    assert all(store.put(keys[:2], list(blocks[:2]), timeout_s=timeout_s))
    into = np.zeros_like(blocks)
    found = store.get([keys[2], keys[1], keys[3]], list(into[:3]), timeout_s=timeout_s)
    assert found == [False, True, False]
    assert np.array_equal(into[1], blocks[1])


def test_put_of_held_blocks_writes_nothing(open_blocks: OpenBlocks) -> None:
    store, keys, blocks = open_blocks(), new_keys(4), random_blocks(4)
    assert all(store.put(keys, list(blocks)))
    assert all(store.put(keys, list(blocks)))
    more = new_keys(1)
    assert all(store.put([*keys, *more], [*blocks, random_blocks(1, seed=1)[0]]))
    assert store.counters.store.stored_blocks == 5


@pytest.mark.parametrize("open_backend_of", ["lmdb", "memory"], indirect=True)
def test_other_identity_misses(open_blocks: OpenBlocks) -> None:
    store, keys, blocks = open_blocks(), new_keys(2), random_blocks(2)
    assert all(store.put(keys, list(blocks)))
    store.close()
    for other in (
        identity(dtype="float16"),
        identity(layout="layer_first"),
        identity(rank="tp 1 of 2"),
        identity(release="1.1"),
        identity(weights="name:other"),
        identity(shapes=((2, 16, 4, 8, 64),)),
        identity(more={"rope": 1}),
    ):
        theirs = open_blocks(identity=other)
        assert theirs.contains(keys) == [False, False]
        assert theirs.get(keys, list(np.zeros_like(blocks))) == [False, False]
        theirs.close()
    # the name is for people
    same = open_blocks(identity=identity(model_name="/models/other-path"))
    assert same.contains(keys) == [True, True]


@pytest.mark.parametrize(
    "field", ["engine", "release", "weights", "dtype", "layout", "rank"]
)
def test_identity_without_a_property_is_refused(field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        identity(**{field: ""})


def test_identity_without_shapes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="shapes"):
        identity(shapes=())
    with pytest.raises(ConfigurationError, match="block_bytes"):
        identity().encode([1, 2])


def test_wrong_memory_is_refused_and_nothing_is_stored(open_blocks: OpenBlocks) -> None:
    store, keys, blocks = open_blocks(), new_keys(2), random_blocks(2)
    with pytest.raises(ValueError, match="1 blocks for 2 keys"):
        store.put(keys, list(blocks[:1]))
    with pytest.raises(ValueError, match="bytes"):
        store.put(keys, [blocks[0], blocks[1][:-1]])
    with pytest.raises(ValueError, match="twice"):
        store.put([keys[0], keys[0]], list(blocks))
    with pytest.raises(ValueError, match="read-only"):
        store.get(keys, [bytes(BLOCK_BYTES)] * 2)
    with pytest.raises(ValueError, match="contiguous"):
        store.put(keys, [blocks[0], random_blocks(1, 2 * BLOCK_BYTES)[0, ::2]])
    with pytest.raises(ValueError, match="group 1"):
        store.contains(keys, 1)
    assert store.contains(keys) == [False, False]


def test_calls_from_many_threads(open_blocks: OpenBlocks) -> None:
    store, wrong = open_blocks(), []

    def work(seed: int) -> None:
        for number in range(4):
            keys, blocks = new_keys(4), random_blocks(4, seed=100 * seed + number)
            into = np.zeros_like(blocks)
            timeout_s = 60.0 if number % 2 else None
            stored = store.put(keys, list(blocks), timeout_s=timeout_s)
            found = store.get(keys, list(into), timeout_s=timeout_s)
            if not (all(stored) and all(found) and np.array_equal(into, blocks)):
                wrong.append((seed, number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_completions_arrive_at_their_descriptor(open_blocks: OpenBlocks) -> None:
    store, queue = open_blocks(), CompletionQueue()
    keys, blocks = new_keys(6), random_blocks(6)
    into = np.zeros_like(blocks)

    def wait(job: int) -> list[bool]:
        results: dict[int, list[bool]] = {}
        while job not in results:
            assert select.select([queue], [], [], 60)[0], "no completion arrived"
            results.update((done.job_id, list(done.results)) for done in queue.take())
        return results[job]

    assert queue.take() == []
    assert wait(store.submit_put(queue, keys[:3], list(blocks[:3]))) == [True] * 3
    assert wait(store.submit_contains(queue, keys)) == [True] * 3 + [False] * 3
    assert wait(store.submit_get(queue, keys, list(into))) == [True] * 3 + [False] * 3
    assert np.array_equal(into[:3], blocks[:3])
    assert not select.select([queue], [], [], 0)[0]
    queue.close()
    assert queue.fileno() == -1


def test_delete_keeps_the_other_blocks_of_a_pack(open_blocks: OpenBlocks) -> None:
    store, keys, blocks = open_blocks(), new_keys(8), random_blocks(8)
    assert all(store.put(keys, list(blocks), labels={"a": "b"}))
    assert store.delete([keys[2], keys[5], b"absent"]) == [True, True, False]
    held = [number not in (2, 5) for number in range(8)]
    assert store.contains(keys) == held
    for again in (store, open_blocks()):
        into = np.zeros_like(blocks)
        assert again.get(keys, list(into)) == held
        assert np.array_equal(into[held], blocks[held])
    assert store.delete(keys) == held
    assert store.contains(keys) == [False] * 8
    assert store.usage().namespace_bytes == 0
    # they can be stored again
    assert all(store.put(keys, list(blocks)))


def test_simultaneous_deletions_from_one_pack_both_hold(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store?capacity=256MiB"
    with ExitStack() as stack:
        stores = []
        for _ in range(3):
            opened = BlockStore.open(url, identity(), [BLOCK_BYTES])
            stores.append(stack.enter_context(opened))
        first, second, reader = stores
        for number in range(5):
            keys, blocks = new_keys(4), random_blocks(4, seed=number)
            assert all(first.put(keys, list(blocks)))
            wait_until_held(second, keys)
            with ThreadPoolExecutor(2) as threads:
                calls = [
                    threads.submit(first.delete, keys[:1]),
                    threads.submit(second.delete, keys[1:2]),
                ]
                assert [call.result() for call in calls] == [[True], [True]]
            held = {block.key for block in reader.stored_blocks()}
            assert held.intersection(keys) == set(keys[2:])


@pytest.mark.parametrize("step", ["tables", "commit"])
def test_deletion_begins_again_if_another_one_replaces_its_pack(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    with stores_of_two(tmp_path) as (first, second, backend):
        keys = stored_in_one_pack(first, second, 4)
        deletions: list[list[bool]] = []

        def delete_another() -> None:
            if not deletions:
                deletions.append(first.delete(keys[:1]))

        run_before(monkeypatch, backend, step, delete_another)
        assert second.delete(keys[1:2]) == [True]
        assert deletions == [[True]]
        for store in (first, second):
            held = {block.key for block in store.stored_blocks()}
            assert held.intersection(keys) == set(keys[2:])


def test_deletion_fails_if_others_replace_its_pack_during_each_search(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stores_of_two(tmp_path) as (first, second, backend):
        first_key, *others = stored_in_one_pack(first, second, 64)

        def delete_another() -> None:
            if others:
                assert first.delete([others.pop()]) == [True]

        run_before(monkeypatch, backend, "tables", delete_another)
        with pytest.raises(StoreError, match="other processes replaced"):
            second.delete([first_key])
        assert len(others) > 1
        assert first.contains([first_key]) == [True]


def test_deletion_of_absent_blocks_ends_while_others_commit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stores_of_two(tmp_path) as (first, second, backend):
        stored_in_one_pack(first, second, 1)
        commits: list[bool] = []

        def commit_another() -> None:
            commits.extend(first.put(new_keys(1), list(random_blocks(1))))

        run_before(monkeypatch, backend, "changes", commit_another)
        assert second.delete([b"absent"]) == [False]
        # the deletion's own refresh, and one that may have begun before it
        assert all(commits)
        assert 1 <= len(commits) <= 2


@contextmanager
def stores_of_two(path: Path) -> Iterator[tuple[BlockStore, BlockStore, Backend]]:
    """Open one store twice; yield both, and the backend of the second one."""
    url = f"lmdb://{path}/store?capacity=256MiB"
    backend = open_backend(url)
    options = StoreOptions(adopt="never")
    with (
        BlockStore.open(url, identity(), [BLOCK_BYTES]) as first,
        BlockStore(backend, identity(), [BLOCK_BYTES], options, url=url) as second,
    ):
        yield first, second, backend


def stored_in_one_pack(
    writer: BlockStore,
    reader: BlockStore,
    count: int,
) -> list[bytes]:
    """Store blocks, and return their keys when the other store knows them."""
    keys = new_keys(count)
    assert all(writer.put(keys, list(random_blocks(count))))
    wait_until_held(reader, keys)
    return keys


def run_before(
    monkeypatch: pytest.MonkeyPatch,
    backend: Backend,
    step: str,
    action: Callable[[], None],
) -> None:
    """Run an action before each call of a method of a backend."""
    method = getattr(backend, step)

    def after_action(*args: object) -> object:
        action()
        return method(*args)

    monkeypatch.setattr(backend, step, after_action)


def test_deletion_reports_the_kept_blocks_of_a_pack_as_held(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store?capacity=256MiB"
    with (
        BlockStore.open(url, identity(), [BLOCK_BYTES], events=True) as store,
        BlockStore.open(url, identity(), [BLOCK_BYTES], events=True) as other,
    ):
        keys = new_keys(4)
        assert all(store.put(keys, list(random_blocks(4))))
        wait_until_held(other, keys)
        other.take_events()
        assert store.delete(keys[:1]) == [True]
        removed: set[bytes] = set()
        deadline = time.monotonic() + 30
        while not removed and time.monotonic() < deadline:
            removed = {key for key, _ in other.take_events().removed}
            time.sleep(0.05)
        assert removed == {keys[0]}


def wait_until_held(store: BlockStore, keys: list[bytes]) -> None:
    """Wait until a store knows what another one has stored."""
    deadline = time.monotonic() + 30
    while not all(store.contains(keys)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(store.contains(keys))


def test_usage_is_exact_per_tenant(open_blocks: OpenBlocks) -> None:
    store = open_blocks(tenant_of=lambda key: chr(key[0]))
    for tenant, count in (("a", 3), ("b", 5)):
        keys = [tenant.encode() + key for key in new_keys(count)]
        assert all(store.put(keys, list(random_blocks(count))))
    expected = {"a": 3 * BLOCK_BYTES, "b": 5 * BLOCK_BYTES}
    assert store.usage().tenants == expected
    store.delete([keys[0]])
    expected["b"] -= BLOCK_BYTES
    usage = store.usage()
    assert usage.tenants == expected
    assert usage.namespace_bytes == sum(expected.values()) <= usage.disk_bytes
    again = open_blocks(tenant_of=lambda key: chr(key[0]))
    assert again.usage().tenants == expected
    found = {(block.key, block.num_bytes) for block in again.stored_blocks()}
    assert (keys[1], BLOCK_BYTES) in found
    assert len(found) == 7


def test_put_blocks_of_several_tenants_are_packs_and_contexts_of_each(
    open_blocks: OpenBlocks,
) -> None:
    store = open_blocks(tenant_of=lambda key: chr(key[0]))
    names, blocks = new_keys(3), random_blocks(6)
    keys = [tenant + name for name in names for tenant in (b"a", b"b")]
    assert store.put(keys, list(blocks), depth=4, labels={"x": "y"}) == [True] * 6
    assert store.usage().tenants == {"a": 3 * BLOCK_BYTES, "b": 3 * BLOCK_BYTES}
    read = np.empty_like(blocks)
    assert store.get(keys, list(read)) == [True] * 6
    assert (read == blocks).all()
    with pytest.raises(ValueError, match="2 tenants"):
        store.pin(keys)
    assert store.pin(keys[::2]) is not None
    assert store.delete([keys[0]]) == [True]
    assert store.usage().tenants == {"a": 2 * BLOCK_BYTES, "b": 3 * BLOCK_BYTES}


@pytest.mark.parametrize("tenant", ["", "a\nb", "x" * 129])
def test_put_key_of_malformed_tenant_raises_and_stores_nothing(
    open_blocks: OpenBlocks,
    tenant: str,
) -> None:
    store = open_blocks(tenant_of=lambda key: tenant if key == b"bad" else "good")
    keys, blocks = [b"fine", b"bad"], list(random_blocks(2))
    queue = CompletionQueue()
    with pytest.raises(ConfigurationError, match="tenant_of"):
        store.put(keys, blocks)
    with pytest.raises(ConfigurationError, match="tenant_of"):
        store.submit_put(queue, keys, blocks)
    with pytest.raises(ConfigurationError, match="tenant_of"):
        store.pin(keys)
    store.flush()
    assert store.contains(keys) == [False, False]
    assert store.usage().tenants == {}


def test_events_report_own_and_other_stores(open_blocks: OpenBlocks) -> None:
    store, keys, blocks = open_blocks(), new_keys(3), random_blocks(3)
    assert all(store.put(keys, list(blocks)))
    events = store.take_events()
    assert sorted(events.stored) == [(key, 0) for key in sorted(keys)]
    store.delete(keys[:1])
    events = store.take_events()
    assert (keys[0], 0) in events.removed
    assert not store.take_events().removed


@pytest.mark.parametrize("open_backend_of", ["lmdb"], indirect=True)
def test_pin_survives_eviction_and_restart(
    open_blocks: OpenBlocks,
    open_backend_of: Callable[[], Backend],
) -> None:
    """On a medium that evicts in each commit; shared stores evict when they merge."""
    keys, blocks = new_keys(16), random_blocks(16)
    store = open_blocks()
    assert all(store.put(keys, list(blocks)))
    assert store.pin([*keys, b"absent"]) is None
    pin = store.pin(keys, labels={"kind": "system prompt"})
    assert pin is not None
    store.close()
    # 16 MiB hold 8 contexts of 2 MiB less their tables
    with closing(open_backend_of()) as backend:
        backend.set_policy(replace(backend.policy(), capacity=16 << 20))
    again = open_blocks()
    for seed in range(30):
        again.put(new_keys(16), list(random_blocks(16, seed=seed)))
    assert all(again.contains(keys))
    again.unpin(pin)
    for seed in range(30):
        again.put(new_keys(16), list(random_blocks(16, seed=seed)))
    assert not any(again.contains(keys))


def test_calls_after_close_and_in_a_child_raise(open_blocks: OpenBlocks) -> None:
    store, keys = open_blocks(), new_keys(1)
    child = os.fork()
    if not child:
        status = 1
        try:
            store.contains(keys)
        except HostError:
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.close()
    assert store.close()
    with pytest.raises(StoreError, match="closed"):
        store.contains(keys)
    with pytest.raises(StoreError, match="closed"):
        store.put(keys, list(random_blocks(1)))


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (8, 4)])
def test_open_reads_with_more_threads_on_more_cores(
    cores: int,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    others = set(threading.enumerate())  # such as those of stores of other tests
    with BlockStore.open(tmp_path / "default", identity(), [BLOCK_BYTES]):
        assert reading_threads(others) == threads
    with BlockStore.open(tmp_path / "chosen", identity(), [BLOCK_BYTES], io_threads=3):
        assert reading_threads(others) == 3


def reading_threads(others: Collection[threading.Thread]) -> int:
    """Return the number of this process's threads that read for a store, except some others."""
    names = [thread.name for thread in threading.enumerate() if thread not in others]
    return sum(name.startswith("persistkv-reader") for name in names)
