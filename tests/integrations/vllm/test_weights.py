"""Weights that change in place: words, probe, watch, and random histories of an engine on a real
store."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from persistkv.base import OffloadKey, ReqContext, make_offload_key
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.errors import StoreError
from persistkv.integrations.vllm.weights.guarded_tier import GuardedTier
from persistkv.integrations.vllm.weights.probe import (
    WeightsProbe,
    sample_parameters,
    watch_worker,
)
from persistkv.integrations.vllm.weights.watch import WeightsWatch
from persistkv.integrations.vllm.weights.word import WeightsWord
from persistkv.tiering.base import JobMetadata
from persistkv.tiering.persistent import PersistentTier
from tests.tiering.test_adoption import PROMPTS, ReleasedEngine

ROWS, STRIDE = 24, 4096
HISTORIES = int(os.environ.get("PERSISTKV_WEIGHT_HISTORIES", "300"))
"""Histories of the slow test."""


class Workers:
    """Simulated workers of one engine: their weights are a number, and their KV depends on it."""

    def __init__(
        self,
        directory: Path,
        count: int = 2,
        engine_id: str = "engine",
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.weights = [0] * count
        self.now = 0.0
        clock = clock or (lambda: self.now)
        words = [
            WeightsWord.create(engine_id, rank, str(directory)) for rank in range(count)
        ]
        self.offloading = []
        for rank, word in enumerate(words):
            probe = WeightsProbe(partial(self.sample, rank), word, clock)
            self.offloading.append(
                SimpleNamespace(submit_store=None, submit_load=None, get_finished=None)
            )
            for name in vars(self.offloading[-1]):
                setattr(self.offloading[-1], name, lambda *_: None)
            watch_worker(self.offloading[-1], probe)
        self.watch = WeightsWatch(
            [
                WeightsWord.attach(engine_id, rank, str(directory))
                for rank in range(count)
            ]
        )
        self.executor = SimpleNamespace(collective_rpc=self._call)
        self.watch.watch_calls(self.executor)

    def sample(self, rank: int) -> bytes:
        return b"%d" % self.weights[rank]

    def _call(
        self,
        method: Callable[..., Any] | str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        if callable(method):
            method(self, *args)
        elif method in ("reload_weights", "update_weights"):
            self.update()

    def update(self, rank: int | None = None) -> None:
        for index in range(len(self.weights)) if rank is None else [rank]:
            self.weights[index] += 1

    def kv(self, key: OffloadKey) -> npt.NDArray[np.int8]:
        """Return the bytes that the workers compute for a block."""
        return block_of(key, self.weights)

    def do(self, method: str) -> None:
        self.now += 0.001
        for worker in self.offloading:
            getattr(worker, method)()


def block_of(key: OffloadKey, weights: list[int]) -> npt.NDArray[np.int8]:
    seed = hashlib.blake2b(key + repr(weights).encode(), digest_size=32).digest()
    return np.frombuffer(seed * (STRIDE // 32), np.int8)


class Copied(NamedTuple):
    """Store that is to be submitted to the tier: the workers have copied its blocks."""

    context: ReqContext
    keys: list[OffloadKey]
    rows: list[int]
    epoch: int | None


class Computed(NamedTuple):
    """KV of the last step, to be copied."""

    context: ReqContext
    keys: list[OffloadKey]
    blocks: list[npt.NDArray[np.int8]]
    epoch: int | None


class Simulation:
    """Engine with simulated workers over a real tier and store. ``errors`` counts what must not
    happen."""

    def __init__(self, url: str, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.workers = Workers(directory, self.random.choice((1, 2)), f"engine-{seed}")
        self.rows = np.zeros((ROWS, STRIDE), np.int8)
        self.guard = GuardedTier(
            lambda name: make_tier(url, self.rows, name or "start"),
            self.workers.watch,
            lambda: self.workers.now,
        )
        self.weights_of = {"start": list(self.workers.weights)}  # by name
        self.name: str | None = None  # of the weights, in requests
        self.names = 0
        # KV in vLLM's own caches, of any weights
        self.cached: dict[OffloadKey, npt.NDArray[np.int8]] = {}
        self.counts: Counter[str] = Counter()
        self.keys = [
            make_offload_key(
                hashlib.blake2b(b"%d %d" % (seed, number), digest_size=32).digest(), 0
            )
            for number in range(20)
        ]
        self.free = list(range(ROWS))
        self.loads: dict[int, tuple[list[OffloadKey], list[int]]] = {}
        self.stores: dict[int, list[int]] = {}
        self.copied: deque[Copied] = deque()
        self.computed: deque[Computed] = deque()
        self.job = 0

    def request(self) -> None:
        first = self.random.randrange(len(self.keys) - 4)
        keys = self.keys[first : first + self.random.randrange(1, 5)]
        context = ReqContext(f"request-{self.job}")
        name = self.name
        if self.random.random() < 0.04:  # a straggler
            name = self.random.choice(
                [None, *(name for name in self.weights_of if name != "start")]
            )
        # a name means the weights of its first request
        if name not in (None, self.workers.watch.weights):
            self.weights_of.setdefault(name, list(self.workers.weights))
        epoch = self.guard.begin_request(name)
        accepted = epoch is not None
        unknown = [key for key in keys if key not in self.cached]
        held = [key for key in unknown if self.guard.holds(key, epoch)]
        if held and len(held) <= len(self.free):
            rows = [self.free.pop() for _ in held]
            self.loads[self.job] = held, rows
            self.submit(self.guard.submit_load, held, rows, context, True, epoch)
        for key in unknown:
            if key not in held:
                self.cached[key] = self.workers.kv(key)
        # also those that earlier requests have computed
        offered = [key for key in keys if key in self.cached]
        if accepted:
            self.computed.append(
                Computed(context, offered, [self.cached[key] for key in offered], epoch)
            )

    def submit(
        self,
        method: Callable[[JobMetadata, int | None], None],
        keys: list[OffloadKey],
        rows: list[int],
        context: ReqContext,
        is_promotion: bool,
        epoch: int | None,
    ) -> None:
        job = JobMetadata(
            self.job, keys, np.array(rows, np.int64), is_promotion, context
        )
        self.job += 1
        method(job, epoch)

    def step(self) -> None:
        self.finish()
        while self.copied:
            context, keys, rows, epoch = self.copied.popleft()
            self.stores[self.job] = rows
            self.submit(self.guard.submit_store, keys, rows, context, False, epoch)
            self.guard.on_request_finished(context, epoch)
        if self.random.random() < 0.7:
            self.request()
        ready, self.computed = self.computed, deque()
        for context, keys, blocks, epoch in ready:
            if len(keys) > len(self.free):
                continue
            self.workers.do("submit_store")
            rows = [self.free.pop() for _ in keys]
            for row, block in zip(rows, blocks, strict=True):
                self.rows[row] = block
            self.copied.append(Copied(context, keys, rows, epoch))
        self.workers.do("get_finished")

    def finish(self) -> None:
        for result in self.guard.get_finished_jobs():
            if result.job_id in self.stores:
                self.free += self.stores.pop(result.job_id)
                continue
            keys, rows = self.loads.pop(result.job_id)
            for key, row in zip(keys, rows, strict=True):
                if result.success and key not in result.failed_keys:
                    self.cached.setdefault(key, self.rows[row].copy())
                    self.counts["loaded"] += 1
                    self.counts["loaded by name"] += self.name is not None
                    self.counts["stale"] += not np.array_equal(
                        self.rows[row], self.workers.kv(key)
                    )
            self.free += rows

    def reset(self) -> None:
        assert self.guard.drain_jobs(10)
        self.workers.watch.require_comparison()
        self.finish()
        assert not self.loads
        assert not self.stores
        self.workers.watch.on_no_kv()
        self.cached.clear()
        self.free += [row for _, _, rows, _ in self.copied for row in rows]
        self.copied.clear()
        self.computed.clear()

    def name_weights(self) -> None:
        """Name the present weights in later requests; well-behaved trainers reset vLLM's caches
        before."""
        if self.random.random() < 0.6:
            self.reset()
        self.names += 1
        self.name = f"version {self.names}"

    def write(self) -> None:
        """Another process writes the parameters of one worker, while the engine takes no step."""
        self.workers.now += 2.0
        self.workers.update(self.random.randrange(len(self.workers.weights)))
        self.workers.now += 2.0

    def update(self) -> None:
        call = self.workers.executor.collective_rpc
        self.counts["updates"] += 1
        kind = self.random.randrange(4)
        if kind == 0:
            call("update_weights", None, ({},), None)
        elif kind == 1:
            call(lambda workers: workers.update())
        elif kind == 2:
            call("some_method_of_a_trainer", kwargs={})
            call(lambda workers: workers.update(0), None)
        else:
            self.write()

    def retrain(self) -> None:
        """Update the weights and name them, as a trainer does in each of its steps."""
        self.update()
        self.name_weights()

    def wait_open(self) -> None:
        """Wait until the tier of the weights that a request has named is open."""
        while self.guard.is_opening:
            time.sleep(0.001)
            self.finish()

    def sleep(self) -> None:
        call = self.workers.executor.collective_rpc
        self.reset()
        call("sleep", kwargs={"level": 1})
        if self.random.random() < 0.1:
            self.workers.update()
        self.workers.now += 3.0
        call("wake_up", kwargs={"tags": None})

    def look(self) -> None:
        self.workers.executor.collective_rpc(lambda workers: None)

    def idle(self) -> None:
        self.workers.now += self.random.choice((0.5, 5.0))

    def run(self, length: int) -> None:
        actions = (
            [self.step] * 60
            + [self.look] * 2
            + [self.reset] * 4
            + [self.sleep]
            + [self.idle] * 3
        )
        actions += [self.update, self.retrain] + [self.wait_open] * 12
        for _ in range(length):
            self.random.choice(actions)()
        for _ in range(4):
            self.step()
        self.counts["detached"] += self.guard.follow_weights()
        self.guard.drain_jobs(10)
        self.finish()
        self.guard.shutdown()


def make_tier(
    url: str, rows: npt.NDArray[np.int8], weights: str = "start"
) -> PersistentTier:
    layout = RowLayout(STRIDE, (GroupLayout(((0, STRIDE),)),))
    config = OffloadingConfig(
        {"test": "weights", "weights": weights}, 16, layout, len(rows)
    )
    return PersistentTier(
        config, rows.data, url=url, host="thread", durability="interval:1h"
    )


def wrong_blocks(
    url: str, name: str, clean: dict[OffloadKey, list[int]]
) -> Counter[str]:
    """Count the blocks that a clean engine with weights of this name finds, and those that are of
    other weights.

    :param clean: by key, the weights of this name.
    """
    rows = np.zeros((1, STRIDE), np.int8)
    tier = make_tier(url, rows, name)
    counts: Counter[str] = Counter()
    for number, (key, weights) in enumerate(clean.items()):
        context = ReqContext("clean")
        if not tier.lookup(key, context):
            continue
        tier.submit_load(
            JobMetadata(number, [key], np.array([0], np.int64), True, context)
        )
        assert tier.drain_jobs(10)
        (result,) = tier.get_finished_jobs()
        assert result.success
        counts["held" if name == "start" else "held by name"] += 1
        counts["wrong"] += not np.array_equal(rows[0], block_of(key, weights))
    tier.shutdown()
    return counts


def run_histories(tmp_path: Path, count: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    clean: dict[str, dict[OffloadKey, list[int]]] = {}
    for number in range(count):
        url = f"lmdb://{tmp_path}/store-{number // 100}"
        simulation = Simulation(url, tmp_path, number)
        simulation.run(60)
        counts += simulation.counts
        for name, weights in simulation.weights_of.items():
            clean.setdefault(name, {}).update(dict.fromkeys(simulation.keys, weights))
        if number % 100 == 99 or number == count - 1:
            for name, weights_of in clean.items():
                counts += wrong_blocks(url, name, weights_of)
            clean = {}
    return counts


def check_histories(tmp_path: Path, count: int) -> None:
    counts = run_histories(tmp_path, count)
    assert counts["stale"] == counts["wrong"] == 0
    assert counts["loaded"] > 5 * count
    assert counts["held"] > 5 * count
    assert counts["detached"] > 0.1 * count
    assert counts["loaded by name"] > 0.5 * count
    assert counts["held by name"] > 0.5 * count


def test_histories_serve_and_store_no_block_of_other_weights(tmp_path: Path) -> None:
    check_histories(tmp_path, 40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_histories_serve_and_store_no_block_of_other_weights(
    tmp_path: Path,
) -> None:
    check_histories(tmp_path, HISTORIES)


def test_histories_without_comparison_serve_and_store_wrong_blocks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # all weights look the same to the workers
    monkeypatch.setattr(Workers, "sample", lambda workers, rank: b"")
    counts = run_histories(tmp_path, 10)
    assert counts["stale"] > 0
    assert counts["wrong"] > 0


def test_histories_named_without_reset_store_wrong_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's own caches count as empty
    monkeypatch.setattr(WeightsWatch, "on_request", lambda watch: None)
    assert run_histories(tmp_path, 40)["wrong"] > 0


def test_guarded_tier_request_of_earlier_epoch_neither_loads_nor_stores(
    tmp_path: Path,
) -> None:
    workers, rows = Workers(tmp_path), np.zeros((ROWS, STRIDE), np.int8)
    guard = GuardedTier(
        lambda name: make_tier(f"lmdb://{tmp_path}/store", rows, name or "start"),
        workers.watch,
    )
    (key,), context = [make_offload_key(bytes(32), 0)], ReqContext("running")
    earlier = guard.begin_request(None)
    workers.executor.collective_rpc("update_weights", None, ({},))
    workers.watch.on_no_kv()  # the request was preempted, and will be computed anew
    assert guard.begin_request("new") is None
    while guard.is_opening:
        guard.get_finished_jobs()
    workers.do("get_finished")
    named = guard.begin_request("new")
    for number, epoch in enumerate((earlier, named)):
        guard.submit_store(
            JobMetadata(number, [key], np.array([0], np.int64), False, context), epoch
        )
        assert guard.drain_jobs(10)
        (result,) = guard.get_finished_jobs()
        assert result.success == (epoch == named)
    assert guard.holds(key, named)
    assert not guard.holds(key, earlier)
    guard.shutdown()


def test_guarded_tier_weights_named_anew_while_store_opens_uses_last_name(
    tmp_path: Path,
) -> None:
    workers, rows, url = (
        Workers(tmp_path),
        np.zeros((ROWS, STRIDE), np.int8),
        f"lmdb://{tmp_path}/store",
    )
    guard = GuardedTier(
        lambda name: make_tier(url, rows, name or "start"), workers.watch
    )
    key, context = make_offload_key(bytes(32), 0), ReqContext("running")
    for name in ("one", "two"):
        workers.executor.collective_rpc("update_weights", None, ({},))
        workers.watch.on_no_kv()
        assert guard.begin_request(name) is None
    deadline = time.monotonic() + 60
    while (epoch := guard.begin_request("two")) is None:
        assert time.monotonic() < deadline
    workers.do("get_finished")
    guard.submit_store(
        JobMetadata(1, [key], np.array([0], np.int64), False, context), epoch
    )
    assert guard.drain_jobs(10)
    assert guard.get_finished_jobs()[0].success
    guard.shutdown()
    found = {}
    for name in ("start", "one", "two"):
        tier = make_tier(url, rows, name)
        found[name] = tier.lookup(key, context)
        tier.shutdown()
    assert found == {"start": False, "one": False, "two": True}


def test_guarded_tier_store_that_does_not_open_for_name_stays_detached_until_next_name(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers, rows = Workers(tmp_path), np.zeros((ROWS, STRIDE), np.int8)

    def make(name: str | None) -> PersistentTier:
        if name == "broken":
            raise StoreError("no space")
        return make_tier(f"lmdb://{tmp_path}/store", rows, name or "start")

    guard = GuardedTier(make, workers.watch)
    key, context = make_offload_key(bytes(32), 0), ReqContext("request")
    assert guard.begin_request("broken") is None
    while guard.is_opening:
        guard.get_finished_jobs()
    assert "does not open for the weights broken" in caplog.text
    assert guard.begin_request("broken") is None
    guard.submit_store(
        JobMetadata(1, [key], np.array([0], np.int64), False, context),
        workers.watch.epoch,
    )
    assert not guard.get_finished_jobs()[0].success
    assert guard.drain_jobs(10)
    assert not guard.has_pending_work()
    assert not guard.holds(key, workers.watch.epoch)
    workers.watch.on_no_kv()
    deadline = time.monotonic() + 60
    while guard.begin_request("good") is None:
        assert time.monotonic() < deadline
    guard.shutdown()


def use_weights(
    guard: GuardedTier, weights: str | None, others_load: bool = False
) -> None:
    """Name weights, and wait until the tier of these is in use."""
    guard.watch.on_no_kv()
    assert guard.begin_request(weights) is None
    if others_load:
        guard.loaded_elsewhere([make_offload_key(bytes(32), 0)])
    deadline = time.monotonic() + 60
    while not guard.is_in_use:
        assert time.monotonic() < deadline
        guard.begin_request(weights)


@pytest.mark.parametrize("names", [["new"], ["earlier", "new"]])
def test_guarded_tier_loads_of_other_store_while_it_opens_prevent_adoption(
    tmp_path: Path,
    names: list[str],
) -> None:
    """Of the present weights: those of earlier ones are in no cache any more."""
    url = f"lmdb://{tmp_path}/store"
    older = ReleasedEngine(url, "0.31")
    for tokens in PROMPTS:
        older.store(tokens)
    older.tier.shutdown()
    releases = {None: "0.29", "earlier": "0.30", "new": "0.32"}
    engines: dict[str | None, ReleasedEngine] = {}

    def make(name: str | None) -> PersistentTier:
        engines[name] = ReleasedEngine(url, releases[name])
        return engines[name].tier

    guard = GuardedTier(make, Workers(tmp_path).watch)
    # the other store loads blocks while the tier of the first name opens
    for name in names:
        use_weights(guard, name, others_load=name == names[0])
    for tokens in PROMPTS[:2]:
        engines["new"].store(tokens)
    is_adopted = engines["new"].finds(PROMPTS[2])
    assert is_adopted == (names != ["new"])
    guard.shutdown()


class RacingWord(WeightsWord):
    """The word of a worker that finds changed weights, and answers, just after the engine has
    looked for a change."""

    @property
    def changed(self) -> int:
        seen = super().changed
        if self.asked != self.answered:
            self.changed = self.epoch + 1
            self.answered = self.asked
        return seen

    @changed.setter
    def changed(self, number: int) -> None:
        vars(WeightsWord)["changed"].fset(self, number)


def test_guarded_tier_change_published_between_two_looks_fails_load(
    tmp_path: Path,
) -> None:
    word, rows = (
        RacingWord.create("engine", 0, str(tmp_path)),
        np.zeros((ROWS, STRIDE), np.int8),
    )
    guard = GuardedTier(
        lambda name: make_tier(f"lmdb://{tmp_path}/store", rows), WeightsWatch([word])
    )
    key, context = make_offload_key(bytes(32), 0), ReqContext("request")
    epoch = guard.begin_request(None)
    store, load = (
        JobMetadata(number, [key], np.array([0], np.int64), number == 1, context)
        for number in range(2)
    )
    guard.submit_store(store, epoch)
    assert guard.drain_jobs(10)
    assert guard.get_finished_jobs()[0].success
    guard.submit_load(load, epoch)
    assert guard.tier.drain_jobs(10)
    results = guard.get_finished_jobs() + guard.get_finished_jobs()
    assert [result.success for result in results] == [False]
    guard.shutdown()


class Executor:
    """Records calls, and calls functions."""

    def collective_rpc(
        self,
        method: Callable[[], Any] | str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        return method() if callable(method) else method


def watched(words: Sequence[WeightsWord] = ()) -> tuple[Executor, WeightsWatch]:
    executor, watch = Executor(), WeightsWatch(words)
    watch.watch_calls(executor)
    return executor, watch


def test_watch_harmless_call_stays_sure(tmp_path: Path) -> None:
    executor, watch = watched([WeightsWord.create("engine", 0, str(tmp_path))])
    executor.collective_rpc("execute_model", args=(None,), non_block=True)
    assert watch.is_sure
    assert watch.change is None


@pytest.mark.parametrize(
    "method", ["update_weights", "reload_weights", "load_weights", "reset_weights"]
)
def test_watch_method_that_updates_weights_is_a_change_before_it_runs(
    tmp_path: Path, method: str
) -> None:
    executor, watch = watched([WeightsWord.create("engine", 0, str(tmp_path))])
    executor.collective_rpc(method, None, ({},))
    assert watch.change == f"call of {method}"


@pytest.mark.parametrize(("load_inplace", "changes"), [(False, False), (True, True)])
def test_watch_adapter_loaded_in_place_is_a_change(
    tmp_path: Path, load_inplace: bool, changes: bool
) -> None:
    executor, watch = watched([WeightsWord.create("engine", 0, str(tmp_path))])
    request = SimpleNamespace(load_inplace=load_inplace)
    executor.collective_rpc("add_lora", args=(request,))
    assert (watch.change is not None) == changes


def test_watch_function_is_unsure_until_all_workers_answer(tmp_path: Path) -> None:
    words = [WeightsWord.create("engine", rank, str(tmp_path)) for rank in range(2)]
    executor, watch = watched(words)
    executor.collective_rpc(lambda: None)
    for word in words:
        assert not watch.is_sure
        word.answered = word.asked
    assert watch.is_sure
    assert watch.change is None


def test_watch_answer_with_change_is_not_sure(tmp_path: Path) -> None:
    word = WeightsWord.create("engine", 0, str(tmp_path))
    _, watch = watched([word])
    watch.require_comparison()
    assert watch.change is None
    word.changed = watch.epoch + 1
    word.answered = word.asked
    assert not watch.is_sure


def test_watch_function_without_words_is_a_change() -> None:
    executor, watch = watched()
    executor.collective_rpc(lambda: None)
    assert watch.change is not None


def test_watch_name_of_weights_is_refused_for_good_if_others_provide_kv(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = WeightsWatch([], is_only_source=False)
    assert not watch.name_weights("new")
    assert not watch.name_weights("new")
    assert caplog.text.count("other connectors or tiers") == 1
    assert watch.epoch == 0


def test_watch_name_of_weights_after_request_is_refused_until_reset_and_another_name() -> (
    None
):
    watch = WeightsWatch([])
    watch.on_request()
    assert not watch.name_weights("early")
    watch.on_no_kv()
    assert not watch.name_weights("early")
    assert watch.name_weights("new")
    watch.on_request()
    assert watch.name_weights("new")
    assert watch.epoch == 1


def test_watch_sleeping_workers_are_not_asked(tmp_path: Path) -> None:
    word = WeightsWord.create("engine", 0, str(tmp_path))
    executor, watch = watched([word])
    executor.collective_rpc("sleep", kwargs={"level": 1})
    executor.collective_rpc("wake_up", None, (), {"tags": ["kv_cache"]})
    watch.ask()
    assert word.asked == 0  # their parameters may not be readable
    assert not watch.is_sure
    executor.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
    assert word.asked > 0


def test_watch_call_in_background_is_unsure_until_it_ends(tmp_path: Path) -> None:
    word = WeightsWord.create("engine", 0, str(tmp_path))
    executor, watch = watched([word])
    future: Future[None] = Future()
    executor.collective_rpc(lambda: future, non_block=True)
    word.answered = word.asked
    assert not watch.is_sure
    future.set_result(None)
    assert not watch.is_sure
    word.answered = word.asked
    assert watch.is_sure


def test_sample_parameters_any_changed_parameter_changes_the_sample() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 3)).to(
        torch.bfloat16
    )
    model.flag = torch.nn.Parameter(
        torch.zeros(3, dtype=torch.bool), requires_grad=False
    )
    model.other = torch.nn.Parameter(torch.randn(50, 7).t())  # not contiguous
    known = sample_parameters([model])
    assert sample_parameters([model]) == known
    for parameter in model.parameters():
        before = parameter.data.clone()
        parameter.data.copy_(
            torch.logical_not(before) if before.dtype is torch.bool else before + 1
        )
        assert sample_parameters([model]) != known
        parameter.data.copy_(before)
    assert sample_parameters([model]) == known


def test_word_of_another_size_is_refused(tmp_path: Path) -> None:
    WeightsWord.create("engine", 0, str(tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"short")
    with pytest.raises(OSError, match="not a file of this user"):
        WeightsWord.attach("engine", 0, str(tmp_path))


def test_word_of_earlier_engine_is_replaced(tmp_path: Path) -> None:
    WeightsWord.create("engine", 0, str(tmp_path)).answered = 7
    worker = WeightsWord.create("engine", 0, str(tmp_path))
    engine = WeightsWord.attach("engine", 0, str(tmp_path))
    assert engine.answered == 0
    worker.answered = 3
    assert engine.answered == 3
    assert not list(tmp_path.iterdir())
