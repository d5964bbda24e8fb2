"""The ``persistkv`` command.

Exit codes: 0 done; 1 a command found something (see its help); 2 bad input; 3 the store cannot be
opened, reached or written; 130 interrupted (Ctrl-C); 141 the output was closed. With 2 and 3, one
line on standard error says why.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from persistkv import __version__
from persistkv.config import StoreUrl
from persistkv.errors import (
    HostError,
    MissingOptionError,
    PersistKVError,
    ProcessIdInUseError,
    StoreError,
    printable,
)
from persistkv_tools.options import STORE_VARIABLE

_BAD_INPUT = 2
_STORE_FAILED = 3
_INTERRUPTED = 130
_DEBUG = "--debug"
# exit code for ``entry``: run the command again in another process (EX_TEMPFAIL)
RETRY = 75

COMMANDS: dict[str, str] = {
    "ls": "persistkv_tools.inspect.ls:ls",
    "stat": "persistkv_tools.inspect.stat:stat",
    "show": "persistkv_tools.inspect.show:show",
    "top": "persistkv_tools.inspect.top:top",
    "report": "persistkv_tools.inspect.report:report",
    "verify": "persistkv_tools.maintain.verify:verify",
    "prune": "persistkv_tools.maintain.prune:prune",
    "rebuild": "persistkv_tools.maintain.rebuild:rebuild",
    "set": "persistkv_tools.maintain.set:set_",
    "pin": "persistkv_tools.maintain.label:pin",
    "unpin": "persistkv_tools.maintain.label:unpin",
    "label": "persistkv_tools.maintain.label:label",
    "why": "persistkv_tools.inspect.why:why",
    "doctor": "persistkv_tools.inspect.doctor:doctor",
    "copy": "persistkv_tools.transfer.copy:copy",
    "bench": "persistkv_tools.inspect.bench:bench",
    "serve-metrics": "persistkv_tools.inspect.serve_metrics:serve_metrics",
}
"""Module and function of each command, in the order of the help. A module is imported when its
command runs."""


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the application with the command that ``arguments`` name, or with all commands if they
    name none."""
    app = typer.Typer(
        name="persistkv",
        cls=_Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    asked = next(
        (argument for argument in arguments if not argument.startswith("-")), None
    )
    for name in [asked] if asked in COMMANDS else COMMANDS:
        module, _, attribute = COMMANDS[name].partition(":")
        function = getattr(import_module(module), attribute)
        # typer would keep the line ends of the source code
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", getdoc(function) or "")
        app.command(name, cls=_Command, help=text)(_interruptible(function))
    return app


def main(arguments: Sequence[str] | None = None, *, may_retry: bool = False) -> None:
    """Run the command line; always raises SystemExit, with an exit code from the list of this
    module.

    :param may_retry: exit with ``RETRY`` (75) if another process uses the store with this process's
        PID, so that the caller can run the command in another process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    debug = _DEBUG in given  # accepted before and after the command
    given = [argument for argument in given if argument != _DEBUG]
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter())
    logging.basicConfig(
        handlers=[handler], level=logging.DEBUG if debug else logging.WARNING
    )
    try:
        build_app(given)(args=given, prog_name="persistkv")
    except PersistKVError as error:
        if debug:
            typer.echo(
                "\n".join(
                    map(
                        printable,
                        "".join(traceback.format_exception(error)).splitlines(),
                    )
                ),
                err=True,
            )
        if may_retry and isinstance(error, ProcessIdInUseError):
            sys.exit(RETRY)
        typer.echo(f"persistkv: {printable(' '.join(str(error).split()))}", err=True)
        sys.exit(
            _STORE_FAILED if isinstance(error, (StoreError, HostError)) else _BAD_INPUT
        )


def _without_types(params: list[Any]) -> list[Any]:
    """Return the parameters, with no type shown for flags: ``<bool>`` would look like a value that
    is needed."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Command(TyperCommand):
    """A command whose store argument may be left out if the variable ``PERSISTKV_STORE`` is set.

    The parser alone would take the next argument for the store. Here, only a URL or a path that
    begins with ``/`` or ``~`` is a store.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        arguments = [
            param for param in self.params if param.param_type_name == "argument"
        ]
        self._store = next(
            (param for param in arguments if param.envvar == STORE_VARIABLE), None
        )
        if self._store is not None:
            self._is_needed = self._store.required
            self._store.required = False  # in the help, too
            self._is_last = len(arguments) > 1 and self._store is arguments[-1]
            self._others = [param.name for param in arguments if param.required]

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # completion: bash breaks words at colons
            args = "\n".join(args).replace("\n:\n//", "://").splitlines()
        if self._store is not None:
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
            store, default = given.get(self._store.name), os.environ.get(STORE_VARIABLE)
            is_store = isinstance(store, str) and (
                "://" in store or store.startswith(("/", "~"))
            )
            if default and not (
                is_store
                and all(isinstance(given.get(name), str) for name in self._others)
            ):
                args = [*args, default] if self._is_last else [default, *args]
            elif not (is_store or given.get("help") or ctx.resilient_parsing):
                if isinstance(store, str):
                    StoreUrl.parse(store)
                elif self._is_needed:
                    raise MissingOptionError(
                        str(self.name),
                        f"a store: a URL, a path, or the variable {STORE_VARIABLE}",
                    )
        return super().parse_args(ctx, args)


class _PrintableFormatter(logging.Formatter):
    """Escapes unprintable characters, because messages quote stores and other processes."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).splitlines()))


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with exit code 130 for Ctrl-C: without this, it would be 1, which means a
    finding."""

    @wraps(command)
    def run(*args: object, **options: object) -> None:
        try:
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see ``entry``
                signal.signal(signal.SIGINT, signal.default_int_handler)
            command(*args, **options)
        except (KeyboardInterrupt, typer.Abort):
            typer.echo("persistkv: interrupted", err=True)
            raise typer.Exit(_INTERRUPTED) from None

    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"persistkv {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            _DEBUG,
            help="Show log messages and the causes of errors; also allowed after the command.",
        ),
    ] = False,
) -> None:
    """Inspect, check, limit and copy persistkv stores, and watch the engines that use them."""
