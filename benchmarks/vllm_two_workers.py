"""Restart of a vLLM engine with two tensor-parallel workers: CPU tier alone, vLLM's ``fs`` tier,
persistkv.

Two workers and a scheduler spin on all processors of a small machine. A host process in a session
of its own once competed with them so badly that a restart did not end within four minutes. A round
is, for each tier in changing order: a new store, an engine that answers two prompts and ends, and
an engine that answers them again. The seconds of the second engine count from the start of its
first process to its last answer.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import time
from collections import defaultdict

from benchmarks.rig import show_markdown
from benchmarks.vllm_rig import (
    ALONE,
    FS,
    OURS,
    Field,
    add_options,
    field_of,
    prompts_of,
)

MOST_TIMES_FS = 1.1
_LOCKUP = "workqueue lockup"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024, help="of one prompt")
    arguments = parser.parse_args()
    names = [ALONE, FS, OURS]
    seconds: dict[str, list[float]] = defaultdict(list)
    ttft: dict[str, list[float]] = defaultdict(list)
    lockups = _lockups()
    with field_of(arguments) as field:
        for number in range(arguments.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                taken, first, cached = restart(
                    field, name, prompts_of(number, 2, arguments.tokens)
                )
                seconds[name].append(taken)
                ttft[name].append(first)
                print(
                    f"{name}: {taken:.1f} s, first token after {first:.3f} s, {cached} tokens "
                    f"reused",
                    flush=True,
                )
    times_fs = statistics.median(seconds[OURS]) / statistics.median(seconds[FS])
    show_markdown(
        f"Restart of an engine with two workers, {arguments.rounds} rounds, prompts of "
        f"{arguments.tokens:,} tokens",
        ["tier", "start and answers, s", "slowest, s", "first token, s"],
        [row(name, seconds[name], ttft[name]) for name in names],
    )
    verdict = "met" if times_fs <= MOST_TIMES_FS else "MISSED"
    print(f"persistkv ÷ fs: {times_fs:.2f} (target: {MOST_TIMES_FS}, {verdict})")
    print(f"reports of a workqueue lockup in the kernel's log: {_lockups() - lockups}")


def row(name: str, seconds: list[float], ttft: list[float]) -> list[str]:
    """Return a row of the table."""
    figures = (statistics.median(seconds), max(seconds), statistics.median(ttft))
    return [name, *(f"{figure:.2f}" for figure in figures)]


def restart(
    field: Field,
    name: str,
    prompts: list[list[int]],
) -> tuple[float, float, int]:
    """Return the seconds until the second engine's answers, until their first tokens, and reused
    tokens."""
    shutil.rmtree(field.store(name), ignore_errors=True)
    first = field.start_two_workers(name)
    answers = first.ask(do="measure", prompts=prompts, max_tokens=8)["tokens"]
    first.close()
    first.release()
    begin = time.monotonic()
    second = field.start_two_workers(name)
    found = second.ask(do="measure", prompts=prompts, max_tokens=8)
    taken = time.monotonic() - begin
    second.close()
    second.release()
    if found["tokens"] != answers:
        raise SystemExit(f"{name}: the restarted engine answers differently")
    return taken, statistics.mean(found["ttft"]), sum(found["cached"])


def _lockups() -> int:
    """Return how many lockups the kernel's log reports; 0 if it cannot be read."""
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    return log.count(_LOCKUP)


if __name__ == "__main__":
    main()
