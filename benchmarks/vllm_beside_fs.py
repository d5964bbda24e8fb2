"""vLLM engines with persistkv and with vLLM's own ``fs`` tier, in alternation, on the same disk and
the same prompts.

1. Both stores are filled with the same contexts. Their files are counted here, and again at the end
   with their bytes.
2. Page caches are dropped, engines restart and answer these contexts: time to first token, compared
   with an engine that computes.
3. Engines answer new prompts: generated tokens per second while stores are in flight, and CPU time
   beyond that of an engine with the CPU tier alone. (For CPU time per GB see
   ``benchmarks.vllm_fs``: here, an engine computes for minutes to make one GB, and this time
   varies.)
4. Bits of both stores are flipped, engines restart, and their answers are compared with the earlier
   ones.

vLLM's store is not synced, persistkv's is.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.raw_disk import drop_page_cache
from benchmarks.rig import median_interval, show_markdown, touch_memory
from benchmarks.vllm_rig import (
    ALONE,
    FS,
    OURS,
    Contestant,
    Field,
    Turn,
    add_options,
    field_of,
    prompts_of,
)

ALL = [ALONE, FS, OURS]
MAX_DISK = 0.75
# of a warm answer; with fewer, engines do not store the last blocks of a context
NEW_TOKENS = 8
_FLIP_EVERY = 4096


@dataclass
class Footprint:
    """Size of a store on disk."""

    num_bytes: int
    files: int

    @classmethod
    def of(cls, directory: Path) -> Footprint:
        """Measure a directory: bytes are allocated disk blocks, not lengths of files."""
        files = [path.stat() for path in directory.rglob("*") if path.is_file()]
        return cls(sum(status.st_blocks * 512 for status in files), len(files))


@dataclass
class Findings:
    """Results by contestant."""

    filled: dict[str, Footprint] = field(default_factory=dict)
    ended: dict[str, Footprint] = field(default_factory=dict)
    warm: dict[str, list[Turn]] = field(default_factory=lambda: defaultdict(list))
    """In the order of rounds and of prompts, which is the same for all contestants."""
    fresh: dict[str, list[Turn]] = field(default_factory=lambda: defaultdict(list))
    stored_mb: float = 0.0
    """MB that are stored in one turn of ``fresh``."""
    after_damage: dict[str, list[Turn]] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--contexts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2048, help="of a context")
    parser.add_argument("--rounds", type=int, default=2, help="restarts")
    parser.add_argument(
        "--turns",
        type=int,
        default=10,
        help="of prompts that nobody saw, of a quarter of the tokens",
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="in these turns")
    arguments = parser.parse_args()
    touch_memory(0.3)
    contexts = prompts_of(0, arguments.contexts, arguments.tokens)
    found = Findings()
    with field_of(arguments) as engines:
        for name in (FS, OURS):
            ask(engines, name, contexts)
            found.filled[name] = Footprint.of(engines.store(name))
        for number in range(arguments.rounds):
            restart(engines, contexts, found, number)
        answer_new_prompts(engines, found, arguments)
        for name in (FS, OURS):
            found.ended[name] = Footprint.of(engines.store(name))
            flip_bits(engines.store(name))
            found.after_damage[name] = ask(engines, name, contexts)
    report(found, arguments)


def ask(engines: Field, name: str, contexts: list[list[int]]) -> list[Turn]:
    """Start an engine, let it answer each context, and close it."""
    contestant = engines.start(name)
    turns = [contestant.turn([context], NEW_TOKENS) for context in contexts]
    contestant.close()
    return turns


def restart(
    engines: Field,
    contexts: list[list[int]],
    found: Findings,
    number: int,
) -> None:
    """Restart all engines, and measure one round of warm answers."""
    drop_page_cache([engines.store(FS), engines.store(OURS)])
    contestants = {name: engines.start(name) for name in ALL}
    for position, context in enumerate(contexts):
        for name in shuffled(1000 * number + position):
            found.warm[name].append(contestants[name].turn([context], NEW_TOKENS))
    close(contestants)


def answer_new_prompts(
    engines: Field,
    found: Findings,
    arguments: argparse.Namespace,
) -> None:
    """Measure turns of two batches; the stores of the first batch continue during the second."""
    contestants = {name: engines.start(name) for name in ALL}
    for number in range(arguments.turns + 1):
        for name in shuffled(number):
            prompts = prompts_of(number + 1, 4, arguments.tokens // 4)
            first = contestants[name].turn(
                prompts[:2], arguments.new_tokens, settle=False
            )
            second = contestants[name].turn(prompts[2:], arguments.new_tokens)
            if number:
                seconds, cpu = (
                    first.seconds + second.seconds,
                    first.cpu_seconds + second.cpu_seconds,
                )
                found.fresh[name].append(Turn(seconds, cpu, [], [], []))
    found.stored_mb = contestants[OURS].stored_bytes() / (arguments.turns + 1) / 1e6
    close(contestants)


def shuffled(seed: int) -> list[str]:
    """Return the contestants in an order that depends on the seed."""
    return random.Random(seed).sample(ALL, len(ALL))


def close(contestants: dict[str, Contestant]) -> None:
    """Close all contestants."""
    for contestant in contestants.values():
        contestant.close()


def flip_bits(store: Path) -> None:
    """Flip one bit in each 4 KiB of every file that holds KV; LMDB's own files, which are small,
    are left intact."""
    draw = random.Random(0)
    for path in sorted(
        path
        for path in store.rglob("*")
        if path.is_file() and path.suffix not in (".mdb", ".json")
    ):
        data = bytearray(path.read_bytes())
        if len(data) < _FLIP_EVERY:
            continue  # holds no KV
        for begin in range(0, len(data), _FLIP_EVERY):
            data[draw.randrange(begin, min(begin + _FLIP_EVERY, len(data)))] ^= (
                1 << draw.randrange(8)
            )
        path.write_bytes(data)


# The table


def report(found: Findings, arguments: argparse.Namespace) -> None:
    """Print the table."""
    show_markdown(
        f"vLLM with persistkv ({arguments.codec}) and with its own fs tier: "
        f"{arguments.contexts} contexts of "
        f"{arguments.tokens:,} tokens, {arguments.rounds} restarts, {arguments.turns} turns of "
        f"prompts that nobody saw",
        ["", "persistkv", "fs", "computed", "fs ÷ persistkv, 95 % interval", "target"],
        [
            *first_token(found),
            throughput(found, arguments),
            *processor(found),
            *footprint(found),
            damage(found),
        ],
    )


def first_token(found: Findings) -> list[list[str]]:
    """Return the rows: time to first token after a restart, and tokens that came from the store."""
    ttft = {name: [turn.ttft[0] for turn in found.warm[name]] for name in ALL}
    cached = {
        name: statistics.mean(turn.cached[0] for turn in found.warm[name])
        for name in ALL
    }
    row = [
        "TTFT after a restart",
        *(
            f"{statistics.median(ttft[name]) * 1e3:.0f} ms"
            for name in (OURS, FS, ALONE)
        ),
    ]
    tokens = [
        "tokens from the store, of each",
        *(f"{cached[name]:.0f}" for name in (OURS, FS, ALONE)),
        "",
        "",
    ]
    return [row + compared(ttft[FS], ttft[OURS]), tokens]


def compared(theirs: list[float], ours: list[float]) -> list[str]:
    """Return the interval of the median ratio of pairs, and the verdict on its target of at least
    1."""
    low, high = median_interval(
        [their / our for their, our in zip(theirs, ours, strict=True)]
    )
    verdict = "met" if low >= 1 else "not told apart" if high >= 1 else "MISSED"
    return [f"{low:.2f} to {high:.2f}", f"≥ 1: {verdict}"]


def throughput(found: Findings, arguments: argparse.Namespace) -> list[str]:
    """Return the row: generated tokens per second."""
    seconds = {name: [turn.seconds for turn in found.fresh[name]] for name in ALL}
    rates = {
        name: 4 * arguments.new_tokens / statistics.median(seconds[name])
        for name in ALL
    }
    row = [
        "generated tokens/s, stores in flight",
        *(f"{rates[name]:.1f}" for name in (OURS, FS, ALONE)),
    ]
    return row + compared(seconds[FS], seconds[OURS])


def processor(found: Findings) -> list[list[str]]:
    """Return the rows: CPU time of storing and of loading."""
    row = [
        f"processor, a turn that stores {found.stored_mb:.0f} MB: more than computing, %"
    ]
    for name in (OURS, FS):
        pairs = zip(found.fresh[name], found.fresh[ALONE], strict=True)
        more = [
            100 * (turn.cpu_seconds / alone.cpu_seconds - 1) for turn, alone in pairs
        ]
        low, high = median_interval(more)
        row.append(f"{statistics.median(more):+.1f} ({low:+.1f} to {high:+.1f})")
    requests = ["processor, a warm answer"]
    for name in (OURS, FS, ALONE):
        requests.append(
            f"{statistics.median(turn.cpu_seconds for turn in found.warm[name]):.2f} s"
        )
    return [[*row, "", "", ""], [*requests, "", ""]]


def footprint(found: Findings) -> list[list[str]]:
    """Return the rows: bytes and files on disk."""
    ours, theirs = found.ended[OURS], found.ended[FS]
    share = ours.num_bytes / theirs.num_bytes
    verdict = "met" if share <= MAX_DISK else "MISSED"
    return [
        [
            "on disk, at the end",
            *(f"{place.num_bytes / 1e6:.0f} MB" for place in (ours, theirs)),
            "",
            f"{1 / share:.2f}",
            f"{share:.2f} of fs, ≤ {MAX_DISK}: {verdict}",
        ],
        [
            "files, at first and at the end",
            *(
                f"{found.filled[name].files}, {found.ended[name].files}"
                for name in (OURS, FS)
            ),
            *("", "", ""),
        ],
    ]


def damage(found: Findings) -> list[str]:
    """Return the row: answers after the damage that neither the computing engine nor this store
    gave before."""
    row = ["wrong answers after bits were flipped"]
    for name in (OURS, FS):
        answers = found.after_damage[name]
        wrong = 0
        for position, turn in enumerate(answers):
            known = [
                each
                for who in (name, ALONE)
                for each in found.warm[who][position :: len(answers)]
            ]
            wrong += turn.tokens not in [each.tokens for each in known]
        row.append(f"{wrong} of {len(answers)}")
    return [*row, "", "", "0"]


if __name__ == "__main__":
    main()
