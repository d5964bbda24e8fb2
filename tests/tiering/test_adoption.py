"""The blocks of another engine release, used through the persistent tier."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import numpy as np

from persistkv.base import OffloadKey, ReqContext, RequestDescription
from persistkv.config import OffloadingConfig
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.tiering.base import JobMetadata
from persistkv.tiering.persistent import PersistentTier
from tests.storage.identity.releases import (
    BLOCKS,
    TOKENS,
    identity,
    keys_of,
    prompt,
    row_layout,
)

LAYOUT = row_layout("float32")
PROMPTS = [prompt(number) for number in range(3)]


class ReleasedEngine:
    """Engine of one release, reduced to its persistent tier and the rows of one context."""

    def __init__(self, url: str, release: str) -> None:
        memory = memoryview(bytearray(BLOCKS * LAYOUT.row_stride))
        self._rows = np.frombuffer(memory, np.uint8).reshape(BLOCKS, -1)
        config = OffloadingConfig(
            dict(identity(release).fields), TOKENS, LAYOUT, BLOCKS
        )
        self.tier = PersistentTier(
            config, memory, url=url, host="thread", max_age_s=0.0
        )
        self._jobs = 0

    def store(self, tokens: list[int]) -> None:
        """Compute the blocks of a context, and store them as one request."""
        rng = np.random.default_rng(tokens[0])
        self._rows[:] = (
            rng.standard_normal(self._rows.size // 4, np.float32)
            .view(np.uint8)
            .reshape(self._rows.shape)
        )
        self._jobs += 1
        keys = [OffloadKey(key) for key in keys_of(tokens)]
        description = RequestDescription()
        description.extend(0, keys)
        description.num_tokens = len(tokens)
        context = ReqContext(f"r{self._jobs}", description=description)
        self.tier.on_new_request(context)
        job = JobMetadata(self._jobs, keys, np.arange(BLOCKS), False, context)
        self.tier.submit_store(job)
        deadline = time.monotonic() + 60
        while not self.tier.get_finished_jobs():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.tier.on_request_finished(context)
        assert self.tier.client.flush(60)

    def finds(self, tokens: list[int]) -> bool:
        self.tier.get_finished_jobs()
        context = ReqContext("lookup")
        return all(
            self.tier.lookup(OffloadKey(key), context) for key in keys_of(tokens)
        )


def test_used_blocks_of_another_release_outlive_its_namespace(tmp_path: Path) -> None:
    """The engine offers blocks although a lookup finds them: only then is the cache of the next
    release kept when that of the last one is evicted."""
    url = f"lmdb://{tmp_path}/store"
    old = ReleasedEngine(url, "0.31")
    for tokens in PROMPTS:
        old.store(tokens)
    old.tier.shutdown()

    new = ReleasedEngine(url, "0.32")
    for tokens in PROMPTS[:2]:
        new.store(tokens)
    assert new.finds(PROMPTS[2]), "adopted"
    new.store(PROMPTS[2])
    new.tier.shutdown()
    with closing(open_backend(url)) as backend:
        theirs = identity("0.31").digest
        packs = [table.pack_id for table in backend.changes(theirs, None).added]
        backend.commit(theirs, CommitBatch(deletions=packs))

    again = ReleasedEngine(url, "0.32")
    assert again.finds(PROMPTS[2])
    again.tier.shutdown()
