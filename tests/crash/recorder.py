"""Builds the library that records what a process asks of the disk, and lets some of it fail (``record.c``)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("record.c")


def find_compiler() -> str | None:
    """A C compiler; None where there is none."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def build_recorder(directory: Path) -> Path:
    """Compile the library that records.

    :raises subprocess.CalledProcessError: it does not compile; the compiler said why on standard error.
    """
    library = directory / "record.so"
    command = [str(find_compiler()), "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library
