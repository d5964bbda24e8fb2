"""The commands, one family a module. A new one is a module, or a function in one, and its line here.

A module is imported when its command is asked for: what each needs would add up to half a second of each start.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

COMMANDS: dict[str, str] = {
    "ls": "ls:ls",
    "stat": "stat:stat",
    "show": "show:show",
    "top": "top:top",
    "report": "report:report",
    "verify": "verify:verify",
    "prune": "prune:prune",
    "set": "set:set_",
    "pin": "pin:pin",
    "unpin": "pin:unpin",
    "label": "label:label",
    "warm": "warm:warm",
    "why": "why:why",
    "doctor": "doctor:doctor",
    "export": "carry:export",
    "import": "carry:import_",
    "push": "carry:push_",
    "pull": "carry:pull",
    "bench": "bench:bench_",
    "replay": "replay:replay_",
    "serve-metrics": "serve:serve_metrics",
}
"""Module and function of each, in the order of the help."""


def load_command(name: str) -> Callable[..., None]:
    """The function of a command."""
    module, _, function = COMMANDS[name].partition(":")
    command: Callable[..., None] = getattr(import_module(f"{__name__}.{module}"), function)
    return command
