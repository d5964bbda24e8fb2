"""The commands, one family a module. A new one is a module, or a function in one, and its line here.

A module is imported when its command is asked for: what each needs would add up to half a second of each start. So what
the list of all says of a command, the first sentence of its function's docstring, stands here once more.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple


class Listed(NamedTuple):
    """What is known of a command before it is imported."""

    place: str
    """Module and function."""
    summary: str


COMMANDS: dict[str, Listed] = {
    "ls": Listed("ls:ls", "List the requests that a store holds, newest first."),
    "stat": Listed("stat:stat", "Show what a store holds in total, how full it is, and what codecs and sharing save."),
    "show": Listed(
        "show:show", "Show one context: its packs and keys, its sizes, and what it shares with other requests."
    ),
    "top": Listed("top:top", "Watch engines at work on a store: hits, bytes each way, queues, evictions, breaker."),
    "report": Listed(
        "report:report", "Write a page about a store: ages, sizes, fill and hits over time, prefix tree, codecs."
    ),
    "verify": Listed(
        "verify:verify",
        "Read everything and check it.",
    ),
    "prune": Listed("prune:prune", "Delete requests, and the packs that only they use."),
    "pin": Listed(
        "pin:pin", "Keep a context: neither it nor its packs are evicted, nor do they expire, until it is unpinned."
    ),
    "unpin": Listed("pin:unpin", "Let a context be evicted again."),
    "label": Listed("label:label", "Tag a context, for ls, prune, export and push to find it by."),
    "warm": Listed("warm:warm", "Have engines read contexts into memory, those that run and those that start."),
    "why": Listed(
        "why:why", "Show why a store does or does not serve something: the fields in which identities differ."
    ),
    "doctor": Listed("doctor:doctor", "Check this machine, and a store, for what stands in the way."),
    "export": Listed("carry:export", "Write contexts to one file that any store can import."),
    "import": Listed(
        "carry:import_",
        "Verify all of a file of export, then write what it holds to a store, which is made where it is absent.",
    ),
    "push": Listed("carry:push_", "Copy what another store lacks; run it again where it was cut off."),
    "pull": Listed("carry:pull", "Copy what this store lacks and another one has: push, seen from the other end."),
    "move": Listed("move:move", "Move payloads to another placement, while engines use the store."),
    "bench": Listed(
        "bench:bench_",
        "Measure what this machine's disk or bucket gives persistkv, as ratios to its limits, with a verdict.",
    ),
    "replay": Listed(
        "replay:replay_",
        "Replay a trace against new stores of small blocks: hit rates by capacity and policy, requests, bytes.",
    ),
    "serve-metrics": Listed(
        "serve:serve_metrics", "Export a store's totals, and what its engines say of themselves, to Prometheus."
    ),
}
"""In the order of the help."""


def load_command(name: str) -> Callable[..., None]:
    """The function of a command."""
    module, _, function = COMMANDS[name].place.partition(":")
    command: Callable[..., None] = getattr(import_module(f"{__name__}.{module}"), function)
    return command
