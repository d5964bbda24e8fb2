"""The same targets under libFuzzer, which keeps inputs that reach new code. Requires ``pip install
atheris``.

    python -m tests.fuzz.guided CORPUS_DIRECTORY [-runs=100000] [-max_total_time=300] [other options
    of libFuzzer]

Failing inputs are written to the temporary directory. To repeat one, pass its path instead of the
corpus directory.

An input is two bytes (the target; its sample, and whether to fix the checksum) and the damaged
bytes. An empty corpus is first filled with the undamaged samples.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["persistkv", "tests.fuzz.targets"]):
    from tests.fuzz.targets import TARGETS


def check(data: bytes) -> None:
    """Check one input."""
    if len(data) < 2:
        return
    target = TARGETS[data[0] % len(TARGETS)]
    number, sealed = divmod(data[1], 2)
    target.check(number % len(target.samples), data[2:], bool(sealed))


def main() -> None:
    options = [
        "-rss_limit_mb=512",
        "-timeout=10",
        "-max_len=65536",
        f"-artifact_prefix={tempfile.gettempdir()}/",
        *sys.argv[1:],
    ]
    for directory in (
        Path(option) for option in sys.argv[1:] if not option.startswith("-")
    ):
        directory.mkdir(parents=True, exist_ok=True)
        if not any(directory.iterdir()):
            _fill(directory)
    logging.disable(logging.CRITICAL)
    atheris.Setup([sys.argv[0], *options], check)
    atheris.Fuzz()


def _fill(directory: Path) -> None:
    for index, target in enumerate(TARGETS):
        for number, sample in enumerate(target.samples):
            for sealed in (0, 1):
                (directory / f"{index}-{number}-{sealed}").write_bytes(
                    bytes((index, 2 * number + sealed)) + sample
                )


if __name__ == "__main__":
    main()
