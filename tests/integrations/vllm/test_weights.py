"""Weights that change in place: words, probe, watch, and random histories of an engine on a real store."""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter, deque
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from persistkv.base import ReqContext, make_offload_key
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.integrations.vllm.weights import (
    GuardedTier,
    WeightsProbe,
    WeightsWatch,
    WeightsWord,
    sample_parameters,
    watch_worker,
)
from persistkv.tiering.base import JobMetadata
from persistkv.tiering.persistent import PersistentTier

ROWS, STRIDE = 24, 4096
HISTORIES = int(os.environ.get("PERSISTKV_WEIGHT_HISTORIES", "1000"))
"""Histories of the slow test."""


class Workers:
    """Simulated workers of one engine: their weights are a number, and their KV depends on it."""

    def __init__(self, directory, count=2, engine_id="engine", clock=None):
        self.weights = [0] * count
        self.now = 0.0
        clock = clock or (lambda: self.now)
        words = [WeightsWord.create(engine_id, rank, str(directory)) for rank in range(count)]
        self.offloading = []
        for rank, word in enumerate(words):
            probe = WeightsProbe(lambda rank=rank: b"%d" % self.weights[rank], word, clock)
            self.offloading.append(SimpleNamespace(submit_store=None, submit_load=None, get_finished=None))
            for name in vars(self.offloading[-1]):
                setattr(self.offloading[-1], name, lambda *_: None)
            watch_worker(self.offloading[-1], probe)
        self.watch = WeightsWatch([WeightsWord.attach(engine_id, rank, str(directory)) for rank in range(count)])
        self.executor = SimpleNamespace(collective_rpc=self._call)
        self.watch.watch_calls(self.executor)

    def _call(self, method, timeout=None, args=(), kwargs=None):
        if callable(method):
            method(self, *args)
        elif method in ("reload_weights", "update_weights"):
            self.update()

    def update(self, rank=None):
        for index in range(len(self.weights)) if rank is None else [rank]:
            self.weights[index] += 1

    def kv(self, key):
        """Return the bytes that the workers compute for a block."""
        seed = hashlib.blake2b(key + repr(self.weights).encode(), digest_size=32).digest()
        return np.frombuffer(seed * (STRIDE // 32), np.int8)

    def do(self, method):
        self.now += 0.001
        for worker in self.offloading:
            getattr(worker, method)()


class Simulation:
    """Engine with simulated workers over a real tier and store. ``errors`` counts what must not happen."""

    def __init__(self, url, directory, seed):
        self.random = random.Random(seed)
        self.workers = Workers(directory, self.random.choice((1, 2)), f"engine-{seed}")
        self.rows = np.zeros((ROWS, STRIDE), np.int8)
        self.tier = make_tier(url, self.rows)
        self.guard = GuardedTier(self.tier, self.workers.watch, lambda: self.workers.now)
        self.counts = Counter()
        self.keys = [
            make_offload_key(hashlib.blake2b(b"%d %d" % (seed, number), digest_size=32).digest(), 0)
            for number in range(20)
        ]
        self.free = list(range(ROWS))
        self.loads = {}
        self.stores = {}
        self.copied = deque()  # to be submitted to the tier: the workers have copied it
        self.computed = deque()  # to be copied: KV of the last step
        self.job = 0

    def request(self):
        first = self.random.randrange(len(self.keys) - 4)
        keys = self.keys[first : first + self.random.randrange(1, 5)]
        context = ReqContext(f"request-{self.job}")
        held = [key for key in keys if self.guard.tier.lookup(key, context)]
        if held and len(held) <= len(self.free):
            rows = [self.free.pop() for _ in held]
            self.loads[self.job] = held, rows
            self.submit(self.guard.submit_load, held, rows, context, True)
        missing = [key for key in keys if key not in held]
        self.computed.append((context, missing, [self.workers.kv(key) for key in missing]))

    def submit(self, method, keys, rows, context, is_promotion):
        job = JobMetadata(self.job, keys, np.array(rows, np.int64), is_promotion, context)
        self.job += 1
        method(job)

    def step(self):
        self.finish()
        while self.copied:
            context, keys, rows = self.copied.popleft()
            self.stores[self.job] = rows
            self.submit(self.guard.submit_store, keys, rows, context, False)
            self.guard.on_request_finished(context)
        if self.random.random() < 0.7:
            self.request()
        ready, self.computed = self.computed, deque()
        for context, keys, blocks in ready:
            if len(keys) > len(self.free):
                continue
            self.workers.do("submit_store")
            rows = [self.free.pop() for _ in keys]
            for row, block in zip(rows, blocks, strict=True):
                self.rows[row] = block
            self.copied.append((context, keys, rows))
        self.workers.do("get_finished")

    def finish(self):
        for result in self.guard.get_finished_jobs():
            if result.job_id in self.stores:
                self.free += self.stores.pop(result.job_id)
                continue
            keys, rows = self.loads.pop(result.job_id)
            for key, row in zip(keys, rows, strict=True):
                if result.success and key not in result.failed_keys:
                    self.counts["loaded"] += 1
                    self.counts["stale"] += not np.array_equal(self.rows[row], self.workers.kv(key))
            self.free += rows

    def reset(self):
        assert self.guard.drain_jobs(10)
        self.workers.watch.suspect()
        self.finish()
        assert not self.loads
        assert not self.stores

    def write(self):
        """Another process writes the parameters of one worker, while the engine takes no step."""
        self.workers.now += 2.0
        self.workers.update(self.random.randrange(len(self.workers.weights)))
        self.workers.now += 2.0

    def update(self):
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

    def sleep(self):
        call = self.workers.executor.collective_rpc
        self.reset()
        call("sleep", kwargs={"level": 1})
        if self.random.random() < 0.1:
            self.workers.update()
        self.workers.now += 3.0
        call("wake_up", kwargs={"tags": None})

    def look(self):
        self.workers.executor.collective_rpc(lambda workers: None)

    def idle(self):
        self.workers.now += self.random.choice((0.5, 5.0))

    def run(self, length):
        actions = [self.step] * 60 + [self.look] * 2 + [self.reset] * 2 + [self.sleep] + [self.idle] * 3 + [self.update]
        for _ in range(length):
            self.random.choice(actions)()
        for _ in range(4):
            self.step()
        self.counts["detached"] += self.guard.is_detached
        self.guard.drain_jobs(10)
        self.finish()
        self.tier.shutdown()


def make_tier(url, rows):
    layout = RowLayout(STRIDE, (GroupLayout(((0, STRIDE),)),))
    config = OffloadingConfig({"test": "weights"}, 16, layout, len(rows))
    return PersistentTier(config, memoryview(rows), url=url, host="inline", durability="interval:1h")


def wrong_blocks(url, keys, workers):
    """Return how many of the keys a clean engine finds, and how many of them are not of its weights."""
    rows = np.zeros((1, STRIDE), np.int8)
    tier = make_tier(url, rows)
    held = wrong = 0
    for number, (key, of) in enumerate(zip(keys, workers, strict=True)):
        context = ReqContext("clean")
        if not tier.lookup(key, context):
            continue
        tier.submit_load(JobMetadata(number, [key], np.array([0], np.int64), True, context))
        assert tier.drain_jobs(10)
        (result,) = tier.get_finished_jobs()
        assert result.success
        held += 1
        wrong += not np.array_equal(rows[0], of.kv(key))
    tier.shutdown()
    return held, wrong


def run_histories(tmp_path, count):
    counts, keys, clean = Counter(), [], []
    for number in range(count):
        url = f"lmdb://{tmp_path}/store-{number // 100}"
        simulation = Simulation(url, tmp_path, number)
        simulation.run(60)
        counts += simulation.counts
        weights = SimpleNamespace(weights=[0] * len(simulation.workers.weights))
        weights.kv = Workers.kv.__get__(weights)
        keys += simulation.keys
        clean += [weights] * len(simulation.keys)
        if number % 100 == 99 or number == count - 1:
            held, wrong = wrong_blocks(url, keys, clean)
            counts.update(held=held, wrong=wrong)
            keys, clean = [], []
    return counts


def check_histories(tmp_path, count):
    counts = run_histories(tmp_path, count)
    assert counts["stale"] == counts["wrong"] == 0
    assert counts["loaded"] > 10 * count
    assert counts["held"] > 5 * count
    assert counts["detached"] > 0.3 * count


def test_histories_serve_and_store_no_block_of_other_weights(tmp_path):
    check_histories(tmp_path, 40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_histories_serve_and_store_no_block_of_other_weights(tmp_path):
    check_histories(tmp_path, HISTORIES)


def test_histories_without_comparison_serve_and_store_wrong_blocks(tmp_path, monkeypatch):
    def answer(probe):
        probe._word.answered = probe._word.asked

    monkeypatch.setattr(WeightsProbe, "check", answer)
    counts = run_histories(tmp_path, 40)
    assert counts["stale"] > 0
    assert counts["wrong"] > 0


class Executor:
    """Records calls, and calls functions."""

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        return method() if callable(method) else method


def watched(words=()):
    executor, watch = Executor(), WeightsWatch(words)
    watch.watch_calls(executor)
    return executor, watch


def test_watch_harmless_call_stays_sure(tmp_path):
    executor, watch = watched([WeightsWord.create("engine", 0, str(tmp_path))])
    executor.collective_rpc("execute_model", args=(None,), non_block=True)
    assert watch.is_sure
    assert watch.change is None


@pytest.mark.parametrize("method", ["update_weights", "reload_weights", "load_weights", "reset_weights"])
def test_watch_method_that_updates_weights_is_a_change_before_it_runs(tmp_path, method):
    executor, watch = watched([WeightsWord.create("engine", 0, str(tmp_path))])
    executor.collective_rpc(method, None, ({},))
    assert watch.change == f"call of {method}"


@pytest.mark.parametrize(("load_inplace", "changes"), [(False, False), (True, True)])
def test_watch_adapter_loaded_in_place_is_a_change(tmp_path, load_inplace, changes):
    executor, watch = watched([WeightsWord.create("engine", 0, str(tmp_path))])
    request = SimpleNamespace(load_inplace=load_inplace)
    executor.collective_rpc("add_lora", args=(request,))
    assert (watch.change is not None) == changes


def test_watch_function_is_unsure_until_all_workers_answer(tmp_path):
    words = [WeightsWord.create("engine", rank, str(tmp_path)) for rank in range(2)]
    executor, watch = watched(words)
    executor.collective_rpc(lambda: None)
    for word in words:
        assert not watch.is_sure
        word.answered = word.asked
    assert watch.is_sure
    assert watch.change is None


def test_watch_function_without_words_is_a_change():
    executor, watch = watched()
    executor.collective_rpc(lambda: None)
    assert watch.change is not None


def test_watch_sleeping_workers_are_not_asked(tmp_path):
    word = WeightsWord.create("engine", 0, str(tmp_path))
    executor, watch = watched([word])
    executor.collective_rpc("sleep", kwargs={"level": 1})
    executor.collective_rpc("wake_up", None, (), {"tags": ["kv_cache"]})
    watch.ask()
    assert word.asked == 0  # their parameters may not be readable
    assert not watch.is_sure
    executor.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
    assert word.asked > 0


def test_watch_call_in_background_is_unsure_until_it_ends(tmp_path):
    word = WeightsWord.create("engine", 0, str(tmp_path))
    executor, watch = watched([word])
    future = Future()
    executor.collective_rpc(lambda: future, non_block=True)
    word.answered = word.asked
    assert not watch.is_sure
    future.set_result(None)
    assert not watch.is_sure
    word.answered = word.asked
    assert watch.is_sure


def test_sample_parameters_any_changed_parameter_changes_the_sample():
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 3)).to(torch.bfloat16)
    model.flag = torch.nn.Parameter(torch.zeros(3, dtype=torch.bool), requires_grad=False)
    model.other = torch.nn.Parameter(torch.randn(50, 7).t())  # not contiguous
    known = sample_parameters([model])
    assert sample_parameters([model]) == known
    for parameter in model.parameters():
        before = parameter.data.clone()
        parameter.data.copy_(torch.logical_not(before) if before.dtype is torch.bool else before + 1)
        assert sample_parameters([model]) != known
        parameter.data.copy_(before)
    assert sample_parameters([model]) == known


def test_word_of_another_size_is_refused(tmp_path):
    WeightsWord.create("engine", 0, str(tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"short")
    with pytest.raises(OSError, match="not a file of this user"):
        WeightsWord.attach("engine", 0, str(tmp_path))


def test_word_of_earlier_engine_is_replaced(tmp_path):
    WeightsWord.create("engine", 0, str(tmp_path)).answered = 7
    worker = WeightsWord.create("engine", 0, str(tmp_path))
    engine = WeightsWord.attach("engine", 0, str(tmp_path))
    assert engine.answered == 0
    worker.answered = 3
    assert engine.answered == 3
    assert not list(tmp_path.iterdir())
