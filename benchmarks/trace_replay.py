"""Replay of a trace on a store of a given capacity: which blocks are found again.

1. A request of a trace is the chain of its blocks' ids. Equal ids mean equal prefixes: a block
   always follows the same block. A hit is a block of the longest prefix of a request that the store
   holds when the request starts.
2. For each request, the replay looks up its chain, loads the longest prefix that is held, compares
   the bytes, and then stores the whole context and ends the request, as an engine without a primary
   tier would.
3. Blocks are synthetic and hundreds of times smaller than real ones. A store evicts packs; real
   packs are cut at 32 MiB and hold 64 MiB at most, which is 1 to 10 blocks of 512 tokens, depending
   on the model. Synthetic packs must not have more blocks than that: the replay stores each one as
   a job.
"""

from __future__ import annotations

import lzma
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.store_rig import Rig, finish
from persistkv.errors import StoreError
from persistkv.storage.host.protocol import HostStats
from persistkv.storage.records import RequestEnd

Request = list[int]
"""Chain of a request: ids of its blocks, in order."""

PACK_BLOCKS = 8
"""Default bound on the blocks in a pack: a power of two as in real packs, and more than those hold
for most models."""
_FLUSH_S = 120.0
_TOKENS_PER_BLOCK = 512
_LOOK_EVERY = 100  # requests


@dataclass
class Replayed:
    """Outcome of the replay of a trace on one store."""

    url: str
    capacity: int | None
    """Bytes; None: unlimited."""
    nominal_blocks: int
    """Blocks that would fit the capacity if it held payload only."""
    held_blocks: int = 0
    """Blocks in the store: median over the second half."""
    hits: int = 0
    """Blocks that were loaded."""
    wrong_blocks: int = 0
    """Blocks that a lookup found, but whose load failed or returned other bytes. Expected: 0."""
    evicted_blocks: int = 0
    loaded_bytes: int = 0
    disk_bytes: int = 0
    """Largest size of the store."""
    requests_sent: dict[str, int] = field(default_factory=dict)
    """Requests to a bucket by HTTP method; empty for a disk."""


class _Line(msgspec.Struct):
    hash_ids: Request
    """Ids of a request's blocks, in order. Other fields of the line are ignored."""


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """Return the block ids of each request (the first ``limit``) of a trace in Mooncake's form,
    compressed or plain.

    :raises ValueError: the file is not a trace or has no blocks, or one block id follows two
        different ids, so that it does not identify a prefix.
    """
    requests: list[Request] = []
    parents: dict[int, int] = {}  # block → the block before it
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        for line in islice(lines, limit):
            chain = msgspec.json.decode(line, type=_Line).hash_ids
            for parent, block in zip([-1, *chain], chain, strict=False):
                if parents.setdefault(block, parent) != parent:
                    raise ValueError(
                        f"block {block} follows both {parents[block]} and {parent}"
                    )
            requests.append(chain)
    if not any(requests):
        raise ValueError(f"{path} has no blocks")
    return requests


def distinct_blocks(requests: Sequence[Request]) -> int:
    return len({block for chain in requests for block in chain})


def replay(
    requests: Sequence[Request],
    run: Replayed,
    block_bytes: int,
    *,
    pack_blocks: int = PACK_BLOCKS,
) -> Replayed:
    """Replay all requests, one after the other, on the empty store that ``run`` names; return
    ``run`` with the results.

    :param pack_blocks: bound on the blocks in a pack; 0: one pack for each request, up to the
        store's own bound.
    """
    engine = _Engine(run, block_bytes, max(map(len, requests)), pack_blocks)
    with closing(engine.client):
        for number, chain in enumerate(requests):
            if chain:
                engine.answer(number, chain)
            if number % _LOOK_EVERY == 0:
                engine.look()
        host = engine.look()
    run.held_blocks = round(statistics.median(engine.held[len(engine.held) // 2 :]))
    run.requests_sent = host.requests
    run.loaded_bytes = host.counters.loaded_bytes
    run.evicted_blocks = host.counters.evicted_blocks
    return run


class _Engine:
    """A store client without a model. Stores read the first half of its block buffers, loads fill
    the second."""

    def __init__(
        self,
        run: Replayed,
        block_bytes: int,
        longest: int,
        pack_blocks: int,
    ) -> None:
        """:param longest: number of blocks of the longest request. Other parameters: as in
        ``replay``."""
        self._run = run
        rig = Rig(2 * longest, block_bytes, huge_pages=False)
        self._words = rig.rows.view(np.uint64)
        self._pattern = np.random.default_rng(0).integers(
            1, 1 << 63, block_bytes // 8, dtype=np.uint64
        )
        self._block_bytes = block_bytes
        self._longest = longest
        self._pack_blocks = pack_blocks or longest
        self.held: list[int] = []
        """Blocks that the store held at each ``look``."""
        self._ids = count(1)
        self.client = rig.client(run.url, "thread")
        self.client.open()

    def answer(self, number: int, chain: Request) -> None:
        """Replay request ``number``: look up its block ids, load the held prefix, store all blocks,
        end the request."""
        # 32 bytes of hash and 4 bytes of group index, as engines make keys
        keys = [
            blake2b(block.to_bytes(8, "big"), digest_size=32).digest() + bytes(4)
            for block in chain
        ]
        held = next(
            (place for place, key in enumerate(keys) if not self.client.contains(key)),
            len(keys),
        )
        # each block's bytes, computed from its id: shape (blocks, 64-bit words of a block)
        contents = (
            self._pattern
            * (np.asarray(chain, dtype=np.uint64) * np.uint64(2) + np.uint64(1))[
                :, None
            ]
        )
        if held:
            job_id, rows = next(self._ids), range(self._longest, self._longest + held)
            self.client.submit_load(job_id, keys[:held], rows)
            failed = set(finish(self.client, job_id).failed)
            right = (self._words[rows.start : rows.stop] == contents[:held]).all(axis=1)
            good = sum(
                bool(same) and key not in failed
                for same, key in zip(right, keys[:held], strict=True)
            )
            self._run.hits += good
            self._run.wrong_blocks += held - good
        self._words[: len(chain)] = contents
        request = f"request {number}"
        for start in range(0, len(keys), self._pack_blocks):
            part = range(start, min(start + self._pack_blocks, len(keys)))
            job_id, size = next(self._ids), len(part) * self._block_bytes
            # blocks of jobs of one name could share a pack
            name = f"{request}, from {start}"
            self.client.submit_store(
                job_id, name, keys[start : part.stop], part, part, size
            )
        tokens = len(keys) * _TOKENS_PER_BLOCK
        self.client.end_request(
            RequestEnd(request, request, (keys,), tokens, _TOKENS_PER_BLOCK)
        )
        # the rows are reused, and the next request looks its blocks up
        if not self.client.flush(_FLUSH_S):
            raise StoreError(f"request {number} was not stored within {_FLUSH_S:g} s")
        self.client.poll()

    def look(self) -> HostStats:
        """Record the blocks and disk bytes that the store holds now; return the statistics of its
        host."""
        host = self.client.stats().host
        if host is None or host.disk_bytes is None:
            raise StoreError("the store did not answer")
        self._run.disk_bytes = max(self._run.disk_bytes, host.disk_bytes)
        self.held.append(len(self.client))
        return host
