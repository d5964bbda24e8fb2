"""``persistkv replay``: the hit rate of a trace on a store of a given capacity.

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
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import msgspec
import numpy as np
import typer

from persistkv.config import PAGE_BYTES, StoreUrl, parse_size
from persistkv.errors import ConfigurationError, FileError, StoreError
from persistkv.storage import open_backend
from persistkv.storage.host.protocol import HostStats
from persistkv.storage.host.supervisor import InlineHost
from persistkv.storage.records import RequestEnd
from persistkv_tools import options, render
from persistkv_tools.inspect.bench import finish, store_client
from persistkv_tools.progress import byte_progress, counted

Request = list[int]
"""Chain of a request: ids of its blocks, in order."""

PACK_BLOCKS = 8
"""Default bound on the blocks in a pack: a power of two as in real packs, and more than those hold
for most models."""
_TOKENS_PER_BLOCK = 512
_LOOK_EVERY = 100  # requests


class Replayed(msgspec.Struct):
    """Outcome of the replay of a trace on one store. Fields: docs/json.md."""

    url: str
    capacity: int | None
    nominal_blocks: int
    held_blocks: int = 0
    hits: int = 0
    hit_rate: float = 0.0
    wrong_blocks: int = 0
    evicted_blocks: int = 0
    commits: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    disk_bytes: int = 0
    requests_sent: dict[str, int] = {}
    seconds: float = 0.0


def _capacity(run: Replayed) -> str:
    return "none" if run.capacity is None else render.format_size(run.capacity)


_RATES = render.columns(
    "capacity=room nominal_blocks held_blocks hit_rate=hits",
    room=_capacity,
    hits=lambda run: f"{run.hit_rate:.2%}",
)
_TRAFFIC = render.columns(
    "capacity=room evicted=evicted_blocks written=stored_bytes read=loaded_bytes commits "
    "wrong_blocks seconds",
    room=_capacity,
    seconds=lambda run: f"{run.seconds:.1f}",
)


def replay_(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Store to create, e.g. lmdb:///var/tmp/replay."
        ),
    ],
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="Trace in Mooncake's format: JSON lines, plain or .xz.",
        ),
    ],
    share: Annotated[
        list[float] | None,
        typer.Option(
            metavar="SHARE",
            help="Capacity for this share of the trace's blocks; can be repeated.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Replay only the first N.", show_default=False
        ),
    ] = None,
    block_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of a synthetic block.")
    ] = "64KiB",
    pack_blocks: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Most blocks in a pack, which is evicted as a whole. 0: no limit.",
        ),
    ] = PACK_BLOCKS,
    json: options.Json = False,
) -> None:
    """Replay a trace on new stores of small blocks, and show hit rates by capacity, evictions,
    requests and bytes.

    Each --share creates a separate store below URL with capacity for that share of the trace's
    blocks. Without --share, one store is created, with the capacity in the URL. The stores are not
    removed.

    Example: persistkv replay lmdb:///var/tmp/replay conversation.jsonl --share 0.1 --share 0.5
    """
    block_bytes = parse_size(block_size, name="--block-size")
    if block_bytes % PAGE_BYTES:
        raise ConfigurationError("--block-size", block_size, "a multiple of 4KiB")
    for wanted in share or []:
        if not 0 < wanted <= 1:
            raise ConfigurationError("--share", wanted, "a share above 0 and up to 1")
    chains = read_trace(trace, requests)
    _buffers(max(map(len, chains)), block_bytes).close()  # fails before a store is made
    asked, distinct = sum(map(len, chains)), distinct_blocks(chains)
    parsed, urls, runs = StoreUrl.parse(url), [url], list[Replayed]()
    if share:
        bounds = [
            urlencode(
                {**parsed.options, "capacity": str(round(one * distinct * block_bytes))}
            )
            for one in share
        ]
        below = f"{parsed.scheme}://{parsed.location.rstrip('/')}"
        urls = [
            f"{below}/{one:g}?{bound}" for one, bound in zip(share, bounds, strict=True)
        ]
    with byte_progress() as progress:
        for place in urls:
            with closing(open_backend(place)) as backend:
                if any(True for _ in backend.namespaces()):
                    raise ConfigurationError(
                        "URL", place, "a new or empty store: a replay fills it"
                    )
                capacity = backend.stats().capacity
            nominal = (
                distinct if capacity is None else min(distinct, capacity // block_bytes)
            )
            took = counted(progress, f"{nominal:,} blocks", asked * block_bytes)
            run = Replayed(place, capacity, nominal)
            runs.append(replay(chains, run, block_bytes, took, pack_blocks=pack_blocks))
    # each block but its first is a hit: equal ids mean equal prefixes
    unbounded = round(1 - distinct / asked, 4)
    if json:
        head = {
            "url": url,
            "trace": str(trace),
            "requests": len(chains),
            "blocks": asked,
            "distinct_blocks": distinct,
        }
        sizes = {"block_bytes": block_bytes, "pack_blocks": pack_blocks}
        render.print_json(
            {**head, **sizes, "unbounded_hit_rate": unbounded, "runs": runs}
        )
        return
    render.show_table(_RATES, runs)
    render.show_table(_TRAFFIC, runs)
    for run in runs:
        if run.requests_sent:
            sent = ", ".join(
                f"{number:,} {method}"
                for method, number in sorted(run.requests_sent.items())
            )
            render.say(f"{_capacity(run)}: requests sent: {sent}")
    render.say(
        f"{render.count(len(chains), 'request')}, {asked:,} blocks, {distinct:,} of them distinct;"
        f" hit rate of an unlimited store: {unbounded:.2%}"
    )


class _Line(msgspec.Struct):
    hash_ids: Request
    """Ids of a request's blocks, in order. Other fields of the line are ignored."""


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """Return the block ids of each request (the first ``limit``) of a trace in Mooncake's form,
    compressed or plain.

    :raises ConfigurationError: the file cannot be read, is not a trace or has no blocks, or one
        block id follows two different ids, so that it does not identify a prefix.
    """
    requests: list[Request] = []
    parents: dict[int, int] = {}  # block → the block before it
    try:
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
            for line in islice(lines, limit):
                chain = msgspec.json.decode(line, type=_Line).hash_ids
                for parent, block in zip([-1, *chain], chain, strict=False):
                    if not 0 <= block < 1 << 64:
                        raise ValueError(f"{block} is not an unsigned 64-bit integer")
                    if parents.setdefault(block, parent) != parent:
                        raise ValueError(
                            f"block {block} follows both {parents[block]} and {parent}"
                        )
                requests.append(chain)
    except OSError as error:
        raise FileError("read", path, error) from None
    except (ValueError, RecursionError, EOFError, lzma.LZMAError) as error:
        expected = 'lines of JSON with "hash_ids" that identify prefixes, plain or .xz'
        raise ConfigurationError(
            "trace", str(path), f"{expected} (line {len(requests) + 1}: {error})"
        ) from None
    if not any(requests):
        raise ConfigurationError("trace", str(path), "a trace of at least one block")
    return requests


