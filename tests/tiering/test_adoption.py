"""Persistent tiers of two engine releases, each with its own host, on one store."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from persistkv.base import OffloadKey, ReqContext, RequestDescription
from persistkv.config import OffloadingConfig
from persistkv.tiering.base import JobMetadata
from persistkv.tiering.persistent import PersistentTier
from tests.storage.identity.releases import (
    BLOCKS,
    KV,
    TOKENS,
    compute,
    identity,
    keys_of,
    prompt,
    row_layout,
    to_blocks,
)

PROMPTS = [prompt(number) for number in range(4)]
LAYOUT = row_layout("float32")
NUM_ROWS = 16


class Engine:
    """Rows and a persistent tier of one engine release."""

    def __init__(self, url: str, release: str, undo: ExitStack, host: str) -> None:
        fd = os.memfd_create("rows")
        undo.callback(os.close, fd)
        os.ftruncate(fd, NUM_ROWS * LAYOUT.row_stride)
        memory = mmap.mmap(fd, 0)
        self.rows = np.frombuffer(memory, np.uint8).reshape(NUM_ROWS, -1)
        fields = identity(release).fields
        config = OffloadingConfig(
            fields, TOKENS, LAYOUT, NUM_ROWS, (fd,) if host == "process" else ()
        )
        self.tier = PersistentTier(config, memoryview(memory), url=url, host=host)
        undo.callback(self.tier.shutdown)
        self._jobs = 0

    def run(self, tokens: list[int], kv: KV) -> None:
        """Store the blocks of a request that an engine has computed, and wait until they are
        durable."""
        keys = [OffloadKey(key) for key in keys_of(tokens)]
        self.rows[: len(keys)] = to_blocks(kv, "float32")
        description = RequestDescription()
        description.extend(0, keys)
        context = ReqContext(f"r{self._jobs}", description=description)
        self._submit(keys, context, is_promotion=False)
        self.tier.on_request_finished(context)
        assert self.tier.wait_persisted(context.req_id, 60)

    def load(self, tokens: list[int]) -> int:
        """Load the prefix of a context that a lookup finds; return its number of blocks."""
        keys = [OffloadKey(key) for key in keys_of(tokens)]
        count = self.tier.lookup_prefix(keys, ReqContext("l"))
        self.rows[:] = 0
        if count:
            self._submit(keys[:count], ReqContext("l"), is_promotion=True)
        return count

    def _submit(
        self, keys: list[OffloadKey], context: ReqContext, *, is_promotion: bool
    ) -> None:
        self._jobs += 1
        job = JobMetadata(self._jobs, keys, np.arange(len(keys)), is_promotion, context)
        (self.tier.submit_load if is_promotion else self.tier.submit_store)(job)
        deadline = time.monotonic() + 60
        while not (results := list(self.tier.get_finished_jobs())):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert [(result.success, list(result.failed_keys)) for result in results] == [
            (True, [])
        ]


StartEngine = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartEngine]:
    """Return a function that starts engines of a release on one store; end them after the test."""
    with ExitStack() as undo:
        yield lambda release, host="process": Engine(
            f"lmdb://{tmp_path}/store?capacity=64MiB", release, undo, host
        )


@pytest.fixture(scope="module")
def contexts() -> list[KV]:
    return [compute(tokens) for tokens in PROMPTS]


@pytest.mark.parametrize("host", ["process", "thread"])
def test_persistent_tier_newer_release_loads_blocks_of_older_one(
    start: StartEngine, contexts: list[KV], host: str
) -> None:
    older = start("0.31", host)
    for tokens, kv in zip(PROMPTS, contexts, strict=True):
        older.run(tokens, kv)
    older.tier.shutdown()
    newer = start("0.32", host)
    for tokens, kv in zip(PROMPTS[:2], contexts, strict=False):
        assert newer.load(tokens) == 0
        newer.run(tokens, kv)
    deadline = time.monotonic() + 60
    while newer.load(PROMPTS[2]) < BLOCKS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert np.array_equal(newer.rows[:BLOCKS], to_blocks(contexts[2], "float32"))
    # stored in its own namespace, although a lookup finds the older blocks
    newer.run(PROMPTS[2], contexts[2])
    stats = newer.tier.client.stats().host
    assert stats is not None
    assert stats.counters.stored_blocks == 3 * BLOCKS


def test_persistent_tier_blocks_loaded_elsewhere_prevent_adoption(
    start: StartEngine, contexts: list[KV]
) -> None:
    older = start("0.31")
    for tokens, kv in zip(PROMPTS, contexts, strict=True):
        older.run(tokens, kv)
    older.tier.shutdown()
    newer = start("0.32")
    for tokens, kv in zip(PROMPTS[:3], contexts, strict=False):
        newer.tier.loaded_elsewhere([OffloadKey(key) for key in keys_of(tokens)])
        newer.run(tokens, kv)
    assert newer.load(PROMPTS[3]) == 0
