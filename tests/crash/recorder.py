"""Build of the recorder, a library that records a process's calls to the disk and lets some fail
(``record.c``)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("record.c")


def find_compiler() -> str | None:
    """Return the path of a C compiler, or None if there is none."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def build_recorder(directory: Path) -> Path:
    """Compile the recorder.

    :raises subprocess.CalledProcessError: compilation failed; the compiler reported the reason on
        standard error.
    """
    library = directory / "record.so"
    command = [
        str(find_compiler()),
        "-O1",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(_SOURCE),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return library
