"""The ``persistkv`` command.

Exit codes: 0 done; 1 a command found what it looks for (its help says what); 2 bad input; 3 the store cannot be opened,
reached or written; 130 interrupted (Ctrl-C); 141 nobody reads the output. With 2 and 3, standard error says why.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from persistkv import __version__
from persistkv.errors import PersistKVError, StoreError
from persistkv_tools import arguments, plugins
from persistkv_tools.commands import COMMANDS, load_command

_BAD_INPUT = 2
_STORE_FAILED = 3
_INTERRUPTED = 130
_SHELLS = ("bash", "zsh", "fish")
_MOST_COLUMNS = 120  # of help


class Commands(click.Group):
    """All commands. One is imported when it is asked for; help names the others without."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *plugins.names(COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return arguments.command(cmd_name, load_command(cmd_name))
        return plugins.load(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, listed.summary) for name, listed in COMMANDS.items()]
        others = [plugins.load(name) for name in plugins.names(COMMANDS)]
        rows += [(found.name or "", found.get_short_help_str(_MOST_COLUMNS)) for found in others if found is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> object:
        """Ctrl-C must not end with the exit code that means a finding."""
        try:
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see ``entry``
                signal.signal(signal.SIGINT, signal.default_int_handler)
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            click.echo("persistkv: interrupted", err=True)
            ctx.exit(_INTERRUPTED)


def main(given: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; always ends by SystemExit."""
    try:
        _app().main(args=None if given is None else list(given), prog_name="persistkv")
    except PersistKVError as error:
        click.echo(f"persistkv: {' '.join(str(error).split())}", err=True)
        sys.exit(_STORE_FAILED if isinstance(error, StoreError) else _BAD_INPUT)
    sys.exit()


def _app() -> Commands:
    version = click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_version,
        help="Show the version and exit.",
    )
    completion = click.Option(
        ["--completion"],
        type=click.Choice(_SHELLS),
        is_eager=True,
        expose_value=False,
        callback=_print_completion,
        help='Print what teaches a shell the commands: eval "$(persistkv --completion bash)"',
    )
    return Commands(
        "persistkv",
        params=[version, completion],
        help="Look into persistkv stores, check and bound them, carry contexts, and see them at work.",
        context_settings={"max_content_width": _MOST_COLUMNS},
    )


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"persistkv {__version__}")
        ctx.exit()


def _print_completion(ctx: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is None:
        return
    from click.shell_completion import get_completion_class  # asked for once in a shell's life

    kind = get_completion_class(shell)
    if kind is not None:
        click.echo(kind(ctx.command, {}, "persistkv", "_PERSISTKV_COMPLETE").source())
    ctx.exit()