def distinct_blocks(requests: Sequence[Request]) -> int:
    return len({block for chain in requests for block in chain})


def replay(
    requests: Sequence[Request],
    run: Replayed,
    block_bytes: int,
    took: Callable[[int], None] = lambda num_bytes: None,
    *,
    pack_blocks: int = PACK_BLOCKS,
) -> Replayed:
    """Replay all requests, one after the other, on the empty store that ``run`` names; return
    ``run`` with the results.

    :param pack_blocks: bound on the blocks in a pack; 0: one pack for each request, up to the
        store's own bound.
    :param took: called with the number of bytes of each request's blocks.
    """
    begin = time.monotonic()
    engine = _Engine(run, block_bytes, max(map(len, requests)), pack_blocks)
    with closing(engine.client):
        for number, chain in enumerate(requests):
            if chain:
                engine.answer(number, chain)
            if number % _LOOK_EVERY == 0:
                engine.look()
            took(len(chain) * block_bytes)
        host = engine.look()
    run.held_blocks = round(statistics.median(engine.held[len(engine.held) // 2 :]))
    run.requests_sent = host.requests
    for name in ("stored_bytes", "loaded_bytes", "evicted_blocks", "commits"):
        setattr(run, name, getattr(host.counters, name))
    run.hit_rate = round(run.hits / sum(map(len, requests)), 4)
    run.seconds = round(time.monotonic() - begin, 3)
    return run


class _Engine:
    """A store client without a model. Stores read the first half of its block buffers, loads fill
    the second."""

    def __init__(
        self, run: Replayed, block_bytes: int, longest: int, pack_blocks: int
    ) -> None:
        """:param longest: number of blocks of the longest request. Other parameters: as in
        ``replay``."""
        self._run = run
        memory = _buffers(longest, block_bytes)
        self._words = np.frombuffer(memory, dtype=np.uint64).reshape(2 * longest, -1)
        self._pattern = np.random.default_rng(0).integers(
            1, 1 << 63, block_bytes // 8, dtype=np.uint64
        )
        self._block_bytes = block_bytes
        self._longest = longest
        self._pack_blocks = pack_blocks or longest
        self.held: list[int] = []
        """Blocks that the store held at each ``look``."""
        self._ids = count(1)
        self.client = store_client(run.url, InlineHost(memoryview(memory)), block_bytes)
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
        # one step of the host takes all jobs and writes them
        finish(self.client, job_id)

    def look(self) -> HostStats:
        """Record the blocks and disk bytes that the store holds now; return the statistics of its
        host."""
        host = self.client.stats().host
        if host is None:
            raise StoreError("the store did not answer")
        self._run.disk_bytes = max(self._run.disk_bytes, host.disk_bytes)
        self.held.append(len(self.client))
        return host


def _buffers(longest: int, block_bytes: int) -> mmap.mmap:
    """Return memory for twice the blocks of the longest request."""
    try:
        return mmap.mmap(-1, 2 * longest * block_bytes)
    except (OSError, OverflowError):
        expected = (
            f"a smaller size: memory must hold the longest request, {longest:,} blocks, "
            f"twice"
        )
        raise ConfigurationError(
            "--block-size", render.format_size(block_bytes), expected
        ) from None
