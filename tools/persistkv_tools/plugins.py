"""Commands from outside, over the entry points of group ``persistkv.commands``. Each is a ``click.Command``."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import click

from persistkv.errors import PersistKVError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "persistkv.commands"


class BrokenCommandError(PersistKVError):
    """A command is registered and does not import."""


def names(built_in: Collection[str]) -> list[str]:
    """Those that are registered, sorted.

    :param built_in: names that nobody else can have.
    """
    return sorted(_points().keys() - set(built_in))


def load(name: str) -> click.Command | None:
    """The command of this name; None where there is none. One that does not import says so when it is called."""
    point = _points().get(name)
    if point is None:
        return None
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        return _broken(name, point.value, f"does not import: {error}")
    if not isinstance(found, click.Command):
        return _broken(name, point.value, f"is no click.Command but {type(found).__name__}")
    found.name = name
    return found


def _points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # asks all installed packages: only where no command of ours is meant

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _broken(name: str, where: str, problem: str) -> click.Command:
    """Somebody's broken package must not take the other commands away."""

    def call() -> None:
        raise BrokenCommandError(f"the command {name} ({where}) {problem}")

    return click.Command(name, callback=call, help=f"({problem})")
