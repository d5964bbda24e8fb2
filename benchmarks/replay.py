"""A production trace against a real LMDB store that is too small for it: what share of the blocks is found again.

Each request looks its chain up, loads the longest prefix that is held (and compares the bytes), then stores its whole
context and ends, as an engine would without a primary tier in front. The store keeps small synthetic blocks, one for
each 512-token block of the trace. Its capacity in bytes is that of the stated share of all distinct blocks, payload
only: index, manifests and padding have to fit in as well. Beside it, caches that hold so many whole blocks and need no
room for anything else: one that drops what was used longest ago, also with as many blocks as the store held (the median
of the second half), which tells what order costs from what room costs; and the best that is possible (``trace.py``).
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.rig import Rig, finish, show
from benchmarks.trace import CONVERSATION, Request, clairvoyant_hits, distinct_blocks, lru_hits, read_trace
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.protocol import EndRequest
from persistkv.storage.keys import PackedKeys

TOKENS_PER_BLOCK = 512


@dataclass
class Outcome:
    """What one replay found."""

    hits: int = 0
    """Blocks that were held as prefix, loaded, and right."""
    wrong: int = 0
    """Blocks that a lookup promised and that were not served, or not right."""
    disk_bytes: int = 0
    """The most that the store took on disk, its index included."""
    held: list[int] = field(default_factory=list)
    """Blocks in the store, looked at now and then."""


class Replay:
    """One store and the rows that its blocks pass through: the first half is stored from, the second loaded to."""

    def __init__(self, url: str, block_bytes: int, longest: int) -> None:
        self._rig = Rig(2 * longest, block_bytes)
        self._words = self._rig.rows.view(np.uint64)
        self._pattern = np.random.default_rng(0).integers(1, 1 << 63, block_bytes // 8, dtype=np.uint64)
        self._longest = longest
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

    def _contents(self, chain: Request) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        """Blocks of bytes that differ for each id, (n, words)."""
        return self._pattern * (np.asarray(chain, dtype=np.uint64) * np.uint64(2) + np.uint64(1))[:, None]

    def _store(self, request: str, keys: list[bytes], chain: Request) -> None:
        self._words[: len(chain)] = self._contents(chain)
        self._job += 1
        count = len(keys)
        self._client.submit_store(self._job, request, keys, range(count), range(count), count * self._rig.block_bytes)
        tokens = count * TOKENS_PER_BLOCK
        self._client.end_request(
            EndRequest(request, request, (PackedKeys.of(keys),), tokens, TOKENS_PER_BLOCK, True, {})
        )
        finish(self._client, self._job)

    def look(self) -> None:
        """Read the store's totals."""
        host = self._client.stats().host
        if host is None:
            raise RuntimeError("the store did not answer")
        self.outcome.disk_bytes = max(self.outcome.disk_bytes, host.disk_bytes)
        self.outcome.held.append(len(self._client))

    def close(self) -> None:
        """Write what waits, and end."""
        self._client.close()


def key_of(block: int) -> bytes:
    """A key as an engine would make it."""
    return hashlib.blake2b(block.to_bytes(8, "big"), digest_size=32).digest() + bytes(4)


def replay(requests: Sequence[Request], url: str, block_bytes: int) -> Outcome:
    """All requests, one after the other, against an empty store."""
    run = Replay(url, block_bytes, max(map(len, requests)))
    for number, chain in enumerate(requests):
        run.answer(number, chain)
        if number % 100 == 0 or number == len(requests) - 1:
            run.look()
    run.close()
    return run.outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=CONVERSATION, help="in Mooncake's form, plain or .xz")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--block-kib", type=int, default=16)
    parser.add_argument("--share", type=float, nargs="+", default=[0.1, 0.25, 0.5], help="of the distinct blocks")
    parser.add_argument("--options", nargs="+", default=[""], help="further options of the URL, e.g. placement=extents")
    parser.add_argument("--directory", help="where the store is made; a temporary directory by default")
    arguments = parser.parse_args()
    requests = read_trace(arguments.trace, arguments.requests)
    asked, distinct = sum(map(len, requests)), distinct_blocks(requests)
    rows = []
    for share in arguments.share:
        for options in arguments.options:
            blocks, block_bytes = int(distinct * share), arguments.block_kib << 10
            with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                url = f"lmdb://{directory}/store?capacity={blocks * block_bytes}" + f"&{options}" * bool(options)
                found = replay(requests, url, block_bytes)
            name = f"{share:.0%} {options}".rstrip()
            rows.append([name, *columns_of(found, requests, blocks, block_bytes)])
            print(*rows[-1], flush=True)
    unbounded = lru_hits(requests, distinct)
    title = f"{len(requests):,} requests, {asked:,} blocks, {distinct:,} distinct; unbounded {unbounded / asked:.2%}"
    columns = ["capacity", "blocks: nominal, held", "prefix hits", "LRU, nominal", "LRU, held", "best possible"]
    show(title, [*columns, ">= LRU", "÷ best", "not served", "on disk ÷ capacity"], rows)


def columns_of(found: Outcome, requests: Sequence[Request], blocks: int, block_bytes: int) -> list[str]:
    """One replay beside the caches of whole blocks: of the nominal number, and of as many as the store held."""
    asked = sum(map(len, requests))
    held = round(statistics.median(found.held[len(found.held) // 2 :]))
    lru, best = lru_hits(requests, blocks), clairvoyant_hits(requests, blocks)
    return [
        f"{blocks:,}, {held:,}",
        f"{found.hits / asked:.2%}",
        f"{lru / asked:.2%}",
        f"{lru_hits(requests, held) / asked:.2%}",
        f"{best / asked:.2%}",
        "yes" if found.hits >= lru else "NO",
        f"{found.hits / max(1, best):.3f}",
        f"{found.wrong}",
        f"{found.disk_bytes / (blocks * block_bytes):.4f}",
    ]


if __name__ == "__main__":
    main()
