"""Fingerprint collisions: random histories of a tier over keys of which several have the same
fingerprint."""

from __future__ import annotations

import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from persistkv.base import OffloadKey, ReqContext, make_offload_key
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.tiering.base import JobMetadata
from persistkv.tiering.persistent import PersistentTier

XXH3_SECRET = bytes.fromhex("b8fe6c3923a44bbe")
"""First 8 bytes of the secret of xxh3: the hash of 32 bytes that begin with them does not depend on
the next 8."""
BLOCK = 4096
ROWS = 24
LAYOUT = RowLayout(BLOCK, (GroupLayout(((0, BLOCK),)), GroupLayout(((0, BLOCK // 2),))))


def colliding_keys(classes: int, members: int, seed: int) -> list[OffloadKey]:
    """Return keys of 32 bytes with ``classes`` fingerprints, ``members`` keys of each."""
    draw = random.Random(seed)
    keys = []
    for _ in range(classes):
        end, group = draw.randbytes(12), draw.randrange(2)
        some = [
            make_offload_key(XXH3_SECRET + draw.randbytes(8) + end, group)
            for _ in range(members)
        ]
        assert len(set(map(xxhash.xxh3_64_intdigest, some))) == 1
        keys += some
    return keys


POOL = colliding_keys(8, 3, 0)


def content(key: OffloadKey) -> npt.NDArray[np.uint8]:
    block = np.frombuffer(key * (BLOCK // len(key) + 1), np.uint8)[:BLOCK].copy()
    block[LAYOUT.groups[key[-1]].block_bytes :] = 0
    return block


class History:
    """One store, and a model of the blocks that it must hold."""

    def __init__(self, url: str, seed: int) -> None:
        self.draw = random.Random(seed)
        self.url = url
        self.memory = bytearray(ROWS * BLOCK)
        self.rows = np.frombuffer(self.memory, np.uint8).reshape(ROWS, BLOCK)
        self.durable: set[OffloadKey] = set()
        self.jobs = 0
        self.open()

    def open(self) -> None:
        config = OffloadingConfig({"weights": "w"}, 16, LAYOUT, ROWS)
        self.tier = PersistentTier(
            config, memoryview(self.memory), url=self.url, host="thread", max_age_s=0.0
        )

    def run(self, job: JobMetadata) -> set[OffloadKey]:
        """Run a job; return the keys that failed."""
        if job.is_promotion:
            self.tier.submit_load(job)
        else:
            self.tier.submit_store(job)
        results = list(self.tier.get_finished_jobs())
        while not results:
            assert self.tier.client.flush(30)
            results += self.tier.get_finished_jobs()
        (result,) = results
        assert result.success
        return set(result.failed_keys)

    def job(self, keys: list[OffloadKey], *, load: bool) -> JobMetadata:
        self.jobs += 1
        rows = np.array(self.draw.sample(range(ROWS), len(keys)), np.int64)
        return JobMetadata(self.jobs, keys, rows, load, ReqContext(f"r{self.jobs}"))

    def store(self, keys: list[OffloadKey]) -> None:
        """Store blocks. The tier skips a job if all of its keys seem held, and then a collided key
        is not stored."""
        skips = all(self.finds(key) for key in keys)
        job = self.job(keys, load=False)
        for key, row in zip(keys, job.block_ids, strict=True):
            self.rows[row] = content(key)
        assert not self.run(job)
        if self.draw.random() < 0.5:
            self.tier.on_request_finished(job.req_context)
        assert self.tier.client.flush(30)
        if not skips:
            self.durable.update(keys)

    def load(self, keys: list[OffloadKey]) -> set[OffloadKey]:
        """Load blocks and compare them; a key that fails is not found again until it is stored."""
        job = self.job(keys, load=True)
        self.rows[:] = 0xEE
        failed = self.run(job)
        assert failed == set(keys) - self.durable
        for key, row in zip(keys, job.block_ids, strict=True):
            size = LAYOUT.groups[key[-1]].block_bytes
            assert (
                key in failed or (self.rows[row, :size] == content(key)[:size]).all()
            ), "wrong bytes"
        assert not any(map(self.finds, failed)), "an engine would retry it for ever"
        return failed

    def finds(self, key: OffloadKey) -> bool:
        return bool(self.tier.lookup(key, ReqContext("r")))

    def step(self) -> None:
        keys = self.draw.sample(POOL, self.draw.randrange(1, 9))
        match self.draw.randrange(8):
            case 0 | 1 | 2:
                self.store(keys)
            case 3 | 4 | 5:
                self.load(keys)
            # as an engine: load the blocks that are found, compute the others, store all
            case 6:
                failed = self.load([key for key in keys if self.finds(key)] or keys[:1])
                self.store(keys)
                self.store(keys)
                assert failed <= self.durable or not failed <= set(keys)
                assert not self.load(keys), "not served after its second store"
            case 7:
                self.tier.shutdown()
                self.open()
        lost = [key.hex()[:8] for key in self.durable if not self.finds(key)]
        assert not lost, (
            f"{len(lost)} of {len(self.durable)} stored blocks are not found in {self.url}"
        )

    def end(self) -> None:
        assert self.load(list(POOL)) == set(POOL) - self.durable
        stats = self.tier.client.stats().host
        assert stats is not None
        assert stats.counters.verification_failures == 0
        self.tier.shutdown()


@pytest.fixture
def urls(tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """Return a function that names the store of a history; most are in /dev/shm, where a sync takes
    no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield (
            lambda number: (
                f"lmdb://{tmp_path if number % 10 == 0 else directory}/{number}?capacity=4MiB"
            )
        )


def run_histories(
    urls: Callable[[int], str],
    first: int,
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        for seed in range(first, first + count):
            history = History(urls(seed), seed)
            for _ in range(12):
                history.step()
            history.end()
    assert "do not verify" not in caplog.text, "a pack was deleted"


def test_persistent_tier_colliding_keys_serve_no_wrong_bytes(
    urls: Callable[[int], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_histories(urls, 0, 25, caplog)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_persistent_tier_colliding_keys_many_histories_no_wrong_bytes(
    urls: Callable[[int], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_histories(urls, 1000, int(os.environ.get("PERSISTKV_HISTORIES", "300")), caplog)


def test_persistent_tier_collided_block_is_served_after_second_store(
    urls: Callable[[int], str],
) -> None:
    history = History(urls(0), 0)
    first, second = POOL[:2]
    history.store([first])
    assert history.finds(second), "the fingerprint of the first"
    history.store([second])
    assert history.load([first, second]) == {second}
    assert not history.finds(second)
    history.store([second])
    assert not history.load([first, second])
    history.end()
