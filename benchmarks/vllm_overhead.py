"""What persistence costs a vLLM engine when nothing is ever reused, against one with the CPU tier alone.

Two engines on one model answer the same never-repeated prompts in turn. A pair is two turns, in changing order. A turn
is several batches, one after the other, so that what is stored of one goes on beside the next; what is left to be
stored at its end is waited for before the other engine has its turn, and is not in its time. It is in the processor's.
"""

from __future__ import annotations

import argparse
import random
import statistics

from benchmarks.rig import median_interval, show_markdown, touch_memory
from benchmarks.vllm_rig import ALONE, OURS, Contestant, add_options, field_of, prompts_of

MAX_SLOWDOWN = 0.03
WARM_UP = 2  # pairs that are not counted


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
    alone, ours, cpu = [], [], []
    with field_of(arguments) as field:
        contestants = {name: field.start(name) for name in (ALONE, OURS)}
        for pair in range(arguments.pairs + WARM_UP):
            taken = {}
            for name in random.Random(pair).sample([ALONE, OURS], 2):
                taken[name] = turn(contestants[name], pair, arguments)
            if pair >= WARM_UP:
                alone.append(taken[ALONE][0])
                ours.append(taken[OURS][0])
                cpu.append(taken[OURS][1] / taken[ALONE][1] - 1)
        stored = contestants[OURS].stored_bytes() / (arguments.pairs + WARM_UP) / 1e6
        for contestant in contestants.values():
            contestant.close()
    report(alone, ours, cpu, stored, arguments)


def turn(contestant: Contestant, pair: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds of its batches, and seconds of processors until all is stored."""
    seconds = spent = 0.0
    for batch in range(arguments.batches):
        prompts = prompts_of(pair * arguments.batches + batch, arguments.requests, arguments.tokens)
        done = contestant.turn(prompts, arguments.new_tokens, settle=batch == arguments.batches - 1)
        seconds += done.seconds
        spent += done.cpu_seconds
    return seconds, spent


def report(
    alone: list[float], ours: list[float], cpu: list[float], megabytes: float, arguments: argparse.Namespace
) -> None:
    """Print the table.

    :param cpu: by how much more processor time the turn with persistkv took than the other one, as a share of it.
    :param megabytes: stored in one turn.
    """
    slowdowns = [mine / theirs - 1 for mine, theirs in zip(ours, alone, strict=True)]
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
