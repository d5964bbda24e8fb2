"""Whether loading KV makes a request of vLLM slower than computing it: ``python -m
benchmarks.vllm_never_slower``.

Three engines on one store, which differ in ``load_policy``, serve the same prompts in turn. The
store holds the prompts, and no engine has seen them before. Its medium is a directory that delays
reads (``benchmarks.delayed_medium``). Printed, for each medium and length of the prompt: the median
time to the first token of each policy, and that of ``auto`` divided by the better of the others.
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
from benchmarks.rig import show_markdown
from benchmarks.vllm_rig import Contestant, Field, add_options, field_of, prompts_of
from tests.integrations.vllm.engines import PROGRAM

POLICIES = ("always", "never", "auto")
LENGTHS = (256, 512, 1024, 2048)
WARM_UPS = 6  # prompts before those that count: the store's times are not known yet
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


class Case(NamedTuple):
    """The times to the first token of one length on one medium, by policy."""

    medium: Medium
    length: int
    ttft: dict[str, list[float]]
    cached: list[int]
    """Tokens that ``auto`` has loaded of each prompt."""

    def median(self, policy: str) -> float:
        return statistics.median(self.ttft[policy])

    @property
    def ratio(self) -> float:
        return self.median("auto") / min(self.median("always"), self.median("never"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--prompts", type=int, default=7, help="of a length")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as site:
        install(Path(site))
        os.environ["PYTHONPATH"] = f"{site}:{Path.cwd()}"
        with field_of(arguments) as field:
            cases = _run(field, arguments.prompts)
    _report(cases)


def _run(field: Field, num_prompts: int) -> list[Case]:
    store = field.store("delayed")
    set_delay(store, 0.0, 1e9)
    seeds = itertools.count(1000)
    prompts: dict[tuple[Medium, int], list[list[int]]] = {}
    for medium, length in itertools.product(MEDIA, LENGTHS):
        count = num_prompts + WARM_UPS // len(LENGTHS) + 1
        prompts[medium, length] = prompts_of(next(seeds), count, length)
    writer = _start(field, store, "never", "writer")
    for prompt in itertools.chain.from_iterable(prompts.values()):
        writer.turn([prompt], 8, settle=False)
    writer.close()

    engines = {policy: _start(field, store, policy, policy) for policy in POLICIES}
    time.sleep(COMMIT_S)
    cases = []
    for medium in MEDIA:
        set_delay(store, medium.latency_s, medium.bandwidth)
        of_medium = {length: prompts[medium, length] for length in LENGTHS}
        cases += _measure(engines, medium, of_medium, num_prompts)
        print(f"{medium.name}: done", flush=True)
    for engine in engines.values():
        engine.close()
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


def _measure(
    engines: dict[str, Contestant],
    medium: Medium,
    prompts: dict[int, list[list[int]]],
    num_prompts: int,
) -> list[Case]:
    for of_length in prompts.values():
        for prompt in of_length[num_prompts:]:
            for engine in engines.values():
                engine.turn([prompt], 1, settle=False)
    cases = []
    for length in prompts:
        ttft: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        cases.append(Case(medium, length, ttft, []))
    for number in range(num_prompts):
        for case in cases:
            prompt = prompts[case.length][number]
            first = number % len(POLICIES)
            for policy in (*POLICIES[first:], *POLICIES[:first]):
                turn = engines[policy].turn([prompt], 1, settle=False)
                case.ttft[policy] += turn.ttft
                if policy == "auto":
                    case.cached.extend(turn.cached)
    return cases


def _report(cases: Sequence[Case]) -> None:
    rows = []
    for case in cases:
        row = [case.medium.name, f"{case.length:,}"]
        row += [f"{1e3 * case.median(policy):.0f} ms" for policy in POLICIES]
        row += [f"{case.ratio:.2f}", f"{statistics.median(case.cached):,.0f}"]
        rows.append(row)
    show_markdown(
        "Time to the first token of stored prompts, median",
        ["medium", "tokens", *POLICIES, "auto ÷ better", "loaded by auto"],
        rows,
    )


if __name__ == "__main__":
    main()
