"""The manual page of ``persistkv``, made from the help of the commands."""

from __future__ import annotations

import re
from argparse import Action, ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from inspect import getdoc

from persistkv import __version__
from persistkv_tools.command import STORE_VARIABLE, Command, usage_of
from persistkv_tools.names import FILE

_EXIT_CODES = {
    "0": "Done.",
    "1": "The command found something; its description says what.",
    "2": "Bad input. One line on standard error names it.",
    "3": "The store cannot be opened, reached or written, or the output cannot be written.",
    "130": "Interrupted (Ctrl-C).",
    "141": "The output was closed.",
}
_ENVIRONMENT = {
    STORE_VARIABLE: "The store of commands that are given none: a URL, a path or a name.",
    "PERSISTKV_COMPLETE": "Set by the shell to complete a command line; see --completion.",
}
_FILES = {
    f"$XDG_CONFIG_HOME/{FILE}": 'Names of stores: lines NAME = "URL" below [stores]. '
    "The directory is ~/.config by default.",
}


def manual(
    commands: Mapping[str, Callable[[], Command]],
    options: ArgumentParser,
) -> str:
    """Return the page in the format of man(1).

    :param commands: functions that return the commands, by name.
    :param options: parser of the options that need no command.
    """
    parts = [
        f'.TH PERSISTKV 1 "" "persistkv {__version__}" "User Commands"',
        ".SH NAME",
        r"persistkv \- inspect, check, limit and copy stores of KV caches",
        ".SH SYNOPSIS",
        r".B persistkv",
        r"\fICOMMAND\fR [\fIoptions\fR]",
        ".SH DESCRIPTION",
        _escape(options.description or ""),
        *_options(options),
        ".SH COMMANDS",
    ]
    # the help of each command, so that the page cannot differ from it
    for name, load in commands.items():
        parts += _command(name, load())
    sections = {
        "EXIT STATUS": _EXIT_CODES,
        "ENVIRONMENT": _ENVIRONMENT,
        "FILES": _FILES,
    }
    for title, entries in sections.items():
        parts.append(f".SH {title}")
        for term, text in entries.items():
            parts += _entry(term, text)
    return "\n".join(parts) + "\n"


def _command(name: str, command: Command) -> Iterator[str]:
    """Yield the lines of the manual page about one command."""
    yield f".SS {_escape(usage_of(name, command))}"
    for paragraph in (getdoc(command.function) or "").split("\n\n"):
        yield ".PP"
        yield _escape(" ".join(paragraph.split()))
    for positional in command.positionals:
        yield from _entry(positional.metavar, positional.help)
    yield from _options(command.parser(name))


def _options(parser: ArgumentParser) -> Iterator[str]:
    """Yield the lines of the manual page about the options of a parser."""
    actions: list[Action] = parser._actions  # argparse has no public list of them
    for action in actions:
        # an argument without a name is no option
        if not action.option_strings:
            continue
        names = ", ".join(action.option_strings)
        # a flag takes no value
        is_flag = action.nargs == 0
        if not is_flag:
            names += f" {action.metavar}"
        yield from _entry(names, action.help or "")


def _entry(term: str, text: str) -> Iterator[str]:
    """Yield the lines of a term in bold with its indented text."""
    yield ".TP"
    yield rf"\fB{_escape(term)}\fR"
    yield _escape(text)


def _escape(text: str) -> str:
    """Return a text with the characters escaped that roff would interpret: backslashes, dashes
    (roff prints a hyphen for them), and a dot or quote that begins the line (a roff command)."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^([.'])", r"\\&\1", escaped)
