"""Commands of the command line: their arguments, and the options that several of them share."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from argparse import (
    SUPPRESS,
    ArgumentParser,
    ArgumentTypeError,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Mapping, Sequence
from inspect import getdoc
from typing import Any, NamedTuple

from persistkv.errors import ConfigurationError, MissingOptionError
from persistkv_tools.names import config_file, named_stores

STORE_VARIABLE = "PERSISTKV_STORE"
"""Environment variable with the URL of the store for commands that are given no URL."""
_WORDS = "words"


class Positional(NamedTuple):
    """An argument without a name."""

    name: str
    """Name of the parameter of the command's function that takes the value."""
    metavar: str
    help: str
    is_store: bool = False
    """Whether its value is a store: a URL, a path or a name. If it is left out, the value is the
    store that ``STORE_VARIABLE`` names."""
    is_many: bool = False
    """Whether it takes all remaining words. They may be none."""
    is_needed: bool = True
    """Whether its absence is an error. If False, the function gets None instead."""


URL = Positional(
    "url",
    "URL",
    "URL, e.g. lmdb:///var/cache/kv, path of an LMDB store, or name of a store.",
    is_store=True,
)
REQUEST = Positional(
    "request", "REQUEST", "Id of the request, or its first characters."
)
REQUESTS = Positional(
    "requests", "REQUEST", "Ids of requests, or their first characters.", is_many=True
)


