"""Options that several commands share: opening stores, choosing requests, and the view of a
request."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from persistkv.errors import (
    FileError,
    MissingOptionError,
    PersistKVError,
    StoreUnavailableError,
)
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.inspection.adoptions import AdoptionView
from persistkv.storage.inspection.requests import short_id
from persistkv_tools import render

_NAMED_AT_MOST = 5
_SHORT = 8  # characters of an id in tables
_COMPLETIONS = 100
_AT_ONCE = 256

STORE_VARIABLE = "PERSISTKV_STORE"
"""Environment variable with the URL of the store for commands that are given no URL."""
_STORE_HELP = "URL, e.g. lmdb:///var/cache/kv, or path of an LMDB store."
Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", help=_STORE_HELP, envvar=STORE_VARIABLE, show_default=False
    ),
]


def _complete_request(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return completions for the shell: full ids that begin with the text, or else short ids; with
    age and labels."""
    try:
        with opened(ctx.params.get("url") or ctx.params.get("source") or "") as backend:
            found = [
                (
                    name,
                    f"{render.format_age(manifest.created)} ago, {manifest.tokens:,} tokens "
                    f"{labels}".strip(),
                )
                for space in backend.namespaces()
                for manifest in backend.catalogue(space.id).manifests()
                for name in (manifest.id, short_id(manifest.id))
                for labels in [render.format_labels(manifest.labels)]
                if name.startswith(incomplete)
            ]
    except PersistKVError:
        return []
    long = [one for one in found if len(one[0]) != _SHORT]
    return sorted(long or found)[:_COMPLETIONS]


def _only(name: str, metavar: str | None, requests: str) -> Any:
    return typer.Option(name, metavar=metavar, help=f"Only requests {requests}.")


_ID_HELP = "Id of the request, or its first characters."
_IDS_HELP = "Ids of requests, or their first characters."
RequestId = Annotated[
    str,
    typer.Argument(
        metavar="REQUEST",
        help=_ID_HELP,
        show_default=False,
        autocompletion=_complete_request,
    ),
]
RequestIds = Annotated[
    list[str] | None,
    typer.Argument(metavar="REQUEST", help=_IDS_HELP, autocompletion=_complete_request),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; sizes in bytes.")
]
InNamespace = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="ID",
        help="Only this namespace: its id, or the first digits.",
    ),
]
Labels = Annotated[
    list[str] | None,
    _only("--label", "NAME[=VALUE]", "with this label; can be repeated"),
]
OlderThan = Annotated[
    str | None, _only("--older-than", "AGE", "older than this, e.g. 12h or 30d")
]
NewerThan = Annotated[
    str | None, _only("--newer-than", "AGE", "younger than this, e.g. 12h or 30d")
]
LargerThan = Annotated[
    str | None, _only("--larger-than", "SIZE", "with more raw bytes, e.g. 1GiB")
]
SmallerThan = Annotated[
    str | None, _only("--smaller-than", "SIZE", "with fewer raw bytes, e.g. 1GiB")
]
NeverHit = Annotated[
    bool, _only("--never-hit", None, "that were never used after they were stored")
]
Rate = Annotated[
    str | None,
    typer.Option(
        "--rate", metavar="SIZE", help="Read at most this much per second, e.g. 200MiB."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def show_adoptions(found: Iterable[AdoptionView]) -> None:
    """Print one line for each verdict of a namespace about that of another engine release."""
    for one in found:
        error = f"error {one.error:.2g}, limit {one.limit:.2g}"
        if one.verdict == "adopted":
            depths = " and ".join(map(str, one.depths))
            text = (
                f"uses the first {depths} blocks of the contexts in namespace "
                f"{one.theirs[:8]}, of another release"
            )
        else:
            text = f"does not use namespace {one.theirs[:8]}, of another release: a block differed"
        render.say(f"namespace {one.ours[:8]} {text} ({error})")


def ensure_consent(what: str, ways: str, *, yes: bool, json: bool) -> None:
    """Raise an error if the user has not consented (``yes``) and cannot be asked. Does not ask.

    :param what: command that needs consent, for the error.
    :param ways: options that give consent, for the error.
    """
    if not (yes or (sys.stdin.isatty() and not json)):
        raise MissingOptionError(
            what, f"{ways}: it cannot ask without a terminal, or with --json"
        )


def write_file(path: Path, content: bytes) -> None:
    """Write a file, which is replaced atomically."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise FileError("write", path, error) from None


@contextmanager
def open_if_exists(url: str) -> Iterator[Backend | None]:
    """Open a store read-only until the ``with`` statement ends.

    Yield None if it is absent or cannot be opened; in the latter case, opening it for writing
    reports the reason.
    """
    try:
        backend = open_backend(url, read_only=True)
    except StoreUnavailableError:
        yield None
        return
    with closing(backend):
        yield backend


@contextmanager
def opened(url: str, *, writable: bool = False) -> Iterator[Backend]:
    """Open an existing store, read-only unless ``writable``, until the ``with`` statement ends.

    :raises StoreUnavailableError: there is no store (none is created), or it cannot be reached.
    """
    with closing(open_backend(url, read_only=True)) as backend:
        if not writable:
            yield backend
            return
    with closing(open_backend(url)) as backend:
        yield backend
