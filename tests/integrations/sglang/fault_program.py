"""Program that stores and loads pages while calls fail and processes are killed.

SGLang's fault injector fails and delays calls. A child process makes them, verifies every page that
is loaded, and is killed after a random time; the next one uses the store that it left. The store is
too small for all pages, so that extents are overwritten. Prints the ``Tally`` as JSON.

Arguments: the store's URL, the number of operations, and the seed.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from importlib import import_module

import numpy as np
import torch

from tests.integrations.sglang.conftest import fill, page_keys
from tests.integrations.sglang.host_pools import (
    PAGE,
    create_storage,
    make_host_pool,
    page_indices,
    storage_config,
)
from tests.integrations.sglang.stand_ins import HostPool

PAGES = 4096
"""Pages with content, of 8 KiB each: 32 MiB. The store should have room for half of them."""
POOL_PAGES = 64
MOST_PAGES = 8  # of a call
FIELDS = ("operations", "stored", "loaded", "wrong", "openings", "kills")
MEAN_LIFE = 1000  # operations of a child process
TIMEOUT_S = 60.0


class Tally:
    """Counts in memory that the child processes share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._counts = np.frombuffer(self._memory, np.int64)

    def add(self, field: str, count: int = 1) -> None:
        self._counts[FIELDS.index(field)] += count

    def __getitem__(self, field: str) -> int:
        return int(self._counts[FIELDS.index(field)])

    def as_json(self) -> str:
        return json.dumps({field: self[field] for field in FIELDS})


class Engine:
    """Uses a store as SGLang's storage threads do, until it is killed."""

    def __init__(
        self,
        url: str,
        pool: HostPool,
        content: HostPool,
        tally: Tally,
        seed: str,
    ) -> None:
        """:param content: pool with the content of each key."""
        options = {
            "url": url,
            "weights": "w",
            "attention_backend": "torch_native",
            "timeout_s": TIMEOUT_S,
        }
        self._config = storage_config(options)
        self._chance = random.Random(seed)
        self._content = content
        self._keys = page_keys(range(PAGES))
        self._pool = pool
        self._tally = tally
        self._open()

    def _open(self) -> None:
        self._backend = create_storage(self._config, self._pool)
        self._tally.add("openings")

    def run(self) -> None:
        while True:
            action = self._chance.random()
            if action < 0.3:
                self._store()
            elif action < 0.9:
                self._load()
            elif action < 0.999:
                self._backend.batch_exists(self._keys[self._some()])
            else:
                self._backend.close()
                self._open()
            self._tally.add("operations")

    def _some(self) -> slice:
        """Return a random run of keys."""
        count = self._chance.randrange(1, MOST_PAGES + 1)
        first = self._chance.randrange(PAGES - count)
        return slice(first, first + count)

    def _places(self, count: int) -> int:
        """Return the first of as many pages of the pool."""
        return self._chance.randrange(POOL_PAGES - count)

    def _store(self) -> None:
        some = self._some()
        keys = self._keys[some]
        place = self._places(len(keys))
        _pages(self._pool, place, len(keys)).copy_(
            _pages(self._content, some.start, len(keys))
        )
        stored = self._backend.batch_set_v1(keys, page_indices(place, len(keys)))
        self._tally.add("stored", sum(stored))

    def _load(self) -> None:
        some = self._some()
        keys = self._keys[some]
        place = self._places(len(keys))
        _pages(self._pool, place, len(keys)).zero_()
        found = self._backend.batch_get_v1(keys, page_indices(place, len(keys)))
        self._tally.add("loaded", sum(found))
        for number, is_found in enumerate(found):
            loaded = _pages(self._pool, place + number, 1)
            expected = _pages(self._content, some.start + number, 1)
            if is_found and not torch.equal(loaded, expected):
                self._tally.add("wrong")


def _pages(pool: HostPool, first: int, count: int) -> torch.Tensor:
    """Return the bytes of consecutive pages: a view."""
    numbers: torch.Tensor = pool.kv_buffer.view(torch.int16)
    return numbers[:, first * PAGE : (first + count) * PAGE]


def main(url: str, operations: int, seed: int) -> None:
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.1"
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = "0.0001"
    chance = random.Random(seed)
    tally = Tally()
    torch.set_num_threads(
        1
    )  # a forked child has no other threads, and would wait for them
    # SGLang creates no pool while the machine has little memory
    pool = make_host_pool(POOL_PAGES, layers=1, heads=1)
    content = make_host_pool(PAGES, layers=1, heads=1)
    fill(content, seed)
    # imported here and forked: an import of SGLang takes longer than thousands of operations
    for name in ("persistkv.integrations.sglang.backend", "persistkv_lmdb"):
        import_module(name)
    while tally["operations"] < operations:
        child = os.fork()
        if not child:
            _live(url, pool, content, tally, f"{seed} {tally['kills']}")
        _kill_later(child, tally, chance)
        tally.add("kills")
    sys.stdout.write(tally.as_json())


def _kill_later(child: int, tally: Tally, chance: random.Random) -> None:
    """Kill a child process after a random number of operations, during any step of the next one,
    or while it opens the store."""
    openings = tally["openings"] + 1
    last = tally["operations"] + chance.randrange(2 * MEAN_LIFE)
    is_short = chance.random() < 0.1
    while tally["openings"] < openings or tally["operations"] < last:
        if is_short and chance.random() < 0.01:
            break
        time.sleep(0.01)
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            raise SystemExit(f"a child process has failed: {tally.as_json()}")
    time.sleep(chance.random() / 100)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _live(url: str, pool: HostPool, content: HostPool, tally: Tally, seed: str) -> None:
    """Make calls until this process is killed."""
    try:
        Engine(url, pool, content, tally, seed).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
