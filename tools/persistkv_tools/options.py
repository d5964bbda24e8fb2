"""Stores and files that commands open, and output that several commands share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from persistkv.errors import FileError, StoreUnavailableError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.inspection.adoptions import AdoptionView
from persistkv_tools import render


def show_adoptions(found: Iterable[AdoptionView]) -> None:
    """Print one line for each verdict of a namespace about that of another engine release."""
    for adoption in found:
        ours = adoption.ours[:8]
        theirs = adoption.theirs[:8]
        text = f"does not use namespace {theirs}, of another release: a block differed"
        if adoption.verdict == "adopted":
            depths = " and ".join(map(str, adoption.depths))
            text = (
                f"uses the first {depths} blocks of the contexts in namespace {theirs}, of another "
                f"release"
            )
        error = f"error {adoption.error:.2g}, limit {adoption.limit:.2g}"
        render.say(f"namespace {ours} {text} ({error})")


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically. A device or pipe, which must not be replaced, is written to.

    :raises FileError: it cannot be written. The old content stays; a ``.part`` file may be left.
    """
    # write next to the file, because a rename is atomic only within one file system
    part = path.with_name(path.name + ".part")
    try:
        # a rename would replace a device or pipe by a file
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
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
    # outside of the ``try`` block, which would catch errors of the caller's ``with`` block
    with closing(backend):
        yield backend


@contextmanager
def opened(url: str) -> Iterator[Backend]:
    """Open an existing store read-only until the ``with`` statement ends.

    :raises StoreUnavailableError: there is no store (none is created), or it cannot be reached.
    """
    with closing(open_backend(url, read_only=True)) as backend:
        yield backend
