"""Whether loading KV makes a request of vLLM slower than computing it: ``python -m
benchmarks.vllm_never_slower``.

Three engines on one store, which differ in ``load_policy``, serve the same prompts in turn. The
store holds the prompts, and no engine has seen them before. Its medium is a directory that delays
reads (``benchmarks.delayed_medium``). Each medium has engines of its own, which know nothing of the
store at first. Printed, for each medium:

1. for each length of the prompt, the median time to the first token of each policy, and that of
   ``auto`` divided by the better of the others, after the warm-up;
2. the same for the requests of the warm-up, the first ones of an engine: the sum of their times.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.delayed_medium import install, set_delay
from benchmarks.rig import ratio_interval, show_markdown
from benchmarks.vllm_rig import Contestant, Field, add_options, field_of, prompts_of
from tests.integrations.vllm.engines import PROGRAM

POLICIES = ("always", "never", "auto")
LENGTHS = (256, 512, 1024, 2048)
CPU_TIER_BYTES = 64 << 20  # 64 MiB
COMMIT_S = 5.0


class Medium(NamedTuple):
    """A medium, from fast to slow."""

    name: str
    latency_s: float
    bandwidth: float
    """Bytes per second."""


MEDIA = (
    Medium("fast directory", 0.0, 1e9),
    Medium("bucket, 100 ms, 100 MB/s", 0.1, 1e8),
    Medium("bucket, 500 ms, 10 MB/s", 0.5, 1e7),
)


class Served(NamedTuple):
    """Times to the first token of the same prompts, by policy."""

    ttft: dict[str, list[float]]
    cached: list[int]
    """Tokens that ``auto`` has loaded of each prompt."""

    def median(self, policy: str) -> float:
        return statistics.median(self.ttft[policy])

    @property
    def better(self) -> str:
        """The reference with the smaller median."""
        return min(("always", "never"), key=self.median)


class Case(NamedTuple):
    """One length of the prompts on one medium."""

    medium: Medium
    length: int
    first: Served
    """The warm-up."""
    later: Served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--prompts", type=int, default=7, help="of a length")
    parser.add_argument(
        "--warm-ups", type=int, default=3, help="prompts of a length before those"
    )
    parser.add_argument(
        "--media", type=int, nargs="*", default=range(len(MEDIA)), help="by number"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as site:
        install(Path(site))
        earlier = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{site}:{Path.cwd()}:{earlier}"
        with field_of(arguments) as field:
            cases = _run(field, arguments)
    _report(cases)


def _run(field: Field, arguments: argparse.Namespace) -> list[Case]:
    store = field.store("delayed")
    set_delay(store, 0.0, 1e9)
    seeds = itertools.count(1000)
    count = arguments.warm_ups + arguments.prompts
    prompts = {length: prompts_of(next(seeds), count, length) for length in LENGTHS}
    writer = _start(field, store, "never", "writer")
    for prompt in itertools.chain.from_iterable(prompts.values()):
        writer.turn([prompt], 8, settle=False)
    writer.close()

    cases = []
    for number in arguments.media:
        medium = MEDIA[number]
        set_delay(store, 0.0, 1e9)
        engines = {}
        for policy in POLICIES:
            engines[policy] = _start(field, store, policy, f"{policy}-{number}")
        time.sleep(COMMIT_S)
        set_delay(store, medium.latency_s, medium.bandwidth)
        first = _serve(engines, prompts, range(arguments.warm_ups))
        later = _serve(engines, prompts, range(arguments.warm_ups, count))
        for length in LENGTHS:
            cases.append(Case(medium, length, first[length], later[length]))
        for engine in engines.values():
            engine.close()
        print(f"{medium.name}: done", flush=True)
    return cases


def _start(field: Field, store: Path, policy: str, name: str) -> Contestant:
    tier = {"type": "persistkv", "url": f"delayed://{store}", "load_policy": policy}
    engine = field.start_engine(name, [tier], cpu_bytes=CPU_TIER_BYTES, program=PROGRAM)
    contestant = Contestant(engine)
    # the kernels, and the speed of prefills: prompts that no other engine has stored
    first_seed = 10 * sum(name.encode())
    for seed in range(first_seed, first_seed + 4):
        contestant.turn(prompts_of(seed, 1, 1024), 4, settle=False)
    return contestant


def _serve(
    engines: dict[str, Contestant],
    prompts: dict[int, list[list[int]]],
    numbers: range,
) -> dict[int, Served]:
    """Serve the prompts with these numbers, one of each length in turn; return the times by
    length."""
    served = {}
    for length in prompts:
        served[length] = Served({policy: [] for policy in POLICIES}, [])
    for number, length in itertools.product(numbers, prompts):
        first = number % len(POLICIES)
        for policy in (*POLICIES[first:], *POLICIES[:first]):
            prompt = prompts[length][number]
            turn = engines[policy].turn([prompt], 1, settle=False)
            served[length].ttft[policy] += turn.ttft
            if policy == "auto":
                served[length].cached.extend(turn.cached)
    return served


def _report(cases: Sequence[Case]) -> None:
    rows = []
    for case in cases:
        later = case.later
        ratio = later.median("auto") / later.median(later.better)
        low, high = ratio_interval(later.ttft["auto"], later.ttft[later.better])
        num_loaded = sum(1 for tokens in later.cached if tokens)
        row = [case.medium.name, f"{case.length:,}"]
        row += [f"{1e3 * later.median(policy):.0f} ms" for policy in POLICIES]
        row += [f"{ratio:.2f}", f"{low:.2f} to {high:.2f}"]
        row.append(f"{num_loaded} of {len(later.cached)}")
        rows.append(row)
    show_markdown(
        "Time to the first token of stored prompts, median",
        ["medium", "tokens", *POLICIES, "auto ÷ better", "95 %", "loaded by auto"],
        rows,
    )
    rows = []
    for name, of_medium in itertools.groupby(cases, lambda case: case.medium.name):
        rows.append([name, *_first_requests([case.first for case in of_medium])])
    show_markdown(
        "The first requests of an engine",
        ["medium", "requests", "auto, sum", "better of each, sum", "auto ÷ better"],
        rows,
    )


def _first_requests(lengths: Sequence[Served]) -> list[str]:
    """Return the number of requests, the seconds of ``auto``, those of the policy that is better at
    each length, and their ratio."""
    auto_s = better_s = 0.0
    count = 0
    for served in lengths:
        count += len(served.cached)
        auto_s += sum(served.ttft["auto"])
        better_s += sum(served.ttft[served.better])
    ratio = auto_s / better_s
    return [f"{count}", f"{auto_s:.2f} s", f"{better_s:.2f} s", f"{ratio:.2f}"]


if __name__ == "__main__":
    main()
