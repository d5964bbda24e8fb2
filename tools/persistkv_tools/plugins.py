"""Commands from outside, over the entry points of group ``persistkv.commands``. Each is a typer command function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib.metadata import EntryPoint, entry_points

import typer

from persistkv.errors import PersistKVError

ENTRY_POINT_GROUP = "persistkv.commands"
Command = Callable[..., None]


class BrokenCommandError(PersistKVError):
    """A command is registered and does not import."""


def asked_for(arguments: Sequence[str]) -> str | None:
    """The name of the command in them."""
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def attach_commands(
    app: typer.Typer, arguments: Sequence[str], *, built_in: Collection[str], wrapped: Callable[[Command], Command]
) -> None:
    """Import and attach the command that was asked for; all of them where none was, so that help names them.

    :param wrapped: what all commands have around them.
    """
    asked = asked_for(arguments)
    if asked in built_in:
        return
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in built_in}
    if asked in points:
        points = {asked: points[asked]}
    for name, point in sorted(points.items()):
        app.command(name)(wrapped(_load(point)))


def _load(point: EntryPoint) -> Command:
    try:
        command: Command = point.load()
    except (ImportError, AttributeError) as error:
        return _broken(point, str(error))
    return command


def _broken(point: EntryPoint, problem: str) -> Command:
    """Somebody's broken package must not take the other commands away."""

    def command() -> None:
        raise BrokenCommandError(f"the command {point.name} ({point.value}) does not import: {problem}")

    command.__doc__ = f"(does not import: {problem})"
    return command
