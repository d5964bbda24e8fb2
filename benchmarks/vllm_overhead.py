"""Cost of persistence in a vLLM engine when no KV is reused, against the same engine with the CPU
tier alone.

Two engine processes differ in speed, whatever is behind their CPU tiers (once by 19 %), because of
the memory that each gets by chance. Therefore one engine has two connectors, of which one is active
at a time: one with the CPU tier alone, and one with persistkv behind its own CPU tier
(``vllm_switch``). Weights, KV tensors and their physical pages are the same. The cost of an idle
store is part of both turns, and is shown separately: CPU time of the host process while the engine
has no requests.

A pair is one turn of each connector, in changing order, with prompts that never repeat. A turn has
several consecutive batches, so that the stores of one batch continue during the next. The wait for
the remaining stores at the end of a turn is not in the time of the turn, but in its CPU time.

The engine restarts several times, and the connector that is built first changes. The interval is a
bootstrap over starts and, within each, over pairs. With ``--same``, neither connector has
persistkv, and the result is the measurement noise.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rig import (
    median_interval,
    nested_median_interval,
    show_markdown,
    touch_memory,
)
from benchmarks.vllm_rig import (
    ALONE,
    OURS,
    Field,
    Switched,
    add_options,
    field_of,
    prompts_of,
)

MAX_SLOWDOWN = 0.03
IDLE_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument(
        "--pairs",
        type=int,
        default=20,
        help="of turns for each start, after one that is not counted",
    )
    parser.add_argument("--batches", type=int, default=2, help="of one turn")
    parser.add_argument("--requests", type=int, default=2, help="of one batch")
    parser.add_argument("--tokens", type=int, default=512, help="of one prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--same", action="store_true", help="both have the CPU tier alone"
    )
    arguments = parser.parse_args()
    touch_memory(0.3)
    with field_of(arguments) as field:
        found = [
            one_start(field, number, arguments) for number in range(arguments.starts)
        ]
    report(found, arguments)


@dataclass(frozen=True)
class Pair:
    """Seconds of two turns, and CPU seconds until all stores have ended."""

    alone: float
    ours: float
    alone_cpu: float
    ours_cpu: float

    @property
    def slowdown(self) -> float:
        """Relative slowdown; 0.01 is one percent."""
        return self.ours / self.alone - 1

    @property
    def more_cpu(self) -> float:
        """Relative increase in CPU time."""
        return self.ours_cpu / self.alone_cpu - 1


@dataclass(frozen=True)
class Start:
    """Measurements of one engine from start to end."""

    pairs: list[Pair]
    stored_bytes: float
    """Bytes stored in one turn."""
    idle: float
    """Number of processors that the host process used while the engine had no requests."""
    in_calls: float
    """Additional time in calls of the tiered connector, relative to the time of all turns of the
    bare one."""


def one_start(field: Field, number: int, arguments: argparse.Namespace) -> Start:
    """Start an engine, alternate its two connectors, and close it.

    :param number: number of the start; prompts and order depend on it.
    """
    engine = field.start_both(
        ALONE if arguments.same else OURS, bare_first=number % 2 == 0
    )
    seeds = range(number * (arguments.pairs + 1), (number + 1) * (arguments.pairs + 1))
    before = engine.connector_seconds()
    pairs = [
        pair(engine, seed, arguments, ours_first=(number // 2 + seed) % 2 == 1)
        for seed in seeds
    ]
    alone, ours = (
        after - earlier
        for after, earlier in zip(engine.connector_seconds(), before, strict=True)
    )
    in_calls = (ours - alone) / sum(each.alone for each in pairs)
    start = Start(
        pairs[1:],
        engine.stored_bytes() / len(seeds),
        engine.idle_processors(IDLE_S),
        in_calls,
    )
    engine.close()
    slowdown = statistics.median(each.slowdown for each in start.pairs)
    print(
        f"start {number + 1}: {slowdown:+.2%}, in calls {start.in_calls:+.2%}, an idle store "
        f"{start.idle:.2%}",
        flush=True,
    )
    return start


def pair(
    engine: Switched,
    seed: int,
    arguments: argparse.Namespace,
    *,
    ours_first: bool,
) -> Pair:
    """Run a turn of each connector."""
    taken = {}
    for ours in (ours_first, not ours_first):
        engine.use(tiered=ours)
        taken[ours] = turn(engine, 2 * seed + ours, arguments)
    return Pair(taken[False][0], taken[True][0], taken[False][1], taken[True][1])


def turn(
    engine: Switched,
    seed: int,
    arguments: argparse.Namespace,
) -> tuple[float, float]:
    """Return the seconds of the batches, and the CPU seconds until all stores have ended."""
    seconds = spent = 0.0
    for batch in range(arguments.batches):
        prompts = prompts_of(
            seed * arguments.batches + batch, arguments.requests, arguments.tokens
        )
        done = engine.turn(
            prompts, arguments.new_tokens, settle=batch == arguments.batches - 1
        )
        seconds += done.seconds
        spent += done.cpu_seconds
    return seconds, spent


def report(found: Sequence[Start], arguments: argparse.Namespace) -> None:
    """Print the table."""
    pairs = [each for start in found for each in start.pairs]
    alone, ours = [each.alone for each in pairs], [each.ours for each in pairs]
    slowdowns, cpu = (
        [each.slowdown for each in pairs],
        [each.more_cpu for each in pairs],
    )
    low, high = nested_median_interval(
        [[each.slowdown for each in start.pairs] for start in found]
    )
    requests = arguments.batches * arguments.requests
    verdict = "met" if high <= MAX_SLOWDOWN else "MISSED"
    beside = (
        "the CPU tier alone"
        if arguments.same
        else f"persistkv ({arguments.codec}) behind its CPU tier"
    )
    show_markdown(
        f"vLLM with {beside}, and with the CPU tier alone: {len(found)} starts of "
        f"{arguments.pairs} pairs of "
        f"{requests} requests of {arguments.tokens:,} tokens, nothing reused",
        ["figure", "value", "target"],
        [
            ["one turn, CPU tier alone", f"{statistics.median(alone):.2f} s", ""],
            [
                "generated tokens/s, CPU tier alone",
                f"{rate(alone, requests, arguments):.1f}",
                "",
            ],
            [
                "generated tokens/s, persistkv",
                f"{rate(ours, requests, arguments):.1f}",
                "",
            ],
            ["slow-down, median", f"{statistics.median(slowdowns):+.2%}", ""],
            [
                "slow-down, 95 % interval",
                f"{low:+.2%} to {high:+.2%}",
                f"upper end ≤ {MAX_SLOWDOWN:.0%}: {verdict}",
            ],
            [
                "of it in the connector's calls",
                f"{statistics.median(start.in_calls for start in found):+.2%}",
                "",
            ],
            [
                "KV stored in one turn",
                f"{statistics.median(start.stored_bytes for start in found) / 1e6:.0f} MB",
                "",
            ],
            ["processor, all processes, more", f"{statistics.median(cpu):+.2%}", ""],
            [
                "the same, 95 % interval",
                "{:+.2%} to {:+.2%}".format(*median_interval(cpu)),
                "",
            ],
            [
                "processor, the store's process, nothing asked",
                f"{statistics.median(start.idle for start in found):.2%}",
                "",
            ],
        ],
    )


def rate(seconds: list[float], requests: int, arguments: argparse.Namespace) -> float:
    """Return the generated tokens per second."""
    return float(requests * arguments.new_tokens / statistics.median(seconds))


if __name__ == "__main__":
    main()
