"""Fuzz the parsers of stored bytes with damaged packs, manifests and frames.

    python -m tests.fuzz [--cases 100000] [--seed 0] [--limit-s 300] [--target codec ...]

Hypothesis generates the damage and shrinks failing cases. A case fails if it crashes, hangs, serves
wrong bytes, or allocates memory only because its input claims a size. ``python -m
tests.fuzz.guided`` does the same with coverage guidance.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from tests.fuzz.edits import KINDS, MAX_EDITS, MAX_INDEX, Edit, apply_edits
from tests.fuzz.targets import TARGETS, Target, loop_and_threads

HEADROOM_BYTES = (
    256 << 20
    # 256 MiB above the process's address space at the start: a large claimed length does not fit
)
HANG_S = 150.0  # seconds; a round normally takes about one second
# cases per run of Hypothesis: beyond that, tracking of tried cases costs more than the cases
ROUND = 500


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=300.0, help="time limit")
    parser.add_argument(
        "--target", nargs="+", choices=[target.name for target in TARGETS]
    )
    arguments = parser.parse_args()
    targets = [
        target
        for target in TARGETS
        if not arguments.target or target.name in arguments.target
    ]
    logging.disable(logging.CRITICAL)
    loop_and_threads()  # their address space is not the cases'
    _limit_memory()
    started = time.monotonic()
    counts = fuzz(targets, arguments.cases, arguments.seed, arguments.limit_s)
    seconds = time.monotonic() - started
    for target in targets:
        accepted = counts[target.name, True]
        total = accepted + counts[target.name, False]
        sys.stdout.write(f"{target.name}: {total} cases, {accepted} accepted\n")
    total = sum(counts.values())
    sys.stdout.write(
        f"{total} cases in {seconds:.0f} s, seed {arguments.seed}: nothing found\n"
    )


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(
        resource.RLIMIT_AS, (used + HEADROOM_BYTES, resource.RLIM_INFINITY)
    )


def fuzz(
    targets: list[Target],
    cases: int,
    seed: int,
    seconds: float,
) -> Counter[tuple[str, bool]]:
    """Generate and check ``cases`` cases, or as many as the time limit allows.

    :returns: number of cases by target name and by whether the input was accepted.
    """
    counts: Counter[tuple[str, bool]] = Counter()
    edits = st.lists(
        st.builds(
            Edit,
            st.sampled_from(KINDS),
            st.integers(0, MAX_INDEX),
            st.integers(0, MAX_INDEX),
        ),
        max_size=MAX_EDITS,
    )

    @hypothesis.settings(
        max_examples=ROUND,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        st.sampled_from(targets), st.integers(0, MAX_INDEX), edits, st.booleans()
    )
    def check(target: Target, number: int, changes: list[Edit], sealed: bool) -> None:
        number %= len(target.samples)
        accepted = target.check(
            number, apply_edits(target.samples[number], changes), sealed
        )
        counts[target.name, accepted] += 1

    round_number = 0
    deadline = time.monotonic() + seconds
    while sum(counts.values()) < cases and time.monotonic() < deadline:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        hypothesis.seed(seed * 1_000_003 + round_number)(check)()
        round_number += 1
    faulthandler.cancel_dump_traceback_later()
    return counts


if __name__ == "__main__":
    main()
