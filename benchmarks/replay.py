"""Replay of a production trace on a real LMDB store that is too small for it: share of the blocks
that are found again.

For each request, the benchmark looks up its chain of blocks, loads the longest held prefix (and
compares the bytes), then stores the whole context and ends the request, as an engine without a
primary tier would. The stored blocks are small and synthetic, one for each 512-token block of the
trace. The capacity in bytes is that of the stated share of all distinct blocks, payload only:
index, manifests and padding must fit in as well; the column ``not blocks`` shows their share. A
pack holds at most ``--pack-blocks`` blocks, because real blocks of 512 tokens are large (see
``benchmarks.trace_replay``).

The hit rates are compared with simulated caches of whole blocks that need no space for anything
else (``trace_policies.py``): LRU with the nominal number of blocks; LRU with as many blocks as the
store held (the median over the second half), which separates the cost of eviction order from the
cost of space; the best possible cache; and other policies.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.rig import show
from benchmarks.trace_policies import OTHER_POLICIES, clairvoyant_hits, lru_hits
from benchmarks.trace_replay import (
    PACK_BLOCKS,
    Replayed,
    Request,
    distinct_blocks,
    read_trace,
    replay,
)

CONVERSATION = Path(__file__).parent / "data" / "conversation.jsonl.xz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--trace",
        type=Path,
        default=CONVERSATION,
        help="in Mooncake's form, plain or .xz",
    )
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument(
        "--block-kib",
        type=int,
        nargs="+",
        default=[64],
        help="real ones have 6 MiB and more",
    )
    parser.add_argument(
        "--pack-blocks",
        type=int,
        nargs="+",
        default=[PACK_BLOCKS],
        help="in a pack at most; 0: no bound of its own",
    )
    parser.add_argument(
        "--share",
        type=float,
        nargs="+",
        default=[0.1, 0.25, 0.5],
        help="of the distinct blocks",
    )
    parser.add_argument(
        "--options",
        nargs="+",
        default=[""],
        help="further options of the URL, e.g. placement=extents",
    )
    parser.add_argument(
        "--directory", help="where the store is made; a temporary directory by default"
    )
    arguments = parser.parse_args()
    requests = read_trace(arguments.trace, arguments.requests)
    asked, distinct = sum(map(len, requests)), distinct_blocks(requests)
    rows = []
    variants = product(
        arguments.share, arguments.block_kib, arguments.pack_blocks, arguments.options
    )
    for share, block_kib, pack_blocks, options in variants:
        blocks, block_bytes = int(distinct * share), block_kib << 10
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            url = (
                f"lmdb://{directory}/store?capacity={blocks * block_bytes}"
                + f"&{options}" * bool(options)
            )
            run = Replayed(url, blocks * block_bytes, blocks)
            found = replay(requests, run, block_bytes, pack_blocks=pack_blocks)
        name = f"{share:.0%}, {block_kib} KiB {options}".rstrip()
        rows.append([name, str(pack_blocks or "request"), *columns_of(found, requests)])
        print(*rows[-1], flush=True)
    title = (
        f"{len(requests):,} requests, {asked:,} blocks, {distinct:,} distinct; unbounded "
        f"{1 - distinct / asked:.2%}"
    )
    columns = [
        "capacity, block",
        "pack",
        "blocks: nominal, held",
        "not blocks",
        "prefix hits",
    ]
    columns += ["LRU, nominal", "LRU, held", "best possible"]
    show(
        title,
        [*columns, "points against LRU", "÷ best", "not served", "on disk ÷ capacity"],
        rows,
    )
    columns = ["blocks", *(name.upper() for name in OTHER_POLICIES)]
    sizes = sorted({int(distinct * share) for share in arguments.share})
    show(
        "hits of caches of whole blocks, by policy",
        columns,
        [policy_cells(requests, blocks) for blocks in sizes],
    )


def columns_of(found: Replayed, requests: Sequence[Request]) -> list[str]:
    """Return the cells of one replay, and of caches with the nominal and the held number of whole
    blocks."""
    asked = sum(map(len, requests))
    blocks, held = found.nominal_blocks, found.held_blocks
    lru, best = lru_hits(requests, blocks), clairvoyant_hits(requests, blocks)
    return [
        f"{blocks:,}, {held:,}",
        f"{1 - held / blocks:.2%}",
        f"{found.hits / asked:.2%}",
        f"{lru / asked:.2%}",
        f"{lru_hits(requests, held) / asked:.2%}",
        f"{best / asked:.2%}",
        f"{100 * (found.hits - lru) / asked:+.2f}",
        f"{found.hits / max(1, best):.3f}",
        f"{found.wrong_blocks}",
        f"{found.disk_bytes / (found.capacity or 1):.4f}",
    ]


def policy_cells(requests: Sequence[Request], blocks: int) -> list[str]:
    """Return the hit rates of caches of ``blocks`` whole blocks with the other policies."""
    asked = sum(map(len, requests))
    return [
        f"{blocks:,}",
        *(f"{hits(requests, blocks) / asked:.2%}" for hits in OTHER_POLICIES.values()),
    ]


if __name__ == "__main__":
    main()
