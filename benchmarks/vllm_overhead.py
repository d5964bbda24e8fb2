"""What persistence costs a vLLM engine when nothing is ever reused, against one with the CPU tier alone.

Two engines on one model answer the same never-repeated prompts in turn. A pair is two turns, in changing order. A turn
is several batches, one after the other, so that what is stored of one goes on beside the next; what is left to be
stored at its end is waited for before the other engine has its turn, and is not in its time. It is in the processor's.

Two processes of one engine are not equally fast: that is their luck with memory, and more pairs of the same two do not
average it out. So both are started anew for every pair, in changing order, and the interval is a bootstrap over
starts. With ``--same`` the other engine has no tier of ours either: what is found then is noise.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rig import median_interval, show_markdown, touch_memory
from benchmarks.vllm_rig import ALONE, OURS, Contestant, Field, add_options, field_of, prompts_of

MAX_SLOWDOWN = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--starts", type=int, default=40, help="of both engines")
    parser.add_argument("--pairs", type=int, default=1, help="of turns for each start, after one that is not counted")
    parser.add_argument("--batches", type=int, default=2, help="of one turn")
    parser.add_argument("--requests", type=int, default=2, help="of one batch")
    parser.add_argument("--tokens", type=int, default=512, help="of one prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--same", action="store_true", help="both have the CPU tier alone")
    arguments = parser.parse_args()
    touch_memory(0.3)
    with field_of(arguments) as field:
        found = [one_start(field, number, arguments) for number in range(arguments.starts)]
    report(found, arguments)


@dataclass(frozen=True)
class Pair:
    """Seconds of two turns with the same prompts, and seconds of processors until all is stored."""

    alone: float
    ours: float
    alone_cpu: float
    ours_cpu: float


@dataclass(frozen=True)
class Start:
    """What two engines did between their start and their end."""

    pairs: list[Pair]
    stored_bytes: float
    """In one turn."""

    @property
    def slowdown(self) -> float:
        """The median of its pairs'."""
        return statistics.median(each.ours / each.alone - 1 for each in self.pairs)

    @property
    def more_cpu(self) -> float:
        """The same of the processors' time."""
        return statistics.median(each.ours_cpu / each.alone_cpu - 1 for each in self.pairs)


def one_start(field: Field, number: int, arguments: argparse.Namespace) -> Start:
    """Start both, let them take turns, end them.

    :param number: of the start; prompts and order depend on it.
    """
    kinds = {ALONE: ALONE, OURS: ALONE if arguments.same else OURS}
    contestants = {name: field.start(kinds[name]) for name in ([ALONE, OURS], [OURS, ALONE])[number % 2]}
    seeds = range(number * (arguments.pairs + 1), (number + 1) * (arguments.pairs + 1))
    pairs = [pair(contestants, seed, arguments, first=(number // 2 + seed) % 2) for seed in seeds][1:]
    stored = contestants[OURS].stored_bytes() / len(seeds)
    for contestant in contestants.values():
        contestant.close()
    start = Start(pairs, stored)
    print(f"start {number + 1}: {start.slowdown:+.2%}, processors {start.more_cpu:+.2%}", flush=True)
    return start


def pair(contestants: dict[str, Contestant], seed: int, arguments: argparse.Namespace, first: int) -> Pair:
    """A turn of each.

    :param first: 0 or 1: whose is first.
    """
    order = ([ALONE, OURS], [OURS, ALONE])[first]
    taken = {name: turn(contestants[name], seed, arguments) for name in order}
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


def report(found: Sequence[Start], arguments: argparse.Namespace) -> None:
    """Print the table."""
    pairs = [each for start in found for each in start.pairs]
    alone, ours = [each.alone for each in pairs], [each.ours for each in pairs]
    slowdowns, cpu = [start.slowdown for start in found], [start.more_cpu for start in found]
    low, high = median_interval(slowdowns)
    requests = arguments.batches * arguments.requests
    verdict = "met" if high <= MAX_SLOWDOWN else "MISSED"
    beside = "the CPU tier alone" if arguments.same else f"persistkv ({arguments.codec}) behind its CPU tier"
    show_markdown(
        f"vLLM with {beside}, and with the CPU tier alone: {len(found)} starts of {arguments.pairs} pairs of "
        f"{requests} requests of {arguments.tokens:,} tokens, nothing reused",
        ["figure", "value", "target"],
        [
            ["one turn, CPU tier alone", f"{statistics.median(alone):.2f} s", ""],
            ["generated tokens/s, CPU tier alone", f"{rate(alone, requests, arguments):.1f}", ""],
            ["generated tokens/s, persistkv", f"{rate(ours, requests, arguments):.1f}", ""],
            ["slow-down, median", f"{statistics.median(slowdowns):+.2%}", ""],
            ["slow-down, 95 % interval", f"{low:+.2%} to {high:+.2%}", f"upper end ≤ {MAX_SLOWDOWN:.0%}: {verdict}"],
            ["KV stored in one turn", f"{statistics.median(start.stored_bytes for start in found) / 1e6:.0f} MB", ""],
            ["processor, all processes, more", f"{statistics.median(cpu):+.2%}", ""],
            ["the same, 95 % interval", "{:+.2%} to {:+.2%}".format(*median_interval(cpu)), ""],
        ],
    )


def rate(seconds: list[float], requests: int, arguments: argparse.Namespace) -> float:
    """Generated tokens per second."""
    return float(requests * arguments.new_tokens / statistics.median(seconds))


if __name__ == "__main__":
    main()
