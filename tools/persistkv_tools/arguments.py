"""Commands out of functions: an annotation of each parameter says what it is on the command line.

Click does the work. (Typer reads such annotations too, but converts what was given with pydantic, whose import alone
takes as much of a processor as all that ``ls`` does.)
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import click


class Argument(NamedTuple):
    """What is told by its place."""

    metavar: str
    help: str


class Option:
    """What is told by name. A flag where the parameter is a ``bool``, given again and again where it is a list.

    :param names: as they are written; the parameter's own, with dashes, where there are none.
    :param metavar: what the help calls its value.
    :param min: the least number.
    """

    def __init__(
        self,
        *names: str,
        help: str,
        metavar: str | None = None,
        min: int | None = None,
        max: int | None = None,
    ) -> None:
        self.names = names
        self.help = help
        self.metavar = metavar
        self.min = min
        self.max = max


class FunctionCommand(click.Command):
    """A command whose help explains its arguments as well."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        told = [(param.make_metavar(ctx), param.about) for param in self.params if isinstance(param, _ToldArgument)]
        if told:
            with formatter.section("Arguments"):
                formatter.write_dl(told)
        super().format_options(ctx, formatter)


class _ToldArgument(click.Argument):
    about: str = ""


class _Parameter(NamedTuple):
    """One parameter of a function."""

    name: str
    kind: Any
    """What it takes one of, ``None`` and lists left out."""
    many: bool
    told: Argument | Option
    default: Any
    required: bool

    def converted(self, value: Any) -> Any:
        """What the function is called with."""
        if self.many:
            return list(value) or None
        if value is not None and isinstance(self.kind, type) and issubclass(self.kind, enum.Enum):
            return self.kind(value)
        return value

    def param(self) -> click.Parameter:
        """For click."""
        default = self.default.value if isinstance(self.default, enum.Enum) else self.default
        if isinstance(self.told, Argument):
            made = _ToldArgument(
                [self.name],
                type=_param_type(self.kind),
                required=self.required,
                nargs=-1 if self.many else 1,
                metavar=self.told.metavar,
                **({} if default is None else {"default": default}),
            )
            made.about = self.told.help
            return made
        names = self.told.names or ("--" + self.name.replace("_", "-"),)
        return click.Option(
            [self.name, *names],
            type=None if self.kind is bool else _param_type(self.kind, self.told.min, self.told.max),
            is_flag=self.kind is bool or None,  # None: as click decides it where nobody says
            multiple=self.many,
            required=self.required,
            help=self.told.help,
            metavar=self.told.metavar or ("N" if self.kind is int else None),
            show_default=True,
            **({} if default is None else {"default": default}),
        )


def command(name: str, function: Callable[..., None]) -> FunctionCommand:
    """The command that calls a function. Its help is the function's docstring.

    :raises TypeError: a parameter has no ``Option`` or ``Argument`` in its annotation.
    """
    parameters = list(_parameters(function))

    @wraps(function)
    def call(**given: Any) -> None:
        function(**{parameter.name: parameter.converted(given[parameter.name]) for parameter in parameters})

    params = [parameter.param() for parameter in parameters]
    return FunctionCommand(name, callback=call, params=params, help=inspect.getdoc(function))


def _parameters(function: Callable[..., None]) -> list[_Parameter]:
    hints = get_type_hints(function, include_extras=True)
    found = []
    for parameter in inspect.signature(function).parameters.values():
        hint, *told = get_args(hints[parameter.name]) if get_origin(hints[parameter.name]) is Annotated else (None,)
        if len(told) != 1 or not isinstance(told[0], (Argument, Option)):
            raise TypeError(f"{function.__name__}: {parameter.name} is annotated with no Option and no Argument")
        kind, many = _kind(hint)
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        found.append(_Parameter(parameter.name, kind, many, told[0], default, required))
    return found


def _kind(hint: Any) -> tuple[Any, bool]:
    """What a hint takes one of, and whether it takes several: ``list[str] | None`` takes several ``str``."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    return (get_args(hint)[0], True) if get_origin(hint) is list else (hint, False)


def _param_type(kind: Any, least: int | None = None, most: int | None = None) -> Any:
    if kind is int and (least is not None or most is not None):
        return click.IntRange(least, most)
    if kind is Path:
        return click.Path(path_type=Path)
    if issubclass(kind, enum.Enum):
        return click.Choice([member.value for member in kind])
    return kind
