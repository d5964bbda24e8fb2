"""A trace of prefix reuse against a real store of small synthetic blocks: what share of them is found again.

Each request looks its chain up, loads the longest prefix that is held (and compares the bytes), then stores its whole
context and ends, as an engine would without a primary tier in front. Beside it stand caches of whole blocks, which need
no room for an index, padding or requests: see ``trace``.

What a store evicts is packs. They are cut at 32 MiB where depths are known, and hold 64 MiB at most. A trace's blocks,
512 tokens, take 16 MiB with a model of 32 KiB a token: 2 of them are a pack, at most 4. With 12 KiB a token that is 4,
at most 10; with 128 KiB, 1. Synthetic blocks are smaller by a factor of hundreds; so that their packs are not larger
than real ones, counted in blocks, each pack's blocks are stored as a job of their own.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from persistkv.errors import StoreError
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.protocol import EndRequest, HostStats
from persistkv.storage.keys import PackedKeys
from persistkv_tools.rig import Rig, finish
from persistkv_tools.trace import Request, clairvoyant_hits, lru_hits
from persistkv_tools.trace_policies import OTHER_POLICIES

TOKENS_PER_BLOCK = 512
PACK_BLOCKS = 8
"""Blocks in a pack at most, by default: a power of two as in real packs, and more than most models have."""
_LOOK_EVERY = 100  # requests


class Outcome(msgspec.Struct):
    """What one replay found."""

    hits: int = 0
    """Blocks that were held as prefix, loaded, and right."""
    wrong: int = 0
    """Blocks that a lookup promised and that were not served, or not right."""
    disk_bytes: int = 0
    """The most that the store took on disk, its index included."""
    held: list[int] = []
    """Blocks in the store, looked at now and then."""
    stored_bytes: int = 0
    """Written to the store, padding included."""
    loaded_bytes: int = 0
    """Read from it."""
    evicted_blocks: int = 0
    commits: int = 0
    requests: dict[str, int] = {}
    """Sent to a remote medium, by kind."""
    seconds: float = 0.0

    @property
    def held_blocks(self) -> int:
        """How many the store held: the median over the second half."""
        return round(statistics.median(self.held[len(self.held) // 2 :]))


class Comparison(msgspec.Struct, frozen=True):
    """Hits of caches of whole blocks on the same trace; rates are of all blocks that were asked for."""

    lru: int
    """One that drops what was used longest ago, of the nominal number of blocks."""
    lru_held: int
    """The same, of as many blocks as the store held."""
    best: int
    """The most that any cache of the nominal number can have."""
    others: dict[str, int]
    """Of caches of the nominal number with other policies, by their names."""

    @classmethod
    def of(cls, requests: Sequence[Request], blocks: int, held: int) -> Comparison:
        """:param blocks: the nominal number: what the capacity would hold of payload alone."""
        others = {name: hits(requests, blocks) for name, hits in OTHER_POLICIES.items()}
        return cls(lru_hits(requests, blocks), lru_hits(requests, held), clairvoyant_hits(requests, blocks), others)


class _Replay:
    """One store and the rows that its blocks pass through: the first half is stored from, the second loaded to."""

    def __init__(self, url: str, block_bytes: int, longest: int, pack_blocks: int) -> None:
        self._rig = Rig(2 * longest, block_bytes)
        self._words = self._rig.rows.view(np.uint64)
        self._pattern = np.random.default_rng(0).integers(1, 1 << 63, block_bytes // 8, dtype=np.uint64)
        self._longest = longest
        self._pack_blocks = pack_blocks or longest
        self._client: StoreClient = self._rig.client(url, "inline")
        self._client.open()
        self._job = 0
        self.outcome = Outcome()

    def answer(self, number: int, chain: Request) -> None:
        """One request: look up, load, store, end."""
        keys = [key_of(block) for block in chain]
        held = next((place for place, key in enumerate(keys) if not self._client.contains(key)), len(keys))
        good = self._load(keys[:held], chain) if held else 0
        self.outcome.hits += good
        self.outcome.wrong += held - good
        self._store(f"request {number}", keys, chain)

    def _load(self, keys: list[bytes], chain: Request) -> int:
        self._job += 1
        rows = range(self._longest, self._longest + len(keys))
        self._client.submit_load(self._job, keys, rows)
        failed = set(finish(self._client, self._job).failed)
        right = (self._words[rows.start : rows.stop] == self._contents(chain[: len(keys)])).all(axis=1)
        return sum(bool(same) and key not in failed for same, key in zip(right, keys, strict=True))

    def _contents(self, chain: Request) -> npt.NDArray[np.uint64]:
        """Blocks of bytes that differ for each id, (n, words)."""
        return self._pattern * (np.asarray(chain, dtype=np.uint64) * np.uint64(2) + np.uint64(1))[:, None]

    def _store(self, request: str, keys: list[bytes], chain: Request) -> None:
        """Cut at fixed depths, as packs of engines are; small jobs of one name would wait and become one pack."""
        self._words[: len(chain)] = self._contents(chain)
        count, most = len(keys), self._pack_blocks
        for start in range(0, count, most):
            part = range(start, min(start + most, count))
            self._job += 1
            self._client.submit_store(
                self._job,
                f"{request}, from {start}",
                keys[part.start : part.stop],
                part,
                part,
                len(part) * self._rig.block_bytes,
            )
        tokens = count * TOKENS_PER_BLOCK
        self._client.end_request(
            EndRequest(request, request, (PackedKeys.of(keys),), tokens, TOKENS_PER_BLOCK, True, {})
        )
        finish(self._client, self._job)  # one step takes all of them, and writes them

    def look(self) -> HostStats:
        """Read the store's totals."""
        host = self._client.stats().host
        if host is None:
            raise StoreError("the store did not answer")
        self.outcome.disk_bytes = max(self.outcome.disk_bytes, host.disk_bytes)
        self.outcome.held.append(len(self._client))
        return host

    def finish(self) -> None:
        """Note what the store counted."""
        host = self.look()
        counters = host.counters
        self.outcome.requests = host.requests
        self.outcome.stored_bytes = counters.stored_bytes
        self.outcome.loaded_bytes = counters.loaded_bytes
        self.outcome.evicted_blocks = counters.evicted_blocks
        self.outcome.commits = counters.commits

    def close(self) -> None:
        """Write what waits, and end."""
        self._client.close()


def key_of(block: int) -> bytes:
    """A key as an engine would make it."""
    return hashlib.blake2b(block.to_bytes(8, "big"), digest_size=32).digest() + bytes(4)


def replay(
    requests: Sequence[Request],
    url: str,
    block_bytes: int,
    took: Callable[[int], None] = lambda num_bytes: None,
    *,
    pack_blocks: int = PACK_BLOCKS,
) -> Outcome:
    """All requests, one after the other, against an empty store.

    :param pack_blocks: blocks in a pack at most; 0: all that a request adds are one pack, up to the store's own bound.
    :param took: called with the bytes of each request's blocks.
    :raises StoreError: the store failed.
    """
    begin = time.monotonic()
    run = _Replay(url, block_bytes, max(map(len, requests)), pack_blocks)
    try:
        for number, chain in enumerate(requests):
            if chain:
                run.answer(number, chain)
            if number % _LOOK_EVERY == 0:
                run.look()
            took(len(chain) * block_bytes)
        run.finish()
    finally:
        run.close()
    run.outcome.seconds = round(time.monotonic() - begin, 3)
    return run.outcome
