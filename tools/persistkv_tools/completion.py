"""Completion of command lines in the shell."""

from __future__ import annotations

import re
from collections.abc import Sequence

from persistkv.errors import PersistKVError
from persistkv.storage.inspection.requests import stored_requests
from persistkv_tools.command import Command, store_of
from persistkv_tools.names import named_stores
from persistkv_tools.options import opened

VARIABLE = "PERSISTKV_COMPLETE"
"""Environment variable that the shell sets to ask for completions of the last argument."""
SCRIPT = f"""\
_persistkv() {{
    local IFS=$'\\n'
    COMPREPLY=($({VARIABLE}=1 persistkv "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null))
}}
complete -o default -F _persistkv persistkv
"""
"""For bash; zsh runs it after ``autoload bashcompinit && bashcompinit``."""
_MOST = 100  # completions; more would fill the terminal


def completions(
    arguments: Sequence[str],
    commands: Sequence[str],
    command: Command | None,
) -> list[str]:
    """Return the words that the last argument may become.

    :param command: the command that the first argument names; None: it names none.
    """
    words = _with_whole_urls(arguments)
    prefix = words[-1]
    # complete the name of the command: it is missing, unfinished or unknown
    if len(words) < 2 or command is None:
        return _beginning_with(prefix, commands)
    if prefix.startswith("-"):
        return _beginning_with(prefix, _options(words[0], command))
    if _takes_request(command):
        # ids are read from a store: until one is given, complete the names of stores
        store = store_of(words[1:-1])
        if store is not None:
            return _beginning_with(prefix, _requests(store))[:_MOST]
    return _beginning_with(prefix, sorted(named_stores()))


def _beginning_with(prefix: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def _options(name: str, command: Command) -> list[str]:
    """Return the long options of a command, sorted."""
    # find the options in the help, because argparse has no public list of them
    shown = command.parser(name).format_help()
    return sorted(set(re.findall(r"--[a-z][a-z-]+", shown)))


def _with_whole_urls(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line. bash breaks words at colons: its three words "lmdb", ":"
    and "//path" are one URL."""
    lines = "\n".join(arguments)
    lines = lines.replace("\n:\n//", "://")
    return lines.split("\n")


def _takes_request(command: Command) -> bool:
    """Return whether an argument of the command is the id of a request, or several ids."""
    names = [positional.metavar for positional in command.positionals]
    return any(name.startswith("REQUEST") for name in names)


def _requests(url: str) -> list[str]:
    """Return the ids of all requests of a store, sorted; none if it cannot be read."""
    try:
        with opened(url) as backend:
            return sorted(found.manifest.id for found in stored_requests(backend))
    except PersistKVError:  # a completion has no place for an error
        return []
