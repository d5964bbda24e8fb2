"""The ``persistkv`` command.

Exit codes: 0 done; 1 a command found something (see its help); 2 bad input; 3 the store cannot be
opened, reached or written; 130 interrupted (Ctrl-C); 141 the output was closed. With 2 and 3, one
line on standard error says why.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from persistkv import __version__
from persistkv.errors import (
    HostError,
    PersistKVError,
    ProcessIdInUseError,
    StoreError,
    printable,
)
from persistkv_tools import completion, render
from persistkv_tools.command import Command, filled_behind, summary
from persistkv_tools.manual import manual

_BAD_INPUT = 2
_STORE_FAILED = 3
_INTERRUPTED = 130
_DEBUG = "--debug"
RETRY = 75
"""Exit code that asks ``entry`` to run the command again in another process (EX_TEMPFAIL)."""

COMMANDS: dict[str, str] = {
    "ls": "persistkv_tools.inspect.ls:COMMAND",
    "stat": "persistkv_tools.inspect.stat:COMMAND",
    "show": "persistkv_tools.inspect.show:COMMAND",
    "top": "persistkv_tools.inspect.top:COMMAND",
    "report": "persistkv_tools.inspect.report:COMMAND",
    "verify": "persistkv_tools.maintain.verify:COMMAND",
    "prune": "persistkv_tools.maintain.prune:COMMAND",
    "rebuild": "persistkv_tools.maintain.rebuild:COMMAND",
    "set": "persistkv_tools.maintain.set:COMMAND",
    "rotate-key": "persistkv_tools.maintain.rotate_key:COMMAND",
    "forget": "persistkv_tools.maintain.forget:COMMAND",
    "pin": "persistkv_tools.maintain.label:PIN",
    "unpin": "persistkv_tools.maintain.label:UNPIN",
    "label": "persistkv_tools.maintain.label:LABEL",
    "why": "persistkv_tools.inspect.why:COMMAND",
    "doctor": "persistkv_tools.inspect.doctor:COMMAND",
    "copy": "persistkv_tools.transfer.copy:COMMAND",
    "bench": "persistkv_tools.inspect.bench:COMMAND",
    "serve-metrics": "persistkv_tools.inspect.serve_metrics:COMMAND",
}
"""Module and name of each command, in the order of the help. A module is imported when its command
runs."""


def main(
    arguments: Sequence[str] | None = None,
    *,
    may_retry: bool = False,
) -> None:
    """Run the command line; always raises SystemExit, with an exit code from the list of this
    module.

    :param may_retry: exit with ``RETRY`` (75) if another process uses the store with this process's
        PID, so that the caller can run the command in another process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:  # the caller closed standard output (>&-)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    debug = _DEBUG in given
    _log_to_stderr(logging.DEBUG if debug else logging.WARNING)
    try:
        # the option is handled here, because it is accepted before and after the command
        _run([argument for argument in given if argument != _DEBUG])
        render.OUTPUT.flush()
    except KeyboardInterrupt:
        # without this handler, Python would print a traceback and end by SIGINT
        sys.stderr.write("persistkv: interrupted\n")
        sys.exit(_INTERRUPTED)
    except PersistKVError as error:
        if debug:
            _print_causes(error)
        if may_retry and isinstance(error, ProcessIdInUseError):
            sys.exit(RETRY)
        _exit_with(error)
    sys.exit(0)


def _log_to_stderr(level: int) -> None:
    """Print log messages of this level and above, of all libraries, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter())
    logging.basicConfig(handlers=[handler], level=level)


def _exit_with(error: PersistKVError) -> NoReturn:
    """Print the error, and exit with 3 if the store or the host is the cause, otherwise with 2."""
    # join the message to one line, because scripts and logs quote it
    message = printable(" ".join(str(error).split()))
    sys.stderr.write(f"persistkv: {message}\n")
    is_store = isinstance(error, (StoreError, HostError))
    sys.exit(_STORE_FAILED if is_store else _BAD_INPUT)


def _run(arguments: list[str]) -> None:
    """Run a command, or print the completions of the command line if a shell asks for them."""
    name = arguments[0] if arguments else ""
    command = _load(name) if name in COMMANDS else None
    if completion.VARIABLE in os.environ:
        # without an argument, complete an empty word: all commands begin with it
        words = completion.completions(arguments or [""], list(COMMANDS), command)
        lines = [f"{printable(word)}\n" for word in words]
        render.print_exact("".join(lines))
    elif command is not None:
        # ``entry`` let Ctrl-C end the process during imports; from here on, Ctrl-C raises
        # KeyboardInterrupt, so that the command can clean up
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command.run(name, arguments[1:])
    else:
        _run_without_command(arguments)


def _run_without_command(arguments: list[str]) -> None:
    """Run a command line that does not begin with the name of a command: one of the general
    options, or a mistake."""
    is_help = not arguments or not {"-h", "--help"}.isdisjoint(arguments)
    # make the summaries only for the help, because they import the modules of all commands
    parser = _general_parser(_summaries() if is_help else None)
    # these two options are handled here, because argparse would demand a COMMAND after them
    if arguments == ["--completion"]:
        render.print_exact(completion.SCRIPT)
    elif arguments == ["--man"]:
        commands = {name: partial(_load, name) for name in COMMANDS}
        render.print_exact(manual(commands, parser))
    elif not arguments:
        parser.print_help()
        sys.exit(_BAD_INPUT)
    else:
        # ``parse_args`` prints the help, the version or an error, and exits
        parser.parse_args(arguments)


def _general_parser(epilog: str | None) -> ArgumentParser:
    """Return the parser of the general options.

    :param epilog: text at the end of the help; None: none.
    """
    parser = ArgumentParser(
        prog="persistkv",
        usage="persistkv COMMAND [options]",
        description=(
            "Inspect, check, limit and copy persistkv stores, and watch the engines that use them."
        ),
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS)
    parser.add_argument(
        "--version", "-V", action="version", version=f"persistkv {__version__}"
    )
    parser.add_argument(
        _DEBUG,
        action="store_true",
        help="Show log messages and the causes of errors; also allowed after the command.",
    )
    parser.add_argument(
        "--completion",
        action="store_true",
        help='Print completions for your shell: eval "$(persistkv --completion)".',
    )
    parser.add_argument(
        "--man",
        action="store_true",
        help="Print the manual page: persistkv --man | man -l -",
    )
    return parser


def _summaries() -> str:
    """Return the list of all commands, each with the first sentence of its help."""
    # argparse leaves the same margin in the lists of options
    width = shutil.get_terminal_size().columns - 2
    lines = ["commands, each with --help:"]
    for name in COMMANDS:
        sentence = summary(_load(name).function)
        text = " ".join(sentence.split())
        lines.append(filled_behind(f"  {name:<14}", text, width))
    return "\n".join(lines)


def _load(name: str) -> Command:
    """Import the module of a command, and return the command."""
    module, _, attribute = COMMANDS[name].partition(":")
    command: Command = getattr(import_module(module), attribute)
    return command


def _print_causes(error: PersistKVError) -> None:
    """Print the traceback of the error and of the errors that caused it on standard error."""
    text = "".join(traceback.format_exception(error))
    for line in text.splitlines():
        sys.stderr.write(f"{printable(line)}\n")


class _PrintableFormatter(logging.Formatter):
    """Escapes unprintable characters, because messages quote stores and other processes."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join(map(printable, lines))
