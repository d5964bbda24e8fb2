"""What persistence costs a vLLM engine when nothing is ever reused, against one with the CPU tier alone.

Two engines on one model answer the same never-repeated prompts in turn. A pair is two turns, in changing order. A turn
is several batches, one after the other, so that what is stored of one goes on beside the next; what is left to be
stored at its end is waited for before the other engine has its turn, and is not in its time. It is in the processor's.

Two processes of one engine are not equally fast: that is their luck with memory. So both are started anew once half of
the pairs are through, in the other order.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass

from benchmarks.rig import median_interval, show_markdown, touch_memory
from benchmarks.vllm_rig import ALONE, OURS, Contestant, add_options, field_of, prompts_of

MAX_SLOWDOWN = 0.03
WARM_UP = 2  # pairs of engines that were just started, which are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batches", type=int, default=3, help="of one turn")
    parser.add_argument("--requests", type=int, default=2, help="of one batch")
    parser.add_argument("--tokens", type=int, default=512, help="of one prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    touch_memory(0.3)
    found: list[Pair] = []
    with field_of(arguments) as field:
        for half, order in enumerate(([ALONE, OURS], [OURS, ALONE])):
            contestants = {name: field.start(name) for name in order}
            seeds = range(half * arguments.pairs, half * arguments.pairs + arguments.pairs // 2 + WARM_UP)
            found += [pair(contestants, seed, arguments) for seed in seeds][WARM_UP:]
            stored = contestants[OURS].stored_bytes() / len(seeds) / 1e6
            for contestant in contestants.values():
                contestant.close()
    report(found, stored, arguments)


@dataclass(frozen=True)
class Pair:
    """Seconds of two turns with the same prompts, and seconds of processors until all is stored."""

    alone: float
    ours: float
    alone_cpu: float
    ours_cpu: float


def pair(contestants: dict[str, Contestant], seed: int, arguments: argparse.Namespace) -> Pair:
    """A turn of each, in an order of the seed's own."""
    taken = {name: turn(contestants[name], seed, arguments) for name in random.Random(seed).sample([ALONE, OURS], 2)}
    return Pair(taken[ALONE][0], taken[OURS][0], taken[ALONE][1], taken[OURS][1])


def turn(contestant: Contestant, seed: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds of its batches, and seconds of processors until all is stored."""
    seconds = spent = 0.0
    for batch in range(arguments.batches):
        prompts = prompts_of(seed * arguments.batches + batch, arguments.requests, arguments.tokens)
        done = contestant.turn(prompts, arguments.new_tokens, settle=batch == arguments.batches - 1)
        seconds += done.seconds
        spent += done.cpu_seconds
    return seconds, spent


def report(found: list[Pair], megabytes: float, arguments: argparse.Namespace) -> None:
    """Print the table.

    :param megabytes: stored in one turn.
    """
    alone, ours = [each.alone for each in found], [each.ours for each in found]
    cpu = [each.ours_cpu / each.alone_cpu - 1 for each in found]
    slowdowns = [each.ours / each.alone - 1 for each in found]
    low, high = median_interval(slowdowns)
    requests = arguments.batches * arguments.requests
    verdict = "met" if high <= MAX_SLOWDOWN else "MISSED"
    show_markdown(
        f"vLLM with persistkv ({arguments.codec}) behind its CPU tier, and with the CPU tier alone: {len(ours)} pairs "
        f"of {requests} requests of {arguments.tokens:,} tokens, nothing reused",
        ["figure", "value", "target"],
        [
            ["one turn, CPU tier alone", f"{statistics.median(alone):.2f} s", ""],
            ["generated tokens/s, CPU tier alone", f"{rate(alone, requests, arguments):.1f}", ""],
            ["generated tokens/s, persistkv", f"{rate(ours, requests, arguments):.1f}", ""],
            ["slow-down, median", f"{statistics.median(slowdowns):+.2%}", ""],
            ["slow-down, 95 % interval", f"{low:+.2%} to {high:+.2%}", f"upper end ≤ {MAX_SLOWDOWN:.0%}: {verdict}"],
            ["KV stored in one turn", f"{megabytes:.0f} MB", ""],
            ["processor, all processes, more", f"{statistics.median(cpu):+.2%}", ""],
            ["the same, 95 % interval", "{:+.2%} to {:+.2%}".format(*median_interval(cpu)), ""],
        ],
    )


def rate(seconds: list[float], requests: int, arguments: argparse.Namespace) -> float:
    """Generated tokens per second."""
    return float(requests * arguments.new_tokens / statistics.median(seconds))


if __name__ == "__main__":
    main()
