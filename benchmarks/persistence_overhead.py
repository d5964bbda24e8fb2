"""Cost of persistence when no KV is reused.

Two engines on one model answer the same never-repeated prompts in alternation, one with a
persistent tier behind the primary one, one without. A pair is one turn of each, in changing order.
A turn ends when all its stores are durable, so that no I/O of one turn overlaps the next; the wait
counts (a real engine would overlap it with the next request).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.rig import median_interval, show, touch_memory
from examples.demo.demo_worker import make_checkpoint
from persistkv import Engine
from persistkv.storage.host.protocol import HostStats

MAX_SLOWDOWN = 0.05


def turn(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    """Return the seconds of some requests, until all their stores are durable."""
    begin = time.perf_counter()
    for prompt in prompts:
        engine.generate(prompt, new_tokens)
    if not engine.flush():
        raise TimeoutError("the stored blocks did not become durable")
    return time.perf_counter() - begin


def host_stats(engine: Engine) -> HostStats:
    """Return the statistics of the host process."""
    (stats,) = engine.stats().persistent
    if stats.host is None:
        raise RuntimeError("the store did not answer")
    return stats.host


def cpu_seconds(engine: Engine) -> float:
    """Return the user and system time of the host process so far."""
    return host_stats(engine).cpu_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--requests", type=int, default=3, help="of one turn")
    parser.add_argument("--tokens", type=int, default=1024, help="of one prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--codec", default="raw")
    arguments = parser.parse_args()
    touch_memory()
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_checkpoint(model)
        url = f"lmdb://{directory}/store?capacity=32GiB"
        with (
            Engine.open(model) as without,
            Engine.open(model, url, codec=arguments.codec) as with_tier,
        ):
            ratios, seconds = [], []
            at_open = cpu_seconds(with_tier)
            for pair in range(arguments.pairs + 2):
                prompts = draw.integers(
                    0, 256, (arguments.requests, arguments.tokens)
                ).tolist()
                engines = [without, with_tier] if pair % 2 else [with_tier, without]
                taken = {
                    engine: turn(engine, prompts, arguments.new_tokens)
                    for engine in engines
                }
                if pair >= 2:
                    ratios.append(taken[with_tier] / taken[without] - 1)
                    seconds.append(taken[without])
            spent = cpu_seconds(with_tier) - at_open
            counters = host_stats(with_tier).counters
    low, high = median_interval(ratios)
    show(
        f"Cost of persistence, {len(ratios)} pairs of {arguments.requests} requests, nothing "
        f"reused",
        ["figure", "value", "target"],
        [
            ["one turn without the tier", f"{statistics.median(seconds):.2f} s", ""],
            ["slow-down, median", f"{statistics.median(ratios):+.1%}", ""],
            [
                "slow-down, 95 % interval",
                f"{low:+.1%} to {high:+.1%}",
                f"upper end <= {MAX_SLOWDOWN:.0%}",
            ],
            [
                "stored",
                f"{counters.stored_raw_bytes / 1e9:.2f} GB, {counters.dropped_blocks} blocks "
                f"dropped",
                "",
            ],
            [
                "CPU of the host process",
                f"{spent / counters.stored_raw_bytes * 1e9:.2f} s/GB",
                "",
            ],
        ],
    )


if __name__ == "__main__":
    main()
