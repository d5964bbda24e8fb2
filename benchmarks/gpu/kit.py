"""Wheels for a machine with a GPU and without access to a package index.

The machine has Python 3.12, PyTorch and the packages in ``present.txt``. The kit has all other
requirements of persistkv and its tests, and persistkv's own wheel for its entry points (the code
comes from the source tree).

    python -m benchmarks.gpu.kit DIRECTORY    collect the wheels
    python -m benchmarks.gpu.kit --check      check them on that machine
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

MAX_BYTES = 60 << 20  # 60 MiB: limit for a transfer together with the source tree

_ROOT = Path(__file__).parents[2]
_PRESENT = Path(__file__).with_name("present.txt")
_NEEDED = (
    "persistkv[s3,transformers,metrics]",
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "psutil",
    "moto[s3]",
    "flask",
    "flask-cors",
)
_PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
_ENVIRONMENT = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.12.3",
    "python_version": "3.12",
    "sys_platform": "linux",
}


class Package(NamedTuple):
    """A package in the kit or on the machine."""

    version: Version | None
    """None if unknown."""
    requires: tuple[Requirement, ...] = ()


def problems(
    needed: Iterable[Requirement],
    packages: Mapping[str, Package],
) -> dict[str, str]:
    """Return the missing and unsuitable packages by name, with the reasons.

    :param packages: packages by canonical name.
    """
    found: dict[str, str] = {}
    todo = [(requirement, "the tests and benchmarks") for requirement in needed]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement, wanted_by = todo.pop()
        name = canonicalize_name(requirement.name)
        package = packages.get(name)
        if package is None:
            found[name] = f"{requirement} is missing; required by {wanted_by}"
            continue
        if package.version is not None and not requirement.specifier.contains(
            package.version, prereleases=True
        ):
            found[name] = (
                f"{name} {package.version} is not {requirement}; required by {wanted_by}"
            )
        extras = frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        todo += [(part, name) for part in package.requires if _applies(part, extras)]
    return found


def read_present(path: Path) -> dict[str, Package]:
    """Return the packages of the machine, from lines of ``name`` or ``name==version``; ``#`` starts
    a comment."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return {
        canonicalize_name(name): Package(Version(version) if version else None)
        for name, _, version in (line.partition("==") for line in lines if line)
    }


def read_wheels(directory: Path) -> dict[str, Package]:
    """Return the packages of the wheels in a directory.

    :raises ValueError: the directory has two versions of one package, which pip refuses to install.
    """
    packages: dict[str, Package] = {}
    for path in sorted(directory.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            member = next(
                name
                for name in wheel.namelist()
                if name.endswith(".dist-info/METADATA")
            )
            headers = HeaderParser().parsestr(wheel.read(member).decode())
        name = canonicalize_name(headers["Name"])
        if name in packages:
            raise ValueError(f"{directory} has two versions of {name}")
        requires = tuple(map(Requirement, headers.get_all("Requires-Dist") or ()))
        packages[name] = Package(Version(headers["Version"]), requires)
    return packages


def read_installed() -> dict[str, Package]:
    """Return the packages of this interpreter."""
    packages: dict[str, Package] = {}
    for distribution in metadata.distributions():
        requires = tuple(map(Requirement, distribution.requires or ()))
        name = canonicalize_name(distribution.metadata["Name"])
        # the first on sys.path is used
        packages.setdefault(name, Package(Version(distribution.version), requires))
    return packages


def collect(directory: Path) -> None:
    """Replace the directory's content with the wheels that the machine lacks.

    :raises SystemExit: the wheels exceed the size limit, or a requirement is not met.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    _pip("wheel", "--no-deps", "--wheel-dir", str(directory), str(_ROOT))
    present = read_present(_PRESENT)
    needed = list(map(Requirement, _NEEDED))
    while True:
        open_ones = problems(needed, present | read_wheels(directory))
        missing = sorted(
            name for name in open_ones if name not in read_wheels(directory)
        )
        if not missing:
            break
        platforms = [
            option for platform in _PLATFORMS for option in ("--platform", platform)
        ]
        target = [
            "--python-version",
            "3.12",
            "--implementation",
            "cp",
            "--only-binary=:all:",
            *platforms,
        ]
        constraints = ["--constraint", str(_ROOT / "constraints-dev.txt")]
        _pip(
            "download",
            "--no-deps",
            *target,
            *constraints,
            "--dest",
            str(directory),
            *missing,
        )
    if open_ones:
        raise SystemExit("\n".join(open_ones.values()))
    size = check_size(directory)
    wheels = read_wheels(directory)
    for name, package in sorted(wheels.items()):
        print(f"{name} {package.version}")
    print(
        f"{len(wheels)} wheels, {size / 2**20:.1f} of at most {MAX_BYTES / 2**20:.0f} MiB, in "
        f"{directory}"
    )


def check_size(directory: Path) -> int:
    """Return the bytes of a kit.

    :raises SystemExit: they exceed ``MAX_BYTES``.
    """
    size = sum(path.stat().st_size for path in directory.iterdir())
    if size > MAX_BYTES:
        raise SystemExit(
            f"{directory} has {size / 2**20:.1f} MiB; the limit is {MAX_BYTES / 2**20:.0f} MiB"
        )
    return size


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(
        requirement.marker.evaluate({**_ENVIRONMENT, "extra": extra})
        for extra in (extras or {""})
    )


def _pip(*arguments: str) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "--disable-pip-version-check",
            *arguments,
        ],
        check=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument(
        "--check", action="store_true", help="check the packages of this interpreter"
    )
    arguments = parser.parse_args()
    if not arguments.check:
        if arguments.directory is None:
            parser.error("a directory is needed")
        collect(arguments.directory)
        return
    found = problems(map(Requirement, _NEEDED), read_installed())
    print("\n".join(found.values()) or "all requirements are installed")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
