"""The ``persistkv`` command.

Exit codes: 0 done; 1 a command found something (see its help); 2 bad input; 3 the store cannot be opened,
reached or written; 130 interrupted (Ctrl-C); 141 the output was closed. With 2 and 3, one line on standard error says
why.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Annotated, Any

import typer

from persistkv import __version__
from persistkv.errors import PersistKVError, ProcessIdInUseError, StoreError, printable

_BAD_INPUT = 2
_STORE_FAILED = 3
_INTERRUPTED = 130
RETRY = 75  # exit code for ``entry``: run the command again in another process (EX_TEMPFAIL)

COMMANDS: dict[str, str] = {
    "ls": "persistkv_tools.inspect.ls:ls",
    "stat": "persistkv_tools.inspect.stat:stat",
    "show": "persistkv_tools.inspect.show:show",
    "top": "persistkv_tools.inspect.top:top",
    "report": "persistkv_tools.inspect.report:report",
    "verify": "persistkv_tools.maintain.verify:verify",
    "prune": "persistkv_tools.maintain.prune:prune",
    "set": "persistkv_tools.maintain.set:set_",
    "pin": "persistkv_tools.maintain.label:pin",
    "unpin": "persistkv_tools.maintain.label:unpin",
    "label": "persistkv_tools.maintain.label:label",
    "warm": "persistkv_tools.maintain.warm:warm",
    "why": "persistkv_tools.inspect.why:why",
    "doctor": "persistkv_tools.inspect.doctor:doctor",
    "export": "persistkv_tools.transfer.export:export",
    "import": "persistkv_tools.transfer.import_:import_",
    "push": "persistkv_tools.transfer.push:push",
    "pull": "persistkv_tools.transfer.push:pull",
    "bench": "persistkv_tools.inspect.bench:bench",
    "replay": "persistkv_tools.inspect.replay:replay_",
    "serve-metrics": "persistkv_tools.inspect.serve_metrics:serve_metrics",
    "demo": "persistkv.integrations.transformers.demo:demo",
}
"""Module and function of each command, in the order of the help. A module is imported when its command runs."""


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the application with the command that ``arguments`` name, or with all commands if they name none."""
    app = typer.Typer(
        name="persistkv",
        help="Look into persistkv stores, check and bound them, carry contexts, and see them at work.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        module, _, function = COMMANDS[name].partition(":")
        app.command(name)(_interruptible(getattr(import_module(module), function)))
    return app


def main(arguments: Sequence[str] | None = None, *, may_retry: bool = False) -> None:
    """Run the command line; always ends by SystemExit.

    :param may_retry: exit with ``RETRY`` if another process uses the store with this process's PID.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    _log_to_stderr()
    try:
        build_app(given)(args=given, prog_name="persistkv")
    except PersistKVError as error:
        if may_retry and isinstance(error, ProcessIdInUseError):
            sys.exit(RETRY)
        typer.echo(f"persistkv: {printable(' '.join(str(error).split()))}", err=True)
        sys.exit(_STORE_FAILED if isinstance(error, StoreError) else _BAD_INPUT)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter())
    logging.basicConfig(handlers=[handler])


class _PrintableFormatter(logging.Formatter):
    """Messages quote stores and other processes."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).splitlines()))


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C must not end with the exit code that means a finding."""

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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Look into persistkv stores, check and bound them, carry contexts, and see them at work."""
