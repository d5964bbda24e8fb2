"""Cost of persistence when no KV is reused: ``benchmarks.persistence_overhead`` with 8 billion
parameters.

Two engines on one model answer new prompts in alternation, one with a store, one without. Two
slowdowns are given: that of the answers, and that of the answers including the wait until all
stores are durable. An engine would overlap this wait with the next requests.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.gpu.llama import KV_TOKEN_BYTES, make_llama
from benchmarks.gpu.results import Results, parse
from benchmarks.persistence_overhead import MAX_SLOWDOWN, host_stats
from benchmarks.rig import median_interval
from persistkv import Engine


class Turn(NamedTuple):
    """Seconds of the answers in one turn."""

    answers_s: float
    durable_s: float
    """Seconds including the wait until the stores are durable."""


def main(argv: Sequence[str] | None = None) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--seconds",
            type=float,
            default=55.0,
            help="after the start of the process, to end in",
        )
        parser.add_argument("--requests", type=int, default=2, help="of one turn")
        parser.add_argument("--tokens", type=int, default=4096, help="of one prompt")
        parser.add_argument("--new-tokens", type=int, default=32)

    arguments = parse(__doc__.splitlines()[0], argv, add)
    results = Results("cost of persistence", arguments)
    tokens = 96 if arguments.smoke else arguments.tokens
    model = make_llama(arguments.device, arguments.smoke)
    rows = (
        (64 << 20)
        if arguments.smoke
        else 2 * arguments.requests * tokens * KV_TOKEN_BYTES + (1 << 30)
    )
    draw = np.random.default_rng(0)
    turns: list[tuple[Turn, Turn]] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        url = f"lmdb://{directory}/store?capacity=32GiB"
        with (
            Engine.open(model, cpu_bytes=rows) as without,
            Engine.open(model, url, cpu_bytes=rows) as with_store,
        ):
            end = psutil.Process().create_time() + arguments.seconds
            pair_s = 0.0
            while not turns or (time.time() + pair_s < end and not arguments.smoke):
                begin = time.time()
                prompts = draw.integers(
                    0, model.config.vocab_size, (arguments.requests, tokens)
                ).tolist()
                order = (
                    [without, with_store] if len(turns) % 2 else [with_store, without]
                )
                taken = {
                    engine: run_turn(engine, prompts, arguments.new_tokens)
                    for engine in order
                }
                turns.append((taken[without], taken[with_store]))
                pair_s = time.time() - begin
            counters = host_stats(with_store).counters
            cpu_seconds = host_stats(with_store).cpu_seconds
    measured = turns[1:] or turns  # the first pair warms kernels, files and memory
    for name, field in (
        ("answers", "answers_s"),
        ("answers until durable", "durable_s"),
    ):
        ratios = [
            getattr(second, field) / getattr(first, field) - 1
            for first, second in measured
        ]
        low, high = median_interval(ratios)
        results.add(
            f"slowdown of {name}",
            statistics.median(ratios),
            at_most=MAX_SLOWDOWN if field == "answers_s" else None,
            interval_95=[round(low, 4), round(high, 4)],
            turn_without_s=statistics.median(
                getattr(first, field) for first, _ in measured
            ),
            pairs=len(measured),
            stored_gb=counters.stored_raw_bytes / 1e9,
            dropped_blocks=counters.dropped_blocks,
            host_cpu_s_per_gb=cpu_seconds / max(counters.stored_raw_bytes, 1) * 1e9,
        )


def run_turn(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Turn:
    """Answer some prompts, and wait until all their stores are durable.

    :raises TimeoutError: they did not become durable.
    """
    begin = time.perf_counter()
    for prompt in prompts:
        engine.generate(prompt, new_tokens)
    answered = time.perf_counter()
    if not engine.flush():
        raise TimeoutError("the contexts did not become durable")
    return Turn(answered - begin, time.perf_counter() - begin)


if __name__ == "__main__":
    main()