class Command(NamedTuple):
    """A command. Its help is the docstring of its function."""

    function: Callable[..., None]
    """Runs the command. Its parameters have the names of the positional arguments and options."""
    positionals: tuple[Positional, ...] = (URL,)
    add_options: Callable[[ArgumentParser], None] = lambda parser: None

    def run(self, name: str, arguments: Sequence[str]) -> None:
        """Parse the arguments and call the function.

        :raises ConfigurationError: the positional arguments are wrong.
        :raises SystemExit: an option is wrong (2), or help was asked for (0).
        """
        # "intermixed" allows options between the positional arguments
        given = vars(self.parser(name).parse_intermixed_args(arguments))
        words = given.pop(_WORDS)
        self.function(**_assigned(name, self.positionals, words), **given)

    def parser(self, name: str) -> ArgumentParser:
        """Return the parser of the command's arguments."""
        parser = ArgumentParser(
            prog=f"persistkv {name}",
            usage=usage_of(name, self),
            description=_description(self.function, self.positionals),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # Take all positional arguments as one list, which ``_assigned`` divides. The first of
        # them, the store, may be left out, but argparse can leave out only the last one.
        parser.add_argument(_WORDS, nargs="*", help=SUPPRESS)
        self.add_options(parser)
        parser.add_argument(
            "--json", action="store_true", help="Print one JSON object; sizes in bytes."
        )
        return parser


def usage_of(name: str, command: Command) -> str:
    """Return the usage of a command on one line."""
    words = [_usage(positional) for positional in command.positionals]
    return " ".join([f"persistkv {name}", *words, "[options]"])


def summary(function: Callable[..., None]) -> str:
    """Return the first sentence of a command's help."""
    help_text = getdoc(function) or ""
    # a sentence ends with a full stop before a space or line break
    return re.split(r"(?<=\.)\s", help_text, maxsplit=1)[0]


def looks_like_store(word: str) -> bool:
    """Return whether an argument is the URL, the path or the name of a store, and no id of a
    request."""
    is_url = "://" in word
    is_path = word in (".", "..") or word.startswith(("/", "~", "./", "../"))
    return is_url or is_path or word in named_stores()


def store_of(words: Sequence[str]) -> str | None:
    """Return the URL or path of the first store among arguments, or of the store that the
    environment names; None: there is neither."""
    for word in words:
        if looks_like_store(word):
            return resolved(word)
    default = os.environ.get(STORE_VARIABLE)
    return None if default is None else resolved(default)


def number(
    least: int,
    most: int | None = None,
) -> Callable[[str], int]:
    """Return a type of options: whole numbers of at least ``least``, and at most ``most`` unless it
    is None."""

    def parse(text: str) -> int:
        """Return the number; raise ArgumentTypeError, which argparse shows, if it is invalid."""
        bound = f"from {least}" if most is None else f"from {least} to {most}"
        # text that is no number counts as -1, which is below every bound, and gets the same error
        value = int(text) if text.isdecimal() else -1
        if value < least or (most is not None and value > most):
            problem = f"{text!r} is not valid; expected a whole number {bound}"
            raise ArgumentTypeError(problem)
        return value

    return parse


def confirm(question: str) -> bool:
    """Ask a question on the terminal; return whether the answer is yes. The default is no.

    :raises KeyboardInterrupt: there is no answer.
    """
    try:
        answer = input(f"{question} [y/N]: ")
    except EOFError:  # Ctrl-D
        raise KeyboardInterrupt from None
    return answer.strip().lower() in ("y", "yes")


def add_flag(
    parser: ArgumentParser,
    name: str,
    help: str,
) -> None:
    parser.add_argument(name, action="store_true", help=help)


_SHARED: dict[str, dict[str, Any]] = {
    "--namespace": {
        "metavar": "ID",
        "help": "Only this namespace: its id, or the first digits.",
    },
    "--label": {
        "metavar": "NAME[=VALUE]",
        "action": "append",
        "help": "Only requests with this label; can be repeated.",
    },
    "--older-than": {
        "metavar": "AGE",
        "help": "Only requests older than this, e.g. 12h or 30d.",
    },
    "--newer-than": {
        "metavar": "AGE",
        "help": "Only requests younger than this, e.g. 12h or 30d.",
    },
    "--larger-than": {
        "metavar": "SIZE",
        "help": "Only requests with more raw bytes, e.g. 1GiB.",
    },
    "--never-hit": {
        "action": "store_true",
        "help": "Only requests that were never used after they were stored.",
    },
    "--expired": {
        "action": "store_true",
        "help": "Only requests whose ttl has passed, and that no commit has deleted yet.",
    },
    "--rate": {
        "metavar": "SIZE",
        "help": "Read at most this much per second, e.g. 200MiB.",
    },
    "--yes": {"action": "store_true", "help": "Do not ask for confirmation."},
}
"""Options that several commands have, each with its arguments of ``add_argument``."""
SELECTION = (
    "--namespace",
    "--label",
    "--older-than",
    "--larger-than",
    "--never-hit",
    "--expired",
)
"""Options that choose requests in lists and for deletion."""


def add_shared(parser: ArgumentParser, *names: str) -> None:
    """Add options that several commands have."""
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def ensure_consent(
    what: str,
    ways: str,
    *,
    yes: bool,
    json: bool,
) -> None:
    """Raise an error if the user has not consented (``yes``) and cannot be asked. Does not ask.

    :param what: command that needs consent, for the error.
    :param ways: options that give consent, for the error.
    """
    # with consent given, do not look at the terminal: a closed stdin is None
    if yes:
        return
    can_ask = sys.stdin is not None and sys.stdin.isatty() and not json
    if not can_ask:
        raise MissingOptionError(
            what, f"{ways}: it cannot ask without a terminal, or with --json"
        )


def filled_behind(
    name: str,
    text: str,
    width: int,
) -> str:
    """Return a text in lines of at most ``width`` characters: the first line begins with the name,
    and the others are indented as far."""
    return textwrap.fill(
        text,
        width,
        initial_indent=name,
        subsequent_indent=" " * len(name),
    )


def _usage(positional: Positional) -> str:
    """Return an argument as the usage shows it, in brackets if it may be left out."""
    if positional.is_many:
        return f"[{positional.metavar} ...]"
    if positional.is_needed:
        return positional.metavar
    return f"[{positional.metavar}]"


def _description(
    function: Callable[..., None],
    positionals: Sequence[Positional],
) -> str:
    """Return the help of a command, filled to the width of the terminal: the paragraphs of its
    docstring, then its positional arguments, which argparse does not know."""
    # argparse leaves the same margin in the lists of options
    width = shutil.get_terminal_size().columns - 2
    paragraphs = []
    for paragraph in (getdoc(function) or "").split("\n\n"):
        words = " ".join(paragraph.split())
        paragraphs.append(textwrap.fill(words, width))
    helps = []
    for positional in positionals:
        name = f"  {positional.metavar:<12}"
        helps.append(filled_behind(name, positional.help, width))
    return "\n\n".join([*paragraphs, "\n".join(helps)])


def _assigned(
    command: str,
    positionals: Sequence[Positional],
    words: list[str],
) -> Mapping[str, Any]:
    """Return the values of the positional arguments. A store that was left out is the one that the
    variable ``PERSISTKV_STORE`` names."""
    remaining = _with_default_store(positionals, words)
    values: dict[str, Any] = {}
    for positional in positionals:
        # an argument that takes all remaining words is the last one of its command
        if positional.is_many:
            values[positional.name] = remaining
            remaining = []
        elif remaining:
            word = remaining.pop(0)
            values[positional.name] = _checked(positional, word)
        elif positional.is_needed:
            raise MissingOptionError(command, _needed(positional))
        else:
            values[positional.name] = None
    if remaining:
        raise ConfigurationError("arguments", remaining[0], "no further argument")
    return values


def _with_default_store(
    positionals: Sequence[Positional],
    words: list[str],
) -> list[str]:
    """Return the words with each store's name or relative path replaced by its URL or absolute
    path. If fewer stores are given than the command takes, the store of the environment comes
    first."""
    num_stores = sum(positional.is_store for positional in positionals)
    stores: list[str] = []
    for word in words[:num_stores]:
        # stores come first: the first word that is none, such as an id, ends them
        if not looks_like_store(word):
            break
        stores.append(resolved(word))
    others = words[len(stores) :]
    default = os.environ.get(STORE_VARIABLE)
    if default and len(stores) < num_stores:
        stores.insert(0, resolved(default))
    return [*stores, *others]


def _checked(positional: Positional, word: str) -> str:
    """Return the word; raise ConfigurationError if the argument is a store and the word is none."""
    if positional.is_store and not looks_like_store(word):
        raise ConfigurationError("store", word, _expected_store(word))
    return word


def _needed(positional: Positional) -> str:
    """Return what the user must add if the argument is missing, for an error."""
    if positional is URL:
        return f"a store: a URL, a path, or the variable {STORE_VARIABLE}"
    return positional.metavar


def _expected_store(word: str) -> str:
    """Return what is expected instead of a word that names no store, for an error."""
    # in other programs, this word means standard input or output
    if word == "-":
        return (
            "a store: a file:// directory is the form to pack and send, e.g. with tar"
        )
    names = ", ".join(sorted(named_stores())) or "none"
    return (
        "scheme://location, a path that begins with /, ~ or ./, or a name from "
        f"{config_file()} (known: {names})"
    )


def resolved(word: str) -> str:
    """Return the URL of a store given by its name, or an absolute path instead of a relative one;
    any other word unchanged."""
    word = named_stores().get(word, word)
    if not word.startswith("."):
        return word
    # a path may end with options of the store: ./kv?option=value
    path, mark, query = word.partition("?")
    return os.path.abspath(path) + mark + query
