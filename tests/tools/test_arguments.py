from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import click
import pytest
from click.testing import CliRunner

from persistkv_tools.arguments import Argument, Option, command
from persistkv_tools.commands import COMMANDS, load_command


class Colour(str, enum.Enum):
    RED = "red"
    BLUE = "blue"


def paint(
    wall: Annotated[str, Argument("WALL", "Which one.")],
    others: Annotated[list[str] | None, Argument("[WALL]...", "More of them.")] = None,
    colour: Annotated[Colour, Option(help="Of the paint.")] = Colour.RED,
    coats: Annotated[int, Option("--coats", "-n", min=1, max=3, help="How many.")] = 2,
    share: Annotated[list[float] | None, Option(metavar="SHARE", help="Of the wall.")] = None,
    under_coat: Annotated[bool, Option(help="One below.")] = False,
    sketch: Annotated[Path | None, Option(metavar="FILE", help="To go by.")] = None,
) -> None:
    """Paint walls.

    Example: paint north
    """
    click.echo(repr((wall, others, colour, coats, share, under_coat, sketch)))


def run(*arguments):
    return CliRunner().invoke(command("paint", paint), arguments)


def test_defaults():
    assert run("north").stdout == repr(("north", None, Colour.RED, 2, None, False, None)) + "\n"


def test_all_that_can_be_given():
    options = ("--colour", "blue", "-n", "3", "--share", "0.5", "--share", "1", "--under-coat", "--sketch", "a/b")
    told = run("north", "east", "south", *options).stdout
    assert told == repr(("north", ["east", "south"], Colour.BLUE, 3, [0.5, 1.0], True, Path("a/b"))) + "\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "WALL"),
        (("north", "--colour", "green"), "green"),
        (("north", "--coats", "4"), "4"),
        (("north", "--coats", "many"), "many"),
        (("north", "--share", "half"), "half"),
        (("north", "--no-such-option"), "--no-such-option"),
    ],
)
def test_what_is_wrong_is_named(arguments, part):
    outcome = run(*arguments)
    assert outcome.exit_code == 2
    assert part in outcome.stderr


def test_help_explains_everything():
    shown = run("--help").stdout
    for part in ("WALL [WALL]...", "Which one.", "More of them.", "[red|blue]", "[default: red]", "1<=x<=3", "Example"):
        assert part in shown
    assert "[default: False]" not in shown


def test_a_parameter_that_tells_nothing_is_refused():
    def forgetful(wall: str) -> None:
        """Nothing."""

    with pytest.raises(TypeError, match="wall"):
        command("forgetful", forgetful)


@pytest.mark.parametrize("name", [*COMMANDS])
def test_the_list_of_commands_says_what_each_says_of_itself(name):
    told = " ".join((load_command(name).__doc__ or "").split())
    assert told.startswith(COMMANDS[name].summary)
    assert COMMANDS[name].summary.endswith(".")
