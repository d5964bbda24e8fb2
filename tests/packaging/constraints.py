"""The files of pinned releases: ``make update-constraints`` writes them, tests compare them with
pyproject.toml.

``python -m tests.packaging.constraints dev`` and ``oldest`` write the releases in this
interpreter's environment to ``constraints-dev.txt`` or ``constraints-oldest.txt``. ``lower-bounds``
prints the oldest allowed releases as pins.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADINGS = {
    "dev": "# The newest releases, for development and CI. The package itself allows ranges.",
    "oldest": "# The oldest releases that pyproject.toml allows, the newest of all others.",
}
EXTRAS_FOR_USERS = ("encryption", "s3", "transformers", "metrics")
CPU_BUILD = "torch"
"""Older releases have no CPU build in the package index: both files pin that of
constraints-dev.txt."""

_PIN = re.compile(r"^([\w.-]+)==([\w.]+)")
_LOWER_BOUND = re.compile(r"^([\w.-]+)>=([\w.]+)$")


def normalized(name: str) -> str:
    return name.lower().replace("_", "-")


def lower_bounds() -> dict[str, str]:
    """Return the oldest allowed release of each package that persistkv or an extra for users
    needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in EXTRAS_FOR_USERS:
        requirements += project["optional-dependencies"][extra]
    bounds = {}
    for requirement in requirements:
        found = _LOWER_BOUND.match(requirement)
        if found is None:
            raise ValueError(f"{requirement}: not a lower bound")
        bounds[normalized(found[1])] = found[2]
    return bounds


def pins(kind: str) -> dict[str, str]:
    """Return the releases in ``constraints-KIND.txt`` by name."""
    found = {}
    for line in (ROOT / f"constraints-{kind}.txt").read_text().splitlines():
        match = _PIN.match(line)
        if match is not None:
            found[normalized(match[1])] = match[2]
    return found


def _write(kind: str) -> None:
    command = [sys.executable, "-m", "pip", "freeze", "--exclude-editable"]
    frozen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [HEADINGS[kind]]
    for line in frozen.splitlines():
        if _PIN.match(line):
            # without the name of a build, such as +cpu
            lines.append(line.partition("+")[0])
    (ROOT / f"constraints-{kind}.txt").write_text("\n".join(lines) + "\n")


def _print_lower_bounds() -> None:
    bounds = [
        f"{name}=={release}"
        for name, release in lower_bounds().items()
        if name != CPU_BUILD
    ]
    sys.stdout.write(" ".join(bounds) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["lower-bounds"]:
        _print_lower_bounds()
    else:
        (chosen,) = sys.argv[1:]
        _write(chosen)
