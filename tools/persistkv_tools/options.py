"""Options that several commands share, and opening of stores."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated

import typer

from persistkv.errors import ConfigurationError, StoreUnavailableError
from persistkv.storage import open_inspectable
from persistkv.storage.extensions import InspectableBackend

Url = Annotated[str, typer.Argument(metavar="URL", help="The store, e.g. lmdb:///var/cache/kv", show_default=False)]
Request = Annotated[
    str,
    typer.Argument(metavar="REQUEST", help="The request's id; its first letters are enough.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, sizes in bytes.")]
InNamespace = Annotated[
    str | None,
    typer.Option("--namespace", metavar="ID", help="Only this namespace; the first digits of its id are enough."),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME[=VALUE]", help="Only requests with this label; may be given again."),
]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", metavar="AGE", help="Only requests made longer ago, e.g. 12h or 30d.")
]
NewerThan = Annotated[
    str | None, typer.Option("--newer-than", metavar="AGE", help="Only requests made less long ago, e.g. 12h or 30d.")
]
LargerThan = Annotated[
    str | None, typer.Option("--larger-than", metavar="SIZE", help="Only requests of more raw bytes, e.g. 1GiB.")
]
SmallerThan = Annotated[
    str | None, typer.Option("--smaller-than", metavar="SIZE", help="Only requests of fewer raw bytes, e.g. 1GiB.")
]
NeverHit = Annotated[bool, typer.Option("--never-hit", help="Only requests that nobody used after they were stored.")]
Rate = Annotated[str | None, typer.Option("--rate", metavar="SIZE", help="Read so much a second at most, e.g. 200MiB.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before anything is deleted.")]


def ensure_consent(what: str, url: str, ways: str, *, yes: bool, json: bool) -> None:
    """Require consent to a deletion: an option, or a terminal to ask at.

    :param what: deletes.
    :param ways: options that would do.
    :raises ConfigurationError: neither.
    """
    if not (yes or (sys.stdin.isatty() and not json)):
        raise ConfigurationError(what, url, f"{ways}, where nobody can be asked")


@contextmanager
def opened_if_there(url: str) -> Iterator[InspectableBackend | None]:
    """Open a store read-only for the length of the block; None if that is impossible, because the store is absent or
    for a reason that its creation will report.
    """
    try:
        backend = open_inspectable(url, read_only=True)
    except StoreUnavailableError:
        yield None
        return
    with closing(backend):
        yield backend


@contextmanager
def opened(url: str, *, writable: bool = False) -> Iterator[InspectableBackend]:
    """A store that exists, open for as long as the block runs. No command but ``import`` and ``push`` makes one."""
    with closing(open_inspectable(url, read_only=True)) as backend:
        if not writable:
            yield backend
            return
    with closing(open_inspectable(url)) as backend:
        yield backend
