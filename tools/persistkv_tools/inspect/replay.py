"""``persistkv replay``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import msgspec
import typer
from rich.progress import Progress

from persistkv.config import PAGE_BYTES, StoreUrl, parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage.registry import open_backend
from persistkv_tools import render
from persistkv_tools.inspect.replaying import PACK_BLOCKS, Comparison, replay
from persistkv_tools.options import Json
from persistkv_tools.progress import byte_progress, counted
from persistkv_tools.throttle import Throttle
from persistkv_tools.trace import Request, distinct_blocks, lru_hits, read_trace
from persistkv_tools.trace_policies import OTHER_POLICIES

_COLUMNS = ("capacity", "blocks", "held", "hits", "LRU", "LRU, held", "best")
_TRAFFIC = ("capacity", "evicted blocks", "written", "read", "commits", "wrong blocks", "seconds")
_POLICIES = ("capacity", "this store", "LRU", *(name.upper() for name in OTHER_POLICIES), "best possible")


class Run(msgspec.Struct, frozen=True):
    """One capacity. Rates are of all blocks that were asked for."""

    url: str
    """The store that it made. It stays."""
    capacity: int | None
    nominal_blocks: int
    """What the capacity would hold of payload alone, at most all blocks of the trace."""
    held_blocks: int
    """What the store held: index, requests and padding need room too."""
    hits: int
    hit_rate: float
    lru_hit_rate: float
    """Of a cache of the nominal number of whole blocks that drops what was used longest ago."""
    lru_held_hit_rate: float
    """Of one that has as many blocks as the store held."""
    best_hit_rate: float
    """The most that any cache of the nominal number can have."""
    policy_hit_rates: dict[str, float]
    """Of caches of the nominal number with other policies."""
    wrong_blocks: int
    """Blocks that were promised and not served. 0 is good."""
    evicted_blocks: int
    commits: int
    stored_bytes: int
    loaded_bytes: int
    disk_bytes: int
    requests_sent: dict[str, int]
    """To a bucket, by method, retries included; empty for a disk."""
    seconds: float


def replay_(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to make the store, e.g. lmdb:///var/tmp/replay")],
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="In Mooncake's form: JSON lines, plain or .xz.")],
    share: Annotated[
        list[float] | None,
        typer.Option(metavar="SHARE", help="Room for this share of the trace's blocks; may be given again."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many.", show_default=False)] = None,
    block_size: Annotated[str, typer.Option(metavar="SIZE", help="Of the synthetic blocks.")] = "64KiB",
    pack_blocks: Annotated[
        int, typer.Option(min=0, help="Blocks in a pack at most, which leave together. 0: all that a request adds.")
    ] = PACK_BLOCKS,
    json: Json = False,
) -> None:
    """Replay a trace against new stores of small blocks: hit rates by capacity, beside other policies; requests, bytes.

    Each --share makes a store of its own below URL, which stays; without it, the capacity is that of the URL.

    Example: persistkv replay lmdb:///var/tmp/replay conversation.jsonl --share 0.1 --share 0.5
    """
    block_bytes = parse_size(block_size, name="--block-size")
    if block_bytes % PAGE_BYTES:
        raise ConfigurationError("--block-size", block_size, "a multiple of 4KiB")
    for wanted in share or []:
        if not 0 < wanted <= 1:
            raise ConfigurationError("--share", wanted, "a share above 0 and up to 1")
    chains = read_trace(trace, requests)
    asked, distinct = sum(map(len, chains)), distinct_blocks(chains)
    urls = [_with_share(url, wanted, distinct * block_bytes) for wanted in share] if share else [url]
    with byte_progress() as progress:
        runs = [_run(place, chains, distinct, block_bytes, pack_blocks, progress) for place in urls]
    unbounded = _rate(lru_hits(chains, distinct), asked)
    if json:
        render.print_json(
            {
                "url": url,
                "trace": str(trace),
                "requests": len(chains),
                "blocks": asked,
                "distinct_blocks": distinct,
                "block_bytes": block_bytes,
                "pack_blocks": pack_blocks,
                "unbounded_hit_rate": unbounded,
                "runs": runs,
            }
        )
        return
    render.console().print(render.table(_COLUMNS, map(_cells, runs)))
    title = "hit rates of caches of as many whole blocks, by policy"
    render.console().print(render.table(_POLICIES, map(_policy_cells, runs), title=title))
    render.console().print(render.table(_TRAFFIC, map(_traffic_cells, runs)))
    for run in runs:
        if run.requests_sent:
            sent = ", ".join(f"{count:,} {method}" for method, count in sorted(run.requests_sent.items()))
            render.say(f"{_capacity(run)}: requests sent: {sent}")
    render.say(
        f"{render.count(len(chains), 'request')}, {asked:,} blocks of which {distinct:,} are distinct;"
        f" without a bound {unbounded:.2%} would be hits"
    )


def _run(url: str, chains: list[Request], distinct: int, block_bytes: int, pack_blocks: int, progress: Progress) -> Run:
    asked = sum(map(len, chains))
    capacity = _check_empty(url)
    nominal = distinct if capacity is None else min(distinct, capacity // block_bytes)
    took = counted(progress, f"{nominal:,} blocks", asked * block_bytes, Throttle(None))
    found = replay(chains, url, block_bytes, took, pack_blocks=pack_blocks)
    beside = Comparison.of(chains, nominal, found.held_blocks)
    return Run(
        url,
        capacity,
        nominal,
        found.held_blocks,
        found.hits,
        _rate(found.hits, asked),
        _rate(beside.lru, asked),
        _rate(beside.lru_held, asked),
        _rate(beside.best, asked),
        {name: _rate(hits, asked) for name, hits in beside.others.items()},
        found.wrong,
        found.evicted_blocks,
        found.commits,
        found.stored_bytes,
        found.loaded_bytes,
        found.disk_bytes,
        found.requests,
        found.seconds,
    )


def _with_share(url: str, share: float, num_bytes: int) -> str:
    parsed = StoreUrl.parse(url)
    options = {**parsed.options, "capacity": str(round(share * num_bytes))}
    return f"{parsed.scheme}://{parsed.location.rstrip('/')}/{share:g}?{urlencode(options)}"


def _check_empty(url: str) -> int | None:
    """Make the store; its capacity."""
    with closing(open_backend(url)) as backend:
        if any(True for _ in backend.namespaces()):
            raise ConfigurationError("URL", url, "a store that holds nothing yet: a replay fills it")
        return backend.stats().capacity


def _rate(hits: int, asked: int) -> float:
    return round(hits / asked, 4)


def _cells(run: Run) -> list[str]:
    return [
        _capacity(run),
        f"{run.nominal_blocks:,}",
        f"{run.held_blocks:,}",
        f"{run.hit_rate:.2%}",
        f"{run.lru_hit_rate:.2%}",
        f"{run.lru_held_hit_rate:.2%}",
        f"{run.best_hit_rate:.2%}",
    ]


def _policy_cells(run: Run) -> list[str]:
    rates = [run.hit_rate, run.lru_hit_rate, *run.policy_hit_rates.values(), run.best_hit_rate]
    return [_capacity(run), *(f"{rate:.2%}" for rate in rates)]


def _traffic_cells(run: Run) -> list[str]:
    return [
        _capacity(run),
        f"{run.evicted_blocks:,}",
        render.format_size(run.stored_bytes),
        render.format_size(run.loaded_bytes),
        f"{run.commits:,}",
        f"{run.wrong_blocks:,}",
        f"{run.seconds:.1f}",
    ]


def _capacity(run: Run) -> str:
    return "none" if run.capacity is None else render.format_size(run.capacity)
